"""Configuration: frozen values, validated once, never written afterwards. The environment is read only here.

``ModelConfig`` says what a checkpoint is (from its ``config.json``); ``EngineConfig`` says how to run it (from the
options of ``LLM(...)`` and the CLI). Option names are vLLM's where the meaning is the same. What is learned later (the
number of KV blocks, the length limit they allow) is returned by the engine and passed on, not written back.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pico_vllm.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")
BACKENDS = ("auto", "cpu", "triton", "reference")
#: Of a GPU, for the Triton backend: bf16 tensor cores. Triton's own floor is lower.
MIN_COMPUTE_CAPABILITY = (8, 0)
#: Sizes are int32 on the device; rows are made for every running request.
MAX_SIZE = 2**31 - 1
MAX_NUM_SEQS = 1 << 16
MAX_RANKS = 1 << 10
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: Tokens a step: enough to keep a GPU's matrix units busy on prompts, and what a CPU gets through in a second or two.
DEFAULT_BATCHED_TOKENS_GPU, DEFAULT_BATCHED_TOKENS = 16384, 2048
#: Of a GPU: 200 tokens a second for each reader while others' prompts run.
DEFAULT_TARGET_ITL_MS = 5.0
#: A step with prompts takes at least so many times what its decodes alone take, unless a target is given.
DEFAULT_TARGET_ITL_DECODES = 3.25
MAX_TARGET_ITL_MS = 1_000_000
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def cache_dir() -> Path:
    """Where downloaded and converted models live: $PICO_VLLM_CACHE, else $XDG_CACHE_HOME/pico-vllm, else ~/.cache."""
    if explicit := os.environ.get("PICO_VLLM_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "pico-vllm"


def triton_is_interpreted() -> bool:
    """Whether TRITON_INTERPRET asks Triton to interpret kernels on the CPU instead of compiling them (for tests)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """What torchrun has told this process.

    Attributes:
        rank, size: which process this is, of how many on all hosts.
        local_rank: which one on this host.
        leader_host: where rank 0 is.
    """

    rank: int
    size: int
    local_rank: int
    leader_host: str


def launched_rank() -> LaunchedRank | None:
    """This process's place among those that torchrun has started; None where it was started in another way.

    Raises:
        ConfigError: the variables that torchrun sets are no numbers.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in os.environ for name in names):
        return None
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE and LOCAL_RANK must be numbers, as torchrun sets them: {error}") from None
    return LaunchedRank(rank, size, local_rank, os.environ["MASTER_ADDR"])


# ------------------------------------------------------------------------------------------------------- the model
@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base and scaling.

    Source: Su et al. 2021; scaling as in ``transformers.modeling_rope_utils`` 5.x (linear, llama3, yarn).
    """

    theta: float = 10000.0
    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    #: yarn's factor on cos and sin; None = 0.1 ln(factor) + 1.
    attention_factor: float | None = None

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> RopeConfig:
        """Read ``rope_parameters`` (transformers >= 5) or ``rope_theta`` + ``rope_scaling`` (before)."""
        parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
        scaling = {name: value for name, value in parameters.items() if value is not None}
        theta = scaling.pop("rope_theta", config.get("rope_theta"))
        theta = 10000.0 if theta is None else theta
        rope_type = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
        scaling.pop("type", None)
        if rope_type not in SUPPORTED_ROPE_TYPES:
            raise ConfigError(f"rope type {rope_type!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}")
        if scaling.pop("partial_rotary_factor", 1.0) != 1.0 or config.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError("partial_rotary_factor other than 1.0 is not supported")
        known = {f.name for f in dataclasses.fields(cls)} - {"theta", "rope_type"}
        if unknown := sorted(set(scaling) - known):
            raise ConfigError(f"rope scaling has parameters this engine does not implement: {', '.join(unknown)}")
        if rope_type == "default":
            scaling = {}
        elif not scaling.get("original_max_position_embeddings"):
            scaling["original_max_position_embeddings"] = config.get("max_position_embeddings", 0)
        if rope_type != "default" and not scaling.get("factor", 0) >= 1.0:
            raise ConfigError(f"rope type {rope_type!r} needs factor >= 1, got {scaling.get('factor')!r}")
        if rope_type == "llama3" and not scaling.get("low_freq_factor", 0) < scaling.get("high_freq_factor", 0):
            raise ConfigError("rope type 'llama3' needs low_freq_factor < high_freq_factor")
        return cls(theta=_positive_float("rope_theta", theta), rope_type=rope_type, **scaling)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer, and what its checkpoint says about tokens and sampling."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    #: dtype the checkpoint was saved in; ``dtype="auto"`` runs in it.
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    #: Sampling defaults of ``generation_config.json`` where it asks for sampling; empty = greedy.
    default_sampling: dict[str, Any] = field(default_factory=dict)
    #: What that file asks for and the engine can't do yet, for a warning.
    ignored_sampling: tuple[str, ...] = ()

    @classmethod
    def from_directory(cls, directory: Path) -> ModelConfig:
        """Read ``config.json`` and, where there is one, ``generation_config.json``."""
        config = _read_json(directory / "config.json")
        generation_path = directory / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.is_file() else {}
        try:
            return cls.from_hf_config(config, generation)
        except ConfigError as error:
            raise ConfigError(f"{directory / 'config.json'}: {error}") from None

    @classmethod
    def from_hf_config(cls, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
        """Translate a Hugging Face configuration.

        Args:
            config: the content of ``config.json``.
            generation: the content of ``generation_config.json``; its eos ids win over the model's.

        Raises:
            ConfigError: an architecture, activation, rope scaling, quantisation or window this engine doesn't have.
        """
        try:
            return cls._from_hf_config(config, generation or {})
        except (TypeError, ValueError, AttributeError) as error:  # say, a text where a number belongs
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"config.json holds a value of the wrong type: {error}") from None

    @classmethod
    def _from_hf_config(cls, config: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
        architecture = _architecture(config)
        eos = generation.get("eos_token_id")
        _refuse_unsupported(config)
        heads = _positive_int(config, "num_attention_heads")
        kv_heads = _positive_int(config, "num_key_value_heads", default=heads)
        hidden = _positive_int(config, "hidden_size")
        # Qwen3's head_dim is its own number; where the file is silent, transformers takes 128.
        default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden // heads
        head_dim = _positive_int(config, "head_dim", default=default_head_dim)
        if heads % kv_heads:
            raise ConfigError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
        if head_dim % 2:
            raise ConfigError(f"head_dim={head_dim} must be even for rotary embeddings")
        is_qwen2 = architecture == "Qwen2ForCausalLM"
        return cls(
            architecture=architecture,
            vocab_size=_positive_int(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_positive_int(config, "intermediate_size"),
            num_hidden_layers=_positive_int(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=_positive_int(config, "max_position_embeddings"),
            rms_norm_eps=_positive_float("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf_config(config),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            qkv_bias=is_qwen2 or _flag(config, "attention_bias"),
            attention_output_bias=not is_qwen2 and _flag(config, "attention_bias"),
            mlp_bias=architecture == "LlamaForCausalLM" and _flag(config, "mlp_bias"),
            dtype=_checkpoint_dtype(config),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_token_ids("eos_token_id", config.get("eos_token_id") if eos is None else eos),
            default_sampling=_default_sampling(generation),
            ignored_sampling=_ignored_sampling(generation),
        )


#: HF architecture name → the module of ``pico_vllm.models`` that implements it.
SUPPORTED_ARCHITECTURES = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise ConfigError(f"config.json: architectures={names!r} must be a list of names")
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    found = ", ".join(names) or f"model_type {config.get('model_type')!r}, and no 'architectures'"
    raise ConfigError(f"architecture not supported: {found}; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")


def _refuse_unsupported(config: dict[str, Any]) -> None:
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise ConfigError(
            f"quantised checkpoints are not supported (quant_method {method!r}); use a bf16, fp16 or fp32 one"
        )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"hidden_act {activation!r} is not supported; supported: silu")
    if config.get("use_sliding_window"):
        raise ConfigError("sliding-window attention is not supported (use_sliding_window is true)")


def _checkpoint_dtype(config: dict[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"checkpoint dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return name


#: What ``generation_config.json`` may say of sampling, and whether the engine has it: what it lacks is not used, and is
#: told (``ModelConfig.ignored_sampling``) rather than dropped in silence.
_SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SAMPLING_NEUTRAL = {"typical_p": 1.0, "penalty_alpha": 0.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}


def _ignored_sampling(generation: dict[str, Any]) -> tuple[str, ...]:
    return tuple(
        f"{key}={generation[key]!r}"
        for key, neutral in _SAMPLING_NEUTRAL.items()
        if generation.get(key) not in (None, neutral)
    )


def _default_sampling(generation: dict[str, Any]) -> dict[str, Any]:
    if not generation.get("do_sample"):
        return {}
    defaults = {key: generation[key] for key in _SAMPLING_DEFAULTS if generation.get(key) is not None}
    for key, value in defaults.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"generation_config.json: {key}={value!r} must be a number")
    return defaults


def _token_ids(key: str, value: Any) -> tuple[int, ...]:
    """None, one id or a list of ids."""
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
        raise ConfigError(f"{key}={value!r} must be a token id, a list of them, or null")
    return ids


def _positive_float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"config.json: {name}={value!r} must be a finite number above 0")
    return float(value)


def _flag(config: dict[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"config.json: {key}={value!r} must be true or false")
    return bool(value)


def _positive_int(config: dict[str, Any], key: str, *, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"config.json: {key}={value!r} must be a positive integer")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; a model directory holds config.json and *.safetensors") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content


# ------------------------------------------------------------------------------------------------------ the engine
@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache.

    Attributes:
        block_size: tokens a block.
        num_gpu_blocks_override: exactly so many blocks (on any device); None = from the memory budget.
        kv_cache_memory_bytes: memory budget; None = what is left of ``gpu_memory_utilization`` on a GPU, or on a CPU a
            quarter of the free memory, at most 4 GiB.
        gpu_memory_utilization: share of a GPU's memory for all that is on it: other processes, weights, activations,
            CUDA graphs and KV cache together.
        enable_prefix_caching: requests share the KV of what they have in common, and what an ended one leaves behind is
            kept until its blocks are needed. The results are the same.
    """

    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if type(self.block_size) is not int or self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size={self.block_size!r} must be one of {', '.join(map(str, BLOCK_SIZES))}")
        _check_at_least("num_gpu_blocks_override", self.num_gpu_blocks_override, 1, optional=True)
        _check_at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, optional=True, high=1 << 60)
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise ConfigError(f"gpu_memory_utilization={self.gpu_memory_utilization!r} must be in (0, 1]")
        _check_bool("enable_prefix_caching", self.enable_prefix_caching)

    @property
    def is_sized_by_share(self) -> bool:
        """Whether the number of blocks follows from what else needs the device's memory."""
        return self.num_gpu_blocks_override is None and self.kv_cache_memory_bytes is None


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step may hold.

    Attributes:
        max_num_seqs: running requests at most.
        max_num_batched_tokens: new tokens a step at most, prompts and decodes together; memory is kept for them. None
            = 16384 with the Triton backend on a GPU, else 2048 (see ``token_bound``).
        target_itl_ms: while anything decodes, a step takes no more of the prompts than keeps it within so many
            milliseconds, but always 64 tokens. None = 5 on a GPU, or 3.25 times what the decodes alone take where
            that is longer, and no target on a CPU; 0 = no target.
        max_model_len: prompt + output at most; None = the model's max_position_embeddings.
        enable_chunked_prefill: cut prompts to the budget; False = a prompt runs whole or waits, so no target is kept.
        async_scheduling: prepare and launch a step while the one before it runs; None = on a GPU. The results are the
            same.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    target_itl_ms: float | None = None
    max_model_len: int | None = None
    enable_chunked_prefill: bool = True
    async_scheduling: bool | None = None

    def __post_init__(self) -> None:
        _check_at_least("max_num_seqs", self.max_num_seqs, 1, high=MAX_NUM_SEQS)
        _check_at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1, optional=True)
        _check_at_least("max_model_len", self.max_model_len, 2, optional=True)  # a prompt and a new token
        _check_bool("enable_chunked_prefill", self.enable_chunked_prefill)
        _check_bool("async_scheduling", self.async_scheduling, optional=True)
        target = self.target_itl_ms
        if target is None:
            return
        if isinstance(target, bool) or not isinstance(target, int | float) or not 0 <= target <= MAX_TARGET_ITL_MS:
            raise ConfigError(
                f"target_itl_ms={target!r} must be a number of milliseconds from 0 to {MAX_TARGET_ITL_MS:,}: None = "
                "chosen for the device, 0 = no target"
            )
        if target > 0 and not self.enable_chunked_prefill:
            raise ConfigError(
                f"target_itl_ms={target!r} is kept by cutting prompts, which enable_chunked_prefill=False forbids: "
                "leave one of them out"
            )

    def token_bound(self, max_model_len: int, *, fast_prompts: bool) -> int:
        """New tokens a step at most: ``max_num_batched_tokens`` or its default, and no more than could ever run.

        The default leaves room for a decode of every sequence, and for a whole prompt where prompts may not be cut.

        Args:
            max_model_len: positions a sequence may have.
            fast_prompts: whether prompts run on a GPU with kernels of their own.
        """
        bound = self.max_num_batched_tokens
        if bound is None:
            default = DEFAULT_BATCHED_TOKENS_GPU if fast_prompts else DEFAULT_BATCHED_TOKENS
            bound = max(default, self.max_num_seqs, 0 if self.enable_chunked_prefill else max_model_len)
        return min(bound, self.max_num_seqs * max_model_len)

    def wants_step_times(self, *, on_gpu: bool) -> bool:
        """Whether there is a target inter-token latency, and so a need to know how long steps take."""
        return self.enable_chunked_prefill and (on_gpu if self.target_itl_ms is None else self.target_itl_ms > 0)

    def target_itl(self) -> tuple[float, float]:
        """The target where there is one: in seconds, and in times what the decodes alone take; the longer counts."""
        if self.target_itl_ms is not None:
            return self.target_itl_ms / 1e3, 0.0
        return DEFAULT_TARGET_ITL_MS / 1e3, DEFAULT_TARGET_ITL_DECODES


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How many devices share one model.

    Attributes:
        tensor_parallel_size: ranks, each with a share of every layer and a process of its own. Must divide the numbers
            of heads, of intermediate features and of tokens of the vocabulary. Under torchrun it is WORLD_SIZE, or 1.
        async_tensor_parallel: many tokens are computed in two parts, and one is summed over the ranks while the other
            computes; False = one after the other; None = on GPUs. With one rank it means nothing.
    """

    tensor_parallel_size: int = 1
    async_tensor_parallel: bool | None = None

    def __post_init__(self) -> None:
        _check_at_least("tensor_parallel_size", self.tensor_parallel_size, 1, high=MAX_RANKS)
        _check_bool("async_tensor_parallel", self.async_tensor_parallel, optional=True)

    def overlaps(self, *, on_gpu: bool) -> bool:
        """Whether sums over the ranks run beside the computation of other tokens."""
        return on_gpu if self.async_tensor_parallel is None else self.async_tensor_parallel


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is built from; see ``from_options`` for the flat form that users write.

    Attributes:
        model: a directory with config.json and safetensors, a .gguf file, or a hub id (owner/name); None = the default
            model (SmolLM2-135M-Instruct).
        revision: branch, tag or commit of a hub id.
        tokenizer: a directory with tokenizer.json; None = the model's.
        skip_tokenizer_init: load no tokenizer; prompts are token ids and outputs carry no text.
        dtype: "auto" (the checkpoint's) or one of ``DTYPES``.
        load_format: "auto" (safetensors) or "dummy" (seeded random weights; no safetensors are read).
        device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N".
        backend: which implementations of the ops: "triton" (needs a GPU of compute capability 8.0), "cpu" (vectorised
            torch, any device), "reference" (naive), or "auto": triton where it can run, else cpu.
        enforce_eager: capture no CUDA graphs: the start is faster, every step slower. The results are the same.
        seed: seeds requests that name no seed, and dummy weights.
        engine_core_process: run the engine core in a process of its own, so that tokenising and detokenising overlap
            with the next step; the results are the same. ``logits_processors`` need False.
    """

    model: str | None = None
    revision: str | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    load_format: str = "auto"
    device: str = "auto"
    backend: str = "auto"
    enforce_eager: bool = False
    seed: int = 0
    engine_core_process: bool = False
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        _check_bool("skip_tokenizer_init", self.skip_tokenizer_init)
        _check_bool("engine_core_process", self.engine_core_process)
        _check_bool("enforce_eager", self.enforce_eager)
        _check_choice("dtype", self.dtype, ("auto", *DTYPES))
        _check_choice("load_format", self.load_format, ("auto", "dummy"))
        _check_choice("backend", self.backend, BACKENDS)
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ConfigError(f"tokenizer={self.tokenizer!r} would be ignored: skip_tokenizer_init=True loads none")
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", self.device):
            raise ConfigError(f"device={self.device!r} must be 'auto', 'cpu', 'cuda' or 'cuda:N'")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed!r} must be an integer, 0 … 2**63-1")

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build from flat options: ``EngineConfig.from_options(model="dir", block_size=32)``.

        Raises:
            ConfigError: an unknown option (the nearest known one is named), or a value out of range.
        """
        groups: dict[str, type] = {"cache": CacheConfig, "scheduler": SchedulerConfig, "parallel": ParallelConfig}
        group_of = {f.name: group for group, kind in groups.items() for f in dataclasses.fields(kind)}
        top_level = {f.name for f in dataclasses.fields(cls)} - set(groups)
        values: dict[str, dict[str, Any]] = {group: {} for group in groups}
        top: dict[str, Any] = {}
        for name, value in options.items():
            if name in top_level:
                top[name] = str(value) if name in ("model", "tokenizer") and value is not None else value
            elif name in group_of:
                values[group_of[name]][name] = value
            else:
                raise ConfigError(_unknown_option(name, sorted(top_level | set(group_of))))
        return cls(**top, **{group: kind(**values[group]) for group, kind in groups.items()})

    def to_options(self) -> dict[str, Any]:
        """The flat options that ``from_options`` makes this configuration from."""
        options: dict[str, Any] = {}
        for name, value in dataclasses.asdict(self).items():
            options |= value if isinstance(value, dict) else {name: value}
        return options


def _unknown_option(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
    return f"unknown engine option {name!r}; {hint}"


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(choices)}")


def _check_bool(name: str, value: bool | None, *, optional: bool = False) -> None:
    if not isinstance(value, bool) and not (optional and value is None):
        raise ConfigError(f"{name}={value!r} must be True{', False or None' if optional else ' or False'}")


def _check_at_least(name: str, value: int | None, low: int, *, optional: bool = False, high: int = MAX_SIZE) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name}={value!r} must be an integer >= {low}" + (", or None" if optional else ""))
    if value > high:
        raise ConfigError(f"{name}={value!r} must be at most {high}")
