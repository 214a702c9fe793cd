"""A whole engine on the Triton backend, interpreted where there is no GPU, against transformers and torch's ops."""

import functools
import sys

import pytest

import tiny_models
from engine_runs import greedy, make_llm, with_graphs
from kernel_implementations import RUNS_TRITON, TRITON_DEVICE
from pico_vllm import SamplingParams, cli
from pico_vllm.oracle.verify import verify
from pico_vllm.worker import cuda_graph

if not RUNS_TRITON:
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("exact_fp32_products")

OPTIONS = {"backend": "triton", "device": TRITON_DEVICE}


@pytest.fixture(scope="module", params=["qwen2-gqa6-d64-tied", "qwen3-gqa2-d128-untied"])
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    tiny_models.save_tiny_model(tiny_models.MODELS[request.param], directory)
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_sub_layer_equals_transformers(checkpoint, dtype):
    llm = make_llm(checkpoint, dtype=dtype, max_num_batched_tokens=16, **OPTIONS)
    result = verify(llm.engine, prompt_lengths=(1, 15, 17), num_new_tokens=4)
    assert result.settings["backend"] == "triton"
    assert result.passes, [(e.point.key, e.rms, e.bound) for e in result.errors if not e.passes]


@pytest.mark.parametrize("max_num_batched_tokens", [64, 128])
def test_steps_on_both_sides_of_the_few_token_products_equal_transformers(checkpoint, max_num_batched_tokens):
    """Steps of 64 tokens, which are Triton's to multiply, and of 71, which are not."""
    llm = make_llm(checkpoint, dtype="bfloat16", max_num_batched_tokens=max_num_batched_tokens, **OPTIONS)
    result = verify(llm.engine, prompt_lengths=(1, 70), num_new_tokens=1)
    assert result.passes, [(e.point.key, e.rms, e.bound) for e in result.errors if not e.passes]


def test_greedy_and_sampled_tokens_are_those_of_torchs_ops(checkpoint):
    params = [greedy(4), SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=3, max_tokens=4, ignore_eos=True)]
    params.append(SamplingParams(temperature=1.5, min_p=0.02, seed=4, max_tokens=4, ignore_eos=True))
    prompts = [[7, 8, 9], [10] * 17, list(range(2, 20))]
    outputs = [make_llm(checkpoint, **options).generate(prompts, params) for options in (OPTIONS, {"backend": "cpu"})]
    ids = [[output.outputs[0].token_ids for output in of_backend] for of_backend in outputs]
    assert ids[0] == ids[1]


def test_captured_passes_on_tritons_kernels_give_the_tokens_of_torchs_ops(checkpoint, monkeypatch):
    """Decodes, prompts, and both together, with padding of every kind and NaN in every unused block."""
    from pico_vllm.kernels.decode_inputs_triton import fill_decode_inputs_triton

    sizes = {"DECODE_SIZES": (4,), "PROMPT_SIZES": (16,), "MIXED_SIZES": (16,), "MIXED_DECODES": (4,)}
    sizes["MAX_UNORDERED_DECODES"] = 1
    for name, value in sizes.items():
        monkeypatch.setattr(cuda_graph, name, value)
    options = {"max_num_batched_tokens": 16, "block_size": 4, "max_model_len": 64}
    prompts = [[7, 8, 9], [10] * 4, list(range(2, 22))]  # the last one in chunks, the second of them beside decodes
    expected = make_llm(checkpoint, backend="cpu", **options).generate(prompts, greedy(3))
    llm = make_llm(checkpoint, enforce_eager=True, **options, **OPTIONS)
    used = with_graphs(llm, fill_decode_inputs_triton)
    for kv_cache in llm.engine.core.executor.runner.kv_caches:
        kv_cache.fill_(float("nan"))
    outputs = llm.generate(prompts, greedy(3))
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert used == [("prompt", 16), ("mixed", 16, 4), ("decode", 4), ("decode", 4)]


def test_a_shared_prefix_gives_the_tokens_of_torchs_ops(checkpoint):
    """Whole blocks, a copied one, and a last token that is computed again and stored nowhere."""
    prompts = [list(range(2, 18)), list(range(2, 23)), list(range(2, 18)), [*range(2, 20), 90]]
    expected = [output.outputs[0].token_ids for output in make_llm(checkpoint).generate(prompts, greedy(3))]
    llm = make_llm(checkpoint, enable_prefix_caching=True, **OPTIONS)
    outputs = [llm.generate(prompt, greedy(3))[0] for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == [0, 16, 15, 18]


def test_verify_takes_the_backend_from_the_command_line(checkpoint, monkeypatch, capsys):
    words = ["pico-vllm", "verify", "--model", str(checkpoint), "--device", TRITON_DEVICE, "--backend", "triton"]
    monkeypatch.setattr(sys, "argv", [*words, "--dtype", "float32"])
    short = functools.partial(verify, prompt_lengths=(1, 17), num_new_tokens=2)
    monkeypatch.setattr("pico_vllm.oracle.verify.verify", short)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    assert "PASSED: all 42 points" in capsys.readouterr().out
