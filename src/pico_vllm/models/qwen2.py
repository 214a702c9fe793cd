"""Qwen2 and Qwen2.5: a pre-norm decoder with grouped-query attention, rotary positions and a gated feed-forward.

Reads top down: parameters, one layer, the whole model. Holds no request state: everything a step needs comes in a
``ForwardBatch``. Source: Yang et al. 2024 (Qwen2 technical report); ``Qwen2ForCausalLM`` of transformers 5.x.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from pico_vllm.kernels.attention import AttentionInputs, KVCacheShape
from pico_vllm.kernels.linear import LinearWeight
from pico_vllm.layers.attention import SelfAttention
from pico_vllm.layers.embedding import LMHead, VocabEmbedding
from pico_vllm.layers.linear import GatedLinear, Linear, PartialLinear
from pico_vllm.layers.mlp import GatedMLP
from pico_vllm.layers.norm import RMSNorm
from pico_vllm.layers.rotary_embedding import RotaryEmbedding
from pico_vllm.models.weights import LinearSpec, Parameters, ParameterSpec, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pico_vllm.config import ModelConfig
    from pico_vllm.distributed.tensor_parallel import TensorParallelGroup
    from pico_vllm.forward_batch import ForwardBatch
    from pico_vllm.kernels.backend import KernelBackend

#: Tokens a wanted row, from which on the last layer attends from the wanted rows alone, each a decode of its own.
FEW_WANTED = 16

_T = TypeVar("_T", torch.Tensor, LinearWeight)


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What the layers of one index are made of: its parameters, the configuration, the backend and the group.

    The configuration is that of one rank (``Shard.model_config``), the parameters are its shards.
    """

    config: ModelConfig
    index: int
    parameters: Parameters
    backend: KernelBackend
    group: TensorParallelGroup

    def linear(self, name: str) -> Linear:
        """The matrix product ``layers.<index>.<name>``."""
        return Linear(self._weight(name), self.backend)

    def partial_linear(self, name: str) -> PartialLinear:
        """The same, its sum left to the next norm."""
        return PartialLinear(self._weight(name), self.backend)

    def gated_linear(self, name: str) -> GatedLinear:
        """The same, its first half the gate of the second."""
        return GatedLinear(self._weight(name), self.backend)

    def norm(self, name: str) -> RMSNorm:
        """The norm ``layers.<index>.<name>``."""
        weight = _get(self.parameters, f"layers.{self.index}.{name}", torch.Tensor)
        return RMSNorm(weight, self.config.rms_norm_eps, self.backend, self.group)

    def _weight(self, name: str) -> LinearWeight:
        return _get(self.parameters, f"layers.{self.index}.{name}", LinearWeight)

    @property
    def head_shape(self) -> dict[str, int]:
        """num_heads, num_kv_heads and head_dim of this rank."""
        config = self.config
        return {
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
        }


class Qwen2DecoderLayer:
    """Attention and feed-forward, each on the normalised residual stream and added back to it."""

    def __init__(self, parts: LayerParts) -> None:
        self.input_layernorm = parts.norm("input_layernorm")
        self.self_attn = self.attention(parts)
        self.post_attention_layernorm = parts.norm("post_attention_layernorm")
        self.mlp = GatedMLP(parts.gated_linear("gate_up_proj"), parts.partial_linear("down_proj"))

    def attention(self, parts: LayerParts) -> SelfAttention:
        """Grouped-query attention; a model that normalises its heads says so here."""
        return SelfAttention(
            parts.linear("qkv_proj"),
            parts.partial_linear("o_proj"),
            **parts.head_shape,
            backend=parts.backend,
            qk_norm=None,
        )

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        rows: torch.Tensor | None = None,
        rows_metadata: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer.

        Args:
            x: [num_tokens, hidden_size], normalised by ``input_layernorm``.
            residual: [num_tokens, hidden_size].
            cos_sin: [num_tokens, head_dim].
            kv_cache: of this layer; written in place.
            metadata: of the backend, for this step.
            rows: [num_rows] tokens that are wanted of this layer, None = all: the others get their K and V only.
            rows_metadata: of the backend, for attention of ``rows`` alone; None = every token attends.

        Returns:
            (partial sums of the feed-forward, residual after attention), of [num_rows, hidden_size] each: the next norm
            adds them.
        """
        attended = self.self_attn(x, cos_sin, kv_cache, metadata, rows, rows_metadata)
        if rows is not None:
            residual = residual.index_select(0, rows)
        x, residual = self.post_attention_layernorm.add(attended, residual)
        return self.mlp(x), residual


class Qwen2ForCausalLM:
    """The whole model, or one rank's share of it.

    Args:
        config: of one rank (``Shard.model_config``).
        parameters: its shards.
        max_model_len: positions a sequence may have.
        backend: the ops.
        group: what makes the ranks one; it has the last word on everything that is split.
    """

    layer_class = Qwen2DecoderLayer

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        *,
        max_model_len: int,
        backend: KernelBackend,
        group: TensorParallelGroup,
    ) -> None:
        self.config = config
        self._backend = backend
        embedding = _get(parameters, "embed_tokens", torch.Tensor)
        self.embed_tokens = VocabEmbedding(embedding, group)
        self.rotary_emb = RotaryEmbedding(
            config.rope, config.head_dim, max_model_len, embedding.dtype, embedding.device
        )
        self.layers = [
            self.layer_class(LayerParts(config, i, parameters, backend, group)) for i in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm(_get(parameters, "norm", torch.Tensor), config.rms_norm_eps, backend, group)
        self.lm_head = LMHead(_get(parameters, "lm_head", LinearWeight), group)

    def __call__(self, batch: ForwardBatch, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run one step; writes the new tokens' K and V into ``kv_caches``.

        Args:
            batch: tokens, positions and lengths of the step.
            kv_caches: one [num_blocks, 2, num_kv_heads, block_size, head_dim] a layer.

        Returns:
            Logits [num_rows, vocab_size] of the tokens in ``batch.logits_indices``.
        """
        return self.lm_head(self.hidden_rows(batch, kv_caches))

    def hidden_rows(self, batch: ForwardBatch, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        """``__call__`` without the lm_head: [num_rows, hidden_size], normalised, of the wanted tokens."""
        metadata, wanted_metadata = self.attention_metadata(batch, kv_caches)
        cos_sin = self.rotary_emb(batch.positions)
        residual = self.embed_tokens(batch.input_ids)
        x = self.layers[0].input_layernorm(residual)
        for layer, kv_cache, next_layer in zip(self.layers[:-1], kv_caches[:-1], self.layers[1:], strict=True):
            partial, residual = layer(x, residual, cos_sin, kv_cache, metadata)
            x, residual = next_layer.input_layernorm.add(partial, residual)
        # Of the last layer nobody reads a row that isn't wanted, but for its K and V: 1/28 of a prompt.
        wanted = batch.logits_indices, wanted_metadata
        partial, residual = self.layers[-1](x, residual, cos_sin, kv_caches[-1], metadata, *wanted)
        x, _ = self.norm.add(partial, residual)
        return x

    def attention_metadata(self, batch: ForwardBatch, kv_caches: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """Of the backend for a step: of all its tokens, and of the wanted ones alone if those are few (else None)."""
        kv_shape = KVCacheShape(num_kv_heads=self.config.num_key_value_heads, block_size=kv_caches[0].shape[3])
        inputs = AttentionInputs(
            slot_mapping=batch.slot_mapping,
            block_tables=batch.block_tables,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            num_decode_reqs=batch.num_decode_reqs,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            prefill_seq_len=batch.prefill_seq_len,
            decodes_only=batch.decodes_only,
            decode_order=batch.decode_order,
        )
        metadata = self._backend.prepare_attention(inputs, kv_shape)
        return metadata, self._metadata_of_wanted(batch, kv_shape)

    def _metadata_of_wanted(self, batch: ForwardBatch, kv_shape: KVCacheShape) -> Any:
        """Metadata under which each wanted token is a decode that ends at its own position; None if they are many."""
        rows = batch.logits_indices
        if rows is None or len(rows) * FEW_WANTED > len(batch.input_ids):
            return None
        seqs = torch.searchsorted(batch.query_start_loc, rows, right=True) - 1  # the last one that has begun
        seqs.clamp_(max=len(batch.seq_lens) - 1)  # of a step that is nothing but padding
        inputs = AttentionInputs(
            slot_mapping=batch.slot_mapping,
            block_tables=batch.block_tables.index_select(0, seqs),
            query_start_loc=torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
            seq_lens=batch.positions.index_select(0, rows) + 1,
            num_decode_reqs=len(rows),
            max_query_len=1,
            max_seq_len=batch.max_seq_len,
        )
        return self._backend.prepare_attention(inputs, kv_shape)

    def outermost_layers(self, kv_caches: Sequence[torch.Tensor]) -> tuple[Self, list[torch.Tensor]]:
        """This model with its first and its last layer only, and their KV caches.

        It launches every kernel that the whole model launches: a quick way to compile and load them.
        """
        shallow = copy.copy(self)
        kept = sorted({0, len(self.layers) - 1})
        shallow.layers = [self.layers[i] for i in kept]
        return shallow, [kv_caches[i] for i in kept]

    @classmethod
    def parameter_specs(cls, config: ModelConfig) -> list[ParameterSpec]:
        """What the checkpoint must hold, how it is fused (q, k, v; gate and up), and how it is split over ranks.

        Column-parallel are qkv by heads and gate and up by features, row-parallel o and down, and embedding and lm_head
        are split by tokens of the vocabulary.
        """
        hidden, vocab = config.hidden_size, config.vocab_size
        specs: list[ParameterSpec] = [
            TensorSpec("embed_tokens", "model.embed_tokens.weight", (vocab, hidden), num_units=vocab)
        ]
        for i in range(config.num_hidden_layers):
            specs += cls.layer_specs(config, f"layers.{i}", f"model.layers.{i}")
        tied_to = "embed_tokens" if config.tie_word_embeddings else None
        specs += [
            TensorSpec("norm", "model.norm.weight", (hidden,)),
            LinearSpec("lm_head", ("lm_head",), (vocab,), hidden, tied_to=tied_to, num_units=(vocab,)),
        ]
        return specs

    @classmethod
    def layer_specs(cls, config: ModelConfig, ours: str, theirs: str) -> list[ParameterSpec]:
        """Parameters of one layer; ``ours`` and ``theirs`` are the prefixes of its names here and in the checkpoint."""
        hidden, ffn = config.hidden_size, config.intermediate_size
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        q_size, kv_size = heads * config.head_dim, kv_heads * config.head_dim
        qkv_units, gate_up_units = (heads, kv_heads, kv_heads), (ffn, ffn)
        qkv = tuple(f"{theirs}.self_attn.{name}_proj" for name in "qkv")
        gate_up = (f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj")
        o_bias, mlp_bias = config.attention_output_bias, config.mlp_bias
        return [
            TensorSpec(f"{ours}.input_layernorm", f"{theirs}.input_layernorm.weight", (hidden,)),
            LinearSpec(
                f"{ours}.qkv_proj", qkv, (q_size, kv_size, kv_size), hidden, config.qkv_bias, num_units=qkv_units
            ),
            LinearSpec(
                f"{ours}.o_proj", (f"{theirs}.self_attn.o_proj",), (hidden,), q_size, o_bias, splits_inputs=True
            ),
            TensorSpec(f"{ours}.post_attention_layernorm", f"{theirs}.post_attention_layernorm.weight", (hidden,)),
            LinearSpec(f"{ours}.gate_up_proj", gate_up, (ffn, ffn), hidden, mlp_bias, num_units=gate_up_units),
            LinearSpec(f"{ours}.down_proj", (f"{theirs}.mlp.down_proj",), (hidden,), ffn, mlp_bias, splits_inputs=True),
        ]


def _get(parameters: Parameters, name: str, kind: type[_T]) -> _T:
    parameter = parameters[name]
    assert isinstance(parameter, kind), f"{name} is a {type(parameter).__name__}"
    return parameter
