"""Ranges are there while somebody profiles, and an engine that isn't profiled is what it was."""

import warnings
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

import tiny_models
from engine_runs import greedy, make_llm
from pico_vllm.engine.core_client import ProcessCoreClient
from pico_vllm.errors import ConfigError
from pico_vllm.profiling.capture import capture
from pico_vllm.profiling.load import Load, LoadRun
from pico_vllm.profiling.ranges import engine_ranges

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2")
    tiny_models.save_tiny_model(tiny_models.MODELS["qwen2-gqa6-d64-tied"], directory)
    return directory


@pytest.fixture
def llm(checkpoint):
    return make_llm(checkpoint)


class Marks:
    """A mark that notes what was opened and in what."""

    def __init__(self):
        self.open, self.seen = [], []

    @contextmanager
    def __call__(self, name):
        self.seen.append("/".join([*self.open, name]).replace("pico.", ""))
        self.open.append(name)
        yield
        self.open.pop()


def instance_dicts(engine):
    """Every attribute of the objects that ranges touch, by identity."""
    core = engine.core
    runner = core.executor.runner
    owners = [
        engine,
        engine._outputs,
        core,
        core.scheduler,
        core.structured_output,
        core.executor,
        runner,
        runner._rows,
    ]
    state = [{name: id(value) for name, value in vars(owner).items() if callable(value)} for owner in owners]
    return (
        state,
        [id(getattr(runner, name)) for name in ("backend", "_model", "_sampler")],
        [id(layer) for layer in runner._model.layers],
    )


def test_the_engine_has_the_same_functions_before_and_after(llm):
    """So what isn't profiled costs nothing: no wrapper and no flag is left, or was ever there."""
    before = instance_dicts(llm.engine)
    with engine_ranges(llm.engine, Marks()):
        assert instance_dicts(llm.engine) != before
        llm.generate([PROMPTS[0]], greedy(2))
    assert instance_dicts(llm.engine) == before
    engine, core = llm.engine, llm.engine.core
    for owner, name in (
        (engine, "step"),
        (core, "_take_in"),
        (core.scheduler, "schedule"),
        (core.executor.runner, "start"),
        (core.executor.runner, "sample"),
        (core.executor.runner, "finish"),
        (core.executor.runner._rows, "build"),
        (engine._outputs, "process"),
    ):
        assert getattr(owner, name).__func__ is getattr(type(owner), name), name


def test_they_are_gone_after_an_error_too(llm):
    before = instance_dicts(llm.engine)
    with pytest.raises(ZeroDivisionError), engine_ranges(llm.engine, Marks()):
        raise ZeroDivisionError
    assert instance_dicts(llm.engine) == before


def test_profiled_tokens_are_the_same(llm):
    plain = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy(4))]
    with engine_ranges(llm.engine, Marks()):
        profiled = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy(4))]
    assert profiled == plain


def test_phases_layers_and_ops_nest_as_the_step_runs(llm):
    marks = Marks()
    with engine_ranges(llm.engine, marks) as log:
        llm.generate([PROMPTS[0]], greedy(2))
    seen = Counter(marks.seen)
    assert seen["step"] == 2
    for phase in ("schedule", "forward", "sample", "wait", "update", "output"):
        assert seen[f"step/phase.{phase}"] == 2, phase
    assert seen["step/phase.forward/phase.build inputs"] >= 2
    assert [seen[f"step/phase.forward/layer.{i}"] for i in range(3)] == [2, 2, 2]
    assert seen["step/phase.forward/layer.0/op.gated_linear 384 x 2 x 160"] == 2
    assert seen["step/phase.sample/op.greedy"] == 2
    ops = [name for name in marks.seen if "/op." in name]
    assert len(log.costs) == len(ops) and len(log.plans) == 2


def test_with_overlap_each_step_is_logged_once(checkpoint):
    llm = make_llm(checkpoint, async_scheduling=True)
    marks = Marks()
    with engine_ranges(llm.engine, marks) as log:
        llm.generate(PROMPTS, greedy(4))
    assert len(log.plans) == Counter(marks.seen)["step/phase.wait"] == 4


def test_replayed_passes_stay_in_use(llm):
    """A runner that replays takes another backend for a reason to stop: it keeps its own."""
    runner = llm.engine.core.executor.runner
    runner._graphs, backend = object(), runner.backend
    with engine_ranges(llm.engine, Marks()):
        assert runner.backend is backend
        assert runner._model.layers[0] is not None
    runner._graphs = None
    with engine_ranges(llm.engine, Marks()):
        assert runner.backend is not backend
    assert runner.backend is backend


def test_a_core_in_another_process_is_refused(llm):
    llm.engine.core = object.__new__(ProcessCoreClient)
    with pytest.raises(ConfigError, match="engine_core_process"), engine_ranges(llm.engine, Marks()):
        pass
    del llm.engine.core


def test_ranges_can_be_nvtx_ranges(llm, monkeypatch):
    """Without a GPU torch has no NVTX: what it would be told is looked at."""
    pushed = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", pushed.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: pushed.append("pop"))
    with engine_ranges(llm.engine, torch.cuda.nvtx.range):
        llm.generate([PROMPTS[0]], greedy(1))
    assert pushed[:3] == ["pico.step", "pico.phase.schedule", "pop"]
    assert pushed.count("pop") * 2 == len(pushed) and "pico.layer.2" in pushed


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_gpu_of_which_nothing_was_recorded_is_told(llm, tmp_path, monkeypatch):
    """Its trace has ops of the host alone: they must not pass for the GPU's kernels."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(llm.engine.core.executor.runner, "device", torch.device("cuda", 0))
    with pytest.raises(ConfigError, match="nothing of the GPU was recorded"):
        capture(llm.engine, Load(input_len=7, output_len=1, concurrency=1), tmp_path / "trace.json.gz")


def test_torchs_warning_of_one_cycle_is_not_shown_and_others_are(llm, tmp_path, monkeypatch):
    """As torch 2.10 to 2.12 give it whenever a profile begins."""
    start = torch.profiler.profile.start

    def warn_and_start(profiler):
        warnings.warn("Warning: Profiler clears events at the end of each cycle.Only events …", stacklevel=2)
        warnings.warn("something else", stacklevel=2)
        start(profiler)

    monkeypatch.setattr(torch.profiler.profile, "start", warn_and_start)
    with pytest.warns(UserWarning) as shown:
        capture(llm.engine, Load(input_len=7, output_len=1, concurrency=1), tmp_path / "trace.json.gz")
    assert [str(warning.message) for warning in shown] == ["something else"]


# ------------------------------------------------------------------------------------------------------------- load
def run_of(llm, **options):
    return LoadRun(llm.engine, Load(**({"input_len": 7, "output_len": 3, "concurrency": 2} | options)), 0)


def test_without_a_number_of_steps_one_burst_runs_to_its_end(llm):
    run = run_of(llm)
    assert len(list(run.steps())) == 3  # both prompts in the first
    assert llm.engine.num_unfinished_requests == 0
    assert llm.engine.stats.num_output_tokens == 6


def test_with_a_number_of_steps_requests_are_replaced(llm):
    run = run_of(llm, num_steps=8)
    assert len(list(run.steps())) == 8
    assert llm.engine.stats.num_output_tokens == 16
    run.end()
    assert not llm.engine.has_unfinished_requests()


def test_skipped_steps_are_not_among_the_others(llm):
    run = run_of(llm, skip_steps=1)
    run.skip()
    assert len(list(run.steps())) == 2


def test_skipping_everything_is_refused(llm):
    run = run_of(llm, skip_steps=3)
    with pytest.raises(ConfigError, match="nothing was recorded: the requests have ended within --skip=3 steps"):
        run.skip()


def test_another_run_has_other_prompts(llm):
    prompts = []
    add = llm.engine.add_request
    llm.engine.add_request = lambda name, prompt, params: (prompts.append(tuple(prompt)), add(name, prompt, params))
    for index in (0, 1, 0):
        list(LoadRun(llm.engine, Load(7, 1, 1), index).steps())
    assert prompts[0] == prompts[2] != prompts[1]
    assert all(len(prompt) == 7 for prompt in prompts)
