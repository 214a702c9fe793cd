"""One attention op: a paged KV cache by hand, and three ways to attend over it that agree.

Two sequences live in blocks scattered over one cache tensor. The step has a decode (one new token) and a prompt chunk
(several), all in one flat token dimension. K and V are stored at the slots of the new tokens, then each token attends
to its sequence. The truth is a softmax over the same keys and values lying side by side, without any paging.

    python examples/one_attention_op.py
"""

import torch

from pico_vllm.kernels.attention import AttentionInputs, KVCacheShape
from pico_vllm.kernels.backend import CPU, REFERENCE, KernelBackend

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 6, 2, 16, 4, 12
SCALE = HEAD_DIM**-0.5
SEQ_LENS = (11, 7)  # tokens of each sequence after this step
QUERY_LENS = (1, 3)  # how many of them are new: a decode, and a chunk that continues 4 cached tokens
BLOCK_TABLES = ([9, 2, 7], [4, 11])  # in any order: position p is in block_table[p // BLOCK_SIZE]


def slot(sequence: int, position: int) -> int:
    """Where a position's K and V are: block_id * block_size + offset."""
    return BLOCK_TABLES[sequence][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def step_inputs() -> AttentionInputs:
    """What attention must know of the step."""
    new = [(s, p) for s in (0, 1) for p in range(SEQ_LENS[s] - QUERY_LENS[s], SEQ_LENS[s])]
    width = max(map(len, BLOCK_TABLES))
    return AttentionInputs(
        slot_mapping=torch.tensor([slot(s, p) for s, p in new], dtype=torch.int32),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in BLOCK_TABLES], dtype=torch.int32),
        query_start_loc=torch.tensor([0, QUERY_LENS[0], sum(QUERY_LENS)], dtype=torch.int32),
        seq_lens=torch.tensor(SEQ_LENS, dtype=torch.int32),
        num_decode_reqs=1,
        max_query_len=max(QUERY_LENS),
        max_seq_len=max(SEQ_LENS),
    )


def attend(
    backend: KernelBackend, query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> torch.Tensor:
    """Fill a cache with the old tokens, then do what a layer does: store the new ones and attend."""
    # Everything no token was stored in is NaN: reading it would show.
    kv_cache = torch.full((NUM_BLOCKS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), float("nan"))
    for s in (0, 1):
        for p in range(SEQ_LENS[s] - QUERY_LENS[s]):
            block, offset = divmod(slot(s, p), BLOCK_SIZE)
            kv_cache[block, 0, :, offset], kv_cache[block, 1, :, offset] = keys[s][p], values[s][p]
    new_keys = torch.cat([keys[s][-QUERY_LENS[s] :] for s in (0, 1)])  # [num_tokens, num_kv_heads, head_dim]
    new_values = torch.cat([values[s][-QUERY_LENS[s] :] for s in (0, 1)])
    heads = torch.cat((query, new_keys, new_values), dim=1)  # what a fused projection gives
    no_turn = torch.cat((torch.ones(len(query), HEAD_DIM // 2), torch.zeros(len(query), HEAD_DIM // 2)), dim=1)
    metadata = backend.prepare_attention(step_inputs(), KVCacheShape(NUM_KV_HEADS, BLOCK_SIZE))
    backend.rotary_embedding_and_store_kv(heads, no_turn, kv_cache, metadata, NUM_HEADS)
    out: torch.Tensor = backend.paged_attention(heads[:, :NUM_HEADS], kv_cache, metadata, SCALE)
    return out


def plain_softmax(query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """softmax(scale q K^T) V with a causal mask in fp64: no blocks, no slots, no groups."""
    rows = []
    for s, q in enumerate(query.split(QUERY_LENS)):
        # Head h reads KV head h // group.
        k, v = (x.double().repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1) for x in (keys[s], values[s]))
        positions = torch.arange(SEQ_LENS[s] - QUERY_LENS[s], SEQ_LENS[s])
        future = torch.arange(SEQ_LENS[s]) > positions[:, None]  # [query_len, seq_len]
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * SCALE
        rows.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), v))
    return torch.cat(rows)


def main() -> None:
    """Attend three ways and print the differences."""
    torch.manual_seed(0)
    query = torch.randn(sum(QUERY_LENS), NUM_HEADS, HEAD_DIM)
    keys = [torch.randn(n, NUM_KV_HEADS, HEAD_DIM) for n in SEQ_LENS]
    values = [torch.randn(n, NUM_KV_HEADS, HEAD_DIM) for n in SEQ_LENS]
    for s in (0, 1):
        slots = [slot(s, p) for p in range(SEQ_LENS[s])]
        print(f"sequence {s}: block table {BLOCK_TABLES[s]}, slots {slots}, the last {QUERY_LENS[s]} new")
    truth = plain_softmax(query, keys, values)
    for backend in (REFERENCE, CPU):
        out = attend(backend, query, keys, values)
        error = (out - truth).abs().max().item()
        assert error < 1e-5, error  # NaN isn't
        print(f"{backend.name:<9} against the plain softmax in fp64: largest difference {error:.1e}")
    print(
        f"the {NUM_BLOCKS - 5} unused blocks hold NaN and no output does: what lies past a sequence's end can't matter"
    )


if __name__ == "__main__":
    main()
