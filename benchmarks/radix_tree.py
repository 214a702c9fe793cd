"""How long the radix tree takes: a match, and the whole life of a request, in trees of growing size.

    python benchmarks/radix_tree.py [--nodes 1000 1000000]

Prompts of 2,000 tokens; the one that is looked up lies over 8 nodes. The other nodes are one-block sequences. The life
of a request is match, lock, block table, insert of 64 new tokens and the end.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable

from pico_vllm.kv_cache import KVCacheManager
from pico_vllm.request import Request
from pico_vllm.sampling_params import SamplingParams

BLOCK_SIZE = 16
PARAMS = SamplingParams(max_tokens=1)


def make_request(name: str, token_ids: list[int]) -> Request:
    """A request whose ids are packed, as after its first look-up."""
    request = Request(name, token_ids, PARAMS)
    _ = request.packed_prompt
    return request


def live(manager: KVCacheManager, request: Request) -> None:
    """All that the cache does for a request."""
    manager.begin_step()
    manager.admit(request)
    manager.insert(request, request.num_tokens)
    manager.take_block_copies()
    manager.free(request, request.num_tokens)


def fill(num_nodes: int) -> tuple[KVCacheManager, list[int]]:
    """A tree of about so many nodes, and a prompt whose path is 8 of them."""
    manager = KVCacheManager(num_nodes + 4096, BLOCK_SIZE, enable_prefix_caching=True)
    rng = random.Random(0)
    trunk = [rng.randrange(1 << 17) for _ in range(2000)]
    live(manager, make_request("trunk", trunk))
    for end in range(250, 2000, 250):
        live(manager, make_request(f"branch {end}", [*trunk[:end], 1 << 20]))
    for number in range(num_nodes):
        live(manager, make_request(str(number), [(1 << 21) + number]))
    return manager, trunk


def median_us(call: Callable[[], object], number: int = 300) -> float:
    """Of single calls, so that a pause of the machine is one of them."""
    times = []
    for _ in range(number):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure(num_nodes: int) -> str:
    """A tree of one size."""
    manager, trunk = fill(num_nodes)
    gc.collect()
    gc.freeze()
    request = make_request("asks", trunk)
    assert manager.get_num_cached_tokens(request) == 2000
    match = median_us(lambda: manager.get_num_cached_tokens(request))
    nodes = sum(1 for _ in manager.nodes())
    requests = [make_request(f"new {n}", [*trunk, *range(-64 * n - 64, -64 * n)]) for n in range(300)]
    whole = median_us(lambda: live(manager, requests.pop()))
    return f"{nodes:>9} nodes: match of 2,000 tokens over 8 nodes {match:6.1f} µs, a request's life {whole:6.1f} µs"


def main() -> None:
    """A line a size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, nargs="+", default=[0, 1_000, 100_000, 1_000_000])
    for num_nodes in parser.parse_args().nodes:
        print(measure(num_nodes))


if __name__ == "__main__":
    main()
