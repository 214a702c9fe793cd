"""From a checkpoint to the parameters of a model: fused, checked to the last key, in the dtype and place asked for.

A model declares its parameters (``TensorSpec``, ``LinearSpec``: which checkpoint tensors make which fused one, and
how tensor parallelism splits them). The loader knows files and nothing of architectures; a rank reads its own shards
and nothing else. Only safetensors are read: no pickle anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pico_vllm.distributed.sharding import Shard
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
    """One tensor taken as it is (norm weights, the embedding).

    Attributes:
        name: of the parameter.
        source: the checkpoint's tensor.
        shape: of the whole.
        num_units: the first dimension is split into so many units over the ranks; None = every rank has all of it.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    num_units: int | None = None


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
        num_units: column-parallel: the rows of each source are split over the ranks, so many units each (heads, say).
        splits_inputs: row-parallel: the columns are split over the ranks, whose results are partial sums. The bias is
            rank 0's, or it would be added once a rank.

    Without either, every rank has all of it. (Columns and rows of the parallel layers' names are those of W^T.)
    """

    name: str
    sources: tuple[str, ...]
    out_features: tuple[int, ...]
    in_features: int
    bias: bool = False
    tied_to: str | None = None
    num_units: tuple[int, ...] | None = None
    splits_inputs: bool = False


ParameterSpec = TensorSpec | LinearSpec


@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """Where and how parameters are kept, and which part of them.

    ``pack_linear`` is the backend's; it is called as soon as a matrix is complete, so that at most one exists twice.
    """

    dtype: torch.dtype
    device: torch.device
    pack_linear: PackLinear
    shard: Shard = field(default_factory=Shard)


class Checkpoint(Protocol):
    """Named tensors on disk."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, without reading one."""
        ...

    def read(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        """One tensor or a part of it (a slice for each of its first dimensions), on the CPU, in its saved dtype."""
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

    def read(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        """One tensor or a part of it, of which no more is read, on the CPU, in the dtype it was saved in."""
        file = self._file_of[name]
        tensor: torch.Tensor = file.get_slice(name)[part] if part else file.get_tensor(name)
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
@dataclass(frozen=True, slots=True)
class _Piece:
    """What a rank takes of one checkpoint tensor.

    Attributes:
        source: its name.
        num_rows: of the whole tensor.
        rows: [start, end) of the rank.
        columns: [start, end) of the rank; None = all, or the tensor has none.
    """

    source: str
    num_rows: int
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None

    @property
    def part(self) -> tuple[slice, ...]:
        """The slices; () = the whole tensor."""
        rows = slice(*self.rows)
        if self.columns is not None:
            return rows, slice(*self.columns)
        return () if self.rows == (0, self.num_rows) else (rows,)


#: Makes one parameter of its pieces, given the lengths of its other dimensions.
_Read = Callable[[Sequence[_Piece], tuple[int, ...]], torch.Tensor]


def load_parameters(
    specs: Sequence[ParameterSpec],
    checkpoint: Checkpoint,
    place: ParameterPlace,
    *,
    progress: Progress | None = None,
) -> Parameters:
    """Read every parameter, or the rank's shard of it, straight into its fused place.

    Args:
        specs: what the model wants.
        checkpoint: where it comes from; every tensor in it must be wanted, and every wanted one be in it.
        place: dtype, device, layout and shard of the result.
        progress: called with (parameters read, parameters in all).

    Raises:
        WeightLoadError: a tensor is missing, unexpected or mis-shaped; names it. Checked before anything is read.
    """
    _check_names_and_shapes(specs, checkpoint.shapes())

    def read(pieces: Sequence[_Piece], width: tuple[int, ...]) -> torch.Tensor:
        num_rows = sum(piece.rows[1] - piece.rows[0] for piece in pieces)
        fused = torch.empty((num_rows, *_width_of(pieces, width)), dtype=place.dtype, device=place.device)
        row = 0
        for piece in pieces:
            tensor = checkpoint.read(piece.source, piece.part)
            if tensor.dtype not in _SAVED_DTYPES:
                raise WeightLoadError(f"{piece.source} is saved as {tensor.dtype}; quantised weights are not read")
            fused[row : row + tensor.shape[0]].copy_(tensor)
            row += tensor.shape[0]
        return fused

    return _assemble(specs, read, place, progress)


def dummy_parameters(
    specs: Sequence[ParameterSpec],
    place: ParameterPlace,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Parameters:
    """Seeded random parameters: distinct storage for each, so that timing reads as much memory as a real model.

    Matrices are normal with standard deviation 0.02, norm weights 1 + normal * 0.1, biases normal * 0.02. Each is made
    as a whole, of which the rank keeps its shard: together all ranks have the same model as one.
    """
    generator = torch.Generator(device=place.device).manual_seed(seed)

    def read(pieces: Sequence[_Piece], width: tuple[int, ...]) -> torch.Tensor:
        shape = (sum(piece.num_rows for piece in pieces), *width)
        values = torch.empty(shape, dtype=torch.float32, device=place.device).normal_(generator=generator)
        is_norm = pieces[0].source.endswith("norm.weight")
        whole = (1 + 0.1 * values if is_norm else _DUMMY_STD * values).to(place.dtype)
        if not any(piece.part for piece in pieces):
            return whole
        each = whole.split([piece.num_rows for piece in pieces])
        return torch.cat([tensor[piece.part] for tensor, piece in zip(each, pieces, strict=True)])

    return _assemble(specs, read, place, progress)


def _assemble(
    specs: Sequence[ParameterSpec], read: _Read, place: ParameterPlace, progress: Progress | None
) -> Parameters:
    parameters: Parameters = {}
    for done, spec in enumerate(specs):
        if progress is not None:
            progress(done, len(specs))
        if isinstance(spec, TensorSpec):
            piece = _piece(spec.source, spec.shape[0], spec.num_units, place.shard)
            parameters[spec.name] = read([piece], spec.shape[1:])
        elif spec.tied_to is not None:
            tied = parameters[spec.tied_to]
            assert isinstance(tied, torch.Tensor)
            parameters[spec.name] = place.pack_linear(tied, None)
        else:
            parameters[spec.name] = _linear(spec, read, place)
    if progress is not None:
        progress(len(specs), len(specs))
    return parameters


def _linear(spec: LinearSpec, read: _Read, place: ParameterPlace) -> LinearWeight:
    shard = place.shard
    num_units = spec.num_units or (None,) * len(spec.sources)
    sizes = list(zip(spec.sources, spec.out_features, num_units, strict=True))
    columns = shard.rows(spec.in_features, spec.in_features) if spec.splits_inputs and shard.size > 1 else None
    weight_pieces = [_piece(f"{source}.weight", rows, units, shard, columns) for source, rows, units in sizes]
    weight = read(weight_pieces, (spec.in_features,))
    bias = None
    if spec.bias:
        bias = read([_piece(f"{source}.bias", rows, units, shard) for source, rows, units in sizes], ())
        if spec.splits_inputs and shard.rank > 0:
            bias = None
    return place.pack_linear(weight, bias)


def _piece(
    source: str, num_rows: int, num_units: int | None, shard: Shard, columns: tuple[int, int] | None = None
) -> _Piece:
    rows = (0, num_rows) if num_units is None else shard.rows(num_rows, num_units)
    return _Piece(source, num_rows, rows, columns)


def _width_of(pieces: Sequence[_Piece], width: tuple[int, ...]) -> tuple[int, ...]:
    """The other dimensions of a shard, given those of the whole."""
    columns = pieces[0].columns
    return width if columns is None else (columns[1] - columns[0],)


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
