"""The forms in which systems that run paritas want its results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.reporting.github_lines import github_lines
from paritas.reporting.junit import junit
from paritas.reporting.sarif import sarif

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.reporting.annotations import Account

__all__ = ["WRITERS"]

WRITERS: dict[str, Callable[[Account], str]] = {
    "github": github_lines,
    "sarif": sarif,
    "junit": junit,
}
