"""verify: run engine and transformers on the same ids through the engine's real path, and compare at every point."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pico_vllm.engine.core_client import core_in_this_process
from pico_vllm.errors import ConfigError
from pico_vllm.oracle.comparison import ErrorSum, PointError, first_failure
from pico_vllm.oracle.engine_taps import EngineTaps
from pico_vllm.oracle.points import points_of_rank
from pico_vllm.oracle.transformers_taps import TransformersTaps
from pico_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pico_vllm.engine.llm_engine import LLMEngine

#: Lengths at and beside the borders of blocks, and one that a budget of 64 tokens cuts into chunks.
PROMPT_LENGTHS = (1, 15, 16, 17, 33, 63, 64, 150)
#: 8 x 64 = 512 rows of logits: fewer say little about an RMS error in 16 bits.
NUM_NEW_TOKENS = 64
#: fp32: where the true gap between the best token and ours is smaller, rounding may decide.
FP32_TIE = 1e-3
#: 16 bit: the same, in units of our RMS logit error (which has its own bound): two logits that rounding moves apart.
TIE_IN_RMS_ERRORS = 3.0


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """Greedy tokens against the true argmax.

    Attributes:
        num_tokens, num_equal: compared, and equal.
        worst_gap: largest true logit gap between the best token and ours; 0 when all are equal.
        allowed_gap: largest gap that rounding explains.
    """

    num_tokens: int
    num_equal: int
    worst_gap: float
    allowed_gap: float

    @property
    def passes(self) -> bool:
        """Every token is the best one, or so near to it that rounding may have decided."""
        return self.worst_gap <= self.allowed_gap


@dataclass(frozen=True, slots=True)
class Verification:
    """The whole result.

    Attributes:
        errors: every point, in the order of execution.
        tokens: greedy tokens.
        settings: what was run: model, dtype, device, backend, lengths.
    """

    errors: list[PointError]
    tokens: TokenCheck
    settings: dict[str, Any]

    @property
    def failure(self) -> PointError | None:
        """The first point out of bounds."""
        return first_failure(self.errors)

    @property
    def passes(self) -> bool:
        """Every point and every token."""
        return self.failure is None and self.tokens.passes

    def to_dict(self) -> dict[str, Any]:
        """For JSON; a NaN or an infinity, which JSON doesn't have, is its name as text."""
        failure = self.failure
        plain = {
            "passes": self.passes,
            "settings": self.settings,
            "first_failure": None if failure is None else {"point": failure.point.key, "op": failure.point.op},
            "tokens": dataclasses.asdict(self.tokens) | {"passes": self.tokens.passes},
            "points": [
                {"point": e.point.key, "op": e.point.op}
                | {f.name: getattr(e, f.name) for f in dataclasses.fields(e) if f.name != "point"}
                | {"passes": e.passes}
                for e in self.errors
            ],
        }
        return _json_numbers(plain)


def _json_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_numbers(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def verify(
    engine: LLMEngine,
    *,
    prompt_lengths: Sequence[int] = PROMPT_LENGTHS,
    num_new_tokens: int = NUM_NEW_TOKENS,
    seed: int = 0,
) -> Verification:
    """Compare an engine, as it is configured, with transformers.

    The requests run together, so steps mix chunks and decodes when the engine's token budget is small. transformers
    then sees the engine's own tokens, so one near-tie does not hide what follows it. Of several ranks rank 0 is
    compared, column by column where it has a part; what the others add shows wherever all are reduced to one.

    Args:
        engine: idle; its weights come from a checkpoint.
        prompt_lengths: of the random prompts; longer ones than the engine takes are left out.
        num_new_tokens: a request.
        seed: of the prompts.

    Raises:
        ConfigError: the engine's weights are dummies, so there is nothing to compare them with; or its length limit
            leaves no room for a prompt.
    """
    if engine.config.load_format == "dummy":
        raise ConfigError("load_format='dummy' has no checkpoint that transformers could read; verify a real one")
    runner = core_in_this_process(engine.core).executor.runner
    limit = engine.core.limits.max_request_tokens - num_new_tokens
    lengths = [n for n in prompt_lengths if n <= limit]
    if not lengths:
        raise ConfigError(
            f"this engine takes {limit + num_new_tokens} tokens a request, but the shortest run needs "
            f"{min(prompt_lengths)} + {num_new_tokens}: raise max_model_len or the KV cache"
        )
    prompts = _random_prompts(lengths, engine.model_config.vocab_size, seed)
    sequences, taps = _run_engine(engine, prompts, num_new_tokens)

    dtype = runner.dtype
    with engine.source.hf_directory() as directory:
        truth_model = TransformersTaps(directory, torch.float32, runner.device)
        peer_model = None if dtype == torch.float32 else TransformersTaps(directory, dtype, runner.device)
    points = points_of_rank(engine.model_config, runner.group.shard)
    sums = {point.key: (ErrorSum(point, dtype), columns) for point, columns in points.items()}
    chosen: list[tuple[torch.Tensor, torch.Tensor]] = []  # (true logits, our tokens) of each sequence
    for request_id, token_ids in sequences.items():
        truth = truth_model.run(token_ids[:-1])
        theirs = None if peer_model is None else peer_model.run(token_ids[:-1])
        ours, positions = taps.taps(request_id), taps.positions(request_id)
        for key, (error_sum, columns) in sums.items():
            rows = positions[key]
            true, peer = (None if each is None else _part(each[key][rows], columns) for each in (truth, theirs))
            assert true is not None
            error_sum.add(ours[key], true, peer)
        sampled = taps.sampled_positions(request_id)
        chosen.append((truth["logits"][sampled], torch.tensor(token_ids)[[p + 1 for p in sampled]]))
    errors = [error_sum.result() for error_sum, _ in sums.values()]
    settings = {
        "model": str(engine.source.path.name),
        "architecture": engine.model_config.architecture,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(runner.device),
        "backend": runner.backend.name,
        "tensor_parallel_size": runner.group.shard.size,
        "block_size": engine.config.cache.block_size,
        "max_num_batched_tokens": runner.max_num_batched_tokens,
        "prompt_lengths": [len(prompt) for prompt in prompts],
        "num_new_tokens": num_new_tokens,
    }
    return Verification(errors, _check_tokens(chosen, dtype, errors[-1].rms), settings)


def _part(rows: torch.Tensor, columns: list[tuple[int, int]] | None) -> torch.Tensor:
    """These columns of the rows, one interval after the other; None = all."""
    return rows if columns is None else torch.cat([rows[:, start:end] for start, end in columns], dim=1)


def _random_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def _run_engine(
    engine: LLMEngine, prompts: Sequence[Sequence[int]], num_new_tokens: int
) -> tuple[dict[str, list[int]], EngineTaps]:
    """Prompt and output ids of each request, and what was computed on the way: every position of every request.

    Prompt logprobs make every position a wanted one: without them the end of the model would run for sampled ones only.
    An empty prefix cache and a salt for each request: nothing is taken from anywhere else.
    """
    params = SamplingParams(
        temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True, detokenize=False, prompt_logprobs=0
    )
    sequences = {f"verify-{i}": list(prompt) for i, prompt in enumerate(prompts)}
    taps = EngineTaps(engine)
    if not engine.reset_prefix_cache():
        raise ConfigError("the engine has requests that run: verify it when it is idle")
    with taps.watching():
        for request_id, prompt in sequences.items():
            engine.add_request(request_id, {"prompt_token_ids": list(prompt), "cache_salt": request_id}, params)
        while engine.has_unfinished_requests():
            for delta in engine.step():
                sequences[delta.request_id] += delta.new_token_ids
    return sequences, taps


def _check_tokens(
    chosen: Sequence[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype, logits_rms_error: float
) -> TokenCheck:
    true_logits = torch.cat([logits for logits, _ in chosen]).float()
    tokens = torch.cat([ids for _, ids in chosen])
    gaps = true_logits.amax(-1) - true_logits.gather(1, tokens[:, None])[:, 0]
    return TokenCheck(
        num_tokens=tokens.numel(),
        num_equal=int((gaps == 0).sum()),
        worst_gap=gaps.max().item(),
        allowed_gap=FP32_TIE if dtype == torch.float32 else TIE_IN_RMS_ERRORS * logits_rms_error,
    )
