"""The host hand-over: what the scheduler tells the worker to run, and what comes back.

Scheduler and worker never import each other; they meet here. Everything is plain Python. A plan is a msgspec struct:
fast to make, and fast to send to the other ranks' processes (a step of 256 decodes is encoded in 10 us). The worker
keeps a device row a request, so only what is new is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from pico_vllm.sampling_params import SamplingParams  # at run time too: the decoder looks at the fields' types

if TYPE_CHECKING:
    import numpy as np

    from pico_vllm.outputs import TokenLogprobs


def plain_value(value: Any) -> Any:
    """For msgpack: numbers and texts that only derive from Python's own, numpy's float64 for one.

    Raises:
        TypeError: anything else.
    """
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


class NewRequestData(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the worker must know of a request the first time it runs, and again after a preemption."""

    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    sample_index: int = 0
    #: Ids that end the request: masked until ``params.min_tokens``.
    stop_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    #: Every known token (prompt, and the output so far after a preemption), if sampling needs them: penalties, bad
    #: words, logits processors. Empty otherwise.
    known_token_ids: tuple[int, ...] = ()


class ScheduledRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One request's share of a step: positions [num_computed_tokens, num_computed_tokens + num_new_tokens)."""

    request_id: str
    #: Ids of the new positions; ``()`` = the last sampled ids, which the worker has on the device.
    new_token_ids: tuple[int, ...]
    num_computed_tokens: int
    num_new_tokens: int
    #: Blocks to append to the request's block table.
    new_block_ids: tuple[int, ...]
    #: Whether the last new position's logits are wanted (False for a chunk that ends inside the known tokens).
    samples: bool
    #: Set when the worker has no row for this request (new, or resumed after preemption: the row starts empty).
    new_request: NewRequestData | None = None
    #: Prompt tokens whose logprobs are wanted of this step, and the position that predicts the first of them.
    prompt_targets: tuple[int, ...] = ()
    prompt_targets_start: int = 0
    #: Positions of this step before this one have their K and V in the cache already, in blocks that others may share:
    #: they are computed for their logits and stored nowhere (slot -1).
    slots_start: int = 0


class SchedulerOutput(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One step. Requests with one new token come first; ``num_decode_reqs`` counts them."""

    scheduled: tuple[ScheduledRequest, ...]
    num_decode_reqs: int
    num_tokens: int
    #: Requests that finished, were aborted or preempted since the last step: the worker drops their rows *before*
    #: it looks at ``scheduled`` (a request may be dropped and resumed in one step).
    dropped_request_ids: tuple[str, ...] = ()
    #: (source, destination) of whole KV blocks that are copied before the forward pass. Destinations are distinct, and
    #: none of them is a source.
    block_copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """Which tokens a grammar allows next, for the requests of a step that have one and sample.

    Attributes:
        request_ids: each of them is in the step and samples.
        bitmask: [len(request_ids), ceil(vocab_size / 32)] int32; bit t % 32 of word t // 32 allows token t.
    """

    request_ids: tuple[str, ...]
    bitmask: np.ndarray


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """Sampled ids, in the order of ``SchedulerOutput.scheduled``.

    A tuple of ids a request: () where nothing was sampled, -1 where masks left nothing, one id today and more under
    speculation.
    """

    token_ids: tuple[tuple[int, ...], ...]
    #: Of the sampled tokens: a tuple a request, () where not asked for; () altogether if nobody asked.
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    #: Of the prompt positions of this step: position p's entry is about token p + 1, so a chunk [a, b) of a prompt of n
    #: tokens gives those of a + 1 … min(b, n - 1).
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """What steps take on this device, measured once when the worker starts.

    Attributes:
        decode_s: (sequences, seconds) of steps that give each one token; ascending, at least one.
        prompt_tokens, prompt_s: tokens and seconds of a step with one whole prompt.
        step_sizes: tokens of the steps of decodes and prompts that run without padding, ascending; () = all do.
    """

    decode_s: tuple[tuple[int, float], ...]
    prompt_tokens: int
    prompt_s: float
    step_sizes: tuple[int, ...] = ()
