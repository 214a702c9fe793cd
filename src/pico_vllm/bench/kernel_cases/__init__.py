"""What ``pico-vllm bench kernels`` times: one op at the sizes of one model, its cost, its oracle, torch's answer to it.

A new op is one function that makes its case and one entry in ``OPS``.
"""

from __future__ import annotations

from pico_vllm.bench.kernel_cases import attention, linear, rotary_and_store, sampling, tokens
from pico_vllm.bench.kernel_cases.case import KernelOp

OPS: tuple[KernelOp, ...] = (
    KernelOp("embedding", ("embedding",), tokens.embedding_cases),
    KernelOp("rms_norm", ("rms_norm",), tokens.rms_norm_cases),
    KernelOp("add_rms_norm", ("add_rms_norm",), tokens.add_rms_norm_cases),
    KernelOp("linear", ("pack_linear", "linear"), linear.linear_cases),
    KernelOp("partial_linear", ("pack_linear", "partial_linear"), linear.partial_linear_cases),
    KernelOp("gated_linear", ("pack_linear", "gated_linear"), linear.gated_linear_cases),
    KernelOp(
        "rotary_embedding_and_store_kv",
        ("prepare_attention", "rotary_embedding_and_store_kv"),
        rotary_and_store.rotary_and_store_cases,
    ),
    KernelOp("paged_attention_decode", ("prepare_attention", "paged_attention"), attention.decode_cases),
    KernelOp("paged_attention_prefill", ("prepare_attention", "paged_attention"), attention.prefill_cases),
    KernelOp("greedy", ("greedy",), sampling.greedy_cases),
    KernelOp("sample", ("sample",), sampling.sample_cases),
    KernelOp("logprobs", ("logprobs",), sampling.logprobs_cases),
    KernelOp("apply_penalties", ("apply_penalties",), sampling.apply_penalties_cases),
    KernelOp("apply_bitmask", ("apply_bitmask",), sampling.apply_bitmask_cases),
)
