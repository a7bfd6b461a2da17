"""What the modules of a running eager program take and give."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from msgspec.structs import replace

from paritas._torch.watching import (
    has_values,
    in_backward,
    is_compiled,
    is_seen,
    is_symbolic,
    unseen,
)
from paritas.dumps.records import Site
from paritas.numerics.trees import children
from paritas.recording.module_names import ModuleNames
from paritas.recording.user_lines import NOWHERE, UserLine, user_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from paritas.dumps.records import Side
    from paritas.recording.gradients import Gradients
    from paritas.recording.module_names import Named
    from paritas.recording.session import Session

__all__ = ["Frame", "ModuleCalls", "put_all", "results", "values"]

_MOST_CALLS = 1 << 15
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, type(None))


class Frame(NamedTuple):
    """A module at work.

    Attributes:
        path: what it is called.
        wrapper: whether it only stands before another one of that name.
        again: whether it runs once more for its gradients: checkpointed parts of a program do.
    """

    path: str
    wrapper: bool = False
    again: bool = False


class _Call:
    """A call of a module: what it is called, its class, which call it is, and from where.

    Its sites are made once: a program comes by there in every step.
    """

    def __init__(self, path: str, kind: str, number: int, line: UserLine) -> None:
        self.path = path
        self.number = number
        self._site = Site(
            source="eager",
            level="module",
            name=path,
            op=kind,
            module=path,
            line=line.line,
            code=line.code,
            call=number,
        )
        self._sites: dict[tuple[Side, str], Site] = {}
        self._wanted: dict[Side, bool] = {}

    def is_wanted(self, side: Side, session: Session) -> bool:
        """Whether its arguments or its results are; this has nothing to do with the position."""
        wanted = self._wanted.get(side)
        if wanted is None:
            wanted = self._wanted[side] = session.wants(self.site(side, "0"))
        return wanted

    def site(self, side: Side, position: str) -> Site:
        """Where one of its values is seen."""
        site = self._sites.get((side, position))
        if site is None:
            site = replace(self._site, side=side, position=position)
            self._sites[side, position] = site
        return site


class ModuleCalls:
    """Sees the calls of all modules and keeps account of which are at work.

    Args:
        records: whether their arguments and results are recorded, or only who is at work is known.
        gradients: where those of what they take and give are asked for, if they are.
    """

    def __init__(self, session: Session, gradients: Gradients | None, *, records: bool) -> None:
        self._session = session
        self._gradients = gradients
        self._records = records
        self._names = ModuleNames()
        self._local = threading.local()
        self._calls: dict[tuple[Any, ...], _Call] = {}
        self._ungraded: dict[str, list[int]] = {}
        self._step = -1

    def innermost(self) -> Frame:
        """The module at work in this thread; one without a name where there is none."""
        stack = self._stack()
        return stack[-1] if stack else Frame("")

    def owner(self, leaf: Tensor) -> str:
        """The path of the module that a parameter belongs to, or ""."""
        return self._names.owner(leaf)

    def around(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Any
    ) -> Any:
        """Look on while a module is called."""
        if is_symbolic():
            self._session.note(
                f"{type(module).__name__} was traced or transformed (export, fx, functorch, fake "
                "tensors) while recording; such calls have no values of their own and are left out"
            )
            return call(*args, **kwargs)
        stack = self._stack()
        again = in_backward()
        if stack or again:
            named, complete = self._names.of(module), True
        else:
            named = self._names.of_root(module)
            complete = self._begin(module, named)
        parent = stack[-1] if stack else Frame("")
        stack.append(Frame(named.path, named.wrapper, again))
        try:
            if again:
                return self._called_again(named, args, kwargs, call)
            # A wrapper took the same, and will give the same, under the same name.
            repeats = parent.wrapper and parent.path == named.path
            if not self._session.active or not self._records or repeats:
                return call(*args, **kwargs)
            return self._called(module, named, args, kwargs, call)
        finally:
            stack.pop()
            if not complete:
                self._watch_parameters(module)

    def _begin(self, root: nn.Module, named: Named) -> bool:
        self._session.enter(named.number)
        if isinstance(root, torch.nn.parallel.DistributedDataParallel):
            self._session.note(
                "gradients of parameters are those of each rank, before DistributedDataParallel"
                " reduced them"
            )
        return self._watch_parameters(root)

    def _watch_parameters(self, root: nn.Module) -> bool:
        if self._gradients is None or not self._session.active or not torch.is_grad_enabled():
            return True
        return self._gradients.watch_parameters(root, self._names)

    def _called(
        self,
        module: nn.Module,
        named: Named,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[..., Any],
    ) -> Any:
        if is_compiled(module):
            self._session.note(
                f"{named.path} is compiled: what it takes and gives is here, what happens inside is"
                " not; a backend made by paritas.record records that"
            )
        number = self._session.next_call(f"module/{named.path}")
        at = self._call(named, number, user_line(above=4))
        if not torch.is_grad_enabled():
            self._remember_ungraded(at)
        self._take(at, "input", values(args, kwargs))
        result = call(*args, **kwargs)
        self._take(at, "output", results(result))
        return result

    def _called_again(
        self,
        named: Named,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[..., Any],
    ) -> Any:
        """A checkpointed part runs for its gradients: what it computes was recorded before.

        If it ran without gradients then, they pass through the present call alone. Parts are gone
        through in reverse order, so the last call that waits for its gradients is this one.
        """
        waiting = self._ungraded.get(named.path) if self._records else None
        if not waiting or self._step != self._session.step or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        at = self._call(named, waiting.pop(), NOWHERE)
        self._watch(at, "input", values(args, kwargs))
        result = call(*args, **kwargs)
        self._watch(at, "output", results(result))
        return result

    def _take(self, at: _Call, side: Side, found: list[tuple[str, Any]]) -> None:
        if self._session.active and at.is_wanted(side, self._session):
            if is_seen():
                with unseen():
                    self._put_each(at, side, found)
            else:
                self._put_each(at, side, found)
        if self._gradients is not None and torch.is_grad_enabled():
            self._watch(at, side, found)

    def _put_each(self, at: _Call, side: Side, found: list[tuple[str, Any]]) -> None:
        for position, value in found:
            _put(self._session, at.site(side, position), value)

    def _watch(self, at: _Call, side: Side, found: list[tuple[str, Any]]) -> None:
        """Ask for the gradients of values."""
        if self._gradients is None:
            return
        for position, value in found:
            if isinstance(value, torch.Tensor) and value.requires_grad:
                self._gradients.watch(at.site(side, position), value)

    def _call(self, named: Named, number: int, line: UserLine) -> _Call:
        key = (named.path, named.kind, number, line)
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            call = self._calls[key] = _Call(*key)
        return call

    def _remember_ungraded(self, at: _Call) -> None:
        if self._step != self._session.step:
            self._step = self._session.step
            self._ungraded.clear()
        self._ungraded.setdefault(at.path, []).append(at.number)

    def _stack(self) -> list[Frame]:
        try:
            return self._local.stack  # type: ignore[no-any-return]
        except AttributeError:
            self._local.stack = []
            return self._local.stack  # type: ignore[no-any-return]


def values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Every value in arguments with its position: "0", "1.0", "mask"."""
    if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
        return [("0", args[0])]  # what most modules are given
    named = [*((str(place), value) for place, value in enumerate(args)), *kwargs.items()]
    return [leaf for position, value in named for leaf in _leaves(position, value)]


def results(result: Any) -> list[tuple[str, Any]]:
    """Every value in what a call gave with its position; a lone one is at "0"."""
    below = None if isinstance(result, torch.Tensor) else children(result)
    if below is None:
        return [("0", result)]
    return [leaf for suffix, child in below for leaf in _leaves(_key(suffix), child)]


def put_all(session: Session, site: Site, found: list[tuple[str, Any]]) -> None:
    """Record what is wanted of arguments or results, unseen by whoever else looks on."""
    if session.wants(site):
        with unseen():
            for position, value in found:
                own = site if position == site.position else replace(site, position=position)
                _put(session, own, value)


def _put(session: Session, site: Site, value: Any) -> None:
    """Record a tensor or a plain value; objects of other kinds have nothing to compare."""
    if isinstance(value, torch.Tensor):
        if has_values(value):
            session.put(site, value)
        else:
            session.note(
                f"tensors of kind {type(value).__name__} on {value.device} hold no values that can "
                "be recorded and are left out"
            )
    elif isinstance(value, _PLAIN):
        session.put(site, value)


def _leaves(position: str, tree: Any) -> Iterator[tuple[str, Any]]:
    below = children(tree)
    if below is None:
        yield position, tree
        return
    for suffix, child in below:
        yield from _leaves(f"{position}.{_key(suffix)}", child)


def _key(suffix: str) -> str:
    return suffix.strip("[].'\"")
