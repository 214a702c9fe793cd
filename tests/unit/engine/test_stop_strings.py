"""Stop strings end a text where they are complete first, and nothing that may become one is seen before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pico_vllm import SamplingParams
from pico_vllm.engine.detokenizer import IncrementalDetokenizer
from pico_vllm.engine.output_processor import OutputProcessor
from pico_vllm.engine.stop_strings import StopStrings, StopStringScanner
from pico_vllm.engine.tokenizer import Tokenizer
from pico_vllm.outputs import EngineCoreOutput
from pico_vllm.request import FinishReason, Request
from tiny_tokenizers import byte_level_tokenizer

EMOJI, EURO = "😀".encode(), "€".encode()
WORDS = [EMOJI, EURO, b"ab", b"abab", b"ba", b"aab a", EMOJI[:2], EMOJI[2:], b"b" + EURO[:1], EURO[1:] + b"a"]
TOKENIZER = byte_level_tokenizer(WORDS, ["<|end|>"])
SPECIAL = 256 + len(WORDS)


def scan(stops, pieces, *, include=False):
    """What each piece gives, and the stop string that was found."""
    scanner = StopStringScanner(StopStrings(stops, include))
    given = []
    for piece in pieces:
        given.append(scanner.append(piece))
        if scanner.found is not None:
            return given, scanner.found
    return [*given, scanner.finish()], None


# ------------------------------------------------------------------------------------------------------ by hand
@pytest.mark.parametrize(
    ("stops", "pieces", "given", "found"),
    [
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], "\n\n"),
        (["stop"], ["st", "ops"], ["", ""], "stop"),
        (["stop"], ["x st", "o", "ne"], ["x ", "", "stone", ""], None),
        (["stop"], ["x st", "o"], ["x ", "", "sto"], None),
        (["aab"], ["aa", "a", "ab!"], ["", "a", "a"], "aab"),
        (["abac"], ["aba", "bac"], ["", "ab"], "abac"),
        (["bc", "abcd"], ["abcd"], ["a"], "bc"),
        (["bc", "abcd"], ["a", "b", "cd"], ["", "", "a"], "bc"),
        (["bc", "abc"], ["xabc"], ["x"], "abc"),
        (["abc", "bc"], ["xab", "c"], ["x", ""], "abc"),
        (["ab", "abc"], ["abc"], [""], "ab"),
        (["a", "a"], ["ba"], ["b"], "a"),
        (["é"], ["cafe", "é"], ["cafe", ""], "é"),
        (["never"], ["", "x", ""], ["", "x", "", ""], None),
    ],
)
def test_a_text_ends_before_the_stop_string_that_is_complete_first(stops, pieces, given, found):
    assert scan(stops, pieces) == (given, found)


@pytest.mark.parametrize(
    ("stops", "pieces", "given", "found"),
    [
        (["stop"], ["x st", "ops"], ["x st", "op"], "stop"),
        (["stop"], ["x st", "art"], ["x st", "art", ""], None),
        (["bc", "abcd"], ["ab", "cd"], ["ab", "c"], "bc"),
    ],
)
def test_a_stop_string_that_is_part_of_the_output_holds_nothing_back(stops, pieces, given, found):
    assert scan(stops, pieces, include=True) == (given, found)


def test_a_stop_string_of_a_hundred_thousand_characters_costs_no_more_a_character_than_a_short_one():
    """A search that looked at the held-back text again for each piece would take hours here."""
    scanner = StopStringScanner(StopStrings(["a" * 100_000 + "b"]))
    assert all(scanner.append("a" * 10) == "" for _ in range(10_000))
    assert [len(scanner.append("a" * 10)) for _ in range(1000)] == [10] * 1000
    assert scanner.append("b") == ""
    assert scanner.found is not None


# ------------------------------------------------------------------------------------- against the whole text
def reference(tokenizer, prompt, ids, stops, include, min_tokens):
    """Slow and obvious: look at the whole text after each of its characters.

    Returns:
        The text, how many tokens it takes, the stop string, and the text that may be seen after each of those tokens.
    """
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    certain = [0]  # characters that are certain after so many tokens
    for token_id in ids:
        certain.append(certain[-1] + len(detokenizer.append([token_id])))
    text = detokenizer.text + detokenizer.finish()
    seen = [_visible(text[:count], stops, include) for count in certain]
    for end in range(1, len(text) + 1):
        num_tokens = next((count for count, length in enumerate(certain) if length >= end), len(ids))
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete and num_tokens > min_tokens:
            stop = max(complete, key=len)
            cut = text[: end if include else end - len(stop)]
            return cut, num_tokens, stop, [*seen[1:num_tokens], cut]
    return text, len(ids), None, [*seen[1:], text]


def _visible(text, stops, include):
    held = [0] + [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return text if include else text[: len(text) - max(held)]


def check(tokenizer, prompt, ids, sizes, **options):
    """Stream ids through the output processor, cut into steps, and compare with the reference."""
    params = SamplingParams(max_tokens=100, **options)
    text, num_tokens, stop, seen = reference(
        tokenizer, prompt, ids, params.stop, params.include_stop_str_in_output, params.min_tokens
    )
    processor = OutputProcessor(tokenizer)
    processor.add("r", [Request("r", prompt, params)], None)
    streamed, taken, aborts, final = "", [], [], None
    while ids:
        portion, ids = tuple(ids[: sizes[0]]), ids[sizes[0] :]
        sizes = [*sizes[1:], sizes[0]]
        reason = None if ids else FinishReason.LENGTH
        deltas, stopped = processor.process([EngineCoreOutput("r", portion, reason)])
        aborts += stopped
        if final is not None:
            assert not deltas and not stopped, "what comes after the end is discarded"
            continue
        (delta,) = deltas
        streamed += delta.new_text
        taken += delta.new_token_ids
        final = delta.final
        if final is None:
            assert streamed == seen[len(taken) - 1]
        else:
            assert stopped == (["r"] if stop is not None and reason is None else [])
    completion = final.outputs[0]
    assert streamed == completion.text == text
    assert taken == completion.token_ids
    assert len(taken) == num_tokens
    assert completion.finish_reason == ("length" if stop is None else "stop")
    assert completion.stop_reason == stop
    assert len(aborts) <= 1 and processor.num_requests == 0


def ids_and_stops(token_ids, decode):
    """Token ids, and stops of which most occur in their text, or nearly."""

    @st.composite
    def draw_both(draw):
        ids = draw(st.lists(token_ids, min_size=1, max_size=25))
        text = decode(ids)
        stops = []
        for _ in range(draw(st.integers(1, 4))):
            start = draw(st.integers(0, max(len(text) - 1, 0)))
            stop = text[start : start + draw(st.integers(1, 8))] + draw(st.sampled_from(["", "", "a", "\ufffd"]))
            stops.append(stop or "a")
        return ids, tuple(stops)

    return draw_both()


step_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=5)
some_bytes = st.sampled_from([*b"aab ", *EMOJI, *EURO, 0xFF, *range(256, SPECIAL + 1)])


@given(ids_and_stops(some_bytes, TOKENIZER.decode), step_sizes, st.booleans(), st.integers(0, 12), st.data())
def test_streamed_text_is_the_whole_text_up_to_its_first_stop_string(both, sizes, include, min_tokens, data):
    ids, stops = both
    prompt = data.draw(st.sampled_from([[ord("a")], list(EMOJI[:2]), list(EURO[:1])]))
    check(TOKENIZER, prompt, ids, sizes, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)


@given(
    ids_and_stops(st.integers(0, 255), TOKENIZER.decode), step_sizes, st.booleans(), st.sampled_from([0, 0, 1, 5, 30])
)
def test_any_bytes_and_any_stop_strings(both, sizes, include, min_tokens):
    ids, stops = both
    check(TOKENIZER, [0], ids, sizes, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)


def check_real(tokenizer, token_ids):
    @given(ids_and_stops(token_ids, tokenizer.decode), step_sizes, st.booleans(), st.sampled_from([0, 0, 2, 7]))
    def streamed_is_final(both, sizes, include, min_tokens):
        ids, stops = both
        check(tokenizer, [ids[0]], ids, sizes, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)

    streamed_is_final()


REAL_TEXT = "Hello 😀 👩‍👩‍👧‍👦 日本語 naïve 123\n\nHello, hello\n\n\n"


@pytest.mark.model
def test_with_the_default_models_tokenizer(default_model_dir):
    tokenizer = Tokenizer.from_directory(default_model_dir)
    check_real(tokenizer, st.one_of(st.sampled_from(tokenizer.encode(REAL_TEXT)), st.integers(0, 49151)))


@pytest.mark.tokenizer
def test_with_qwens_tokenizer(qwen_tokenizer_dir):
    tokenizer = Tokenizer.from_directory(qwen_tokenizer_dir)
    check_real(tokenizer, st.one_of(st.sampled_from(tokenizer.encode(REAL_TEXT)), st.integers(0, 151_000)))
