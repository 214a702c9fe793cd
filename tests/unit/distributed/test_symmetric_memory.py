"""What of symmetric memory needs no GPU: how ranks find each other."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed

from pico_vllm.distributed.sharding import Shard
from pico_vllm.distributed.symmetric_memory import RenumberedStore, _register


def exchange(store, rank, first_number):
    """As torch's exchange, through a store of C++ as torch's calls come: three rounds, numbered by the process."""
    ours = RenumberedStore(store)
    store = torch.distributed.PrefixStore("torch", ours)
    seen = []
    for number in range(first_number, first_number + 3):
        store.set(f"exchange/{number}/{rank}", f"{rank} in round {number - first_number}")
        store.wait([f"exchange/{number}/{1 - rank}"], timedelta(seconds=10))
        seen.append(store.get(f"exchange/{number}/{1 - rank}").decode())
    return seen


def test_ranks_whose_processes_have_counted_differently_find_each_other():
    """Twice: the second engine of rank 0's process, whose count has gone on, and of a new process."""
    for counts in ((0, 0), (6, 0)):
        store = torch.distributed.HashStore()
        with ThreadPoolExecutor(2) as threads:
            results = list(threads.map(exchange, (store, store), (0, 1), counts))
        assert results == [[f"{1 - rank} in round {i}" for i in range(3)] for rank in (0, 1)]


def test_all_ranks_register_under_one_name_and_each_engine_under_its_own():
    names = []
    for _ in range(2):
        store = torch.distributed.HashStore()
        registered = [_register(store, Shard(rank, 1))[0] for rank in (0,)]
        names += registered
        assert store.get("symmetric/name").decode() == registered[0]
    assert len(set(names)) == 2
