"""benchmarks/trace_steps.py: every step is noted, and the table adds up."""

import json

import pytest

from benchmark_scripts import load_script
from pico_vllm import LLM
from pico_vllm.bench.workloads import WorkloadRequest
from pico_vllm.scheduler.step_time import StepTimeModel

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def tracing():
    return load_script("trace_steps")


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return LLM(
        str(directory), load_format="dummy", skip_tokenizer_init=True, async_scheduling=True, num_gpu_blocks_override=64
    )


def test_every_step_but_the_first_is_noted(tracing, llm):
    """Of three prompts that fit into one step, which has none before it."""
    requests = [WorkloadRequest((3,) * length, outputs) for length, outputs in ((5, 4), (9, 2), (7, 6))]
    steps = tracing.trace(llm, requests)
    assert [step.num_decodes for step in steps] == [3, 2, 2, 1, 1]
    assert {step.num_prompt_tokens for step in steps} == {0}
    assert [step.num_positions for step in steps] == [6 + 10 + 8, 7 + 9, 8 + 10, 11, 12]
    assert all(step.seconds > 0 for step in steps)
    assert tracing.trace(llm, requests) != []  # nothing is left behind


def test_the_table_adds_steps_up_by_kind_and_number_of_decodes(tracing):
    Step = tracing.Step
    steps = [Step(3, 0, 30, 0.002), Step(32, 0, 640, 0.004), Step(33, 0, 330, 0.006), Step(8, 100, 80, 0.008)]
    alone = StepTimeModel(((1, 0.001), (32, 0.003)), 1e-6, 0.0)
    head, names, few, many, mixed = tracing.table(steps, alone)
    assert head == "4 steps, 0.020 s" and len(names) == len(few)
    assert few.split() == ["≤32", "2", "0", "19", "3.000", "2.065", "30.0%"]
    assert many.split() == ["≤64", "1", "0", "10", "6.000", "3.065", "30.0%"]
    assert mixed.split() == ["≤32", "1", "100", "10", "8.000", "–", "40.0%"]
    assert tracing.table(steps, None)[2].split()[5] == "–"
