"""What ``import pico_vllm`` gives, and what it and a generation must not load."""

import os
import subprocess
import sys

import pytest

import pico_vllm
import tiny_models


def run_python(script, *arguments):
    """The standard output of a fresh interpreter that sees the same packages as this one."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", pico_vllm.__all__)
def test_every_public_name_resolves(name):
    assert getattr(pico_vllm, name) is not None


def test_the_public_names_are_these():
    assert set(pico_vllm.__all__) == {
        "LLM",
        "AsyncLLM",
        "CompletionOutput",
        "EngineConfig",
        "RequestOutput",
        "SamplingParams",
        "__version__",
    }


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="'pico_vllm' has no attribute 'LLMM'"):
        pico_vllm.LLMM  # noqa: B018
    assert not hasattr(pico_vllm, "torch")


@pytest.mark.parametrize("state", ["enable", "disable"])
def test_no_garbage_is_collected_during_the_import_and_then_as_before(state):
    script = f"""
import gc
gc.{state}()
generations = []
gc.callbacks.append(lambda phase, info: generations.append(info["generation"]))
from pico_vllm import LLM
print(2 in generations, gc.isenabled())
"""
    assert run_python(script) == f"False {state == 'enable'}\n"


HEAVY = "{'torch', 'triton', 'transformers', 'numpy', 'tokenizers', 'safetensors', 'gguf', 'huggingface_hub'}"


@pytest.mark.parametrize(
    "statement",
    [
        "import pico_vllm",
        "from pico_vllm import SamplingParams, EngineConfig, RequestOutput, CompletionOutput",
        "import pico_vllm.cli",
        "import pico_vllm.errors, pico_vllm.scheduler_output, pico_vllm.request",
        "import pico_vllm.scheduler.scheduler, pico_vllm.kv_cache",
    ],
)
def test_importing_the_package_loads_nothing_heavy(statement):
    assert run_python(f"{statement}; import sys; print(sorted({HEAVY} & set(sys.modules)))") == "[]\n"


GENERATE = """
import sys
from pico_vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], device="cpu", num_gpu_blocks_override=8)
for temperature in (0.0, 0.8):
    [output] = llm.generate("some text", SamplingParams(temperature=temperature, max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
assert "torch" in sys.modules
print(sorted({"transformers", "triton", "gguf"} & set(sys.modules)))
"""


def test_a_generation_imports_neither_transformers_nor_triton(tmp_path):
    tiny_models.save_tiny_model(tiny_models.MODELS["llama-gqa3-d64-tied"], tmp_path)
    assert run_python(GENERATE, tmp_path) == "[]\n"
