"""What DTensor does with an operator's arguments before it runs it on their parts."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from paritas.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Redistributed", "watch_redistribution"]

_STEP = "redistribute_local_args"


class Redistributed(Exception):  # noqa: N818  (a signal to who asked for it, not a failure)
    """DTensor was about to move the arguments of an operator."""


@contextlib.contextmanager
def watch_redistribution(*, stop: bool = False) -> Iterator[list[str]]:
    """A list of the operators for which DTensor moved their arguments to other placements.

    An operator that is not in it ran on the placements that it was given: what DTensor says of
    its result is a rule of its own. One whose rule DTensor has kept from an earlier call may be
    listed as "an operator". With `stop`, `Redistributed` is raised instead of moving.
    """
    from torch.distributed.tensor import DTensor

    dispatcher: Any = getattr(DTensor, "_op_dispatcher", None)
    original = getattr(dispatcher, _STEP, None)
    if original is None:
        raise UnsupportedTorchError(
            f"DTensor of torch {torch.__version__} has no _op_dispatcher.{_STEP}: "
            "which rules it uses cannot be told"
        )
    seen: list[str] = []

    def noting(op_info: Any, *args: Any, **kwargs: Any) -> Any:
        schema = getattr(op_info, "schema", None)
        seen.append(str(getattr(schema, "op", "an operator")))
        if stop:
            raise Redistributed(seen[-1])
        return original(op_info, *args, **kwargs)

    setattr(dispatcher, _STEP, noting)
    try:
        yield seen
    finally:
        delattr(dispatcher, _STEP)
