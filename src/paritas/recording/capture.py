"""capture(): record the tensors of a program that runs inside a `with` block."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args

from msgspec.structs import replace

from paritas.core.call_options import takes_options
from paritas.core.errors import UsageError
from paritas.core.torch_private.operators import traits
from paritas.core.torch_private.watching import (
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
from paritas.core.tracing.module_names import argument_values
from paritas.core.tracing.source_lines import (
    NOWHERE,
    UserLine,
    user_line,
)
from paritas.formats.dumps.selection import check_one_of
from paritas.formats.files.records import Site
from paritas.recording.module_calls import (
    GradientHooks,
    ModuleCalls,
    put_all,
)
from paritas.recording.pipeline import RecordingOptions
from paritas.recording.session import RecordingSession

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from types import TracebackType

    from paritas.core.torch_private.operators import Operator
    from paritas.formats.files.records import Phase


# --- Calls of operators ---------------------------------------------------------------------------

_MOST_NODES = 200_000


class _ForwardOrigin(NamedTuple):
    """Where an operator was called in the forward pass."""

    module: str
    line: UserLine


class _RunningOperator(NamedTuple):
    """An operator that has been called and has not returned."""

    func: Operator
    site: Site
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class OperatorCalls:
    """Records operators, each under the running module.

    Autograd numbers its nodes as operators create them. By these numbers, an operator of the
    backward pass is attributed to the module and line whose gradient it computes.
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
        """Record the arguments of an operator before it can write to them."""
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
        read_kwargs = {name: value for name, value in kwargs.items() if name not in unread}
        put_all(self._session, replace(takes, call=call), argument_values(args, read_kwargs))
        return _RunningOperator(func, replace(site, call=call), args, kwargs) if gives else None

    def after(self, token: _RunningOperator | None, result: Any) -> None:
        """Record the results of an operator, or else the arguments that it wrote to."""
        if token is None or traits(token.func).name.startswith(("empty", "new_empty")):
            return  # uninitialised memory is not a result
        results = result if isinstance(result, tuple | list) else (result,)
        named = {
            name: token.args[position] if position < len(token.args) else token.kwargs.get(name)
            for position, name in written_arguments(token.func)
        }
        if named:
            results = ()
        put_all(self._session, token.site, argument_values(tuple(results), named))

    def _remember(self, origin: _ForwardOrigin) -> None:
        if threading.get_ident() != self._thread:
            # Each thread numbers its nodes from 0, so numbers are ambiguous from now on.
            self._mixed = True
            self._session.note(
                "autograd recomputed parts of the program in its own thread: operators of the "
                "backward pass are not attributed to modules"
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


# --- capture() ------------------------------------------------------------------------------------

Detail = Literal["module", "op", "both"]


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
