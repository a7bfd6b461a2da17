"""The live programs behind a verdict that failed, for as long as both are there.

A verdict is data, and data holds no models. So what failed is kept beside it, by the verdict's
identity: only of the last few, and only while the verdict itself is in use.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from paritas._torch.backends import Backend
    from paritas.numerics.findings import Aspect, Status, Verdict

__all__ = ["FailedGraph", "FailedPair", "FailedSplit", "MadeBy", "recall", "remember"]

# Each holds a model and its inputs.
MOST_KEPT = 8


@dataclasses.dataclass(frozen=True)
class FailedPair:
    """What `verify` was given.

    Attributes:
        reference: the model.
        candidate: what was compared with it.
        inputs: the sets of inputs.
    """

    reference: Callable[..., Any]
    candidate: Callable[..., Any]
    inputs: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class MadeBy:
    """How a guard's graphs are compiled.

    Attributes:
        backend: of the guard.
        given: mode and options of the `torch.compile` that called it.
    """

    backend: Backend
    given: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class FailedGraph:
    """A guarded graph and the arguments of a call that failed.

    Attributes:
        label: as findings call it.
        module: the graph, run op by op the reference.
        inputs: copies, as they were before the call.
        made_by: what compiled it.
        gradients: whether it was its gradients that failed.
    """

    label: str
    module: GraphModule
    inputs: Sequence[Any]
    made_by: MadeBy
    gradients: bool = False


@dataclasses.dataclass(frozen=True)
class FailedSplit:
    """An operator that is not the same when it is split over ranks.

    The verdict itself is not in it: it would keep itself alive.

    Attributes:
        call: the `OperatorCall` of `paritas.partition`.
        recipe: how it was split; several for a mesh of ranks.
        annotation: the rule that the recipe was made from; None if there is none.
        ranks: over how many ranks.
        seed: of the check.
        status: how it ended.
        kinds: in what it is wrong, each with whether that is of a result or of a gradient.
    """

    call: Any
    recipe: Any
    annotation: str | None
    ranks: int | tuple[int, ...]
    seed: int
    status: Status
    kinds: frozenset[tuple[Aspect, str]]


Failed = FailedPair | FailedGraph | FailedSplit

_KEPT: collections.OrderedDict[int, tuple[weakref.ref[Verdict], tuple[Failed, ...]]] = (
    collections.OrderedDict()
)


def remember(verdict: Verdict, cases: Sequence[Failed]) -> None:
    """Keep what a verdict is about."""
    if not cases:
        return
    key = id(verdict)
    kept = _KEPT  # a verdict may outlive this module's names, at the interpreter's exit
    # When it goes, so do the model and the inputs.
    kept[key] = (weakref.ref(verdict, lambda _: kept.pop(key, None)), tuple(cases))
    while len(_KEPT) > MOST_KEPT:
        _KEPT.popitem(last=False)


def recall(verdict: Verdict) -> tuple[Failed, ...]:
    """What a verdict is about; empty where that is not known any more."""
    known = _KEPT.get(id(verdict))
    return known[1] if known is not None and known[0]() is verdict else ()
