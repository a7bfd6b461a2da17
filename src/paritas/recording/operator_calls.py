"""Record the calls of operators, forward and backward, as they run."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from paritas.core.torch_private.operators import traits
from paritas.core.torch_private.watching import (
    in_backward,
    out_arguments,
    rebuilds_graph,
    running_node,
    upcoming_node,
    written_arguments,
)
from paritas.core.tracing.module_names import argument_values
from paritas.core.tracing.source_lines import NOWHERE, UserLine, user_line
from paritas.formats.files.records import Site
from paritas.recording.module_calls import ModuleCalls, put_all

if TYPE_CHECKING:
    from paritas.core.torch_private.operators import Operator
    from paritas.formats.files.records import Phase
    from paritas.recording.session import RecordingSession

_MOST_NODES = 200_000


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
