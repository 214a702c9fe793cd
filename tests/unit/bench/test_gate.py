"""The gate and its oracle: what is right passes, what is wrong never reaches the clock."""

import dataclasses

import pytest
import torch

import tiny_models
from bench_fakes import FakeEngine
from pico_vllm.bench.engines.engine import EngineOptions
from pico_vllm.bench.engines.pico_engine import PicoEngine
from pico_vllm.bench.engines.transformers_engine import TransformersEngine
from pico_vllm.bench.gate import gate_generations
from pico_vllm.errors import ConfigError
from pico_vllm.kernels.sampling import greedy_cpu
from pico_vllm.oracle.generation_check import Generation, GenerationOracle

DTYPES = ["float32", "bfloat16", "float16"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gate")
    tiny_models.save_tiny_model(tiny_models.MODELS["qwen2-gqa3-d128-untied"], directory)
    return directory


@pytest.fixture(scope="module")
def oracles(model_dir):
    return {name: GenerationOracle(model_dir, getattr(torch, name), torch.device("cpu")) for name in DTYPES}


def options(model_dir, dtype, **extra):
    return EngineOptions(str(model_dir), dtype, "cpu", extra=extra)


def generations(engine):
    return gate_generations(engine, vocab_size=tiny_models.VOCAB_SIZE, widest=4, longest=100, max_len=256)


def plant(engine, **ops):
    runner = engine.engine.core.executor.runner
    runner.set_backend(dataclasses.replace(runner.backend, **ops))


@pytest.mark.parametrize("dtype", DTYPES)
def test_our_engine_passes_with_logprobs(model_dir, oracles, dtype):
    check = oracles[dtype].check(generations(PicoEngine(options(model_dir, dtype, max_num_batched_tokens=64))))
    assert check.problem is None and check.passes
    assert check.num_tokens == (2 + 8 + 8) * 64 + 4 + 4 * 4  # alone, together, scored; the long prompt; the wide batch
    assert check.num_logprobs >= 8 * 64 * 20


@pytest.mark.parametrize("dtype", DTYPES)
def test_transformers_passes_by_its_tokens(model_dir, oracles, dtype):
    check = oracles[dtype].check(generations(TransformersEngine(options(model_dir, dtype))))
    assert check.passes and check.num_logprobs == 0


def second_best(logits):
    return logits.float().topk(2).indices[:, 1]


def sometimes_second_best(logits):
    chosen = greedy_cpu(logits)
    if logits.shape[0] > 2:  # as a race between rows of a larger batch would
        chosen[1] = second_best(logits)[1]
    return chosen


def no_weight(op):
    return lambda x, *rest: op(x, *rest[:-2], torch.ones_like(rest[-2]), rest[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [second_best, sometimes_second_best])
def test_a_wrong_token_fails(model_dir, oracles, dtype, fault):
    engine = PicoEngine(options(model_dir, dtype))
    plant(engine, greedy=fault)
    assert "below the best one" in oracles[dtype].check(generations(engine)).problem


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_without_its_weight_fails(model_dir, oracles, dtype):
    engine = PicoEngine(options(model_dir, dtype))
    plant(engine, add_rms_norm=no_weight(engine.engine.core.executor.runner.backend.add_rms_norm))
    assert not oracles[dtype].check(generations(engine)).passes


@pytest.mark.parametrize("dtype, factor", [("float32", 1.001), ("float16", 1.03), ("bfloat16", 1.15)])
def test_a_small_error_everywhere_fails_by_the_logprobs(model_dir, oracles, dtype, factor):
    """A factor on every attention output flips few tokens; the RMS error of log-probabilities sees it."""
    engine = PicoEngine(options(model_dir, dtype))
    attention = engine.engine.core.executor.runner.backend.paged_attention
    plant(engine, paged_attention=lambda *args: attention(*args) * factor)
    check = oracles[dtype].check(generations(engine))
    assert check.logprob_rms > check.allowed_logprob_rms


def test_nan_never_passes(oracles):
    nan = Generation([5, 6], [7], [{7: float("nan")}])
    assert not oracles["float32"].check([nan]).passes


def test_too_many_tokens_that_are_not_the_best_one_fail(oracles, model_dir):
    """Each is within the allowed gap, but so many that rounding doesn't explain them."""
    good = generations(PicoEngine(options(model_dir, "bfloat16")))
    check = oracles["bfloat16"].check(good)
    many = dataclasses.replace(check, num_not_best=check.allowed_not_best + 1)
    assert "not the best one" in many.problem
    assert check.allowed_not_best < check.num_tokens / 5


def test_an_engine_that_tells_no_ids_cannot_be_checked():
    engine = FakeEngine()
    engine.short_by = 1
    with pytest.raises(ConfigError, match="gave 63 tokens and told 63 ids where 64 were asked for"):
        generations(engine)


def test_the_gate_runs_alone_together_wide_and_long():
    engine = FakeEngine()
    engine.serve_calls = []
    serve = engine.serve
    engine.serve = lambda workload: (engine.serve_calls.append(workload), serve(workload))[1]
    gate_generations(engine, vocab_size=50_000, widest=300, longest=9000, max_len=4096)
    shapes = [(w.concurrency, len(w.requests), w.requests[0].max_tokens) for w in engine.serve_calls]
    assert shapes == [(1, 2, 64), (8, 8, 64), (1, 1, 4), (256, 256, 4)]
    assert len(engine.serve_calls[2].requests[0].prompt_token_ids) == 2048


def test_prompts_that_the_engine_has_no_room_for_are_left_out(model_dir, oracles):
    engine = PicoEngine(options(model_dir, "float32", max_model_len=100))
    found = generations(engine)  # the model itself takes 256
    assert max(len(g.prompt_token_ids) + len(g.token_ids) for g in found) <= 100
    assert sorted({len(g.prompt_token_ids) for g in found}) == [1, 15, 16, 17, 24, 33, 50]
    assert oracles["float32"].check(found).passes


def test_prompts_that_the_model_has_no_room_for_are_left_out():
    engine = FakeEngine()
    found = gate_generations(engine, vocab_size=300, widest=1, longest=5000, max_len=100)
    assert max(len(g.prompt_token_ids) + len(g.token_ids) for g in found) <= 100
