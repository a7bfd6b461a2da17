"""Which kernels of the corpus are honest and which are not, by their reference."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Kernel = Callable[..., Any]

# The name of a reference -> kernels, each as file.py:name.
HONEST: dict[str, list[str]] = {}
CHEATS: dict[str, list[str]] = {}


def honest(reference: str) -> Callable[[Kernel], Kernel]:
    return lambda kernel: _register(HONEST, reference, kernel)


def cheat(reference: str) -> Callable[[Kernel], Kernel]:
    return lambda kernel: _register(CHEATS, reference, kernel)


def _register(table: dict[str, list[str]], reference: str, kernel: Kernel) -> Kernel:
    home = sys.modules[kernel.__module__]
    table.setdefault(reference, []).append(f"{home.__file__}:{kernel.__name__}")
    return kernel
