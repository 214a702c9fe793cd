"""Scheduler: first come, first served continuous batching under a token budget, on a pool of KV blocks.

It owns the queues and the requests' mutable fields; blocks are KVCacheManager's. It knows neither tensors nor text. The
engine core calls, in this order: ``schedule``, the worker's step, ``update_from_output``; ``add`` and ``abort`` may
come at any time between two calls.

There is no prefill phase and no decode phase: in each step a request's ``num_computed_tokens`` catches up with its
``num_tokens``, as far as the budget goes. A new prompt, the next chunk of one, a decode and the recomputation after a
preemption are one case.

Overlap. A step may be scheduled while the one before it is on the device ("in flight"). Its results are then counted on
(``num_inflight_tokens``, ``num_inflight_samples``) but not known: a decode takes its input token from the worker's row.
A request whose last token is in flight is not scheduled; one that a token in flight ends early (EOS, a stop id) has
been, and what that step samples for it is discarded. So is what comes back for a request that was aborted or preempted
meanwhile. The blocks of all of these are free at once, with a step that writes into them still on its way. It is safe:
only a later ``schedule`` can give a block away, and the device runs steps in the order of their schedules, so a new
owner writes and reads it after the last write of the old one.

Prefix caching (docs/radix-cache.md). What a request has in common with cached sequences is found when it is admitted,
and counts as computed from then on. What is scheduled is inserted at once, so that the next request shares it: within
a step every layer stores before it attends. When a step fails, nobody knows what was stored: the whole cache is given
up.

Order. All running requests came before all waiting ones, and both queues are in order of arrival: requests are admitted
from the front of the waiting queue, and a preempted request (always the newest running one) returns to that front.

Pace. Decodes come first: every running request that has its prompt behind it gets its token. What a step takes of the
prompts is bounded by ``max_num_batched_tokens``, and while anything decodes also by the target inter-token latency
(``step_time``): by seconds, which the prompts share in order of arrival.

Rows. The worker has a row for exactly the running requests. A request that leaves them is named once in the next
SchedulerOutput's ``dropped_request_ids``, before anyone takes its place, so there are never more than ``max_num_seqs``
rows. An engine that has become idle leaves the last rows (that many at most) where they are until its next step.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from itertools import islice
from typing import TYPE_CHECKING

from pico_vllm.errors import ConfigError, RequestError
from pico_vllm.outputs import EngineCoreOutput
from pico_vllm.request import FinishReason, Request, RequestStatus
from pico_vllm.scheduler.admission import checked_max_tokens
from pico_vllm.scheduler_output import NewRequestData, ScheduledRequest, SchedulerOutput

if TYPE_CHECKING:
    from pico_vllm.kv_cache import KVCacheManager
    from pico_vllm.outputs import TokenLogprobs
    from pico_vllm.scheduler.step_time import PromptAllowance, TargetITL
    from pico_vllm.scheduler_output import ModelRunnerOutput


class Scheduler:
    """Decides what each step computes.

    Args:
        kv_cache_manager: the only source of blocks.
        max_num_seqs: running requests at most.
        max_num_batched_tokens: new tokens a step at most, prompts and decodes together.
        max_model_len: prompt + output tokens of a request at most.
        enable_chunked_prefill: cut a prompt to what the budget leaves; False = it waits until it fits whole.
        target_itl: how long a step with decodes may take; None = as long as it needs.

    Raises:
        ConfigError: a limit is below 1, or no step could hold the longest prompt and prompts may not be cut.
    """

    def __init__(
        self,
        *,
        kv_cache_manager: KVCacheManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_chunked_prefill: bool = True,
        target_itl: TargetITL | None = None,
    ) -> None:
        if min(max_num_seqs, max_num_batched_tokens, max_model_len) < 1:
            raise ConfigError(
                f"max_num_seqs={max_num_seqs}, max_num_batched_tokens={max_num_batched_tokens} and "
                f"max_model_len={max_model_len} must be at least 1"
            )
        if not enable_chunked_prefill and max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"without chunked prefill a step must hold the longest prompt, but max_num_batched_tokens="
                f"{max_num_batched_tokens} is below max_model_len={max_model_len}: raise the one, lower the other, or "
                "set enable_chunked_prefill=True"
            )
        self._kv_cache_manager = kv_cache_manager
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._enable_chunked_prefill = enable_chunked_prefill
        self._target_itl = target_itl if enable_chunked_prefill else None  # kept by cutting prompts
        self._waiting: OrderedDict[str, Request] = OrderedDict()  # in order of arrival, removal in O(1)
        self._running: dict[str, Request] = {}  # in order of admission, which is the order of arrival
        self._decoding: set[str] = set()  # the running requests whose known tokens have all been scheduled
        self._dropped_request_ids: list[str] = []
        #: Steps handed out and not back yet, oldest first, with the requests of ``scheduled`` in the same order. By
        #: identity: an id may be used again while the output of its former owner is on its way. And with the number of
        #: its preemptions then: what it was preempted after doesn't count, even if it runs again.
        self._inflight: deque[tuple[SchedulerOutput, list[tuple[Request, int]]]] = deque()
        #: Preemptions since the start.
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and a row in the worker."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that were added or preempted and hold nothing."""
        return len(self._waiting)

    @property
    def max_request_tokens(self) -> int:
        """Prompt + output tokens the longest possible request has; the KV of its last token is never stored."""
        return min(self._max_model_len, self._kv_cache_manager.max_tokens + 1)

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._running or self._waiting)

    def add(self, request: Request) -> None:
        """Queue a new request; lowers its ``max_tokens`` to what ``max_model_len`` leaves.

        Raises:
            RequestError: its id is in use, or it could not finish even if it were alone.
        """
        if request.request_id in self._waiting or request.request_id in self._running:
            raise RequestError(f"request_id {request.request_id!r} is in use by an unfinished request: choose another")
        request.max_tokens = checked_max_tokens(
            request,
            max_model_len=self._max_model_len,
            num_blocks=self._kv_cache_manager.num_blocks,
            block_size=self._kv_cache_manager.block_size,
        )
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> bool:
        """End a request in any state, with no further output; its blocks are free at once (see Overlap above).

        Returns:
            False for a request that is unknown or finished: nothing happened.
        """
        if request := self._waiting.pop(request_id, None):
            request.status = RequestStatus.FINISHED
            return True
        if request := self._running.pop(request_id, None):
            self._release(request, RequestStatus.FINISHED)
            return True
        return False

    def schedule(self) -> SchedulerOutput:
        """Plan one step and give it its blocks.

        The worker must see each result that schedules or drops anything. Nothing is scheduled only if nothing is
        unfinished, or if everything waits for the output of a step in flight.
        """
        self._kv_cache_manager.begin_step()
        target_itl = None if self._has_backlog() else self._target_itl
        step = _Step(self._max_num_batched_tokens, len(self._decoding), target_itl)
        if self._schedule_running(step):
            self._schedule_waiting(step)
        output = SchedulerOutput(
            scheduled=(*step.decodes, *step.chunks),
            num_decode_reqs=len(step.decodes),
            num_tokens=self._max_num_batched_tokens - step.budget,
            dropped_request_ids=tuple(self._dropped_request_ids),
            block_copies=self._kv_cache_manager.take_block_copies(),
        )
        self._dropped_request_ids.clear()
        if output.scheduled:
            requests = step.decode_requests + step.chunk_requests
            self._inflight.append((output, [(request, request.num_preemptions) for request in requests]))
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Take in what a step computed and sampled; steps come back in the order in which they were scheduled.

        Returns:
            New tokens, in the order of ``scheduler_output.scheduled``; a request appears when it has any. What came
            back for a request that has ended or was preempted meanwhile is discarded, but for the prompt logprobs of a
            preempted one.
        """
        if not scheduler_output.scheduled:
            return []
        inflight_output, requests = self._inflight.popleft()
        assert inflight_output is scheduler_output, "steps must come back in the order of schedule()"
        outputs: list[EngineCoreOutput] = []
        steps = zip(scheduler_output.scheduled, requests, runner_output.token_ids, strict=True)
        for scheduled, (request, num_preemptions), token_ids in steps:
            if request.status is not RequestStatus.RUNNING or request.num_preemptions != num_preemptions:
                continue
            request.num_computed_tokens += scheduled.num_new_tokens
            request.num_inflight_tokens -= scheduled.num_new_tokens
            request.num_inflight_samples -= scheduled.samples
            assert len(token_ids) == scheduled.samples, f"{scheduled} came back with {token_ids}"
            if token_ids:
                outputs.append(self._append_token(request, token_ids))
        if runner_output.logprobs or runner_output.prompt_logprobs:
            return self._with_logprobs(outputs, [request for request, _ in requests], runner_output)
        return outputs

    def preempt_all(self) -> None:
        """Send every running request back to the front of the queue, as if no step had ever run; for a failed step.

        What is in flight is given up, and so is the prefix cache. The worker must forget its rows: none of them is
        named as dropped.
        """
        while self._running:
            _, newest = self._running.popitem()
            self._preempt(newest, keep=False)
        was_reset = self._kv_cache_manager.reset_prefix_cache()
        assert was_reset, "a request that isn't running has blocks"
        while self._inflight:
            output, requests = self._inflight.pop()
            for scheduled, (request, _) in zip(output.scheduled, requests, strict=True):
                request.give_back_prompt_targets(scheduled.prompt_targets)
        self._dropped_request_ids.clear()

    def _schedule_running(self, step: _Step) -> bool:
        """Give each running request its share, oldest first; False when one had to be preempted.

        The newest running request loses its blocks first. It stands behind the one that needs them, so it has no share
        of this step yet; or it is that one, and then none is behind it.
        """
        num_preemptions = self.num_preemptions
        for request in list(self._running.values()):
            if step.budget == 0 or request.status is not RequestStatus.RUNNING:
                break
            start = request.num_computed_tokens + request.num_inflight_tokens
            is_decode = start >= request.num_prefill_tokens
            step.num_decodes_to_come -= is_decode
            if request.num_inflight_samples and (request.last_token_is_inflight or request.needs_host_token):
                continue
            room = step.budget if is_decode else step.prompt_room(start)
            num_new_tokens = min(request.num_tokens_with_inflight - start, room)
            if num_new_tokens <= 0:
                continue  # the prompts have had their share
            block_ids = self._allocate_or_preempt(request, start + num_new_tokens)
            if block_ids is None:
                break
            step.add(request, start, num_new_tokens, block_ids)
            if not is_decode:
                self._kv_cache_manager.insert(request, start + num_new_tokens)
                self._count_chunk(request, step, start, num_new_tokens)
            elif block_ids:  # a block of generated tokens is full
                self._kv_cache_manager.insert(request, min(start, request.num_tokens))
        return self.num_preemptions == num_preemptions

    def _allocate_or_preempt(self, request: Request, num_tokens_total: int) -> tuple[int, ...] | None:
        """Blocks for a running request, at the newest ones' cost; None when it was the newest itself."""
        while True:
            block_ids = self._kv_cache_manager.allocate_slots(request.request_id, num_tokens_total)
            if block_ids is not None:
                return block_ids
            _, newest = self._running.popitem()
            self._preempt(newest)
            if newest is request:
                return None

    def _has_backlog(self) -> bool:
        """Whether so much waits, of what could run, that the target is not kept."""
        most = None if self._target_itl is None else self._target_itl.max_backlog
        if most is None:
            return False
        num_tokens = 0
        for request in islice(self._waiting.values(), self._max_num_seqs - len(self._running)):
            num_tokens += request.num_tokens
            if num_tokens > most:
                return True
        return False

    def _schedule_waiting(self, step: _Step) -> None:
        """Admit from the front of the queue; the first that can't be admitted stops everyone behind it."""
        while self._waiting and len(self._running) < self._max_num_seqs and step.budget > 0:
            if not self._try_admit(next(iter(self._waiting.values())), step):
                break

    def _try_admit(self, request: Request, step: _Step) -> bool:
        """Start a new or preempted request if its known tokens fit and everyone can still grow by a block.

        All its known tokens get their slots now, though the budget may cut them into chunks: blocks that a prompt under
        way counts on can't be given to others. The headroom is one free block for each request that would run, this
        one included: a request fills at most one block in ``block_size`` steps, so after an admission that many steps
        go by before anyone can be preempted. Without it a full cache would admit a request, compute its prompt and
        throw it out again at the next block boundary of any other, over and over. With nothing running all blocks are
        free and ``add`` has made sure that they are enough, so the front of the queue always gets in: no deadlock.
        """
        num_tokens = request.num_tokens
        if step.prompt_room(0) <= 0:
            return False
        if not self._enable_chunked_prefill:
            num_cached_tokens = self._kv_cache_manager.get_num_cached_tokens(request)
            if num_tokens - min(num_cached_tokens, num_tokens - 1) > step.prompt_room(0):
                return False
        headroom = len(self._running) + 1 if self._running else 0
        num_cached_tokens = self._kv_cache_manager.admit(request, headroom=headroom)
        if num_cached_tokens is None:
            assert self._running, f"{request} doesn't fit an empty cache"
            return False
        num_computed_tokens = min(num_cached_tokens, num_tokens - 1)
        # A token at least, though beside a long prefix even that may take longer than the target leaves.
        num_new_tokens = max(1, min(num_tokens - num_computed_tokens, step.prompt_room(num_computed_tokens)))
        del self._waiting[request.request_id]
        self._running[request.request_id] = request
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens
        request.num_prefill_tokens = num_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_computed_tokens
        block_ids = self._kv_cache_manager.block_table(request.request_id)
        row = NewRequestData(
            params=request.params,
            seed=request.seed,
            num_prompt_tokens=request.num_prompt_tokens,
            sample_index=request.sample_index,
            stop_token_ids=tuple(request.stop_token_ids),
            bad_words_token_ids=request.bad_words_token_ids,
            known_token_ids=request.token_ids(0, num_tokens) if request.samples_from_history else (),
        )
        step.add(request, num_computed_tokens, num_new_tokens, block_ids, row, num_cached_tokens)
        self._kv_cache_manager.insert(request, num_computed_tokens + num_new_tokens)
        self._count_chunk(request, step, num_computed_tokens, num_new_tokens)
        return True

    def _count_chunk(self, request: Request, step: _Step, start: int, num_new_tokens: int) -> None:
        """After a chunk: the request decodes from now on, or it was cut, and then no prompt behind it overtakes."""
        if start + num_new_tokens >= request.num_prefill_tokens:
            self._decoding.add(request.request_id)
            step.count_prompt(start, num_new_tokens)
        else:
            step.prompts_are_over = True

    def _append_token(self, request: Request, token_ids: tuple[int, ...]) -> EngineCoreOutput:
        """Append the sampled token and end the request if that was its last; STOP wins over LENGTH."""
        (token_id,) = token_ids
        if token_id < 0:  # masks have left nothing to choose from
            del self._running[request.request_id]
            self._release(request, RequestStatus.FINISHED)
            return EngineCoreOutput(
                request.request_id, (), FinishReason.ERROR, num_cached_tokens=request.num_cached_tokens
            )
        request.output_token_ids.append(token_id)
        if token_id in request.stop_token_ids and len(request.output_token_ids) > request.params.min_tokens:
            reason = FinishReason.STOP
        elif len(request.output_token_ids) >= request.max_tokens:
            reason = FinishReason.LENGTH
        else:
            return EngineCoreOutput(request.request_id, token_ids, num_cached_tokens=request.num_cached_tokens)
        del self._running[request.request_id]
        self._release(request, RequestStatus.FINISHED)
        asked_for = reason is FinishReason.STOP and token_id in request.params.stop_token_ids
        return EngineCoreOutput(
            request.request_id,
            token_ids,
            reason,
            token_id if asked_for else None,
            num_cached_tokens=request.num_cached_tokens,
        )

    @staticmethod
    def _with_logprobs(
        outputs: list[EngineCoreOutput], requests: list[Request], runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Add log-probabilities; a request that only got some of its prompt appears too."""
        by_id = {output.request_id: output for output in outputs}
        in_order: list[EngineCoreOutput] = []
        none: tuple[tuple[TokenLogprobs, ...], ...] = ((),) * len(requests)
        columns = (requests, runner_output.logprobs or none, runner_output.prompt_logprobs or none)
        for request, logprobs, of_prompt in zip(*columns, strict=True):
            output = by_id.get(request.request_id)
            if output is None and of_prompt and request.status is not RequestStatus.FINISHED:
                output = EngineCoreOutput(request.request_id, ())  # preempted meanwhile or not: they aren't asked again
            if output is not None:
                new_logprobs = logprobs if output.new_token_ids else ()
                in_order.append(dataclasses.replace(output, logprobs=new_logprobs, prompt_logprobs=of_prompt))
        return in_order

    def _preempt(self, request: Request, *, keep: bool = True) -> None:
        """Send a request that has just left the running ones to the front of the queue, to be computed anew.

        Args:
            request: it.
            keep: what it has computed stays in the prefix cache, and most of it will be found there again.
        """
        self._release(request, RequestStatus.WAITING, keep=keep)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)

    def _release(self, request: Request, status: RequestStatus, *, keep: bool = True) -> None:
        """Take blocks and row from a request that has just left the running ones."""
        request.status = status
        num_scheduled = min(request.num_computed_tokens + request.num_inflight_tokens, request.num_tokens)
        request.num_inflight_tokens = request.num_inflight_samples = 0
        self._decoding.discard(request.request_id)
        self._kv_cache_manager.free(request, num_scheduled if keep else 0)
        self._dropped_request_ids.append(request.request_id)


class _Step:
    """One step while it is planned: what is left of the budget, and the shares, those of one token apart.

    Args:
        budget: tokens.
        num_decodes: running requests that have their prompts behind them.
        target_itl: bounds what prompts get beside them.
    """

    __slots__ = (
        "_allowance",
        "_num_decodes",
        "_size",
        "_target_itl",
        "budget",
        "chunk_requests",
        "chunks",
        "decode_requests",
        "decodes",
        "num_decodes_to_come",
        "prompts_are_over",
    )

    def __init__(self, budget: int, num_decodes: int, target_itl: TargetITL | None) -> None:
        self.budget = self._size = budget
        self._num_decodes = self.num_decodes_to_come = num_decodes
        self._target_itl = target_itl if num_decodes > 0 else None
        self._allowance: PromptAllowance | None = None  # made when a prompt asks: most steps have none
        self.prompts_are_over = False
        self.decodes: list[ScheduledRequest] = []
        self.decode_requests: list[Request] = []
        self.chunks: list[ScheduledRequest] = []
        self.chunk_requests: list[Request] = []

    def prompt_room(self, start: int) -> int:
        """Tokens that a prompt may have from position ``start`` on; decodes to come keep theirs."""
        if self.prompts_are_over:
            return 0
        room = self.budget - self.num_decodes_to_come
        if self._target_itl is None or room <= 0:
            return room
        if self._allowance is None:
            self._allowance = self._target_itl.allowance(self._num_decodes)
        room = min(room, self._allowance.tokens(start))
        return self._target_itl.without_padding(self._size - self.budget + self.num_decodes_to_come, room)

    def count_prompt(self, start: int, num_new_tokens: int) -> None:
        """Take a prompt's share from what the other prompts may have."""
        if self._allowance is not None:
            self._allowance.take(num_new_tokens, start)

    def add(
        self,
        request: Request,
        start: int,
        num_new_tokens: int,
        new_block_ids: tuple[int, ...],
        new_request: NewRequestData | None = None,
        slots_start: int = 0,
    ) -> None:
        """Schedule positions [start, start + num_new_tokens) of a request that has slots for them."""
        end = start + num_new_tokens
        targets: tuple[int, ...] = ()
        targets_start = 0
        if request.params.prompt_logprobs is not None:
            targets, targets_start = request.take_prompt_targets(start, end)
        scheduled = ScheduledRequest(
            request.request_id,
            () if start >= request.num_prefill_tokens else request.token_ids(start, end),
            start,
            num_new_tokens,
            new_block_ids,
            end == request.num_tokens_with_inflight,
            new_request,
            targets,
            targets_start,
            slots_start if slots_start > start else 0,
        )
        request.num_inflight_tokens += num_new_tokens
        request.num_inflight_samples += scheduled.samples
        self.budget -= num_new_tokens
        if num_new_tokens == 1:
            self.decodes.append(scheduled)
            self.decode_requests.append(request)
        else:
            self.chunks.append(scheduled)
            self.chunk_requests.append(request)
