"""What is read of a Chrome trace."""

import gzip
import json

import pytest

from pico_vllm.errors import ConfigError
from pico_vllm.profiling.trace import Kernel, Range, load_events, read_trace
from traces import host, kernel, launch


def test_ranges_are_told_apart_by_their_names_and_sorted():
    trace = read_trace(
        [
            host("step", 100, 150),
            host("step", 0, 90),
            host("phase.build inputs", 1, 2),
            host("layer.11", 3, 4),
            host("op.linear 8 x 16", 3, 4),
            {"ph": "X", "cat": "user_annotation", "name": "somebody's", "ts": 0, "dur": 1},
            {"ph": "X", "cat": "gpu_user_annotation", "name": "pico.step", "ts": 0, "dur": 1},
            {"ph": "M", "name": "process_name"},
        ]
    )
    assert trace.steps == (Range("", 0, 90), Range("", 100, 150))
    assert trace.phases == (Range("build inputs", 1, 2),)
    assert trace.layers == (Range("11", 3, 4),)
    assert trace.ops == (Range("linear 8 x 16", 3, 4),)


def test_a_kernel_knows_when_it_was_launched_by_its_correlation():
    trace = read_trace(
        [
            kernel("b", 20, 30, 2),
            kernel("a", 10, 20, 1),
            launch(5, 1),
            launch(6, 2, "cuda_driver"),
            kernel("c", 40, 50, 3),
        ]
    )
    assert trace.on_gpu
    assert [(k.name, k.start_us, k.end_us, k.launched_us) for k in trace.kernels] == [
        ("a", 10, 20, 5),
        ("b", 20, 30, 6),
        ("c", 40, 50, None),
    ]


@pytest.mark.parametrize(
    "grid, read",
    [((280, 1, 1), "280"), ((1, 1187, 1), "1 x 1187"), ((2, 5, 8), "2 x 5 x 8"), ((1, 1, 1), "1"), (None, None)],
)
def test_a_kernel_has_the_grid_of_its_launch_without_ones_at_the_end(grid, read):
    (found,) = read_trace([kernel("a", 0, 1, grid=grid)]).kernels
    assert found.grid == read


def test_streams_of_two_gpus_are_different_ones():
    kernels = read_trace(
        [kernel("a", 0, 1, device=0), kernel("b", 1, 2, device=1), kernel("c", 2, 3, stream=8)]
    ).kernels
    assert [k.stream for k in kernels] == [(0, 7), (1, 7), (0, 8)]


def test_copies_and_fills_count_as_kernels():
    copied = kernel("Memcpy HtoD", 1, 2) | {"cat": "gpu_memcpy"}
    filled = kernel("Memset", 3, 4) | {"cat": "gpu_memset"}
    assert [k.name for k in read_trace([copied, filled]).kernels] == ["Memcpy HtoD", "Memset"]


def test_without_a_gpu_the_ops_are_the_kernels():
    trace = read_trace([host("step", 0, 10), host("op.greedy", 2, 5)])
    assert not trace.on_gpu
    assert trace.kernels == (Kernel("greedy", 2, 5, 2),)


@pytest.mark.parametrize("compress", [gzip.compress, bytes])
def test_a_file_is_read_compressed_or_not(tmp_path, compress):
    path = tmp_path / "trace"
    path.write_bytes(compress(json.dumps({"traceEvents": [{"ph": "X"}]}).encode()))
    assert load_events(path) == [{"ph": "X"}]


@pytest.mark.parametrize("data", [b"{}", b"no json", b"[]", gzip.compress(b"{}")[:12], b"\x1f\x8bxx"])
def test_a_file_that_is_no_trace_is_named(tmp_path, data):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"trace\.json\.gz is no Chrome trace"):
        load_events(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="can't read the trace"):
        load_events(tmp_path / "none.json")
