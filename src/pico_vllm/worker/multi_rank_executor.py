"""MultiRankExecutor: the engine core's handle on several ranks. This process is rank 0; the others do what it does.

Rank 0 runs each step on its own shards, as ``UniProcExecutor`` does, after it has sent the others the step's plan. They
compute the same logits and choose the same tokens, so its results are everybody's, and nothing comes back. What one
rank cannot do, all cannot: an error on any of them ends the engine, and says which rank it was and what it said.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import traceback
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch

from pico_vllm.config import launched_rank
from pico_vllm.distributed.communicator import TIMEOUT, RankLostError, connect
from pico_vllm.distributed.rendezvous import LOOPBACK, file_store, launched_store, publish_leader_address
from pico_vllm.distributed.sharding import Shard
from pico_vllm.distributed.tensor_parallel import MultiRank
from pico_vllm.errors import ConfigError, EngineDeadError, RequestError, WeightLoadError
from pico_vllm.scheduler_output import NewRequestData
from pico_vllm.worker.cuda_graph import no_garbage_collection
from pico_vllm.worker.followers import Followers, private_directory
from pico_vllm.worker.model_runner import ModelRunner, resolve_device
from pico_vllm.worker.rank_messages import (
    PROTOCOL_VERSION,
    Build,
    Hello,
    Joining,
    RankChannel,
    Ready,
    Reset,
    StartStep,
    decode_from_rank,
    encode,
    sample_step,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C._distributed_c10d import Store

    from pico_vllm.config import EngineConfig, LaunchedRank, ModelConfig
    from pico_vllm.distributed.communicator import Communicator
    from pico_vllm.models.source import ModelSource
    from pico_vllm.models.weights import Progress
    from pico_vllm.sampling_params import SamplingParams
    from pico_vllm.scheduler_output import GrammarMasks, ModelRunnerOutput, SchedulerOutput
    from pico_vllm.worker.device_time import DeviceTime
    from pico_vllm.worker.pending_step import PendingStep

logger = logging.getLogger(__name__)

HELLO_S = 10.0  # for a rank that has connected to say which one it is
_START_ERRORS = {kind.__name__: kind for kind in (ConfigError, WeightLoadError)}


class MultiRankExecutor:
    """Runs steps on ``tensor_parallel_size`` ranks. An ``Executor``.

    Raises:
        ConfigError: the model does not split so, or there are too few devices; no process was started then.
        ConfigError, WeightLoadError: as with one rank.
        EngineDeadError: another rank could not be built; carries its traceback. So do all methods when one is gone.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        source: ModelSource,
        *,
        max_model_len: int,
        progress: Progress | None = None,
    ) -> None:
        shard = Shard(0, config.parallel.tensor_parallel_size)
        shard.model_config(model_config)  # refuses
        launched = launched_rank()
        num_local = shard.size if launched is None else 1
        device, *_ = [resolve_device(config.device, local_rank) for local_rank in range(num_local)]
        self._death: str | None = None
        build = Build(
            version=PROTOCOL_VERSION,
            rank=0,
            size=shard.size,
            options=dataclasses.replace(config, model=os.path.abspath(source.path), revision=None).to_options(),
            max_model_len=max_model_len,
            log_level=logging.getLogger("pico_vllm").getEffectiveLevel(),
            num_threads=max(1, torch.get_num_threads() // shard.size) if device.type == "cpu" else None,
            store_path=None,
        )
        met = _start_followers(build) if launched is None else _await_followers(build, launched)
        self._followers = met.followers
        try:
            self._followers.send_each(
                [encode(msgspec.structs.replace(met.build, rank=rank)) for rank in range(1, shard.size)]
            )
            self._followers.wait_for(Joining)
            communicator = self._followers.while_all_live(
                partial(connect, met.store, shard, device, addresses=met.addresses)
            )
            self._followers.abort_with(communicator.abort, communicator.close)
            overlaps = config.parallel.overlaps(on_gpu=device.type == "cuda")
            with no_garbage_collection():  # what is made here stays: looking through it again and again frees nothing
                self.runner = ModelRunner(
                    config,
                    model_config,
                    source,
                    max_model_len=max_model_len,
                    progress=progress,
                    device=device,
                    new_group=partial(
                        MultiRank,
                        communicator=communicator,
                        overlaps=overlaps,
                        watched=self._followers.while_all_live,
                    ),
                )
            # At the interpreter's end, too, where the engine may be in use still.
            self._followers.abort_with(communicator.abort, partial(_release, weakref.ref(self.runner), communicator))
            self._followers.wait_for(Ready)
        except RankLostError as error:
            self._fail_to_start(error)
        except BaseException as error:
            if self._followers.cause_of_death is not None:  # what came of it here says less
                self._fail_to_start(error)
            self.shutdown()
            raise
        #: Learned from the memory that was left; the engine passes it on to the KV cache manager.
        self.num_blocks = self.runner.num_blocks
        #: Of a step at most: what the devices have memory for.
        self.max_num_batched_tokens = self.runner.max_num_batched_tokens
        #: What steps take on the slowest rank; None where there is no target to keep.
        self.measured_steps = self.runner.measured_steps
        logger.info("%d ranks, the others in processes %s", shard.size, self.pids or "of torchrun's")

    @property
    def pids(self) -> list[int]:
        """Of the processes that were started here."""
        return self._followers.pids

    @property
    def device_time(self) -> DeviceTime:
        """How long rank 0's device had something to do; sums since the start."""
        return self.runner.device_time

    @property
    def computes_beside_the_host(self) -> bool:
        """Whether the devices compute while the host does something else."""
        return self.runner.computes_beside_the_host

    def check_request(self, params: SamplingParams) -> None:
        """Refuse what cannot be sent to the other ranks.

        Raises:
            RequestError: it holds logits processors, or a value that msgpack has no place for.
        """
        if params.logits_processors:
            raise RequestError(
                "logits_processors are functions and cannot be sent to the other ranks' processes: use "
                "tensor_parallel_size=1"
            )
        try:
            encode(NewRequestData(params, 0, 0))
        except UnicodeEncodeError as error:
            raise RequestError(f"{error.object!r} holds half a surrogate pair, which no UTF-8 has: remove it") from None
        except (OverflowError, TypeError, ValueError) as error:
            raise RequestError(f"the request cannot be sent to the other ranks' processes: {error}") from None

    def reset(self) -> None:
        """Forget every request and every step in flight, on all ranks: the next step sends all of them anew."""
        with self._fatal():
            self._followers.send(encode(Reset()))
            self.runner.reset()

    def execute(
        self, step: SchedulerOutput, make_masks: Callable[[], GrammarMasks | None] | None = None
    ) -> ModelRunnerOutput:
        """Run one step and wait for its sampled ids; ``make_masks`` is called while the devices compute."""
        pending = self.start(step)
        self.sample(pending, None if make_masks is None or not step.scheduled else make_masks())
        return self.finish(pending)

    def start(self, step: SchedulerOutput) -> PendingStep:
        """Launch a step's forward pass; the step before it has been sampled, and may still be on the devices."""
        with self._fatal():
            self._followers.send(encode(StartStep(step)))
            return self.runner.start(step)

    def sample(self, pending: PendingStep, masks: GrammarMasks | None) -> None:
        """Launch the choice of its tokens."""
        with self._fatal():
            if pending.slot is not None:
                self._followers.send(encode(sample_step(masks)))
            self.runner.sample(pending, masks)

    def finish(self, pending: PendingStep) -> ModelRunnerOutput:
        """Wait for its sampled ids; steps are finished in the order in which they were started."""
        with self._fatal():
            output = self.runner.finish(pending)
            if (cause := self._followers.cause_of_death) is not None:  # what an aborted collective gave is nothing
                raise RankLostError(cause)
            return output

    def shutdown(self) -> None:
        """End the other ranks' processes; every later call raises EngineDeadError."""
        self._death = self._death or "the ranks have been shut down"
        self._followers.close()

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """An error in here leaves ranks that wait for each other: all end, and every later call says why."""
        if self._death is not None:
            raise EngineDeadError(self._death)
        try:
            with self._followers.in_step(self.runner.device.type):
                yield
        except RankLostError as error:
            self._die(error)
        except BaseException as error:
            if isinstance(error, Exception) and self._followers.cause_of_death is not None:
                self._die(error)
            trace = "".join(traceback.format_exception(error))
            self._death = f"rank 0 has failed: {type(error).__name__}: {error}\n\nIn the process of rank 0:\n{trace}"
            self.shutdown()
            if isinstance(error, Exception):
                raise EngineDeadError(self._death) from error
            raise  # what a signal handler of the application's has raised stays what it is

    def _fail_to_start(self, error: BaseException) -> None:
        """What is wrong for all ranks is the same error as with one, whichever rank has come to it first.

        Raises:
            ConfigError, WeightLoadError: of the lost rank, with its traceback as a note.
            EngineDeadError: anything else.
        """
        self._followers.blame()
        words = self._followers.last_words
        kind = None if words is None else _START_ERRORS.get(words.error_type)
        if words is None or kind is None:
            self._die(error)
            return
        self.shutdown()
        start_error = kind(words.message)
        start_error.add_note(self._followers.cause_of_death or "")
        raise start_error from None

    def _die(self, error: BaseException) -> None:
        """Find out what has become of the lost rank, and end the others.

        Raises:
            EngineDeadError: always.
        """
        self._death = self._followers.blame() or f"a rank is lost, and none says why: {error}"
        self.shutdown()
        raise EngineDeadError(self._death) from error


def _release(runner: weakref.ref[ModelRunner], communicator: Communicator) -> None:
    """NCCL's end waits for graphs that hold kernels of its.

    A runner that is collected in a cycle is out of sight here: if its graphs hold some (GPUs that don't reach each
    other's memory), they are waited for in vain, for ``CLOSE_S``.
    """
    alive = runner()
    if alive is not None:
        alive.drop_graphs()
    communicator.close()


@dataclasses.dataclass(frozen=True, slots=True)
class _Met:
    """The other ranks' processes, how all ranks meet, and what each is to build."""

    followers: Followers
    store: Store
    addresses: tuple[str, ...]
    build: Build


def _start_followers(build: Build) -> _Met:
    """On this machine; nobody else can reach them."""
    directory = private_directory()
    path = os.path.join(directory, "store")
    followers = Followers.spawn(build.size - 1, directory)
    return _Met(followers, file_store(path, build.size), (LOOPBACK,), msgspec.structs.replace(build, store_path=path))


def _await_followers(build: Build, launched: LaunchedRank) -> _Met:
    """Those that torchrun has started, on whatever hosts."""
    store = launched_store(launched)
    channels: dict[int, RankChannel] = {}
    with socket.create_server((launched.leader_host, 0)) as server:
        server.settimeout(TIMEOUT.total_seconds())
        publish_leader_address(store, launched.leader_host, server.getsockname()[1])
        while len(channels) < build.size - 1:
            try:
                channel = RankChannel(server.accept()[0])
            except TimeoutError:
                raise EngineDeadError(f"only ranks 0, {sorted(channels)} have come in {TIMEOUT}") from None
            channel.socket.settimeout(HELLO_S)
            message = channel.receive()
            channel.socket.settimeout(None)
            with suppress(msgspec.MsgspecError):  # whoever else knocks is no rank
                hello = None if message is None else decode_from_rank(message)
                if isinstance(hello, Hello):
                    channels[hello.rank] = channel
    return _Met(Followers([channels[rank] for rank in range(1, build.size)]), store, (), build)
