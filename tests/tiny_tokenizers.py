"""Byte-level tokenizers whose tokens a test chooses."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders
from tokenizers.models import BPE

from pico_vllm.engine.tokenizer import Tokenizer


def spell(data: bytes) -> str:
    """Bytes in GPT-2's byte alphabet."""
    itself = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in itself]
    return "".join(chr(byte) if byte in itself else chr(256 + others.index(byte)) for byte in data)


def byte_level_tokenizer(words: Sequence[bytes] = (), special: Sequence[str] = ()) -> Tokenizer:
    """Ids 0-255 are the bytes, then the words, then the special tokens. Encoding gives bytes: there are no merges."""
    tokens = [bytes([byte]) for byte in range(256)] + list(words)
    backend = tokenizers.Tokenizer(BPE({spell(token): token_id for token_id, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return Tokenizer(backend)
