"""A KV cache of more than 2**31 elements: addresses that 32 bits don't hold."""

import pytest
import torch

from pico_vllm.kernels.attention import AttentionInputs, KVCacheShape
from pico_vllm.kernels.backend import REFERENCE
from pico_vllm.kernels.triton_backend import TRITON

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 12, 2, 128
BLOCK_ELEMENTS = 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM


def run(device: str, num_blocks: int, query_len: int, num_seqs: int = 3, context: int = 100) -> None:
    """Store and attend in the last blocks of a cache, and compare with the reference on a copy of those."""
    generator = torch.Generator(device).manual_seed(0)
    kv_cache = torch.empty(num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16, device=device)
    per_seq = -(-context // BLOCK_SIZE)
    used = num_seqs * per_seq
    first = num_blocks - used
    kv_cache[first:].normal_(generator=generator)
    small_cache = kv_cache[first:].clone()
    total_heads = NUM_HEADS + 2 * NUM_KV_HEADS
    shape = (num_seqs * query_len, total_heads, HEAD_DIM)
    heads = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
    cos_sin = torch.randn(len(heads), HEAD_DIM, dtype=torch.bfloat16, device=device, generator=generator)
    tables = torch.arange(used, dtype=torch.int32, device=device).view(num_seqs, per_seq)
    positions = torch.arange(context - query_len, context, device=device)
    slots = (tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).flatten().int()

    def attend(backend, cache, first_block):
        inputs = AttentionInputs(
            slot_mapping=slots + first_block * BLOCK_SIZE,
            block_tables=tables + first_block,
            query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * query_len,
            seq_lens=torch.full((num_seqs,), context, dtype=torch.int32, device=device),
            num_decode_reqs=num_seqs if query_len == 1 else 0,
            max_query_len=query_len,
            max_seq_len=context,
        )
        metadata = backend.prepare_attention(inputs, KVCacheShape(NUM_KV_HEADS, BLOCK_SIZE))
        mine = heads.clone()
        backend.rotary_embedding_and_store_kv(mine, cos_sin, cache, metadata, NUM_HEADS)
        return backend.paged_attention(mine[:, :NUM_HEADS], cache, metadata, HEAD_DIM**-0.5)

    expected = attend(REFERENCE, small_cache, 0)
    actual = attend(TRITON, kv_cache, first)
    assert torch.equal(kv_cache[first:], small_cache)
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize("query_len", [1, 40])
def test_store_and_attention_reach_the_end_of_a_cache_of_more_than_2_to_the_31_elements(query_len):
    num_blocks = (1 << 31) // BLOCK_ELEMENTS + 1000
    if torch.cuda.mem_get_info()[0] < 2 * num_blocks * BLOCK_ELEMENTS + (1 << 30):
        pytest.skip("needs 5 GiB of free GPU memory")
    run("cuda", num_blocks, query_len)
    torch.cuda.empty_cache()
