"""The oracle passes what is right and names what is wrong: every planted fault at its layer, with its op."""

import dataclasses
import io
import json

import pytest
import torch

import tiny_models
from engine_runs import greedy, make_llm
from pico_vllm.oracle.engine_taps import EngineTaps
from pico_vllm.oracle.points import points_of
from pico_vllm.oracle.report import render
from pico_vllm.oracle.transformers_taps import TransformersTaps
from pico_vllm.oracle.verify import verify

LENGTHS = (1, 15, 17, 40)
LAST_LAYERS_END = (
    "o_proj",
    "attention_residual",
    "post_attention_layernorm",
    "gate_up_proj",
    "activation",
    "down_proj",
    "residual",
)


def save(name, tmp_path_factory):
    directory = tmp_path_factory.mktemp(name)
    tiny_models.save_tiny_model(tiny_models.MODELS[name], directory)
    return directory


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return save("qwen2-gqa3-d128-untied", tmp_path_factory)


@pytest.fixture(scope="module")
def llama_mha(tmp_path_factory):
    return save("llama-mha-d128-untied", tmp_path_factory)


@pytest.fixture(scope="module")
def llama_tied(tmp_path_factory):
    return save("llama-gqa3-d64-tied", tmp_path_factory)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return save("qwen3-gqa4-d64-tied", tmp_path_factory)


def check(llm):
    return verify(llm.engine, prompt_lengths=LENGTHS, num_new_tokens=6)


def test_with_a_prefix_cache_every_position_is_computed_all_the_same(qwen2):
    """Random prompts may begin alike, and the second time all of them are known."""
    llm = make_llm(qwen2, enable_prefix_caching=True)
    for _ in range(2):
        assert check(llm).passes
    assert llm.engine.cache_stats.num_hit_tokens == 0


def failure_of(llm):
    """(point, op) of the first failure."""
    result = check(llm)
    assert not result.passes
    assert result.failure is not None
    return result.failure.point.key, result.failure.point.op


def runner_of(llm):
    return llm.engine.core.executor.runner


def replace_op(llm, **ops):
    """Swap ops of a running engine."""
    runner = runner_of(llm)
    runner.set_backend(dataclasses.replace(runner.backend, **ops))


def replace_parameter(llm, name, parameter):
    """Swap one parameter and rebuild the model around it."""
    runner = runner_of(llm)
    runner.parameters[name] = parameter
    runner.set_backend(runner.backend)


# ------------------------------------------------------------------------------------------------ what is right
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_every_model_passes_in_every_dtype(name, dtype, tmp_path_factory):
    llm = make_llm(save(name, tmp_path_factory), dtype=dtype, max_num_batched_tokens=32)
    result = check(llm)
    assert result.passes, [(e.point.key, e.rms, e.bound) for e in result.errors if not e.passes]
    config = llm.engine.model_config
    expected = points_of(config.num_hidden_layers)
    assert [error.point for error in result.errors] == expected
    every_position = sum(LENGTHS) + len(LENGTHS) * 5  # the last token of each is never computed
    assert all(e.num_rows == every_position for e in result.errors)
    assert result.tokens.num_tokens == len(LENGTHS) * 6


@pytest.mark.parametrize("options", [{"backend": "reference"}, {"num_gpu_blocks_override": 5}, {"block_size": 32}])
def test_other_settings_pass_too(qwen2, options):
    """The reference backend, a pool so small that requests are preempted, another block size."""
    assert check(make_llm(qwen2, **options)).passes


def test_what_is_computed_for_wanted_tokens_only_is_found_at_their_positions(qwen2):
    """Without prompt logprobs the last layer ends with the rows that are sampled: chunks and decodes in one step."""
    llm = make_llm(qwen2, max_num_batched_tokens=16)
    taps = EngineTaps(llm.engine)
    ids = {"a": [5, 6, 7], "b": [(7 * i) % 290 for i in range(40)]}
    with taps.watching():
        for request_id, prompt in ids.items():
            llm.engine.add_request(request_id, list(prompt), greedy(4))
        while llm.engine.has_unfinished_requests():
            for delta in llm.engine.step():
                ids[delta.request_id] += delta.new_token_ids
    oracle = TransformersTaps(qwen2, torch.float32, torch.device("cpu"))
    for request_id, num_prompt_tokens in (("a", 3), ("b", 40)):
        ours, truth = taps.taps(request_id), oracle.run(ids[request_id][:-1])
        sampled = list(range(num_prompt_tokens - 1, num_prompt_tokens + 3))
        assert taps.sampled_positions(request_id) == sampled
        for point in points_of(3):
            after_attention = point.layer is None and point.name != "embed_tokens"
            after_attention |= point.layer == 2 and point.name in LAST_LAYERS_END
            positions = taps.positions(request_id)[point.key]
            if point.key == "layers.2.attention":  # of a step's wanted rows, where those are a sixteenth or fewer
                assert set(sampled) <= set(positions) < set(range(num_prompt_tokens + 3))
            else:
                assert positions == (sampled if after_attention else list(range(num_prompt_tokens + 3))), point.key
            torch.testing.assert_close(ours[point.key], truth[point.key][positions], atol=1e-4, rtol=1e-4)


def test_the_engine_is_as_before_after_it_was_watched(qwen2):
    llm = make_llm(qwen2)
    backend = runner_of(llm).backend
    check(llm)
    assert runner_of(llm).backend is backend
    assert runner_of(llm).step_observer is None
    assert not llm.engine.has_unfinished_requests()


# ------------------------------------------------------------------------------------------------ planted faults
def test_swapped_query_and_key_rows_are_named(llama_mha):
    llm = make_llm(llama_mha)
    weight = runner_of(llm).parameters["layers.1.qkv_proj"]
    q, k, v = weight.to_dense().chunk(3)
    replace_parameter(llm, "layers.1.qkv_proj", runner_of(llm).backend.pack_linear(torch.cat((k, q, v)), None))
    assert failure_of(llm) == ("layers.1.qkv_proj", "linear")


def test_a_dropped_bias_is_named(qwen2):
    llm = make_llm(qwen2)
    weight = runner_of(llm).parameters["layers.2.qkv_proj"]
    replace_parameter(llm, "layers.2.qkv_proj", dataclasses.replace(weight, bias=None))
    assert failure_of(llm) == ("layers.2.qkv_proj", "linear")


def test_a_wrong_rope_theta_is_named(qwen2):
    llm = make_llm(qwen2)
    runner = runner_of(llm)
    rope = dataclasses.replace(runner.model_config.rope, theta=runner.model_config.rope.theta * 1.05)
    runner.model_config = dataclasses.replace(runner.model_config, rope=rope)
    runner.set_backend(runner.backend)
    assert failure_of(llm) == ("layers.0.query", "rotary_embedding_and_store_kv")


def test_a_wrong_eps_is_named(qwen2):
    """1e-6 instead of 1e-5: the two values that real models use."""
    llm = make_llm(qwen2)
    runner = runner_of(llm)
    assert runner.model_config.rms_norm_eps == 1e-5
    runner.model_config = dataclasses.replace(runner.model_config, rms_norm_eps=1e-6)
    runner.set_backend(runner.backend)
    assert failure_of(llm) == ("layers.0.input_layernorm", "rms_norm")


def test_a_missing_residual_is_named(qwen2):
    llm = make_llm(qwen2)
    runner = runner_of(llm)
    original = runner.backend.add_rms_norm
    target = runner.parameters["layers.1.post_attention_layernorm"]

    def forgets(x, residual, weight, eps):
        return original(x, torch.zeros_like(residual) if weight is target else residual, weight, eps)

    replace_op(llm, add_rms_norm=forgets)
    assert failure_of(llm) == ("layers.1.attention_residual", "add_rms_norm")


def test_kv_written_one_slot_off_is_named(qwen2):
    llm = make_llm(qwen2)
    original = runner_of(llm).backend.rotary_embedding_and_store_kv
    target = runner_of(llm).kv_caches[1]

    def stores_off_by_one(heads, cos_sin, kv_cache, metadata, *rest):
        if kv_cache is target:
            metadata = dataclasses.replace(metadata, offsets=(metadata.offsets + 1) % kv_cache.shape[3])
        original(heads, cos_sin, kv_cache, metadata, *rest)

    replace_op(llm, rotary_embedding_and_store_kv=stores_off_by_one)
    assert failure_of(llm) == ("layers.1.key", "rotary_embedding_and_store_kv")


def test_values_stored_in_the_place_of_other_heads_are_named(llama_tied):
    llm = make_llm(llama_tied)
    original = runner_of(llm).backend.rotary_embedding_and_store_kv
    target = runner_of(llm).kv_caches[2]

    def swaps_value_heads(heads, cos_sin, kv_cache, *rest):
        if kv_cache is target:
            heads[:, -2:] = heads[:, -2:].flip(1)
        original(heads, cos_sin, kv_cache, *rest)

    replace_op(llm, rotary_embedding_and_store_kv=swaps_value_heads)
    assert failure_of(llm) == ("layers.2.value", "rotary_embedding_and_store_kv")


def test_head_norms_taken_for_each_other_are_named(qwen3):
    """They run inside the op that rotates, so they show at the rotated query."""
    llm = make_llm(qwen3)
    parameters = runner_of(llm).parameters
    replace_parameter(llm, "layers.1.q_norm", parameters["layers.1.k_norm"])
    assert failure_of(llm) == ("layers.1.query", "rotary_embedding_and_store_kv")


def test_a_wrong_gqa_group_is_named(llama_tied):
    """Head h reads KV head h % 2 instead of h // 3."""
    llm = make_llm(llama_tied)
    original = runner_of(llm).backend.paged_attention
    target = runner_of(llm).kv_caches[2]
    order = [0, 2, 4, 1, 3, 5]

    def mixes_groups(query, kv_cache, metadata, scale):
        if kv_cache is not target:
            return original(query, kv_cache, metadata, scale)
        out = torch.empty_like(query)
        out[:, order] = original(query[:, order], kv_cache, metadata, scale)
        return out

    replace_op(llm, paged_attention=mixes_groups)
    assert failure_of(llm) == ("layers.2.attention", "paged_attention")


def test_a_wrong_end_of_the_last_layer_is_named(qwen2):
    llm = make_llm(qwen2)
    weight = runner_of(llm).parameters["layers.2.down_proj"]
    scaled = runner_of(llm).backend.pack_linear(weight.to_dense() * 1.01, None)
    replace_parameter(llm, "layers.2.down_proj", scaled)
    assert failure_of(llm) == ("layers.2.down_proj", "partial_linear")


def test_a_fault_of_the_last_layer_at_one_prompt_position_is_named(qwen2):
    """A position that nobody samples from."""
    llm = make_llm(qwen2)
    original = runner_of(llm).backend.gated_linear
    calls = iter(range(10**6))

    def poisons(x, weight):
        out = original(x, weight)
        if next(calls) == 2:
            out[-1] *= 1.01  # the first step's wanted rows: sampled ones, then prompt positions
        return out

    replace_op(llm, gated_linear=poisons)
    assert failure_of(llm) == ("layers.2.activation", "gated_linear")


def test_residual_rows_of_other_tokens_are_named(qwen2):
    """The last layer selects the rows of its attention, and those of the residual in another order."""
    llm = make_llm(qwen2)
    set_backend = runner_of(llm).set_backend

    def sets_backend_and_mixes(backend):
        set_backend(backend)
        last = runner_of(llm)._model.layers[2]
        attention = last.self_attn
        last.self_attn = lambda *args: attention(*args[:4], None if args[4] is None else args[4].flip(0), *args[5:])

    runner_of(llm).set_backend = sets_backend_and_mixes
    assert failure_of(llm) == ("layers.2.o_proj", "partial_linear")


def test_a_tied_head_mistaken_for_an_untied_one_is_named(llama_tied):
    llm = make_llm(llama_tied)
    runner = runner_of(llm)
    config = runner.model_config
    fresh = 0.08 * torch.randn(config.vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(9))
    replace_parameter(llm, "lm_head", runner.backend.pack_linear(fresh, None))
    assert failure_of(llm) == ("logits", "linear")


def test_nan_is_a_failure(qwen2):
    llm = make_llm(qwen2)
    original = runner_of(llm).backend.gated_linear
    calls = iter(range(10**6))

    def poisons(x, weight):
        out = original(x, weight)
        return out * float("nan") if next(calls) == 1 else out

    replace_op(llm, gated_linear=poisons)
    assert failure_of(llm) == ("layers.1.activation", "gated_linear")


def test_swapped_gate_and_up_rows_are_named(qwen2):
    """At the product, which the oracle computes once more: it never leaves the op."""
    llm = make_llm(qwen2)
    gate, up = runner_of(llm).parameters["layers.1.gate_up_proj"].to_dense().chunk(2)
    swapped = runner_of(llm).backend.pack_linear(torch.cat((up, gate)), None)
    replace_parameter(llm, "layers.1.gate_up_proj", swapped)
    assert failure_of(llm) == ("layers.1.gate_up_proj", "gated_linear")


def in_two_splits(x, weight):
    """What ``partial_linear`` may return: [2, num_tokens, out_features] fp32."""
    assert weight.bias is None
    splits = zip(x.float().chunk(2, dim=1), weight.to_dense().float().chunk(2, dim=1), strict=True)
    return torch.stack([x_split @ w_split.T for x_split, w_split in splits])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_partial_sums_pass(qwen2, dtype):
    llm = make_llm(qwen2, dtype=dtype)
    replace_op(llm, partial_linear=in_two_splits)
    assert check(llm).passes


@pytest.mark.parametrize("name", ["o_proj", "down_proj"])
def test_a_partial_sum_that_is_left_out_is_named(qwen2, name):
    llm = make_llm(qwen2)
    target = runner_of(llm).parameters[f"layers.1.{name}"]
    replace_op(llm, partial_linear=lambda x, weight: in_two_splits(x, weight)[: 1 if weight is target else 2])
    assert failure_of(llm) == (f"layers.1.{name}", "partial_linear")


def test_wrong_tokens_are_a_failure_although_every_point_passes(qwen2):
    """A sampler that takes the second best: the logits are right, the tokens are not."""
    llm = make_llm(qwen2)
    replace_op(llm, greedy=lambda logits: logits.topk(2).indices[:, 1])
    result = check(llm)
    assert result.failure is None
    assert not result.tokens.passes
    assert not result.passes


def test_bf16_faults_that_are_larger_than_rounding_are_named(qwen2):
    llm = make_llm(qwen2, dtype="bfloat16")
    weight = runner_of(llm).parameters["layers.2.qkv_proj"]
    replace_parameter(llm, "layers.2.qkv_proj", dataclasses.replace(weight, bias=None))
    assert failure_of(llm) == ("layers.2.qkv_proj", "linear")


# -------------------------------------------------------------------------------------------------------- report
def text_of(result, **options):
    from rich.console import Console

    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(result, **options))
    return console.export_text()


def test_the_report_names_the_failure_and_shows_its_layer(qwen2):
    llm = make_llm(qwen2)
    assert "PASSED: all 42 points" in text_of(check(llm))
    weight = runner_of(llm).parameters["layers.2.qkv_proj"]
    replace_parameter(llm, "layers.2.qkv_proj", dataclasses.replace(weight, bias=None))
    result = check(llm)
    text = text_of(result)
    assert "FAILED: the first point that differs is layers.2.qkv_proj, made by linear" in text
    assert "Every point of layer 2" in text
    assert "layers.2.input_layernorm" in text
    assert text_of(result, all_points=True).count("layers.") >= 36


def test_the_result_is_json(qwen2):
    result = json.loads(json.dumps(check(make_llm(qwen2)).to_dict()))
    assert result["passes"] is True
    assert result["first_failure"] is None
    assert result["points"][0]["point"] == "embed_tokens"
    assert result["settings"]["dtype"] == "float32"


def test_an_engine_too_small_for_any_prompt_is_refused_with_both_numbers(qwen2):
    from pico_vllm.errors import ConfigError

    with pytest.raises(ConfigError, match=r"takes 24 tokens .* needs 1 \+ 64"):
        verify(make_llm(qwen2, max_model_len=24).engine)


def test_dummy_weights_are_refused(qwen2):
    from pico_vllm.errors import ConfigError

    with pytest.raises(ConfigError, match="load_format='dummy'"):
        verify(make_llm(qwen2, load_format="dummy").engine)
