"""A GGUF file's tokenizer as HuggingFace's ``tokenizer.json`` and ``tokenizer_config.json``.

Owns which llama.cpp tokenizers are understood: byte-level BPE with the pre-tokenizers of SmolLM2, Qwen2/2.5/3, Llama 3
and GPT-2. Knows nothing of the file format: it is handed a metadata lookup. Called by ``gguf.GgufFile``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# gguf.TokenType
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How a vocabulary's authors split text before BPE.

    Attributes:
        split: a regex whose matches are the words; None for GPT-2's, which the byte-level step brings along.
        individual_digits: every digit is a word of its own, before anything else.
        normalize_nfc: text is brought to Unicode NFC first.
        ignore_merges: a word that is in the vocabulary is taken whole, whatever the merges say.
        add_bos: whether bos is prepended when the file does not say.
    """

    split: str | None = None
    individual_digits: bool = False
    normalize_nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _PreTokenizer(
    split=_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST,
    normalize_nfc=True,
)
_LLAMA3 = _PreTokenizer(
    split=_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST,
    ignore_merges=True,
    add_bos=True,
)
_PRE_TOKENIZERS = {
    "smollm": _PreTokenizer(individual_digits=True),
    "qwen2": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "gpt-2": _PreTokenizer(),
}


def build_tokenizer_files(get: Callable[..., Any], *, source: str) -> dict[str, str]:
    """Return the text of ``tokenizer.json`` and ``tokenizer_config.json``, keyed by file name.

    Args:
        get: ``get(key, default=None)`` on the file's metadata.
        source: the file's name, for errors.

    Raises:
        ConfigError: the tokenizer's model or pre-tokenizer is not supported, or its vocabulary contradicts itself.
    """
    model = get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ConfigError(
            f"{source}: tokenizer model {model!r} is not supported (supported: 'gpt2', which is byte-level BPE); "
            f"convert the model from its HuggingFace directory instead"
        )
    pre = get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise ConfigError(f"{source}: pre-tokenizer {pre!r} is not supported (supported: {', '.join(_PRE_TOKENIZERS)})")
    tokens: list[str] = get("tokenizer.ggml.tokens", [])
    special = {
        name: tokens[token_id]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (token_id := get(f"tokenizer.ggml.{key}_token_id")) is not None and token_id < len(tokens)
    }
    tokenizer = _build_tokenizer(_PRE_TOKENIZERS[pre], tokens, special, get, source)
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(_tokenizer_config(special, get), indent=2, ensure_ascii=False) + "\n",
    }


def _tokenizer_config(special: dict[str, str], get: Callable[..., Any]) -> dict[str, Any]:
    config: dict[str, Any] = {f"{name}_token": token for name, token in special.items()}
    config["clean_up_tokenization_spaces"] = False
    config["model_max_length"] = get(f"{get('general.architecture')}.context_length")
    # The class that takes tokenizer.json as it is; GPT2Tokenizer and others would put their own pre-tokenizer in.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if (chat_template := get("tokenizer.chat_template")) is not None:
        config["chat_template"] = chat_template
    return config


def _build_tokenizer(
    pre: _PreTokenizer, tokens: list[str], special: dict[str, str], get: Callable[..., Any], source: str
) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    # 1. The model. Rows that llama.cpp invented to fill up the embedding ("unused") are no tokens.
    types: list[int] = get("tokenizer.ggml.token_type", [1] * len(tokens))
    used = [(token_id, token) for token_id, token in enumerate(tokens) if types[token_id] != _UNUSED]
    vocab = {token: token_id for token_id, token in used}
    if len(vocab) != len(used):
        twice = next(token for token_id, token in used if vocab[token] != token_id)
        raise ConfigError(f"{source}: token {twice!r} is in the vocabulary twice")
    merges: list[tuple[str, str]] = []
    for merge in get("tokenizer.ggml.merges", []):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    try:
        tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre.ignore_merges))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{source}: the tokenizer's vocabulary and merges do not fit together ({error})") from error

    # 2. Text to words, and bytes back to text.
    if pre.normalize_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()

    # 3. Tokens that are matched whole in the text: control tokens are skipped when decoding, user-defined ones are not.
    added = [
        AddedToken(token, special=types[token_id] == _CONTROL, normalized=False)
        for token_id, token in used
        if types[token_id] in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    assert tokenizer.get_vocab_size() == len(vocab), "an added token got an id of its own"

    # 4. bos and eos around every text, where the model wants them.
    before = special.get("bos") if get("tokenizer.ggml.add_bos_token", pre.add_bos) else None
    after = special.get("eos") if get("tokenizer.ggml.add_eos_token", False) else None
    _wrap_with(tokenizer, before, after)
    return tokenizer


def _pre_tokenizer(pre: _PreTokenizer) -> Any:
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = []
    if pre.individual_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.split is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    return pre_tokenizers.Sequence(steps)


def _wrap_with(tokenizer: Tokenizer, before: str | None, after: str | None) -> None:
    from tokenizers.processors import TemplateProcessing

    around = [token for token in (before, after) if token is not None]
    if not around:
        return
    tokenizer.post_processor = TemplateProcessing(
        single=" ".join(filter(None, (before, "$A", after))),
        pair=" ".join(filter(None, (before, "$A", after, before, "$B:1", after))),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(around)],
    )
