"""What the operators of a running eager program take and give."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from paritas._torch.operators import traits
from paritas._torch.watching import (
    in_backward,
    out_arguments,
    rebuilds_graph,
    running_node,
    upcoming_node,
    written_arguments,
)
from paritas.dumps.records import Site
from paritas.recording.module_calls import put_all, values
from paritas.recording.user_lines import NOWHERE, UserLine, user_line

if TYPE_CHECKING:
    from paritas._torch.watching import Operator
    from paritas.dumps.records import Phase
    from paritas.recording.module_calls import ModuleCalls
    from paritas.recording.session import Session

__all__ = ["OperatorCalls"]

_MOST_NODES = 200_000


class _Origin(NamedTuple):
    """Where an operator was called in the forward pass."""

    module: str
    line: UserLine


class _Running(NamedTuple):
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

    def __init__(self, session: Session, modules: ModuleCalls) -> None:
        self._session = session
        self._modules = modules
        self._origins: dict[int, _Origin] = {}
        self._thread = threading.get_ident()
        self._mixed = False

    def listens(self) -> bool:
        """Whether operators are recorded now."""
        return self._session.active

    def before(
        self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Running | None:
        """Record what an operator is about to take, before it can write to it."""
        frame = self._modules.innermost()
        backward = in_backward()
        if backward and not frame.again:
            origin = self._origin_of_node()
        else:
            origin = _Origin(frame.path, user_line())
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
        put_all(self._session, replace(takes, call=call), values(args, given))
        return _Running(func, replace(site, call=call), args, kwargs) if gives else None

    def after(self, token: _Running | None, result: Any) -> None:
        """Record what it gave."""
        if token is None or traits(token.func).name.startswith(("empty", "new_empty")):
            return  # what lies in memory that nobody wrote to is no result
        results = result if isinstance(result, tuple | list) else (result,)
        named = dict(_written(token))
        if named:
            results = ()
        put_all(self._session, token.site, values(tuple(results), named))

    def _remember(self, origin: _Origin) -> None:
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

    def _origin_of_node(self) -> _Origin:
        node, leaf = running_node()
        if leaf is not None:
            return _Origin(self._modules.owner(leaf), NOWHERE)
        nowhere = _Origin("", NOWHERE)
        return nowhere if self._mixed else self._origins.get(node, nowhere)


def _written(token: _Running) -> list[tuple[str, Any]]:
    """The arguments that an operator without results wrote to."""
    found = []
    for place, name in written_arguments(token.func):
        value = token.args[place] if place < len(token.args) else token.kwargs.get(name)
        found.append((name, value))
    return found
