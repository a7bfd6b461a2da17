"""capture(): the tensors of whatever runs inside a `with` block, into a dump."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args

from msgspec.structs import replace

from paritas._torch.operators import traits
from paritas._torch.watching import (
    in_backward,
    mode_depth,
    out_arguments,
    push_watch,
    rebuilds_graph,
    running_node,
    upcoming_node,
    watch_module_calls,
    written_arguments,
)
from paritas.errors import UsageError
from paritas.files.records import Site
from paritas.recording.module_calls import (
    NOWHERE,
    GradientHooks,
    ModuleCalls,
    UserLine,
    argument_values,
    put_all,
    user_line,
)
from paritas.recording.pipeline import QUEUE_BYTES, SessionOptions, Stepping
from paritas.recording.selection import Mode, Selection
from paritas.recording.session import RecordingSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paritas._torch.operators import Operator
    from paritas.files.records import Layout, Phase


# --- Calls of operators ---------------------------------------------------------------------------

_MOST_NODES = 200_000


class _ForwardOrigin(NamedTuple):
    """Where an operator was called in the forward pass."""

    module: str
    line: UserLine


class _RunningOperator(NamedTuple):
    """An operator between its arguments and its results."""

    func: Operator
    site: Site
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class OperatorCalls:
    """Records operators, each under the module at work.

    Autograd numbers its nodes as operators make them; by these numbers an operator of the backward
    pass is put down to the module and the line whose gradient it computes.
    """

    def __init__(self, session: RecordingSession, modules: ModuleCalls) -> None:
        self._session = session
        self._modules = modules
        self._origins: dict[int, _ForwardOrigin] = {}
        self._thread = threading.get_ident()
        self._mixed = False

    def listens(self) -> bool:
        """Whether operators are recorded now."""
        return self._session.active

    def before(
        self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _RunningOperator | None:
        """Record what an operator is about to take, before it can write to it."""
        frame = self._modules.innermost()
        backward = in_backward()
        if backward and not frame.again:
            origin = self._origin_of_node()
        else:
            origin = _ForwardOrigin(frame.path, user_line())
            if not frame.again or rebuilds_graph():
                self._remember(origin)
        if frame.again:
            return None
        op = str(func)
        name = f"{origin.module}/{op}" if origin.module else op
        phase: Phase = "backward" if backward else "forward"
        site = Site(
            source="eager",
            level="op",
            name=name,
            phase=phase,
            op=op,
            module=origin.module,
            line=origin.line.line,
            code=origin.line.code,
        )
        takes, gives = replace(site, side="input"), self._session.wants(site)
        if not self._session.wants(takes) and not gives:
            return None
        call = self._session.next_call(f"{phase}/{name}")
        unread = out_arguments(func)
        given = {name: value for name, value in kwargs.items() if name not in unread}
        put_all(self._session, replace(takes, call=call), argument_values(args, given))
        return _RunningOperator(func, replace(site, call=call), args, kwargs) if gives else None

    def after(self, token: _RunningOperator | None, result: Any) -> None:
        """Record what it gave."""
        if token is None or traits(token.func).name.startswith(("empty", "new_empty")):
            return  # what lies in memory that nobody wrote to is no result
        results = result if isinstance(result, tuple | list) else (result,)
        named = dict(_written_arguments(token))
        if named:
            results = ()
        put_all(self._session, token.site, argument_values(tuple(results), named))

    def _remember(self, origin: _ForwardOrigin) -> None:
        if threading.get_ident() != self._thread:
            # Each thread numbers its nodes from 0: from now on a number may mean either.
            self._mixed = True
            self._session.note(
                "parts were recomputed, and their gradients computed, in a thread of autograd's: "
                "operators of the backward pass are not put down to modules"
            )
            return
        node = upcoming_node()
        if node < 0 or node in self._origins:
            return
        if len(self._origins) >= _MOST_NODES:
            del self._origins[next(iter(self._origins))]
        self._origins[node] = origin

    def _origin_of_node(self) -> _ForwardOrigin:
        node, leaf = running_node()
        if leaf is not None:
            return _ForwardOrigin(self._modules.owner(leaf), NOWHERE)
        nowhere = _ForwardOrigin("", NOWHERE)
        return nowhere if self._mixed else self._origins.get(node, nowhere)


def _written_arguments(token: _RunningOperator) -> list[tuple[str, Any]]:
    """The arguments that an operator without results wrote to."""
    found = []
    for place, name in written_arguments(token.func):
        value = token.args[place] if place < len(token.args) else token.kwargs.get(name)
        found.append((name, value))
    return found


# --- capture() ------------------------------------------------------------------------------------

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
        self._session: RecordingSession | None = None
        self._gradients: GradientHooks | None = None
        self._modules: ModuleCalls | None = None
        self._operators: OperatorCalls | None = None
        self._stop_modules: Callable[[], None] | None = None
        self._stop_operators: Callable[[], bool] | None = None
        self._depth = 0

    def __enter__(self) -> Self:
        if self._session is not None:
            raise UsageError("this capture was used already; call paritas.capture once per run")
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

    def _running(self) -> RecordingSession:
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
