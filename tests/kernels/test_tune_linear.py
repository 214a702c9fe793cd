"""The search of benchmarks/tune_linear.py, with costs of our own in place of a GPU's."""

import json

import pytest
import torch

from benchmark_scripts import load_script
from kernel_implementations import RUNS_TRITON
from pico_vllm.kernels import linear_config
from pico_vllm.kernels.linear_config import LinearConfig, Product

if not RUNS_TRITON:
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tuning():
    return load_script("tune_linear")


@pytest.fixture
def step(tuning):
    return tuning.DecodeStep(tuning.TINY, torch.float16, CPU)


def test_a_step_of_the_tiny_model_runs_with_any_table(tuning, step):
    table = {(Product.WHOLE, False): None, (Product.PARTIAL, False): LinearConfig(16, 16, 32, 4, 2, 3)}
    table[Product.GATED, False] = LinearConfig(16, 16, 16, 4)
    with tuning.choosing(table, 3):
        for product in step.weights.values():
            tuning.check(step, *product, 3)
        assert step.seconds([20, 7, 1]) > 0.0


def test_a_wrong_product_fails_its_check(tuning, step, monkeypatch):
    def wrong(x, weight):
        return 1.1 * tuning.linear_reference(x, weight)

    monkeypatch.setattr(tuning, "TRITON", tuning.dataclasses.replace(tuning.TRITON, linear=wrong))
    kind, weight = step.weights["qkv"]
    with pytest.raises(ArithmeticError, match=r"relative error 0\.1"):
        tuning.check(step, kind, weight, 3)


def test_the_search_finds_the_best_shape_of_each_product(tuning, step, monkeypatch):
    """Costs add up: narrow tiles, few warps and splits are cheap, cuBLAS for whole products. One shape doesn't work."""
    cublas = {Product.WHOLE: 0.0, Product.PARTIAL: 90.0, Product.GATED: 90.0}

    def config_of(kind):
        return tuning.linear_triton.choose_linear(kind, 16, 64, 64, 90)

    def seconds(contexts, backend=None, budget=None):
        costs = [
            cublas[kind] if config is None else config.block_n + config.num_warps / 100 + config.max_splits / 10
            for kind, config in ((kind, config_of(kind)) for kind in cublas)
        ]
        return 1e-6 * (100 + sum(costs))

    def check(step, kind, weight, num_tokens):
        config = config_of(kind)
        if config is not None and (config.block_n, config.num_warps) == (16, 4):
            raise ValueError("out of resource")

    monkeypatch.setattr(step, "seconds", seconds)
    monkeypatch.setattr(tuning, "check", check)
    found = tuning.tune(step, 64, None, ablate=False)
    assert found["shapes"]["qkv"] == found["shapes"]["lm_head"] == "cuBLAS"
    assert found["shapes"]["gate_up"].startswith("64x16x") and "warps 8" in found["shapes"]["gate_up"]
    assert found["shapes"]["o"].startswith("64x32x") and "splits 2, warps 4" in found["shapes"]["o"]
    assert found["shapes"]["down"] == found["shapes"]["o"]  # the tiny model's are of one class
    assert found["cublas_us"] == 280.0
    assert found["final_us"] == round(100 + (32 + 0.04 + 0.2) + (16 + 0.08 + 0.1), 1)
    assert all(list(rows.values()) == sorted(rows.values()) for rows in found["rows"].values())
    assert not any("64x16x" in shape and "warps 4" in shape for rows in found["rows"].values() for shape in rows)


def test_the_record_says_where_it_was_made_and_grows_with_each_number_of_tokens(tuning, tmp_path, monkeypatch, capsys):
    asked = []

    def tune(step, num_tokens, max_candidates, *, ablate):
        asked.append((num_tokens, max_candidates, ablate))
        return {"final_us": 1.0, "cublas_us": 2.0, "rows": {"qkv": {"cuBLAS": 1.0}}}

    monkeypatch.setattr(tuning, "tune", tune)
    out = tmp_path / "tuning.json"
    words = ["tune_linear.py", "--device", "cpu", "--tokens", "1", "2", "--max-candidates", "3", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    tuning.main()
    record = json.loads(out.read_text())
    assert asked == [(1, 3, False), (2, 3, False)]
    assert set(record["tokens"]) == {"1", "2"}
    assert {package["name"] for package in record["environment"]["packages"]} >= {"torch", "triton"}
    assert "2 tokens: 1.0 µs, with cuBLAS alone 2.0" in capsys.readouterr().out


def test_rows_of_the_kernel_for_hopper_have_names_of_their_own(tuning):
    config = LinearConfig(16, 64, 128, 4, 3, 5)
    assert tuning.shape_name(config) == "16x64x128, splits 5, warps 4, stages 3"
    on_hopper = tuning.dataclasses.replace(config, on_hopper=True)
    assert tuning.shape_name(on_hopper) == "16x64x128, splits 5, warps 4, stages 3, for Hopper"


def test_candidates_for_hopper_are_tried_on_hopper(tuning, step, monkeypatch):
    tried = {}

    def time_each(step, name, product, configs, table, num_tokens, budget):
        tried.setdefault(name, configs)
        return [(1.0, config) for config in configs]

    monkeypatch.setattr(tuning, "time_each", time_each)
    for architecture in (90, 100):
        device = tuning.device_of(None)
        monkeypatch.setattr(
            tuning, "device_of", lambda _, d=device, a=architecture: tuning.dataclasses.replace(d, architecture=a)
        )
        monkeypatch.setattr(step, "seconds", lambda *args, **kwargs: 1.0)
        tried.clear()
        tuning.tune(step, 64, 3, ablate=False)
        on_hopper = {name: sum(config.on_hopper for config in configs) for name, configs in tried.items()}
        has_it = architecture == 90 and tuning.linear_triton.launch_hopper_linear is not None
        assert on_hopper == dict.fromkeys(tried, 3 if has_it else 0)


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 17, 64, 65, 97, 129, 161, 256, 257])
def test_candidates_for_hopper_fit_and_the_present_shapes_are_among_them(tuning, num_tokens):
    for product, table in linear_config._HOPPER_SHAPES.items():
        configs = tuning.hopper_candidates(product, num_tokens)
        if product[0] is Product.GATED and num_tokens > 64:
            assert configs == [tuning._GATED_TILES]
            continue
        assert len(configs) == len(set(configs)) and bool(configs) == (2 <= num_tokens <= 256)
        for config in configs:
            assert config.on_hopper and config.block_m <= max(8, 2 * num_tokens)
            assert num_tokens <= config.block_m or num_tokens > 128
            rows = config.block_n * (2 if product[0] is Product.GATED else 1)
            assert 2 * (rows + config.block_m) * config.block_k * config.num_stages <= 227 << 10
        present = next((shapes for most, shapes in table.items() if num_tokens <= most), ())
        assert num_tokens == 1 or set(present) <= set(configs)


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 16, 17, 64, 128, 256])
def test_candidates_fit(tuning, num_tokens):
    for product in linear_config._SHAPES:
        configs = tuning.candidates(product, num_tokens)
        assert len(configs) == len(set(configs)) >= 4
        for config in configs:
            assert (config.block_m == 1) == (num_tokens == 1)
            weights = config.block_n * (2 if product[0] is Product.GATED else 1)
            inputs = config.block_k * config.num_slices
            assert weights * inputs <= 128 * 32 * config.num_warps
            assert weights * config.block_m * config.num_slices <= 128 * 32 * config.num_warps
            assert config.num_slices in (1, config.num_warps)
            if config.block_m > 1:
                assert 2 * (weights + config.block_m) * inputs * config.num_stages <= 227 << 10
            if product[0] is not Product.PARTIAL:
                assert config.max_splits == 1


@pytest.mark.parametrize("architecture, num_tokens, is_tiled", [(90, 512, True), (90, 256, False), (100, 512, False)])
def test_gated_products_of_many_tokens_are_tried_in_their_tiles(
    tuning, step, monkeypatch, architecture, num_tokens, is_tiled
):
    """Present where they fill the device; in a search whatever the table says."""
    device = tuning.dataclasses.replace(tuning.device_of(None), architecture=architecture, num_sms=132)
    monkeypatch.setattr(tuning, "device_of", lambda index: device)
    monkeypatch.setattr(tuning.linear_triton, "smallest_hopper_tile", lambda x, weight: 64)
    monkeypatch.setattr(tuning, "results", lambda kind, weight: 8960)
    kind, weight = step.weights["gate_up"]
    present = tuning.present(kind, weight, step.tokens(num_tokens, weight.in_features))
    assert present == (tuning._GATED_TILES if is_tiled else None)
    for config, takes in ((tuning._GATED_TILES, True), (None, False)):
        with tuning.choosing({(Product.GATED, False): config}, num_tokens):
            assert tuning.linear_triton.choose_linear(kind, num_tokens, 8960, 1536) is None
            assert tuning.linear_triton.takes_gated_tiles(num_tokens, 8960, 132) is takes
