"""The command line: text on stdout, everything else on stderr, and one readable line for every error."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

import pico_vllm
import tiny_models
from engine_runs import greedy, make_llm
from pico_vllm import cli
from pico_vllm.engine.llm_engine import LLMEngine

PROMPT = "some text"  # 9 tokens
STATS = (
    r"{prompt} prompt \+ {new} new tokens in \d+\.\d\d s, \d+\.\d tok/s, "
    r"(?:earliest )?first token after \d+ ms \(finished: {how}\)\n"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    tiny_models.save_tiny_model(tiny_models.MODELS["llama-gqa3-d64-tied"], directory)
    return directory


@pytest.fixture(scope="module")
def long_checkpoint(checkpoint, tmp_path_factory):
    """The same model with room for 32,768 tokens: it generates until it is stopped."""
    directory = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(checkpoint, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    return directory


@pytest.fixture(scope="module")
def completion(checkpoint):
    """The text our offline interface gives for a prompt."""
    llm = make_llm(checkpoint)
    return lambda prompt, max_tokens: llm.generate(prompt, greedy(max_tokens))[0].outputs[0].text


@pytest.fixture
def run(monkeypatch, capsys):
    """Call the command line in this process; returns (exit code, stdout, stderr)."""

    def call(*arguments, stdin=None):
        monkeypatch.setattr(sys, "argv", ["pico-vllm", *map(str, arguments)])
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as exited:
            cli.main()
        output = capsys.readouterr()
        return exited.value.code or 0, output.out, output.err

    return call


@pytest.fixture
def generate(run, checkpoint):
    """``pico-vllm generate`` with the tiny model in float32, as small as it can be."""
    small = ["--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "64", "--ignore-eos"]
    return lambda *arguments, **options: run("generate", "--model", checkpoint, *small, *arguments, **options)


def command(*arguments):
    """A command line for a process of its own; there Ctrl-C works even where this test runs in the background."""
    script = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script += "from pico_vllm.cli import main; sys.argv[0] = 'pico-vllm'; main()"
    return [sys.executable, "-c", script, *map(str, arguments)]


def environment(**variables):
    return (
        os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONUTF8": "1"} | variables
    )


# ---------------------------------------------------------------------------------------------------------- generate
def test_one_prompt_prints_prompt_and_completion_on_stdout_and_statistics_on_stderr(generate, completion):
    code, out, err = generate(PROMPT, "--max-tokens", 8)
    assert code == 0
    assert out == PROMPT + completion(PROMPT, 8) + "\n"
    assert re.fullmatch(STATS.format(prompt=9, new=8, how="length"), err), err


def test_no_echo_prints_the_completion_alone(generate, completion):
    assert generate(PROMPT, "--max-tokens", 8, "--no-echo")[1] == completion(PROMPT, 8) + "\n"


def test_one_prompt_streams_as_it_is_made(generate, completion, monkeypatch, capsys):
    whole = PROMPT + completion(PROMPT, 30)
    seen = []

    def watched_step(self, original=LLMEngine.step):
        out, _ = capsys.readouterr()
        seen.append(seen[-1] + out if seen else out)
        return original(self)

    monkeypatch.setattr(LLMEngine, "step", watched_step)
    generate(PROMPT, "--max-tokens", 30)
    assert seen[0] == PROMPT, "the prompt is there before anything is computed"
    assert len({len(text) for text in seen}) > 10
    assert all(whole.startswith(text) for text in seen)


def test_several_prompts_are_printed_in_their_order_with_their_numbers(generate, completion):
    prompts = ["first", "the second", "3"]
    code, out, err = generate(*prompts, "--max-tokens", 6)
    assert code == 0
    assert out == "".join(f"[{i}] {prompt}{completion(prompt, 6)}\n" for i, prompt in enumerate(prompts))
    assert re.fullmatch(STATS.format(prompt=5 + 10 + 1, new=18, how="length"), err), err
    code, out, _ = generate(*prompts, "--max-tokens", 6, "--no-echo")
    assert out == "".join(f"[{i}] {completion(prompt, 6)}\n" for i, prompt in enumerate(prompts))


def test_prompts_that_end_early_wait_for_those_before_them(generate, completion, checkpoint):
    """'b' ends at once (its first token is a stop token), 'a' goes on, and is printed first all the same."""
    first_of_b = make_llm(checkpoint).generate("b", greedy(1))[0].outputs[0].token_ids[0]
    ids_of_a = make_llm(checkpoint).generate("a", greedy(6))[0].outputs[0].token_ids
    assert first_of_b not in ids_of_a, "the tiny model must be another one"
    code, out, err = generate("a", "b", "--max-tokens", 6, "--stop-token-id", first_of_b)
    assert (code, out) == (0, f"[0] a{completion('a', 6)}\n[1] b{completion('b', 1)}\n")
    assert "2 prompt + 7 new tokens" in err and "(finished: length, stop)" in err


def test_a_dash_reads_the_prompt_from_stdin(generate, completion):
    assert generate("-", "--max-tokens", 8, stdin=PROMPT)[1] == PROMPT + completion(PROMPT, 8) + "\n"
    assert generate("a", "-", "--max-tokens", 4, stdin=PROMPT)[1].splitlines()[-1].startswith(f"[1] {PROMPT}")


def test_options_reach_the_sampler(generate):
    sampled = ["--max-tokens", 12, "--temperature", 1.5]
    greedy_text = generate(PROMPT, "--max-tokens", 12)[1]
    first, again, other = (generate(PROMPT, *sampled, "--seed", seed)[1] for seed in (1, 1, 2))
    assert first == again
    assert len({greedy_text, first, other}) == 3
    assert generate(PROMPT, *sampled, "--seed", 1, "--top-k", 1)[1] == greedy_text
    assert generate(PROMPT, *sampled, "--seed", 1, "--top-p", 1e-9)[1] == greedy_text
    assert generate(PROMPT, "--max-tokens", 12, "--temperature", 0)[1] == greedy_text


def test_the_checkpoints_own_sampling_is_the_default(run, checkpoint, tmp_path):
    directory = tmp_path / "sampling"
    shutil.copytree(checkpoint, directory)
    (directory / "generation_config.json").write_text('{"do_sample": true, "temperature": 1.5}')
    options = ["--device", "cpu", "--dtype", "float32", "--ignore-eos", "--max-tokens", 12, "--seed", 3]
    plain = run("generate", PROMPT, "--model", checkpoint, *options)[1]
    assert run("generate", PROMPT, "--model", directory, *options)[1] != plain
    assert run("generate", PROMPT, "--model", directory, *options, "--temperature", 0)[1] == plain


def test_dummy_weights_and_the_reference_backend_can_be_chosen(generate, completion):
    assert generate(PROMPT, "--max-tokens", 4, "--backend", "reference")[1] == PROMPT + completion(PROMPT, 4) + "\n"
    code, out, _ = generate(PROMPT, "--max-tokens", 4, "--load-format", "dummy")
    assert code == 0 and out != PROMPT + completion(PROMPT, 4) + "\n"


# ------------------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-tokens", "0", "x"], ["max_tokens=0", ">= 1"]),
        (["--max-tokens", "-1", "x"], ["max_tokens=-1", ">= 1"]),
        (["--max-tokens", "many", "x"], ["--max-tokens", "valid int"]),
        (["--temperature", "nan", "x"], ["temperature=nan"]),
        (["--temperature", "-0.5", "x"], ["temperature=-0.5", ">= 0"]),
        (["--top-p", "0", "x"], ["top_p=0", "(0, 1]"]),
        (["--top-p", "1.5", "x"], ["top_p=1.5"]),
        (["--top-k", "-2", "x"], ["top_k=-2"]),
        (["--seed", "-1", "x"], ["seed=-1", "18446744073709551615"]),
        (["--seed", "18446744073709551616", "x"], ["seed=18446744073709551616"]),
        (["--stop-token-id", "-5", "x"], ["stop_token_ids=-5"]),
        (["--block-size", "7", "x"], ["block_size=7", "16"]),
        (["--max-num-seqs", "0", "x"], ["max_num_seqs=0", ">= 1"]),
        (["--max-num-batched-tokens", "0", "x"], ["max_num_batched_tokens=0", ">= 1"]),
        (["--num-gpu-blocks-override", "0", "x"], ["num_gpu_blocks_override=0", ">= 1"]),
        (["--max-model-len", "257", "x"], ["max_model_len=257", "max_position_embeddings=256"]),
        (["--device", "tpu", "x"], ["device='tpu'", "cuda:N"]),
        (["--device", "cuda:99", "x"], ["device='cuda:99'", "device='cpu'"]),
        (["--dtype", "int8", "x"], ["--dtype", "int8", "bfloat16"]),
        (["--load-format", "gguf", "x"], ["--load-format", "gguf", "dummy"]),
        (["--backend", "cuda", "x"], ["--backend", "cuda", "reference"]),
        (["--temprature", "1", "x"], ["--temprature", "--help"]),
        ([], ["PROMPT", "--help"]),
        ([""], ["the prompt is empty"]),
        (["x", ""], ["prompt 1: the prompt is empty"]),
        (["x" * 256], ["256 tokens", "max_model_len=256", "255"]),
        (["x", "y" * 300, "z"], ["prompt 1: ", "300 tokens"]),
        (["--max-model-len", "5", "seven 7"], ["7 tokens", "max_model_len=5"]),
        (["--num-gpu-blocks-override", "1", "x" * 40], ["40 tokens", "holds 16"]),
        (["\udcff"], ["not valid Unicode"]),
        (["--model", "no-such-directory", "x"], ["'no-such-directory'", "config.json"]),
        (["--model", __file__, "x"], [__file__, "is a file"]),
        (["--model", os.path.dirname(__file__), "x"], ["config.json does not exist"]),
    ],
)
def test_an_error_is_one_line_with_the_value_and_exit_code_1(generate, arguments, words):
    code, out, err = generate(*arguments)
    assert code == 1
    assert out == ""
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    assert all(word in err for word in words), err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["generat"], ["generat", "--help"]), (["--versoin"], ["--versoin"]), (["env", "x"], ["x"])],
)
def test_a_wrong_command_is_one_line_too(run, arguments, words):
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert re.fullmatch(r"error: [^\n]+\n", err) and all(word in err for word in words), err


@pytest.mark.parametrize("wrong", [["--temperature", "nan"], ["--max-num-seqs", "0"], ["--dtype", "int8"]])
def test_wrong_options_are_told_before_a_model_is_loaded(generate, monkeypatch, wrong):
    def forbidden(*args, **kwargs):
        raise AssertionError("loaded for nothing")

    monkeypatch.setattr(LLMEngine, "__init__", forbidden)
    assert generate("x", *wrong)[0] == 1


def test_a_broken_checkpoint_is_one_line(run, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "broken")
    weights = tmp_path / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    code, out, err = run("generate", "x", "--model", tmp_path / "broken")
    assert (code, out) == (1, "")
    assert re.fullmatch(r"error: [^\n]*safetensors[^\n]*\n", err), err


def test_a_bug_of_ours_is_not_dressed_up_as_an_error_of_the_user(generate, monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(LLMEngine, "step", broken)
    with pytest.raises(ZeroDivisionError, match="ours"):
        generate("x")


# ------------------------------------------------------------------------------------------------------------ Ctrl-C
@pytest.fixture
def interrupt_in_step(monkeypatch):
    """Ctrl-C, once or more, in the middle of one step."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)

    def arrange(step, times=1):
        steps = iter(range(1, 1000))

        def interrupted_step(self, original=LLMEngine.step):
            if next(steps) == step:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return original(self)

        monkeypatch.setattr(LLMEngine, "step", interrupted_step)

    yield arrange
    signal.signal(signal.SIGINT, previous)


def test_ctrl_c_ends_the_step_keeps_the_text_and_exits_with_130(generate, completion, interrupt_in_step):
    interrupt_in_step(8)
    code, out, err = generate(PROMPT, "--max-tokens", 100)
    assert code == 130
    assert out == PROMPT + completion(PROMPT, 8) + "\n"
    assert re.fullmatch("interrupted: " + STATS.format(prompt=9, new=8, how="abort"), err), err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_a_batch_prints_what_every_prompt_has_got(generate, completion, checkpoint, interrupt_in_step):
    """'b' has ended by then, but was waiting for 'a' to be printed first."""
    first_of_b = make_llm(checkpoint).generate("b", greedy(1))[0].outputs[0].token_ids[0]
    interrupt_in_step(5)
    code, out, err = generate("a", "b", "c", "--max-tokens", 100, "--stop-token-id", first_of_b)
    assert code == 130
    assert out == f"[0] a{completion('a', 5)}\n[1] b{completion('b', 1)}\n[2] c{completion('c', 5)}\n"
    assert err.startswith("interrupted: 3 prompt + 11 new tokens") and "(finished: abort, stop)" in err


def test_a_second_ctrl_c_stops_at_once(generate, interrupt_in_step):
    interrupt_in_step(3, times=2)
    code, out, err = generate(PROMPT, "--max-tokens", 100)
    assert code == 130
    assert out.startswith(PROMPT) and "Traceback" not in err


def test_ctrl_c_while_loading_exits_with_130_and_no_traceback(generate, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(LLMEngine, "__init__", interrupted)
    code, out, err = generate(PROMPT)
    assert (code, out) == (130, "") and "Traceback" not in err


def endless(directory):
    options = ["--device", "cpu", "--dtype", "float32", "--ignore-eos", "--max-tokens", 30000]
    return command("generate", PROMPT, "--model", directory, "--num-gpu-blocks-override", 2048, *options)


@pytest.mark.multiprocess
def test_sigint_ends_a_real_process_with_its_partial_text(long_checkpoint):
    with subprocess.Popen(
        endless(long_checkpoint), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        out = process.stdout.read(len(PROMPT) + 20)
        process.send_signal(signal.SIGINT)
        out += process.stdout.read()
        err = process.stderr.read().decode()
        assert process.wait(timeout=60) == 130
    assert out.decode().startswith(PROMPT) and out.endswith(b"\n")
    assert re.fullmatch("interrupted: " + STATS.format(prompt=9, new=r"\d+", how="abort"), err), err


@pytest.mark.multiprocess
def test_a_reader_that_goes_away_ends_the_process_without_a_traceback(long_checkpoint):
    """pico-vllm generate ... | head -c 1"""
    with subprocess.Popen(
        endless(long_checkpoint), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1) == PROMPT[:1].encode()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1


# ------------------------------------------------------------------------------------------------- other processes
def test_the_module_runs_as_a_program(checkpoint, completion):
    arguments = ["generate", PROMPT, "--model", str(checkpoint), "--dtype", "float32", "--device", "cpu"]
    arguments += ["--max-tokens", "4", "--ignore-eos"]
    result = subprocess.run(
        [sys.executable, "-m", "pico_vllm", "--verbose", *arguments],
        env=environment(),
        capture_output=True,
        timeout=300,
    )
    assert result.returncode == 0
    assert result.stdout.decode() == PROMPT + completion(PROMPT, 4) + "\n"
    log, stats = result.stderr.decode().splitlines(keepends=True)
    assert "LlamaForCausalLM on cpu, torch.float32, backend cpu" in log
    assert re.fullmatch(STATS.format(prompt=9, new=4, how="length"), stats)


def test_a_terminal_without_the_letters_gets_question_marks(checkpoint):
    arguments = command("generate", "Café", "--model", checkpoint, "--device", "cpu", "--max-tokens", 1)
    variables = environment(PYTHONIOENCODING="ascii")
    result = subprocess.run(arguments, env=variables, capture_output=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(b"Caf?")


def test_stdin_that_is_no_text_is_one_line(checkpoint):
    arguments = command("generate", "-", "--model", checkpoint)
    variables = environment(PYTHONIOENCODING="utf-8:strict")
    result = subprocess.run(arguments, env=variables, input=b"ab\xff", capture_output=True, timeout=300)
    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr == b"error: stdin is not valid utf-8 at byte 2\n"


# ------------------------------------------------------------------------------------------------ version, env, help
def test_version_prints_name_and_version_alone(run):
    assert run("--version") == (0, f"pico-vllm {pico_vllm.__version__}\n", "")


def test_env_as_json_is_json_and_nothing_else(run):
    code, out, err = run("env", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["pico_vllm_version"] == pico_vllm.__version__


def test_env_names_every_backend_and_tier(run):
    code, out, _ = run("env")
    assert code == 0
    assert all(word in out for word in ("reference", "cpu", "triton", "torch", "multigpu"))


def test_no_command_shows_the_help(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "generate" in out and "env" in out and "Usage" in out


def test_every_engine_option_of_generate_is_an_engine_option(run):
    """The help names each option once more than the code does not: a renamed one is seen here."""
    code, out, _ = run("generate", "--help")
    assert code == 0
    assert all(option in out for option in ("--max-tokens", "--temperature", "--dtype", "--model", "--no-echo"))


# --------------------------------------------------------------------------------------------------------- progress
class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


def test_loading_bars_show_each_phase_on_a_terminal_and_leave_nothing(monkeypatch):
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with cli.LoadingBars() as bars:
        bars.update("download", 0, 10)
        bars.update("download", 10, 10)
        bars.update("load", 0, 3)
        bars.update("load", 3, 3)
    shown = terminal.getvalue()
    assert shown.index("Downloading") < shown.index("0.00/10.0") < shown.index("Loading") < shown.index("0/3")
    assert shown.rsplit("\r", 2)[-2].strip() == "", "the last bar is not wiped"


def test_loading_bars_say_nothing_where_stderr_is_no_terminal(capsys):
    with cli.LoadingBars() as bars:
        bars.update("download", 0, 10)
        bars.update("download", 10, 10)
    assert capsys.readouterr() == ("", "")
