"""What clients get from the core's ids: text, log-probabilities, n samples in one output; nothing stays behind."""

import pytest

from pico_vllm import SamplingParams
from pico_vllm.engine.output_processor import OutputProcessor
from pico_vllm.outputs import EngineCoreOutput, Logprob, TokenLogprobs
from pico_vllm.request import FinishReason, Request
from tiny_tokenizers import byte_level_tokenizer

EMOJI = "😀".encode()
TOKENIZER = byte_level_tokenizer([b"hello", b" world", b"</s>"], ["<eos>"])
HELLO, WORLD, CLOSE, EOS = 256, 257, 258, 259
PROMPT = [1, 2, 3]
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


def processor_with(params, *, request_id="r", tokenizer=TOKENIZER, eos=(EOS,)):
    processor = OutputProcessor(tokenizer)
    add(processor, request_id, params, eos=eos)
    return processor


def add(processor, request_id, params, *, eos=(EOS,)):
    ids = [request_id] if params.n == 1 else [f"{request_id}#{k}" for k in range(params.n)]
    requests = [Request(i, PROMPT, params, sample_index=k, eos_token_ids=eos) for k, i in enumerate(ids)]
    processor.add(request_id, requests, "prompt")


def one(processor, *args, **kwargs):
    """The delta of a step with one output."""
    (delta,), stopped = processor.process([EngineCoreOutput(*args, **kwargs)])
    assert stopped == []
    return delta


# --------------------------------------------------------------------------------------------------- stop tokens
@pytest.mark.parametrize(
    ("include", "skip_special", "text"),
    [(False, True, "hello"), (False, False, "hello"), (True, True, "hello"), (True, False, "hello<eos>")],
)
def test_the_text_of_eos_is_seen_only_if_both_switches_ask_for_it(include, skip_special, text):
    params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skip_special)
    processor = processor_with(params)
    assert one(processor, "r", (HELLO,)).new_text == "hello"
    delta = one(processor, "r", (EOS,), STOP)
    completion = delta.final.outputs[0]
    assert "hello" + delta.new_text == completion.text == text
    assert completion.token_ids == [HELLO, EOS]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert delta.new_token_ids == (EOS,)


@pytest.mark.parametrize(("include", "text"), [(False, "hello"), (True, "hello</s>")])
def test_the_text_of_a_stop_token_is_left_out_unless_asked_for(include, text):
    params = SamplingParams(stop_token_ids=(CLOSE,), include_stop_str_in_output=include)
    delta = one(processor_with(params), "r", (HELLO, CLOSE), STOP, CLOSE)
    assert delta.new_text == delta.final.outputs[0].text == text
    assert delta.final.outputs[0].stop_reason == CLOSE
    assert delta.final.outputs[0].token_ids == [HELLO, CLOSE]


def test_the_last_token_of_an_answer_that_a_grammar_ended_is_text():
    """The core says "stop" there too, but the token is none of the stop tokens."""
    delta = one(processor_with(SamplingParams()), "r", (HELLO,), STOP)
    assert delta.final.outputs[0].text == "hello"


def test_a_stop_token_that_ends_nothing_is_text():
    """Within min_tokens, or as the last of max_tokens under ignore_eos."""
    params = SamplingParams(min_tokens=3, stop_token_ids=(CLOSE,))
    processor = processor_with(params)
    assert one(processor, "r", (CLOSE,)).new_text == "</s>"
    assert one(processor, "r", (CLOSE,), LENGTH).final.outputs[0].text == "</s></s>"


# -------------------------------------------------------------------------------------------------- stop strings
def test_a_stop_string_aborts_once_and_what_comes_later_is_discarded():
    processor = processor_with(SamplingParams(stop="lo w"))
    assert one(processor, "r", (HELLO,)).new_text == "hel"
    outputs = [EngineCoreOutput("r", (WORLD,)), EngineCoreOutput("r", (HELLO,)), EngineCoreOutput("r", (EOS,), STOP)]
    (delta,), stopped = processor.process(outputs)
    assert stopped == ["r"]
    completion = delta.final.outputs[0]
    assert (delta.new_text, completion.text) == ("", "hel")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "lo w")
    assert completion.token_ids == [HELLO, WORLD]
    assert processor.process([EngineCoreOutput("r", (HELLO,))]) == ([], [])
    assert processor.num_requests == 0


def test_tokens_and_logprobs_after_the_one_that_completes_a_stop_string_are_dropped():
    processor = processor_with(SamplingParams(stop="x", logprobs=0))
    logprobs = tuple(TokenLogprobs((token_id,), (-float(n),), 1) for n, token_id in enumerate(b"axb"))
    (delta,), stopped = processor.process([EngineCoreOutput("r", tuple(b"axb"), None, None, logprobs)])
    completion = delta.final.outputs[0]
    assert stopped == ["r"]
    assert completion.token_ids == list(delta.new_token_ids) == list(b"ax")
    assert [list(entry) for entry in completion.logprobs] == [[ord("a")], [ord("x")]]
    assert completion.logprobs == delta.new_logprobs
    assert completion.cumulative_logprob == -1.0
    assert completion.text == "a"


def test_a_stop_string_in_the_last_token_wins_over_length_and_needs_no_abort():
    delta = one(processor_with(SamplingParams(stop="llo")), "r", (HELLO,), LENGTH)
    completion = delta.final.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("he", "stop", "llo")


def test_what_was_held_back_comes_when_the_request_ends_otherwise():
    for reason in (STOP, LENGTH):
        processor = processor_with(SamplingParams(stop="hello!"))
        assert one(processor, "r", (HELLO,)).new_text == ""
        delta = one(processor, "r", (EOS,), reason)
        assert (delta.new_text, delta.final.outputs[0].text) == ("hello", "hello")
    processor = processor_with(SamplingParams(stop="hello!"))
    one(processor, "r", (HELLO,))
    (delta,), _ = processor.abort("r")
    assert (delta.new_text, delta.final.outputs[0].text, delta.final.outputs[0].finish_reason) == (
        "hello",
        "hello",
        "abort",
    )


def test_the_replacement_of_half_a_character_can_complete_a_stop_string():
    delta = one(processor_with(SamplingParams(stop="o\ufffd")), "r", (HELLO, EMOJI[0]), LENGTH)
    completion = delta.final.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("hell", "stop", "o\ufffd")
    processor = processor_with(SamplingParams(stop="o\ufffd"))
    one(processor, "r", (HELLO, EMOJI[0]))
    (delta,), _ = processor.abort("r")
    completion = delta.final.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("hell", "abort", None)


def test_min_tokens_holds_against_stop_strings():
    """One that begins within the first min_tokens and is completed after them counts."""
    params = SamplingParams(stop=("hello", "d</"), min_tokens=2)
    processor = processor_with(params)
    assert one(processor, "r", (HELLO,)).new_text == "hello"
    assert one(processor, "r", (WORLD,)).new_text == " worl"
    (delta,), stopped = processor.process([EngineCoreOutput("r", (CLOSE,))])
    assert stopped == ["r"]
    assert (delta.final.outputs[0].text, delta.final.outputs[0].stop_reason) == ("hello worl", "d</")


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, "hello ")])
def test_the_token_after_min_tokens_is_the_first_that_stops(min_tokens, text):
    processor = processor_with(SamplingParams(stop="hello", min_tokens=min_tokens))
    portion = (HELLO, ord(" "), HELLO)
    (delta,), stopped = processor.process([EngineCoreOutput("r", portion)])
    assert stopped == ["r"]
    assert delta.final.outputs[0].text == text


# ------------------------------------------------------------------------------------------------------ logprobs
def test_logprobs_hold_the_chosen_token_and_the_best_with_their_ranks():
    processor = processor_with(SamplingParams(logprobs=2))
    apart = TokenLogprobs((CLOSE, HELLO, WORLD), (-5.0, -0.5, -1.5), 7)
    among = TokenLogprobs((WORLD, HELLO, WORLD), (-1.5, -0.5, -1.5), 2)
    first = one(processor, "r", (CLOSE,), logprobs=(apart,))
    second = one(processor, "r", (WORLD,), LENGTH, logprobs=(among,))
    expected = [
        {CLOSE: Logprob(-5.0, 7, "</s>"), HELLO: Logprob(-0.5, 1, "hello"), WORLD: Logprob(-1.5, 2, " world")},
        {WORLD: Logprob(-1.5, 2, " world"), HELLO: Logprob(-0.5, 1, "hello")},
    ]
    assert first.new_logprobs + second.new_logprobs == second.final.outputs[0].logprobs == expected
    assert [next(iter(entry)) for entry in expected] == [next(iter(e)) for e in second.final.outputs[0].logprobs]
    assert second.final.outputs[0].cumulative_logprob == -6.5


def test_a_rank_among_equals_is_the_place_in_the_list():
    """The k-th best has rank k, though the core counts how many are strictly better."""
    processor = processor_with(SamplingParams(logprobs=2))
    tie = TokenLogprobs((WORLD, HELLO, WORLD), (-0.7, -0.7, -0.7), 1)
    (entry,) = one(processor, "r", (WORLD,), LENGTH, logprobs=(tie,)).new_logprobs
    assert {token_id: logprob.rank for token_id, logprob in entry.items()} == {HELLO: 1, WORLD: 2}


def test_parts_of_characters_and_special_tokens_have_a_text_among_the_logprobs():
    ids = (EMOJI[0], EMOJI[1], EOS, HELLO, 9999)
    processor = processor_with(SamplingParams(logprobs=4, stop="zzz"))
    entry = TokenLogprobs(ids, (-1.0,) * 5, 1)
    (new,) = one(processor, "r", (EMOJI[0],), logprobs=(entry,)).new_logprobs
    assert [logprob.decoded_token for logprob in new.values()] == ["\ufffd", "\ufffd", "<eos>", "hello", ""]


def test_without_text_logprobs_have_ids_only():
    entry = TokenLogprobs((HELLO,), (-1.0,), 1)
    for tokenizer, params in (
        (None, SamplingParams(logprobs=0)),
        (TOKENIZER, SamplingParams(logprobs=0, detokenize=False)),
    ):
        processor = processor_with(params, tokenizer=tokenizer)
        delta = one(processor, "r", (HELLO,), LENGTH, logprobs=(entry,))
        assert delta.new_logprobs == [{HELLO: Logprob(-1.0, 1, None)}]
        assert delta.final.outputs[0].text == ""


def test_without_logprobs_there_are_none():
    delta = one(processor_with(SamplingParams()), "r", (HELLO,), LENGTH)
    assert delta.new_logprobs is None
    assert delta.final.outputs[0].logprobs is None
    assert delta.final.outputs[0].cumulative_logprob is None
    assert delta.final.prompt_logprobs is None


def test_prompt_logprobs_arrive_in_portions_and_are_complete():
    processor = processor_with(SamplingParams(prompt_logprobs=1))
    second = TokenLogprobs((2, HELLO), (-2.0, -0.1), 4)
    third = TokenLogprobs((3, 3), (-0.3, -0.3), 1)
    assert processor.process([EngineCoreOutput("r", (), prompt_logprobs=(second,))]) == ([], []), "nothing for a client"
    delta = one(processor, "r", (HELLO,), LENGTH, prompt_logprobs=(third,))
    assert delta.final.prompt_logprobs == [
        None,
        {2: Logprob(-2.0, 4, "\x02"), HELLO: Logprob(-0.1, 1, "hello")},
        {3: Logprob(-0.3, 1, "\x03")},
    ]
    assert delta.new_logprobs is None


# -------------------------------------------------------------------------------------------------------- n samples
def test_n_samples_come_together_in_the_order_of_their_index():
    processor = processor_with(SamplingParams(n=3, logprobs=None))
    assert processor.num_requests == 1
    steps = [
        [("r#0", (HELLO,), None), ("r#1", (WORLD,), None), ("r#2", (EOS,), STOP)],
        [("r#0", (WORLD,), LENGTH), ("r#1", (WORLD,), None)],
        [("r#1", (HELLO,), LENGTH)],
    ]
    deltas = [d for step in steps for d in processor.process([EngineCoreOutput(*output) for output in step])[0]]
    assert [(d.index, d.new_text, d.final is None) for d in deltas] == [
        (0, "hello", True),
        (1, " world", True),
        (2, "", True),
        (0, " world", True),
        (1, " world", True),
        (1, "hello", False),
    ]
    assert {d.request_id for d in deltas} == {"r"}
    final = deltas[-1].final
    assert [c.index for c in final.outputs] == [0, 1, 2]
    assert [c.text for c in final.outputs] == ["hello world", " world worldhello", ""]
    assert [c.finish_reason for c in final.outputs] == ["length", "length", "stop"]
    assert final.finished and final.prompt == "prompt" and final.prompt_token_ids == PROMPT
    assert processor.num_requests == 0


def test_a_stop_string_ends_one_sample_only():
    processor = processor_with(SamplingParams(n=2, stop="hello"))
    _, stopped = processor.process([EngineCoreOutput("r#0", (WORLD,)), EngineCoreOutput("r#1", (HELLO,))])
    assert stopped == ["r#1"]
    assert processor.is_live("r") and processor.is_live("r#0") and not processor.is_live("r#1")
    delta = one(processor, "r#0", (WORLD,), LENGTH)
    assert [c.text for c in delta.final.outputs] == [" world world", ""]


def test_abort_ends_the_samples_that_run_and_keeps_what_the_others_had():
    processor = processor_with(SamplingParams(n=3, stop="hello!"))
    processor.process([EngineCoreOutput("r#1", (WORLD,), LENGTH), EngineCoreOutput("r#2", (HELLO,))])
    deltas, core_ids = processor.abort("r")
    assert core_ids == ["r#0", "r#2"]
    assert [(d.index, d.new_text, d.final is None) for d in deltas] == [(0, "", True), (2, "hello", False)]
    final = deltas[-1].final
    assert [(c.text, c.finish_reason) for c in final.outputs] == [
        ("", "abort"),
        (" world", "length"),
        ("hello", "abort"),
    ]
    assert processor.abort("r") == ([], [])
    assert processor.num_requests == 0 and not processor.is_live("r#0")


def test_outputs_of_unknown_requests_change_nothing():
    processor = processor_with(SamplingParams())
    assert processor.process([EngineCoreOutput("other", (HELLO,), STOP)]) == ([], [])
    assert processor.abort("other") == ([], [])
    assert processor.is_live("r")


def test_an_error_of_the_core_ends_the_request_without_a_token():
    processor = processor_with(SamplingParams(stop="hello!"))
    one(processor, "r", (HELLO,))
    delta = one(processor, "r", (), FinishReason.ERROR)
    assert (delta.new_text, delta.new_token_ids) == ("hello", ())
    assert delta.final.outputs[0].finish_reason == "error"
    assert delta.final.metrics.first_token_s is not None
