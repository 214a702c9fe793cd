"""From a checkpoint to the parameters of a model: fused, checked to the last key, in the dtype and place asked for.

A model declares its parameters (``TensorSpec``, ``LinearSpec``: which checkpoint tensors make which fused one). The
loader knows files and nothing of architectures. Only safetensors are read: no pickle anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pico_vllm.errors import WeightLoadError
from pico_vllm.kernels.linear import LinearWeight

if TYPE_CHECKING:
    from pathlib import Path

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
#: Buffers that some exporters save although every model recomputes them.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
_SAVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DUMMY_STD = 0.02

Parameters = dict[str, torch.Tensor | LinearWeight]
PackLinear = Callable[[torch.Tensor, torch.Tensor | None], LinearWeight]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor taken as it is (norm weights, the embedding)."""

    name: str
    source: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One matrix product, fused from the rows of several checkpoint modules.

    Attributes:
        name: of the fused parameter.
        sources: checkpoint modules (``<source>.weight``, ``<source>.bias``), concatenated in this order.
        out_features: rows of each source.
        in_features: columns of all.
        bias: whether every source has one.
        tied_to: name of a TensorSpec whose matrix this is (a tied lm_head); nothing is read then.
    """

    name: str
    sources: tuple[str, ...]
    out_features: tuple[int, ...]
    in_features: int
    bias: bool = False
    tied_to: str | None = None


ParameterSpec = TensorSpec | LinearSpec


@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """Where and how parameters are kept.

    ``pack_linear`` is the backend's; it is called as soon as a matrix is complete, so that at most one exists twice.
    """

    dtype: torch.dtype
    device: torch.device
    pack_linear: PackLinear


class Checkpoint(Protocol):
    """Named tensors on disk."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, without reading one."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU, in the dtype it was saved in."""
        ...


# ---------------------------------------------------------------------------------------------------- safetensors
class SafetensorsCheckpoint:
    """A directory with ``model.safetensors``, or shards and their index; memory-mapped. Use as a context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}

    def __enter__(self) -> SafetensorsCheckpoint:
        from safetensors import SafetensorError, safe_open

        try:
            for path, expected in self._files().items():
                opened = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
                names = set(opened.keys())
                if missing := sorted((expected or names) - names):
                    raise WeightLoadError(f"{path} lacks {missing[0]!r}, which {INDEX_NAME} says it holds")
                self._file_of.update(dict.fromkeys(names, opened))  # also what the index does not name
        except (SafetensorError, OSError) as error:
            self._stack.close()
            raise WeightLoadError(f"{self._directory}: cannot read the safetensors: {error}") from None
        except WeightLoadError:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file_of.clear()
        self._stack.close()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, without reading one."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()}

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU, in the dtype it was saved in."""
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def _files(self) -> dict[Path, set[str] | None]:
        """Each file, with the names the index promises (None: whatever it holds)."""
        index_path = self._directory / INDEX_NAME
        if index_path.is_file():
            files: dict[Path, set[str] | None] = {}
            for name, file_name in _weight_map(index_path).items():
                path = self._directory / file_name
                if path.parent != self._directory:
                    raise WeightLoadError(f"{index_path} names {file_name!r}, which is not in the model directory")
                if not path.is_file():
                    raise WeightLoadError(f"{index_path} names {file_name!r}, which does not exist")
                names = files.setdefault(path, set())
                assert names is not None
                names.add(name)
            return files
        single = self._directory / SINGLE_NAME
        if single.is_file():
            return {single: None}
        found = sorted(p.name for p in self._directory.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".safetensors"))
        hint = f"found {', '.join(found[:3])}" if found else "found no weights at all"
        raise WeightLoadError(
            f"{self._directory} has neither {SINGLE_NAME} nor {INDEX_NAME} ({hint}); only safetensors are loaded"
        )


def _weight_map(index_path: Path) -> dict[str, str]:
    """Tensor name → file name."""
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightLoadError(f"{index_path} is not a safetensors index: {error!r}") from None
    if not isinstance(weight_map, dict) or not all(isinstance(file_name, str) for file_name in weight_map.values()):
        raise WeightLoadError(f"{index_path} is not a safetensors index: weight_map must map names to file names")
    return weight_map


# -------------------------------------------------------------------------------------------------------- loading
def load_parameters(
    specs: Sequence[ParameterSpec],
    checkpoint: Checkpoint,
    place: ParameterPlace,
    *,
    progress: Progress | None = None,
) -> Parameters:
    """Read every parameter straight into its fused place.

    Args:
        specs: what the model wants.
        checkpoint: where it comes from; every tensor in it must be wanted, and every wanted one be in it.
        place: dtype, device and layout of the result.
        progress: called with (parameters read, parameters in all).

    Raises:
        WeightLoadError: a tensor is missing, unexpected or mis-shaped; names it. Checked before anything is read.
    """
    _check_names_and_shapes(specs, checkpoint.shapes())

    def read(sources: Sequence[str], shape: Sequence[int]) -> torch.Tensor:
        fused = torch.empty(tuple(shape), dtype=place.dtype, device=place.device)
        row = 0
        for source in sources:
            tensor = checkpoint.read(source)
            if tensor.dtype not in _SAVED_DTYPES:
                raise WeightLoadError(f"{source} is saved as {tensor.dtype}; quantised weights are not read")
            fused[row : row + tensor.shape[0]].copy_(tensor)
            row += tensor.shape[0]
        return fused

    return _assemble(specs, read, place.pack_linear, progress)


def dummy_parameters(
    specs: Sequence[ParameterSpec],
    place: ParameterPlace,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Parameters:
    """Seeded random parameters: distinct storage for each, so that timing reads as much memory as a real model.

    Matrices are normal with standard deviation 0.02, norm weights 1 + normal * 0.1, biases normal * 0.02.
    """
    generator = torch.Generator(device=place.device).manual_seed(seed)

    def read(sources: Sequence[str], shape: Sequence[int]) -> torch.Tensor:
        values = torch.empty(tuple(shape), dtype=torch.float32, device=place.device).normal_(generator=generator)
        is_norm = sources[0].endswith("norm.weight")
        return (1 + 0.1 * values if is_norm else _DUMMY_STD * values).to(place.dtype)

    return _assemble(specs, read, place.pack_linear, progress)


def _assemble(
    specs: Sequence[ParameterSpec],
    read: Callable[[Sequence[str], Sequence[int]], torch.Tensor],
    pack_linear: PackLinear,
    progress: Progress | None,
) -> Parameters:
    parameters: Parameters = {}
    for done, spec in enumerate(specs):
        if progress is not None:
            progress(done, len(specs))
        if isinstance(spec, TensorSpec):
            parameters[spec.name] = read([spec.source], spec.shape)
        elif spec.tied_to is not None:
            tied = parameters[spec.tied_to]
            assert isinstance(tied, torch.Tensor)
            parameters[spec.name] = pack_linear(tied, None)
        else:
            rows = sum(spec.out_features)
            weight = read([f"{source}.weight" for source in spec.sources], (rows, spec.in_features))
            bias = read([f"{source}.bias" for source in spec.sources], (rows,)) if spec.bias else None
            parameters[spec.name] = pack_linear(weight, bias)
    if progress is not None:
        progress(len(specs), len(specs))
    return parameters


def _expected_shapes(specs: Iterable[ParameterSpec]) -> dict[str, tuple[int, ...]]:
    expected: dict[str, tuple[int, ...]] = {}
    for spec in specs:
        if isinstance(spec, TensorSpec):
            expected[spec.source] = spec.shape
        elif spec.tied_to is None:
            for source, rows in zip(spec.sources, spec.out_features, strict=True):
                expected[f"{source}.weight"] = (rows, spec.in_features)
                if spec.bias:
                    expected[f"{source}.bias"] = (rows,)
    return expected


def _check_names_and_shapes(specs: Sequence[ParameterSpec], found: dict[str, tuple[int, ...]]) -> None:
    expected = _expected_shapes(specs)
    tied_specs = [spec for spec in specs if isinstance(spec, LinearSpec) and spec.tied_to]
    tied = {f"{source}.weight" for spec in tied_specs for source in spec.sources}
    if missing := [name for name in expected if name not in found]:
        raise WeightLoadError(f"the checkpoint lacks {_first(missing)}; does config.json belong to these weights?")
    unexpected = [n for n in found if n not in expected and n not in tied and not n.endswith(_IGNORED_SUFFIXES)]
    if unexpected:
        raise WeightLoadError(f"the checkpoint holds {_first(unexpected)}, which this model does not have")
    for name, shape in expected.items():
        if found[name] != shape:
            raise WeightLoadError(f"{name} has shape {list(found[name])}, but config.json asks for {list(shape)}")


def _first(names: list[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
