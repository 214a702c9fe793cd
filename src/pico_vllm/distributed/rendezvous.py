"""Where ranks find each other: a file that the processes of one host share, or the store of torchrun."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from pico_vllm.config import LaunchedRank

LOOPBACK = "127.0.0.1"
_ADDRESS = "pico-vllm/leader"
_c10d: Any = torch.distributed  # the type stubs lack its stores


def file_store(path: str, size: int) -> Store:
    """A store in a file of a folder that nobody else may enter: no port is open for strangers."""
    return _c10d.FileStore(path, size)


def launched_store(launched: LaunchedRank) -> Store:
    """The store of the processes that torchrun has started, at MASTER_ADDR and MASTER_PORT."""
    rendezvous = _c10d.rendezvous("env://", launched.rank, launched.size)
    store, _, _ = next(iter(rendezvous))
    return store


def publish_leader_address(store: Store, host: str, port: int) -> None:
    """Tell the other ranks where rank 0 listens."""
    store.set(_ADDRESS, f"{port} {host}")


def leader_address(store: Store) -> tuple[str, int]:
    """(host, port) at which rank 0 listens; waits until it does."""
    port, _, host = store.get(_ADDRESS).decode().partition(" ")
    return host, int(port)
