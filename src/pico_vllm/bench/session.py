"""A benchmark session: load engines, pass them through the gate, measure the machine and the points, write records.

    calibrate → ceilings → load → gate → points → calibrate

What can't be had (an engine that isn't installed, one that fails the gate) is told, and the rest goes on.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pico_vllm.bench.calibration import calibrate
from pico_vllm.bench.ceilings import Ceilings, ceilings_from, measure_ceilings, statistic_of
from pico_vllm.bench.engines.engine import BenchEngine, EngineOptions
from pico_vllm.bench.engines.loading import EngineSpec, EngineUnavailableError, load_engine
from pico_vllm.bench.gate import gate_generations
from pico_vllm.bench.points import Point
from pico_vllm.bench.random_model import SHAPES, write_random_model
from pico_vllm.bench.records import RecordWriter, memory_used_bytes
from pico_vllm.bench.runner import Contestant, Measuring, Say, run_points
from pico_vllm.bench.work import model_work
from pico_vllm.config import DTYPES, ModelConfig, cache_dir
from pico_vllm.errors import ConfigError
from pico_vllm.models import default_model
from pico_vllm.models.source import find_model
from pico_vllm.oracle.generation_check import GenerationOracle
from pico_vllm.worker.model_runner import resolve_device

_RANDOM = "random:"
_DTYPES = ("auto", *DTYPES)
#: Of the GPU's memory, for all engines of a session together; the gate's oracle takes some of the rest.
_TOTAL_MEMORY_SHARE = 0.8
_MAX_MEMORY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class BenchModel:
    """The checkpoint that all engines load.

    Attributes:
        directory: config.json and safetensors.
        name: in records.
        config: what it is.
        dtype: "bfloat16", "float16" or "float32".
        device: to run on.
    """

    directory: Path
    name: str
    config: ModelConfig
    dtype: str
    device: torch.device


@dataclass(frozen=True, slots=True)
class SessionResult:
    """What became of a session.

    Attributes:
        records: all that were written.
        unavailable: engines that can't be had, with the reason.
        failed_gate: engines that were not timed because their outputs are wrong, with the reason.
        left_out: points that an engine can't run, with the reason.
    """

    records: list[dict[str, Any]]
    unavailable: dict[str, str] = field(default_factory=dict)
    failed_gate: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


@contextmanager
def open_model(model: str | None, *, name: str | None, dtype: str, device: str) -> Iterator[BenchModel]:
    """Find a checkpoint: a directory, GGUF file or hub id, None (the default model), or ``random:SHAPE``.

    Raises:
        ConfigError, WeightLoadError: it can't be had.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype!r} must be one of {', '.join(_DTYPES)}")
    on = resolve_device(device)
    if model is not None and model.startswith(_RANDOM):
        shape = model.removeprefix(_RANDOM)
        name = name or f"{shape} shape, random weights"
        model = str(_random_checkpoint(shape, on))
    if model is None:
        name = name or default_model.MODEL_NAME
    source = find_model(model)
    config = source.model_config()
    with source.hf_directory() as directory:
        yield BenchModel(directory, name or source.path.name, config, config.dtype if dtype == "auto" else dtype, on)


def run_session(
    specs: Sequence[EngineSpec],
    model: BenchModel,
    points: Sequence[Point],
    *,
    out: Path,
    num_runs: int = 3,
    tag: str = "",
    enable_prefix_caching: bool = False,
    max_num_seqs: int | None = None,
    memory_share: float | None = None,
    measure_machine: bool = True,
    say: Say = lambda line: print(line, file=sys.stderr, flush=True),
) -> SessionResult:
    """Measure ``points`` on the engines of ``specs`` and append the records to ``out``.

    Args:
        specs: engines, side by side in this process.
        model: what they load.
        points: to measure.
        out: JSONL file.
        num_runs: timed runs a point.
        tag: goes into every record.
        enable_prefix_caching: of all engines.
        max_num_seqs: of all engines; None = their defaults.
        memory_share: of the GPU for each engine; None = 0.5 for one, less for several.
        measure_machine: write ceilings and calib records too.
        say: called with a line of progress.
    """
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise ConfigError(f"engines {', '.join(names)} must have different names: add a label, as in pico-vllm@eager")
    if memory_share is not None and model.device.type != "cuda":
        raise ConfigError(f"memory_share={memory_share} is of a GPU, and the device is {model.device}: leave it out")
    if memory_share is not None and not 0 < memory_share <= 1:
        raise ConfigError(f"memory_share={memory_share} must be in (0, 1]")
    usual_share = min(_MAX_MEMORY_SHARE, _TOTAL_MEMORY_SHARE / max(1, len(specs)))
    writer = RecordWriter(out, model=model.name, dtype=model.dtype, device=model.device, tag=tag)
    result = SessionResult(writer.records)
    engines: dict[str, BenchEngine] = {}
    contestants: list[Contestant] = []
    try:
        ceilings = None
        if measure_machine:
            _write_calibration(writer, model.device, "before", say)
            ceilings = _write_ceilings(writer, model.device, model.dtype, say)
        options = EngineOptions(
            model=str(model.directory),
            dtype=model.dtype,
            device=str(model.device),
            memory_share=usual_share if memory_share is None else memory_share,
            enable_prefix_caching=enable_prefix_caching,
            max_num_seqs=max_num_seqs,
        )
        fields = _load_engines(specs, options, model.device, engines, result.unavailable, say)
        contestants = _pass_the_gate(engines, fields, model, points, result.failed_gate, say)
        element_bytes = torch.finfo(getattr(torch, model.dtype)).bits // 8
        work = model_work(model.config, element_bytes)
        measuring = Measuring(num_runs, model.device, work, ceilings, say)
        gc.collect()
        gc.freeze()  # a full collection would walk over every engine's objects in the middle of a measurement
        result.left_out.extend(run_points(contestants, points, writer, measuring))
        if measure_machine and contestants:
            _write_calibration(writer, model.device, "after", say)
    finally:
        gc.unfreeze()
        with ExitStack() as closing:
            closing.callback(_free_memory, model.device)
            closing.callback(writer.close)
            for engine in engines.values():
                closing.callback(engine.close)
            engines.clear()
            contestants.clear()
    return result


# ---------------------------------------------------------------------------------------------------------- private
def _random_checkpoint(shape: str, device: torch.device) -> Path:
    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r} in random:SHAPE; known: {', '.join(SHAPES)}")
    directory = cache_dir() / "random" / shape
    if not (directory / "model.safetensors").exists():
        write_random_model(directory, shape, device=str(device))
    return directory


def _load_engines(
    specs: Sequence[EngineSpec],
    options: EngineOptions,
    device: torch.device,
    engines: dict[str, BenchEngine],
    unavailable: dict[str, str],
    say: Say,
) -> dict[str, dict[str, Any]]:
    """Fill ``engines``, and ``unavailable`` with reasons; returns what each engine's records say of it."""
    fields: dict[str, dict[str, Any]] = {}
    for spec in specs:
        before = memory_used_bytes(device)
        try:
            engine = load_engine(spec, options)
        except EngineUnavailableError as error:
            unavailable[spec.name] = str(error)
            say(f"{spec.name}: left out: {error}")
            continue
        engines[spec.name] = engine
        after = memory_used_bytes(device)
        fields[spec.name] = {
            **dataclasses.asdict(engine.info),
            "label": spec.label,
            "load_memory_gib": {kind: round((after[kind] - before[kind]) / 2**30, 3) for kind in after},
        }
        say(f"{spec.name}: {engine.info.version}, ready in {engine.info.start_s} s")
    return fields


def _pass_the_gate(
    engines: dict[str, BenchEngine],
    fields: dict[str, dict[str, Any]],
    model: BenchModel,
    points: Sequence[Point],
    failed: dict[str, str],
    say: Say,
) -> list[Contestant]:
    """Engines whose outputs are right."""
    if not engines:
        return []
    first_runs = [point.workload(int(point.warm_up)) for point in points]
    widest = max((w.concurrency or len(w.requests) for w in first_runs), default=1)
    longest = max((n for w in first_runs for n in w.prompt_lens()), default=1)
    generations = {}
    for name, engine in engines.items():
        try:
            generations[name] = gate_generations(
                engine,
                vocab_size=model.config.vocab_size,
                widest=widest,
                longest=longest,
                max_len=model.config.max_position_embeddings,
            )
        except Exception as error:  # an engine of somebody else's may raise anything
            failed[name] = f"{type(error).__name__}: {error}"
            say(f"{name}: NOT timed: {failed[name]}")
    oracle = GenerationOracle(model.directory, getattr(torch, model.dtype), model.device)
    contestants = []
    for name, generated in generations.items():
        check = oracle.check(generated)
        if check.problem is not None:
            failed[name] = check.problem
            say(f"{name}: NOT timed, its outputs are wrong: {check.problem}")
            continue
        say(
            f"{name}: correct: {check.num_tokens} tokens, {check.num_not_best} not the best one (at most "
            f"{check.worst_gap:.3g} below it, {check.allowed_gap:.3g} allowed), {check.num_logprobs} logprobs"
        )
        contestants.append(Contestant(name, engines[name], fields[name] | {"gate": dataclasses.asdict(check)}))
    del oracle
    _free_memory(model.device)
    return contestants


def _free_memory(device: torch.device) -> None:
    """Of what nothing refers to, for the next session and its engines."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _write_calibration(writer: RecordWriter, device: torch.device, when: str, say: Say) -> None:
    metrics = calibrate(device)
    writer.write(engine="calib", point="calib", when=when, metrics=metrics)
    say(f"calib {when}: " + ", ".join(f"{name} {min(values):.2f}" for name, values in metrics.items()))


def _write_ceilings(writer: RecordWriter, device: torch.device, dtype: str, say: Say) -> Ceilings:
    metrics = measure_ceilings(device)
    writer.write(engine="ceilings", point="ceilings", metrics=metrics)
    say("ceilings: " + ", ".join(f"{name} {value['median']:.4g}" for name, value in metrics.items()))
    return ceilings_from(metrics, getattr(torch, dtype), statistic_of(device))
