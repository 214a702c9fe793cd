"""HostRing: a step's memory is its own until the step is over, and what is sent arrives as it was."""

import numpy as np
import pytest
import torch

from pico_vllm.worker.host_ring import HostRing

CPU = torch.device("cpu")


class FakeEvent:
    """A GPU's event, ended by the test."""

    def __init__(self):
        self.calls = []
        self.is_over = False

    def record(self):
        self.calls.append("record")
        self.is_over = False

    def query(self):
        return self.is_over

    def synchronize(self):
        self.calls.append("synchronize")


def make_ring(max_num_seqs=4):
    return HostRing(CPU, max_num_seqs)


def test_arrays_of_all_dtypes_and_shapes_arrive_as_they_were():
    ring = make_ring()
    ring.begin_step()
    arrays = [
        np.array([True, False, True]),
        np.arange(5, dtype=np.int32),
        np.array([[1.5, -2.0], [0.25, 8.0]], dtype=np.float32),
        np.empty(0, dtype=np.int64),
        np.array([-(2**62), 3], dtype=np.int64),
        np.arange(12, dtype=np.int64)[::3],  # not contiguous
    ]
    for _ in range(3):  # the offsets differ
        sent = ring.send(*arrays)
        assert [tensor.tolist() for tensor in sent] == [array.tolist() for array in arrays]
        assert [tuple(tensor.shape) for tensor in sent] == [array.shape for array in arrays]
        dtypes = [torch.bool, torch.int32, torch.float32, torch.int64, torch.int64, torch.int64]
        assert [tensor.dtype for tensor in sent] == dtypes
        assert all(tensor.data_ptr() % 16 == 0 for tensor in sent), "or Triton compiles its kernels once more"


def test_integers_are_packed_as_int32():
    ring = make_ring()
    ring.begin_step()
    sent = ring.send_int32(np.array([1, -1]), np.empty(0, dtype=np.int32), np.array([7], dtype=np.int32))
    assert [(tensor.tolist(), tensor.dtype) for tensor in sent] == [
        ([1, -1], torch.int32), ([], torch.int32), ([7], torch.int32),
    ]  # fmt: skip
    target = torch.zeros(3, dtype=torch.int32)
    ring.send_into(np.array([4, 5, 6], dtype=np.int32), target)
    assert target.tolist() == [4, 5, 6]


def test_what_a_step_in_flight_has_sent_from_is_not_overwritten():
    ring = make_ring()
    first = ring.begin_step()
    array, _ = first.take(16)
    array[:] = 7
    ids = first.fetch_ids(torch.tensor([1, 2]))
    second = ring.begin_step()
    ring.send(np.full(100, 255, dtype=np.int32))
    other_ids = second.fetch_ids(torch.tensor([3, 4, 5]))
    assert array.tolist() == [7] * 16 and ids.tolist() == [1, 2] and other_ids.tolist() == [3, 4, 5]
    with pytest.raises(AssertionError, match="2 steps are in flight"):
        ring.begin_step()


def test_a_slot_is_used_again_when_its_step_is_over():
    ring = make_ring()
    slots = []
    for _ in range(4):
        slots.append(ring.begin_step())
        slots[-1].close()
        slots[-1].wait()
    assert slots[0] is slots[2] is not slots[1] is slots[3]


def test_after_a_failed_step_all_slots_are_free():
    ring = make_ring()
    ring.begin_step(), ring.begin_step()
    ring.forget_inflight()
    ring.begin_step(), ring.begin_step()


def test_a_step_that_needs_more_gets_it_and_the_slot_has_grown_when_it_comes_again():
    ring = make_ring()
    slot = ring.begin_step()
    capacity = slot._tensor.shape[0]
    big = np.arange(capacity, dtype=np.int64)
    assert torch.equal(ring.send(big)[0], torch.from_numpy(big))
    assert torch.equal(ring.send(big, big[:3])[1], torch.arange(3))
    assert slot._tensor.shape[0] == capacity
    for _ in range(2):
        slot.wait()
        ring.begin_step().wait()
        assert ring.begin_step() is slot
        assert 8 * 2 * capacity < slot._tensor.shape[0] <= 64 * capacity, "and no further"
        ring.send(big, big)


def test_a_step_is_late_when_the_one_before_it_has_ended_and_was_not_taken_in():
    ring = make_ring()
    first = ring.begin_step()
    assert not ring.previous_step_has_ended(), "there is none"
    first._event = event = FakeEvent()
    first.close()
    ring.begin_step()
    assert not ring.previous_step_has_ended(), "it runs"
    event.is_over = True
    assert ring.previous_step_has_ended()
    first.wait()
    assert not ring.previous_step_has_ended(), "it was taken in: nothing was in flight"
    assert event.calls == ["record", "synchronize"]


def test_results_of_any_shape_come_to_the_host():
    slot = make_ring().begin_step()
    tensors = [torch.randn(3, 5), torch.arange(3), torch.empty(0, 2)]
    copies = slot.fetch(tensors)
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))
    assert all(copy.data_ptr() != tensor.data_ptr() for copy, tensor in zip(copies[:2], tensors[:2], strict=True))
