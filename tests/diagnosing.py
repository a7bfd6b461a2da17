"""Tests that ask where it is wrong, and not what kind of wrong it is."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def without_diagnosis() -> Iterator[None]:
    """Leave out what kind of wrong it is, which takes as long as finding that it is."""
    from paritas.core.judging.failures import Explainer

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(Explainer, "_explain_finding", lambda _, finding, *others: finding)
        yield
