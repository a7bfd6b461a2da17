"""A candidate that a runtime other than torch computes: what can be asked of it, and what not.

Such a runtime gives values: no gradients, no views of what it was given. It cannot be lifted from
the outside either, so it says itself how it is made once more in float64, where meaning is told
from rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.checking.config import VerifyConfig

__all__ = ["ForeignProgram", "LiftedProgram", "limited"]


@dataclasses.dataclass(frozen=True)
class LiftedProgram:
    """A candidate in float64.

    Attributes:
        call: what is called, with arguments in float64.
        leaks: what of it may still compute in less, in words; it is judged at float32 noise then.
    """

    call: Callable[..., Any]
    leaks: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class ForeignProgram:
    """A candidate of another runtime, to be called like the model.

    Attributes:
        name: of the runtime, for messages.
        call: takes what the model takes and gives what the model gives.
        lift: makes the same program in float64; it is told the floating dtypes that the reference
            uses, a cast to any of which is mere rounding. None where that cannot be had.
    """

    name: str
    call: Callable[..., Any]
    lift: Callable[[frozenset[torch.dtype]], LiftedProgram] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self.call(*args, **kwargs)


def limited(
    config: VerifyConfig, candidate: Any
) -> tuple[VerifyConfig, str, contextlib.AbstractContextManager[Any]]:
    """What of `config` can be asked of a candidate, the note that says what not, how both run.

    Raises:
        UsageError: gradients are asked for by name, and there are none.
    """
    if not isinstance(candidate, ForeignProgram):
        return config, "", contextlib.nullcontext()
    if config.verify_gradients:
        raise UsageError(
            f"verify_gradients=True, but {candidate.name} computes no gradients; leave it out"
        )
    fewer = dataclasses.replace(config, verify_gradients=False, verify_aliasing=False)
    note = f"{candidate.name} gives values only: gradients and aliases were not compared"
    # Without gradients on either side, no output is expected to require any.
    return fewer, note, torch.no_grad()
