"""Points: the places in a forward pass at which engine and oracle are compared, in the order of execution.

A point has a name that both sides agree on ("layers.3.attention") and the op that produces it in the engine, so the
first point that differs names the op to look at.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """One place of comparison.

    Attributes:
        layer: index, or None outside the layers.
        name: of the sub-layer's output.
        op: the backend op that computes it.
    """

    layer: int | None
    name: str
    op: str

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


def points_of(num_layers: int) -> list[Point]:
    """Every point of a model, in the order of execution."""
    points = [Point(None, "embed_tokens", "embedding")]
    for layer in range(num_layers):
        points += [
            Point(layer, name, "add_rms_norm" if name == "input_layernorm" and layer > 0 else op)
            for name, op in LAYER_POINTS
        ]
    return [*points, Point(None, "norm", "add_rms_norm"), Point(None, "logits", "linear")]
