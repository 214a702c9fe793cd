"""Workloads: which token ids are sent when, the same for every engine, and their files.

A workload is plain data, made from a seed before anything is timed. How its requests arrive is part of it:

- closed loop: ``concurrency`` requests are live at any time; one that ends is replaced by the next. With a concurrency
  of all requests it is a burst;
- open loop: every request has its own ``arrival_s`` (Poisson arrivals), whether the engine keeps up or not.

A conversation's later turns ``follow`` the earlier one: their prompt begins with its prompt and the engine's answer, so
they are sent once it has ended. A file holds one workload a run, since prompts are drawn anew for every run: a cache of
an earlier run can serve none of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pico_vllm.errors import ConfigError

#: Ids that prompts are drawn from: [1000, 150000), special tokens and the end of Qwen's vocabulary left out.
_LOWEST_ID, _HIGHEST_ID = 1000, 150_000


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request.

    Attributes:
        prompt_token_ids: the prompt, or of a later turn what is appended to the conversation so far.
        max_tokens: output tokens; EOS is ignored, so it is their exact number.
        temperature: 0 is greedy.
        arrival_s: open loop: seconds after the start.
        follows: index of the conversation's previous turn.
    """

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    arrival_s: float | None = None
    follows: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """One run's requests, and how they arrive.

    Attributes:
        requests: in the order of their submission; in an open loop arrivals don't go back in time, but for those of
            later turns.
        concurrency: live requests at most (closed loop); None = open loop, and every request has an arrival.
    """

    requests: tuple[WorkloadRequest, ...]
    concurrency: int | None

    def __post_init__(self) -> None:
        if not self.requests:
            raise ConfigError("a workload needs at least one request")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency={self.concurrency} must be at least 1")
        for index, request in enumerate(self.requests):
            if not request.prompt_token_ids or request.max_tokens < 1:
                raise ConfigError(f"request {index} needs a prompt token and an output token at least")
            if request.follows is not None and not 0 <= request.follows < index:
                raise ConfigError(f"request {index} follows {request.follows}, which must be an earlier request")
            if (self.concurrency is None) != (request.arrival_s is not None):
                raise ConfigError(
                    f"request {index}: arrival_s belongs to the open loop (concurrency None), and to it only"
                )
        self._check_arrivals()

    def _check_arrivals(self) -> None:
        latest = 0.0
        for index, request in enumerate(self.requests):
            if request.arrival_s is None:
                continue
            if not 0 <= request.arrival_s < math.inf:
                raise ConfigError(f"request {index}: arrival_s={request.arrival_s} must be in [0, inf)")
            if request.follows is None:
                if request.arrival_s < latest:
                    raise ConfigError(
                        f"request {index}: arrival_s={request.arrival_s} is before {latest} of a request above it: "
                        "sort them"
                    )
                latest = request.arrival_s

    @property
    def num_output_tokens(self) -> int:
        """Tokens that an engine must give."""
        return sum(request.max_tokens for request in self.requests)

    def prompt_lens(self) -> list[int]:
        """Prompt tokens of each request; of a later turn the conversation so far counts too."""
        lens: list[int] = []
        for request in self.requests:
            before = 0
            if request.follows is not None:
                before = lens[request.follows] + self.requests[request.follows].max_tokens
            lens.append(before + len(request.prompt_token_ids))
        return lens

    def longest_request(self) -> int:
        """Prompt and output tokens of the longest request."""
        return max(n + request.max_tokens for n, request in zip(self.prompt_lens(), self.requests, strict=True))

    def digest(self) -> str:
        """SHA-256 of everything in it: two records with the same digest ran the same requests."""
        text = json.dumps([self.concurrency, [dataclasses.astuple(request) for request in self.requests]])
        return hashlib.sha256(text.encode()).hexdigest()


#: Draws the requests of a run; the generator is seeded for the workload and the run.
DrawRequests = Callable[[random.Random], list[WorkloadRequest]]


@dataclass(frozen=True, slots=True)
class WorkloadPlan:
    """A workload of any number of runs: ``draw`` gives each its own prompts.

    Attributes:
        name: goes into the seed, so two plans with one seed don't share prompts.
        seed: of all runs.
        draw: makes one run's requests.
        concurrency: of the closed loop; 0 = all at once; None = open loop, and ``rate`` is needed.
        rate: requests a second of the open loop.
    """

    name: str
    seed: int
    draw: DrawRequests
    concurrency: int | None = 1
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) != (self.rate is not None):
            raise ConfigError("a plan has either a concurrency (closed loop) or a rate (open loop)")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"rate={self.rate} requests/s must be above 0")

    def run(self, index: int) -> Workload:
        """The workload of run ``index``; equal for equal arguments, on every machine."""
        rng = random.Random(f"{self.name}/{self.seed}/{index}")
        requests = self.draw(rng)
        if self.rate is not None:
            requests = poisson_arrivals(requests, self.rate, rng)
        return Workload(tuple(requests), len(requests) if self.concurrency == 0 else self.concurrency)


# ---------------------------------------------------------------------------------------------------------- drawing
def random_ids(rng: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    """``length`` token ids, uniform over the part of the vocabulary that prompts are drawn from."""
    low = min(_LOWEST_ID, vocab_size // 10)
    high = min(_HIGHEST_ID, vocab_size)
    return tuple(rng.randrange(low, high) for _ in range(length))


def fixed_lengths(num: int, input_len: int, output_len: int, vocab_size: int, temperature: float = 0.0) -> DrawRequests:
    """``num`` requests of the same lengths."""

    def draw(rng: random.Random) -> list[WorkloadRequest]:
        prompts = (random_ids(rng, input_len, vocab_size) for _ in range(num))
        return [WorkloadRequest(prompt, output_len, temperature) for prompt in prompts]

    return draw


def uniform_lengths(
    num: int, input_lens: tuple[int, int], output_lens: tuple[int, int], vocab_size: int, temperature: float = 0.0
) -> DrawRequests:
    """``num`` requests whose lengths are uniform in [low, high], both ends included."""

    def draw(rng: random.Random) -> list[WorkloadRequest]:
        return [
            WorkloadRequest(
                random_ids(rng, rng.randint(*input_lens), vocab_size), rng.randint(*output_lens), temperature
            )
            for _ in range(num)
        ]

    return draw


def shared_prefix(num: int, prefix_len: int, own_len: int, output_len: int, vocab_size: int) -> DrawRequests:
    """``num`` requests that begin with the same ``prefix_len`` tokens and go on with ``own_len`` of their own."""

    def draw(rng: random.Random) -> list[WorkloadRequest]:
        prefix = random_ids(rng, prefix_len, vocab_size)
        return [WorkloadRequest(prefix + random_ids(rng, own_len, vocab_size), output_len) for _ in range(num)]

    return draw


def multi_turn(
    num_conversations: int, num_turns: int, first_len: int, turn_len: int, output_len: int, vocab_size: int
) -> DrawRequests:
    """Conversations: a first prompt of ``first_len`` tokens, then ``turn_len`` tokens after each answer."""

    def draw(rng: random.Random) -> list[WorkloadRequest]:
        requests: list[WorkloadRequest] = []
        for turn in range(num_turns):
            for conversation in range(num_conversations):
                follows = None if turn == 0 else (turn - 1) * num_conversations + conversation
                ids = random_ids(rng, turn_len if turn else first_len, vocab_size)
                requests.append(WorkloadRequest(ids, output_len, follows=follows))
        return requests

    return draw


def from_prompts(prompts: Sequence[tuple[Sequence[int], int]], num: int | None = None) -> DrawRequests:
    """(prompt ids, max_tokens) pairs of a file, in random order; ``num`` of them (drawn again when they are fewer)."""

    def draw(rng: random.Random) -> list[WorkloadRequest]:
        wanted = len(prompts) if num is None else num
        order: list[int] = []
        while len(order) < wanted:
            order += rng.sample(range(len(prompts)), len(prompts))
        return [WorkloadRequest(tuple(prompts[i][0]), prompts[i][1]) for i in order[:wanted]]

    return draw


def poisson_arrivals(requests: Iterable[WorkloadRequest], rate: float, rng: random.Random) -> list[WorkloadRequest]:
    """Give each request an arrival: gaps are exponential with mean 1 / ``rate`` seconds; the first comes at 0."""
    now, arriving = 0.0, []
    for request in requests:
        arriving.append(dataclasses.replace(request, arrival_s=now))
        now += rng.expovariate(rate)
    return arriving


# ------------------------------------------------------------------------------------------------------------ files
def write_workloads(path: Path, name: str, workloads: Sequence[Workload]) -> None:
    """Write the runs of a workload: a header line, then one line a request."""
    with _create(path) as file:
        header = {"workload": name, "num_runs": len(workloads), "concurrency": [w.concurrency for w in workloads]}
        file.write(json.dumps(header) + "\n")
        for run, workload in enumerate(workloads):
            for request in workload.requests:
                fields = {k: v for k, v in dataclasses.asdict(request).items() if v is not None}
                file.write(json.dumps({"run": run, **fields}) + "\n")


def read_workloads(path: Path) -> tuple[str, list[Workload]]:
    """Read what ``write_workloads`` wrote: (name, one workload a run).

    Raises:
        ConfigError: the file is missing or is no workload; the line is named.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the workload {path}: {error}") from None
    number = 1
    try:
        header = json.loads(lines[0])
        num_runs = header["num_runs"]
        if num_runs < 1:
            raise ValueError(f"num_runs={num_runs} must be at least 1")
        runs: list[list[WorkloadRequest]] = [[] for _ in range(num_runs)]
        for number, line in enumerate(lines[1:], 2):  # noqa: B007 (the error names it)
            fields: dict[str, Any] = json.loads(line)
            fields["prompt_token_ids"] = tuple(fields["prompt_token_ids"])
            if not all(type(token_id) is int for token_id in fields["prompt_token_ids"]):
                raise ValueError("prompt_token_ids must be integers")
            run = fields.pop("run")
            if not 0 <= run < num_runs:
                raise ValueError(f"run={run} must be in [0, {num_runs - 1}]")
            runs[run].append(WorkloadRequest(**fields))
        loops = zip(runs, header["concurrency"], strict=True)
        return header["workload"], [Workload(tuple(requests), concurrency) for requests, concurrency in loops]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{path}, line {number}: no workload: {type(error).__name__}: {error}") from None


def _create(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w")
    except OSError as error:
        raise ConfigError(f"can't write the workload {path}: {error}") from None
