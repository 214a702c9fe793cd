"""Fixtures that several unit tests share: a tokenizer made on the spot, and the real default model."""

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from pico_vllm.config import cache_dir
from pico_vllm.errors import PicoVLLMError
from pico_vllm.models.default_model import ensure_default_model, fetch_default_gguf


@pytest.fixture(scope="session")
def default_model_dir():
    """The converted SmolLM2-135M-Instruct, or a skip (a failure where PICO_REQUIRE_MODEL=1: tests/conftest.py)."""
    try:
        return ensure_default_model(cache_dir())
    except PicoVLLMError as error:
        pytest.skip(f"no default model: {error}")


@pytest.fixture(scope="session")
def default_gguf(default_model_dir, tmp_path_factory):
    """The GGUF file that the default model was converted from (fetched once more: the cache keeps the result only)."""
    try:
        return fetch_default_gguf(cache_dir(), tmp_path_factory.mktemp("gguf"))
    except PicoVLLMError as error:
        pytest.skip(f"no default GGUF: {error}")


@pytest.fixture
def byte_level_backend():
    """A new byte-level BPE as GPT-2's family has it: 3 special tokens, 256 bytes, 40 merges, 1 plain added token."""
    backend = tokenizers.Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=299,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    corpus = ["the cat sat on the mat and the dog sat on the cat", "café naïve 😀😀 日本語 日本 日本語", "a 1 2 3 100"]
    backend.train_from_iterator(corpus, trainer)
    backend.add_tokens(["<tool call>"])
    assert backend.get_vocab_size() == 300
    return backend
