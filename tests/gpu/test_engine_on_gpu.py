"""The whole engine on one GPU against transformers on the same GPU."""

import pytest
import torch

import tiny_models
from engine_runs import greedy, make_llm
from pico_vllm.oracle.verify import verify

pytestmark = pytest.mark.usefixtures("exact_fp32_products")


@pytest.fixture(scope="module", params=tiny_models.MODELS)
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    tiny_models.save_tiny_model(tiny_models.MODELS[request.param], directory)
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_sub_layer_equals_transformers_on_the_gpu(checkpoint, dtype):
    llm = make_llm(checkpoint, device="cuda", dtype=dtype, max_num_batched_tokens=32)
    result = verify(llm.engine, prompt_lengths=(1, 15, 17, 40), num_new_tokens=6)
    assert result.settings["device"] == "cuda:0"
    assert result.passes, [(e.point.key, e.rms, e.bound) for e in result.errors if not e.passes]


def test_greedy_tokens_are_those_of_the_cpu(checkpoint):
    prompts = [[7, 8, 9], [10] * 20, list(range(2, 60))]
    on_gpu = make_llm(checkpoint, device="cuda").generate(prompts, greedy(8))
    on_cpu = make_llm(checkpoint).generate(prompts, greedy(8))
    ids = [[output.outputs[0].token_ids for output in outputs] for outputs in (on_gpu, on_cpu)]
    assert ids[0] == ids[1]


def test_the_pool_takes_its_share_of_the_card_and_gives_it_back(checkpoint):
    torch.cuda.empty_cache()
    free_before = torch.cuda.mem_get_info()[0]
    llm = make_llm(checkpoint, device="cuda", num_gpu_blocks_override=None, gpu_memory_utilization=0.5)
    core = llm.engine.core
    assert core.kv_cache_manager.num_blocks == 16 * 256 // 16  # all sequences at full length: more is never allocated
    llm.generate([[5, 6, 7]], greedy(4))
    del llm, core
    import gc

    gc.collect()
    torch.cuda.empty_cache()
    assert free_before - torch.cuda.mem_get_info()[0] < 64 << 20


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_memory_is_put_aside_for_all_that_was_measured(checkpoint, enforce_eager):
    options = {"num_gpu_blocks_override": None, "gpu_memory_utilization": 0.5, "enforce_eager": enforce_eager}
    runner = make_llm(checkpoint, device="cuda", **options).engine.core.executor.runner
    memory = runner.memory
    assert memory is not None and min(memory.weights, memory.activations, memory.tables, memory.kv_cache) > 0
    assert (memory.graphs > 0) != enforce_eager
    assert runner.max_num_batched_tokens == 16 * 256  # of 16384: as many as 16 sequences of 256 tokens can have


@pytest.mark.parametrize("target_itl_ms", [None, 0, 1e-6, 1000])
def test_tokens_do_not_depend_on_the_target(checkpoint, target_itl_ms):
    prompts = [[7 + i] * (5 + 40 * i) for i in range(6)]
    llm = make_llm(checkpoint, device="cuda", target_itl_ms=target_itl_ms, max_num_seqs=3)
    measured = llm.engine.core.executor.measured_steps
    assert (measured is None) == (target_itl_ms == 0)
    ids = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy(20))]
    on_cpu = make_llm(checkpoint, max_num_seqs=3).generate(prompts, greedy(20))
    assert ids == [output.outputs[0].token_ids for output in on_cpu]
    if measured is not None:
        assert [size for size, _ in measured.decode_s] == [1, 3]
        assert all(0 < seconds < 1 for _, seconds in (*measured.decode_s, (1, measured.prompt_s)))
