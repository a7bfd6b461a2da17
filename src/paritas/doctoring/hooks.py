"""Whether each part of torch's own insides that paritas relies on answers as expected."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import torch

from paritas._torch.quiet import quietly
from paritas.doctoring import probes_compiling, probes_graphs, probes_ranks, probes_values
from paritas.doctoring.checks import OK, Check, looked_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["PROBES", "examine"]

GROUP = "hooks into torch"
# By the module of `paritas._torch` that is probed; every module has one.
PROBES: dict[str, Callable[[], None]] = {
    **probes_values.PROBES,
    **probes_graphs.PROBES,
    **probes_compiling.PROBES,
    **probes_ranks.PROBES,
}
ADVICE = (
    "what rests on this hook cannot be trusted with this torch; use one that paritas is tested "
    "with, or a newer paritas"
)


def examine() -> Iterator[Check]:
    """Run every probe; one that fails does not keep the others from running."""
    for name, probe in PROBES.items():
        yield looked_at(GROUP, name, functools.partial(_answer, name, probe), ADVICE)


def _answer(name: str, probe: Callable[[], None]) -> Check:
    try:
        with quietly():  # what torch says of itself is no answer
            probe()
    except BaseException:
        # What it left half done must not spoil the next.
        with contextlib.suppress(Exception):
            torch.compiler.reset()
        raise
    words = " ".join((probe.__doc__ or "").split())
    return Check(GROUP, name, OK, words)
