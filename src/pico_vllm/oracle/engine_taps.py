"""EngineTaps: what the engine computed at every point, for every position of every request.

A recording backend sees each op with its arguments; the parameter an op was called with says where in the model it is.
Steps mix chunks and decodes of many requests: the scheduler's plan says which rows belong to whom, and the rows are
put back together by position. What follows the attention of the last layer has rows of the wanted tokens only: of those
that were sampled from, then of those whose prompt logprobs were asked for. Nothing in the engine knows that it is
watched.

Of several ranks this one is watched: what is split (``points_of_rank``) has its columns only. What all ranks make
together is taken where it is used next: the vectors of tokens where they are normalised, logits where they are sampled.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pico_vllm.engine.core_client import core_in_this_process
from pico_vllm.kernels.backend import recording
from pico_vllm.oracle.points import points_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pico_vllm.engine.llm_engine import LLMEngine
    from pico_vllm.scheduler_output import SchedulerOutput

#: {point key: [num_positions, width]} of one sequence; see ``EngineTaps.positions``.
Taps = dict[str, torch.Tensor]


class EngineTaps:
    """Collects while ``watching``; ``taps(request_id)`` then gives one request's tensors."""

    def __init__(self, engine: LLMEngine) -> None:
        self._runner = core_in_this_process(engine.core).executor.runner
        self._name_of = {id(parameter): name for name, parameter in self._runner.parameters.items()}
        self._plain = self._runner.backend
        points = points_of(self._runner.model_config.num_hidden_layers)
        self._keys_of_wanted = {point.key for point in points if point.is_of_wanted}
        self._layer = -1
        self._step: dict[str, torch.Tensor] = {}
        self._prompt_logits: list[torch.Tensor] = []
        #: {request: {point: {position: row}}}; a position that is computed again (preemption) is overwritten.
        self._rows: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
        self._sampled: dict[str, set[int]] = {}

    @contextmanager
    def watching(self) -> Iterator[EngineTaps]:
        """Record every step that runs inside the block; the engine is as before afterwards."""
        runner = self._runner
        plain = self._plain = runner.backend
        runner.set_backend(recording(plain, self._tap))
        runner.step_observer = self._distribute
        try:
            yield self
        finally:
            runner.step_observer = None
            runner.set_backend(plain)

    def taps(self, request_id: str) -> Taps:
        """All points of one request, rows in the order of their positions."""
        points = self._rows[request_id]
        return {key: torch.stack([rows[p] for p in sorted(rows)]) for key, rows in points.items()}

    def positions(self, request_id: str) -> dict[str, list[int]]:
        """{point key: the positions of its rows}: every computed one, or the wanted ones where no other is computed."""
        return {key: sorted(rows) for key, rows in self._rows[request_id].items()}

    def sampled_positions(self, request_id: str) -> list[int]:
        """Positions whose next token was sampled."""
        return sorted(self._sampled[request_id])

    # --------------------------------------------------------------------------------------------------- private
    def _tap(self, op: str, args: tuple[Any, ...], result: Any) -> None:
        handler = getattr(self, f"_tap_{op}", None)
        if handler is not None:
            handler(args, result)

    def _tap_linear(self, args: tuple[Any, ...], result: torch.Tensor) -> None:
        name = self._name_of[id(args[1])]
        if name == "lm_head":
            return
        self._layer = int(name.split(".")[1])
        self._keep(name, result)

    def _tap_partial_linear(self, args: tuple[Any, ...], result: torch.Tensor) -> None:
        self._keep(self._name_of[id(args[1])], result if result.dim() == 2 else result.sum(dim=0).to(args[0].dtype))

    def _tap_gated_linear(self, args: tuple[Any, ...], result: torch.Tensor) -> None:
        """The product that is gated never leaves the op: it is computed once more, by the op ``linear``."""
        x, weight = args
        name = self._name_of[id(weight)]
        self._keep(name, self._plain.linear(x, weight))
        self._keep(f"layers.{self._layer}.activation", result)

    def _tap_rms_norm(self, args: tuple[Any, ...], result: torch.Tensor) -> None:
        self._keep("embed_tokens", args[0])
        self._keep(self._name_of[id(args[1])], result)

    def _tap_add_rms_norm(self, args: tuple[Any, ...], result: tuple[torch.Tensor, torch.Tensor]) -> None:
        name = self._name_of[id(args[2])]
        normalised, residual = result
        is_middle = name.endswith("post_attention_layernorm")
        self._keep(f"layers.{self._layer}.{'attention_residual' if is_middle else 'residual'}", residual)
        self._keep(name, normalised)

    def _tap_rotary_embedding_and_store_kv(self, args: tuple[Any, ...], result: None) -> None:
        heads, _, kv_cache, metadata, num_heads = args[:5]
        self._keep(f"layers.{self._layer}.query", heads[:, :num_heads])  # rotated in place
        key, value = _stored(kv_cache, metadata.slot_mapping)
        self._keep(f"layers.{self._layer}.key", key)
        self._keep(f"layers.{self._layer}.value", value)

    def _tap_paged_attention(self, args: tuple[Any, ...], result: torch.Tensor) -> None:
        self._keep(f"layers.{self._layer}.attention", result)

    def _tap_rotary_decode_attention(self, args: tuple[Any, ...], result: torch.Tensor) -> None:
        """The rotated queries need not leave the op: they are made once more of the heads that the product gave.

        That stores K and V once more too; what the op itself has stored is looked at before.
        """
        heads, cos_sin, kv_cache, metadata, num_heads, _, qk_norm = args
        key, value = _stored(kv_cache, metadata.slot_mapping)
        self._keep(f"layers.{self._layer}.key", key)
        self._keep(f"layers.{self._layer}.value", value)
        again = self._step[f"layers.{self._layer}.qkv_proj"].to(heads.device, copy=True).view(heads.shape)
        self._plain.rotary_embedding_and_store_kv(again, cos_sin, kv_cache, metadata, num_heads, qk_norm)
        self._keep(f"layers.{self._layer}.query", again[:, :num_heads])
        self._keep(f"layers.{self._layer}.attention", result)

    def _tap_logprobs(self, args: tuple[Any, ...], result: Any) -> None:
        """Logits of wanted prompt positions, a few at a time; those of sampled rows come after their choice."""
        if "logits" not in self._step:
            self._prompt_logits.append(args[0])

    def _tap_greedy(self, args: tuple[Any, ...], result: torch.Tensor) -> None:
        self._keep("logits", torch.cat((args[0], *self._prompt_logits)))
        self._prompt_logits = []

    def _keep(self, key: str, rows: torch.Tensor) -> None:
        self._step[key] = rows.flatten(1).to("cpu", copy=True)

    def _distribute(self, plan: SchedulerOutput) -> None:
        """Give each request its rows of this step."""
        tokens = [
            (request.request_id, request.num_computed_tokens + i)
            for request in plan.scheduled
            for i in range(request.num_new_tokens)
        ]
        sampled = [
            (request.request_id, request.num_computed_tokens + request.num_new_tokens - 1)
            for request in plan.scheduled
            if request.samples
        ]
        of_prompts = [
            (request.request_id, request.prompt_targets_start + i)
            for request in plan.scheduled
            for i in range(len(request.prompt_targets))
        ]
        for request_id, position in sampled:
            self._sampled.setdefault(request_id, set()).add(position)
        for key, rows in self._step.items():
            # Attention of the last layer is of every token, or of the wanted ones where those are few.
            is_of_wanted = key in self._keys_of_wanted or len(rows) != len(tokens)
            owners = sampled + of_prompts if is_of_wanted else tokens
            for (request_id, position), row in zip(owners, rows, strict=True):
                self._rows.setdefault(request_id, {}).setdefault(key, {})[position] = row
        self._step = {}


def _stored(kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V in the slots of a step's tokens, [num_tokens, num_kv_heads, head_dim] each; NaN for a token without."""
    slots, block_size = slot_mapping.long(), kv_cache.shape[3]
    rows = kv_cache[slots // block_size, :, :, slots % block_size]  # [num_tokens, 2, num_kv_heads, head_dim]
    rows = rows.masked_fill((slots < 0)[:, None, None, None], float("nan"))
    return rows[:, 0], rows[:, 1]
