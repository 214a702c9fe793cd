"""OverlappedModel: the same forward pass in tiles of tokens: one is summed over the ranks while another is computed.

Between two attentions a token needs no other: o, norm, feed-forward, norm, qkv. So the tokens of a step are cut into
tiles; what a tile needs summed is begun, and left alone while the next tile's products run. Attention sees all tokens.

    compute  o A ─ o B ─ mlp A ──── mlp B ──── qkv A ─ qkv B ─ attention of all ─ o A …
    links        sum A ── sum B ──       sum A ── sum B

Every token is computed as in the plain pass, with fewer tokens beside it in a product. Which tiles a step has is
decided in ``token_tiles``. Chosen by ModelRunner; knows any model whose layers are of Qwen2's kind.

Source: the two halves of a batch that take turns are those of DeepSeek-AI 2024 (DeepSeek-V3, section 3.4).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Self

import torch

from pico_vllm.models.token_tiles import Product, choose_cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pico_vllm.config import ModelConfig
    from pico_vllm.distributed.tensor_parallel import Pending
    from pico_vllm.forward_batch import ForwardBatch
    from pico_vllm.layers.embedding import LMHead
    from pico_vllm.models.qwen2 import Qwen2DecoderLayer, Qwen2ForCausalLM


class OverlappedModel:
    """A model that runs in tiles of tokens; a step for which one is faster is the model's own.

    Args:
        model: whose layers run.
        num_sms: of the device; None = on a CPU.
        is_replayed: whether its passes are captured, and cost the host nothing.
    """

    def __init__(self, model: Qwen2ForCausalLM, num_sms: int | None, *, is_replayed: bool = False) -> None:
        self.model = model
        self._num_sms, self._is_replayed = num_sms, is_replayed
        self.config: ModelConfig = model.config
        self.lm_head: LMHead = model.lm_head
        layer = model.layers[0]
        qkv, o, gate_up, down = (
            product.weight
            for product in (
                layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj,
            )
        )  # fmt: skip
        self._products = (
            *(Product(weight.out_features, weight.in_features) for weight in (qkv, o, down)),
            Product(gate_up.out_features // 2, gate_up.in_features, is_gated=True),
        )
        self._row_bytes = model.embed_tokens.weight[0].nbytes

    def tiles(self, num_tokens: int) -> list[slice]:
        """Of a step of so many tokens."""
        cut = choose_cut(num_tokens, self._products, self._row_bytes, self._num_sms, self._is_replayed)
        return [slice(0, num_tokens)] if cut is None else [slice(0, cut), slice(cut, num_tokens)]

    def __call__(self, batch: ForwardBatch, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        """As of the model."""
        return self.lm_head(self.hidden_rows(batch, kv_caches))

    def hidden_rows(self, batch: ForwardBatch, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        """As of the model: [num_rows, hidden_size], normalised, of the wanted tokens."""
        tiles = self.tiles(len(batch.input_ids))
        if len(tiles) == 1:
            return self.model.hidden_rows(batch, kv_caches)
        model = self.model
        metadata, wanted_metadata = model.attention_metadata(batch, kv_caches)
        cos_sin = model.rotary_emb(batch.positions)
        residual = model.embed_tokens(batch.input_ids)
        first = model.layers[0].input_layernorm(residual)
        pending = [_ready(first[tile], residual[tile]) for tile in tiles]
        for layer, kv_cache, next_layer in zip(model.layers[:-1], kv_caches[:-1], model.layers[1:], strict=True):
            attention = layer.self_attn
            qkv = first.new_empty(len(first), attention.qkv_proj.weight.out_features)
            residuals = []
            for tile, finish in zip(tiles, pending, strict=True):
                x, residual = finish()
                residuals.append(residual)
                attention.qkv_proj(x, qkv[tile])
            attended = attention.attend(qkv, cos_sin, kv_cache, metadata)
            pending = [
                layer.post_attention_layernorm.start_add(attention.o_proj(attended[tile]), residual)
                for tile, residual in zip(tiles, residuals, strict=True)
            ]
            pending = [_feed_forward(layer, next_layer, finish) for finish in pending]
        # Of the last layer only the wanted rows are computed: too few for tiles.
        done = [finish() for finish in pending]
        x, residual = (torch.cat(parts) for parts in zip(*done, strict=True))
        wanted = batch.logits_indices, wanted_metadata
        partial, residual = model.layers[-1](x, residual, cos_sin, kv_caches[-1], metadata, *wanted)
        x, _ = model.norm.add(partial, residual)
        return x

    def replayed(self) -> OverlappedModel:
        """The same model for passes that are captured."""
        return OverlappedModel(self.model, self._num_sms, is_replayed=True)

    def outermost_layers(self, kv_caches: Sequence[torch.Tensor]) -> tuple[Self, list[torch.Tensor]]:
        """As of the model."""
        shallow = copy.copy(self)
        shallow.model, caches = self.model.outermost_layers(kv_caches)
        return shallow, caches


def _feed_forward(layer: Qwen2DecoderLayer, next_layer: Qwen2DecoderLayer, finish: Pending) -> Pending:
    """The second half of a layer for one tile, up to the next layer's norm."""
    x, residual = finish()
    return next_layer.input_layernorm.start_add(layer.mlp(x), residual)


def _ready(x: torch.Tensor, residual: torch.Tensor) -> Pending:
    return lambda: (x, residual)
