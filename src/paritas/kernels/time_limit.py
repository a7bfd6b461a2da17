"""The time limit of a judgement, and how it reaches into what takes long.

A call in another process ends with that process. Lifted and perturbed runs of the reference are
made in this one, and end at the next operator.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from paritas._torch.operators import DispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator


class OutOfTime(BaseException):
    """The time limit was reached.

    It is no `Exception`: what keeps those that a user's program raises must let it pass.
    """


class TimeLimit:
    """The time that one judgement may take.

    Attributes:
        seconds: all of it.
    """

    def __init__(self, seconds: float) -> None:
        """Begin now."""
        self.seconds = seconds
        self.begin()

    def begin(self, spent: float = 0.0) -> None:
        """Begin anew; `spent` seconds of the time are gone already."""
        self._end = time.monotonic() + self.seconds - spent

    @property
    def left(self) -> float:
        """The seconds that are left; negative after the end."""
        return self._end - time.monotonic()

    @property
    def is_reached(self) -> bool:
        """Whether no time is left."""
        return self.left <= 0

    def require(self, seconds: float = 0.0) -> None:
        """Require that this much time is left.

        Raises:
            OutOfTime: it is not.
        """
        if self.left <= seconds:
            raise OutOfTime

    @contextlib.contextmanager
    def reserving(self, seconds: float) -> Iterator[None]:
        """Keep some of the time for what comes after this block."""
        self._end -= seconds
        try:
            yield
        finally:
            self._end += seconds


class TimeWatch(DispatchMode):
    """Ends a run at the first operator after the time limit."""

    supports_higher_order_operators = True

    def __init__(self, limit: TimeLimit) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit = limit

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator.

        Raises:
            OutOfTime: the time limit was reached.
        """
        self._limit.require()
        return func(*args, **(kwargs or {}))
