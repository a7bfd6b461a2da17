"""capture(): record the tensors of a program that runs inside a `with` block."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, get_args

from paritas.core.call_options import takes_options
from paritas.core.errors import UsageError
from paritas.core.torch_private.watching import mode_depth, push_watch, watch_module_calls
from paritas.formats.dumps.selection import check_one_of
from paritas.recording.module_calls import GradientHooks, ModuleCalls
from paritas.recording.operator_calls import OperatorCalls
from paritas.recording.pipeline import RecordingOptions
from paritas.recording.session import RecordingSession

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from types import TracebackType

Detail = Literal["module", "op", "both"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureOptions(RecordingOptions):
    """What `capture` records, and how it is stored.

    Attributes:
        level: record inputs and outputs of modules, of operators, or of both.
        gradients: also record gradients of module inputs, module outputs and parameters.
    """

    level: Detail = "module"
    gradients: bool = True


@takes_options(CaptureOptions)
def capture(path: str | os.PathLike[str], options: CaptureOptions) -> Capture:
    """Record the tensors of an eager program that runs in a `with` block.

    It needs no reference to the model: it records modules when they are called, in every thread,
    and operators in the thread that opened the block. It does not change results, gradients or
    random numbers. Compiled code is recorded from outside only; use `paritas.record` for its
    inside.

    A step ends when an outermost module is called a second time, unless `stepping` is "manual".
    With `last`, `keep()` pins the current steps.

    Args:
        path: the folder of the dump, which must be empty or absent.
        options: given as keyword arguments; see `CaptureOptions`.

    Raises:
        UsageError: an argument is invalid; at the end of the block, a part of the selection matched
            nothing.
    """
    check_one_of("level", options.level, get_args(Detail))
    return Capture(path, options)


class Capture:
    """A recording of a running program; entering starts it, leaving closes the dump.

    Attributes:
        path: the folder of the dump.
    """

    def __init__(self, path: str | os.PathLike[str], options: CaptureOptions) -> None:
        self.path = Path(path)
        self._selection = options.selection()
        self._options = options
        self._level = options.level
        self._wants_gradients = options.gradients
        self._session: RecordingSession | None = None
        self._gradients: GradientHooks | None = None
        self._modules: ModuleCalls | None = None
        self._operators: OperatorCalls | None = None
        self._stop_modules: Callable[[], None] | None = None
        self._stop_operators: Callable[[], bool] | None = None
        self._depth = 0

    def __enter__(self) -> Self:
        if self._session is not None:
            raise UsageError("this capture was already used: call paritas.capture for each run")
        session = self._session = RecordingSession(self.path, self._selection, self._options)
        session.source("eager")
        self._gradients = GradientHooks(session) if self._wants_gradients else None
        self._modules = ModuleCalls(session, self._gradients, records=self._level != "op")
        if self._level != "module":
            self._operators = OperatorCalls(session, self._modules)
        self._depth = mode_depth()
        if self._selection.wants_rank(session.rank):
            self._watch()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._unwatch()
        # An error in the program must not be hidden by the values that are missing because of it.
        self._running().close(raising=error is None)

    def step(self) -> None:
        """End the current step; for `stepping="manual"`."""
        self._running().advance()

    def pause(self) -> None:
        """Remove all hooks until `resume`; steps in between are not counted."""
        self._running().pause()
        self._unwatch()

    def resume(self) -> None:
        """Continue recording."""
        session = self._running()
        if self._stop_modules is None and self._selection.wants_rank(session.rank):
            self._watch()
        session.resume()

    def keep(self) -> None:
        """Keep the steps that are now in the ring of `last` permanently."""
        self._running().keep()

    def _running(self) -> RecordingSession:
        if self._session is None:
            raise UsageError(
                "the recording has not started: use `with paritas.capture(...) as recording`"
            )
        return self._session

    def _watch(self) -> None:
        if self._operators is not None and self._stop_operators is None:
            if mode_depth() != self._depth:
                raise UsageError(
                    "cannot resume recording operators inside another dispatch mode: call resume() "
                    "under the same modes as pause()"
                )
            self._stop_operators = push_watch(self._operators)
        if self._modules is not None:
            self._stop_modules = watch_module_calls(self._modules.around)

    def _unwatch(self) -> None:
        if self._stop_modules is not None:
            self._stop_modules()
            self._stop_modules = None
        if self._gradients is not None:
            self._gradients.remove()
        # Under another mode it cannot be removed yet, and stays inactive until that mode ends.
        if self._stop_operators is not None and self._stop_operators():
            self._stop_operators = None
