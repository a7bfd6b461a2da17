"""How one question lets another, such as a sweep, run it on a target that a user names.

Nothing here imports torch, nor may a module that holds a `TargetCheck`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.results.findings import Verdict


@dataclasses.dataclass(frozen=True)
class TargetCheck:
    """How another question runs a check on a target that a user names.

    Attributes:
        run: returns the verdict of `run(target, options, on_progress, **settings)`, in which the
            options are `CandidateOptions`; it builds the target itself.
        modules: what a process imports before it forks many runs.
        promises: what a row of targets may promise not to change.
    """

    run: Callable[..., Verdict]
    modules: tuple[str, ...]
    promises: tuple[str, ...] = ()
