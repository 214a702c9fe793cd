"""Presets: which engines, points and sizes make a whole table, with one command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pico_vllm.bench.metrics import Objective
from pico_vllm.bench.points import PointOptions


@dataclass(frozen=True, slots=True)
class Preset:
    """A suite.

    Attributes:
        what: for --help.
        model: None = the default model, or ``random:SHAPE``.
        engines: specs of --engine.
        points: names.
        options: vocabulary size → sizes.
        num_runs: timed runs a point.
        with_prefix_caching: measure ``prefix`` and ``prefix_burst`` a second time with the engines' prefix caches on.
        kernel_shape: shapes of the kernel benchmark that ends the suite; None = none.
    """

    what: str
    model: str | None
    engines: tuple[str, ...]
    points: tuple[str, ...]
    options: Callable[[int], PointOptions]
    num_runs: int
    with_prefix_caching: bool
    kernel_shape: str | None


PRESETS: dict[str, Preset] = {
    "cpu": Preset(
        what="default model beside transformers, sizes for 2 cores: 5 minutes at most",
        model=None,
        engines=("pico-vllm", "transformers"),
        points=("c1", "throughput", "sweep", "prefix", "multi_turn", "poisson"),
        options=lambda vocab_size: PointOptions(
            vocab_size,
            inputs=(32, 128, 512),
            outputs=(16, 64),
            concurrencies=(1, 8, 32),
            input_len=32,
            output_len=32,
            uniform=(16, 64),
            num_throughput=32,
            temperatures=(0.0,),
            prefix_len=256,
            own_len=16,
            num_conversations=8,
            num_turns=3,
            rates=(4.0, 16.0),
            num_poisson=24,
            objective=Objective(ttft_ms=300.0, tpot_ms=50.0),
        ),
        num_runs=2,
        with_prefix_caching=False,
        kernel_shape="smollm2-135m",
    ),
    "cpu-gate": Preset(
        what="the regression gate's points for 2 cores, default model, seconds each",
        model=None,
        engines=("pico-vllm",),
        points=("c1", "sweep"),
        options=lambda vocab_size: PointOptions(
            vocab_size, inputs=(32, 128), outputs=(8,), concurrencies=(4,), input_len=32, output_len=8
        ),
        num_runs=5,
        with_prefix_caching=False,
        kernel_shape=None,
    ),
    "gpu-gate": Preset(
        what="the regression gate's points on a Qwen2.5-1.5B shape: about a minute, so that a baseline has many runs",
        model="random:qwen2.5-1.5b",
        engines=("pico-vllm",),
        points=("c1", "sweep"),
        options=lambda vocab_size: PointOptions(
            vocab_size, inputs=(64, 512, 2048, 8192), outputs=(128,), concurrencies=(8, 64, 128)
        ),
        num_runs=5,
        with_prefix_caching=False,
        kernel_shape=None,
    ),
    "seed": Preset(
        what="prompts of 64-8192 and answers of 16-1024 tokens one at a time, TTFT, prefix cache off and on",
        model="random:qwen2.5-1.5b",
        engines=("pico-vllm",),
        points=("c1", "prefix"),
        options=lambda vocab_size: PointOptions(
            vocab_size, inputs=(64, 256, 512, 1024, 2048, 4096, 8192), outputs=(16, 64, 256, 1024)
        ),
        num_runs=3,
        with_prefix_caching=True,
        kernel_shape=None,
    ),
    "gpu": Preset(
        what="every point of the committed vLLM and SGLang records, on a Qwen2.5-1.5B shape",
        model="random:qwen2.5-1.5b",
        engines=("pico-vllm",),
        points=("c1", "throughput", "prefix", "prefix_burst", "sweep", "burst"),
        options=PointOptions,
        num_runs=3,
        with_prefix_caching=True,
        kernel_shape="qwen2.5-1.5b",
    ),
}
