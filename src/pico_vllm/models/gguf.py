"""GGUF checkpoints: metadata, tensors and tokenizer of one file, in the form of a HuggingFace model directory.

Owns the mapping from llama.cpp's names, row order and quantisation blocks to HF's names, row order and plain tensors.
Knows nothing of our layers: what it yields is what a safetensors checkpoint of the same model would hold.
Called by the weight loader (``--model file.gguf``) and by ``default_model`` (which converts once into the cache).
Reading the metadata takes 1-2 s for a vocabulary of 50,000: open one ``GgufFile`` and ask it for everything.

Source: the GGUF specification (ggml, docs/gguf.md); names and row order as in llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pico_vllm.errors import ConfigError, WeightLoadError
from pico_vllm.models.checkpoint_directory import publish_checkpoint, scratch_directory
from pico_vllm.models.gguf_tokenizer import build_tokenizer_files

if TYPE_CHECKING:
    from gguf import ReaderTensor

ProgressCallback = Callable[[str, int, int], None]
"""Called with (stage, done, total); the unit of done and total belongs to the stage."""

SUPPORTED_TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
_HF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"  # llama3 frequency factors: configuration stored as a tensor


class GgufFile:
    """One GGUF file, memory-mapped; its metadata is parsed once.

    Args:
        path: the ``.gguf`` file.

    Raises:
        WeightLoadError: the file is missing or is not a whole, little-endian, single-file GGUF.
        ConfigError: its architecture is not one of llama, qwen2, qwen3.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from gguf import GGUFReader

        self.path = Path(path)
        if not self.path.is_file():
            raise WeightLoadError(f"{self.path}: no such file")
        try:
            self._reader = GGUFReader(self.path)
        except (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
            raise WeightLoadError(f"{self.path}: not a readable GGUF file ({error})") from error
        if self._reader.byte_order != "I":
            raise WeightLoadError(f"{self.path}: a GGUF file of the other byte order; convert it for this machine")
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if int(self.get("split.count", 1)) > 1:
            raise WeightLoadError(
                f"{self.path}: a GGUF split over several files; merge them (llama-gguf-split --merge)"
            )
        self.architecture = str(self._require("general.architecture"))
        if self.architecture not in _HF_ARCHITECTURES:
            supported = ", ".join(_HF_ARCHITECTURES)
            raise ConfigError(
                f"{self.path}: GGUF architecture {self.architecture!r} is not supported (supported: {supported})"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """Return the metadata value of a key (a list for an array), or ``default``."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def config(self) -> dict[str, Any]:
        """Return what this model's HF ``config.json`` would say, with dtype bfloat16.

        Raises:
            ConfigError: a value is missing, or asks for something the engine does not compute.
        """
        num_heads = self._uniform("attention.head_count")
        hidden_size = self._uniform("embedding_length")
        head_dim = self._uniform("attention.key_length", hidden_size // num_heads)
        rope_theta = _shortest_float(self._arch_value("rope.freq_base", 10000.0))
        self._refuse_unsupported(head_dim)

        config: dict[str, Any] = {
            "architectures": [_HF_ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self._vocab_size(),
            "hidden_size": hidden_size,
            "intermediate_size": self._uniform("feed_forward_length"),
            "num_hidden_layers": self._uniform("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._uniform("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self._uniform("context_length"),
            "rms_norm_eps": _shortest_float(self._arch_value("attention.layer_norm_rms_epsilon")),
            "rope_theta": rope_theta,
            "rope_scaling": self._rope_scaling(rope_theta, head_dim),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.get("tokenizer.ggml.padding_token_id"),
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",  # the name of the same thing before transformers 4.56
        }
        if self.architecture != "qwen2":
            config["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
        if self.architecture == "llama":
            config["mlp_bias"] = "blk.0.ffn_gate.bias" in self._tensors
        return config

    def generation_config(self) -> dict[str, Any]:
        """Return what this model's HF ``generation_config.json`` would say: every id that ends a turn counts as eos."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        found = (self.get(f"tokenizer.ggml.{key}") for key in keys)
        eos_token_ids = list(dict.fromkeys(token_id for token_id in found if token_id is not None))
        ids = {
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": eos_token_ids[0] if len(eos_token_ids) == 1 else eos_token_ids or None,
            "pad_token_id": self.get("tokenizer.ggml.padding_token_id"),
        }
        return {key: value for key, value in ids.items() if value is not None}

    def tokenizer_files(self) -> dict[str, str]:
        """Return the text of ``tokenizer.json`` and ``tokenizer_config.json``, keyed by file name.

        Raises:
            ConfigError: the tokenizer is not byte-level BPE, or its pre-tokenizer is not supported.
        """
        return build_tokenizer_files(self.get, source=str(self.path))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HF name, tensor), dequantised one at a time.

        Yields:
            A contiguous float32 tensor of HF's shape that owns its memory. A file whose tensors are 1.5 B weights
            needs the memory of one of them, not of all.

        Raises:
            WeightLoadError: a tensor's name or type is not supported; names it.
        """
        for name in self.tensor_shapes():
            yield name, self.tensor(name)

    def tensor(self, hf_name: str) -> torch.Tensor:
        """Return one tensor by its HF name, dequantised, as ``tensors`` yields it."""
        tensor = self._by_hf_name[hf_name]
        weight = torch.from_numpy(_dequantize(tensor, self.path))
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if part in self._permuted_head_counts:
            weight = _undo_permutation(weight, self._permuted_head_counts[part])
        return weight

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor's HF name and shape without reading its data, in the order of ``tensors``."""
        return {name: _shape(tensor) for name, tensor in self._by_hf_name.items()}

    @cached_property
    def _by_hf_name(self) -> dict[str, ReaderTensor]:
        return {self._hf_name(name): tensor for name, tensor in self._tensors.items() if name != _ROPE_FACTORS}

    def _hf_name(self, name: str) -> str:
        if name in _TOP_LEVEL_NAMES:
            return _TOP_LEVEL_NAMES[name]
        match = _LAYER_TENSOR.fullmatch(name)
        if match is None or match[2] not in _LAYER_NAMES:
            raise WeightLoadError(
                f"{self.path}: tensor {name!r} is not part of a {self.architecture} model that the engine computes"
            )
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"

    @cached_property
    def _permuted_head_counts(self) -> dict[str, int]:
        """Which projections llama.cpp stores with permuted rows, with their heads: q and k of architecture llama."""
        if self.architecture != "llama":
            return {}
        num_heads = self._uniform("attention.head_count")
        return {"attn_q": num_heads, "attn_k": self._uniform("attention.head_count_kv", num_heads)}

    def _require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self.path}: the GGUF metadata has no {key!r}")
        return value

    def _arch_value(self, name: str, default: Any = None) -> Any:
        key = f"{self.architecture}.{name}"
        return self._require(key) if default is None else self.get(key, default)

    def _uniform(self, name: str, default: int | None = None) -> int:
        """One integer for the whole model; llama.cpp may store it once a layer."""
        value = self._arch_value(name, default)
        values = set(value) if isinstance(value, list) else {value}
        if len(values) != 1:
            raise ConfigError(f"{self.path}: {self.architecture}.{name} differs between layers, which is not supported")
        return int(values.pop())

    def _vocab_size(self) -> int:
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise WeightLoadError(f"{self.path}: tensor 'token_embd.weight' is missing")
        return _shape(embedding)[0]

    def _refuse_unsupported(self, head_dim: int) -> None:
        required = {
            "attention.value_length": head_dim,
            "rope.dimension_count": head_dim,  # partial rotary embeddings
            "expert_count": 0,
            "attention.sliding_window": 0,
        }
        for name, expected in required.items():
            value = self._arch_value(name, expected)
            if value != expected:
                raise ConfigError(
                    f"{self.path}: {self.architecture}.{name} = {value} is not supported (only {expected})"
                )

    def _rope_scaling(self, rope_theta: float, head_dim: int) -> dict[str, Any] | None:
        factors = self._tensors.get(_ROPE_FACTORS)
        kind = self._arch_value("rope.scaling.type", "none")
        if factors is not None:
            return _llama3_rope_scaling(_dequantize(factors, self.path), rope_theta, head_dim, self.path)
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise ConfigError(f"{self.path}: RoPE scaling {kind!r} is not supported (supported: linear, yarn, llama3)")
        scaling = {"rope_type": kind, "factor": _shortest_float(self._arch_value("rope.scaling.factor"))}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self._uniform("rope.scaling.original_context_length")
            if self._arch_value("rope.scaling.attn_factor", 1.0) != 1.0:
                raise ConfigError(f"{self.path}: {self.architecture}.rope.scaling.attn_factor is not supported")
        return scaling


def gguf_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the HF ``config.json`` of a GGUF file; see ``GgufFile.config``."""
    return GgufFile(path).config()


def gguf_tokenizer_files(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return ``tokenizer.json`` and ``tokenizer_config.json`` of a GGUF file; see ``GgufFile.tokenizer_files``."""
    return GgufFile(path).tokenizer_files()


def iter_gguf_tensors(path: str | os.PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (HF name, float32 tensor) of a GGUF file, one at a time; see ``GgufFile.tensors``."""
    yield from GgufFile(path).tensors()


def convert_gguf(
    path: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    dtype: str = "bfloat16",
    progress: ProgressCallback | None = None,
) -> Path:
    """Write a GGUF file as a HF model directory, atomically: ``out_dir`` appears complete or not at all.

    Two processes may convert to the same place at once: the first to finish wins and the other takes its result.

    Args:
        path: the ``.gguf`` file.
        out_dir: the directory to create. An incomplete one (a file missing or empty) is replaced.
        dtype: of the written weights: bfloat16, float16 or float32.
        progress: called with ("convert", tensors done, tensors in all).

    Returns:
        ``out_dir``, which now holds ``CHECKPOINT_FILES``.

    Raises:
        ConfigError, WeightLoadError: as ``GgufFile``'s methods; nothing is left behind.
    """
    if dtype not in _SAFETENSORS_DTYPES:
        raise ConfigError(f"cannot convert to dtype {dtype!r} (supported: {', '.join(_SAFETENSORS_DTYPES)})")
    source, out_dir = GgufFile(path), Path(out_dir)
    with scratch_directory(out_dir.parent) as scratch:
        config = source.config() | {"dtype": dtype, "torch_dtype": dtype}
        texts = source.tokenizer_files()
        texts["config.json"] = json.dumps(config, indent=2) + "\n"
        texts["generation_config.json"] = json.dumps(source.generation_config(), indent=2) + "\n"
        for name, text in texts.items():
            (scratch / name).write_text(text, encoding="utf-8")
        _write_safetensors(scratch / "model.safetensors", source, dtype, progress)
        publish_checkpoint(scratch, out_dir)
    return out_dir


def _write_safetensors(path: Path, source: GgufFile, dtype: str, progress: ProgressCallback | None) -> None:
    """Stream the tensors to a safetensors file, one in memory at a time.

    Format: u64 header length, JSON header of {name: dtype, shape, [start, end) in the data}, data.
    """
    torch_dtype: torch.dtype = getattr(torch, dtype)
    shapes = source.tensor_shapes()
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + int(np.prod(shape)) * torch_dtype.itemsize
        header[name] = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors start aligned

    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for done, (name, tensor) in enumerate(source.tensors(), start=1):
            assert tuple(tensor.shape) == shapes[name], (name, tensor.shape, shapes[name])
            file.write(tensor.to(torch_dtype).view(torch.uint8).numpy().data)
            if progress is not None:
                progress("convert", done, len(shapes))


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))  # GGUF lists the fastest dimension first


def _dequantize(tensor: ReaderTensor, path: Path) -> np.ndarray:
    """Return a tensor's values as float32 in an array of its own, in HF's shape."""
    from gguf.quants import dequantize

    if tensor.tensor_type.name not in SUPPORTED_TENSOR_TYPES:
        raise WeightLoadError(
            f"{path}: tensor {tensor.name!r} has type {tensor.tensor_type.name}, which is not supported "
            f"(supported: {', '.join(SUPPORTED_TENSOR_TYPES)})"
        )
    values = dequantize(tensor.data, tensor.tensor_type)
    return np.array(values, dtype=np.float32).reshape(_shape(tensor))


def _undo_permutation(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Put the rows of a q or k projection (weight or bias) back into HF's order.

    Within a head llama.cpp interleaves the two halves that RoPE rotates: row 2i + j of the file is row j * half + i.
    """
    half = weight.shape[0] // num_heads // 2
    interleaved = weight.view(num_heads, half, 2, *weight.shape[1:])
    return interleaved.transpose(1, 2).reshape(weight.shape)


def _shortest_float(value: Any) -> float:
    """The float64 that prints like the float32 in the file: 1e-05, not 9.999999747378752e-06."""
    single = np.float32(value)
    return float(str(single)) if float(single) == float(value) else float(value)


def _llama3_rope_scaling(factors: np.ndarray, rope_theta: float, head_dim: int, path: Path) -> dict[str, Any]:
    """Recover HF's llama3 parameters from the frequency factors, or refuse.

    The file holds the result of the formula, not its parameters. Every published Llama 3.x uses low 1, high 4 and an
    original context of 8192; only the factor varies, and it is the largest value. The formula must give the file back.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": _shortest_float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = 2 * np.pi * rope_theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (8192 / wavelengths - 1.0) / (4.0 - 1.0)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    expected = np.where(wavelengths < 8192 / 4.0, 1.0, np.where(wavelengths > 8192 / 1.0, scaling["factor"], expected))
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ConfigError(f"{path}: the RoPE frequency factors in {_ROPE_FACTORS!r} are not those of a Llama 3 model")
    return scaling
