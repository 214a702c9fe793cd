import pytest
import torch


@pytest.fixture(scope="module")
def exact_fp32_products():
    """TF32 would round fp32 inputs to 10 bits, and make tokens depend on the composition of a batch."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
