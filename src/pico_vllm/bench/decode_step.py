"""The decode step of a model with random weights, captured and timed: what launch shapes are tuned in.

A kernel that is timed alone finds the device empty; in a step it starts while its predecessor ends, beside whatever
that has left running. Used by benchmarks/tune_linear.py and benchmarks/tune_decode_attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pico_vllm.bench.cuda_timing import time_on_cuda
from pico_vllm.bench.timing import FULL_BUDGET, Budget, Rotation, time_on_host
from pico_vllm.config import ModelConfig
from pico_vllm.distributed.tensor_parallel import SingleRank
from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.kernels.backend import KernelBackend
from pico_vllm.kernels.linear import LinearWeight
from pico_vllm.kernels.linear_config import Product
from pico_vllm.kernels.triton_backend import TRITON
from pico_vllm.models.qwen2 import Qwen2ForCausalLM
from pico_vllm.models.weights import ParameterPlace, dummy_parameters
from pico_vllm.worker.cuda_graph import MAX_UNORDERED_DECODES
from pico_vllm.worker.kv_cache_memory import allocate_kv_caches

_BLOCK_SIZE = 16
QWEN2_5_1_5B = ModelConfig(
    "Qwen2ForCausalLM", 151936, 1536, 8960, 28, 12, 2, 128, 32768, tie_word_embeddings=True, qkv_bias=True
)
TINY = ModelConfig("Qwen2ForCausalLM", 96, 64, 80, 2, 2, 1, 32, 1024, tie_word_embeddings=True, qkv_bias=True)


class DecodeStep:
    """The decode step of a model with random weights, in any batch, with any backend."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._dtype = dtype
        self._made: tuple[tuple[tuple[int, ...], int], tuple[ForwardBatch, list[torch.Tensor]]] | None = None
        place = ParameterPlace(dtype, device, TRITON.pack_linear)
        self._parameters = dummy_parameters(Qwen2ForCausalLM.parameter_specs(config), place)

    @property
    def weights(self) -> dict[str, tuple[Product, LinearWeight]]:
        """Name → (kind, a weight): the products of the first layer, and the head."""
        kinds = {"gate_up": Product.GATED, "down": Product.PARTIAL, "qkv": Product.WHOLE, "o": Product.PARTIAL}
        found = {}
        for name, kind in {**kinds, "lm_head": Product.WHOLE}.items():
            weight = self._parameters[f"layers.0.{name}_proj" if name in kinds else name]
            assert isinstance(weight, LinearWeight)
            found[name] = kind, weight
        return found

    def seconds(
        self,
        contexts: Sequence[int],
        backend: KernelBackend = TRITON,
        *,
        max_seq_len: int = 1024,
        budget: Budget = FULL_BUDGET,
    ) -> float:
        """Of one step, in a CUDA graph on a GPU; raises what a launch raises.

        Args:
            contexts: positions of each sequence, its new token included.
            backend: whose ops run.
            max_seq_len: bound that launches are shaped for.
            budget: of the measurement.
        """
        model, batch, kv_caches = self.prepare(contexts, backend, max_seq_len)
        with torch.inference_mode():
            rotation = Rotation([lambda: backend.greedy(model.lm_head(model.hidden_rows(batch, kv_caches)))])
            if self.device.type == "cpu":
                return time_on_host(rotation, Budget(0.0, 1, 0.0)).median_s
            timing = time_on_cuda(rotation, self.device, budget)
        if timing.mode != "graph":
            raise RuntimeError("the step was not captured")
        return timing.median_s

    def prepare(
        self, contexts: Sequence[int], backend: KernelBackend, max_seq_len: int
    ) -> tuple[Qwen2ForCausalLM, ForwardBatch, list[torch.Tensor]]:
        """What a step takes: the model, the batch, KV caches of zeros."""
        key = tuple(contexts), max_seq_len
        if self._made is None or self._made[0] != key:
            self._made = None  # the caches of two might not fit
            self._made = key, self._inputs(*key)
        batch, kv_caches = self._made[1]
        group = SingleRank(backend)
        model = Qwen2ForCausalLM(
            self.config, self._parameters, max_model_len=max(contexts), backend=backend, group=group
        )
        return model, batch, kv_caches

    def tokens(self, num_tokens: int, in_features: int) -> torch.Tensor:
        """Normal numbers [num_tokens, in_features]."""
        generator = torch.Generator(self.device).manual_seed(num_tokens)
        return torch.randn(num_tokens, in_features, generator=generator, device=self.device).to(self._dtype)

    def _inputs(self, contexts: tuple[int, ...], max_seq_len: int) -> tuple[ForwardBatch, list[torch.Tensor]]:
        def ints(values: torch.Tensor) -> torch.Tensor:
            return values.to(self.device, torch.int32)

        seq_lens, num_seqs = torch.tensor(contexts), len(contexts)
        positions = seq_lens - 1
        blocks_a_row = -(-max(contexts) // _BLOCK_SIZE)
        tables = torch.randperm(num_seqs * blocks_a_row).view(num_seqs, blocks_a_row)
        last_blocks = tables[torch.arange(num_seqs), positions // _BLOCK_SIZE]
        batch = ForwardBatch(
            input_ids=ints(torch.arange(num_seqs) % self.config.vocab_size),
            positions=ints(positions),
            slot_mapping=ints(last_blocks * _BLOCK_SIZE + positions % _BLOCK_SIZE),
            block_tables=ints(tables),
            query_start_loc=ints(torch.arange(num_seqs + 1)),
            seq_lens=ints(seq_lens),
            logits_indices=None,
            num_decode_reqs=num_seqs,
            max_query_len=1,
            max_seq_len=max_seq_len,
            decodes_only=True,
            decode_order=ints(seq_lens.argsort(descending=True)) if num_seqs > MAX_UNORDERED_DECODES else None,
        )
        kv_caches = allocate_kv_caches(
            self.config, num_blocks=tables.numel(), block_size=_BLOCK_SIZE, dtype=self._dtype, device=self.device
        )
        return batch, [cache.zero_() for cache in kv_caches]
