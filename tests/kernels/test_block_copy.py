import pytest
import torch

from kernel_cases import random_tensor
from kernel_implementations import assert_bitwise, each_implementation, each_implementation_and_dtype

#: num_kv_heads, block_size, head_dim: Qwen2.5-1.5B, SmolLM2-135M, blocks of one token, and an odd size.
SHAPES = ((2, 16, 128), (3, 16, 64), (1, 1, 64), (1, 3, 10))
each_shape = pytest.mark.parametrize("shape", SHAPES)


def random_caches(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str, num_layers: int = 3
) -> list[torch.Tensor]:
    """9 blocks a layer."""
    num_kv_heads, block_size, head_dim = shape
    return [
        random_tensor(9, 2, num_kv_heads, block_size, head_dim, dtype=dtype, device=device, seed=layer)
        for layer in range(num_layers)
    ]


def ids(*values: int, device: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@each_shape
@each_implementation_and_dtype("copy_blocks")
def test_blocks_are_copied_in_every_layer_and_nothing_else_changes(impl, dtype, shape):
    caches = random_caches(shape, dtype, impl.device)
    before = [cache.clone() for cache in caches]
    impl.op(caches, ids(4, 0, 4, device=impl.device), ids(7, 2, 8, device=impl.device))
    for cache, old in zip(caches, before, strict=True):
        assert_bitwise(cache, old[[0, 1, 0, 3, 4, 5, 6, 4, 4]])


@each_shape
@each_implementation_and_dtype("gather_blocks")
def test_blocks_are_gathered_layer_by_layer_in_the_order_of_the_ids(impl, dtype, shape):
    caches = random_caches(shape, dtype, impl.device)
    buffer = impl.op(caches, ids(8, 0, 3, 3, device=impl.device))
    assert buffer.is_contiguous()
    assert_bitwise(buffer, torch.stack([cache[[8, 0, 3, 3]] for cache in caches]))
    buffer.fill_(7.0)
    assert not any((cache == 7.0).all() for cache in caches)


@each_shape
@each_implementation_and_dtype("scatter_blocks")
def test_scattered_blocks_are_those_that_were_gathered(impl, dtype, shape):
    caches = random_caches(shape, dtype, impl.device)
    before = [cache.clone() for cache in caches]
    buffer = random_tensor(3, 4, 2, *shape, dtype=dtype, device=impl.device, seed=9)
    impl.op(buffer, caches, ids(8, 0, 3, 1, device=impl.device))
    for layer, (cache, old) in enumerate(zip(caches, before, strict=True)):
        expected = old.clone()
        expected[[8, 0, 3, 1]] = buffer[layer]
        assert_bitwise(cache, expected)


@each_implementation("copy_blocks")
def test_ids_may_be_int64_and_one_layer_is_enough(impl):
    (cache,) = random_caches((1, 3, 10), torch.float32, impl.device, num_layers=1)
    before = cache.clone()
    source, destination = (ids(i, device=impl.device, dtype=torch.int64) for i in (0, 5))
    impl.op([cache], source, destination)
    assert_bitwise(cache, before[[0, 1, 2, 3, 4, 0, 6, 7, 8]])


@each_implementation("copy_blocks")
def test_no_ids_copy_nothing(impl):
    caches = random_caches((1, 3, 10), torch.float32, impl.device)
    before = [cache.clone() for cache in caches]
    impl.op(caches, ids(device=impl.device), ids(device=impl.device))
    for cache, old in zip(caches, before, strict=True):
        assert_bitwise(cache, old)


@each_implementation("gather_blocks")
def test_no_ids_gather_an_empty_buffer(impl):
    caches = random_caches((1, 3, 10), torch.float32, impl.device)
    assert impl.op(caches, ids(device=impl.device)).shape == (3, 0, 2, 1, 3, 10)


@each_implementation("gather_blocks")
def test_layers_that_are_views_at_odd_addresses_are_gathered_too(impl):
    """Where a layer's cache doesn't begin at a multiple of 16 bytes."""
    memory = torch.randn(1 + 2 * 9 * 2 * 40, device=impl.device)[1:]
    caches = list(memory.view(2, 9, 2, 1, 4, 10))
    buffer = impl.op(caches, ids(2, 5, device=impl.device))
    assert_bitwise(buffer, torch.stack([cache[[2, 5]] for cache in caches]))
