"""What the worker measures at its start, on a CPU: the same passes, a meter of numbers and `rerun` as capture."""

import dataclasses
from functools import partial

import pytest
import torch

import tiny_models
from engine_runs import greedy, make_llm
from pico_vllm.config import EngineConfig
from pico_vllm.errors import ConfigError
from pico_vllm.kernels.backend import recording
from pico_vllm.kernels.decode_inputs import fill_decode_inputs_reference
from pico_vllm.worker import cuda_graph, model_runner, start_probe
from pico_vllm.worker.cuda_graph import CudaGraphRunner, rerun
from pico_vllm.worker.dummy_steps import DummySteps
from pico_vllm.worker.memory_budget import MARGIN_BYTES
from pico_vllm.worker.mixed_inputs import MixedSize
from pico_vllm.worker.start_probe import TRIAL_BLOCKS, StartProbe

MIB = 1 << 20
VOCAB_SIZE = tiny_models.VOCAB_SIZE


class Meter:
    """Says what it is told, in MiB, and keeps what it was asked."""

    def __init__(self, used, peak, total=8192):
        self.total = total * MIB
        self._used, self._peak = iter(used), peak
        self.calls = []

    def used(self):
        self.calls.append("used")
        return next(self._used) * MIB

    def reset_peak(self):
        self.calls.append("reset_peak")

    def peak(self):
        self.calls.append("peak")
        return self._peak * MIB


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("probe")
    tiny_models.save_tiny_model(tiny_models.MODELS["qwen2-gqa3-d128-untied"], directory)
    return directory


@pytest.fixture
def runner(checkpoint):
    return make_llm(checkpoint).engine.core.executor.runner


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr(cuda_graph, "DECODE_SIZES", (1, 2, 4, 8))
    monkeypatch.setattr(cuda_graph, "PROMPT_SIZES", (8, 16, 32))
    monkeypatch.setattr(cuda_graph, "MIXED_SIZES", (16, 32))
    monkeypatch.setattr(cuda_graph, "MIXED_DECODES", (8,))


def make_probe(runner, backend=None, **limits):
    defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 100, "max_model_len": 64, "block_size": 16}
    backend = backend or runner.backend
    runner.set_backend(backend)
    return StartProbe(runner._model, backend, group=runner.group, device=runner.device, **(defaults | limits))


def captures(runner, kv_caches, record, *, trial=False):
    return CudaGraphRunner(
        runner._model,
        kv_caches,
        block_table_rows=runner._rows.block_table_rows,
        last_token_ids=runner._rows.last_token_ids,
        max_num_seqs=16,
        max_num_batched_tokens=100,
        max_model_len=64,
        block_size=16,
        fill_decode_inputs=fill_decode_inputs_reference,
        ring=runner._ring,
        record=record,
        trial=trial,
    )


@torch.inference_mode()
def measure(runner, meter, *, captured=True, **limits):
    caches = runner._new_caches(TRIAL_BLOCKS, 16)
    trial = partial(captures, runner, caches, trial=True) if captured else None
    return make_probe(runner, **limits).memory_budget(
        meter, caches, runner._rows, utilization=0.5, weights=300 * MIB, trial_captures=trial, recorder=lambda: rerun
    )


def test_everything_that_was_measured_is_put_aside(runner):
    # After the pass 700 are in use, at its peak 1200; captures leave 720, 800, 830, 834; the end is given back.
    meter = Meter(used=[700, 720, 800, 830, 834, 700], peak=1200)
    budget = measure(runner, meter)
    assert meter.calls == ["reset_peak", "peak", *["used"] * 6]
    assert (budget.weights, budget.other) == (300 * MIB, 400 * MIB)
    assert budget.activations == 500 * MIB
    assert budget.graphs == (110 + 4 * 7) * MIB  # 9 captures; two of them were measured with their pools
    assert budget.tables == 9 * 16 * VOCAB_SIZE
    assert budget.kv_cache == 4096 * MIB - 700 * MIB - 500 * MIB - 138 * MIB - 9 * 16 * VOCAB_SIZE - MARGIN_BYTES


def test_the_runner_plans_with_its_own_caches_and_captures(runner, monkeypatch, caplog):
    """As on a GPU, but for the meter and what captures."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300 * MIB)
    monkeypatch.setattr(model_runner, "Capturing", lambda stream: rerun)
    monkeypatch.setattr(runner, "_captures", lambda config: True)
    seen = []

    def capture(config, kv_caches, record, *, trial):
        seen.append(({len(cache) for cache in kv_caches}, trial))
        return captures(runner, kv_caches, record, trial=trial)

    monkeypatch.setattr(runner, "_capture", capture)
    caplog.set_level("INFO", logger="pico_vllm.worker.model_runner")
    meter = Meter(used=[700, 720, 800, 830, 834, 700], peak=1200)
    budget = runner._plan_memory(EngineConfig.from_options(gpu_memory_utilization=0.25), make_probe(runner), meter)
    assert seen == [({TRIAL_BLOCKS}, True)]
    assert (budget.usable, budget.weights, budget.graphs) == (2048 * MIB, 300 * MIB, (110 + 4 * 7) * MIB)
    assert f"memory of cpu: {budget}" in caplog.text


def test_without_captures_nothing_is_put_aside_for_them(runner):
    meter = Meter(used=[700], peak=1200)
    assert measure(runner, meter, captured=False).graphs == 0
    assert meter.calls == ["reset_peak", "peak", "used"]


def test_a_pass_that_freed_more_than_it_took_needs_nothing(runner):
    assert measure(runner, Meter(used=[700], peak=600), captured=False).activations == 0


def test_a_pass_that_does_not_fit_is_a_config_error(runner, monkeypatch):
    def refuse(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")

    monkeypatch.setattr(runner._model.__class__, "hidden_rows", refuse)
    with pytest.raises(ConfigError) as error:
        measure(runner, Meter(used=[700], peak=1200), captured=False)
    message = str(error.value)
    assert "max_num_batched_tokens=100" in message and "max_num_seqs=16" in message and "\n" not in message


def test_a_trial_captures_the_largest_of_each_kind_and_one_more(runner):
    recorded = []

    def record(run, run_shallow):
        results = run()
        recorded.append(len(results[0]))
        return results, lambda: None

    with torch.inference_mode():
        graphs = captures(runner, runner.kv_caches, record, trial=True)
        assert (recorded, graphs.num_captures) == ([8, 16, 8], 9)  # wanted rows: of 8 decodes, and of 8 prompts
        assert (list(graphs._decodes), list(graphs._mixed)) == ([(8, 64)], [(32, 8), (8, 0)])
        assert captures(runner, runner.kv_caches, rerun).num_captures == 9


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "context"),
    [(100, 16, 64), (100, 1, 64), (5, 16, 64), (1, 1, 64), (17, 16, 2)],
)
def test_the_fullest_step_has_all_tokens_and_a_decode_of_all_sequences_but_one(num_tokens, num_seqs, context):
    steps = DummySteps(64, 3, 16, torch.device("cpu"))
    batch = steps.fullest(num_tokens, num_seqs, num_logits=256, context=context)
    assert len(batch.input_ids) == len(batch.positions) == num_tokens == int(batch.query_start_loc[-1])
    assert batch.num_decode_reqs == min(num_seqs, num_tokens) - 1
    assert len(batch.logits_indices) == 256 and int(batch.logits_indices.max()) < num_tokens
    query_lens = batch.query_start_loc.diff()
    assert (query_lens[: batch.num_decode_reqs] == 1).all() and int(query_lens.min()) > 0
    assert int(batch.positions.max()) == context - 1 and int(batch.positions.min()) >= 0
    assert (batch.slot_mapping == -1).all() and int(batch.block_tables.max()) < 3
    assert batch.max_query_len == int(query_lens.max()) and batch.max_seq_len == 64


def test_the_fullest_step_writes_nothing_and_samples_as_many_rows_as_can_run(runner):
    seen = {}
    backend = recording(runner.backend, lambda op, args, result: seen.setdefault(op, args))
    probe = make_probe(runner, backend, max_num_seqs=300)
    caches = runner._new_caches(TRIAL_BLOCKS, 16)
    for cache in caches:
        cache.fill_(7.0)
    with torch.inference_mode():
        probe._run_fullest(caches, runner._rows)
    assert all((cache == 7.0).all() for cache in caches)
    assert len(seen["embedding"][0]) == 100
    assert {op: len(seen[op][0]) for op in ("greedy", "sample", "logprobs")} == dict.fromkeys(
        ("greedy", "sample", "logprobs"), 300
    )


@pytest.mark.parametrize(
    ("name", "num_tokens", "context", "num_rows"),
    [("cpu", 100, 64, 256), ("triton", 100, 64, 256), ("reference", 8, 8, 2)],
)
def test_the_naive_backend_is_measured_on_little(runner, monkeypatch, name, num_tokens, context, num_rows):
    seen = []
    backend = dataclasses.replace(
        recording(runner.backend, lambda op, args, result: seen.append((op, args))), name=name
    )
    with torch.inference_mode():
        make_probe(runner, backend)._run_fullest(runner._new_caches(TRIAL_BLOCKS, 16), runner._rows)
    ops = dict(seen)
    assert (len(ops["embedding"][0]), len(ops["greedy"][0])) == (num_tokens, num_rows)
    assert int(ops["prepare_attention"][0].seq_lens.max()) == context


@pytest.mark.parametrize("captured", [False, True])
def test_decodes_and_a_prompt_are_timed(runner, monkeypatch, captured):
    monkeypatch.setattr(start_probe, "_TIMED_DECODES", (1, 4, 8, 256))
    monkeypatch.setattr(start_probe, "_MAX_TIMING_S", 1e9)
    seconds = iter(float(n) for n in range(100, 0, -1))  # each run is faster than the last
    runs = []

    def clock(run):
        runs.append(run())
        return next(seconds)

    monkeypatch.setattr(start_probe, "_host_seconds", clock)
    probe = make_probe(runner)
    with torch.inference_mode():
        graphs = captures(runner, runner.kv_caches, rerun) if captured else None
        measured = probe.step_times(runner.kv_caches, runner._rows, graphs)
    assert measured.decode_s == ((1, 98.0), (4, 95.0), (8, 92.0), (16, 89.0))  # the best of three; 16 is no capture
    # max_model_len, or the largest captured prompt, which is replayed: what launching takes doesn't count.
    assert (measured.prompt_tokens, measured.prompt_s) == (32 if captured else 64, 86.0)
    assert measured.step_sizes == ((16, 32) if captured else ())
    assert [len(ids) for ids in runs[:12]] == [1] * 3 + [4] * 3 + [8] * 3 + [16] * 3
    assert [ids is None or len(ids) for ids in runs[12:]] == [True if captured else 1] * 3
    assert not runner._rows.block_table_rows.any()


def test_a_made_up_prompt_is_a_whole_one_and_stores_nothing(runner):
    with torch.inference_mode():
        graphs = captures(runner, runner.kv_caches, rerun)
        assert [graphs.prompt_size(n) for n in (7, 8, 31, 32, 1000)] == [None, 8, 16, 32, 32]
        steps = DummySteps(64, len(runner.kv_caches[0]), 16, runner.device)
        for cache in runner.kv_caches:
            cache.fill_(0.5)
        replay = graphs.made_up_prompt(steps.prompt(32))
        sent = graphs._mixed_views(MixedSize(32, 0))
        assert sent.positions.tolist() == list(range(32)) and set(sent.slot_mapping.tolist()) == {-1}
        assert sent.query_start_loc.tolist() == [0] + [32] * 8 and sent.seq_lens.tolist() == [32] + [0] * 7
        runner._rows.last_token_ids.fill_(7)
        replay()
        assert runner._rows.last_token_ids[:-1].tolist() == [7] * (len(runner._rows.last_token_ids) - 1)
        assert graphs.made_up_prompt(steps.prompt(31)) is None
    assert all((cache == 0.5).all() for cache in runner.kv_caches)


def test_a_slow_model_is_timed_at_one_size(runner, monkeypatch):
    monkeypatch.setattr(start_probe, "_MAX_TIMING_S", 0.0)
    with torch.inference_mode():
        measured = make_probe(runner).step_times(runner.kv_caches, runner._rows, None)
    assert [size for size, _ in measured.decode_s] == [1] and measured.decode_s[0][1] > 0 < measured.prompt_s


def test_requests_after_the_measuring_give_what_they_gave_without(checkpoint):
    prompts = [[5, 6, 7], [9] * 20, list(range(20, 53))]
    expected = [o.outputs[0].token_ids for o in make_llm(checkpoint).generate(prompts, greedy(6), use_tqdm=False)]
    llm = make_llm(checkpoint)
    runner = llm.engine.core.executor.runner
    measure(runner, Meter(used=[700, 720, 800, 830, 834, 700], peak=1200))
    with torch.inference_mode():
        graphs = captures(runner, runner.kv_caches, rerun)
        make_probe(runner).step_times(runner.kv_caches, runner._rows, graphs)
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, greedy(6), use_tqdm=False)] == expected


def test_nothing_is_timed_where_there_is_no_target(checkpoint):
    assert make_llm(checkpoint).engine.core.executor.measured_steps is None
    assert make_llm(checkpoint, target_itl_ms=0).engine.core.executor.measured_steps is None
    measured = make_llm(checkpoint, target_itl_ms=50).engine.core.executor.measured_steps
    assert measured is not None and measured.prompt_tokens == 128
