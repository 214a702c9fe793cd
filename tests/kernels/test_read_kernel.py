"""The sum behind the read ceiling: interpreted, or compiled where there is a GPU."""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU, or TRITON_INTERPRET=1"
)
@pytest.mark.parametrize("num_elements, num_programs, block", [(1, 1, 16), (5000, 3, 256), (512, 2, 256), (700, 8, 64)])
def test_partial_sums_add_up_to_the_sum_of_all_elements(num_elements, num_programs, block):
    from pico_vllm.bench.read_kernel import partial_sum

    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(1 << 62), 1 << 62, (num_elements,), generator=generator).to(DEVICE)
    partial = torch.full((num_programs,), 7, dtype=torch.int64, device=DEVICE)
    partial_sum(x, partial, block=block, num_warps=4)
    assert int(partial.sum()) == int(x.sum())  # both modulo 2^64
