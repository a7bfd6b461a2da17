"""The check of a recipe in this process, and on real ranks where that is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from paritas.errors import UsageError
from paritas.numerics.findings import Coverage, Verdict
from paritas.partition import checking

if TYPE_CHECKING:
    from paritas.partition.recipes import OperatorCall, Recipe

__all__ = ["Confirm", "check_confirmed", "labelled"]

Confirm = Literal["gloo"]


def check_confirmed(
    call: OperatorCall,
    recipe: Recipe | tuple[Recipe, ...],
    ranks: int | tuple[int, ...] = 2,
    *,
    seed: int = 0,
    strict: bool = False,
    confirm: Confirm | None = None,
) -> Verdict:
    """Check a recipe; with `confirm`, a second time on ranks that are processes of their own.

    Raises:
        UsageError: the recipe makes no sense, or there are no such ranks.
    """
    verdict = checking.check_recipe(call, recipe, ranks, seed=seed, strict=strict)
    if confirm is None:
        return verdict
    if confirm != "gloo":
        raise UsageError(f"confirm={confirm!r}: give 'gloo', or nothing")
    from paritas.partition.ranks.gloo import confirm_on_gloo

    real = confirm_on_gloo(call, recipe, ranks, seed=seed, strict=strict)
    return Verdict.merge([verdict, labelled(real, f"on {confirm} ranks, ")])


def labelled(verdict: Verdict, label: str) -> Verdict:
    """The same verdict, each of its items under a label."""
    findings = tuple(
        msgspec.structs.replace(finding, path=f"{label}{finding.path}")
        for finding in verdict.findings
    )
    coverage = Coverage(
        compared=verdict.coverage.compared,
        skipped=tuple(f"{label}{item}" for item in verdict.coverage.skipped),
        unmatched=tuple(f"{label}{item}" for item in verdict.coverage.unmatched),
    )
    return msgspec.structs.replace(verdict, findings=findings, coverage=coverage)
