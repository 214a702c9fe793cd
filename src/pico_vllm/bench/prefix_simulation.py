"""What a prefix cache would do for a log of requests: the real KVCacheManager and radix tree, without a model.

It replays the log in its order, so many requests at a time, and plays the scheduler's part: admit, insert the prompt,
end with the answer. Two formats, a JSON object a line:

- token ids: ``{"prompt_token_ids": [...], "output_token_ids": [...]}``, or ``"output_len": n`` for an answer that no
  later prompt repeats; with ``"cache_salt"`` where tenants must not share;
- hashed blocks, as Mooncake's traces have them: ``{"input_length": n, "output_length": m, "hash_ids": [...]}``, where
  equal ids stand for equal blocks of ``hash_block_size`` tokens.

``bench prefix`` calls it.
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pico_vllm.errors import ConfigError
from pico_vllm.kv_cache import KVCacheManager
from pico_vllm.request import Request
from pico_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pico_vllm.kv_cache import CacheStats

#: The manager's calls that are timed. "match" alone is what the scheduler asks without chunked prefill.
OPERATIONS = ("match", "admit", "insert", "free")
_INT32 = 1 << 31
_PARAMS = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One line: token ids of prompt and answer."""

    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What came of a log.

    Attributes:
        num_requests: replayed.
        num_too_long: left out, since the whole cache couldn't hold their prompts.
        num_early_ends: requests that ended before their time so that the next one got in.
        num_nodes: of the tree at the end.
        stats: of the cache at the end.
        times_us: of each operation, one a request.
    """

    num_requests: int
    num_too_long: int
    num_early_ends: int
    num_nodes: int
    stats: CacheStats
    times_us: dict[str, list[float]]

    def percentile_us(self, operation: str, share: float) -> float:
        """Of an operation's times, 0 where there are none."""
        times = sorted(self.times_us[operation])
        return times[min(int(len(times) * share), len(times) - 1)] if times else 0.0


def read_log(path: Path, *, hash_block_size: int) -> list[LoggedRequest]:
    """Read a log of either format.

    Raises:
        ConfigError: the file can't be read, or a line is no request; the line is named.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the log {path}: {error}") from None
    fresh = iter(range(-1, -_INT32, -1))  # ids that stand in no prompt
    requests = []
    for number, line in enumerate(lines, 1):
        try:
            requests.append(_parse(json.loads(line), hash_block_size, fresh))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number}: no request: {type(error).__name__}: {error}") from None
    if not requests:
        raise ConfigError(f"{path} holds no request")
    return requests


def simulate(
    requests: Sequence[LoggedRequest], *, num_blocks: int, block_size: int, max_num_seqs: int
) -> SimulationResult:
    """Replay a log.

    Args:
        requests: in the order of their arrival.
        num_blocks, block_size: of the cache.
        max_num_seqs: requests at a time: the oldest ends when one more comes.
    """
    manager = KVCacheManager(num_blocks, block_size, enable_prefix_caching=True)
    times: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    live: deque[tuple[Request, Sequence[int]]] = deque()
    num_too_long = num_early_ends = 0
    for number, logged in enumerate(requests):
        if len(logged.prompt_token_ids) > manager.max_tokens:
            num_too_long += 1
            continue
        request = Request(str(number), logged.prompt_token_ids, _PARAMS, cache_salt=logged.cache_salt)
        _ = request.packed_prompt  # once a request, when it is made
        if len(live) == max_num_seqs:
            _end(manager, *live.popleft(), times["free"])
        manager.begin_step()
        start = time.perf_counter()
        manager.get_num_cached_tokens(request)
        times["match"].append((time.perf_counter() - start) * 1e6)
        start = time.perf_counter()
        while manager.admit(request, headroom=1 if live else 0) is None:
            num_early_ends += 1
            _end(manager, *live.popleft(), times["free"])
            start = time.perf_counter()
        times["admit"].append((time.perf_counter() - start) * 1e6)
        start = time.perf_counter()
        manager.insert(request, request.num_tokens)
        times["insert"].append((time.perf_counter() - start) * 1e6)
        manager.take_block_copies()
        live.append((request, logged.output_token_ids))
    for request, output_token_ids in live:
        _end(manager, request, output_token_ids, times["free"])
    num_nodes = sum(1 for _ in manager.nodes())
    num_requests = len(requests) - num_too_long
    return SimulationResult(num_requests, num_too_long, num_early_ends, num_nodes, manager.stats, times)


def _end(manager: KVCacheManager, request: Request, output_token_ids: Sequence[int], times_us: list[float]) -> None:
    """A request has its answer, as far as there are blocks for it; the KV of its last token is never stored."""
    num_tokens = request.num_tokens + max(len(output_token_ids) - 1, 0)
    if manager.allocate_slots(request.request_id, num_tokens) is None:
        num_tokens = request.num_tokens
    request.output_token_ids.extend(output_token_ids)
    start = time.perf_counter()
    manager.free(request, num_tokens)
    times_us.append((time.perf_counter() - start) * 1e6)


def _parse(fields: dict[str, Any], hash_block_size: int, fresh: Iterator[int]) -> LoggedRequest:
    if "hash_ids" in fields:
        length = fields["input_length"]
        prompt = [
            (hash_id * hash_block_size + offset) % _INT32
            for hash_id in fields["hash_ids"]
            for offset in range(hash_block_size)
        ][:length]
        if len(prompt) < length:
            raise ValueError(
                f"{len(fields['hash_ids'])} hash_ids of {hash_block_size} tokens are too few for input_length={length}"
            )
        output = [next(fresh) for _ in range(fields["output_length"])]
    else:
        prompt = fields["prompt_token_ids"]
        output = fields.get("output_token_ids")
        if output is None:
            output = [next(fresh) for _ in range(fields.get("output_len", 0))]
    if not prompt or not all(type(token_id) is int and -_INT32 <= token_id < _INT32 for token_id in (*prompt, *output)):
        raise ValueError("a prompt has at least one token, and tokens are 32-bit integers")
    if min(prompt) < 0:
        raise ValueError(f"a prompt's tokens are not negative: {min(prompt)}")
    return LoggedRequest(tuple(prompt), tuple(output), fields.get("cache_salt"))
