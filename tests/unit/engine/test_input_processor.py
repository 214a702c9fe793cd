"""A request that doesn't fit the model or the engine is refused with the value, the limit and the remedy."""

import types
from array import array
from enum import IntEnum

import numpy as np
import pytest
from tokenizers import normalizers, processors

from pico_vllm import SamplingParams
from pico_vllm.engine.engine_core import EngineLimits
from pico_vllm.engine.input_processor import InputProcessor
from pico_vllm.engine.tokenizer import Tokenizer
from pico_vllm.errors import RequestError
from pico_vllm.kernels.philox import derive_seed
from tiny_models import byte_tokenizer

Token = IntEnum("Token", {"COMMA": 4})
VOCAB_SIZE = 300
LIMITS = EngineLimits(max_model_len=64, max_request_tokens=49, num_blocks=3, block_size=16)
MODEL = types.SimpleNamespace(vocab_size=VOCAB_SIZE, eos_token_ids=(1,))


def processor(tokenizer):
    return InputProcessor(tokenizer, MODEL, LIMITS, engine_seed=0)


INPUTS = processor(Tokenizer(byte_tokenizer()))
NO_TEXT = processor(None)


def ids(text):
    return tuple(byte_tokenizer().encode(text).ids)


def requests(params, prompt=(5, 6), request_id="r", inputs=INPUTS):
    return inputs.process(request_id, list(prompt), params)[0]


# -------------------------------------------------------------------------------------------------- ids of prompts
@pytest.mark.parametrize("prompt", [[0, 299], (0, 299), range(298, 300), array("i", [0, 299])])
def test_any_sequence_of_ids_is_a_prompt(prompt):
    (request,), text = NO_TEXT.process("r", prompt, SamplingParams())
    assert request.prompt_token_ids == tuple(prompt) and text is None
    assert {type(token_id) for token_id in request.prompt_token_ids} == {int}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5, -1, 300], "token id -1 is outside the vocabulary: ids go from 0 to 299"),
        ([5, 300, 7], "token id 300 is outside the vocabulary: ids go from 0 to 299"),
        ([2**70], f"token id {2**70} is outside the vocabulary: ids go from 0 to 299"),
        ([10**5000], "token id of 16610 bits is outside the vocabulary: ids go from 0 to 299"),
        ([Token.COMMA, 9999], "token id 9999 is outside the vocabulary: ids go from 0 to 299"),
        ([5, True], "token id True is a bool, not an int"),
        ([5.0, 6], "token id 5.0 is a float, not an int"),
        ([-1, "5"], "token id '5' is a str, not an int"),
        ([5, [6]], r"token id \[6\] is a list, not an int"),
        ([5, np.int64(6)], r"token id np.int64\(6\) is a int64, not an int"),
        (np.array([5, 6]), "a prompt must be text or a list of token ids, got ndarray"),
        ({5, 6}, "a prompt must be text or a list of token ids, got set"),
        (b"56", "a prompt must be text or a list of token ids, got bytes"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(prompt, message):
    for form in (prompt, {"prompt_token_ids": prompt}):
        with pytest.raises(RequestError, match=f"^{message}$"):
            NO_TEXT.process("r", form, SamplingParams())


# -------------------------------------------------------------------------------------------------- ids of params
@pytest.mark.parametrize(
    "wrong",
    [
        {"logit_bias": {3: 1.0, 300: 1.0}},
        {"allowed_token_ids": (3, 300)},
        {"stop_token_ids": (300, 3)},
    ],
)
def test_ids_outside_the_vocabulary_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(RequestError) as error:
        requests(SamplingParams(**wrong))
    assert all(word in str(error.value) for word in (name, "300", "299")), error.value


def test_the_last_id_of_the_vocabulary_and_more_than_there_is_to_keep_are_fine():
    params = SamplingParams(
        logit_bias={299: 1.0}, allowed_token_ids=(299,), stop_token_ids=(299,), top_k=10**6, logprobs=100
    )
    (request,) = requests(params)
    assert request.params is params
    assert request.stop_token_ids == {1, 299}


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(stop="x"), ["stop", "skip_tokenizer_init", "stop_token_ids"]),
        (SamplingParams(bad_words=("x",)), ["bad_words", "skip_tokenizer_init", "logit_bias"]),
    ],
)
def test_what_needs_text_is_refused_without_a_tokenizer(params, words):
    with pytest.raises(RequestError) as error:
        requests(params, inputs=NO_TEXT)
    assert all(word in str(error.value) for word in words), error.value
    requests(SamplingParams(logprobs=3, detokenize=True), inputs=NO_TEXT)


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(RequestError, match=r"stop .*half a surrogate"):
        requests(SamplingParams(stop="a\ud83d"))
    with pytest.raises(RequestError, match="half a surrogate"):
        requests(SamplingParams(bad_words=("a\ud83d",)))
    with pytest.raises(RequestError, match=r"request_id .*half a surrogate"):
        requests(SamplingParams(), request_id="\ud83d")


@pytest.mark.parametrize("request_id", ["", 3, None, ["r"]])
def test_an_id_that_is_no_text_is_refused(request_id):
    with pytest.raises(RequestError, match="request_id"):
        requests(SamplingParams(), request_id=request_id)


def test_min_tokens_above_what_fits_is_refused():
    assert requests(SamplingParams(max_tokens=None, min_tokens=47))[0].max_tokens == 47
    with pytest.raises(RequestError, match=r"min_tokens=48 .*47"):
        requests(SamplingParams(max_tokens=None, min_tokens=48))


# ------------------------------------------------------------------------------------------------------ bad words
def bad_words(*words, inputs=INPUTS):
    (request,) = requests(SamplingParams(bad_words=words), inputs=inputs)
    return request.bad_words_token_ids


def test_a_bad_word_whose_word_start_ends_in_the_word_itself_is_one_sequence():
    """With a token a byte " cat" ends in "cat": who may not write the one cannot write the other."""
    assert bad_words("cat") == (ids("cat"),)
    assert bad_words("cat", "dog", "cat") == (ids("cat"), ids("dog"))
    assert bad_words(" cat") == (ids(" cat"),)
    assert bad_words(" cat", "at") == (ids("at"),)


def test_a_bad_word_is_masked_inside_text_and_as_the_start_of_a_word(byte_level_backend):
    """Where " cat" is a token of its own, the sequence of "cat" would let it through."""
    byte_level_backend.add_tokens(["  "])
    tokenizer = Tokenizer(byte_level_backend)
    as_is, word_start = (tuple(tokenizer.encode(text)) for text in ("cat", " cat"))
    assert word_start[-len(as_is) :] != as_is, "else this tests nothing"
    inputs = processor(tokenizer)
    assert bad_words("cat", inputs=inputs) == (as_is, word_start)
    assert bad_words("cat", " cat", inputs=inputs) == (as_is, word_start)
    assert bad_words(" dog", inputs=inputs) == (tuple(tokenizer.encode(" dog")),), "it says itself how it begins"


def test_special_tokens_that_an_encoding_adds_are_no_part_of_a_bad_word():
    backend = byte_tokenizer()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    assert bad_words("cat", inputs=processor(Tokenizer(backend))) == (ids("cat"),)


def test_a_bad_word_that_encodes_to_nothing_is_refused():
    backend = byte_tokenizer()
    backend.normalizer = normalizers.Replace("x", "")
    with pytest.raises(RequestError, match="bad_words holds 'xx'"):
        bad_words("cat", "xx", inputs=processor(Tokenizer(backend)))


# -------------------------------------------------------------------------------------------------------- samples
def test_a_prompt_makes_as_many_requests_as_samples():
    made = requests(SamplingParams(n=3, bad_words=("cat",), prompt_logprobs=1))
    assert [request.request_id for request in made] == ["r#0", "r#1", "r#2"]
    assert [request.sample_index for request in made] == [0, 1, 2]
    assert len({request.seed for request in made}) == 1
    assert [request.params.prompt_logprobs for request in made] == [1, None, None]
    assert {request.bad_words_token_ids for request in made} == {(ids("cat"),)}
    (single,) = requests(SamplingParams(n=1, seed=9))
    assert (single.request_id, single.sample_index, single.seed) == ("r", 0, 9)


def test_unseeded_prompts_get_seeds_of_their_own_by_their_number():
    def seeds(inputs):
        drawn = []
        for n in (1, 2, 1):
            drawn.append(requests(SamplingParams(n=n), inputs=inputs)[0].seed)
            assert requests(SamplingParams(), inputs=inputs)[0].seed == drawn[-1], (
                "it was not accepted, so it is no number"
            )
            inputs.accepted()
        return drawn

    first = seeds(processor(None))
    assert len(set(first)) == 3
    assert seeds(processor(None)) == first


def test_a_greedy_prompt_takes_a_number_and_no_seed():
    inputs = processor(None)
    greedy, sampled = SamplingParams(temperature=0.0), SamplingParams()
    seeds = []
    for params in (greedy, sampled, greedy):
        seeds += [request.seed for request in requests(params, inputs=inputs)]
        inputs.accepted()
    assert seeds == [0, derive_seed(0, 1), 0]


def test_a_prompt_that_is_refused_takes_no_number():
    fresh, other = processor(None), processor(None)
    with pytest.raises(RequestError):
        requests(SamplingParams(), prompt=(999,), inputs=other)
    assert requests(SamplingParams(), inputs=other)[0].seed == requests(SamplingParams(), inputs=fresh)[0].seed


# ------------------------------------------------------------------------------------------------------------ chat
def test_messages_without_a_tokenizer_or_of_another_type_are_refused():
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        NO_TEXT.chat_prompt([{"role": "user", "content": "x"}])
    with pytest.raises(RequestError, match="no chat template"):
        INPUTS.chat_prompt([{"role": "user", "content": "x"}])
    for wrong in (None, 3, b"x", {"role": "user"}):
        with pytest.raises(RequestError, match="messages must be a list"):
            INPUTS.chat_prompt(wrong)
