"""The command line: ``pico-vllm generate``, ``chat``, ``batch``, ``verify``, ``bench``, ``profile`` and ``env``.

Parses, prints and exits; everything else is ``LLMEngine``'s. Text goes to stdout, progress, statistics and errors to
stderr, so that output can be piped. Torch is imported only by the commands that need it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import signal
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from pico_vllm import __version__
from pico_vllm.bench.commands import app as bench_app
from pico_vllm.errors import PicoVLLMError, RequestError
from pico_vllm.profiling.commands import app as profile_app

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import FrameType, TracebackType

    from tqdm import tqdm

    from pico_vllm.engine.llm_engine import LLMEngine
    from pico_vllm.outputs import RequestDelta, RequestOutput
    from pico_vllm.sampling_params import SamplingParams

MODEL_HELP = "Directory, .gguf file or hub id (owner/name). Default: SmolLM2-135M-Instruct, fetched once."
REVISION_HELP = "Branch, tag or commit of a hub id."
PREFIX_CACHING_HELP = "Keep the KV of prompts and answers; what a prompt has in common with them isn't computed again."
MAX_TOKENS_HELP = "Tokens a step at most. Default: 16384 on a GPU, 2048 on a CPU."
TARGET_ITL_HELP = (
    "Milliseconds a token that prompts may not delay beyond; 0 = none. Default: 5 on a GPU, more beside many."
)
TP_HELP = "Devices that share the model, each with a process of its own (tensor parallelism)."
#: What the engine calls the phases of its start, and what a person reads.
PHASES = {"download": "Downloading SmolLM2-135M-Instruct", "convert": "Converting it once", "load": "Loading weights"}
EXIT_ERROR = 1
EXIT_DIFFERS = 2  # of verify: the engine ran, and what it computed is not what transformers computes
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it

app = typer.Typer(
    name="pico-vllm",
    help="An LLM inference engine small enough to read in a weekend.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
app.add_typer(profile_app, name="profile")


class Dtype(StrEnum):
    """Choices of --dtype."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class LoadFormat(StrEnum):
    """Choices of --load-format."""

    auto = "auto"
    dummy = "dummy"


class Backend(StrEnum):
    """Choices of --backend."""

    auto = "auto"
    cpu = "cpu"
    reference = "reference"
    triton = "triton"


def main() -> None:
    """Run the command line; every error a user can cause is one readable line and exit code 1."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the terminal's encoding lacks is shown as ?
    try:
        exit_code = app(standalone_mode=False)
    except PicoVLLMError as error:
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        # A wrong option or command. Its class is click's in some versions of Typer and a copy of it in others.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        _fail(f"{' '.join(format_message().split())} (--help shows what there is)")
    sys.exit(exit_code)


@app.callback(invoke_without_command=True)
def _global_options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine does, to stderr.")] = False,
) -> None:
    if verbose:
        import logging

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    if version:
        print(f"pico-vllm {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False) -> None:
    """Show this machine: versions, GPUs, and which backends and test tiers can run here, or why not."""
    from pico_vllm.environment import collect_environment, render, to_dict

    environment = collect_environment()
    if as_json:
        print(json.dumps(to_dict(environment), indent=2))
        return
    from rich.console import Console

    Console().print(render(environment))


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="One or more prompts; - reads stdin.")],
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    revision: Annotated[str | None, typer.Option(help=REVISION_HELP)] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens a prompt at most.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy. Default: the model's own setting, else greedy.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens; 0 = all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the most likely tokens of this total.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every prompt's samples.")] = None,
    stop_token_ids: Annotated[
        list[int] | None, typer.Option("--stop-token-id", help="Also stop at this token id (repeatable).")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Don't stop at end-of-sequence tokens.")] = False,
    echo: Annotated[bool, typer.Option(help="Print the prompt before its completion.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a prompt instead of text.")] = False,
    dtype: Annotated[Dtype, typer.Option(help="auto = the checkpoint's.")] = Dtype.auto,
    load_format: Annotated[LoadFormat, typer.Option(help="dummy = random weights.")] = LoadFormat.auto,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    tp: Annotated[int, typer.Option("--tp", "--tensor-parallel-size", help=TP_HELP)] = 1,
    backend: Annotated[Backend, typer.Option(help="Which implementations of the ops.")] = Backend.auto,
    block_size: Annotated[int, typer.Option(help="Tokens a KV cache block.")] = 16,
    num_gpu_blocks_override: Annotated[int | None, typer.Option(help="KV cache blocks, on any device.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt + output tokens at most.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Prompts running at the same time at most.")] = 256,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help=MAX_TOKENS_HELP)] = None,
    target_itl_ms: Annotated[float | None, typer.Option(help=TARGET_ITL_HELP)] = None,
    enable_prefix_caching: Annotated[bool, typer.Option(help=PREFIX_CACHING_HELP)] = True,
) -> None:
    """Complete prompts: one streams as it is made, several run as one batch."""
    from pico_vllm.config import EngineConfig
    from pico_vllm.engine.llm_engine import LLMEngine

    texts = [_read_stdin() if prompt == "-" else prompt for prompt in prompts]
    config = EngineConfig.from_options(
        model=model,
        revision=revision,
        dtype=dtype.value,
        load_format=load_format.value,
        device=device,
        tensor_parallel_size=tp,
        backend=backend.value,
        block_size=block_size,
        num_gpu_blocks_override=num_gpu_blocks_override,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        target_itl_ms=target_itl_ms,
        enable_prefix_caching=enable_prefix_caching,
    )
    overrides = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    chosen = {name: value for name, value in overrides.items() if value is not None}
    chosen |= {"max_tokens": max_tokens, "ignore_eos": ignore_eos, "stop_token_ids": tuple(stop_token_ids or ())}
    from pico_vllm.sampling_params import SamplingParams

    SamplingParams(**chosen)  # a wrong value is told before a model is fetched and loaded
    with LoadingBars() as bars:
        engine = LLMEngine(config, progress=bars.update)
    params = engine.default_sampling_params(**chosen)
    _add_all(engine, texts, params)
    run = _stream_one if len(texts) == 1 else _run_batch
    start = time.perf_counter()
    with Interrupt() as interrupt:
        steps = _deltas(engine, len(texts), interrupt)
        outputs = _run_json(steps) if as_json else run(steps, texts, echo)
    _say(_summary(outputs, time.perf_counter() - start, interrupt.requested))
    if interrupt.requested:
        sys.exit(EXIT_INTERRUPTED)


@app.command()
def chat(
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    revision: Annotated[str | None, typer.Option(help=REVISION_HELP)] = None,
    system: Annotated[str | None, typer.Option(help="System message of every conversation.")] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens an answer at most.")] = 512,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy. Default: the model's own, else greedy.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the most likely tokens of this total.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every answer.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="auto = the checkpoint's.")] = Dtype.auto,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    tp: Annotated[int, typer.Option("--tp", "--tensor-parallel-size", help=TP_HELP)] = 1,
    enable_prefix_caching: Annotated[bool, typer.Option(help=PREFIX_CACHING_HELP)] = True,
) -> None:
    """Talk to a model. /reset forgets the conversation, /exit (or Ctrl-D) ends, Ctrl-C stops an answer."""
    from pico_vllm.config import EngineConfig
    from pico_vllm.engine.llm_engine import LLMEngine
    from pico_vllm.sampling_params import SamplingParams

    overrides = {"temperature": temperature, "top_p": top_p, "seed": seed}
    chosen: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    chosen["max_tokens"] = max_tokens
    SamplingParams(**chosen)
    config = EngineConfig.from_options(
        model=model,
        revision=revision,
        dtype=dtype.value,
        device=device,
        tensor_parallel_size=tp,
        enable_prefix_caching=enable_prefix_caching,
    )
    with LoadingBars() as bars:
        engine = LLMEngine(config, progress=bars.update)
    params = engine.default_sampling_params(**chosen)
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives input() a history and keys to edit the line
    start = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    _say("/reset forgets the conversation, /exit ends, Ctrl-C stops an answer")
    while (line := _read_turn()) is not None:
        if line == "/reset":
            messages = list(start)
            _say("(forgotten)")
        elif line == "/exit":
            break
        elif line.startswith("/"):
            _say(f"unknown command {line!r}: /reset and /exit are known")
        elif line:
            answer = _answer(engine, [*messages, {"role": "user", "content": line}], params)
            if answer is not None:
                messages += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]


@app.command()
def batch(
    input_file: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="OpenAI batch requests, one a line.")],
    output_file: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="Answers; an existing file is gone on with.")
    ],
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    revision: Annotated[str | None, typer.Option(help=REVISION_HELP)] = None,
    dtype: Annotated[Dtype, typer.Option(help="auto = the checkpoint's.")] = Dtype.auto,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    tp: Annotated[int, typer.Option("--tp", "--tensor-parallel-size", help=TP_HELP)] = 1,
    max_num_seqs: Annotated[int, typer.Option(help="Requests running at the same time at most.")] = 256,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help=MAX_TOKENS_HELP)] = None,
    target_itl_ms: Annotated[float | None, typer.Option(help=TARGET_ITL_HELP)] = None,
    enable_prefix_caching: Annotated[bool, typer.Option(help=PREFIX_CACHING_HELP)] = True,
) -> None:
    """Answer a file of requests; run it again after a crash and it goes on where it stopped."""
    from tqdm import tqdm

    from pico_vllm.config import EngineConfig
    from pico_vllm.engine.llm_engine import LLMEngine
    from pico_vllm.server.batch import open_output, read_batch, run_batch

    lines = read_batch(input_file)
    output, done = open_output(output_file)
    with output, Interrupt() as interrupt:
        todo = [line for line in lines if line.custom_id not in done]
        if todo:
            config = EngineConfig.from_options(
                model=model,
                revision=revision,
                dtype=dtype.value,
                device=device,
                tensor_parallel_size=tp,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                target_itl_ms=target_itl_ms,
                enable_prefix_caching=enable_prefix_caching,
            )
            with LoadingBars() as bars:
                engine = LLMEngine(config, progress=bars.update)
            bar = tqdm(total=len(lines), initial=len(lines) - len(todo), desc="Answering", unit="request", disable=None)
            with bar:
                name = model or engine.source.path.name
                run_batch(
                    engine,
                    todo,
                    output,
                    model=name,
                    progress=lambda: _tick(bar),
                    should_stop=lambda: interrupt.requested,
                )
    _say(f"{len(lines)} requests, {len(lines) - len(todo)} of them answered before, answers in {output_file}")
    if interrupt.requested:
        sys.exit(EXIT_INTERRUPTED)


@app.command()
def verify(
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    revision: Annotated[str | None, typer.Option(help=REVISION_HELP)] = None,
    dtype: Annotated[Dtype, typer.Option(help="auto = the checkpoint's.")] = Dtype.auto,
    tp: Annotated[int, typer.Option("--tp", "--tensor-parallel-size", help=TP_HELP)] = 1,
    backend: Annotated[Backend, typer.Option(help="Which implementations of the ops.")] = Backend.auto,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens a KV cache block.")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens a step; small: prompts run in chunks.")] = 64,
    all_points: Annotated[bool, typer.Option("--all-points", help="A row for every point, not one a layer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare the engine with transformers after every sub-layer; exit code 2 and the op's name where they differ."""
    from pico_vllm.config import EngineConfig
    from pico_vllm.engine.llm_engine import LLMEngine
    from pico_vllm.oracle.report import render
    from pico_vllm.oracle.verify import verify as verify_engine

    config = EngineConfig.from_options(
        model=model,
        revision=revision,
        dtype=dtype.value,
        tensor_parallel_size=tp,
        enforce_eager=tp > 1,  # this rank's ops are recorded and so not replayed, and nor may the others' be
        async_tensor_parallel=False,  # each op is to be seen once a step
        backend=backend.value,
        device=device,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        skip_tokenizer_init=True,
    )
    with LoadingBars() as bars:
        engine = LLMEngine(config, progress=bars.update)
    result = verify_engine(engine)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2, allow_nan=False))
    else:
        from rich.console import Console

        Console().print(render(result, all_points=all_points))
    if not result.passes:
        sys.exit(EXIT_DIFFERS)


def _read_turn() -> str | None:
    """A line of the user, None at the end; Ctrl-C empties the line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            _say("")


def _answer(engine: LLMEngine, messages: list[dict[str, str]], params: SamplingParams) -> str | None:
    """Stream one answer; what Ctrl-C leaves of it counts as the answer. None when the turn was refused."""
    try:
        engine.add_request("0", engine.chat_prompt(messages), params)
    except RequestError as error:
        _say(f"error: {error}")
        return None
    with Interrupt() as interrupt:
        (output,) = _stream_one(_deltas(engine, 1, interrupt), [""], False)
    if interrupt.requested:
        _say("(stopped)")
    return output.outputs[0].text


class Interrupt:
    """Ctrl-C lets the step in progress end and sets ``requested``; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self._previous = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> Interrupt:
        if self._previous is signal.default_int_handler:  # a background job of a shell ignores SIGINT
            signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self._previous)


class LoadingBars:
    """Progress bars on stderr, one a phase (fetch, convert, load); nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._what = ""

    def __enter__(self) -> LoadingBars:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def update(self, what: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` steps of ``what`` are done; total 0 = not known."""
        from tqdm import tqdm

        if what != self._what:
            self._close()
            self._what = what
            is_bytes = what == "download"
            unit, desc = "B" if is_bytes else "tensor", PHASES.get(what, what)
            self._bar = tqdm(total=total or None, desc=desc, leave=False, disable=None, unit=unit, unit_scale=is_bytes)
        self._bar.update(done - self._bar.n)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _tick(bar: tqdm[Any]) -> None:
    bar.update()


def _read_stdin() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")  # the one that echo and editors add
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not valid {error.encoding} at byte {error.start}") from None


def _add_all(engine: LLMEngine, texts: Sequence[str], params: SamplingParams) -> None:
    for index, text in enumerate(texts):
        try:
            engine.add_request(str(index), text, params)
        except RequestError as error:
            raise RequestError(f"prompt {index}: {error}" if len(texts) > 1 else str(error)) from None


def _deltas(engine: LLMEngine, num_prompts: int, interrupt: Interrupt) -> Iterator[list[RequestDelta]]:
    """What each step adds; after an interrupt, the last of every request that has not ended."""
    while engine.has_unfinished_requests() and not interrupt.requested:
        yield engine.step()
    yield [delta for index in range(num_prompts) for delta in engine.abort(str(index))]


def _stream_one(steps: Iterable[list[RequestDelta]], texts: Sequence[str], echo: bool) -> list[RequestOutput]:
    if echo:
        print(texts[0], end="", flush=True)
    outputs = []
    for deltas in steps:
        for delta in deltas:
            print(delta.new_text, end="", flush=True)
            if delta.final is not None:
                outputs.append(delta.final)
    print(flush=True)
    return outputs


def _run_batch(steps: Iterable[list[RequestDelta]], texts: Sequence[str], echo: bool) -> list[RequestOutput]:
    """Run all prompts together; print them in their order, each as soon as it and those before it are done."""
    from tqdm import tqdm

    finished: dict[int, RequestOutput] = {}
    printed = num_tokens = 0
    with tqdm(total=len(texts), desc="Generating", unit="prompt", disable=None, leave=False) as bar:
        for deltas in steps:
            for delta in deltas:
                num_tokens += len(delta.new_token_ids)
                if delta.final is not None:
                    finished[int(delta.request_id)] = delta.final
                    bar.update()
            bar.set_postfix_str(f"{num_tokens} tokens")
            while printed in finished:
                text = finished[printed].outputs[0].text
                with tqdm.external_write_mode(file=sys.stdout):
                    print(f"[{printed}] {texts[printed] if echo else ''}{text}", flush=True)
                printed += 1
    return list(finished.values())


def _run_json(steps: Iterable[list[RequestDelta]]) -> list[RequestOutput]:
    """One JSON object a prompt, in the order of the prompts, when all are done."""
    outputs = [delta.final for deltas in steps for delta in deltas if delta.final is not None]
    outputs.sort(key=lambda output: int(output.request_id))
    for output in outputs:
        print(json.dumps(dataclasses.asdict(output), ensure_ascii=False), flush=True)
    return outputs


def _summary(outputs: Sequence[RequestOutput], seconds: float, interrupted: bool) -> str:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_new = sum(len(output.outputs[0].token_ids) for output in outputs)
    reasons = sorted({str(output.outputs[0].finish_reason) for output in outputs})
    line = f"{num_prompt} prompt + {num_new} new tokens in {seconds:.2f} s, {num_new / max(seconds, 1e-9):.1f} tok/s"
    first = [o.metrics.first_token_s - o.metrics.arrival_s for o in outputs if o.metrics and o.metrics.first_token_s]
    if first:
        first_of_all = "first token" if len(outputs) == 1 else "earliest first token"
        line += f", {first_of_all} after {min(first) * 1e3:.0f} ms"
    return f"{'interrupted: ' if interrupted else ''}{line} (finished: {', '.join(reasons) or 'none'})"


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _fail(message: str) -> NoReturn:
    _say(f"error: {message}")
    sys.exit(EXIT_ERROR)
