"""ModelSource: where a model comes from. A directory, a GGUF file, a hub id or the default model become one interface.

``find_model`` decides by what the user wrote; the rest of the engine asks the source for a configuration and a
checkpoint and does not know which kind it is.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pico_vllm.config import ModelConfig, cache_dir
from pico_vllm.errors import ConfigError
from pico_vllm.models.default_model import ensure_default_model
from pico_vllm.models.hub import fetch_from_hub, is_hub_id
from pico_vllm.models.weights import SafetensorsCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import torch

    from pico_vllm.models.weights import Checkpoint


class ModelSource(Protocol):
    """A model on this machine."""

    @property
    def path(self) -> Path:
        """The directory or file."""
        ...

    def model_config(self) -> ModelConfig:
        """What the model is."""
        ...

    def open_checkpoint(self) -> AbstractContextManager[Checkpoint]:
        """Its tensors, under Hugging Face's names."""
        ...

    def hf_directory(self) -> AbstractContextManager[Path]:
        """The same model as a directory that transformers reads; may be temporary."""
        ...


class DirectorySource:
    """``config.json``, safetensors and tokenizer in one directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def path(self) -> Path:
        """The directory."""
        return self._path

    def model_config(self) -> ModelConfig:
        """From ``config.json`` and ``generation_config.json``."""
        return ModelConfig.from_directory(self._path)

    def open_checkpoint(self) -> AbstractContextManager[Checkpoint]:
        """The safetensors, memory-mapped."""
        return SafetensorsCheckpoint(self._path)

    def hf_directory(self) -> AbstractContextManager[Path]:
        """The directory itself."""
        return nullcontext(self._path)


class GgufCheckpoint:
    """The tensors of a GGUF file; each is dequantised to fp32 when it is read."""

    def __init__(self, source: GgufSource) -> None:
        self._file = source.file

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, without reading one."""
        return self._file.tensor_shapes()

    def read(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        """One tensor or a part of it, in fp32; all of it is dequantised."""
        return self._file.tensor(name)[part]


class GgufSource:
    """One GGUF file: configuration, tokenizer and tensors in one. Opening it parses the metadata, 1-2 s."""

    def __init__(self, path: Path) -> None:
        from pico_vllm.models.gguf import GgufFile

        self.file = GgufFile(path)

    @property
    def path(self) -> Path:
        """The file."""
        return self.file.path

    def model_config(self) -> ModelConfig:
        """From the metadata."""
        return ModelConfig.from_hf_config(self.file.config(), self.file.generation_config())

    def open_checkpoint(self) -> AbstractContextManager[Checkpoint]:
        """The tensors, dequantised one at a time."""
        return nullcontext(GgufCheckpoint(self))

    @contextmanager
    def hf_directory(self) -> Iterator[Path]:
        """A temporary conversion in fp32: exactly what was dequantised."""
        from pico_vllm.models.gguf import convert_gguf

        with tempfile.TemporaryDirectory(prefix="pico-vllm-gguf-") as work:
            yield convert_gguf(self.path, Path(work) / self.path.stem, dtype="float32")


def find_model(
    model: str | None, revision: str | None = None, *, progress: Callable[[str, int, int], None] | None = None
) -> ModelSource:
    """Find the model a user means.

    Args:
        model: a directory, a ``.gguf`` file, a hub id ``owner/name``, or None for the default model.
        revision: branch, tag or commit of a hub id.
        progress: called with (phase, done, total) while the default model is fetched.

    Raises:
        ConfigError: it is none of these, or the hub does not give it.
        WeightLoadError: the default model cannot be fetched, or the GGUF cannot be read.
    """
    try:
        path = None if model is None else Path(model).expanduser()
        is_local = path is None or path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such home directory, a NUL
        raise ConfigError(f"model={str(model)[:80]!r} is no path: {error}") from None
    if revision is not None and (is_local or not is_hub_id(str(model))):
        raise ConfigError(f"revision={revision!r} is only for hub ids (owner/name), and model is {model!r}")
    if path is None:
        return DirectorySource(ensure_default_model(cache_dir(), progress=progress))
    if path.is_dir():
        return DirectorySource(path)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return GgufSource(path)
    if is_local:
        raise ConfigError(f"model={model!r} is a file, but not a .gguf; give a directory, a .gguf file or a hub id")
    if is_hub_id(str(model)):
        return DirectorySource(fetch_from_hub(str(model), revision))
    raise ConfigError(
        f"model={model!r} does not exist; give a directory with config.json and *.safetensors, a .gguf file or a hub "
        "id (owner/name), or leave it out for the default model"
    )
