"""The runner: order of the engines, wrong outputs, and what a record holds."""

import json
import os

import pytest
import torch

from bench_fakes import FakeEngine
from pico_vllm.bench import points as p
from pico_vllm.bench import records
from pico_vllm.bench.ceilings import Ceilings
from pico_vllm.bench.runner import Contestant, Measuring, describe, run_points
from pico_vllm.bench.work import ModelWork

CPU = torch.device("cpu")
OPTIONS = p.PointOptions(1000, inputs=(6,), outputs=(11,), concurrencies=(2,), input_len=6, output_len=11)


@pytest.fixture
def writer(tmp_path):
    writer = records.RecordWriter(tmp_path / "out.jsonl", model="m", dtype="bfloat16", device=CPU, tag="t")
    yield writer
    writer.close()


def run(writer, engines, names, num_runs=2, **more):
    said = []
    contestants = [Contestant(name, engine, {"engine": name, "version": "1"}) for name, engine in engines.items()]
    run_points(contestants, p.make_points(names, OPTIONS), writer, Measuring(num_runs, CPU, say=said.append, **more))
    return said


def test_a_record_holds_the_point_the_machine_and_every_run(writer, tmp_path):
    run(writer, {"fake": FakeEngine()}, ["c1"])
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record == writer.records[0]
    assert (record["engine"], record["point"], record["model"], record["tag"]) == ("fake", "c1", "m", "t")
    assert (record["input_len"], record["output_len"], record["concurrency"]) == (6, 11, 1)
    assert record["metrics"]["ttft_ms_median"] == {"median": 20.0, "best": 20.0, "spread": 0.0}
    assert record["metrics"]["decode_tok_s"]["median"] == 200.0
    assert len(record["runs"]) == 2
    assert record["runs"][1]["raw"]["ttft_ms"] == [20.0]
    for name in ("gpu", "driver", "torch", "triton", "transformers", "python", "cpu", "cpus", "commit", "date"):
        assert name in record
    assert len(record["workload_sha256"]) == 64
    assert record["metrics"]["host_memory_gib"]["median"] > 0


def test_engines_take_turns_forwards_and_backwards(writer):
    order = []

    class Noted(FakeEngine):
        def serve(self, workload):
            order.append((self.name, workload.requests[0].prompt_token_ids))
            return super().serve(workload)

    engines = {}
    for name in "AB":
        engines[name] = Noted()
        engines[name].name = name
    run(writer, engines, ["c1"], num_runs=3)
    assert "".join(name for name, _ in order) == "ABBAABBA"
    prompts = [prompt for _, prompt in order]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3] != prompts[4]  # the same for both, anew for each round


def test_a_wrong_number_of_tokens_costs_its_own_row_only(writer):
    short = FakeEngine()
    short.short_by = 1
    said = run(writer, {"short": short, "good": FakeEngine()}, ["c1", "throughput"])
    by_engine = {(r["engine"], r["point"], r.get("how")): r for r in writer.records}
    assert "10 output tokens, 11 were asked for" in by_engine["short", "c1", None]["error"]
    assert "metrics" not in by_engine["short", "c1", None]
    assert "output tokens" in by_engine["short", "throughput", "offline"]["error"]
    assert by_engine["good", "c1", None]["metrics"]
    assert any("failed" in line for line in said)


def test_an_engine_that_raises_costs_its_own_row_only(writer):
    class Broken(FakeEngine):
        def step(self):
            raise RuntimeError("out of luck")

    run(writer, {"broken": Broken(), "good": FakeEngine()}, ["c1"])
    assert writer.records[0]["error"] == "RuntimeError: out of luck"
    assert writer.records[1]["metrics"]


def test_an_engine_that_cannot_run_a_point_is_told_of_and_has_no_row(writer):
    shy = FakeEngine()
    shy.refuses = "one request at a time"
    said = run(writer, {"shy": shy, "good": FakeEngine()}, ["sweep"])
    assert [r["engine"] for r in writer.records] == ["good"]
    assert any("shy: left out of sweep" in line and "one request at a time" in line for line in said)
    assert shy.num_steps == 0


def test_offline_and_stream_of_throughput(writer):
    run(writer, {"fake": FakeEngine()}, ["throughput"], num_runs=2)
    offline, stream = writer.records[:2]
    assert [len(r["runs"]) for r in (offline, stream)] == [2, 1]
    assert set(offline["metrics"]) >= {"dur_s", "out_tok_s"} and "ttft_ms_median" not in offline["metrics"]
    assert "ttft_ms_median" in stream["metrics"]
    assert offline["runs"][0]["out_tokens"] == offline["out_tokens"] == 133_966


def test_shares_are_of_the_ceilings(writer):
    work = ModelWork(layer_weights=100, head_weights=10, attention_width=6, kv_width=4, element_bytes=2)
    run(writer, {"fake": FakeEngine()}, ["c1"], num_runs=1, work=work, ceilings=Ceilings(1e6, 1e6, 1e6))
    metrics = writer.records[0]["metrics"]
    # 6 in, 11 out in 70 ms: 11 steps x 220 B + (10 * 6 + 55) * 8 B + 16 * 8 B = 3468 B; floor 3.468 ms.
    assert metrics["bandwidth_share"]["median"] == round(3468 / 0.070 / 1e6, 5)
    # 2 * (16 * 100 + 11 * 10) + 4 * 136 * 6 = 6684
    assert metrics["flops_share"]["median"] == round(6684 / 0.070 / 1e6, 5)


@pytest.mark.parametrize("has", [True, False, None])
def test_a_record_tells_of_the_prefix_cache_that_the_engine_has(writer, has):
    fields = {"engine": "fake", "settings": {"prefix_caching": has}}
    (point,) = p.make_points(["prefix"], p.PointOptions(1000, prefix_len=5, own_len=2, prefix_caching=not has))
    run_points([Contestant("fake", FakeEngine(), fields)], [point], writer, Measuring(1, CPU, say=lambda line: None))
    assert writer.records[0]["prefix_caching"] is has


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="no /proc/self/clear_refs to restart a peak"
)
def test_memory_is_the_peak_of_a_run_not_what_is_left_after_it(writer):
    class Greedy(FakeEngine):
        def serve(self, workload):
            if workload == self.greedy_at:
                torch.ones(512 << 18).sum()  # 512 MiB, gone again at once
            return super().serve(workload)

    engine = Greedy()
    (point,) = p.make_points(["c1"], OPTIONS)
    engine.greedy_at = point.workload(1)
    run(writer, {"greedy": engine}, ["c1"], num_runs=2)
    first, second = (r["host_memory_gib"] for r in writer.records[0]["runs"])
    assert first - second > 0.4


def test_describe_is_one_line():
    record = {"point": "sweep", "concurrency": 8, "metrics": {"out_tok_s": {"median": 12.34}, "x": {"median": 1}}}
    assert describe("e", record) == "e            sweep      concurrency=8:  12.3 tok/s"
    assert describe("e", {"point": "c1", "error": "no"}) == "e            c1         : failed: no"


def test_commit_comes_from_the_environment_where_there_is_no_git(monkeypatch):
    monkeypatch.setenv("PICO_COMMIT", "abc")
    assert records.current_commit() == "abc"
    monkeypatch.delenv("PICO_COMMIT")
    monkeypatch.setattr(records, "_git", lambda *args: (_ for _ in ()).throw(OSError))
    assert records.current_commit() is None
