"""How long an engine takes to start: from the start of a process to its first token, phase by phase.

Each run is a process of its own that does what a user's script does, and tells how long each phase took. The first one
finds an empty Triton cache ("cold"), the others what it has left ("warm"). All find Python's bytecode, as after an
installation: a process before them imports everything, since not every machine lets its Python keep bytecode. Files
that are read come from the operating system's cache if it has them. Imports nothing heavy: the processes are this
module too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pico_vllm.errors import ConfigError

PROMPT_TOKENS = 512
_IMPORTS = """
import contextlib
from pico_vllm import LLM
with contextlib.suppress(ImportError):  # no Triton
    import pico_vllm.kernels.triton_backend
"""
#: Metric → what a person reads; in the order of the start. What is in none of them: the rest of the engine.
PHASES = {
    "import_s": "imports",
    "weights_s": "weights",
    "compile_s": "kernels compiled",
    "memory_s": "memory measured",
    "captures_s": "captures",
    "times_s": "steps timed",
    "prompt_s": "first step",
    "start_s": "process to first token",
}


@dataclass(frozen=True, slots=True)
class StartRun:
    """One start.

    Attributes:
        how: "cold" (no compiled kernels) or "warm".
        seconds: of each of ``PHASES``.
        settings: of the engine.
    """

    how: str
    seconds: dict[str, float]
    settings: dict[str, Any]


def measure_starts(
    model: str, options: dict[str, Any], *, num_warm: int, run: Callable[..., Any] = subprocess.run
) -> Iterator[StartRun]:
    """Start an engine once cold, then ``num_warm`` times warm.

    Args:
        model: a directory or file on this machine.
        options: more of ``LLM``.
        num_warm: warm starts.
        run: starts a process.

    Raises:
        ConfigError: the engine does not start; ends with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="pico-vllm-start-") as cache:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        env |= {"TRITON_CACHE_DIR": f"{cache}/kernels", "PYTHONPYCACHEPREFIX": f"{cache}/bytecode"}
        run([sys.executable, "-c", _IMPORTS], env=env, capture_output=True, text=True, check=False)
        for index in range(1 + num_warm):
            argv = [sys.executable, "-m", "pico_vllm.bench.start", repr(time.monotonic()), model, json.dumps(options)]
            done = run(argv, env=env, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                lines = done.stderr.strip().splitlines() or ["it said nothing"]
                raise ConfigError(f"the engine does not start (exit code {done.returncode}): {lines[-1]}")
            yield StartRun("warm" if index else "cold", **json.loads(done.stdout.splitlines()[-1]))


def record_fields(runs: list[StartRun]) -> dict[str, Any]:
    """What a record says of starts of one kind."""
    return {
        "point": "start",
        "engine": "pico-vllm",
        "how": runs[0].how,
        "input_len": PROMPT_TOKENS,
        "settings": runs[0].settings,
        "runs": [run.seconds for run in runs],
    }


def start_once(started: float, model: str, options: dict[str, Any]) -> StartRun:
    """Import, load and answer as a script would.

    Args:
        started: when the process was, by ``time.monotonic``, which all processes share.
        model, options: of ``LLM``.
    """
    from pico_vllm import LLM, SamplingParams  # torch too

    seconds = {"import_s": time.monotonic() - started}
    llm = LLM(model, skip_tokenizer_init=True, **options)
    from pico_vllm.engine.core_client import core_in_this_process

    core = core_in_this_process(llm.engine.core)
    runner = core.executor.runner
    seconds |= {f"{phase}_s": took for phase, took in runner.start_s.items()}
    prompt = [1] * min(PROMPT_TOKENS, core.limits.max_request_tokens - 1)
    before = time.monotonic()
    llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, detokenize=False))
    seconds |= {"prompt_s": time.monotonic() - before, "start_s": time.monotonic() - started}
    settings = {
        "backend": runner.backend.name,
        "cuda_graphs": runner.uses_cuda_graphs,
        "max_num_batched_tokens": runner.max_num_batched_tokens,
        "num_blocks": runner.num_blocks,
        "extra": options,
    }
    return StartRun("", {name: round(took, 4) for name, took in seconds.items()}, settings)


def start_table(runs: list[StartRun]) -> str:
    """Seconds of each phase: a line a phase, a column a start."""
    lines = [f"{'seconds':24s}" + "".join(f"{run.how:>8s}" for run in runs)]
    for name, title in PHASES.items():
        lines.append(f"{title:24s}" + "".join(f"{run.seconds[name]:8.2f}" for run in runs))
    return "\n".join(lines)


if __name__ == "__main__":
    result = asdict(start_once(float(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))
    del result["how"]
    print(json.dumps(result))
