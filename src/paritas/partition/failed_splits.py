"""What is kept of a split that is wrong, so that its verdict can be shrunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.checking.observing import AFTER
from paritas.checking.remembering import FailedSplit
from paritas.numerics.findings import Status

if TYPE_CHECKING:
    from paritas.numerics.findings import Aspect, Finding, Verdict
    from paritas.partition.annotations.annotation import Annotation
    from paritas.partition.recipes import OperatorCall, Recipe

__all__ = ["failed_split", "kinds_of"]

_WRONG = frozenset({Status.DIFFERENT, Status.DEGRADED})


def failed_split(
    verdict: Verdict,
    call: OperatorCall,
    recipe: Recipe | tuple[Recipe, ...],
    ranks: int | tuple[int, ...],
    *,
    seed: int,
    annotation: Annotation | None = None,
) -> tuple[FailedSplit, ...]:
    """What to remember of a split; nothing unless it is wrong for certain.

    Args:
        verdict: of this split alone.
        annotation: that the recipe was made from: on other shapes it makes another.
    """
    wrong = _wrong(verdict)
    if not wrong:
        return ()
    single = recipe[0] if isinstance(recipe, tuple) and len(recipe) == 1 else recipe
    count = ranks[0] if isinstance(ranks, tuple) and len(ranks) == 1 else ranks
    return (
        FailedSplit(
            call=call,
            recipe=single,
            annotation=None if annotation is None else annotation.text,
            ranks=count,
            seed=seed,
            status=max((one.status for one in wrong), key=lambda status: status.gravity),
            kinds=kinds_of(verdict),
        ),
    )


def kinds_of(verdict: Verdict) -> frozenset[tuple[Aspect, str]]:
    """In what a split is wrong: the same on other shapes is the same fault."""
    return frozenset((one.aspect, _role(one.path)) for one in _wrong(verdict))


def _wrong(verdict: Verdict) -> list[Finding]:
    return [finding for finding in verdict.failures if finding.status in _WRONG]


def _role(path: str) -> str:
    if "gradient of " in path:
        return "gradient"
    return "argument" if path.endswith(AFTER) else "result"
