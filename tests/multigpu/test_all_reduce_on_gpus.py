"""Our all-reduce on two GPUs against NCCL's, with the add and the norm of one rank behind it."""

import functools

import pytest
import torch

from gpu_ranks import on_each_gpu
from pico_vllm.distributed.symmetric_memory import MAX_CHOICES, MAX_FEW_ROWS, MAX_ROWS_IN_BLOCKS
from pico_vllm.distributed.tensor_parallel import MultiRank
from pico_vllm.kernels.triton_backend import TRITON

SIZE = 2
EPS = 1e-6
#: All ways and their borders, whole blocks and odd rests.
FEW_ROWS = (1, 2, 3, 7, 31, 64, MAX_FEW_ROWS - 1, MAX_FEW_ROWS)
NUM_ROWS = (*FEW_ROWS, MAX_FEW_ROWS + 1, 500, 1023, MAX_ROWS_IN_BLOCKS, MAX_ROWS_IN_BLOCKS + 1, 4097)
MAX_TOKENS = 4200


class Sums:
    """Random partial sums of one rank, and what NCCL and our kernels make of them."""

    def __init__(self, communicator, hidden_size, dtype):
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.generator = torch.Generator(self.device).manual_seed(communicator.shard.rank)
        self.common = torch.Generator(self.device).manual_seed(99)
        self.hidden_size, self.dtype = hidden_size, dtype
        self.communicator = communicator
        communicator.reserve(MAX_TOKENS, hidden_size, dtype)
        assert communicator.symmetric is not None
        self.group = MultiRank(TRITON, communicator=communicator, overlaps=True)
        self.weight = torch.randn(hidden_size, generator=self.common, device=self.device).to(dtype)

    def draw(self, num_rows, num_splits=None):
        """(this rank's partial sums, the residual of all ranks)."""
        shape = (num_rows, self.hidden_size)
        residual = torch.randn(shape, generator=self.common, device=self.device).to(self.dtype)
        if num_splits is None:
            return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype), residual
        return torch.randn(num_splits, *shape, generator=self.generator, device=self.device), residual

    def expected(self, partial, residual):
        """NCCL's sum, then one rank's kernel: (normalised, residual)."""
        partial = partial.clone() if partial.dim() == 2 else partial.sum(0).to(self.dtype)
        self.communicator.all_reduce(partial)
        return TRITON.add_rms_norm(partial, residual.clone(), self.weight, EPS)

    def ours(self, partial, residual):
        return self.group.reduce_add_rms_norm(partial, residual, self.weight, EPS)


def poison():
    """What is allocated next holds NaN."""
    junk = [torch.full((8 << 20,), float("nan"), device="cuda") for _ in range(3)]
    del junk


def compare(ours, expected, what, communicator):
    """The residual to the bit; the norm adds the squares in another order; both are the same on all ranks."""
    normalised, residual = ours
    wrong = (residual != expected[1]).sum()
    assert wrong == 0, f"{what}: the residual differs in {wrong} of {residual.numel()} numbers"
    rtol = 4 * torch.finfo(residual.dtype).eps
    torch.testing.assert_close(normalised, expected[0], rtol=rtol, atol=rtol, msg=lambda text: f"{what}: {text}")
    on_all = normalised.new_empty(SIZE, *normalised.shape)
    communicator.all_gather(normalised, on_all)
    assert torch.equal(on_all[0], on_all[1]), what


def rows_of_all_sizes(communicator, hidden_size, dtype):
    sums = Sums(communicator, hidden_size, dtype)
    for repetition in range(3):
        for num_rows in NUM_ROWS if repetition % 2 == 0 else NUM_ROWS[::-1]:
            for num_splits in (None, 3):
                partial, residual = sums.draw(num_rows, num_splits)
                expected = sums.expected(partial, residual)
                poison()
                compare(sums.ours(partial, residual), expected, (num_rows, num_splits, repetition), communicator)
            plain, _ = sums.draw(num_rows)
            summed = communicator.symmetric.all_reduce(plain)
            later = communicator.symmetric.start_all_reduce(plain)
            assert torch.equal(later(), summed)
            communicator.all_reduce(plain)
            assert torch.equal(summed, plain), num_rows


def captured_and_replayed(communicator, hidden_size, dtype):
    """Eager launches and replays of two graphs, in turn, with different numbers of rows."""
    sums = Sums(communicator, hidden_size, dtype)
    graphs = []
    for sizes in ((1, 5, 1, 64), (500, 3, 1100, 2100)):
        inputs = [sums.draw(num_rows) for num_rows in sizes]
        for partial, residual in inputs:
            sums.ours(partial.clone(), residual.clone())
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        kept = [residual.clone() for _, residual in inputs]
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            outputs = [sums.ours(partial, residual)[0] for (partial, _), residual in zip(inputs, kept, strict=True)]
        graphs.append((graph, inputs, kept, outputs))
    for repetition in range(20):
        graph, inputs, kept, outputs = graphs[repetition % 3 % 2]
        expected = []
        for (partial, residual), residual_there in zip(inputs, kept, strict=True):
            fresh, fresh_residual = sums.draw(len(partial))
            partial.copy_(fresh)
            residual.copy_(fresh_residual)
            residual_there.copy_(fresh_residual)
            expected.append(sums.expected(partial, residual))
        graph.replay()
        for ours, residual, wanted in zip(outputs, kept, expected, strict=True):
            compare((ours, residual), wanted, repetition, communicator)
        partial, residual = sums.draw(2)
        expected = sums.expected(partial, residual)
        compare(sums.ours(partial, residual), expected, "eager", communicator)


def two_under_way(communicator, hidden_size, dtype):
    """As OverlappedModel does it, with products between, for many layers without a wait of the host."""
    sums = Sums(communicator, hidden_size, dtype)
    matrix = torch.randn(hidden_size, hidden_size, device=sums.device, dtype=dtype)
    for num_rows in (1024, 3000):
        halves = (slice(0, num_rows // 2), slice(num_rows // 2, num_rows))
        drawn = [sums.draw(num_rows) for _ in range(24)]
        expected = [sums.expected(partial, residual) for partial, residual in drawn]
        ours = []
        pending = []
        for partial, residual in drawn:
            for half in halves:
                if len(pending) == 2:
                    ours.append(pending.pop(0)())
                torch.mm(partial, matrix)
                start = functools.partial(sums.group.start_reduce_add_rms_norm, weight=sums.weight, eps=EPS)
                pending.append(start(partial[half], residual[half]))
        ours += [finish() for finish in pending]
        for i, wanted in enumerate(expected):
            for half, got in zip(halves, ours[2 * i : 2 * i + 2], strict=True):
                compare(got, [whole[half] for whole in wanted], (num_rows, i), communicator)


def steps_back_to_back(communicator, hidden_size, dtype):
    """Two graphs as of two steps, with slots of their own, replayed in turn while one rank is late at each of its sums.

    Nothing else lies between: that a slot of the copies is free is up to the sum of few rows with which each begins.
    """
    sums = Sums(communicator, hidden_size, dtype)
    rank = communicator.shard.rank
    steps = []
    for num_rows in ((2100, 2100, 300), (300, 2100)):
        first = sums.draw(1)[0]
        inputs = [sums.draw(num) for num in num_rows]
        expected = [sums.expected(partial, residual) for partial, residual in inputs]
        kept = [residual.clone() for _, residual in inputs]

        def run(first=first, inputs=inputs, kept=kept):
            communicator.symmetric.all_reduce(first)
            outputs = []
            for i, ((partial, residual), there) in enumerate(zip(inputs, kept, strict=True)):
                there.copy_(residual)
                if (i + rank) % 2:
                    torch.cuda._sleep(200_000)  # cycles: a tenth of a millisecond
                outputs.append(sums.ours(partial, there)[0])
            return outputs

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            outputs = run()
        steps.append((graph, outputs, kept, expected, run))  # which holds what the graph reads
    seen = []
    for i in range(40):
        graph, outputs, kept, expected, _ = steps[i * 7 % 3 % 2]
        graph.replay()
        seen += [
            (output.clone(), there.clone(), wanted)
            for output, there, wanted in zip(outputs, kept, expected, strict=True)
        ]
    torch.cuda.synchronize()
    for i, (output, there, wanted) in enumerate(seen):
        compare((output, there), wanted, i, communicator)


def best_tokens(communicator, num_own, dtype):
    """Eager and captured, of rows that have room in symmetric memory and of more; many ties."""
    communicator.reserve(64, 64, dtype)
    group = MultiRank(TRITON, communicator=communicator, overlaps=False)
    device = torch.device("cuda", torch.cuda.current_device())
    common = torch.Generator(device).manual_seed(5)
    rank = communicator.shard.rank
    for num_rows in (1, 5, 64, 256, MAX_CHOICES, MAX_CHOICES + 1):
        whole = torch.randn(num_rows, SIZE * num_own, generator=common, device=device).to(dtype)
        own = whole[:, rank * num_own :][:, :num_own].contiguous()
        rows = torch.randperm(num_rows, generator=common, device=device).int()
        kept, expected_kept = torch.full((2, num_rows), -1, dtype=torch.int32, device=device)
        expected = TRITON.greedy(whole, expected_kept, rows)
        assert torch.equal(group.greedy(own, kept, rows), expected) and torch.equal(kept, expected_kept)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            captured = [group.greedy(own, kept, rows) for _ in range(3)]
        for repetition in range(5):
            whole.copy_(torch.randn(whole.shape, generator=common, device=device))
            own.copy_(whole[:, rank * num_own :][:, :num_own])
            kept.fill_(-1)
            graph.replay()
            expected = TRITON.greedy(whole, expected_kept, rows)
            assert all(torch.equal(ids, expected) for ids in captured), (num_rows, repetition)
            assert torch.equal(kept, expected_kept)


@pytest.mark.parametrize(("num_own", "dtype"), [(76032, torch.bfloat16), (150, torch.float32)])
def test_the_best_tokens_of_two_gpus_are_those_of_whole_logits(tmp_path, num_own, dtype):
    on_each_gpu(SIZE, tmp_path, best_tokens, num_own, dtype)


@pytest.mark.parametrize(
    ("hidden_size", "dtype"),
    [(3584, torch.bfloat16), (1536, torch.bfloat16), (896, torch.float16), (36, torch.float32), (64, torch.bfloat16)],
)
@pytest.mark.parametrize("run", [rows_of_all_sizes, captured_and_replayed, two_under_way, steps_back_to_back])
def test_sums_of_two_gpus_are_those_of_nccl(tmp_path, run, hidden_size, dtype):
    on_each_gpu(SIZE, tmp_path, run, hidden_size, dtype)
