"""``pico-vllm profile run | show | compare``.

Parses and prints; everything else is the package's. Heavy imports wait for the command that needs them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pico_vllm.errors import ConfigError

MODEL_HELP = "Directory, .gguf file, hub id, or random:SHAPE (random:qwen2.5-1.5b). Default: the default model."
CAPTURE_HELP = "Folder of a capture, or its profile.json."

app = typer.Typer(help="See where a step's time goes: a trace for Perfetto, and a table.")


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="Folder for trace.json.gz and profile.json.")],
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens a request.")] = 512,
    output_len: Annotated[int, typer.Option(min=1, help="Output tokens a request.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to record, requests being replaced. Default: all of one burst.")
    ] = None,
    skip: Annotated[int, typer.Option(min=0, help="Steps to leave out before, such as the prompts'.")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Runs of the same load before, without profiler.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    eager: Annotated[
        bool, typer.Option("--eager", help="No CUDA graphs: layers and ops are seen, and cost more.")
    ] = False,
    nsys: Annotated[
        bool, typer.Option("--nsys", help="Run under Nsight Systems instead: NVTX ranges, a report.")
    ] = False,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="NVTX ranges only, for a process that runs under nsys.")] = False,
    ceilings: Annotated[
        bool, typer.Option(help="Measure the device's bandwidth and FLOPs first (5 s): shares are of these.")
    ] = True,
    min_gap_us: Annotated[float, typer.Option(min=0, help="What is shorter is no gap of its own.")] = 1.0,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the tables of ops and kernels.")] = 20,
    dtype: Annotated[str, typer.Option(help="auto = the checkpoint's; or bfloat16, float16, float32.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    options: Annotated[str, typer.Option(help='More of the engine\'s, as JSON: {"async_scheduling": false}.')] = "{}",
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 7,
) -> None:
    """Record steps of an engine: trace.json.gz (ui.perfetto.dev, chrome://tracing), profile.json and a table."""
    from pico_vllm.config import EngineConfig
    from pico_vllm.profiling.load import Load
    from pico_vllm.profiling.profile import PROFILE_FILE
    from pico_vllm.worker.model_runner import resolve_device

    chosen = _json_object(options)
    if chosen.get("engine_core_process"):
        raise ConfigError(
            "engine_core_process=true: the core is in another process, and only this one can be profiled; leave it out"
        )
    if eager:
        chosen["enforce_eager"] = True
    EngineConfig.from_options(**chosen)  # a wrong option is told before anything is loaded
    on = resolve_device(device)
    if (nsys or nvtx) and on.type != "cuda":
        flag = "--nsys" if nsys else "--nvtx"
        raise ConfigError(f"{flag} is for GPUs, and the device is {on}: leave it out, the trace has the same ranges")
    if nsys and nvtx:
        raise ConfigError("--nsys starts nsys, --nvtx is for a process under it: give one of them")
    if (out / PROFILE_FILE).exists():
        raise ConfigError(f"{out / PROFILE_FILE} exists: give an empty folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"can't make the folder {out}: {error}") from None
    if nsys:
        from pico_vllm.profiling.nsys import run_under_nsys

        print(f"{run_under_nsys(out, sys.argv[1:])}: open it in Nsight Systems, or `nsys stats` it")
        return
    load = Load(input_len, output_len, concurrency, steps, skip, temperature, seed)
    _record(
        load,
        out,
        model=model,
        dtype=dtype,
        device=device,
        engine_options=chosen,
        num_warmups=warmup,
        nvtx=nvtx,
        with_ceilings=ceilings,
        min_gap_us=min_gap_us,
        rows=rows,
    )


@app.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="DIR", help=CAPTURE_HELP)],
    rows: Annotated[int, typer.Option(min=1, help="Rows of the tables of ops and kernels.")] = 20,
) -> None:
    """Print the tables of a capture again."""
    from pico_vllm.profiling.profile import read_profile
    from pico_vllm.profiling.report import render
    from pico_vllm.tables import print_tables

    print_tables(render(read_profile(path), max_rows=rows))


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help=CAPTURE_HELP)],
    b: Annotated[Path, typer.Argument(metavar="B", help=CAPTURE_HELP)],
    rows: Annotated[int, typer.Option(min=1, help="Rows of the tables of ops and kernels.")] = 20,
) -> None:
    """Put two captures side by side: two commits, two settings, two GPUs."""
    from pico_vllm.profiling.compare import render_comparison
    from pico_vllm.profiling.profile import read_profile
    from pico_vllm.tables import print_tables

    print_tables(render_comparison(read_profile(a), read_profile(b), max_rows=rows))


# ---------------------------------------------------------------------------------------------------------- private
def _record(
    load: Any,
    out: Path,
    *,
    model: str | None,
    dtype: str,
    device: str,
    engine_options: dict[str, Any],
    num_warmups: int,
    nvtx: bool,
    with_ceilings: bool,
    min_gap_us: float,
    rows: int,
) -> None:
    import dataclasses

    import torch

    from pico_vllm.bench.ceilings import ceilings_from, measure_ceilings, statistic_of
    from pico_vllm.bench.records import machine_fields
    from pico_vllm.bench.session import open_model
    from pico_vllm.config import EngineConfig
    from pico_vllm.engine.llm_engine import LLMEngine
    from pico_vllm.profiling.capture import capture, engine_settings, run_with_nvtx, warm_up
    from pico_vllm.profiling.profile import PROFILE_FILE, TRACE_FILE, Profile, write_profile
    from pico_vllm.profiling.report import render
    from pico_vllm.tables import print_tables

    with open_model(model, name=None, dtype=dtype, device=device) as found:
        measured = None
        if with_ceilings and not nvtx:  # first: it needs the GPU's memory
            _say("measuring the device's ceilings")
            metrics = measure_ceilings(found.device)
            measured = ceilings_from(metrics, getattr(torch, found.dtype), statistic_of(found.device))
        defaults = {
            "model": str(found.directory),
            "dtype": found.dtype,
            "device": str(found.device),
            "enable_prefix_caching": False,
            "skip_tokenizer_init": not (found.directory / "tokenizer.json").exists(),
        }
        engine = LLMEngine(EngineConfig.from_options(**(defaults | engine_options)))
        step_s = warm_up(engine, load, num_warmups)
        if nvtx:
            print(f"{run_with_nvtx(engine, load, run_index=num_warmups)} steps were marked")
            return
        summary = capture(
            engine, load, out / TRACE_FILE, run_index=num_warmups, ceilings=measured, min_gap_us=min_gap_us
        )
        profile = Profile(
            environment=machine_fields(found.device),
            model=found.name,
            dtype=found.dtype,
            engine=dict(engine_settings(engine)),
            workload=dataclasses.asdict(load),
            ceilings=None if measured is None else dataclasses.asdict(measured),
            unprofiled_step_us=None if step_s is None else step_s * 1e6,
            summary=summary,
        )
        engine.shutdown()
    write_profile(profile, out / PROFILE_FILE)
    print_tables(render(profile, max_rows=rows))
    _say(
        f"{out / TRACE_FILE}: open it in https://ui.perfetto.dev or chrome://tracing; the numbers: {out / PROFILE_FILE}"
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--options={text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--options={text!r} must be a JSON object")
    return value


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
