"""``pico-vllm bench run | suite | compare | kernels | start | workload | prefix``; ``gate_commands`` has the others.

Parses and prints; everything else is the package's. Heavy imports wait for the command that needs them.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pico_vllm.bench import gate_commands
from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pico_vllm.bench.engines.loading import EngineSpec
    from pico_vllm.bench.session import SessionResult

ENGINE_HELP = (
    "pico-vllm, vllm, sglang, transformers, http://HOST:PORT or module:Class; repeatable. NAME@LABEL={JSON} gives "
    'options: pico-vllm@b32={"block_size": 32}.'
)
MODEL_HELP = (
    "Directory, .gguf file, hub id, or random:SHAPE (random:qwen2.5-1.5b). Default: the default model, or the preset's."
)
TP_HELP = "Devices that share the model, of pico-vllm; other engines take an option of theirs."
#: Options of ``bench run`` that are of some points only; likewise of ``bench workload`` and its kinds.
_OF_LOOPS = ("sweep", "burst", "poisson", "multi_turn")
_OF_POINTS = {
    **dict.fromkeys(("inputs", "outputs"), ("c1",)),
    "concurrency": ("sweep", "burst", "uniform"),
    **dict.fromkeys(("input_len", "output_len"), _OF_LOOPS),
    "temperature": ("throughput",),
    **dict.fromkeys(("rate", "num_poisson", "goodput_ttft_ms", "goodput_tpot_ms"), ("poisson",)),
}
_OF_KINDS = {
    "input_len": ("fixed", "uniform", "shared-prefix", "multi-turn"),
    "prefix_len": ("shared-prefix",),
    **dict.fromkeys(("turns", "turn_len"), ("multi-turn",)),
    "prompts": ("file",),
}
EXIT_WRONG_OUTPUT = 2  # an engine's outputs are wrong, or a row failed; the rest was measured

app = typer.Typer(help="Measure engines side by side, on one clock, after checking that their outputs are right.")
app.command()(gate_commands.gate)
app.command()(gate_commands.baseline)


@app.command()
def run(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="JSONL file to append records to.")],
    engines: Annotated[list[str] | None, typer.Option("--engine", help=ENGINE_HELP)] = None,
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    model_name: Annotated[str | None, typer.Option(help="What records call the model.")] = None,
    points: Annotated[str, typer.Option(help="Comma-separated names.")] = "c1",
    workload: Annotated[list[Path] | None, typer.Option(help="Also a workload file; repeatable.")] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Timed runs a point. Default 3; all of a file.")] = None,
    inputs: Annotated[str | None, typer.Option(help="Prompt lengths of c1, comma-separated.")] = None,
    outputs: Annotated[str | None, typer.Option(help="Output lengths of c1, comma-separated.")] = None,
    concurrency: Annotated[str | None, typer.Option(help="Of sweep, burst and uniform, comma-separated.")] = None,
    input_len: Annotated[int, typer.Option(min=1, help="Of sweep, burst, poisson, multi_turn.")] = 512,
    output_len: Annotated[int, typer.Option(min=1, help="Of sweep, burst, poisson, multi_turn.")] = 128,
    temperature: Annotated[str, typer.Option(help="Of throughput, comma-separated.")] = "0,0.6",
    rate: Annotated[str, typer.Option(help="Requests/s of poisson, comma-separated.")] = "8,32",
    num_poisson: Annotated[int, typer.Option(min=1, help="Requests of poisson.")] = 128,
    goodput_ttft_ms: Annotated[float, typer.Option(min=0, help="Objective of poisson: TTFT at most.")] = 200.0,
    goodput_tpot_ms: Annotated[float, typer.Option(min=0, help="Objective of poisson: TPOT at most.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Of all prompts.")] = 7,
    dtype: Annotated[str, typer.Option(help="auto = the checkpoint's; or bfloat16, float16, float32.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    tp: Annotated[int | None, typer.Option("--tp", "--tensor-parallel-size", min=1, help=TP_HELP)] = None,
    enable_prefix_caching: Annotated[bool, typer.Option("--enable-prefix-caching", help="Of all engines.")] = False,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Of all engines; default: each one's own.")] = None,
    memory_share: Annotated[float | None, typer.Option(help="Of the GPU for each engine. Default 0.5; 2: 0.4.")] = None,
    tag: Annotated[str, typer.Option(help="Goes into every record.")] = "",
) -> None:
    """Measure points on one or more engines in turn (A B B A) and write JSONL records."""
    from pico_vllm.bench.engines.loading import parse_engine_spec
    from pico_vllm.bench.metrics import Objective
    from pico_vllm.bench.points import POINT_NAMES, PointOptions, file_points, make_points
    from pico_vllm.bench.session import open_model, run_session
    from pico_vllm.bench.workloads import read_workloads

    names = _different("--points", [name.strip() for name in points.split(",") if name.strip()])
    if unknown := [name for name in names if name not in POINT_NAMES]:
        raise ConfigError(f"unknown point {unknown[0]!r}; known: {', '.join(POINT_NAMES)}")
    if not names and not workload:
        raise ConfigError(f"--points={points!r} and no --workload: there is nothing to measure")
    _refuse_unused(context, _OF_POINTS, names, "--points")
    specs = _with_ranks([parse_engine_spec(text) for text in engines or ["pico-vllm"]], tp)
    sizes: dict[str, Any] = {
        "inputs": _numbers("--inputs", inputs, int),
        "outputs": _numbers("--outputs", outputs, int),
        "concurrencies": _numbers("--concurrency", concurrency, int),
    }
    chosen = {name: values for name, values in sizes.items() if values is not None}
    with open_model(model, name=model_name, dtype=dtype, device=device) as bench_model:
        options = PointOptions(
            bench_model.config.vocab_size,
            seed=seed,
            input_len=input_len,
            output_len=output_len,
            temperatures=_numbers("--temperature", temperature, float) or (),
            rates=_numbers("--rate", rate, float) or (),
            num_poisson=num_poisson,
            objective=Objective(ttft_ms=goodput_ttft_ms, tpot_ms=goodput_tpot_ms),
            prefix_caching=enable_prefix_caching,
            **chosen,
        )
        todo = make_points(names, options)
        for path in workload or ():
            name, workloads = read_workloads(path)
            todo += file_points(name, workloads, vocab_size=bench_model.config.vocab_size, num_runs=runs)
        result = run_session(
            specs,
            bench_model,
            todo,
            out=out,
            num_runs=3 if runs is None else runs,
            tag=tag,
            enable_prefix_caching=enable_prefix_caching,
            max_num_seqs=max_num_seqs,
            memory_share=memory_share,
        )
    _end(result)


@app.command()
def suite(
    preset: Annotated[str, typer.Option(help="cpu, cpu-gate, gpu-gate, seed or gpu.")],
    out: Annotated[Path, typer.Option(help="Folder for JSONL, CSV, Markdown and PNG.")],
    engines: Annotated[list[str] | None, typer.Option("--engine", help=ENGINE_HELP)] = None,
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    tag: Annotated[str, typer.Option(help="Goes into every record.")] = "",
) -> None:
    """Make a whole table: JSONL, CSV, Markdown and PNG plots in one folder."""
    import dataclasses

    from pico_vllm.bench.engines.loading import parse_engine_spec
    from pico_vllm.bench.points import make_points
    from pico_vllm.bench.session import open_model, run_session
    from pico_vllm.bench.suite import PRESETS

    if preset not in PRESETS:
        raise ConfigError(f"unknown preset {preset!r}; known: {', '.join(PRESETS)}")
    plan = PRESETS[preset]
    specs = [parse_engine_spec(text) for text in engines or plan.engines]
    _make_folder(out)
    path = out / f"{preset}.jsonl"
    if path.exists():
        raise ConfigError(f"{path} exists: give an empty folder, so that two runs don't mix")
    _require_plots()
    results = []
    with open_model(model or plan.model, name=None, dtype="auto", device=device) as bench_model:
        options = plan.options(bench_model.config.vocab_size)
        points = make_points(plan.points, options)
        results.append(run_session(specs, bench_model, points, out=path, num_runs=plan.num_runs, tag=tag))
        if plan.with_prefix_caching:
            names = [name for name in plan.points if name in ("prefix", "prefix_burst")]
            points = make_points(names, dataclasses.replace(options, prefix_caching=True))
            results.append(
                run_session(
                    specs,
                    bench_model,
                    points,
                    out=path,
                    num_runs=plan.num_runs,
                    tag=tag,
                    enable_prefix_caching=True,
                    measure_machine=False,
                )
            )
        if plan.kernel_shape is not None:
            from pico_vllm.bench.kernel_session import run_kernels

            run_kernels(plan.kernel_shape, bench_model.device, dtype=bench_model.dtype, out=path, tag=tag)
    print(_write_reports([path], out))
    _end(*results)


@app.command()
def compare(
    files: Annotated[list[Path], typer.Argument(metavar="A.jsonl B.jsonl …", help="Records; the first is the base.")],
    out: Annotated[Path | None, typer.Option(help="Folder for CSV, Markdown and PNG too.")] = None,
) -> None:
    """Put records side by side: engines, commits, GPUs; ratios above 1 are better than the first file's."""
    from pico_vllm.bench.compare import compare as compare_records
    from pico_vllm.bench.compare import render, to_markdown
    from pico_vllm.bench.report import load_records
    from pico_vllm.tables import print_tables

    records = {str(path): load_records([path]) for path in files}
    if out is not None:
        _make_folder(out)
    comparison = compare_records(records)
    print_tables(render(comparison))
    if out is not None:
        (out / "compare.md").write_text(to_markdown(comparison))
        _write_reports(files, out)


@app.command()
def kernels(
    shape: Annotated[str | None, typer.Option(help="qwen2.5-1.5b (default on a GPU) or smollm2-135m.")] = None,
    backend: Annotated[str, typer.Option(help="auto, cpu, reference or triton.")] = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    only: Annotated[str | None, typer.Option(help="Names of ops, comma-separated. Default: all.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSONL file to append records to.")] = None,
    tag: Annotated[str, typer.Option(help="Goes into every record.")] = "",
) -> None:
    """Time every op beside torch's own: bytes, FLOPs, the floor they set, time, and the share of the floor."""
    from pico_vllm.bench.kernel_rows import TABLE_WIDTH, kernel_table
    from pico_vllm.bench.kernel_session import run_kernels
    from pico_vllm.config import DTYPES
    from pico_vllm.tables import print_tables
    from pico_vllm.worker.model_runner import resolve_device

    if dtype not in DTYPES:
        raise ConfigError(f"--dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    names = None if only is None else [name.strip() for name in only.split(",")]
    rows = run_kernels(shape, resolve_device(device), backend=backend, dtype=dtype, only=names, out=out, tag=tag)
    print_tables(kernel_table(rows), min_width=TABLE_WIDTH)
    if any(row.error for row in rows):
        sys.exit(EXIT_WRONG_OUTPUT)


@app.command()
def start(
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    dtype: Annotated[str, typer.Option(help="auto = the checkpoint's; or bfloat16, float16, float32.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    options: Annotated[str, typer.Option(help='More of the engine\'s, as JSON: {"enforce_eager": true}.')] = "{}",
    warm: Annotated[int, typer.Option(min=1, help="Starts with compiled kernels, after one without.")] = 3,
    out: Annotated[Path | None, typer.Option(help="JSONL file to append records to.")] = None,
    tag: Annotated[str, typer.Option(help="Goes into every record.")] = "",
) -> None:
    """Time a start from the process to the first token, phase by phase, without and with compiled kernels."""
    from pico_vllm.bench.session import open_model
    from pico_vllm.bench.start import measure_starts, record_fields, start_table

    chosen = _json_object("--options", options)
    with open_model(model, name=None, dtype=dtype, device=device) as found:
        where = {"dtype": found.dtype, "device": str(found.device)}
        runs = list(measure_starts(str(found.directory), where | chosen, num_warm=warm))
    print(start_table(runs))
    if out is not None:
        from pico_vllm.bench.records import RecordWriter

        writer = RecordWriter(out, model=found.name, dtype=found.dtype, device=found.device, tag=tag)
        for how in ("cold", "warm"):
            writer.write(**record_fields([run for run in runs if run.how == how]))
        writer.close()


@app.command()
def workload(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="JSONL file to write.")],
    kind: Annotated[str, typer.Option(help="fixed, uniform, shared-prefix, multi-turn or file.")] = "fixed",
    num: Annotated[int, typer.Option(min=1, help="Requests (of multi-turn: conversations).")] = 64,
    input_len: Annotated[str, typer.Option(help="Prompt tokens, N or LOW-HIGH.")] = "512",
    output_len: Annotated[str, typer.Option(help="Output tokens, N or LOW-HIGH.")] = "128",
    prefix_len: Annotated[
        int, typer.Option(min=1, help="Of shared-prefix: tokens that all prompts begin with.")
    ] = 2048,
    turns: Annotated[int, typer.Option(min=1, help="Of multi-turn.")] = 4,
    turn_len: Annotated[int, typer.Option(min=1, help="Of multi-turn: new tokens a turn after the first.")] = 64,
    prompts: Annotated[
        Path | None, typer.Option(help='Of file: JSONL with "prompt" or "prompt_token_ids", and "max_tokens".')
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Closed loop. Default: all at once.")] = None,
    rate: Annotated[float | None, typer.Option(help="Poisson arrivals a second instead of a closed loop.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs with prompts of their own: a warm-up and the timed ones.")] = 4,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 7,
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
) -> None:
    """Write a workload to a file, for ``bench run --workload FILE`` on any engine."""
    from pico_vllm.bench import workloads as w
    from pico_vllm.models.source import find_model

    if concurrency is not None and rate is not None:
        raise ConfigError(f"--concurrency {concurrency} and --rate {rate} exclude each other")
    _refuse_unused(context, _OF_KINDS, [kind], "--kind")
    source = find_model(model)
    vocab_size = source.model_config().vocab_size
    input_range, output_range = _range("--input-len", input_len), _range("--output-len", output_len)
    if kind not in ("fixed", "uniform"):
        for option, (low, high) in (("--input-len", input_range), ("--output-len", output_range)):
            if low != high:
                raise ConfigError(f"{option}={low}-{high}: --kind {kind} takes one length, not a range")
    if kind in ("fixed", "uniform"):
        draw = w.uniform_lengths(num, input_range, output_range, vocab_size)
    elif kind == "shared-prefix":
        draw = w.shared_prefix(num, prefix_len, input_range[1], output_range[1], vocab_size)
    elif kind == "multi-turn":
        draw = w.multi_turn(num, turns, input_range[1], turn_len, output_range[1], vocab_size)
    elif kind == "file":
        if prompts is None:
            raise ConfigError("--kind file needs --prompts FILE")
        draw = w.from_prompts(_read_prompts(prompts, source, output_range[1]), num)
    else:
        raise ConfigError(f"unknown --kind {kind!r}; known: fixed, uniform, shared-prefix, multi-turn, file")
    loop = None if rate is not None else concurrency or 0
    plan = w.WorkloadPlan(kind, seed, draw, loop, rate)
    w.write_workloads(out, out.stem, [plan.run(index) for index in range(runs)])
    print(f"{runs} runs of {len(plan.run(0).requests)} requests in {out}")


@app.command()
def prefix(
    simulate: Annotated[Path, typer.Option(help="JSONL log: prompt_token_ids, or input_length and hash_ids, a line.")],
    num_blocks: Annotated[int, typer.Option(min=1, help="KV cache blocks.")] = 65536,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a block.")] = 16,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 32,
    hash_block_size: Annotated[int, typer.Option(min=1, help="Tokens that one of hash_ids stands for.")] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Replay a log of requests against the prefix cache, without a model: hit rate, evictions, µs an operation."""
    import dataclasses
    import json

    from pico_vllm.bench.prefix_simulation import OPERATIONS, read_log
    from pico_vllm.bench.prefix_simulation import simulate as run_simulation

    log = read_log(simulate, hash_block_size=hash_block_size)
    result = run_simulation(log, num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs)
    shares = {"p50": 0.5, "p99": 0.99}
    times = {op: {name: result.percentile_us(op, share) for name, share in shares.items()} for op in OPERATIONS}
    stats = result.stats
    if as_json:
        fields = {
            name: getattr(result, name) for name in ("num_requests", "num_too_long", "num_early_ends", "num_nodes")
        }
        print(json.dumps(fields | dataclasses.asdict(stats) | {"hit_rate": stats.hit_rate, "times_us": times}))
        return
    print(f"{result.num_requests} requests ({result.num_too_long} left out: too long for the cache)")
    print(f"{result.num_early_ends} requests ended early for want of blocks")
    print(f"hit rate {stats.hit_rate:.1%}: {stats.num_hit_tokens} of {stats.num_prompt_tokens} prompt tokens")
    print(f"{stats.num_evicted_blocks} blocks evicted, {stats.num_cached_blocks} of {num_blocks} cached at the end")
    print(f"{result.num_nodes} nodes at the end")
    for op, values in times.items():
        print(f"{op:<7}" + "".join(f"  {name} {value:8.1f} µs" for name, value in values.items()))


# ---------------------------------------------------------------------------------------------------------- private
def _numbers(option: str, text: str | None, kind: Any) -> tuple[Any, ...] | None:
    if text is None:
        return None
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option}={text!r} must be numbers with commas between them") from None
    if any(value < 0 or (kind is int and value < 1) for value in values):
        raise ConfigError(f"{option}={text!r}: a number is too small")
    if not all(map(math.isfinite, values)):
        raise ConfigError(f"{option}={text!r}: numbers must be finite")
    return tuple(_different(option, values))


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{option}={text!r} must be a JSON object")
    return value


def _different(option: str, values: Sequence[Any]) -> Sequence[Any]:
    """Twice the same would be the same prompts twice: a prefix cache would have them."""
    if repeated := [value for index, value in enumerate(values) if value in values[:index]]:
        raise ConfigError(f"{option}: {repeated[0]} is there twice; for more runs there is --runs")
    return values


def _refuse_unused(
    context: typer.Context, options: Mapping[str, Sequence[str]], chosen: Sequence[str], where: str
) -> None:
    """An option of something that isn't asked for would be ignored."""
    for name, users in options.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and not set(users) & set(chosen):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} is of {', '.join(users)}, not of {where} {','.join(chosen) or 'none'}: leave it out"
            )


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"can't make the folder {path}: {error}") from None


def _range(option: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        values = int(low), int(high or low)
    except ValueError:
        raise ConfigError(f"{option}={text!r} must be N or LOW-HIGH") from None
    if not 1 <= values[0] <= values[1]:
        raise ConfigError(f"{option}={text!r} must be N or LOW-HIGH with 1 <= LOW <= HIGH")
    return values


def _read_prompts(path: Path, source: Any, default_max_tokens: int) -> list[tuple[list[int], int]]:
    from pico_vllm.engine.tokenizer import Tokenizer

    tokenizer = None
    prompts = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            max_tokens = int(fields.get("max_tokens", default_max_tokens))
            ids = fields.get("prompt_token_ids")
            if ids is None:
                if tokenizer is None:
                    with source.hf_directory() as directory:
                        tokenizer = Tokenizer.from_directory(directory)
                ids = tokenizer.encode(fields["prompt"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number}: {type(error).__name__}: {error}") from None
        prompts.append((list(ids), max_tokens))
    if not prompts:
        raise ConfigError(f"{path} holds no prompt")
    return prompts


def _require_plots() -> None:
    """Fail before minutes of measuring, not after."""
    from pico_vllm.bench.plots import require_matplotlib

    require_matplotlib()


def _write_reports(files: Sequence[Path], out: Path) -> str:
    """Write CSV, Markdown and plots; returns the Markdown."""
    from pico_vllm.bench.plots import plot_all
    from pico_vllm.bench.report import load_records, to_csv, to_markdown

    records = {str(path): load_records([path]) for path in files}
    _make_folder(out)
    markdown = to_markdown(records)
    (out / "report.md").write_text(markdown)
    (out / "report.csv").write_text(to_csv(records))
    plots = plot_all(records, out)
    print(f"{out}: report.md, report.csv, {', '.join(path.name for path in plots)}", file=sys.stderr)
    return markdown


def _with_ranks(specs: list[EngineSpec], tp: int | None) -> list[EngineSpec]:
    """Give our own engine so many ranks, where its spec doesn't say."""
    if tp is None:
        return specs
    if all(spec.target != "pico-vllm" for spec in specs):
        raise ConfigError(f"--tp={tp} is for pico-vllm, which is not measured: give the engine an option of its own")
    ranks = {"tensor_parallel_size": tp}
    return [replace(s, extra=ranks | s.extra) if s.target == "pico-vllm" else s for s in specs]


def _end(*results: SessionResult) -> None:
    """Exit with an error when an engine's outputs are wrong, a row failed, or nothing was measured at all."""
    errors = [record for result in results for record in result.records if "error" in record]
    measured = [record for result in results for record in result.records if "runs" in record]
    if not measured:
        reasons = [f"{k}: {v}" for r in results for k, v in {**r.unavailable, **r.failed_gate}.items()]
        reasons += [reason for result in results for reason in result.left_out]
        reasons += [f"{record['engine']}, {record['point']}: {record['error']}" for record in errors]
        raise ConfigError(f"nothing was measured: {'; '.join(reasons)}")
    if errors or any(result.failed_gate for result in results):
        sys.exit(EXIT_WRONG_OUTPUT)
