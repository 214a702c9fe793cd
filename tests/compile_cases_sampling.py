"""Greedy, sampling and what comes before them, over the vocabularies of Qwen2.5 (151,936) and SmolLM2 (49,152)."""

import triton
import triton.language as tl

from compile_cases import CompileCase
from pico_vllm.kernels import greedy_triton, logits_processing_triton, philox_triton, sampling_triton

_DTYPES = {"bf16": tl.bfloat16, "fp32": tl.float32}


def _greedy(chunk: int, dtype: str, pdl: bool) -> list[CompileCase]:
    return [
        CompileCase(
            name=f"greedy-{dtype}-{chunk}",
            kernel=greedy_triton._best_of_chunk_kernel,
            signature={"logits_ptr": f"*{dtype}", "values_ptr": "*fp32", "ids_ptr": "*i32", "row_stride": "i32"}
            | {"vocab_size": "i32", "num_chunks": "i32"},
            constexprs={"CHUNK": chunk, "PDL": pdl},
            divisible=("row_stride", "vocab_size"),
            num_warps=greedy_triton._NUM_WARPS,
        ),
        CompileCase(
            name=f"greedy-chunks-{dtype}-{chunk}",
            kernel=greedy_triton._best_chunk_kernel,
            signature={"values_ptr": "*fp32", "ids_ptr": "*i32", "token_ids_ptr": "*i64"}
            | {"last_token_ids_ptr": "*i32", "rows_ptr": "*i32", "num_chunks": "i32"},
            constexprs={"CHUNKS_BLOCK": triton.next_power_of_2(triton.cdiv(151936, chunk)), "KEEPS": True, "PDL": pdl},
            num_warps=1,
        ),
    ]


def _sample(vocab_size: int, dtype: str, has_min_p: bool) -> list[CompileCase]:
    name = f"{vocab_size}-{dtype}{'-min_p' if has_min_p else ''}"
    shape = sampling_triton._shape(vocab_size)
    tiles_block, chunks_block = map(triton.next_power_of_2, (shape.num_tiles, shape.num_chunks))
    inputs = {"logits_ptr": f"*{dtype}", "temperature_ptr": "*fp32", "top_k_ptr": "*i64"}
    filters = {"top_p_ptr": "*fp32", "min_p_ptr": "*fp32", "uniform_ptr": "*fp64"}
    statistics = {"chunk_scores_ptr": "*fp32", "chunk_masses_ptr": "*fp64"}
    sizes = {"row_stride": "i32", "vocab_size": "i32", "num_chunks": "i32"}
    divisible = ("row_stride", "vocab_size")
    kind = {"HAS_MIN_P": has_min_p, "DTYPE": _DTYPES[dtype], "CHUNKS_BLOCK": chunks_block}
    return [
        CompileCase(
            name=f"sample-statistics-{name}",
            kernel=sampling_triton._statistics_kernel,
            signature=inputs | statistics | {"tile_maxima_ptr": "*fp32"} | sizes,
            constexprs={"CHUNK": shape.chunk, "TILE": shape.tile},
            divisible=divisible,
            num_warps=sampling_triton._STATISTICS_WARPS,
        ),
        CompileCase(
            name=f"sample-candidates-{name}",
            kernel=sampling_triton._draw_from_candidates_kernel,
            signature=inputs
            | filters
            | statistics
            | {"tile_maxima_ptr": "*fp32", "listed_tiles_ptr": "*i32", "candidate_logits_ptr": "*fp32"}
            | {"candidate_ids_ptr": "*i32", "token_ids_ptr": "*i64", "num_tiles": "i32"}
            | sizes,
            constexprs=kind
            | {"TILE": shape.tile, "TILES_BLOCK": tiles_block, "CANDIDATES": shape.candidates}
            | {"GROUP": sampling_triton._COLLECTED // shape.tile},
            divisible=(*divisible, "num_tiles"),
            num_warps=sampling_triton._ROW_WARPS,
        ),
        CompileCase(
            name=f"sample-row-{name}",
            kernel=sampling_triton._draw_from_row_kernel,
            signature=inputs | filters | statistics | {"token_ids_ptr": "*i64"} | sizes,
            constexprs=kind | {"CHUNK": shape.chunk},
            divisible=divisible,
            num_warps=sampling_triton._ROW_WARPS,
        ),
    ]


_UNIFORM = CompileCase(
    name="uniform",
    kernel=philox_triton._uniform_kernel,
    signature={"seeds_ptr": "*i64", "sample_indices_ptr": "*i64", "positions_ptr": "*i64", "uniform_ptr": "*fp64"}
    | {"n": "i32"},
    constexprs={"BLOCK": philox_triton._BLOCK},
    num_warps=philox_triton._BLOCK // 32,
)
_PENALTIES = CompileCase(
    name="apply_penalties",
    kernel=logits_processing_triton._apply_penalties_kernel,
    signature={"logits_ptr": "*fp32", "in_prompt_ptr": "*i8", "output_counts_ptr": "*i32", "repetition_ptr": "*fp32"}
    | {"presence_ptr": "*fp32", "frequency_ptr": "*fp32", "logits_stride": "i32", "in_prompt_stride": "i32"}
    | {"output_counts_stride": "i32", "vocab_size": "i32", "blocks_a_row": "i32"},
    constexprs={"BLOCK": logits_processing_triton._BLOCK},
    divisible=("logits_stride", "in_prompt_stride", "output_counts_stride", "vocab_size"),
    num_warps=logits_processing_triton._NUM_WARPS,
    enable_fp_fusion=False,
)
_BITMASK = CompileCase(
    name="apply_bitmask",
    kernel=logits_processing_triton._apply_bitmask_kernel,
    signature={"logits_ptr": "*fp32", "bitmask_ptr": "*i32", "logits_stride": "i32", "bitmask_stride": "i32"}
    | {"vocab_size": "i32", "blocks_a_row": "i32"},
    constexprs={"BLOCK": logits_processing_triton._BLOCK},
    divisible=("logits_stride", "vocab_size"),
    num_warps=logits_processing_triton._NUM_WARPS,
)


def compile_cases(architecture: int) -> list[CompileCase]:
    """Every kernel that chooses tokens, in the dtypes and vocabularies that matter."""
    launches_early = architecture >= 90
    return [
        _UNIFORM,
        _PENALTIES,
        _BITMASK,
        *_greedy(4096, "bf16", launches_early),
        *_greedy(8192, "bf16", launches_early),
        *_greedy(8192, "fp32", launches_early),
        *_sample(151936, "bf16", has_min_p=False),
        *_sample(151936, "fp32", has_min_p=True),
        *_sample(49152, "bf16", has_min_p=True),
    ]
