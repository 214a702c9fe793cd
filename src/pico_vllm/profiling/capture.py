"""A capture: an engine at work under torch's profiler, or marked for nsys.

The engine warms up on other prompts first. Then ranges are put around what it does, the steps run, the ranges are
taken away, and what torch has recorded becomes a trace file and a ``Summary``. Of several ranks it is the one in this
process.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pico_vllm.bench.work import model_work
from pico_vllm.engine.core_client import core_in_this_process
from pico_vllm.errors import ConfigError
from pico_vllm.profiling.analysis import MIN_GAP_US, sum_of, summarize
from pico_vllm.profiling.load import Load, LoadRun
from pico_vllm.profiling.op_costs import step_cost
from pico_vllm.profiling.ranges import engine_ranges
from pico_vllm.profiling.trace import load_events, read_trace

if TYPE_CHECKING:
    from pico_vllm.bench.ceilings import Ceilings
    from pico_vllm.engine.llm_engine import LLMEngine
    from pico_vllm.profiling.profile import Summary


def warm_up(engine: LLMEngine, load: Load, num_runs: int) -> float | None:
    """Run the load as it is; returns the median seconds of a step in the last run, None without one."""
    median = None
    for index in range(num_runs):
        run = LoadRun(engine, load, index)
        run.skip()
        median = statistics.median(run.steps())
        run.end()
    return median


def capture(
    engine: LLMEngine,
    load: Load,
    trace_path: Path,
    *,
    run_index: int = 0,
    ceilings: Ceilings | None = None,
    min_gap_us: float = MIN_GAP_US,
) -> Summary:
    """Run a load under torch's profiler.

    Args:
        engine: with its core in this process, and nothing to do.
        load: what it is to do.
        trace_path: a .json.gz file to write, for Perfetto.
        run_index: one that no warm-up had.
        ceilings: of the device.
        min_gap_us: what is shorter is no gap of its own.

    Raises:
        ConfigError: the core is in another process; nothing was recorded, or nothing of the GPU.
    """
    runner = core_in_this_process(engine.core).executor.runner
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpu = runner.device.type == "cuda"
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    run = LoadRun(engine, load, run_index)
    run.skip()
    with engine_ranges(engine, torch.profiler.record_function) as log, ExitStack() as stack:
        with warnings.catch_warnings():
            # torch 2.10 and later say it of a profile of one cycle too, until pytorch/pytorch#180387.
            warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
            profiler = stack.enter_context(torch.profiler.profile(activities=activities))
        for _ in run.steps():
            pass
        if on_gpu:
            torch.cuda.synchronize(runner.device)
    run.end()
    profiler.export_chrome_trace(str(trace_path))
    trace = read_trace(load_events(trace_path))
    if on_gpu and not trace.on_gpu:
        raise ConfigError(
            "nothing of the GPU was recorded: another profiler may be at work, or this user may not ask it for its "
            "times; --nsys says more"
        )
    work = model_work(engine.model_config, runner.dtype.itemsize)
    costs = [step_cost(work, plan) for plan in log.plans]
    return summarize(
        trace,
        log.costs,
        whole_cost=sum_of(costs) if costs else None,
        ceilings=ceilings,
        min_gap_us=min_gap_us,
    )


def run_with_nvtx(engine: LLMEngine, load: Load, *, run_index: int = 0) -> int:
    """Run a load with NVTX ranges, between cudaProfilerStart and cudaProfilerStop; returns the number of steps.

    Torch's profiler stays off: only one program can ask the GPU for its times.
    """
    run = LoadRun(engine, load, run_index)
    run.skip()
    with engine_ranges(engine, torch.cuda.nvtx.range):
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        num_steps = sum(1 for _ in run.steps())
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    run.end()
    return num_steps


def engine_settings(engine: LLMEngine) -> Mapping[str, Any]:
    """What a capture's reader must know of the engine."""
    core = core_in_this_process(engine.core)
    runner, config = core.executor.runner, engine.config
    return {
        "backend": runner.backend.name,
        "cuda_graphs": runner.uses_cuda_graphs,
        "async_scheduling": core.overlaps,
        "enable_prefix_caching": config.cache.enable_prefix_caching,
        "tensor_parallel_size": config.parallel.tensor_parallel_size,
        "max_num_batched_tokens": runner.max_num_batched_tokens,
        "block_size": config.cache.block_size,
    }
