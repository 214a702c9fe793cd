"""Keys and arithmetic of the ceilings; never how high they are."""

import pytest
import torch

from pico_vllm.bench.ceilings import Ceilings, ceilings_from, measure_ceilings, statistic_of

MEASURED = {
    "copy_TBps": {"median": 4.0, "best": 4.25, "what": ""},
    "read_TBps": {"median": 4.5, "best": 4.75, "what": ""},
    "read_torch_sum_TBps": {"median": 4.125, "best": 4.5, "what": ""},
    "matmul_8192_bf16_TFLOPs": {"median": 768.0, "best": 800.0, "what": ""},
    "matmul_2048_fp32_TFLOPs": {"median": 50.0, "best": 60.0, "what": ""},
}


def test_a_cpu_has_every_ceiling():
    measured = measure_ceilings(torch.device("cpu"), quick=True)
    assert set(measured) == {
        "copy_TBps",
        "read_TBps",
        "read_torch_sum_TBps",
        "matmul_512_bf16_TFLOPs",
        "matmul_512_fp32_TFLOPs",
    }
    for metric in measured.values():
        assert set(metric) == {"median", "best", "what"}
        assert 0 < metric["median"] <= metric["best"]
    assert measured["copy_TBps"]["what"] == "64 MiB to 64 MiB, bytes read + written"
    assert "no Triton" in measured["read_TBps"]["what"]


def test_the_ceiling_of_a_cpu_is_the_best_that_was_measured():
    assert statistic_of(torch.device("cpu")) == "best" and statistic_of(torch.device("cuda")) == "median"


def test_floors_use_medians_in_plain_units():
    assert ceilings_from(MEASURED) == Ceilings(4.5e12, 4e12, 768e12)
    assert ceilings_from(MEASURED, statistic="best") == Ceilings(4.75e12, 4.25e12, 800e12)


@pytest.mark.parametrize("dtype, flops", [(torch.bfloat16, 768e12), (torch.float32, 50e12), (torch.float16, 768e12)])
def test_the_matrix_ceiling_is_of_the_dtype_or_the_fastest(dtype, flops):
    assert ceilings_from(MEASURED, dtype).matmul_flops_per_s == flops
