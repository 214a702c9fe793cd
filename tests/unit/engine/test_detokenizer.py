"""The joined pieces are the text: for any tokens, in any portions, after any prompt."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers.models import BPE

from pico_vllm.engine.detokenizer import IncrementalDetokenizer
from pico_vllm.engine.tokenizer import Tokenizer

EMOJI, EURO = "😀".encode(), "€".encode()
MERGED = [EURO, EMOJI, "é".encode(), b"the", b" cat", EMOJI[:2], EMOJI[2:], b"\xac \xf0", "\ufffd".encode()]
SPECIAL, PLAIN, NOT_BYTES = 265, 266, 267
NO_TOKEN = 268


def spell(data):
    """Bytes in GPT-2's byte alphabet."""
    itself = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in itself]
    return "".join(chr(byte) if byte in itself else chr(256 + others.index(byte)) for byte in data)


def byte_level(decoder=None):
    """Ids 0-255 are the bytes, 256-264 are MERGED, then a special token and two that are added; 268 and up are none."""
    tokens = [bytes([byte]) for byte in range(256)] + MERGED
    backend = tokenizers.Tokenizer(BPE({spell(token): token_id for token_id, token in enumerate(tokens)}, []))
    backend.decoder = decoder or decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens(["<tool call>", "<日é>"])
    assert backend.token_to_id("<|end|>") == SPECIAL and backend.get_vocab_size() == NO_TOKEN
    return Tokenizer(backend)


def byte_fallback():
    """A SentencePiece-like tokenizer as Llama 2's: 0-255 are <0x00>-<0xFF>, then words, a special token."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for token in ("▁the", "▁cat", "s", "▁", "▁▁", "é", "<unk>", "\ufffd"):
        vocab[token] = len(vocab)
    backend = tokenizers.Tokenizer(BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend)


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
WRAPPED = byte_level(decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]))
THE, CAT, S, SPACE = 256, 257, 258, 259
END = 264

ids_of_byte_level = st.lists(
    st.one_of(
        st.sampled_from([*EMOJI, *EURO, 0x80, 0xBF, 0xC2, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xFF, 0x41]),
        st.integers(0, NO_TOKEN + 3),
        st.integers(256, NO_TOKEN),
    ),
    max_size=30,
)
ids_of_byte_fallback = st.lists(
    st.one_of(st.sampled_from([*EMOJI, *EURO, 0xFF, 0x41]), st.integers(256, 267)), max_size=30
)


def portions(data, ids):
    """Cut a list into portions, some of them empty, as speculation or an idle step would."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids) + 2)))
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def stream(tokenizer, prompt, portions, skip=True):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    pieces = [detokenizer.append(portion) for portion in portions] + [detokenizer.finish()]
    assert "".join(pieces) == detokenizer.text
    return pieces


def characters(data):
    """(character, start, end) of bytes read as UTF-8, U+FFFD for each maximal subpart: slow and obvious."""
    start = 0
    while start < len(data):
        for end in range(start + 1, min(start + 4, len(data)) + 1):
            try:
                yield data[start:end].decode(), start, end
                break
            except UnicodeDecodeError:
                pass
        else:
            try:
                data[start:].decode()
            except UnicodeDecodeError as error:
                end = start + error.end
            yield "\ufffd", start, end
        start = end


# ---- byte-level ----


@given(ids_of_byte_level, st.booleans(), st.data())
def test_joined_pieces_are_the_decoded_output(ids, skip, data):
    pieces = stream(BYTE_LEVEL, [ord("x")], portions(data, ids), skip)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(ids_of_byte_level, ids_of_byte_level, st.data())
def test_the_output_owns_every_character_that_one_of_its_bytes_belongs_to(prompt, ids, data):
    before = b"".join(map(BYTE_LEVEL.token_bytes, prompt))
    after = b"".join(map(BYTE_LEVEL.token_bytes, ids))
    expected = "".join(c for c, _, end in characters(before + after) if end > len(before))
    assert "".join(stream(BYTE_LEVEL, prompt, portions(data, ids), skip=False)) == expected


@given(ids_of_byte_level, ids_of_byte_level)
def test_text_comes_as_soon_as_it_is_certain(prompt, ids):
    """What is held back after any token is an incomplete character (or the encoded half of a surrogate), never more."""
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, prompt, skip_special_tokens=False)
    for count, token_id in enumerate(ids, start=1):
        detokenizer.append([token_id])
        rest = IncrementalDetokenizer(BYTE_LEVEL, prompt, skip_special_tokens=False)
        rest.append(ids[:count])
        held_back = rest.finish()
        assert held_back in ("", "\ufffd", "\ufffd\ufffd")
        assert detokenizer.text + held_back == "".join(stream(BYTE_LEVEL, prompt, [ids[:count]], skip=False))


def test_half_a_character_is_held_back_until_it_is_whole():
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [])
    assert [detokenizer.append([byte]) for byte in b"a" + EMOJI] == ["a", "", "", "", "😀"]
    assert detokenizer.append([256 + MERGED.index(b"\xac \xf0")]) == "\ufffd "
    assert detokenizer.append(list(EMOJI[1:])) == "😀"
    assert detokenizer.finish() == ""


def test_a_character_cut_by_the_end_becomes_one_replacement_character():
    for length in (1, 2, 3):
        detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [])
        assert detokenizer.append(list(b"a" + EMOJI[:length])) == "a"
        assert detokenizer.finish() == "\ufffd"
        assert detokenizer.finish() == "", "once"
        assert detokenizer.text == "a\ufffd" == BYTE_LEVEL.decode(list(b"a" + EMOJI[:length]))


@pytest.mark.parametrize("character", [EMOJI, EURO, "é".encode(), "\ufffd".encode()])
def test_a_character_begun_by_the_prompt_is_the_outputs(character):
    for cut in range(1, len(character)):
        prompt, output = list(b"xy" + character[:cut]), list(character[cut:] + b"z")
        assert stream(BYTE_LEVEL, prompt, [[i] for i in output])[-3:] == [character.decode(), "z", ""]


def test_half_a_character_of_the_prompt_that_does_not_go_on_is_not_the_outputs():
    for cut in (1, 2, 3):
        prompt = list(EMOJI[:cut])
        assert stream(BYTE_LEVEL, prompt, [[ord("a")]]) == ["a", ""]
        assert stream(BYTE_LEVEL, prompt, [[], [SPECIAL], list(EURO)]) == ["", "", "€", ""]
        assert stream(BYTE_LEVEL, prompt, [[]]) == ["", ""]
    assert stream(BYTE_LEVEL, list(EMOJI[:2]), [[EMOJI[2]]]) == ["", "\ufffd"], "begun by one, cut in the other"


def test_the_bytes_of_half_a_surrogate_are_no_character_begun():
    assert "".join(stream(BYTE_LEVEL, [0xED], [[0xAC], [0x80]])) == "\ufffd\ufffd"
    assert "".join(stream(BYTE_LEVEL, [0xED, 0xAC], [[0x80], [0x41]])) == "\ufffdA"


def test_no_character_is_completed_across_a_special_token_of_the_prompt():
    assert stream(BYTE_LEVEL, [*EMOJI[:2], SPECIAL], [[EMOJI[2]]]) == ["\ufffd", ""]


def test_a_special_token_between_two_halves_is_skipped_as_decode_skips_it():
    ids = [*EMOJI[:2], SPECIAL, *EMOJI[2:]]
    assert stream(BYTE_LEVEL, [], [[i] for i in ids]) == ["", "", "", "", "😀", ""]
    assert "".join(stream(BYTE_LEVEL, [], [ids], skip=False)) == "\ufffd<|end|>\ufffd\ufffd"


def test_ids_without_a_token_give_no_text():
    assert stream(BYTE_LEVEL, [NO_TOKEN + 7], [[NO_TOKEN], [ord("a"), 10**6, ord("b")]]) == ["", "ab", ""]


def test_added_tokens_are_text_as_decode_has_them():
    assert stream(BYTE_LEVEL, [], [[PLAIN], [NOT_BYTES]]) == ["<tool call>", "<日é>", ""]


def test_nothing_may_follow_the_end():
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [])
    detokenizer.finish()
    with pytest.raises(AssertionError):
        detokenizer.append([1])


# ---- SentencePiece-like ----


@given(ids_of_byte_fallback, st.booleans(), st.data())
def test_without_fixed_bytes_the_joined_pieces_are_still_the_decoded_output(ids, skip, data):
    pieces = stream(BYTE_FALLBACK, [], portions(data, ids), skip)
    assert "".join(pieces) == BYTE_FALLBACK.decode(ids, skip_special_tokens=skip)


@given(ids_of_byte_fallback.filter(lambda ids: not ids or END > ids[-1] > 255), ids_of_byte_fallback, st.data())
def test_without_fixed_bytes_the_output_goes_on_from_the_prompt(prompt, ids, data):
    prompt = [THE, *prompt]  # some text stands before it: the space that a text loses at its start is not ours
    before = BYTE_FALLBACK.decode(prompt)
    expected = BYTE_FALLBACK.decode(prompt + ids)[len(before) :]
    assert "".join(stream(BYTE_FALLBACK, prompt, portions(data, ids))) == expected


@given(ids_of_byte_level, st.booleans(), st.data())
def test_bytes_behind_another_decoder_are_held_back_too(ids, skip, data):
    pieces = stream(WRAPPED, [], portions(data, ids), skip)
    assert "".join(pieces) == WRAPPED.decode(ids, skip_special_tokens=skip)
    assert stream(WRAPPED, [], [[byte] for byte in EMOJI]) == ["", "", "", "😀", ""]


def test_a_leading_space_is_kept_after_a_prompt_and_dropped_without_one():
    assert stream(BYTE_FALLBACK, [THE], [[CAT], [S]]) == [" cat", "s", ""]
    assert stream(BYTE_FALLBACK, [END], [[CAT], [CAT]]) == ["cat", " cat", ""]
    assert stream(BYTE_FALLBACK, list("日本語は".encode()), [[CAT]]) == [" cat", ""]


def test_a_run_of_byte_tokens_is_decoded_as_a_whole():
    assert stream(BYTE_FALLBACK, [THE], [[i] for i in [*EURO, S]]) == ["", "", "", "€s", ""]
    assert stream(BYTE_FALLBACK, [THE], [list(EURO)]) == ["", "€"]
    assert stream(BYTE_FALLBACK, [THE], [[*EURO, 0xFF, S]])[0] == BYTE_FALLBACK.decode([*EURO, 0xFF, S])


def test_byte_tokens_of_the_prompt_that_begin_a_character_are_the_outputs_if_it_goes_on():
    for cut in (1, 2):
        prompt = [THE, *EURO, *EURO[:cut]]
        assert stream(BYTE_FALLBACK, prompt, [list(EURO[cut:]), [S]]) == ["", "€s", ""]
        assert stream(BYTE_FALLBACK, prompt, [[S], [CAT]]) == ["s", " cat", ""]
        assert stream(BYTE_FALLBACK, prompt, [[0x41]]) == ["", "A"]
        assert stream(BYTE_FALLBACK, [*prompt, END], [list(EURO[cut:]), [S]])[1] == "\ufffd" * (3 - cut) + "s"


# ---- the real one ----


@pytest.mark.model
def test_the_default_models_tokens_stream_to_what_transformers_decodes(default_model_dir):
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_directory(default_model_dir)
    theirs = AutoTokenizer.from_pretrained(default_model_dir)
    assert tokenizer.is_byte_level
    texts = ["Hello 😀 👩‍👩‍👧‍👦 日本語 naïve <|im_end|> 123\n\n", "ภาษาไทย"]
    pieces_of_characters = st.lists(st.sampled_from([i for text in texts for i in theirs.encode(text)]), max_size=40)

    @given(st.one_of(pieces_of_characters, st.lists(st.integers(0, 49160), max_size=40)), st.booleans(), st.data())
    def joined_pieces_are_the_decoded_output(ids, skip, data):
        pieces = stream(tokenizer, theirs.encode("The"), portions(data, ids), skip)
        known = [token_id for token_id in ids if token_id < 49152]
        assert "".join(pieces) == theirs.decode(known, skip_special_tokens=skip)

    joined_pieces_are_the_decoded_output()
