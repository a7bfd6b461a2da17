"""What becomes of a split that the operator's rule refuses, seen by doing it all the same.

A rule that freezes a dimension says that it must not be split, and not what would go wrong. The
plain reading of such an option is that parts go in and parts come out; that can be run.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paritas.errors import UsageError
from paritas.partition.annotations.annotation import Annotation, Option

if TYPE_CHECKING:
    from paritas.numerics.findings import Verdict
    from paritas.partition.recipes import OperatorCall, Recipe

__all__ = ["plain_recipe", "told"]

_MOST_TOLD = 3


def plain_recipe(annotation: Annotation, call: OperatorCall, option: Option) -> Recipe | None:
    """The recipe that the annotation would give if it did not freeze this; None if not for that."""
    signature = annotation.signature
    tensors = (*signature.inputs, *signature.outputs)
    dims = tensors[option.idx].dims if option.idx < len(tensors) else None
    # Behind a `*` the positions are those of the call; such an annotation freezes by name too
    # seldom to be worth a second way of counting.
    if not dims or option.dim >= len(dims) or any(dim.is_rest for dim in dims):
        return None
    name = dims[option.dim].factors[0].name
    if not name.isidentifier():
        return None
    free = re.sub(rf"\b{name}\^", name, annotation.text)
    if free == annotation.text:
        return None
    try:
        return Annotation.parse(free).recipe(call, option)
    except UsageError:
        return None


def told(verdict: Verdict) -> str:
    """What is wrong, and what is right, about a split that was tried all the same."""
    wrong = [finding.path for finding in verdict.failures]
    right = [f.path for f in verdict.findings if f.status.passes(strict=verdict.strict)]
    worst = verdict.failures[0]
    reason = f" ({worst.reason})" if worst.reason else ""
    parts = [f"{worst.path} is {worst.status}{reason}"]
    if len(wrong) > 1:
        parts.append(f"wrong too: {_listed(wrong[1:])}")
    if right:
        parts.append(f"right: {_listed(right)}")
    return "; ".join(parts)


def _listed(paths: list[str]) -> str:
    more = len(paths) - _MOST_TOLD
    return ", ".join(paths[:_MOST_TOLD]) + (f" and {more} more" if more > 0 else "")
