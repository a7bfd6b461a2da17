"""What is found by name because no import may lead there, and imported when it is first asked for.

Questions use each other through this file alone, and so does what core needs of an upper floor. It
is the only file that knows both sides: each entry says what it takes and gives.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    # `verify(inputs, reference, candidate, config)`, which returns a verdict.
    "verify": "paritas.verification.verify:verify",
    # `power(inputs, model, **options)`, which returns its report on planted faults.
    "power": "paritas.mutants.power:power",
    # `shrink_verdict(verdict, **options)`, which returns a `ShrinkReport`.
    "shrink": "paritas.shrinking.sources:shrink_verdict",
    # `shrink_splits(splits, outdir, seconds=, setup=, on_progress=)`, likewise.
    "shrink splits": "paritas.sharding.graphs.shrinking:shrink_splits",
    # A folder that holds a failure: a `FolderShrinker`.
    "shrink a comparison": "paritas.comparison.shrinking:FOLDER_SHRINKER",
    "shrink graph results": "paritas.sharding.graphs.shrinking:FOLDER_SHRINKER",
    # What a sweep runs on a target: a `TargetCheck`.
    "check a candidate": "paritas.verification.target_check:CHECK",
    "check invariants": "paritas.relations.target_check:CHECK",
    "check a kernel": "paritas.kernels.target_check:CHECK",
}


def find_entry(name: str) -> Any:
    """Import what has this name in the register."""
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
