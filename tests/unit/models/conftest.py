"""Fixtures of the model tests."""

import pytest

from tiny_gguf import arch_metadata, random_tensors, tokenizer_metadata, write_gguf


@pytest.fixture
def make_gguf(tmp_path):
    def make(arch="llama", *, metadata=None, tensors=None, pre="smollm", **options):
        merged = arch_metadata(arch) | tokenizer_metadata(pre) | (metadata or {})
        return write_gguf(
            tmp_path / "m.gguf", arch, merged, random_tensors(arch, **options) if tensors is None else tensors
        )

    return make
