"""Followers: rank 0's hold on the other ranks, which are processes that it starts, or that torchrun has started.

Owns the channels, the processes and the folder through which they find each other. A thread of its own listens to all
of them, so that a rank's death is known at once, whatever rank 0 does or waits for at that moment.
"""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgspec

from pico_vllm.distributed.communicator import RankLostError
from pico_vllm.worker.child_process import how_it_ended, start_module
from pico_vllm.worker.rank_messages import (
    Failed,
    FromRank,
    Joining,
    RankChannel,
    Ready,
    Shutdown,
    decode_from_rank,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_Result = TypeVar("_Result")

#: After the first rank's end, for the last words of the others: the cause may be among them.
LAST_WORDS_S = 0.3
#: From an error of a collective to the word of the rank that has caused it.
MAX_BLAME_S = 10.0
STOP_S = 1.0  # then a process is killed
#: A step that takes so long waits for a rank that is stuck; of many tokens it may take a CPU minutes.
STUCK_S = {"cuda": 300.0, "cpu": 3600.0}
LOOK_S = 5.0  # how often somebody looks


@dataclass(slots=True)
class _Follower:
    """What is known of one rank.

    Attributes:
        rank: its number.
        channel: to it.
        process: None where torchrun has started it.
        progress: the last of ``Joining`` and ``Ready`` that it has sent.
        failure: its last words.
        is_gone: whether its channel has ended.
    """

    rank: int
    channel: RankChannel
    process: subprocess.Popen[bytes] | None
    progress: type[FromRank] | None = None
    failure: Failed | None = None
    is_gone: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.rank}" + ("" if self.process is None else f" (pid {self.process.pid})")


@dataclass(slots=True)
class _Ranks:
    """What the listening thread shares with rank 0; it doesn't keep ``Followers`` alive."""

    followers: list[_Follower]
    directory: str | None
    owner_pid: int = field(default_factory=os.getpid)
    news: threading.Condition = field(default_factory=threading.Condition)
    culprit: _Follower | None = None
    cause: str | None = None
    is_closing: bool = False
    is_over: bool = False  # nothing more will be heard
    abort: Callable[[], None] = lambda: None
    release: Callable[[], None] = lambda: None
    num_steps: int = 0  # that rank 0 has begun
    step_limit_s: float | None = None  # of the one that it is in
    listener: threading.Thread | None = None


class Followers:
    """All ranks but 0.

    Args:
        channels: to ranks 1, 2, …
        processes: likewise; () where they are somebody else's.
        directory: to remove at the end.
    """

    def __init__(
        self,
        channels: Sequence[RankChannel],
        processes: Sequence[subprocess.Popen[bytes]] = (),
        directory: str | None = None,
    ) -> None:
        owned = list(processes) or [None] * len(channels)
        followers = [_Follower(i + 1, channel, owned[i]) for i, channel in enumerate(channels)]
        self._ranks = _Ranks(followers, directory)
        self._ranks.listener = threading.Thread(
            target=_listen, args=(self._ranks,), name="pico-vllm-ranks", daemon=True
        )
        self._ranks.listener.start()
        #: Runs when it is called, when this object is collected or when the interpreter ends: once.
        self.close = weakref.finalize(self, _close, self._ranks)

    @classmethod
    def spawn(cls, count: int, directory: str) -> Followers:
        """Start so many processes on this machine; ``directory`` is theirs from now on."""
        channels: list[RankChannel] = []
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(count):
                ours, theirs = socket.socketpair()
                channels.append(RankChannel(ours))
                with theirs:
                    fd = theirs.fileno()
                    processes.append(start_module("pico_vllm.worker.follower", str(fd), directory, pass_fds=[fd]))
        except BaseException:
            _close(_Ranks([_Follower(i + 1, channels[i], process) for i, process in enumerate(processes)], directory))
            raise
        return cls(channels, processes, directory)

    @property
    def pids(self) -> list[int]:
        """Of the processes that were started here."""
        return [follower.process.pid for follower in self._ranks.followers if follower.process is not None]

    @property
    def cause_of_death(self) -> str | None:
        """What has become of a rank that is gone, with its traceback; None while all live."""
        return self._ranks.cause

    @property
    def last_words(self) -> Failed | None:
        """Of the rank that is gone, if it has said any."""
        culprit = self._ranks.culprit
        return None if culprit is None else culprit.failure

    def abort_with(self, abort: Callable[[], None], release: Callable[[], None]) -> None:
        """What ends a collective under way, and what gives everything back.

        Args:
            abort: called when a rank is gone, in another thread.
            release: called once, at the end. Neither must hold this object.
        """
        with self._ranks.news:
            self._ranks.abort, self._ranks.release = abort, release
            is_late = self._ranks.is_over
        if is_late:
            abort()

    @contextmanager
    def in_step(self, device_type: str) -> Iterator[None]:
        """Rank 0 may wait for the others in here; when it waits for too long, one of them counts as gone."""
        self._ranks.num_steps += 1
        self._ranks.step_limit_s = STUCK_S[device_type]
        try:
            yield
        finally:
            self._ranks.step_limit_s = None

    def send(self, message: bytes) -> None:
        """To every rank.

        Raises:
            RankLostError: one is gone.
        """
        for follower in self._ranks.followers:
            try:
                follower.channel.send(message)
            except OSError as error:
                raise RankLostError(f"{follower.name} cannot be reached: {error}") from error

    def send_each(self, messages: Sequence[bytes]) -> None:
        """To every rank its own; raises as ``send``."""
        for follower, message in zip(self._ranks.followers, messages, strict=True):
            try:
                follower.channel.send(message)
            except OSError as error:
                raise RankLostError(f"{follower.name} cannot be reached: {error}") from error

    def wait_for(self, kind: type[Joining] | type[Ready]) -> None:
        """Wait until every rank has said so.

        Raises:
            RankLostError: one is gone.
        """
        reached = (Joining, Ready) if kind is Joining else (Ready,)
        with self._ranks.news:
            while not self._ranks.is_over:
                if all(follower.progress in reached for follower in self._ranks.followers):
                    return
                self._ranks.news.wait()
        raise RankLostError(self._ranks.cause or "the ranks have been shut down")

    def while_all_live(self, call: Callable[[], _Result]) -> _Result:
        """Make a call that waits for the other ranks and may wait long for one that is gone.

        Returns:
            Its result.

        Raises:
            RankLostError: a rank is gone; the call is left to itself then, in a thread of its own.
        """
        results: list[_Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call())
            except BaseException as error:
                errors.append(error)
            with self._ranks.news:
                self._ranks.news.notify_all()

        threading.Thread(target=run, name="pico-vllm-connect", daemon=True).start()
        with self._ranks.news:
            while not results and not errors and not self._ranks.is_over:
                self._ranks.news.wait()
        if errors:
            raise errors[0]
        if not results:
            raise RankLostError(self._ranks.cause or "the ranks have been shut down")
        return results[0]

    def blame(self) -> str | None:
        """After an error of a collective: the rank that has caused it, in its own words. None if all seem to live."""
        deadline = time.monotonic() + MAX_BLAME_S
        with self._ranks.news:
            while not self._ranks.is_over and (left := deadline - time.monotonic()) > 0:
                self._ranks.news.wait(left)
        return self._ranks.cause


def private_directory() -> str:
    """A new folder that only this user may enter."""
    return tempfile.mkdtemp(prefix="pico-vllm-")


def _listen(ranks: _Ranks) -> None:
    """Take in what the ranks say, to their end; closes the channels then."""
    deadline: float | None = None
    watch = _StepWatch()
    stuck_s: float | None = None
    with selectors.DefaultSelector() as selector:
        for follower in ranks.followers:
            with suppress(OSError, ValueError):  # closed at once
                selector.register(follower.channel.socket, selectors.EVENT_READ, follower)
        while selector.get_map() and (deadline is None or time.monotonic() < deadline):
            timeout = LOOK_S if deadline is None else max(0.0, deadline - time.monotonic())
            for key, _ in selector.select(timeout):
                follower: _Follower = key.data
                _take_in(ranks, follower)
                if follower.is_gone:
                    selector.unregister(key.fileobj)
                if (follower.is_gone or follower.failure is not None) and deadline is None:
                    deadline = time.monotonic() + LAST_WORDS_S
            if deadline is not None and _knows_the_cause(ranks):
                break
            if deadline is None and (stuck_s := watch.stuck_s(ranks.num_steps, ranks.step_limit_s)) is not None:
                break
    for follower in ranks.followers:
        follower.channel.close()
    culprit = None if ranks.is_closing or stuck_s is not None else _culprit(ranks)
    cause = None if culprit is None else _cause(culprit)
    if stuck_s is not None and not ranks.is_closing:
        names = ", ".join(follower.name for follower in ranks.followers)
        cause = f"a step has not ended in {stuck_s:.0f} s: a rank is stuck (rank 0, {names}), and none says why"
        for follower in ranks.followers:
            if follower.process is not None:
                follower.process.kill()  # gloo waits for one that lives, aborted or not
    with ranks.news:
        ranks.culprit, ranks.cause, ranks.is_over = culprit, cause, True
        ranks.news.notify_all()
    if cause is not None:
        ranks.abort()


def _take_in(ranks: _Ranks, follower: _Follower) -> None:
    message = follower.channel.receive()
    try:
        decoded = None if message is None else decode_from_rank(message)
    except msgspec.MsgspecError:  # what speaks there is no rank
        decoded = None
    if decoded is None:
        follower.is_gone = True
        return
    if isinstance(decoded, Failed):
        follower.failure = decoded
        return
    with ranks.news:
        follower.progress = type(decoded)
        ranks.news.notify_all()


def _knows_the_cause(ranks: _Ranks) -> bool:
    return any(f.failure is not None and not f.failure.is_lost for f in ranks.followers)


class _StepWatch:
    """How long a step has taken, not counting while this process was stopped (Ctrl-Z, a debugger)."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._number = 0
        self._waited = 0.0

    def stuck_s(self, number: int, limit_s: float | None) -> float | None:
        """The limit of a step, if it has taken longer; None = it is over. To be asked every ``LOOK_S``."""
        now = time.monotonic()
        since, self._looked = min(now - self._looked, 2 * LOOK_S), now
        self._waited = self._waited + since if number == self._number else 0.0
        self._number = number
        return limit_s if limit_s is not None and self._waited > limit_s else None


def _culprit(ranks: _Ranks) -> _Follower:
    """The rank that was the first to go, as far as can be told: one with an error of its own, or without a word."""
    told = [f for f in ranks.followers if f.failure is not None and not f.failure.is_lost]
    silent = [f for f in ranks.followers if f.is_gone and f.failure is None]
    others = [f for f in ranks.followers if f.failure is not None]
    return (told + silent + others)[0]


def _cause(follower: _Follower) -> str:
    """What has become of it."""
    if (failure := follower.failure) is not None:
        first_line = f"{follower.name} has failed: {failure.error_type}: {failure.message}"
        return f"{first_line}\n\nIn the process of rank {follower.rank}:\n{failure.traceback}"
    if follower.process is None:
        return f"{follower.name} has closed its connection"
    with suppress(subprocess.TimeoutExpired):
        follower.process.wait(LAST_WORDS_S)
    return f"{follower.name} {how_it_ended(follower.process) or 'has closed its connection'}"


def _close(ranks: _Ranks) -> None:
    """Ask every process to end, kill those that do not within a second, and free everything."""
    if os.getpid() != ranks.owner_pid:  # a fork: nothing here is its own
        return
    ranks.is_closing = True
    for follower in ranks.followers:
        with suppress(OSError):
            follower.channel.socket.setblocking(False)  # one that reads nothing is not waited for
            follower.channel.send(encode(Shutdown()))
    deadline = time.monotonic() + (0.0 if ranks.cause else STOP_S)
    for follower in ranks.followers:
        if follower.process is None:
            continue
        try:
            follower.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            follower.process.kill()
            follower.process.wait()
        if follower.process.stdin is not None:
            follower.process.stdin.close()
    with ranks.news:  # ranks of torchrun's end by themselves, too, and nobody else waits for them
        while not ranks.is_over and (left := deadline - time.monotonic()) > 0:
            ranks.news.wait(left)
    for follower in ranks.followers:
        follower.channel.end()
    if ranks.directory is not None:
        shutil.rmtree(ranks.directory, ignore_errors=True)
    ranks.release()
    # A thread that comes back from a library when the interpreter has ended takes the process down with it.
    if ranks.listener is not None and ranks.listener is not threading.current_thread():
        ranks.listener.join(STOP_S)
