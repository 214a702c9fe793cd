"""TransformersTaps: what transformers computes at every point, over a whole sequence at once.

Forward hooks on transformers' own modules; the rotated heads, which no module returns, come from transformers' own
``apply_rotary_pos_emb`` on the hooked projections. Eager attention: the plain formula.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pico_vllm.oracle.engine_taps import Taps


class TransformersTaps:
    """One transformers model with its hooks.

    Args:
        model_dir: checkpoint.
        dtype: to run in.
        device: to run on.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        transformers.utils.logging.disable_progress_bar()
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation="eager", local_files_only=True
        )
        self._model = model.to(device).eval()
        self._device = device
        self._apply_rotary = sys.modules[type(self._model).__module__].apply_rotary_pos_emb
        self._raw: dict[str, torch.Tensor] = {}
        self._cos_sin: tuple[torch.Tensor, torch.Tensor] | None = None
        self._register()

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int]) -> Taps:
        """Every point of one sequence, [len(token_ids), width] each, on the CPU."""
        self._raw = {}
        logits = self._model(torch.tensor([list(token_ids)], device=self._device), use_cache=False).logits
        self._raw["logits"] = logits
        taps = {key: self._rows(value) for key, value in self._raw.items() if not key.endswith(("q_proj", "k_proj"))}
        for layer in range(len(self._model.model.layers)):
            taps |= self._fused(f"layers.{layer}")
        return taps

    # --------------------------------------------------------------------------------------------------- private
    @staticmethod
    def _rows(value: torch.Tensor) -> torch.Tensor:
        return value[0].flatten(1).to("cpu")

    def _fused(self, layer: str) -> Taps:
        """Points that are one tensor here and several modules there."""
        raw, attention = self._raw, self._model.model.layers[int(layer.split(".")[1])].self_attn
        q, k, v = (raw[f"{layer}.{name}_proj"] for name in "qkv")
        fused = {f"{layer}.qkv_proj": self._rows(torch.cat((q, k, v), -1))}
        head_shape = (*q.shape[:2], -1, attention.head_dim)
        q = raw.get(f"{layer}.q_norm", q).view(head_shape).transpose(1, 2)
        k = raw.get(f"{layer}.k_norm", k).view(head_shape).transpose(1, 2)
        assert self._cos_sin is not None
        query, key = self._apply_rotary(q, k, *self._cos_sin)  # [1, num_heads, num_tokens, head_dim]
        fused[f"{layer}.query"] = self._rows(query.transpose(1, 2))
        fused[f"{layer}.key"] = self._rows(key.transpose(1, 2))
        fused[f"{layer}.value"] = self._rows(v)
        gate_up = torch.cat((raw[f"{layer}.gate_proj"], raw[f"{layer}.up_proj"]), -1)
        fused[f"{layer}.gate_up_proj"] = self._rows(gate_up)
        return fused

    def _register(self) -> None:
        base = self._model.model
        self._keep_output(base.embed_tokens, "embed_tokens")
        self._keep_output(base.norm, "norm")
        base.rotary_emb.register_forward_hook(self._keep_cos_sin)
        for i, layer in enumerate(base.layers):
            prefix = f"layers.{i}"
            self._keep_output(layer.input_layernorm, f"{prefix}.input_layernorm")
            for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
                if hasattr(layer.self_attn, name):
                    self._keep_output(getattr(layer.self_attn, name), f"{prefix}.{name}")
            self._keep_input(layer.self_attn.o_proj, f"{prefix}.attention")
            self._keep_input(layer.post_attention_layernorm, f"{prefix}.attention_residual")
            self._keep_output(layer.post_attention_layernorm, f"{prefix}.post_attention_layernorm")
            for name in ("gate_proj", "up_proj", "down_proj"):
                self._keep_output(getattr(layer.mlp, name), f"{prefix}.{name}")
            self._keep_input(layer.mlp.down_proj, f"{prefix}.activation")
            self._keep_output(layer, f"{prefix}.residual")

    def _keep_output(self, module: torch.nn.Module, key: str) -> None:
        module.register_forward_hook(self._keeper(key, lambda args, output: output))

    def _keep_input(self, module: torch.nn.Module, key: str) -> None:
        module.register_forward_hook(self._keeper(key, lambda args, output: args[0]))

    def _keeper(self, key: str, pick: Callable[[Any, Any], Any]) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            value = pick(args, output)
            self._raw[key] = value[0] if isinstance(value, tuple) else value

        return hook

    def _keep_cos_sin(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._cos_sin = output
