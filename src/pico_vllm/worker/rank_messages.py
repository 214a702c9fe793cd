"""What rank 0 and the other ranks say to each other: msgpack over stream sockets, never pickle.

Owns the structs, the way there and back, and ``RankChannel``, one end of a socket. A plan goes as it is: it is made of
the same structs that are sent.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from pico_vllm.scheduler_output import GrammarMasks, SchedulerOutput, plain_value

#: Raised whenever a message changes its meaning or its fields: those of a plan count, too.
PROTOCOL_VERSION = 1
_LENGTH = struct.Struct("<Q")
_BUFFER_BYTES = 1 << 20


class _Message(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    """Tagged with the name of its class."""


# ------------------------------------------------------------------------------------------------ rank 0 to others
class Build(_Message, frozen=True):
    """Build a model runner.

    Attributes:
        version: PROTOCOL_VERSION of rank 0; compared before anything else is read.
        rank, size: who is asked, of how many.
        options: of ``EngineConfig.from_options``; the model is a path on this machine.
        max_model_len: positions a sequence may have.
        log_level: from which level on to log, to stderr.
        num_threads: what torch may use; None = its own choice.
        store_path: the file through which ranks of one host find each other; None = as torchrun has it.
    """

    version: int
    rank: int
    size: int
    options: dict[str, Any]
    max_model_len: int
    log_level: int
    num_threads: int | None
    store_path: str | None


class StartStep(_Message, frozen=True):
    """Launch a step's forward pass."""

    plan: SchedulerOutput


class SampleStep(_Message, frozen=True):
    """Launch the choice of its tokens; without request ids there are no masks.

    Attributes:
        request_ids: as in ``GrammarMasks``.
        bitmask: its bytes.
    """

    request_ids: tuple[str, ...] = ()
    bitmask: bytes = b""


class Reset(_Message, frozen=True):
    """Forget every request and every step in flight."""


class Shutdown(_Message, frozen=True):
    """End the process."""


# ------------------------------------------------------------------------------------------------ others to rank 0
class Hello(_Message, frozen=True):
    """Whose connection this is: the first message of a rank that torchrun has started."""

    rank: int


class Joining(_Message, frozen=True):
    """The rank has found its model and its device, and goes to meet the others."""


class Ready(_Message, frozen=True):
    """The rank's model runner is built."""


class Failed(_Message, frozen=True):
    """The rank could not be built, or has failed in a step; its process ends after this message.

    Attributes:
        is_lost: whether all that it knows is that another rank is gone.
    """

    error_type: str
    message: str
    traceback: str
    is_lost: bool


ToRank = Build | StartStep | SampleStep | Reset | Shutdown
FromRank = Hello | Joining | Ready | Failed


_encoder = msgspec.msgpack.Encoder(enc_hook=plain_value)
_to_rank_decoder = msgspec.msgpack.Decoder(ToRank)
_from_rank_decoder = msgspec.msgpack.Decoder(FromRank)

encode = _encoder.encode
decode_to_rank = _to_rank_decoder.decode
decode_from_rank = _from_rank_decoder.decode


def sample_step(masks: GrammarMasks | None) -> SampleStep:
    """The message that carries these masks."""
    return SampleStep() if masks is None else SampleStep(masks.request_ids, masks.bitmask.tobytes())


def masks_of(message: SampleStep) -> GrammarMasks | None:
    """The masks that a message carries; read-only."""
    if not message.request_ids:
        return None
    words = np.frombuffer(message.bitmask, dtype=np.int32)
    return GrammarMasks(message.request_ids, words.reshape(len(message.request_ids), -1))


class RankChannel:
    """One end of a stream socket: whole messages, in order. One thread sends, one receives."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        connected.setblocking(True)
        with suppress(OSError):  # Linux takes as much as its limits allow
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: bytes) -> None:
        """Send one message; waits where the other end has left too much unread.

        Raises:
            OSError: the other end is gone.
        """
        self.socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes | None:
        """Wait for the next message; None when the other end is gone."""
        header = self._receive_exactly(_LENGTH.size)
        return None if header is None else self._receive_exactly(_LENGTH.unpack(header)[0])

    def end(self) -> None:
        """End the connection; whoever waits at either end is told."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and free it; nobody may wait at this end."""
        self.end()
        self.socket.close()

    def _receive_exactly(self, num_bytes: int) -> bytes | None:
        data = bytearray(num_bytes)
        view, received = memoryview(data), 0
        while received < num_bytes:
            try:
                count = self.socket.recv_into(view[received:])
            except OSError:
                return None
            if count == 0:
                return None
            received += count
        return bytes(data)
