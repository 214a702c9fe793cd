"""ModelRunner: which device, how many blocks, and other ops in a running engine."""

import dataclasses

import numpy as np
import pytest
import torch

import tiny_models
from engine_runs import greedy, make_llm
from pico_vllm.errors import ConfigError
from pico_vllm.kernels.backend import CPU, REFERENCE, recording
from pico_vllm.kernels.rms_norm import rms_norm_reference
from pico_vllm.request import Request
from pico_vllm.scheduler_output import GrammarMasks
from pico_vllm.worker import sampler
from pico_vllm.worker.model_runner import resolve_backend, resolve_device

PROMPTS = [[10, 20, 30, 40, 50], [7] * 17, [99]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2")
    tiny_models.save_tiny_model(tiny_models.MODELS["qwen2-gqa6-d64-tied"], directory)
    return directory


@pytest.fixture(scope="module")
def expected(checkpoint):
    return tokens(make_llm(checkpoint))


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy(6))]


def runner_of(llm):
    return llm.engine.core.executor.runner


# ------------------------------------------------------------------------------------------------------- the device
def pretend_gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("name", "num_gpus", "expected"),
    [
        ("cpu", 0, "cpu"),
        ("cpu", 2, "cpu"),
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cuda", 1, "cuda:0"),
        ("cuda:0", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_the_device_is_the_one_asked_for_and_auto_prefers_a_gpu(monkeypatch, name, num_gpus, expected):
    pretend_gpus(monkeypatch, num_gpus)
    assert resolve_device(name) == torch.device(expected)


@pytest.mark.parametrize(
    ("name", "num_gpus"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:2", 2), ("cuda:99", 8)]
)
def test_a_gpu_that_torch_does_not_see_is_refused_with_what_it_sees(monkeypatch, name, num_gpus):
    pretend_gpus(monkeypatch, num_gpus)
    with pytest.raises(ConfigError) as error:
        resolve_device(name)
    message = str(error.value)
    assert f"device={name!r}" in message and f"sees {num_gpus} GPU(s)" in message and "device='cpu'" in message


# -------------------------------------------------------------------------------------------------------- backend
@pytest.fixture
def without_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def backend_name(name, device, capability=(9, 0)):
    """Of what is resolved on a device with this compute capability."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return resolve_backend(name, torch.device(device)).name


@pytest.mark.parametrize(
    ("name", "device", "capability", "expected"),
    [
        ("auto", "cpu", None, "cpu"),
        ("auto", "cuda", (9, 0), "triton"),
        ("auto", "cuda:1", (8, 0), "triton"),
        ("auto", "cuda", (7, 5), "cpu"),
        ("triton", "cuda", (12, 0), "triton"),
        ("cpu", "cuda", (9, 0), "cpu"),
        ("reference", "cuda", (9, 0), "reference"),
    ],
)
def test_auto_takes_triton_where_it_can_run(without_interpreter, name, device, capability, expected):
    assert backend_name(name, device, capability) == expected


def test_the_interpreter_runs_triton_on_a_cpu_but_only_if_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend_name("triton", "cpu") == "triton"
    assert backend_name("auto", "cpu") == "cpu"


@pytest.mark.parametrize(
    ("device", "capability", "words"),
    [
        ("cpu", None, "needs a CUDA GPU, and this engine runs on cpu"),
        ("cuda:0", (7, 5), "compute capability 8.0 or more, cuda:0 has 7.5"),
    ],
)
def test_triton_that_cannot_run_is_refused_with_what_is_missing(without_interpreter, device, capability, words):
    with pytest.raises(ConfigError, match=words) as error:
        backend_name("triton", device, capability)
    assert "backend='cpu'" in str(error.value)


def test_without_the_package_auto_is_cpu_and_triton_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert backend_name("auto", "cuda") == "cpu"
    with pytest.raises(ConfigError, match="triton, which isn't installed"):
        backend_name("triton", "cuda")


# ------------------------------------------------------------------------------------------------- dtype and memory
@pytest.mark.parametrize(
    ("option", "dtype"),
    [("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)],
)
def test_weights_and_cache_have_the_dtype_asked_for(checkpoint, option, dtype):
    runner = runner_of(make_llm(checkpoint, dtype=option))
    assert runner.dtype == dtype
    assert {cache.dtype for cache in runner.kv_caches} == {dtype}


def test_the_pool_is_no_larger_than_every_sequence_at_full_length_needs(checkpoint):
    llm = make_llm(checkpoint, num_gpu_blocks_override=None, max_num_seqs=3, max_model_len=100, block_size=16)
    assert runner_of(llm).num_blocks == 3 * 7
    assert llm.engine.core.limits.num_blocks == 21
    assert [cache.shape[0] for cache in runner_of(llm).kv_caches] == [21] * 3


# ----------------------------------------------------------------------------------------------- swapping an op
def test_one_op_is_swapped_in_a_running_engine(checkpoint, expected):
    calls = []

    def counted_reference(*args):
        calls.append("rms_norm")
        return rms_norm_reference(*args)

    llm = make_llm(checkpoint)
    runner_of(llm).set_backend(dataclasses.replace(CPU, rms_norm=counted_reference))
    assert tokens(llm) == expected
    assert calls, "the op that was swapped in was never called"


def test_an_op_is_swapped_between_two_steps_of_a_request(checkpoint, expected):
    llm = make_llm(checkpoint)
    llm.engine.add_request("r", PROMPTS[0], greedy(6))
    found = []
    for backend in (CPU, dataclasses.replace(CPU, gated_linear=REFERENCE.gated_linear), REFERENCE, CPU, REFERENCE, CPU):
        runner_of(llm).set_backend(backend)
        found += [token_id for delta in llm.engine.step() for token_id in delta.new_token_ids]
    assert found == expected[0]
    assert not llm.engine.has_unfinished_requests()


def test_a_wrong_op_that_is_swapped_in_changes_the_result(checkpoint, expected):
    """Or else the swap would prove nothing."""
    llm = make_llm(checkpoint)
    runner_of(llm).set_backend(dataclasses.replace(CPU, rms_norm=lambda x, weight, eps: -CPU.rms_norm(x, weight, eps)))
    assert tokens(llm) != expected
    runner_of(llm).set_backend(CPU)
    assert tokens(llm) == expected


def test_a_recording_backend_sees_every_op_of_a_step_and_changes_nothing(checkpoint, expected):
    llm = make_llm(checkpoint)
    seen = []
    runner_of(llm).set_backend(recording(CPU, lambda op, args, result: seen.append(op)))
    llm.engine.add_request("r", PROMPTS[0], greedy(1))
    (delta,) = llm.engine.step()
    assert list(delta.new_token_ids) == expected[0][:1]
    layer = ["linear", "rotary_embedding_and_store_kv", "paged_attention", "partial_linear", "add_rms_norm"]
    layer += ["gated_linear", "partial_linear", "add_rms_norm"]
    assert seen == ["prepare_attention", "embedding", "rms_norm", *layer * 3, "linear", "greedy"]


def test_parameters_are_shared_and_not_copied_by_a_swap(checkpoint):
    runner = runner_of(make_llm(checkpoint))
    before = runner._model.layers[1].mlp.down_proj.weight
    runner.set_backend(REFERENCE)
    assert runner._model.layers[1].mlp.down_proj.weight is before


# ---------------------------------------------------------------------------------------------------------- rows
def test_rows_of_ended_requests_go_with_the_next_step(checkpoint):
    llm = make_llm(checkpoint)
    tokens(llm)
    llm.engine.add_request("r", PROMPTS[0], greedy(2))
    llm.engine.step()
    assert runner_of(llm).num_rows == 1


def test_uninitialised_cache_memory_is_never_read(checkpoint, expected):
    llm = make_llm(checkpoint)
    for cache in runner_of(llm).kv_caches:
        cache.fill_(float("nan"))
    assert tokens(llm) == expected


# -------------------------------------------------------------------------------------------------- prompt logprobs
def test_logits_of_a_long_prompt_never_exist_all_at_once(checkpoint, monkeypatch):
    params = greedy(4, prompt_logprobs=2, logprobs=1)
    prompt = [5 + i % 90 for i in range(41)]
    (expected,) = make_llm(checkpoint).generate([prompt], params)
    monkeypatch.setattr(sampler, "PROMPT_LOGPROBS_ROWS", 7)
    llm = make_llm(checkpoint)
    runner, sizes = runner_of(llm), []
    runner.set_backend(
        recording(CPU, lambda op, args, result: sizes.append(len(args[0])) if op == "logprobs" else None)
    )
    (found,) = llm.generate([prompt], params)
    assert sizes == [7, 7, 7, 7, 7, 5, 1, 1, 1, 1]  # 40 positions of the prompt, then each token
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    for at, other in zip(found.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert at.keys() == other.keys()
        assert all(at[i].logprob == pytest.approx(other[i].logprob, abs=1e-4) for i in at)


# --------------------------------------------------------------------------------------------------- grammar masks
def allow(*sets):
    """The bitmask of sets of token ids."""
    bitmask = np.zeros((len(sets), -(-tiny_models.VOCAB_SIZE // 32)), dtype=np.uint32)
    for row, ids in enumerate(sets):
        for token_id in ids:
            bitmask[row, token_id // 32] |= np.uint32(1 << token_id % 32)
    return bitmask.view(np.int32)


def test_grammar_masks_reach_the_rows_they_are_of(checkpoint, expected):
    """In another order than that of the step, beside a request without one and a chunk that samples nothing."""
    llm = make_llm(checkpoint, max_num_batched_tokens=12)
    core = llm.engine.core
    for name, prompt in zip("abc", ([10, 20, 30, 40, 50], [99], [7] * 17), strict=True):
        core.add_request(Request(name, prompt, greedy(6)))
    step = core.scheduler.schedule()
    assert [(r.request_id, r.samples) for r in step.scheduled] == [("b", True), ("a", True), ("c", False)]
    output = core.executor.execute(step, lambda: GrammarMasks(("a", "b"), allow({3, 33, 299}, {288})))
    core.scheduler.update_from_output(step, output)
    of_b, of_a, of_c = output.token_ids
    assert of_b == (288,) and of_a[0] in (3, 33, 299) and of_c == ()
    step = core.scheduler.schedule()
    assert [(r.request_id, r.samples) for r in step.scheduled] == [("a", True), ("b", True), ("c", False)]
    output = core.executor.execute(step, lambda: GrammarMasks(("b",), allow(())))
    assert output.token_ids[1] == (-1,) and output.token_ids[0][0] >= 0
    free = make_llm(checkpoint)
    free.engine.core.add_request(Request("a", [10, 20, 30, 40, 50, *of_a], greedy(6)))
    (delta,) = free.engine.core.step()
    assert output.token_ids[0] == delta.new_token_ids, "a has no mask any more"


def test_a_mask_that_allows_everything_changes_nothing(checkpoint, expected):
    core = make_llm(checkpoint).engine.core
    core.add_request(Request("a", PROMPTS[0], greedy(6)))
    found = []
    while core.has_unfinished_requests():
        step = core.scheduler.schedule()
        output = core.executor.execute(step, lambda: GrammarMasks(("a",), allow(range(tiny_models.VOCAB_SIZE))))
        found += [i for o in core.scheduler.update_from_output(step, output) for i in o.new_token_ids]
    assert found == expected[0]


def test_masks_are_made_after_the_forward_pass_has_been_launched(checkpoint, monkeypatch):
    core = make_llm(checkpoint).engine.core
    core.add_request(Request("a", PROMPTS[0], greedy(6)))
    runner, calls = core.executor.runner, []
    forward = runner._model.hidden_rows
    monkeypatch.setattr(runner._model, "hidden_rows", lambda *args: calls.append("forward") or forward(*args))
    core.executor.execute(core.scheduler.schedule(), lambda: calls.append("masks"))
    assert calls == ["forward", "masks"]
