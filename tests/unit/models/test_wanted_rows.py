"""The last layer attends from the wanted rows alone where they are few: the same logits, from fewer queries."""

import pytest

import tiny_models
from engine_runs import greedy, make_llm
from pico_vllm.kernels.backend import recording
from pico_vllm.models import qwen2

PROMPTS = [list(range(3, 43)), [(5 * i) % 290 for i in range(33)], [7, 8, 9], [11]]
NEVER = 10**9


@pytest.fixture(scope="module", params=["qwen2-gqa3-d128-untied", "qwen3-gqa2-d128-untied", "llama-gqa3-d64-tied"])
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    tiny_models.save_tiny_model(tiny_models.MODELS[request.param], directory)
    return directory


def run(checkpoint, monkeypatch, few_wanted, **options):
    """(ids and log-probabilities of each request, query rows of each call of attention)."""
    monkeypatch.setattr(qwen2, "FEW_WANTED", few_wanted)
    llm = make_llm(checkpoint, **options)
    runner = llm.engine.core.executor.runner
    num_rows = []
    tap = {"paged_attention": lambda args: num_rows.append(len(args[0]))}
    runner.set_backend(recording(runner.backend, lambda op, args, _: tap.get(op, lambda args: None)(args)))
    outputs = llm.generate(PROMPTS, greedy(4, logprobs=2), use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs], num_rows


@pytest.mark.parametrize("few_wanted", [1, 16])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 20}, {"enable_prefix_caching": True}])
def test_logits_are_those_of_attention_from_every_token(checkpoint, monkeypatch, few_wanted, options):
    expected, every = run(checkpoint, monkeypatch, NEVER, **options)
    found, fewer = run(checkpoint, monkeypatch, few_wanted, **options)
    assert len(fewer) == len(every) and sum(fewer) < sum(every)
    for (ids, logprobs), (other_ids, other_logprobs) in zip(found, expected, strict=True):
        assert ids == other_ids
        for token, other in zip(logprobs, other_logprobs, strict=True):
            for token_id, entry in token.items():
                assert entry.logprob == pytest.approx(other[token_id].logprob, abs=1e-4)


def test_the_first_step_of_four_prompts_asks_for_four_rows_in_its_last_layer(checkpoint, monkeypatch):
    _, num_rows = run(checkpoint, monkeypatch, 16)
    num_tokens = sum(map(len, PROMPTS))  # 77: a sixteenth is 4
    assert num_rows[: num_rows.index(4) + 1] == [num_tokens] * num_rows.index(4) + [4]
