"""The check of a recipe in this process, and on real ranks where that is asked for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import distributed

from paritas.errors import UsageError
from paritas.numerics.findings import Coverage, Verdict
from paritas.partition import checking
from paritas.partition.ranks.serving import Backend as Confirm
from paritas.partition.running.placing import device_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paritas.partition.recipes import OperatorCall, Recipe

__all__ = ["Confirm", "check_confirm", "check_confirmed", "confirmation", "labelled"]


def check_confirm(confirm: Confirm | None, device: torch.device, ranks: int) -> None:
    """Refuse a confirmation that there can be none of here, before the work.

    Args:
        device: on which the operator is checked.
        ranks: how many there are at most.

    Raises:
        UsageError: there are no such ranks; the message says what is missing.
    """
    if confirm is None or confirm == "gloo":
        return
    if confirm != "nccl":
        raise UsageError(f"confirm={confirm!r}: give 'gloo', 'nccl', or nothing")
    if device.type != "cuda":
        raise UsageError(
            f"NCCL sends from GPU to GPU, and the device is {str(device)!r}: give --device cuda "
            "(device='cuda'), or confirm with gloo"
        )
    if not distributed.is_nccl_available():
        raise UsageError("this torch is built without NCCL: confirm with gloo")
    have = torch.cuda.device_count()
    if have < ranks:
        raise UsageError(
            f"NCCL needs a GPU for each of {ranks} ranks, and {have} can be seen: confirm with "
            "gloo, whose ranks share GPUs, or check fewer ranks"
        )


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
    real = confirmation(confirm, call, recipe, ranks, seed=seed, strict=strict)
    return Verdict.merge([verdict, real])


def confirmation(
    confirm: Confirm,
    call: OperatorCall,
    recipe: Recipe | tuple[Recipe, ...],
    ranks: int | tuple[int, ...],
    *,
    seed: int = 0,
    strict: bool = False,
    imports: Sequence[str] = (),
) -> Verdict:
    """What real ranks say of a recipe, each item under the name of these ranks.

    Args:
        imports: modules that a rank imports first: they bring the operator.

    Raises:
        UsageError: the recipe makes no sense, or there are no such ranks.
    """
    from paritas.partition.ranks.gloo import confirm_on_ranks

    count = math.prod(ranks) if isinstance(ranks, tuple) else ranks
    check_confirm(confirm, device_of(call), count)
    real = confirm_on_ranks(confirm, call, recipe, ranks, seed=seed, strict=strict, imports=imports)
    return labelled(real, f"on {confirm} ranks, ")


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
