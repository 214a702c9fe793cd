"""Points: the places in a forward pass at which engine and oracle are compared, in the order of execution.

A point has a name that both sides agree on ("layers.3.attention") and the op that produces it in the engine, so the
first point that differs names the op to look at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pico_vllm.config import ModelConfig
    from pico_vllm.distributed.sharding import Shard


@dataclass(frozen=True, slots=True)
class Point:
    """One place of comparison.

    Attributes:
        layer: index, or None outside the layers.
        name: of the sub-layer's output.
        op: the backend op that computes it.
        is_of_wanted: computed only for the tokens whose logits are wanted, in their order.
    """

    layer: int | None
    name: str
    op: str
    is_of_wanted: bool = False

    @property
    def key(self) -> str:
        """The name both sides use."""
        return self.name if self.layer is None else f"layers.{self.layer}.{self.name}"


#: Sub-layers of one decoder layer in the order of execution, with the op that makes each.
LAYER_POINTS = (
    ("input_layernorm", "rms_norm"),
    ("qkv_proj", "linear"),
    ("query", "rotary_embedding_and_store_kv"),  # after the head norm, where a model has one, and the rotation
    ("key", "rotary_embedding_and_store_kv"),  # the same, as it is in the cache
    ("value", "rotary_embedding_and_store_kv"),  # as it is in the cache
    ("attention", "paged_attention"),
    ("o_proj", "partial_linear"),
    ("attention_residual", "add_rms_norm"),
    ("post_attention_layernorm", "add_rms_norm"),
    ("gate_up_proj", "gated_linear"),  # the product before it is gated: by ``linear``, with what the op was given
    ("activation", "gated_linear"),
    ("down_proj", "partial_linear"),
    ("residual", "add_rms_norm"),
)


#: The last layer makes these of every token, and the rest of the wanted ones.
_MADE_OF_EVERY_TOKEN = {name for name, _ in LAYER_POINTS[: LAYER_POINTS.index(("attention", "paged_attention")) + 1]}


def points_of(num_layers: int) -> list[Point]:
    """Every point of a model, in the order of execution."""
    points = [Point(None, "embed_tokens", "embedding")]
    for layer in range(num_layers):
        for name, op in LAYER_POINTS:
            fused_op = "add_rms_norm" if name == "input_layernorm" and layer > 0 else op
            is_of_wanted = layer == num_layers - 1 and name not in _MADE_OF_EVERY_TOKEN
            points.append(Point(layer, name, fused_op, is_of_wanted))
    return [*points, Point(None, "norm", "add_rms_norm", True), Point(None, "logits", "linear", True)]


def points_of_rank(config: ModelConfig, shard: Shard) -> dict[Point, list[tuple[int, int]] | None]:
    """The points at which one rank can be compared, and the columns [start, end) of them that it has; None = all.

    A product whose result is a partial sum cannot be compared by itself; what it is added to can. With one rank there
    is no such product, and every point is whole.
    """
    if shard.size == 1:
        return dict.fromkeys(points_of(config.num_hidden_layers))
    heads, kv_heads, ffn = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    q_size, kv_size = heads * config.head_dim, kv_heads * config.head_dim
    query, key = shard.rows(q_size, heads), shard.rows(kv_size, kv_heads)
    features = shard.units(ffn)
    columns = {
        "qkv_proj": [query, _moved(key, q_size), _moved(key, q_size + kv_size)],
        "query": [query],
        "key": [key],
        "value": [key],
        "attention": [query],
        "gate_up_proj": [features, _moved(features, ffn)],
        "activation": [features],
    }
    points = [point for point in points_of(config.num_hidden_layers) if point.op != "partial_linear"]
    return {point: columns.get(point.name) for point in points}


def _moved(interval: tuple[int, int], offset: int) -> tuple[int, int]:
    return interval[0] + offset, interval[1] + offset
