"""The search of benchmarks/tune_decode_attention.py."""

import dataclasses
import json

import pytest

from benchmark_scripts import load_script
from kernel_implementations import RUNS_TRITON

if not RUNS_TRITON:
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)


@pytest.fixture(scope="module")
def tuning():
    return load_script("tune_decode_attention")


def test_a_tiny_model_is_tuned_and_every_candidate_recorded(tuning, tmp_path, monkeypatch, capsys):
    out = tmp_path / "tuning.jsonl"
    words = ["tune_decode_attention.py", "--device", "cpu", "--max-candidates", "4", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    tuning.main()
    environment, row = map(json.loads, out.read_text().splitlines())
    assert "environment" in environment
    assert (row["num_seqs"], row["contexts"], row["max_seq_len"]) == (2, [3, 40], 64)
    assert len(row["candidates_us"]) == 4 and row["now_us"] > 0
    assert "2 x (3, 40), bound 64: now " in capsys.readouterr().out


def test_the_fastest_candidate_comes_first_and_a_candidate_that_fails_is_left_out(tuning, monkeypatch):
    class Step:
        device = tuning.torch.device("cpu")
        config = tuning.TINY

        def seconds(self, lens, backend=None, *, max_seq_len, budget=None):
            if backend is None:
                return 1.0
            decode = backend.prepare_attention(None, None).config.decodes[0]
            if decode.num_warps == 8:
                raise ValueError("out of resource")
            return decode.block_n / 100 + decode.max_splits / 10 + decode.num_stages / 1000 - decode.rotates / 10000

    @dataclasses.dataclass
    class Metadata:
        config: object = None

    triton = dataclasses.replace(tuning.TRITON, prepare_attention=lambda *_: Metadata())
    monkeypatch.setattr(tuning, "TRITON", triton)
    found = tuning.tune(Step(), [100] * 4, 1024, None)
    best = list(found["candidates_us"])
    assert best[0] == "tiles of 32, warps 2, stages 2, splits 1, rotates"
    assert found["now_us"] == 1e6
    assert not any("warps 8" in shape for shape in best)


@pytest.mark.parametrize("num_seqs", [1, 64, 256])
def test_candidates_are_different_and_no_more_programs_than_fit(tuning, num_seqs):
    configs = tuning.candidates(num_seqs, 132)
    assert len(configs) == len(set(configs)) >= 20
    assert all(config.max_splits == 1 or config.max_splits * num_seqs <= 660 for config in configs)
    assert {config.rotates for config in configs} == {False, True}


def test_contexts_are_the_same_every_time(tuning):
    assert tuning.contexts(3, 600) == [600] * 3
    lens = tuning.contexts(50, (100, 1500))
    assert lens == tuning.contexts(50, (100, 1500)) and 100 <= min(lens) < max(lens) <= 1500
