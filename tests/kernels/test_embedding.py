import pytest
import torch

from kernel_cases import NAN, ODD_SIZES, random_tensor
from kernel_implementations import assert_bitwise, each_implementation, each_implementation_and_dtype


@each_implementation("embedding")
def test_rows_come_in_the_order_of_the_ids_by_hand(impl):
    weight = torch.tensor([[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]], device=impl.device)
    ids = torch.tensor([2, 0, 0, 1], dtype=torch.int32, device=impl.device)
    assert impl.op(ids, weight).tolist() == [[2.0, 2.5], [0.0, 0.5], [0.0, 0.5], [1.0, 1.5]]


@pytest.mark.parametrize("hidden_size", [1, 63, 576])
@pytest.mark.parametrize("num_tokens", ODD_SIZES)
@each_implementation_and_dtype("embedding")
def test_every_row_is_an_exact_copy_of_its_table_row(impl, dtype, num_tokens, hidden_size):
    vocab_size = 1009
    weight = random_tensor(vocab_size, hidden_size, dtype=dtype, device=impl.device)
    ids = torch.randint(0, vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    ids[0] = vocab_size - 1
    y = impl.op(ids.to(impl.device), weight)
    assert y.shape == (num_tokens, hidden_size)
    assert_bitwise(y, torch.stack([weight[i] for i in ids.tolist()]))


@each_implementation_and_dtype("embedding")
def test_rows_that_are_not_asked_for_do_not_matter(impl, dtype):
    weight = torch.full((7, 5), NAN, dtype=dtype, device=impl.device)
    weight[4] = 2.0
    y = impl.op(torch.tensor([4, 4], dtype=torch.int32, device=impl.device), weight)
    assert y.tolist() == [[2.0] * 5] * 2


@each_implementation("embedding")
def test_result_is_a_new_tensor_even_for_all_rows_in_order(impl):
    # The residual stream is written in place: it must not be the table.
    weight = random_tensor(3, 4, dtype=torch.float32, device=impl.device)
    before = weight.clone()
    impl.op(torch.arange(3, dtype=torch.int32, device=impl.device), weight).fill_(7.0)
    assert_bitwise(weight, before)


@each_implementation("embedding")
def test_ids_may_be_a_part_of_a_packed_buffer(impl):
    weight = random_tensor(9, 4, dtype=torch.float32, device=impl.device)
    packed = torch.tensor([100, 100, 8, 3, 100], dtype=torch.int32, device=impl.device)
    assert_bitwise(impl.op(packed[2:4], weight), weight[[8, 3]])
