"""The prefill kernel for Hopper: when and how it is launched (no GPU needed), and what it computes (on an sm_90)."""

import dataclasses
import importlib.util
import sys
import weakref

import pytest
import torch

from kernel_cases import NAN, Heads, PagedCase, Step, build_paged_case, with_empty_decodes
from kernel_implementations import (
    REFERENCE_ATTENTION,
    assert_bitwise,
    assert_near_oracle,
    needs_hopper,
    uninitialised_memory_is_nan,
)
from kernel_launches import Launches, fresh

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton isn't installed", allow_module_level=True)

from pico_vllm.kernels import attention_prefill, attention_prefill_hopper
from pico_vllm.kernels.attention_config import AttentionConfig, Device, select_config
from pico_vllm.kernels.attention_triton import (
    TritonAttentionMetadata,
    paged_attention_triton,
    prepare_attention_triton,
    store_kv_triton,
)

QWEN = Heads(num_kv_heads=2, group=6, head_dim=128, block_size=16)
H200 = Device(architecture=90, num_sms=132)


# ---------------------------------------------------------------------------------------- when and how it is launched
@pytest.fixture
def kernels(monkeypatch):
    """(launches of the kernel for Hopper, launches of the other)."""
    hopper, other = Launches(), Launches()
    monkeypatch.setattr(attention_prefill_hopper, "_hopper_prefill_kernel", hopper)
    monkeypatch.setattr(attention_prefill, "_prefill_kernel", other)
    monkeypatch.setattr(attention_prefill, "merge_splits", lambda *args, **kwargs: None)
    return hopper, other


def prefill(num_tokens: int, cached: int = 0, num_decodes: int = 0, device: Device = H200) -> torch.Tensor:
    """Attention after the decodes for one sequence of new tokens, on the CPU; returns the cache."""
    metadata = TritonAttentionMetadata(
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        block_tables=torch.zeros(num_decodes + 1, 40, dtype=torch.int32),
        query_start_loc=torch.zeros(num_decodes + 2, dtype=torch.int32),
        seq_lens=torch.zeros(num_decodes + 1, dtype=torch.int32),
        num_decode_reqs=num_decodes,
        max_seq_len=cached + num_tokens,
        prefill_seq_len=cached + num_tokens,
        device=device,
    )
    query = torch.zeros(num_tokens + num_decodes, 16, 128, dtype=torch.bfloat16)[:, :12]
    kv_cache = torch.zeros(100, 2, 2, 16, 128, dtype=torch.bfloat16)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    attention_prefill.prefill_attention_triton(query, kv_cache, out, metadata, 1.0, select_config(90, 128, 2))
    return kv_cache


def test_a_large_prefill_is_launched_in_tiles_of_128_rows_by_hand(kernels):
    hopper, other = kernels
    kv_cache = prefill(2048, num_decodes=5)
    ((grid, args, params),) = hopper.seen
    assert not other.seen
    assert grid == (2, 1, 2053 * 6 // 128 + 2)  # KV heads, splits, tiles: one more a sequence, one for padded tokens
    assert params == {
        "GROUP": 6, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "IS_SPLIT": False, "PDL": True, "num_warps": 4,
        "launch_pdl": True,
    }  # fmt: skip
    assert args[9:] == (5, 6, 2053, 16 * 128, 128, 40)
    descriptor = args[1]
    assert descriptor.base.data_ptr() == kv_cache.data_ptr()
    assert (descriptor.shape, descriptor.strides) == ([100 * 2 * 2 * 16, 128], [128, 1])
    assert descriptor.block_shape == [16, 64]


def test_a_long_context_is_split_as_it_is_for_the_other_kernel(kernels):
    """48 tiles for 132 SMs; see ``test_prefill_is_split_where_that_ends_sooner_by_hand``."""
    hopper, _ = kernels
    prefill(512, cached=8192)
    ((grid, args, params),) = hopper.seen
    assert grid == (2, 5, 512 * 6 // 128 + 2)
    assert params["IS_SPLIT"]
    assert args[3].shape == (512, 12, 5, 128) and args[4].shape == (512, 12, 5)


def test_small_prefills_and_other_architectures_have_the_other_kernel(kernels):
    hopper, other = kernels
    prefill(511)
    prefill(2048, device=Device(architecture=100, num_sms=132))
    assert not hopper.seen
    assert [grid for grid, _, _ in other.seen] == [(2, 1, 511 * 6 // 64 + 2), (2, 1, 2048 * 6 // 128 + 2)]


def test_a_launch_keeps_no_cache_alive(kernels):
    hopper, _ = kernels
    cache = weakref.ref(prefill(2048))
    assert cache() is not None  # the notes have it
    hopper.seen.clear()
    assert cache() is None


def test_the_installed_triton_has_it():
    assert attention_prefill.launch_hopper_prefill is attention_prefill_hopper.launch_hopper_prefill


def test_where_it_cannot_be_imported_the_other_kernel_does_everything(monkeypatch, kernels):
    monkeypatch.setitem(sys.modules, attention_prefill_hopper.__name__, None)
    without = fresh(attention_prefill).launch_hopper_prefill
    assert without is None
    monkeypatch.setattr(attention_prefill, "launch_hopper_prefill", without)
    prefill(2048)
    hopper, other = kernels
    assert not hopper.seen and len(other.seen) == 1


# -------------------------------------------------------------------------------------------------- what it computes
@pytest.fixture
def hopper_only(monkeypatch):
    """The other kernel would be an error."""
    monkeypatch.setattr(attention_prefill, "_launch_prefill", None)


def always(heads: Heads) -> AttentionConfig:
    """The tuned shapes, with large prefills only."""
    config = select_config(90, heads.head_dim, 2)
    return dataclasses.replace(config, short_prefill=config.prefill)


def attend(case: PagedCase, **changed_metadata: object) -> torch.Tensor:
    """Store and attend; asserts what padded tokens must give. [num_tokens, num_heads, head_dim]."""
    cache = case.kv_cache.clone()
    metadata: TritonAttentionMetadata = prepare_attention_triton(case.inputs, case.heads.cache_shape)
    metadata = dataclasses.replace(metadata, **{"config": always(case.heads), **changed_metadata})
    store_kv_triton(case.projected.key, case.projected.value, cache, metadata)
    with uninitialised_memory_is_nan():
        out = paged_attention_triton(case.projected.query, cache, metadata, case.scale)
    assert_bitwise(cache, case.stored_cache)
    assert_bitwise(out[case.num_tokens :], torch.zeros_like(out[case.num_tokens :]))
    return out[: case.num_tokens]


def oracle(case: PagedCase) -> torch.Tensor:
    query, cache = case.projected.query.double(), case.stored_cache.double()
    return REFERENCE_ATTENTION.paged_attention(query, cache, case.inputs, case.scale)[: case.num_tokens]


def build(step: Step, heads: Heads = QWEN, dtype: torch.dtype = torch.bfloat16) -> PagedCase:
    return build_paged_case(step, heads, dtype=dtype, device="cuda")


# Of a group of 6, 21 tokens are 126 rows and 22 are 132: one tile and two. Tiles of 128 positions ± 1, odd lengths.
STEPS = {
    "one_whole_prompt": Step(((300, 300),), 0),
    "whole_prompts": Step(((100, 100), (1, 1), (21, 21), (22, 22), (127, 127), (128, 128), (129, 129)), 0),
    "chunks_with_cached_context": Step(
        ((7, 40), (1, 128), (1, 129), (130, 300), (21, 149), (22, 150), (64, 256), (43, 257), (5, 900)), 0
    ),
    "mixed": Step(((1, 33), (1, 1), (1, 200), (17, 17), (77, 163), (1, 5), (128, 256)), 3),
    "padded_tokens": Step(((1, 33), (1, 100), (17, 17), (7, 163)), 2, num_padded_tokens=45, bound_slack=9),
    "padded_sequences": Step(((1, 33), (1, 100), (117, 130)), 2, num_padded_seqs=3, bound_slack=9),
    "padded": Step(((1, 33), (40, 100), (7, 63)), 1, num_padded_tokens=43, num_padded_seqs=2, bound_slack=900),
    "padded_decodes": Step(((1, 33), (1, 100), (1, 16)), 3, num_padded_tokens=50, num_padded_seqs=5, bound_slack=50),
    "many_sequences": Step(tuple((1 + i % 3, 1 + i % 3 + i % 7) for i in range(300)), 0, num_padded_seqs=9),
    "long": Step(((1500, 1500),), 0, num_padded_tokens=36),
}
HEADS = (
    Heads(num_kv_heads=3, group=3, head_dim=64, block_size=16),
    Heads(num_kv_heads=2, group=1, head_dim=64, block_size=32),
    Heads(num_kv_heads=1, group=8, head_dim=64, block_size=128),
    Heads(num_kv_heads=3, group=1, head_dim=128, block_size=16),
    Heads(num_kv_heads=2, group=6, head_dim=128, block_size=32),
    Heads(num_kv_heads=2, group=8, head_dim=128, block_size=64),
    Heads(num_kv_heads=1, group=3, head_dim=128, block_size=128),
)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_every_kind_of_step_is_near_the_oracle(hopper_only, step, dtype):
    case = build(step, dtype=dtype)
    assert_near_oracle("attention", attend(case), oracle(case))


@needs_hopper
@pytest.mark.parametrize("step", ["whole_prompts", "chunks_with_cached_context", "mixed", "padded"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_head_dim_group_and_block_size_is_near_the_oracle(hopper_only, heads, step):
    case = build(STEPS[step], heads)
    assert_near_oracle("attention", attend(case), oracle(case))


@needs_hopper
@pytest.mark.parametrize("num_splits", [2, 3, 7])
@pytest.mark.parametrize("heads", [QWEN, HEADS[0], HEADS[-1]], ids=str)
def test_splits_are_near_the_oracle(hopper_only, monkeypatch, heads, num_splits):
    """Splits that end before, in and after the tiles on the diagonal, and ones that no position is left for."""
    monkeypatch.setattr(attention_prefill, "num_prefill_splits", lambda *_: num_splits)
    lens = ((1, 50), (1, 1), (1, 1), (130, 130), (1, 133), (64, 300), (7, 900), (200, 1000))
    case = build(Step(lens, 1, num_padded_tokens=33, num_padded_seqs=2, bound_slack=99), heads)
    assert_near_oracle("attention", attend(case), oracle(case))


@needs_hopper
@pytest.mark.parametrize("num_splits", [1, 3])
def test_padded_decodes_without_tokens_leave_the_tokens_of_others(hopper_only, monkeypatch, num_splits):
    monkeypatch.setattr(attention_prefill, "num_prefill_splits", lambda *_: num_splits)
    case = build(Step(((1, 33), (1, 70), (50, 240), (9, 9)), 2, num_padded_tokens=3))
    assert_near_oracle("attention", attend(with_empty_decodes(case, 4)), oracle(case))


@needs_hopper
def test_decodes_of_several_tokens_are_left_to_the_decode_kernel(hopper_only):
    """Under speculation the host doesn't know how many tokens are decodes'."""
    case = build(Step(((8, 17), (2, 50), (20, 190), (135, 137)), 2, num_padded_tokens=3))
    assert_near_oracle("attention", attend(case, decode_query_len=8), oracle(case))


@needs_hopper
@pytest.mark.parametrize("num_splits", [1, 3])
def test_empty_sequences_among_others_give_zeros_and_disturb_nobody(hopper_only, monkeypatch, num_splits):
    """Padded sequences of seq_len 0 with a token or fifty, first, in the middle and last."""
    monkeypatch.setattr(attention_prefill, "num_prefill_splits", lambda *_: num_splits)
    case = build(Step(((1, 1), (1, 240), (50, 50), (30, 220), (1, 1)), 0))
    seq_lens, starts = case.inputs.seq_lens.clone(), case.inputs.query_start_loc.tolist()
    seq_lens[[0, 2, 4]] = 0
    tokens = [token for s in (0, 2, 4) for token in range(starts[s], starts[s + 1])]
    metadata = prepare_attention_triton(dataclasses.replace(case.inputs, seq_lens=seq_lens), QWEN.cache_shape)
    metadata = dataclasses.replace(metadata, config=always(QWEN))
    expected = oracle(case)
    expected[tokens] = 0.0
    case.projected.qkv[tokens] = NAN
    with uninitialised_memory_is_nan():
        out = paged_attention_triton(case.projected.query, case.stored_cache, metadata, case.scale)
    assert_near_oracle("attention", out, expected)
    assert_bitwise(out[tokens], torch.zeros_like(out[tokens]))


@needs_hopper
def test_a_step_of_padding_alone_gives_zeros(hopper_only):
    case = build(Step(((1, 1),), 1))
    inputs = dataclasses.replace(
        case.inputs,
        slot_mapping=torch.full((90,), -1, device="cuda"),
        query_start_loc=torch.tensor([0, 1, 2, 2], dtype=torch.int32, device="cuda"),
        block_tables=torch.zeros(3, 1, dtype=torch.int32, device="cuda"),
        seq_lens=torch.zeros(3, dtype=torch.int32, device="cuda"),
        num_decode_reqs=2,
    )
    cache = torch.full((2, 2, 2, 16, 128), NAN, dtype=torch.bfloat16, device="cuda")
    query = torch.full((90, 12, 128), NAN, dtype=torch.bfloat16, device="cuda")
    metadata = dataclasses.replace(prepare_attention_triton(inputs, QWEN.cache_shape), config=always(QWEN))
    with uninitialised_memory_is_nan():
        out = paged_attention_triton(query, cache, metadata, 0.125)
    assert_bitwise(out, torch.zeros_like(out))


@needs_hopper
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_captured_launch_follows_the_lengths_of_each_replay(hopper_only, monkeypatch, num_splits):
    """Three steps of 500 tokens in one CUDA graph, shaped for contexts of up to 900."""
    monkeypatch.setattr(attention_prefill, "num_prefill_splits", lambda *_: num_splits)
    steps = (((300, 300), (200, 400)), ((450, 700), (50, 60)), ((1, 900), (499, 499)))
    cases = [build(Step(lens, 0)) for lens in steps]
    num_blocks = max(len(case.stored_cache) for case in cases)
    query = torch.empty_like(cases[0].projected.query)
    cache = torch.empty(num_blocks, 2, 2, 16, 128, dtype=torch.bfloat16, device="cuda")
    tables = torch.zeros(2, 60, dtype=torch.int32, device="cuda")
    starts, lens = torch.empty_like(cases[0].inputs.query_start_loc), torch.empty_like(cases[0].inputs.seq_lens)
    inputs = dataclasses.replace(
        cases[0].inputs, block_tables=tables, query_start_loc=starts, seq_lens=lens, max_query_len=500, max_seq_len=900
    )
    metadata = dataclasses.replace(prepare_attention_triton(inputs, QWEN.cache_shape), config=always(QWEN))

    def load(case: PagedCase) -> None:
        query.copy_(case.projected.query)
        cache.fill_(NAN)
        cache[: len(case.stored_cache)] = case.stored_cache
        tables.zero_()
        tables[:, : case.inputs.block_tables.shape[1]] = case.inputs.block_tables
        starts.copy_(case.inputs.query_start_loc)
        lens.copy_(case.inputs.seq_lens)

    load(cases[0])
    paged_attention_triton(query, cache, metadata, cases[0].scale)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention_triton(query, cache, metadata, cases[0].scale)
    for case in (*cases, cases[0]):
        load(case)
        out.fill_(NAN)
        graph.replay()
        assert_near_oracle("attention", out, oracle(case))
