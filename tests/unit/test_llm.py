"""LLM: chat, streaming, several calls at once on one engine; whatever is abandoned is aborted."""

import gc
import json

import pytest
from tokenizers import processors

import tiny_models
from engine_runs import greedy, make_llm
from pico_vllm import LLM, SamplingParams
from pico_vllm.errors import EngineDeadError, RequestError
from pico_vllm.outputs import EngineCoreOutput
from pico_vllm.request import FinishReason
from scripted_core import ScriptedCore

PROMPTS = [[10, 20, 30], [40, 50], [60, 70, 80, 90]]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | length }} tools\n{% endif %}{% if mood is defined %}{{ mood }}\n{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """With a chat template, and a tokenizer that puts <bos> before every text that doesn't come from one."""
    directory = tmp_path_factory.mktemp("llama")
    tiny_models.save_tiny_model(tiny_models.MODELS["llama-gqa3-d64-tied"], directory)
    tokenizer = tiny_models.byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return make_llm(directory)


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    yield
    core = llm.engine.core
    if isinstance(core, ScriptedCore):
        return
    assert not llm.engine.has_unfinished_requests() and llm.engine.num_unfinished_requests == 0
    assert core.kv_cache_manager.num_free_blocks == core.kv_cache_manager.num_blocks
    assert not llm._calls and not llm._abandoned


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


# ------------------------------------------------------------------------------------------------------------ chat
def test_chat_is_generate_on_the_rendered_prompt_without_added_special_tokens(llm):
    (output,) = llm.chat(HELLO, greedy(6))
    rendered = "user: hello\nassistant: "
    ids = llm.engine.tokenizer.encode(rendered, add_special_tokens=False)
    assert output.prompt == rendered
    assert output.prompt_token_ids == ids
    assert llm.engine.tokenizer.encode(rendered) == [0, *ids], "else <bos> is not tested"
    assert tokens([output]) == tokens(llm.generate(ids, greedy(6)))


def test_several_conversations_give_several_outputs_in_their_order(llm):
    conversations = [[{"role": "user", "content": text}] for text in ("a", "bb", "ccc")]
    outputs = llm.chat(conversations, [greedy(2), greedy(3), greedy(4)])
    assert [output.prompt for output in outputs] == [f"user: {t}\nassistant: " for t in ("a", "bb", "ccc")]
    assert [len(ids) for ids in tokens(outputs)] == [2, 3, 4]
    assert tokens(outputs)[1] == tokens(llm.chat(conversations[1], greedy(3)))[0]


def test_options_of_the_template_reach_it(llm):
    def prompt(**options):
        return llm.chat(HELLO, greedy(1), **options)[0].prompt

    assert prompt(add_generation_prompt=False) == "user: hello\n"
    assert prompt(tools=[{"name": "f"}, {"name": "g"}]) == "user: hello\n2 tools\nassistant: "
    assert prompt(chat_template_kwargs={"mood": "calm"}) == "user: hello\ncalm\nassistant: "


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], ["at least one"]),
        ("hello", ["messages must be a list"]),
        (None, ["messages must be a list"]),
        ([*HELLO, {"content": "no role"}], ["message 1", "role"]),
        ([*HELLO, "x"], ["message 1"]),
        (["x"], ["message 0"]),
        ([HELLO, [*HELLO, 3]], ["conversation 1", "message 1"]),
        ([HELLO, []], ["conversation 1", "at least one"]),
        ([HELLO, HELLO[0]], ["conversation 1", "messages must be a list"]),
        ([HELLO, [{"role": "user", "content": "x" * 300}]], ["conversation 1", "max_model_len"]),
    ],
)
def test_wrong_messages_are_named_by_their_index_and_nothing_runs(llm, messages, words):
    with pytest.raises(RequestError) as error:
        llm.chat(messages, greedy(2))
    assert all(word in str(error.value) for word in words), error.value


# ---------------------------------------------------------------------------------------------------------- stream
def test_a_stream_is_the_outputs_as_they_happen(llm):
    params = [greedy(3), greedy(6, logprobs=1), greedy(4, n=2)]
    outputs = llm.generate(PROMPTS, params)
    texts, ids, finals, order = {}, {}, {}, []
    for delta in llm.generate(PROMPTS, params, stream=True):
        key = (int(delta.request_id.rsplit("-", 1)[1]), delta.index)
        order.append(key)
        texts[key] = texts.get(key, "") + delta.new_text
        ids[key] = [*ids.get(key, []), *delta.new_token_ids]
        if delta.final is not None:
            finals[key[0]] = delta.final
    for index, output in enumerate(outputs):
        assert finals[index].outputs == output.outputs
        for completion in output.outputs:
            assert texts[index, completion.index] == completion.text
            assert ids[index, completion.index] == completion.token_ids
    assert order[:4] == [(0, 0), (1, 0), (2, 0), (2, 1)], "a step at a time, not a prompt at a time"


def test_chat_streams_too(llm):
    (output,) = llm.chat(HELLO, greedy(6))
    assert "".join(delta.new_text for delta in llm.chat(HELLO, greedy(6), stream=True)) == output.outputs[0].text


def test_a_wrong_prompt_is_told_when_the_stream_is_made(llm):
    with pytest.raises(RequestError, match=r"prompt 1: .*999"):
        llm.generate([PROMPTS[0], [999]], greedy(4), stream=True)


def test_a_stream_of_nothing_is_empty(llm):
    assert list(llm.generate([], stream=True)) == []


@pytest.mark.parametrize("num_taken", [0, 1, 5])
@pytest.mark.parametrize("way", ["drop", "close", "with"])
def test_an_abandoned_stream_aborts_the_rest(llm, num_taken, way):
    aborted = []
    stream = llm.generate(PROMPTS, greedy(200, n=2), stream=True)
    if way == "with":
        with stream:
            aborted = [next(stream) for _ in range(num_taken)]
    else:
        aborted = [next(stream) for _ in range(num_taken)]
        if way == "close":
            stream.close()
            stream.close()
        else:
            del stream
    assert all(delta.final is None for delta in aborted)
    assert llm.engine.num_unfinished_requests == 0
    if way != "drop":
        assert list(stream) == []


def test_breaking_out_of_a_loop_aborts_the_rest(llm):
    before = llm.engine.stats.num_output_tokens
    for _ in llm.generate(PROMPTS, greedy(200), stream=True):
        break
    assert llm.engine.num_unfinished_requests == 0
    assert llm.engine.stats.num_output_tokens - before == 3


def test_a_stream_collected_in_the_middle_of_a_step_is_aborted_after_it(llm, monkeypatch):
    """The garbage collector may run anywhere, also inside the scheduler."""
    garbage = [llm.generate(PROMPTS[0], greedy(200), stream=True)]
    garbage.append(garbage)
    step, states = llm.engine.step, []

    def collecting_step():
        states.append(llm.engine.num_unfinished_requests)
        gc.collect()
        states.append(llm.engine.num_unfinished_requests)
        return step()

    monkeypatch.setattr(llm.engine, "step", collecting_step)
    del garbage
    (output,) = llm.generate(PROMPTS[1], greedy(3))
    assert len(output.outputs[0].token_ids) == 3
    assert states[:4] == [2, 2, 1, 1]


def test_calls_may_be_interleaved(llm):
    alone = tokens(llm.generate(PROMPTS, greedy(12)))
    first = llm.generate(PROMPTS[0], greedy(12), stream=True)
    taken = [next(first), next(first)]
    second = llm.generate(PROMPTS[1], greedy(12), stream=True)
    assert [next(second) for _ in range(3)]
    assert tokens(llm.generate(PROMPTS[2], greedy(12))) == [alone[2]]
    taken += list(first)
    assert [token_id for delta in taken for token_id in delta.new_token_ids] == alone[0]
    assert sum(delta.final is not None for delta in second) == 1


def test_a_request_aborted_through_the_engine_ends_its_call(llm):
    stream = llm.generate(PROMPTS[:2], greedy(50), stream=True)
    for index in range(2):
        llm.engine.abort(f"{next(stream).request_id.rsplit('-', 1)[0]}-{index}")
    assert len(list(stream)) <= 2


def test_an_interrupted_step_ends_every_call(llm, monkeypatch):
    """Its tokens are lost: a stream that went on would have a hole."""
    stream = llm.generate(PROMPTS[0], greedy(50), stream=True)
    next(stream)
    with monkeypatch.context() as patch:
        step = llm.engine.step

        def interrupted():
            step()
            raise KeyboardInterrupt

        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[1], greedy(3))
    assert llm.engine.num_unfinished_requests == 0
    assert list(stream) == []


def test_a_dead_engine_ends_the_call_with_its_error(llm, monkeypatch):
    core = ScriptedCore([[EngineCoreOutput("x", ())], EngineDeadError("the core has died")])
    monkeypatch.setattr(llm.engine, "core", core)
    with pytest.raises(EngineDeadError, match="died"):
        llm.generate(PROMPTS, greedy(4))
    assert llm.engine.num_unfinished_requests == 0


# ------------------------------------------------------------------------------------------------------ parameters
def test_one_wrong_parameter_object_is_refused(llm):
    with pytest.raises(RequestError, match="dict"):
        llm.generate(PROMPTS, {"max_tokens": 3})
    with pytest.raises(RequestError, match=r"prompt 1: .*int"):
        llm.generate(PROMPTS, [greedy(1), 3, greedy(1)])
    with pytest.raises(RequestError, match="1 sampling_params for 2 conversations"):
        llm.chat([HELLO, HELLO], [greedy(1)])


def test_samples_of_a_seeded_prompt_differ_and_repeat(llm):
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    first, again = (tuple(tuple(c.token_ids) for c in llm.generate(PROMPTS[0], params)[0].outputs) for _ in range(2))
    assert len(set(first)) == 4
    assert again == first
    (alone,) = llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True))
    assert tuple(alone.outputs[0].token_ids) == first[0], "the first sample is what n=1 gives"


def test_an_output_that_ends_in_an_error_is_an_output(llm, monkeypatch):
    core = ScriptedCore()
    monkeypatch.setattr(llm.engine, "core", core)
    request_id = f"{next(llm._call_numbers) + 1}-0"
    core.steps.append([EngineCoreOutput(request_id, (), FinishReason.ERROR)])
    (output,) = llm.generate(PROMPTS[0], greedy(4))
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("error", [])


def test_options_are_those_of_the_engine(llm):
    with pytest.raises(Exception, match="blok_size"):
        LLM(llm.engine.config.model, blok_size=1)
