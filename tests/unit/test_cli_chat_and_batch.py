"""``pico-vllm chat``, ``batch`` and ``generate --json`` as a user meets them."""

import io
import json
import signal
import sys

import pytest

import tiny_models
from engine_runs import greedy, make_llm
from pico_vllm import cli
from pico_vllm.engine.llm_engine import LLMEngine
from pico_vllm.errors import ConfigError

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    tiny_models.save_tiny_model(tiny_models.MODELS["llama-gqa3-d64-tied"], directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": TEMPLATE}))
    return directory


@pytest.fixture
def run(checkpoint, monkeypatch, capsys):
    """``pico-vllm …`` on the tiny model → (exit code, stdout, stderr)."""

    def call(command, *arguments, stdin=""):
        options = ["--model", str(checkpoint), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["pico-vllm", command, *map(str, arguments), *options])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def answer(checkpoint):
    """The greedy answer to a conversation of (role, content) pairs."""
    llm = make_llm(checkpoint, dtype="auto")

    def ask(*turns, max_tokens=5):
        messages = [{"role": role, "content": content} for role, content in turns]
        return llm.chat(messages, greedy(max_tokens, ignore_eos=False))[0].outputs[0].text

    return ask


@pytest.mark.parametrize("command", ["generate", "chat", "batch"])
@pytest.mark.parametrize("options, enabled", [((), True), (("--no-enable-prefix-caching",), False)])
def test_the_prefix_cache_can_be_turned_off(run, tmp_path, monkeypatch, command, options, enabled):
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}) + "\n"
    )
    arguments = {"generate": ["hi"], "chat": [], "batch": [tmp_path / "in.jsonl", tmp_path / "out.jsonl"]}[command]
    seen = []

    def noted(self, config, **kwargs):
        seen.append(config.cache.enable_prefix_caching)
        raise ConfigError("enough is known")

    monkeypatch.setattr(LLMEngine, "__init__", noted)
    code, _, err = run(command, *arguments, *options)
    assert (code, seen) == (1, [enabled]) and "enough is known" in err


# ----------------------------------------------------------------------------------------------------------- chat
def test_a_chat_remembers_its_turns(run, answer):
    code, out, _ = run("chat", "--max-tokens", 5, stdin="hello\nand now?\n")
    first = answer(("user", "hello"))
    second = answer(("user", "hello"), ("assistant", first), ("user", "and now?"))
    assert code == 0
    assert out == f"{first}\n{second}\n"


def test_reset_forgets_the_turns_but_not_the_system_message(run, answer):
    code, out, err = run("chat", "--max-tokens", 5, "--system", "be brief", stdin="hello\n/reset\nhello\n/exit\nmore\n")
    one = answer(("system", "be brief"), ("user", "hello"))
    assert (code, out) == (0, f"{one}\n{one}\n")
    assert "(forgotten)" in err


def test_an_unknown_command_and_an_empty_line_ask_nothing(run):
    code, out, err = run("chat", stdin="\n/help\n")
    assert (code, out) == (0, "")
    assert "/reset and /exit are known" in err


def test_a_turn_that_does_not_fit_is_told_and_the_chat_goes_on(run, answer):
    code, out, err = run("chat", "--max-tokens", 5, stdin="x" * 500 + "\nhello\n")
    assert code == 0
    assert "error: the prompt has" in err
    assert out == answer(("user", "hello")) + "\n"


def test_ctrl_c_stops_one_answer_and_keeps_what_was_said(run, answer, monkeypatch):
    step, calls = LLMEngine.step, iter(range(1000))

    def interrupted(self):
        if next(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(LLMEngine, "step", interrupted)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, out, err = run("chat", "--max-tokens", 40, stdin="hello\nagain\n")
    finally:
        signal.signal(signal.SIGINT, previous)
    said = answer(("user", "hello"), max_tokens=40)
    first, second = out.split("\n")[:2]
    assert code == 0
    assert "(stopped)" in err
    assert said.startswith(first) and first != said
    assert second == answer(("user", "hello"), ("assistant", first), ("user", "again"), max_tokens=40).split("\n")[0]


# ---------------------------------------------------------------------------------------------------------- batch
def test_a_batch_file_is_answered_and_a_second_run_has_nothing_to_do(run, tmp_path, monkeypatch):
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "temperature": 0}
    lines = [{"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(3)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, err = run("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (code, out) == (0, "")
    assert "3 requests, 0 of them answered before" in err
    written = (tmp_path / "out.jsonl").read_text()
    assert sorted(json.loads(line)["custom_id"] for line in written.splitlines()) == ["r0", "r1", "r2"]

    def forbidden(*args, **kwargs):
        raise AssertionError("loaded for nothing")

    monkeypatch.setattr(LLMEngine, "__init__", forbidden)
    code, _, err = run("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert code == 0
    assert "3 requests, 3 of them answered before" in err
    assert (tmp_path / "out.jsonl").read_text() == written


def test_a_wrong_batch_file_is_one_line(run, tmp_path):
    (tmp_path / "in.jsonl").write_text("{")
    code, out, err = run("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and "in.jsonl:1" in err


# ----------------------------------------------------------------------------------------------------------- json
def test_generate_json_prints_an_object_a_prompt_in_their_order(run, checkpoint):
    code, out, _ = run("generate", "one", "two", "--json", "--max-tokens", 3)
    outputs = [json.loads(line) for line in out.splitlines()]
    expected = make_llm(checkpoint, dtype="auto").generate(["one", "two"], greedy(3, ignore_eos=False))
    assert code == 0
    assert [o["prompt"] for o in outputs] == ["one", "two"]
    assert [o["outputs"][0]["token_ids"] for o in outputs] == [e.outputs[0].token_ids for e in expected]
    assert outputs[0]["outputs"][0]["finish_reason"] == expected[0].outputs[0].finish_reason
