from __future__ import annotations

import builtins
import struct
import sys

import pytest

from bench_records import c1, kernel, loop, poisson, prefix, record
from pico_vllm.bench import plots
from pico_vllm.bench.drawing import assign_looks, paler, place_names, spread_out
from pico_vllm.errors import ConfigError


def size_of(path) -> tuple[int, int]:
    """Width and height of a PNG in pixels, from its header."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-8:-4] == b"IEND"
    return struct.unpack(">II", data[16:24])


def campaign(engine: str, factor: float = 1.0):
    """Every point that has a plot."""
    for input_len in (64, 512):
        yield c1(engine, input_len, ttft=[10 * factor, 11], decode=[500 * factor, 510])
    for point in ("sweep", "burst"):
        for concurrency in (1, 8):
            yield loop(point, engine, concurrency, rate=[100 * concurrency * factor, 110], itl=[2, 3])
    for how in ("offline", "stream"):
        yield record("throughput", engine, how=how, concurrency=256, runs=[{"out_tok_s": 20000 * factor}])
    for cached in (False, True):
        yield prefix(engine, cached=cached, ttft=[[20, 9], [21, 8]])
    for rate in (8, 32):
        yield poisson(engine, rate, goodput=[7 * factor, 8])


def test_everything_that_was_measured_is_drawn_at_the_promised_size(tmp_path):
    pytest.importorskip("matplotlib")
    records = [
        *campaign("pico-vllm"),
        *campaign("vllm", 1.2),
        kernel("rms_norm", "1 token", median=10, floor=5, torch=8),
        kernel("sample", "1 row", median=10, floor=5),
        record("sweep", "sglang", error="boom"),
        record("calib", "calib", metrics={"python_loop_ns": [1, 2, 3]}),
    ]
    paths = plots.plot_all(records, tmp_path / "new" / "folder")
    assert [path.stem for path in paths] == list(plots.PLOTS)
    assert {size_of(path) for path in paths[:-1]} == {(1200, 720)}
    assert size_of(paths[-1]) == (1200, 337)  # 1.6 + 3 bars x 0.15 + 2 groups x 0.1 inches at 150 a inch


def test_without_data_there_is_no_plot(tmp_path):
    pytest.importorskip("matplotlib")
    one_point_of_a_curve = [loop("sweep", "vllm", 8, rate=[1], itl=[1]), poisson("vllm", 8, goodput=[1])]
    nothing = [record("sweep", error="boom"), record("c1"), record("prefix"), {"point": "throughput"}]
    assert plots.plot_all([*one_point_of_a_curve, *nothing], tmp_path) == []
    assert plots.plot_all([], tmp_path) == []


def test_a_short_report_makes_only_its_own_plots(tmp_path):
    pytest.importorskip("matplotlib")
    records = [c1("a", 64, ttft=[1], decode=[1]), {"point": "c1", "engine": "b", "input_len": "64-128"}]
    assert [path.name for path in plots.plot_all(records, str(tmp_path))] == ["c1_decode.png"]


def test_the_output_length_with_most_records_is_drawn():
    def measured(engine: str, *output_lens: int):
        return [c1(engine, ttft=[1], decode=[1]) | {"output_len": n} for n in output_lens]

    runs = plots.collect_runs([*measured("a", 16, 128, 1024), *measured("b", 16, 128), *measured("c", 128, 1024)])
    data = plots.Data(runs, {}, "")
    assert [case.output_len for case in plots._usual_cases(data, "c1", by="input_len")] == [128]
    data = plots.Data(runs[:2], {}, "")
    assert [case.output_len for case in plots._usual_cases(data, "c1", by="input_len")] == [128]  # the longer of two


def test_a_curve_never_mixes_cases_that_differ_in_something_else():
    records = [loop("sweep", "a", c, rate=[c], itl=[1]) for c in (8, 1, 32)]
    records += [loop("sweep", "a", c, rate=[-1], itl=[1]) | {"input_len": 2048} for c in (8, 64)]
    data = plots.Data(plots.collect_runs(records), {}, "")
    (line,) = plots._lines(data, plots._usual_cases(data, "sweep", by="concurrency"), "out_tok_s", by="concurrency")
    assert line.xs == (1, 8, 32)
    assert [y.median for y in line.ys] == [1, 8, 32]


def test_matplotlib_is_imported_only_to_draw():
    assert "matplotlib" not in vars(plots)


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    real_import = builtins.__import__

    def no_matplotlib(name, *args, **kwargs):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'")
        return real_import(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(ConfigError, match=r'No module named .matplotlib.\): pip install "pico-vllm\[bench\]"'):
        plots.plot_all([c1(ttft=[1], decode=[1])], tmp_path)


def test_looks_are_told_apart_without_colour_too():
    looks = assign_looks([f"run {i}" for i in range(8)] + ["run 0"])
    assert len(looks) == 8
    for i, (colour, marker, hatch) in enumerate((a.colour, a.marker, a.hatch) for a in looks.values()):
        assert (colour == "#0072B2") is (i in (0, 7))
        assert (marker == "o") is (i == 0)
        assert (hatch == "") is (i == 0)


def test_a_paler_colour_is_nearer_to_white():
    assert paler("#000000") == "#9e9e9e"
    assert paler("#ffffff") == "#ffffff"


def test_labels_at_line_ends_move_apart_around_their_middle():
    assert spread_out([0.1, 0.5, 0.9], gap=0.1) == [0.1, 0.5, 0.9]
    assert spread_out([0.5, 0.5], gap=0.1) == pytest.approx([0.45, 0.55])
    assert spread_out([0.5, 0.52, 0.54, 0.9], gap=0.1) == pytest.approx([0.42, 0.52, 0.62, 0.9])
    assert spread_out([0.3, 0.32, 0.4], gap=0.1) == pytest.approx([0.24, 0.34, 0.44])  # a cluster that grows
    assert spread_out([], gap=0.1) == []


FRAME = (0.0, 0.0, 1000.0, 1000.0)


def test_a_name_stands_above_its_point_if_nothing_is_there():
    assert place_names([("8", (500, 500))], [[(500, 500)]], FRAME) == [(0, 18)]


def test_a_name_avoids_lines_other_names_and_the_edge():
    rising = [(500.0, 500.0), (500.0, 600.0)]
    assert place_names([("8", (500, 500))], [rising], FRAME) == [(0, -18)]
    assert place_names([("8", (500, 995))], [[(500, 995)]], FRAME) == [(0, -18)]
    above, beside = place_names([("8", (500, 500)), ("32", (500, 505))], [], FRAME)
    assert (above, beside) == ((0, 18), (0, -18))


def test_a_name_that_a_neighbour_has_is_left_out():
    points = [("8", (500.0, 500.0)), ("8", (505.0, 505.0)), ("32", (505.0, 505.0)), ("8", (600.0, 500.0))]
    assert [offset is None for offset in place_names(points, [], FRAME)] == [False, True, False, False]
