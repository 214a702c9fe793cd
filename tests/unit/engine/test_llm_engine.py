"""The engine as a client sees it: wrong input is one error and nothing else, ends are clean, nothing is left behind."""

import gc
import math

import pytest

import tiny_models
from engine_runs import greedy, make_llm
from pico_vllm import LLM, SamplingParams
from pico_vllm.errors import ConfigError, EngineDeadError, PicoVLLMError, RequestError
from pico_vllm.outputs import EngineCoreOutput
from scripted_core import ScriptedCore

PROMPT = [10, 20, 30, 40, 50]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    tiny_models.save_tiny_model(tiny_models.MODELS["llama-gqa3-d64-tied"], directory)
    return directory


@pytest.fixture(scope="module")
def llm(checkpoint):
    return make_llm(checkpoint, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def answer(llm):
    """What a plain request gets from an engine that has seen nothing else."""
    return llm.generate(PROMPT, greedy(8))[0].outputs[0].token_ids


def assert_idle(engine):
    """No request, block or row is held by anything, but for rows that the next step drops."""
    core = engine.core
    core.kv_cache_manager.check_invariants()
    assert not engine.has_unfinished_requests()
    assert engine.num_unfinished_requests == 0
    assert core.kv_cache_manager.num_free_blocks == core.kv_cache_manager.num_blocks
    assert core.scheduler.num_running == core.scheduler.num_waiting == 0


# ------------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", ["empty"]),
        ([], ["empty"]),
        ([5, -1], ["-1", "299"]),
        ([5, 300], ["300", "299"]),
        ([2**31], ["2147483648", "299"]),
        ([5, 1.0], ["float"]),
        ([5, True], ["bool"]),
        ([5, None], ["NoneType"]),
        ([5, "x"], ["str"]),
        ({"prompt_token_ids": []}, ["empty"]),
        ({"text": "x"}, ["text", "prompt_token_ids"]),
        (b"bytes", ["bytes"]),
        (3, ["int"]),
        ([7] * 256, ["256", "255"]),
        ([7] * 1000, ["1000", "255"]),
    ],
)
def test_a_wrong_prompt_is_refused_with_the_value_and_the_limit(llm, answer, prompt, words):
    with pytest.raises(RequestError) as error:
        llm.engine.add_request("bad", prompt, greedy(4))
    assert all(word in str(error.value) for word in words), error.value
    assert_idle(llm.engine)
    assert llm.generate(PROMPT, greedy(8))[0].outputs[0].token_ids == answer


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"temperature": math.nan},
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -2},
        {"seed": -1},
        {"n": 0},
        {"logprobs": -1},
        {"stop": ""},
    ],
)
def test_wrong_sampling_parameters_are_refused_by_name(llm, answer, wrong):
    (name,) = wrong
    with pytest.raises(RequestError, match=name):
        SamplingParams(**wrong)
    assert llm.generate(PROMPT, greedy(8))[0].outputs[0].token_ids == answer


def test_params_of_another_type_are_refused(llm):
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.engine.add_request("bad", PROMPT, {"max_tokens": 3})


def test_one_wrong_prompt_in_a_batch_is_named_and_nothing_runs(llm, answer):
    with pytest.raises(RequestError, match=r"prompt 1: .*999"):
        llm.generate([PROMPT, [999], PROMPT], greedy(4))
    assert_idle(llm.engine)
    assert llm.generate(PROMPT, greedy(8))[0].outputs[0].token_ids == answer


def test_a_live_request_id_cannot_be_used_twice(llm):
    llm.engine.add_request("same", PROMPT, greedy(2))
    with pytest.raises(RequestError, match="same"):
        llm.engine.add_request("same", PROMPT, greedy(2))
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    llm.engine.add_request("same", PROMPT, greedy(2))
    llm.engine.abort("same")
    assert_idle(llm.engine)


def test_what_can_never_fit_the_pool_is_refused_with_both_numbers(checkpoint):
    llm = make_llm(checkpoint, num_gpu_blocks_override=3)  # 48 tokens
    with pytest.raises(RequestError, match=r"48"):
        llm.generate([[7] * 49], greedy(1))
    with pytest.raises(RequestError) as error:
        llm.generate([[7] * 40], greedy(10))  # 49 positions of KV: the last token's is never stored
    assert "needs 4 KV cache blocks" in str(error.value)
    assert "the whole cache has 3" in str(error.value)
    (output,) = llm.generate([[7] * 40], greedy(9))
    assert len(output.outputs[0].token_ids) == 9
    assert_idle(llm.engine)


def test_max_tokens_none_means_as_many_as_fit(checkpoint):
    by_length = make_llm(checkpoint, max_model_len=32)
    (output,) = by_length.generate([PROMPT], greedy(None))
    assert len(output.outputs[0].token_ids) == 32 - len(PROMPT)
    assert output.outputs[0].finish_reason == "length"
    by_pool = make_llm(checkpoint, num_gpu_blocks_override=2)  # 32 positions, and one token more without KV
    (output,) = by_pool.generate([PROMPT], greedy(None))
    assert len(output.outputs[0].token_ids) == 33 - len(PROMPT)
    assert_idle(by_pool.engine)


def test_generation_ends_at_max_model_len(checkpoint):
    (output,) = make_llm(checkpoint, max_model_len=20).generate([PROMPT], greedy(100))
    assert len(output.outputs[0].token_ids) == 15
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"blok_size": 16}, ["block_size"]),
        ({"max_model_len": 512}, ["512", "256"]),
        ({"device": "cuda:77"}, ["cuda:77"]),
        ({"tensor_parallel_size": 5}, ["tensor_parallel_size=5", "sizes that do: "]),
        ({"enable_prefix_caching": 1}, ["enable_prefix_caching"]),
        ({"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 10}, ["kv_cache_memory_bytes"]),
    ],
)
def test_a_wrong_engine_option_is_refused(checkpoint, options, words):
    with pytest.raises(ConfigError) as error:
        make_llm(checkpoint, **options)
    assert all(word in str(error.value) for word in words), error.value


# ---------------------------------------------------------------------------------------------------------- stops
def test_a_stop_token_ends_the_request_and_is_kept(llm, answer):
    third = answer[2]
    first = answer.index(third)
    (output,) = llm.generate([PROMPT], greedy(8, stop_token_ids=(third,)))
    assert output.outputs[0].token_ids == answer[: first + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == third


def test_eos_ends_the_request_unless_ignored(checkpoint, answer):
    (checkpoint / "generation_config.json").write_text(f'{{"eos_token_id": [1, {answer[3]}]}}')
    try:
        llm = make_llm(checkpoint)
    finally:
        (checkpoint / "generation_config.json").unlink()
    end = answer.index(answer[3]) + 1
    (output,) = llm.generate([PROMPT], greedy(8, ignore_eos=False))
    assert output.outputs[0].token_ids == answer[:end]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    assert llm.generate([PROMPT], greedy(8))[0].outputs[0].token_ids == answer


def test_default_parameters_come_from_generation_config(checkpoint, llm):
    assert llm.engine.default_sampling_params().temperature == 0.0
    (checkpoint / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.9}')
    try:
        sampling = make_llm(checkpoint).engine.default_sampling_params(max_tokens=3)
    finally:
        (checkpoint / "generation_config.json").unlink()
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.6, 0.9, 3)


# --------------------------------------------------------------------------------------------------------- aborts
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_abort_in_any_state_frees_everything_and_disturbs_no_one(llm, answer, num_steps):
    """0: waiting; 1 and 2: in the middle of a prompt of three chunks; 4: decoding."""
    engine = llm.engine
    engine.add_request("victim", [9] * 150, greedy(50))
    engine.add_request("other", PROMPT, greedy(8))
    tokens = []
    for _ in range(num_steps):
        tokens += [t for d in engine.step() if d.request_id == "other" for t in d.new_token_ids]
    (last,) = engine.abort("victim")
    assert last.final.outputs[0].finish_reason == "abort"
    assert engine.abort("victim") == []
    while engine.has_unfinished_requests():
        tokens += [t for d in engine.step() if d.request_id == "other" for t in d.new_token_ids]
    assert tokens == answer
    assert_idle(engine)


def test_abort_of_an_unknown_request_does_nothing(llm):
    assert llm.engine.abort("nobody") == []
    assert_idle(llm.engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_abort_of_n_samples_in_any_state_ends_all_of_them(llm, answer, num_steps):
    engine = llm.engine
    engine.add_request("victim", [9] * 150, greedy(50, n=3))
    engine.add_request("other", PROMPT, greedy(8))
    assert engine.num_unfinished_requests == 2
    tokens = []
    for _ in range(num_steps):
        tokens += [t for d in engine.step() if d.request_id == "other" for t in d.new_token_ids]
    deltas = engine.abort("victim")
    assert [delta.index for delta in deltas] == [0, 1, 2]
    assert [delta.final is None for delta in deltas] == [True, True, False]
    assert [c.finish_reason for c in deltas[-1].final.outputs] == ["abort"] * 3
    assert engine.abort("victim") == []
    while engine.has_unfinished_requests():
        deltas = engine.step()
        assert {delta.request_id for delta in deltas} <= {"other"}
        tokens += [t for d in deltas for t in d.new_token_ids]
    assert tokens == answer
    assert_idle(engine)


def test_abort_of_one_that_has_just_ended_does_nothing(llm):
    llm.engine.add_request("r", PROMPT, greedy(1))
    (delta,) = llm.engine.step()
    assert delta.final is not None
    assert llm.engine.abort("r") == []
    assert_idle(llm.engine)


def test_an_error_in_the_middle_leaves_no_request_behind(llm, answer, monkeypatch):
    """Ctrl-C in generate: every request of the call is aborted, and the engine goes on."""
    steps = iter(range(3))

    def interrupted_step(original=llm.engine.step):
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return original()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted_step)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT] * 4, greedy(50))
    assert_idle(llm.engine)
    assert llm.generate(PROMPT, greedy(8))[0].outputs[0].token_ids == answer


# ------------------------------------------------------------------------------------------------------ n samples
def test_n_samples_are_requests_of_the_core_with_one_seed(llm, monkeypatch):
    core = ScriptedCore()
    monkeypatch.setattr(llm.engine, "core", core)
    llm.engine.add_request("r", PROMPT, greedy(4, n=3, seed=5, prompt_logprobs=0))
    llm.engine.add_request("other", PROMPT, SamplingParams(max_tokens=4))
    assert [request.request_id for request in core.added] == ["r#0", "r#1", "r#2", "other"]
    assert [request.sample_index for request in core.added] == [0, 1, 2, 0]
    assert [request.seed for request in core.added[:3]] == [5, 5, 5]
    assert [request.params.prompt_logprobs for request in core.added[:3]] == [0, None, None], "the prompt is the same"
    llm.engine.add_request("unseeded", PROMPT, SamplingParams(max_tokens=4, n=2))
    assert core.added[-1].seed == core.added[-2].seed != core.added[-3].seed
    assert core.added[-2].request_id == "unseeded#0"
    for request_id in ("r", "other", "unseeded"):
        llm.engine.abort(request_id)
    assert core.aborted == ["r#0", "r#1", "r#2", "other", "unseeded#0", "unseeded#1"]


def test_ids_of_samples_are_ids_in_use(llm):
    engine = llm.engine
    engine.add_request("a", PROMPT, greedy(2, n=2))
    for taken in ("a", "a#0", "a#1"):
        with pytest.raises(RequestError, match=taken):
            engine.add_request(taken, PROMPT, greedy(2))
    engine.add_request("b#1", PROMPT, greedy(2))
    with pytest.raises(RequestError, match="b#1"):
        engine.add_request("b", PROMPT, greedy(2, n=2))
    engine.add_request("b", PROMPT, greedy(2))
    for request_id in ("a", "b", "b#1"):
        assert engine.abort(request_id)
    assert_idle(engine)


def test_when_the_core_refuses_a_sample_the_others_are_taken_back(llm, monkeypatch):
    core = ScriptedCore()
    add = core.add_request

    def refuse_the_third(request):
        if request.sample_index == 2:
            raise RequestError("no")
        add(request)

    monkeypatch.setattr(core, "add_request", refuse_the_third)
    monkeypatch.setattr(llm.engine, "core", core)
    with pytest.raises(RequestError, match="no"):
        llm.engine.add_request("r", PROMPT, greedy(4, n=3))
    assert core.aborted == ["r#0", "r#1"]
    assert llm.engine.num_unfinished_requests == 0


def test_greedy_samples_are_equal_and_equal_to_the_answer(llm, answer):
    (output,) = llm.generate(PROMPT, greedy(8, n=3))
    assert [completion.token_ids for completion in output.outputs] == [answer] * 3
    assert_idle(llm.engine)


# -------------------------------------------------------------------------------------------------- stop strings
def test_a_stop_string_is_one_abort_in_the_core(llm, monkeypatch):
    ids = [llm.engine.tokenizer.encode(character)[0] for character in "abcd"]
    core = ScriptedCore([[EngineCoreOutput("r", (token_id,))] for token_id in ids])
    monkeypatch.setattr(llm.engine, "core", core)
    llm.engine.add_request("r", PROMPT, greedy(8, stop="bc"))
    deltas = [delta for _ in range(4) for delta in llm.engine.step()]
    assert [delta.new_text for delta in deltas] == ["a", "", ""]
    assert deltas[-1].final.outputs[0].stop_reason == "bc"
    assert core.aborted == ["r"]
    assert llm.engine.abort("r") == [] and core.aborted == ["r"]


def test_a_stop_string_frees_the_blocks_at_once(llm):
    engine = llm.engine
    plain = llm.generate("some text", greedy(40))[0].outputs[0]
    character = next(c for c in plain.text[3:] if c != "\ufffd")
    end = plain.text.index(character)
    engine.add_request("r", "some text", greedy(200, stop=character))
    final = None
    while final is None:
        for delta in engine.step():
            final = delta.final
    assert final.outputs[0].text == plain.text[:end]
    assert final.outputs[0].token_ids == plain.token_ids[: len(final.outputs[0].token_ids)]
    assert_idle(engine)


class Boom(Exception):
    pass


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["build", "model", "sample", "record"])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_an_error_inside_a_step_costs_no_request(checkpoint, answer, monkeypatch, error, where, step):
    """It is raised once in the middle of the device's part; whoever goes on gets the same tokens as ever."""
    llm = make_llm(checkpoint, max_num_batched_tokens=4)
    runner = llm.engine.core.executor.runner
    target, name = {
        "build": (runner._rows, "build"),
        "model": (runner._model, "hidden_rows"),
        "sample": (runner, "_sampler"),
        "record": (runner._rows, "record_sampled"),
    }[where]
    original, calls = getattr(target, name), iter(range(100))

    def fails_once(*args):
        result = original(*args)  # what it does has been done: half a step
        if next(calls) == step:
            raise error("once")
        return result

    monkeypatch.setattr(target, name, fails_once)
    llm.engine.add_request("a", PROMPT, greedy(8))
    llm.engine.add_request("b", [9] * 11, greedy(3))
    tokens = {"a": [], "b": []}
    num_errors = 0
    while llm.engine.has_unfinished_requests():
        try:
            for delta in llm.engine.step():
                tokens[delta.request_id] += delta.new_token_ids
        except error:
            num_errors += 1
    assert num_errors == 1
    assert tokens["a"] == answer
    assert len(tokens["b"]) == 3
    assert_idle(llm.engine)
    assert llm.generate(PROMPT, greedy(8))[0].outputs[0].token_ids == answer


def test_ctrl_c_inside_a_step_of_generate_leaves_nothing_behind(checkpoint, answer, monkeypatch):
    llm = make_llm(checkpoint)
    runner = llm.engine.core.executor.runner
    original, calls = runner._model.hidden_rows, iter(range(100))

    def interrupted(*args):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(runner._model, "hidden_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 4, greedy(50))
    assert_idle(llm.engine)
    assert llm.generate(PROMPT, greedy(8))[0].outputs[0].token_ids == answer


def test_ctrl_c_while_prompts_are_added_leaves_nothing_behind(llm, answer, monkeypatch):
    original, calls = llm.engine.add_request, iter(range(100))

    def interrupted(*args):
        original(*args)
        if next(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "add_request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT] * 4, greedy(50))
    assert_idle(llm.engine)
    assert llm.generate(PROMPT, greedy(8))[0].outputs[0].token_ids == answer


def test_an_error_inside_the_books_ends_the_engine_with_its_cause(checkpoint, monkeypatch):
    llm = make_llm(checkpoint)
    llm.engine.add_request("a", PROMPT, greedy(8))
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.core.scheduler, "update_from_output", lambda *args: 1 / 0)
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            llm.engine.step()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="ZeroDivisionError") as error:
            llm.engine.step()
        assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_a_refused_request_does_not_change_the_seed_of_the_next_one(checkpoint):
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    plain = make_llm(checkpoint).generate(PROMPT, params)[0].outputs[0].token_ids
    llm = make_llm(checkpoint, num_gpu_blocks_override=3)
    with pytest.raises(RequestError):
        llm.generate([7] * 40, greedy(100))
    assert llm.generate(PROMPT, params)[0].outputs[0].token_ids == plain


@pytest.mark.parametrize("params", [5, iter([SamplingParams()])])
def test_sampling_params_of_another_type_are_refused_in_generate(llm, params):
    with pytest.raises(RequestError, match="SamplingParams or a list"):
        llm.generate([PROMPT], params)


# -------------------------------------------------------------------------------------------------------- outputs
def test_deltas_join_to_the_final_output(llm):
    llm.engine.add_request("r", "some text", greedy(20))
    text, token_ids, final = "", [], None
    while llm.engine.has_unfinished_requests():
        for delta in llm.engine.step():
            text += delta.new_text
            token_ids += delta.new_token_ids
            final = delta.final or final
    assert final.outputs[0].text == text
    assert final.outputs[0].token_ids == token_ids
    assert final.prompt == "some text"
    assert final.metrics.arrival_s <= final.metrics.first_token_s <= final.metrics.last_token_s


def test_prompts_in_every_form_give_the_same_tokens(llm):
    text = "some text"
    ids = llm.engine.tokenizer.encode(text)
    forms = [text, ids, tuple(ids), {"prompt": text}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, greedy(6))
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    (single,) = llm.generate(ids, greedy(6))
    assert single.outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_outputs_come_in_the_order_of_the_prompts_each_with_its_own_parameters(llm):
    prompts = [[10 + i] * (i + 1) for i in range(6)]
    params = [greedy(6 - i) for i in range(6)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 5, 4, 3, 2, 1]
    with pytest.raises(RequestError, match="2 sampling_params for 6 prompts"):
        llm.generate(prompts, params[:2])


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == []


def test_an_engine_without_a_tokenizer_takes_ids_and_gives_ids(checkpoint, answer):
    llm = make_llm(checkpoint, skip_tokenizer_init=True)
    (output,) = llm.generate([PROMPT], greedy(8))
    assert output.outputs[0].token_ids == answer
    assert output.outputs[0].text == ""
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        llm.generate("text", greedy(8))


def test_unseeded_requests_differ_and_repeat_with_the_engine_seed(checkpoint):
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)

    def sample(seed):
        outputs = make_llm(checkpoint, seed=seed).generate([PROMPT] * 3, params)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    first = sample(0)
    assert len(set(first)) == 3
    assert sample(0) == first
    assert sample(1) != first


def test_dummy_weights_need_only_a_config(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    options = {"load_format": "dummy", "skip_tokenizer_init": True}
    first = make_llm(tmp_path, **options).generate([PROMPT], greedy(8))[0].outputs[0].token_ids
    assert make_llm(tmp_path, **options).generate([PROMPT], greedy(8))[0].outputs[0].token_ids == first
    assert make_llm(tmp_path, **options, seed=1).generate([PROMPT], greedy(8))[0].outputs[0].token_ids != first
    with pytest.raises(PicoVLLMError, match="safetensors"):
        make_llm(tmp_path, skip_tokenizer_init=True)


# -------------------------------------------------------------------------------------------------------- leaks
def test_three_thousand_requests_leave_nothing_behind(checkpoint):
    """Objects are counted after 500 and after 3,000 requests: not one more may be alive, of any of our types."""
    llm = make_llm(checkpoint, max_num_seqs=64, num_gpu_blocks_override=128)

    def run(count):
        for start in range(0, count, 100):
            llm.generate([[2 + (start + i) % 290] for i in range(100)], greedy(2))

    def live_objects():
        gc.collect()
        return len(gc.get_objects())

    run(500)
    before = live_objects()
    run(2500)
    assert live_objects() - before < 100
    assert_idle(llm.engine)
    assert llm.engine.stats.num_output_tokens == 6000


def test_two_engines_do_not_share_anything(checkpoint, answer):
    first, second = make_llm(checkpoint), LLM(str(checkpoint), device="cpu", dtype="float32")
    first.engine.add_request("a", PROMPT, greedy(8))
    second.engine.add_request("a", PROMPT, greedy(8))
    tokens = {1: [], 2: []}
    while first.engine.has_unfinished_requests() or second.engine.has_unfinished_requests():
        for key, llm in ((1, first), (2, second)):
            for delta in llm.engine.step():
                tokens[key] += delta.new_token_ids
    assert tokens == {1: answer, 2: answer}
