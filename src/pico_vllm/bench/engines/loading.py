"""From what a user writes after --engine to an engine that is ready, or to the reason why there is none."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pico_vllm.errors import ConfigError, PicoVLLMError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pico_vllm.bench.engines.engine import BenchEngine, EngineOptions

#: Name → where its adapter is, and the package that it needs.
_ADAPTERS = {
    "pico-vllm": ("pico_vllm.bench.engines.pico_engine:PicoEngine", None),
    "vllm": ("pico_vllm.bench.engines.vllm_engine:VllmEngine", "vllm"),
    "sglang": ("pico_vllm.bench.engines.sglang_engine:SglangEngine", "sglang"),
    "transformers": ("pico_vllm.bench.engines.transformers_engine:TransformersEngine", "transformers"),
}
_SPEC = re.compile(r"(?P<target>https?://[^@=]+|[^@={}]+)(@(?P<label>[^={}]+))?(=(?P<extra>\{.*\}))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One --engine: ``NAME[@LABEL][={JSON}]``.

    Attributes:
        target: a name of ``_ADAPTERS``, the URL of a server, or module:Class of an adapter of one's own.
        label: tells two settings of one engine apart; "" if there is none.
        extra: the engine's own options.
    """

    target: str
    label: str
    extra: dict[str, Any]

    @property
    def name(self) -> str:
        """For messages; unique in a run."""
        return f"{self.target}@{self.label}" if self.label else self.target


class EngineUnavailableError(PicoVLLMError):
    """An engine can't be had here; the others go on."""


def parse_engine_spec(text: str) -> EngineSpec:
    """Read ``NAME[@LABEL][={JSON}]``, for example ``pico-vllm@b32={"block_size": 32}``.

    Raises:
        ConfigError: it can't be read, or the name is unknown.
    """
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"engine {text!r} must be NAME, NAME@LABEL or NAME@LABEL={{JSON options}}")
    target, label = match["target"], match["label"] or ""
    try:
        extra = json.loads(match["extra"] or "{}")
    except ValueError as error:
        raise ConfigError(f"engine {text!r}: its options are no JSON: {error}") from None
    if target not in _ADAPTERS and ":" not in target:
        raise ConfigError(f"unknown engine {target!r}; known: {', '.join(_ADAPTERS)}, http://HOST:PORT, module:Class")
    return EngineSpec(target, label, extra)


def load_engine(spec: EngineSpec, options: EngineOptions) -> BenchEngine:
    """Build an engine, with the options of ``spec`` as ``extra``; takes minutes for some.

    Raises:
        EngineUnavailableError: it isn't installed, can't run here, or failed to start; the message says which.
    """
    options = dataclasses.replace(options, extra=spec.extra)
    try:
        if spec.target.startswith(("http://", "https://")):
            from pico_vllm.bench.engines.openai_server import OpenAIEngine

            return OpenAIEngine(spec.target, options)
        place, package = _ADAPTERS.get(spec.target, (spec.target, None))
        if package is not None and importlib.util.find_spec(package) is None:
            raise EngineUnavailableError(f"{package} isn't installed in this Python")
        module, _, name = place.partition(":")
        adapter: Callable[[EngineOptions], BenchEngine] = getattr(importlib.import_module(module), name)
        return adapter(options)
    except EngineUnavailableError:
        raise
    except Exception as error:
        raise EngineUnavailableError(f"{type(error).__name__}: {error}") from error
