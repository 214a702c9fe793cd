"""One layer against transformers: our Qwen2 decoder layer and theirs, with the same random weights.

Theirs runs the whole sequence at once. Ours runs it the way the engine does, through a paged KV cache in two steps: a
chunk of the prompt, then the rest. If chunking, paging, rotary positions, head grouping, norms and the fused weights
are all right, the outputs agree to rounding.

    python examples/one_layer_against_transformers.py
"""

import torch
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer as TheirLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from pico_vllm.config import ModelConfig
from pico_vllm.distributed.tensor_parallel import SingleRank
from pico_vllm.kernels.attention import AttentionInputs, KVCacheShape
from pico_vllm.kernels.backend import CPU, REFERENCE, KernelBackend
from pico_vllm.layers.rotary_embedding import RotaryEmbedding
from pico_vllm.models.qwen2 import LayerParts, Qwen2DecoderLayer, Qwen2ForCausalLM
from pico_vllm.models.weights import ParameterPlace, load_parameters

NUM_TOKENS, FIRST_CHUNK, BLOCK_SIZE = 21, 13, 4
CONFIG = Qwen2Config(
    vocab_size=1,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=1,
    num_attention_heads=6,
    num_key_value_heads=2,
)
CONFIG._attn_implementation = "eager"  # the plain formula


class StateDict:
    """A checkpoint that is a dictionary: what the loader of weights asks for."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        """One tensor, or a part of it."""
        return self._tensors[name][part]


def run_theirs(layer: TheirLayer, hidden: torch.Tensor) -> torch.Tensor:
    """The whole sequence at once, with a causal mask."""
    positions = torch.arange(NUM_TOKENS)[None]
    mask = torch.full((NUM_TOKENS, NUM_TOKENS), float("-inf")).triu(1)[None, None]
    cos_sin = Qwen2RotaryEmbedding(CONFIG)(hidden, positions)
    out: torch.Tensor = layer(hidden[None], attention_mask=mask, position_embeddings=cos_sin)
    return out[0]


def run_ours(
    layer: Qwen2DecoderLayer, hidden: torch.Tensor, config: ModelConfig, backend: KernelBackend
) -> torch.Tensor:
    """Two chunks over one paged cache, whose blocks are used backwards because they may be."""
    num_blocks = -(-NUM_TOKENS // BLOCK_SIZE)
    block_table = torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32)
    kv_cache = torch.full((num_blocks, 2, config.num_key_value_heads, BLOCK_SIZE, config.head_dim), float("nan"))
    rotary = RotaryEmbedding(config.rope, config.head_dim, NUM_TOKENS, torch.float32, torch.device("cpu"))
    outputs = []
    for start, end in [(0, FIRST_CHUNK), (FIRST_CHUNK, NUM_TOKENS)]:
        positions = torch.arange(start, end, dtype=torch.int32)
        inputs = AttentionInputs(
            slot_mapping=block_table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            block_tables=block_table[None],
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            num_decode_reqs=0,
            max_query_len=end - start,
            max_seq_len=end,
        )
        metadata = backend.prepare_attention(inputs, KVCacheShape(config.num_key_value_heads, BLOCK_SIZE))
        residual = hidden[start:end].clone()  # the fused add + norm may write it in place
        partial, residual = layer(layer.input_layernorm(residual), residual, rotary(positions), kv_cache, metadata)
        outputs.append(partial + residual)  # in a whole model the next layer's norm adds them
    return torch.cat(outputs)


@torch.inference_mode()
def main() -> None:
    """Compare over both backends."""
    torch.manual_seed(0)
    their_layer = TheirLayer(CONFIG, 0).eval()
    for name, parameter in their_layer.named_parameters():
        values = torch.randn(parameter.shape)
        parameter.copy_(1 + 0.2 * values if "norm" in name else 0.1 * values)  # nothing at its default
    hidden = torch.randn(NUM_TOKENS, CONFIG.hidden_size)
    truth = run_theirs(their_layer, hidden)

    config = ModelConfig.from_hf_config(CONFIG.to_dict() | {"architectures": ["Qwen2ForCausalLM"]})
    checkpoint = StateDict({f"model.layers.0.{name}": tensor for name, tensor in their_layer.state_dict().items()})
    specs = Qwen2ForCausalLM.layer_specs(config, "layers.0", "model.layers.0")
    print(f"their {len(checkpoint.shapes())} tensors become our {len(specs)}: {[spec.name for spec in specs]}")
    for backend in (REFERENCE, CPU):
        place = ParameterPlace(torch.float32, torch.device("cpu"), backend.pack_linear)
        parameters = load_parameters(specs, checkpoint, place)
        layer = Qwen2DecoderLayer(LayerParts(config, 0, parameters, backend, SingleRank(backend)))
        error = (run_ours(layer, hidden, config, backend) - truth).abs().max().item()
        assert error < 1e-4, error
        scale = truth.square().mean().sqrt().item()
        print(f"{backend.name:<9} against transformers: largest difference {error:.1e} (values of about {scale:.1f})")


if __name__ == "__main__":
    main()
