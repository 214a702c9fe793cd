import json

import pytest

from pico_vllm.bench.prefix_simulation import OPERATIONS, read_log, simulate
from pico_vllm.cli import main
from pico_vllm.errors import ConfigError


def write(path, *lines):
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def run(path, *, num_blocks=64, block_size=4, max_num_seqs=1, hash_block_size=8):
    log = read_log(path, hash_block_size=hash_block_size)
    return simulate(log, num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs)


def test_token_ids_hit_to_the_token_and_answers_count(tmp_path):
    first = {"prompt_token_ids": [1, 2, 3, 4, 5, 6], "output_token_ids": [7, 8, 9]}
    path = write(tmp_path / "log.jsonl", first, {"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "output_len": 2})
    result = run(path)
    assert (result.stats.num_prompt_tokens, result.stats.num_hit_tokens) == (16, 8)  # the last answer is not stored
    assert (result.num_requests, result.num_too_long, result.num_early_ends) == (2, 0, 0)
    assert {name: len(times) for name, times in result.times_us.items()} == dict.fromkeys(OPERATIONS, 2)


def test_equal_hashes_are_equal_blocks(tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 15, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 1, "input_length": 20, "output_length": 3, "hash_ids": [0, 2, 3]},
        {"timestamp": 2, "input_length": 15, "output_length": 3, "hash_ids": [0, 1]},
    ]
    assert run(write(tmp_path / "log.jsonl", *lines)).stats.num_hit_tokens == 8 + 14


def test_tenants_and_too_long_prompts(tmp_path):
    prompt = list(range(8))
    lines = [{"prompt_token_ids": prompt, "cache_salt": salt} for salt in "aab"]
    result = run(write(tmp_path / "log.jsonl", *lines, {"prompt_token_ids": list(range(100))}), num_blocks=4)
    assert (result.num_requests, result.num_too_long, result.stats.num_hit_tokens) == (3, 1, 7)


def test_a_small_cache_evicts_and_ends_requests_early(tmp_path):
    lines = [{"prompt_token_ids": [n] * 8, "output_len": 4} for n in range(6)]
    result = run(write(tmp_path / "log.jsonl", *lines), num_blocks=5, max_num_seqs=4)
    assert result.num_early_ends > 0
    assert result.stats.num_evicted_blocks > 0
    assert result.stats.num_active_blocks == 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1"),
        ("[]", "line 1"),
        ('{"prompt_token_ids": []}', "at least one token"),
        ('{"prompt_token_ids": ["a"]}', "32-bit integers"),
        ('{"prompt_token_ids": [5000000000]}', "32-bit integers"),
        ('{"prompt_token_ids": [5, -3, 4]}', "tokens are not negative: -3"),
        ('{"input_length": 20, "output_length": 1, "hash_ids": [1]}', "too few for input_length=20"),
        ("", "no request"),
    ],
)
def test_a_wrong_log_is_refused(tmp_path, line, words):
    path = tmp_path / "log.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=words):
        read_log(path, hash_block_size=8)
    with pytest.raises(ConfigError, match="can't read"):
        read_log(tmp_path / "none", hash_block_size=8)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_prints_what_came_of_it(tmp_path, monkeypatch, capsys, as_json):
    path = write(tmp_path / "log.jsonl", *[{"prompt_token_ids": list(range(40)), "output_len": 2}] * 2)
    monkeypatch.setattr("sys.argv", ["pico-vllm", "bench", "prefix", "--simulate", str(path), *["--json"] * as_json])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert not exit_.value.code
    out = capsys.readouterr().out
    if as_json:
        result = json.loads(out)
        assert (result["hit_rate"], result["num_requests"], result["num_evicted_blocks"]) == (39 / 80, 2, 0)
        assert set(result["times_us"]) == set(OPERATIONS)
    else:
        assert "hit rate 48.8%: 39 of 80 prompt tokens" in out
        assert all(f"\n{operation}" in out for operation in OPERATIONS)
