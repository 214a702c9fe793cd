"""A rank other than 0: ``python -m pico_vllm.worker.follower FD DIRECTORY``, or a script that torchrun has started.

It builds a model runner of its own and does what rank 0 says, step by step: the same forward passes on its shards, and
the same choice of tokens from the same logits, which it keeps for the next step. Nothing of a step goes back to rank 0.
It ends when it is told to, when a step fails (after it has said why), and when rank 0 is gone.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import shutil
import socket
import sys
import traceback
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pico_vllm.config import EngineConfig, LaunchedRank, launched_rank
from pico_vllm.distributed.communicator import RankLostError, connect
from pico_vllm.distributed.rendezvous import LOOPBACK, file_store, launched_store, leader_address
from pico_vllm.distributed.sharding import Shard
from pico_vllm.errors import ConfigError
from pico_vllm.worker.child_process import end_with_parent, ignore_ctrl_c
from pico_vllm.worker.rank_messages import (
    PROTOCOL_VERSION,
    Build,
    Failed,
    Hello,
    Joining,
    RankChannel,
    Ready,
    Reset,
    SampleStep,
    Shutdown,
    StartStep,
    decode_to_rank,
    encode,
    masks_of,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from pico_vllm.config import ModelConfig
    from pico_vllm.models.source import ModelSource
    from pico_vllm.worker.model_runner import ModelRunner
    from pico_vllm.worker.pending_step import PendingStep

#: Steps that may be in flight at once on any rank: the one that is launched, and the one before it.
MAX_INFLIGHT = 2


def main() -> None:
    """Serve rank 0, which has started this process."""
    ignore_ctrl_c()
    if len(sys.argv) != 3:
        print("this is started by pico_vllm when tensor_parallel_size > 1", file=sys.stderr)  # noqa: T201 - a person reads it
        sys.exit(2)
    fd, directory = int(sys.argv[1]), sys.argv[2]
    faulthandler.enable()
    end_with_parent(partial(shutil.rmtree, directory, ignore_errors=True))
    channel = RankChannel(socket.socket(fileno=fd))
    _end(_serve(channel, None))


def serve_if_launched_as_follower(config: EngineConfig, model_config: ModelConfig, source: ModelSource) -> None:
    """Under torchrun: on rank 0 return at once; on any other serve rank 0 to its end, then exit.

    Raises:
        ConfigError: torchrun has started another number of processes than there are ranks.
        SystemExit: rank 0 has ended.
    """
    launched = launched_rank()
    size = config.parallel.tensor_parallel_size
    if launched is None or size == 1:
        return
    if launched.size != size:
        raise ConfigError(
            f"tensor_parallel_size={size}, but torchrun has started {launched.size} processes: they must be as many"
        )
    if launched.rank == 0:
        return
    with suppress(ValueError):  # not on the main thread, which alone may say so
        ignore_ctrl_c()
    store = launched_store(launched)
    with socket.create_connection(leader_address(store)) as connected:
        channel = RankChannel(connected)
        channel.send(encode(Hello(launched.rank)))
        code = _serve(channel, _Launched(launched, store, config, model_config, source))
    sys.exit(code)


@dataclass(frozen=True, slots=True)
class _Launched:
    """What a process that torchrun has started knows by itself."""

    place: LaunchedRank
    store: Store
    config: EngineConfig
    model_config: ModelConfig
    source: ModelSource


def _serve(channel: RankChannel, launched: _Launched | None) -> int:
    """Build what rank 0 asks for and run its steps; returns the exit code."""
    at_end = ExitStack()
    try:
        message = channel.receive()
        if message is None:
            return 1
        build = decode_to_rank(message)
        if isinstance(build, Shutdown):
            return 0
        assert isinstance(build, Build), f"the first message is {build}"
        runner = _build(channel, build, launched, at_end)
        channel.send(encode(Ready()))
        return _run(channel, runner)
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        with suppress(OSError):
            channel.send(encode(Failed(type(error).__name__, str(error), trace, isinstance(error, RankLostError))))
        return 1
    finally:
        at_end.close()


def _build(channel: RankChannel, build: Build, launched: _Launched | None, at_end: ExitStack) -> ModelRunner:
    import torch

    from pico_vllm.distributed.tensor_parallel import MultiRank
    from pico_vllm.models.source import find_model
    from pico_vllm.worker.cuda_graph import no_garbage_collection
    from pico_vllm.worker.model_runner import ModelRunner, resolve_device

    if build.version != PROTOCOL_VERSION:
        raise ConfigError(f"rank 0 speaks protocol {build.version} and this one {PROTOCOL_VERSION}: install the same")
    if launched is None:
        logging.basicConfig(level=build.log_level, format=f"%(asctime)s rank {build.rank}: %(name)s: %(message)s")
        if build.num_threads is not None:
            torch.set_num_threads(build.num_threads)
        config = EngineConfig.from_options(**build.options)
        source = find_model(config.model)
        model_config = source.model_config()
    else:
        config, model_config, source = launched.config, launched.model_config, launched.source
        _refuse_other_options(build, config)
    shard = Shard(build.rank, build.size)
    device = resolve_device(config.device, shard.rank if launched is None else launched.place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    channel.send(encode(Joining()))
    if launched is None:
        assert build.store_path is not None
        communicator = connect(file_store(build.store_path, shard.size), shard, device, addresses=(LOOPBACK,))
    else:
        communicator = connect(launched.store, shard, device)
    at_end.callback(communicator.abort)
    overlaps = config.parallel.overlaps(on_gpu=device.type == "cuda")
    with no_garbage_collection():
        runner = ModelRunner(
            config,
            model_config,
            source,
            max_model_len=build.max_model_len,
            device=device,
            new_group=partial(MultiRank, communicator=communicator, overlaps=overlaps),
        )
    if launched is not None:  # whose interpreter ends as rank 0's does: first the graphs, then NCCL
        at_end.callback(communicator.close)
        at_end.callback(runner.drop_graphs)
    return runner


def _refuse_other_options(build: Build, config: EngineConfig) -> None:
    """Every process of torchrun's has made its own; a path may differ from host to host."""
    ours, paths = config.to_options(), ("model", "tokenizer", "revision")
    if differing := [name for name, value in build.options.items() if name not in paths and ours.get(name) != value]:
        name = differing[0]
        raise ConfigError(f"rank 0 has {name}={build.options[name]!r} and rank {build.rank} {name}={ours.get(name)!r}")


def _run(channel: RankChannel, runner: ModelRunner) -> int:
    """Do what rank 0 does, until it ends."""
    in_flight: deque[PendingStep] = deque()
    while (data := channel.receive()) is not None:
        message = decode_to_rank(data)
        if isinstance(message, StartStep):
            while len(in_flight) >= MAX_INFLIGHT:  # rank 0 has finished it
                runner.finish(in_flight.popleft())
            in_flight.append(runner.start(message.plan))
        elif isinstance(message, SampleStep):
            runner.sample(in_flight[-1], masks_of(message))
        elif isinstance(message, Reset):
            in_flight.clear()
            runner.reset()
        else:
            return 0
    return 1


def _end(code: int) -> None:
    """End at once: what the interpreter and its libraries would clean up ends with the process anyway."""
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
