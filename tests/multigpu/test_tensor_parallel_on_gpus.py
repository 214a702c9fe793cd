"""Two GPUs give what one gives, through the whole engine: with graphs, in bf16 and exactly in fp32, sync and async."""

import gc
import json
import os
import subprocess
import sys
import time

import pytest
import torch

import tiny_models
from engine_runs import (
    MAX_BF16_ERROR_RATIO,
    assert_close_logprobs,
    assert_same_tokens,
    greedy,
    make_llm,
    run_with_logits,
)
from pico_vllm import LLM, SamplingParams
from pico_vllm.bench.random_model import SHAPES
from pico_vllm.errors import EngineDeadError

MODELS = ("llama-biases-llama3-rope", "qwen3-gqa2-d128-untied")
LENGTHS = (1, 5, 16, 17, 40, 63, 100, 200)
PROMPTS = [[(7 * i + 3 * j) % 290 + 2 for j in range(n)] for i, n in enumerate(LENGTHS)]
PARAMS = [
    SamplingParams(temperature=0.8, top_k=20, seed=i, max_tokens=12, ignore_eos=True) if i % 3 == 1 else greedy(12)
    for i in range(len(LENGTHS))
]
NUM_CYCLES = 30
#: An engine that stayed would hold a hundred times as much: symmetric memory, NCCL's buffers, a KV cache.
MAX_GROWN_BYTES = 64 << 20

pytestmark = pytest.mark.usefixtures("exact_fp32_products")


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    tiny_models.save_tiny_model(tiny_models.MODELS[request.param], directory)
    return directory


def engine(checkpoint, **options):
    return make_llm(checkpoint, **({"device": "cuda", "max_num_seqs": 16} | options))


def on_one_gpu(checkpoint, prompts, params):
    """Each prompt by itself; eager, as whatever is recorded is."""
    llm = engine(checkpoint, enforce_eager=True)
    return [run_with_logits(llm, [prompt], param)[0] for prompt, param in zip(prompts, params, strict=True)]


@pytest.fixture(scope="module")
def expected(checkpoint):
    return on_one_gpu(checkpoint, PROMPTS, PARAMS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"enable_prefix_caching": True, "max_num_batched_tokens": 48, "block_size": 8, "num_gpu_blocks_override": 80},
        {"engine_core_process": True},
    ],
    ids=["graphs", "eager", "cache-chunks-preemption", "in-a-process"],
)
def test_two_gpus_give_what_one_gives_in_fp32(checkpoint, expected, options):
    llm = engine(checkpoint, tensor_parallel_size=2, **options)
    for _ in range(2):  # the second time with a prefix cache, if there is one
        outputs = llm.generate(PROMPTS, PARAMS)
        for output, run in zip(outputs, expected, strict=True):
            assert_same_tokens(output.outputs[0].token_ids, run.token_ids, run.logits)
    llm.engine.shutdown()


def test_logits_are_those_of_one_gpu(checkpoint, expected):
    # Rank 0 records its ops and replays nothing, so nor may the other.
    llm = engine(checkpoint, tensor_parallel_size=2, enforce_eager=True)
    for run, alone in zip(run_with_logits(llm, PROMPTS, PARAMS, order="staggered"), expected, strict=True):
        assert_close_logprobs(run.logits, alone.logits)
        assert_same_tokens(run.token_ids, alone.token_ids, alone.logits)
    llm.engine.shutdown()


def test_errors_in_bf16_are_those_of_one_gpu(checkpoint):
    """Every run is shown the same tokens, those of fp32 on one GPU, by asking for the log-probabilities of prompts."""
    params = greedy(1, prompt_logprobs=5)
    prompts = [PROMPTS[i] for i in range(3, len(PROMPTS))] * 3

    def logprobs(**options):
        llm = engine(checkpoint, **options)
        outputs = llm.generate(prompts, params)
        llm.engine.shutdown()
        return [
            {token_id: entry.logprob for token_id, entry in position.items()}
            for output in outputs
            for position in output.prompt_logprobs
            if position is not None
        ]

    truth = logprobs(dtype="float32")
    assert len(truth) >= 512

    def rms_error(**options):
        errors = [
            position[token_id] - exact[token_id]
            for position, exact in zip(logprobs(dtype="bfloat16", **options), truth, strict=True)
            for token_id in position.keys() & exact.keys()
        ]
        return torch.tensor(errors).square().mean().sqrt().item()

    one = rms_error()
    for overlaps in (False, True):
        two = rms_error(tensor_parallel_size=2, async_tensor_parallel=overlaps, max_num_batched_tokens=4096)
        assert two <= MAX_BF16_ERROR_RATIO * one, (overlaps, two, one)


def test_async_gives_what_sync_gives(checkpoint):
    """Steps of up to 2,048 tokens, which are captured, cut in two."""
    prompts = [[(11 * i + 5 * j) % 290 + 2 for j in range(180 + i)] for i in range(14)]
    expected = on_one_gpu(checkpoint, prompts, [greedy(6)] * len(prompts))
    for overlaps in (False, True):
        llm = engine(checkpoint, tensor_parallel_size=2, async_tensor_parallel=overlaps)
        for count in (7, 14, 6):
            for output, run in zip(llm.generate(prompts[:count], greedy(6)), expected, strict=False):
                assert_same_tokens(output.outputs[0].token_ids, run.token_ids, run.logits)
        llm.engine.shutdown()


def test_async_gives_what_sync_gives_where_the_host_launches_a_step(tmp_path):
    """Two layers as wide as Qwen2.5-7B's: 8,192 tokens take long enough to be cut."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    shape = SHAPES["qwen2.5-7b"] | {"num_hidden_layers": 2, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config | shape))
    prompts = [[(11 * i + 5 * j) % 1000 + 2 for j in range(1030 + i)] for i in range(8)]
    options = {"dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": True, "num_gpu_blocks_override": 640}
    options["max_num_batched_tokens"] = 8320
    logprobs = []
    for several in ({}, {"async_tensor_parallel": False}, {"async_tensor_parallel": True}):
        llm = engine(tmp_path, **options, **({"tensor_parallel_size": 2} | several if several else {}))
        runner = llm.engine.core.executor.runner
        if several.get("async_tensor_parallel"):
            assert len(runner._model.tiles(sum(map(len, prompts)))) == 2
        outputs = llm.generate(prompts, greedy(1, logprobs=20))
        logprobs.append([output.outputs[0].logprobs[0] for output in outputs])
        llm.engine.shutdown()
    one, sync, overlapped = logprobs
    for alone, mine, theirs in zip(one, sync, overlapped, strict=True):
        ids = alone.keys() & mine.keys() & theirs.keys()
        assert len(ids) > 10
        for token_id in ids:
            expected = pytest.approx(alone[token_id].logprob, abs=0.1)  # bf16: logits of some 3 have 8 bits
            assert mine[token_id].logprob == expected and theirs[token_id].logprob == expected


def test_a_rank_that_is_killed_ends_the_engine_soon(checkpoint):
    llm = engine(checkpoint, tensor_parallel_size=2)
    (pid,) = llm.engine.core.executor.pids
    stream = llm.generate(PROMPTS, greedy(150), stream=True)
    next(stream)
    os.kill(pid, 9)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1"):
        for _ in stream:
            pass
    assert time.monotonic() - start < 20  # seconds, not the ten minutes after which a collective gives up


@pytest.mark.parametrize("ending", ["llm.engine.shutdown()", "", "del llm", "raise SystemExit(3)"])
def test_the_end_of_a_script_is_a_quiet_one(checkpoint, ending):
    """No library comes back to an interpreter that has ended, whatever is captured and in use at that moment."""
    script = f"""if True:
        from pico_vllm import LLM, SamplingParams
        params = SamplingParams(temperature=0.0, max_tokens=3)
        llm = LLM({str(checkpoint)!r}, tensor_parallel_size=2, num_gpu_blocks_override=64, max_num_seqs=4)
        print(llm.generate([5, 6, 7], params)[0].outputs[0].token_ids, flush=True)
        {ending}
        """
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == (3 if "SystemExit" in ending else 0), result.stderr
    assert result.stdout.startswith("[") and "terminate" not in result.stderr, result.stderr


def test_thirty_starts_and_stops_leave_nothing_behind(tmp_path):
    """Neither processes, nor memory of either GPU: the first two starts leave what a process keeps for ever."""
    tiny_models.save_tiny_model(tiny_models.MODELS[MODELS[0]], tmp_path)
    answers, pids, in_use = set(), [], []
    for cycle in range(NUM_CYCLES):
        options = {"enforce_eager": cycle % 5 > 0, "max_num_batched_tokens": 256, "tensor_parallel_size": 2}
        llm: LLM | None = engine(tmp_path, **options)
        assert llm is not None
        pids += llm.engine.core.executor.pids
        answers.add(tuple(llm.generate(PROMPTS[3], greedy(4))[0].outputs[0].token_ids))
        if cycle % 2:
            llm.engine.shutdown()
        llm = None
        if cycle in (1, NUM_CYCLES - 1):
            in_use.append(settled_memory())
    assert len(answers) == 1 and len(set(pids)) == NUM_CYCLES
    assert [pid for pid in pids if is_running(pid)] == []
    grown = [later - before for before, later in zip(*in_use, strict=True)]
    assert max(grown) < MAX_GROWN_BYTES, grown


def settled_memory():
    """Bytes in use on each GPU, once nothing more is given back: NCCL's end runs beside us."""
    last, deadline = None, time.monotonic() + 30
    while time.monotonic() < deadline:
        gc.collect()
        torch.cuda.empty_cache()
        now = [total - free for free, total in map(torch.cuda.mem_get_info, range(2))]
        if now == last:
            break
        last = now
        time.sleep(1)
    return last


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
