"""Glances that every run of pytest in the environment pays for: the standard library alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["PROPERTY", "has_outcomes", "may_have_settings"]

# The name of a check's property in a report, and in JUnit XML.
PROPERTY = "paritas"
_VARIABLES = "PARITAS_PYTEST_"


def may_have_settings(root: Path) -> bool:
    """Whether it is worth reading settings."""
    if any(name.startswith(_VARIABLES) for name in os.environ) or "PARITAS_CONFIG" in os.environ:
        return True
    return any(map(_mentions_paritas, (root, *root.parents)))


def _mentions_paritas(folder: Path) -> bool:
    try:
        if (folder / "paritas.toml").is_file():
            return True
        return b"tool.paritas" in (folder / "pyproject.toml").read_bytes()
    except OSError:
        return False


def has_outcomes(reports: Iterable[Any]) -> bool:
    """Whether any test of a run checked parity."""
    return any(
        name == PROPERTY for report in reports for name, _ in getattr(report, "user_properties", ())
    )
