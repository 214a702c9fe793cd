"""Every exception Pico-vLLM raises on purpose.

A message carries the offending value, the limit and the remedy, so that one line is enough for the person who reads
it. ``assert`` is reserved for our own invariants; "no free blocks" is a return value, never an exception.
"""

from __future__ import annotations


class PicoVLLMError(Exception):
    """Base class: catch this to catch everything the engine raises on purpose."""


class ConfigError(PicoVLLMError, ValueError):
    """An engine option or a model configuration is wrong, unknown or not supported."""


class RequestError(PicoVLLMError, ValueError):
    """One request is wrong. The engine and every other request go on."""


class WeightLoadError(PicoVLLMError):
    """A checkpoint is missing, unreadable, or its tensors are not those of the model; names the tensor."""


class DeviceOutOfMemoryError(PicoVLLMError):
    """The device has no memory left for a step. The engine ends the largest request of the step and goes on."""


class KVTransferError(PicoVLLMError):
    """KV cache blocks could not be moved between engines or memory tiers."""


class EngineDeadError(PicoVLLMError):
    """The engine core has failed; carries the cause. Build a new engine."""
