"""KernelBackend: every op the engine calls, bound to one implementation each.

Layers and the sampler call ``backend.<op>(...)`` and nothing else, so that

- ``dataclasses.replace(CPU, rms_norm=rms_norm_reference)`` swaps one op: a parity failure is bisected by swapping;
- ``recording(backend, tap)`` sees every call with its arguments and result: the oracle's taps are a backend, not hooks.

``REFERENCE`` is naive and the only oracle; ``CPU`` is vectorised torch, tested against it, and runs on any device.
``TRITON``, for GPUs, is in ``triton_backend``: this module doesn't import triton.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pico_vllm.kernels import (
    attention,
    block_copy,
    embedding,
    linear,
    logits_processing,
    philox,
    rms_norm,
    rotary_decode_attention,
    rotary_embedding_and_store_kv,
    sampling,
)


@dataclass(frozen=True, slots=True)
class KernelBackend:
    """The ops; contracts are in the files that implement them.

    ``prepare_attention`` makes what ``rotary_embedding_and_store_kv``, ``paged_attention`` and
    ``rotary_decode_attention`` (both in one) of the same backend take as metadata: swap the four together.
    ``pack_linear`` likewise belongs to the three products, but each of them accepts every packed weight; what
    ``partial_linear`` returns is for ``add_rms_norm``, and any of these takes it.
    """

    name: str
    embedding: Callable[..., Any]
    pack_linear: Callable[..., linear.LinearWeight]
    linear: Callable[..., Any]
    partial_linear: Callable[..., Any]
    gated_linear: Callable[..., Any]
    rms_norm: Callable[..., Any]
    add_rms_norm: Callable[..., Any]
    prepare_attention: Callable[..., Any]
    rotary_embedding_and_store_kv: Callable[..., None]
    paged_attention: Callable[..., Any]
    rotary_decode_attention: Callable[..., Any]
    greedy: Callable[..., Any]
    sample: Callable[..., Any]
    uniform: Callable[..., Any]
    apply_penalties: Callable[..., None]
    apply_bitmask: Callable[..., None]
    logprobs: Callable[..., Any]
    copy_blocks: Callable[..., None]
    gather_blocks: Callable[..., Any]
    scatter_blocks: Callable[..., None]


REFERENCE = KernelBackend(
    name="reference",
    embedding=embedding.embedding_reference,
    pack_linear=linear.pack_linear_dense,
    linear=linear.linear_reference,
    partial_linear=linear.partial_linear_reference,
    gated_linear=linear.gated_linear_reference,
    rms_norm=rms_norm.rms_norm_reference,
    add_rms_norm=rms_norm.add_rms_norm_reference,
    prepare_attention=attention.prepare_attention_reference,
    rotary_embedding_and_store_kv=rotary_embedding_and_store_kv.rotary_embedding_and_store_kv_reference,
    paged_attention=attention.paged_attention_reference,
    rotary_decode_attention=rotary_decode_attention.rotary_decode_attention_reference,
    greedy=sampling.greedy_reference,
    sample=sampling.sample_reference,
    uniform=philox.uniform_cpu,
    apply_penalties=logits_processing.apply_penalties_reference,
    apply_bitmask=logits_processing.apply_bitmask_reference,
    logprobs=logits_processing.logprobs_reference,
    copy_blocks=block_copy.copy_blocks_reference,
    gather_blocks=block_copy.gather_blocks_reference,
    scatter_blocks=block_copy.scatter_blocks_reference,
)

CPU = KernelBackend(
    name="cpu",
    embedding=embedding.embedding_cpu,
    pack_linear=linear.pack_linear_cpu,
    linear=linear.linear_cpu,
    partial_linear=linear.partial_linear_cpu,
    gated_linear=linear.gated_linear_cpu,
    rms_norm=rms_norm.rms_norm_cpu,
    add_rms_norm=rms_norm.add_rms_norm_cpu,
    prepare_attention=attention.prepare_attention_cpu,
    rotary_embedding_and_store_kv=rotary_embedding_and_store_kv.rotary_embedding_and_store_kv_cpu,
    paged_attention=attention.paged_attention_cpu,
    rotary_decode_attention=rotary_decode_attention.rotary_decode_attention_cpu,
    greedy=sampling.greedy_cpu,
    sample=sampling.sample_cpu,
    uniform=philox.uniform_cpu,
    apply_penalties=logits_processing.apply_penalties_cpu,
    apply_bitmask=logits_processing.apply_bitmask_cpu,
    logprobs=logits_processing.logprobs_cpu,
    copy_blocks=block_copy.copy_blocks_cpu,
    gather_blocks=block_copy.gather_blocks_cpu,
    scatter_blocks=block_copy.scatter_blocks_cpu,
)

#: Called after each op: (op name, positional arguments, result). In-place ops have changed their arguments by then.
Tap = Callable[[str, tuple[Any, ...], Any], None]


def recording(backend: KernelBackend, tap: Tap) -> KernelBackend:
    """A backend that computes what ``backend`` computes and tells ``tap`` about every call."""

    def wrap(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any) -> Any:
            result = op(*args)
            tap(name, args, result)
            return result

        return recorded

    ops = {f.name: wrap(f.name, getattr(backend, f.name)) for f in dataclasses.fields(backend) if f.name != "name"}
    return dataclasses.replace(backend, name=f"recording({backend.name})", **ops)
