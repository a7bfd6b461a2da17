"""The version of paritas, which is written into every file."""

from __future__ import annotations

import functools
import importlib.metadata

__all__ = ["own_version"]


@functools.cache
def own_version() -> str:
    """The installed version, looked up once because the lookup reads package folders."""
    return importlib.metadata.version("paritas")
