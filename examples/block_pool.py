"""Block pool: paging without a tensor. Allocate, share, release; free + held = all blocks, after every operation.

The KV cache is cut into blocks of a few tokens, so a request needs no contiguous memory and wastes less than a block.
The pool only counts: how many owners has each block id? A block whose last owner lets go is free again.

    python examples/block_pool.py
"""

from pico_vllm.kv_cache import BlockPool, KVCacheManager
from pico_vllm.request import Request
from pico_vllm.sampling_params import SamplingParams


def counting_owners() -> None:
    """Three requests on six blocks; one of them shares another's blocks."""
    pool = BlockPool(num_blocks=6)

    def show(event: str) -> None:
        pool.check_invariants()  # no block is free twice; a block is free exactly if it has no owner
        owners = [pool.logical_ref_count(block_id) for block_id in range(pool.num_blocks)]
        print(f"{event:<44} owners {owners}  free {pool.num_free_blocks}")

    show("a new pool")
    a = pool.allocate(3)
    assert a is not None
    show(f"A allocates 3: {a}")
    b = pool.allocate(2)
    assert b is not None
    show(f"B allocates 2: {b}")
    show(f"C wants 2, one is free: {pool.allocate(2)}, no change")
    pool.acquire(a[:2])
    show(f"C shares the first blocks of A: {a[:2]}")
    pool.release(a)
    show("A releases all of its blocks: C keeps two")
    pool.release(b)
    pool.release(a[:2])
    show("B and C release theirs")
    print(f"released last, handed out first: allocate(3) = {pool.allocate(3)}")
    try:
        pool.release([5])
    except AssertionError as error:
        print(f"our own mistakes are loud: {error}")


def from_tokens_to_blocks() -> None:
    """The manager above the pool: block tables that grow with the tokens of a request."""
    manager = KVCacheManager(num_blocks=4, block_size=4)
    request = Request("A", prompt_token_ids=range(5), params=SamplingParams(max_tokens=8))
    print(f"\nblocks of {manager.block_size} tokens; {request.request_id} starts with {request.num_tokens}")
    for num_tokens in range(request.num_tokens, 13):
        new = manager.allocate_slots(request.request_id, num_tokens)
        manager.check_invariants()
        print(f"  {num_tokens:>2} tokens: new blocks {new!s:<7} table {manager.block_table(request.request_id)}")
    manager.free(request)
    print(f"freed: {manager.num_free_blocks} of {manager.num_blocks} blocks are free")


if __name__ == "__main__":
    counting_owners()
    from_tokens_to_blocks()
