"""gloo as ranks use it. Its groups are nobody else's, so the ranks can be threads of one process."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pico_vllm.distributed.communicator import GlooCommunicator, RankLostError, connect, refuse_unlike
from pico_vllm.distributed.rendezvous import LOOPBACK, file_store, leader_address, publish_leader_address
from pico_vllm.distributed.sharding import Shard
from pico_vllm.errors import ConfigError

SIZE = 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("store") / "store")

    def join(rank):
        return connect(file_store(path, SIZE), Shard(rank, SIZE), torch.device("cpu"), addresses=(LOOPBACK,))

    with ThreadPoolExecutor(SIZE) as threads:
        communicators = list(threads.map(join, range(SIZE)))
    yield communicators
    for communicator in communicators:
        communicator.abort()


def on_all(ranks, run):
    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(run, ranks))


def test_a_cpu_gets_gloo_and_torchs_own_group_is_left_alone(ranks):
    assert all(isinstance(communicator, GlooCommunicator) for communicator in ranks)
    assert not torch.distributed.is_initialized()
    assert [communicator.shard for communicator in ranks] == [Shard(rank, SIZE) for rank in range(SIZE)]


def test_ranks_on_unlike_gpus_are_refused_by_all_of_them():
    def refuse(names):
        store = torch.distributed.HashStore()
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(refuse_unlike, store, Shard(rank, 2), names[rank]) for rank in range(2)]
            return [call.exception() for call in calls]

    assert refuse(["NVIDIA H200", "NVIDIA H200"]) == [None, None]
    for error in refuse(["NVIDIA H200", "NVIDIA A100"]):
        assert isinstance(error, ConfigError)
        assert "rank 0: NVIDIA H200, rank 1: NVIDIA A100" in str(error) and "CUDA_VISIBLE_DEVICES" in str(error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 63), (128, 96)])
def test_the_sum_is_exact_to_one_rounding_and_the_same_on_all(ranks, shape, dtype):
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(SIZE)]
    expected = sum(tensor.double() for tensor in tensors)

    def reduce(communicator):
        mine = tensors[communicator.shard.rank].clone()
        communicator.all_reduce(mine)
        return mine

    results = on_all(ranks, reduce)
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0].double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_tensors_are_gathered_in_the_order_of_ranks(ranks):
    def gather(communicator):
        out = torch.full((SIZE, 2, 5), float("nan"))
        communicator.all_gather(torch.full((2, 5), float(communicator.shard.rank)), out)
        return out

    for out in on_all(ranks, gather):
        assert torch.equal(out, torch.arange(3.0)[:, None, None].expand(SIZE, 2, 5))


def test_the_largest_number_is_exact(ranks):
    values = [-(2.0**52) - 1, -(2.0**52), -(2.0**52) - 2]
    assert on_all(ranks, lambda c: c.largest(values[c.shard.rank])) == [values[1]] * SIZE


def test_a_rank_that_is_gone_is_an_error_for_the_others(tmp_path):
    path = str(tmp_path / "store")

    def join(rank):
        communicator = GlooCommunicator(file_store(path, 2), Shard(rank, 2), addresses=(LOOPBACK,))
        communicator.all_reduce(torch.ones(3))
        if rank == 1:
            communicator.abort()
            return None
        with pytest.raises(RankLostError):
            communicator.all_reduce(torch.ones(3))
        with pytest.raises(RankLostError):
            communicator.all_gather(torch.ones(3), torch.ones(2, 3))
        communicator.abort()
        communicator.abort()
        return "noticed"

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(join, range(2))) == ["noticed", None]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "node-0.cluster"])
def test_the_address_of_rank_0_comes_back(tmp_path, host):
    store = file_store(str(tmp_path / "store"), 1)
    publish_leader_address(store, host, 12345)
    assert leader_address(store) == (host, 12345)
