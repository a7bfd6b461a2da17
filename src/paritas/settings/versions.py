"""The version of paritas, as every file it writes is signed."""

from __future__ import annotations

import functools
import importlib.metadata

__all__ = ["own_version"]


@functools.cache
def own_version() -> str:
    """As installed; looked up once, since each look reads the folders of packages again."""
    return importlib.metadata.version("paritas")
