"""`capture`: the tensors of whatever runs inside a `with` block, into a dump."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from paritas._torch.watching import mode_depth, push_watch, watch_module_calls
from paritas.errors import UsageError
from paritas.recording.gradients import Gradients
from paritas.recording.module_calls import ModuleCalls
from paritas.recording.operator_calls import OperatorCalls
from paritas.recording.options import QUEUE_BYTES, SessionOptions, Stepping
from paritas.recording.selection import Mode, Selection
from paritas.recording.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paritas.dumps.records import Layout

__all__ = ["Capture", "capture"]

Detail = Literal["module", "op", "both"]


class Capture:
    """A recording of a running program; enter it to begin, leave it to close the dump.

    Attributes:
        path: the folder of the dump.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        selection: Selection,
        options: SessionOptions,
        *,
        level: Detail,
        gradients: bool,
    ) -> None:
        self.path = Path(path)
        self._selection = selection
        self._options = options
        self._level = level
        self._wants_gradients = gradients
        self._session: Session | None = None
        self._gradients: Gradients | None = None
        self._modules: ModuleCalls | None = None
        self._operators: OperatorCalls | None = None
        self._stop_modules: Callable[[], None] | None = None
        self._stop_operators: Callable[[], bool] | None = None
        self._depth = 0

    def __enter__(self) -> Self:
        if self._session is not None:
            raise UsageError("this capture was used already; call paritas.capture once per run")
        session = self._session = Session(self.path, self._selection, self._options)
        session.source("eager")
        self._gradients = Gradients(session) if self._wants_gradients else None
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
        # What the program itself raised must not be hidden by what was not recorded therefore.
        self._running().close(raising=error is None)

    def step(self) -> None:
        """End the present step; for `stepping="manual"`."""
        self._running().advance()

    def pause(self) -> None:
        """Take all hooks away until `resume`; steps that pass meanwhile are not counted."""
        self._running().pause()
        self._unwatch()

    def resume(self) -> None:
        """Go on recording."""
        session = self._running()
        if self._stop_modules is None and self._selection.wants_rank(session.rank):
            self._watch()
        session.resume()

    def keep(self) -> None:
        """Keep for good the steps that the ring of `last` holds now."""
        self._running().keep()

    def _running(self) -> Session:
        if self._session is None:
            raise UsageError(
                "nothing is recorded yet: use `with paritas.capture(...) as recording`"
            )
        return self._session

    def _watch(self) -> None:
        if self._operators is not None and self._stop_operators is None:
            if mode_depth() != self._depth:
                raise UsageError(
                    "operators cannot be recorded again from inside another dispatch mode: resume "
                    "where the capture was paused"
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
        # Below somebody else's mode it stays, idle, until that is gone.
        if self._stop_operators is not None and self._stop_operators():
            self._stop_operators = None


def capture(  # noqa: PLR0913  (each is a question of its own)
    path: str | os.PathLike[str],
    *,
    level: Detail = "module",
    mode: Mode = "all",
    steps: Any = None,
    layers: str | Iterable[str] | None = None,
    ops: str | Iterable[str] | None = None,
    ranks: int | Iterable[int] | None = None,
    phases: str | Iterable[str] | None = None,
    every: int = 1,
    data: Literal["tensor", "stats"] = "tensor",
    layout: Layout = "packed",
    last: int = 0,
    overwrite: bool = False,
    stepping: Stepping = "auto",
    gradients: bool = True,
    queue_bytes: int = QUEUE_BYTES,
) -> Capture:
    """Record the tensors of the eager program that runs in a `with` block.

    No model is named: modules are seen as they are called, in every thread, and operators in the
    thread that opened the block. Results, gradients and random draws are those of the program
    without it. Compiled code runs as it is, unseen inside; `paritas.record` looks there.

    Args:
        path: folder of the dump, which must be empty or absent.
        level: what modules take and give, what operators take and give, or both.
        mode: only the inputs, only the outputs, or all.
        steps: which steps, for example `[1, 2, 5]`, `range(10, 20)` or `"0|1|2-5"`.
        layers: names or globs of modules and parameters; a module brings what is inside it.
        ops: names or globs of operators (`aten.mm`, `mm`) and of classes of modules (`Linear`).
        ranks: which processes of a distributed run.
        phases: "forward" or "backward"; both unless given.
        every: each n-th step, from step 0.
        data: whole tensors, or statistics of them.
        layout: packed files, one `.npy` file a tensor in torchair's tree (`msit`), or a file for
            each call in that of Ascend's graph engine (`ge`, `ge-7.1.0`).
        last: keep only this many of the last steps; `keep()` pins those that are there.
        overwrite: replace an earlier dump in the same place.
        stepping: "auto" ends a step when an outermost module is called that ran in it already;
            "manual" when `step()` is called, as gradient accumulation and generation need it.
        gradients: also those of what modules take and give, and of parameters.
        queue_bytes: how much may wait to be written before the program has to.

    Raises:
        UsageError: for arguments that make no sense, and at the end of the block for each part of
            the selection that met nothing.
    """
    if level not in get_args(Detail):
        raise UsageError(f"level={level!r}: give one of {', '.join(get_args(Detail))}")
    return Capture(
        path,
        Selection.of(
            mode=mode,
            steps=steps,
            layers=layers,
            ops=ops,
            ranks=ranks,
            phases=phases,
            every=every,
        ),
        SessionOptions(
            data=data,
            layout=layout,
            last=last,
            overwrite=overwrite,
            stepping=stepping,
            queue_bytes=queue_bytes,
        ),
        level=level,
        gradients=gradients,
    )
