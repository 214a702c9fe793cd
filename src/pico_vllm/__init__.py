"""Pico-vLLM: an LLM inference engine small enough to read in a weekend.

Importing the package loads neither torch nor triton nor transformers; the public names are imported on first use.
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "pico_vllm.llm",
    "AsyncLLM": "pico_vllm.engine.async_llm",
    "EngineConfig": "pico_vllm.config",
    "SamplingParams": "pico_vllm.sampling_params",
    "RequestOutput": "pico_vllm.outputs",
    "CompletionOutput": "pico_vllm.outputs",
}

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from pico_vllm.config import EngineConfig
    from pico_vllm.engine.async_llm import AsyncLLM
    from pico_vllm.llm import LLM
    from pico_vllm.outputs import CompletionOutput, RequestOutput
    from pico_vllm.sampling_params import SamplingParams


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        collects = gc.isenabled()
        gc.disable()  # what is imported stays: looking through it again and again is a tenth of the time
        try:
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        finally:
            if collects:
                gc.enable()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
