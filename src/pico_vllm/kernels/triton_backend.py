"""TRITON: the backend of GPUs. Importing it imports triton, so whoever needs it imports it where it is chosen.

Matrix products are torch's (cuBLAS) on dense weights, and so are the embedding and the log-probabilities.
"""

from __future__ import annotations

import dataclasses

from pico_vllm.kernels import linear
from pico_vllm.kernels.attention_triton import paged_attention_triton, prepare_attention_triton
from pico_vllm.kernels.backend import CPU
from pico_vllm.kernels.block_copy_triton import copy_blocks_triton, gather_blocks_triton, scatter_blocks_triton
from pico_vllm.kernels.greedy_triton import greedy_triton
from pico_vllm.kernels.linear_triton import gated_linear_triton, linear_triton, partial_linear_triton
from pico_vllm.kernels.logits_processing_triton import apply_bitmask_triton, apply_penalties_triton
from pico_vllm.kernels.philox_triton import uniform_triton
from pico_vllm.kernels.rms_norm_triton import add_rms_norm_triton, rms_norm_triton
from pico_vllm.kernels.rotary_decode_attention_triton import rotary_decode_attention_triton
from pico_vllm.kernels.rotary_embedding_and_store_kv_triton import rotary_embedding_and_store_kv_triton
from pico_vllm.kernels.sampling_triton import sample_triton

TRITON = dataclasses.replace(
    CPU,
    name="triton",
    pack_linear=linear.pack_linear_dense,
    linear=linear_triton,
    partial_linear=partial_linear_triton,
    gated_linear=gated_linear_triton,
    rms_norm=rms_norm_triton,
    add_rms_norm=add_rms_norm_triton,
    prepare_attention=prepare_attention_triton,
    paged_attention=paged_attention_triton,
    rotary_decode_attention=rotary_decode_attention_triton,
    rotary_embedding_and_store_kv=rotary_embedding_and_store_kv_triton,
    greedy=greedy_triton,
    sample=sample_triton,
    uniform=uniform_triton,
    apply_penalties=apply_penalties_triton,
    apply_bitmask=apply_bitmask_triton,
    copy_blocks=copy_blocks_triton,
    gather_blocks=gather_blocks_triton,
    scatter_blocks=scatter_blocks_triton,
)
