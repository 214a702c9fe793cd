"""How kernels are launched, without launching any; and modules as another triton would find them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any


class Launches:
    """Stands for a kernel: notes grid, arguments and parameters of each launch."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self.seen.append((grid, args, kwargs))


def fresh(module: ModuleType) -> ModuleType:
    """The module, run once more under another name."""
    spec = importlib.util.spec_from_file_location(f"fresh_{module.__name__.rpartition('.')[2]}", module.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again
