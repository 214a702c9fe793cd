"""OpenAI's batch files: a request a line in, an answer a line out, in whatever order they finish.

A run that was cut short goes on where it stopped: lines that are whole stay, a line that was cut in the middle is
dropped, and what has an answer is not asked again. Every answer is on the disk before the next step runs.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pico_vllm.errors import ConfigError, RequestError
from pico_vllm.server.protocol import error_body, parse_request, response_body

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import BinaryIO

    from pico_vllm.engine.input_processor import Prompt
    from pico_vllm.engine.llm_engine import LLMEngine

#: Requests given to the engine at a time: enough to fill its batch, few enough to keep a huge file out of memory.
_MAX_QUEUED = 512


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of the input file; ``problem`` is set where it is no request."""

    custom_id: str
    url: str
    body: Any
    problem: str | None = None


def read_batch(path: Path) -> list[BatchLine]:
    """Read and check an input file before anything runs.

    Raises:
        ConfigError: the file can't be read, a line is no JSON object or has no custom_id, or an id stands twice; names
            the line. What is wrong *inside* a request becomes that request's answer instead.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    lines: list[BatchLine] = []
    seen: dict[str, int] = {}
    for number, text in enumerate(content.split("\n"), start=1):
        if not text.strip():
            continue
        line = _parse_line(path, number, text)
        if line.custom_id in seen:
            raise ConfigError(
                f"{path}:{number}: custom_id {line.custom_id!r} stands in line {seen[line.custom_id]} too"
            )
        seen[line.custom_id] = number
        lines.append(line)
    return lines


def open_output(path: Path) -> tuple[BinaryIO, set[str]]:
    """Open an output file to go on with; returns it and the ids that have an answer.

    Raises:
        ConfigError: a whole line of it is not an answer: it is some other file, and is left alone.
    """
    done: set[str] = set()
    try:
        file = path.open("r+b" if path.exists() else "w+b")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from None
    whole = 0
    for number, raw in enumerate(file, start=1):
        if not raw.endswith(b"\n"):
            break  # cut in the middle of a write
        try:
            done.add(str(json.loads(raw)["custom_id"]))
        except (ValueError, KeyError, TypeError):
            file.close()
            raise ConfigError(f"{path}:{number} is not an answer of a batch: move the file away") from None
        whole += len(raw)
    file.truncate(whole)
    file.seek(whole)
    return file, done


def run_batch(
    engine: LLMEngine,
    lines: list[BatchLine],
    output: BinaryIO,
    *,
    model: str,
    progress: Callable[[], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Answer all lines.

    Args:
        engine: idle.
        lines: those without an answer.
        output: from ``open_output``.
        model: the name to put into the answers.
        progress: called after each answer.
        should_stop: asked between steps; when True, unfinished requests are aborted and get no line.
    """
    waiting: Iterator[BatchLine] = iter(lines)
    live: dict[str, BatchLine] = {}  # by the engine's request id: custom ids are the client's and may be anything
    numbers = itertools.count()

    def answer(line: BatchLine, status: int, body: dict[str, Any]) -> None:
        record = {
            "id": f"batch-{line.custom_id}",
            "custom_id": line.custom_id,
            "response": {"status_code": status, "request_id": line.custom_id, "body": body},
            "error": None,
        }
        output.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        output.flush()
        os.fsync(output.fileno())
        if progress is not None:
            progress()

    def fill() -> None:
        while len(live) < _MAX_QUEUED and (line := next(waiting, None)) is not None:
            request_id = f"batch-{next(numbers)}"
            try:
                _add(engine, request_id, line)
            except RequestError as error:
                answer(line, 400, error_body(str(error)))
            else:
                live[request_id] = line

    try:
        fill()
        while live and not should_stop():
            for delta in engine.step():
                if delta.final is not None:
                    line = live.pop(delta.request_id)
                    answer(line, 200, response_body(line.url, model, delta.final))
            fill()
    finally:
        for request_id in live:
            engine.abort(request_id)


def _add(engine: LLMEngine, request_id: str, line: BatchLine) -> None:
    if line.problem is not None:
        raise RequestError(line.problem)
    request = parse_request(line.url, line.body)
    prompt: Prompt
    if request.prompt is None:
        assert request.messages is not None
        prompt = engine.chat_prompt(request.messages, cache_salt=request.cache_salt, **request.template_options)
    else:
        kind = "prompt" if isinstance(request.prompt, str) else "prompt_token_ids"
        prompt = {kind: request.prompt, "cache_salt": request.cache_salt}
    engine.add_request(request_id, prompt, request.params)


def _parse_line(path: Path, number: int, text: str) -> BatchLine:
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}:{number} is no JSON: {error}") from None
    custom_id = record.get("custom_id") if isinstance(record, dict) else None
    if not isinstance(custom_id, str) or not custom_id:
        raise ConfigError(f"{path}:{number} has no custom_id: each line needs one, a text of its own")
    method = record.get("method", "POST")
    problem = None if method == "POST" else f"method={method!r} must be 'POST'"
    return BatchLine(custom_id, str(record.get("url")), record.get("body"), problem)
