"""Inputs, outputs and gradients of the modules of a running eager program."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.parameter import is_lazy

from paritas.core.torch_private.watching import (
    has_values,
    in_backward,
    is_compiled,
    is_seen,
    is_symbolic,
    unseen,
)
from paritas.core.tracing.module_names import (
    ModuleNames,
    NamedModule,
    argument_values,
    result_values,
)
from paritas.core.tracing.source_lines import NOWHERE, UserLine, user_line
from paritas.formats.files.records import Site

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

    from paritas.formats.files.records import Side
    from paritas.recording.session import RecordingSession


# --- Gradients ------------------------------------------------------------------------------------


class GradientHooks:
    """Hooks on tensors that record gradients without changing them."""

    def __init__(self, session: RecordingSession) -> None:
        self._session = session
        self._handles: list[RemovableHandle] = []
        self._parameters: dict[int, tuple[weakref.ref[nn.Parameter], RemovableHandle]] = {}
        self._step = -1
        self._ids: set[str] = set()

    def watch(self, site: Site, tensor: Tensor) -> None:
        """Record the gradient of a value at a site when it is computed."""
        backward = replace(site, phase="backward")
        if not self._session.wants(backward):
            return
        self._forget_dead()
        self._handles.append(tensor.register_hook(self._recorder(backward)))

    def watch_parameters(self, root: nn.Module, names: ModuleNames) -> bool:
        """Record the gradients of all parameters below a module, at each accumulation.

        Returns:
            False if there are lazy parameters, which are created in the first call.
        """
        complete = True
        for name, owner, parameter in names.parameters(root):
            if is_lazy(parameter):
                complete = False
                continue
            if not parameter.requires_grad:
                continue
            watched_parameter = self._parameters.get(id(parameter))
            if watched_parameter is not None and watched_parameter[0]() is parameter:
                continue
            site = Site(
                source="eager",
                level="parameter",
                name=name,
                phase="backward",
                position="grad",
                op=owner.kind,
                module=owner.path,
            )
            handle = parameter.register_post_accumulate_grad_hook(self._make_gradient_hook(site))
            self._parameters[id(parameter)] = (weakref.ref(parameter), handle)
        return complete

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        for _, handle in self._parameters.values():
            handle.remove()
        self._handles.clear()
        self._parameters.clear()

    def _recorder(self, site: Site) -> Callable[[Tensor], None]:
        def record(gradient: Tensor | None) -> None:
            if self._session.active and gradient is not None:
                self._put(self._unique(site), gradient)

        return record

    def _make_gradient_hook(self, site: Site) -> Callable[[Tensor], None]:
        def record(parameter: Tensor) -> None:
            gradient = parameter.grad
            # A hook of the user may have cleared it already.
            if gradient is None or not self._session.wants(site):
                return
            call = self._session.next_call(f"gradient/{site.name}")
            self._put(replace(site, call=call), gradient)

        return record

    def _put(self, site: Site, gradient: Tensor) -> None:
        if has_values(gradient):
            with unseen():
                self._session.put(site, gradient)

    def _unique(self, site: Site) -> Site:
        """A unique site for a repeated gradient: a graph can run backward twice."""
        if self._step != self._session.step:
            self._step = self._session.step
            self._ids.clear()
        while site.id in self._ids:
            site = replace(site, call=site.call + 1)
        self._ids.add(site.id)
        return site

    def _forget_dead(self) -> None:
        """Occasionally drop the handles of deleted tensors."""
        many = 4096
        if len(self._handles) >= many and len(self._handles) % many == 0:
            self._handles = [each for each in self._handles if each.hooks_dict_ref() is not None]


# --- Calls of modules -----------------------------------------------------------------------------

_MOST_CALLS = 1 << 15
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, type(None))


class ModuleFrame(NamedTuple):
    """A running module.

    Attributes:
        wrapper: whether it only wraps another module of that name.
        again: whether it is recomputed for its gradients, as in activation checkpointing.
    """

    path: str
    wrapper: bool = False
    again: bool = False


class _ModuleCall:
    """A call of a module; its sites are created once, since it recurs in every step."""

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

    def is_wanted(self, side: Side, session: RecordingSession) -> bool:
        """Whether its inputs or outputs are wanted; this does not depend on the position."""
        is_recorded = self._wanted.get(side)
        if is_recorded is None:
            is_recorded = self._wanted[side] = session.wants(self.site(side, "0"))
        return is_recorded

    def site(self, side: Side, position: str) -> Site:
        """The site of one of its values."""
        site = self._sites.get((side, position))
        if site is None:
            site = replace(self._site, side=side, position=position)
            self._sites[side, position] = site
        return site


class ModuleCalls:
    """Tracks the calls of all modules, and records them."""

    def __init__(
        self, session: RecordingSession, gradients: GradientHooks | None, *, records: bool
    ) -> None:
        """With `records` False, only the running modules are tracked, for `innermost`."""
        self._session = session
        self._gradients = gradients
        self._records = records
        self._names = ModuleNames()
        self._local = threading.local()
        self._calls: dict[tuple[Any, ...], _ModuleCall] = {}
        self._ungraded: dict[str, list[int]] = {}
        self._step = -1

    def innermost(self) -> ModuleFrame:
        """The running module of this thread; without a name if there is none."""
        stack = self._stack()
        return stack[-1] if stack else ModuleFrame("")

    def owner(self, leaf: Tensor) -> str:
        """The path of a parameter's module, or an empty string."""
        return self._names.owner(leaf)

    def around(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Any
    ) -> Any:
        """Record the call of a module."""
        if is_symbolic():
            self._session.note(
                f"{type(module).__name__} was traced or transformed (export, fx, functorch, fake "
                "tensors) while recording; such calls have no real values and are not recorded"
            )
            return call(*args, **kwargs)
        stack = self._stack()
        again = in_backward()
        if stack or again:
            named, complete = self._names.of(module), True
        else:
            named = self._names.of_root(module)
            complete = self._begin(module, named)
        parent = stack[-1] if stack else ModuleFrame("")
        stack.append(ModuleFrame(named.path, named.wrapper, again))
        try:
            if again:
                return self._called_again(named, args, kwargs, call)
            # Its wrapper has the same inputs and outputs, under the same name.
            repeats = parent.wrapper and parent.path == named.path
            if not self._session.active or not self._records or repeats:
                return call(*args, **kwargs)
            return self._record_call(module, named, args, kwargs, call)
        finally:
            stack.pop()
            if not complete:
                self._watch_parameters(module)

    def _begin(self, root: nn.Module, named: NamedModule) -> bool:
        self._session.enter(named.number)
        if isinstance(root, torch.nn.parallel.DistributedDataParallel):
            self._session.note(
                "parameter gradients are those of each rank, before DistributedDataParallel reduces"
                " them"
            )
        return self._watch_parameters(root)

    def _watch_parameters(self, root: nn.Module) -> bool:
        if self._gradients is None or not self._session.active or not torch.is_grad_enabled():
            return True
        return self._gradients.watch_parameters(root, self._names)

    def _record_call(
        self,
        module: nn.Module,
        named: NamedModule,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[..., Any],
    ) -> Any:
        if is_compiled(module):
            self._session.note(
                f"{named.path} is compiled: only its inputs and outputs are recorded; use a "
                "paritas.record backend to record its inside"
            )
        number = self._session.next_call(f"module/{named.path}")
        at = self._call(named, number, user_line(above=4))
        if not torch.is_grad_enabled():
            self._remember_ungraded(at)
        self._take(at, "input", argument_values(args, kwargs))
        result = call(*args, **kwargs)
        self._take(at, "output", result_values(result))
        return result

    def _called_again(
        self,
        named: NamedModule,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[..., Any],
    ) -> Any:
        """Recomputation of a checkpointed part, whose values were recorded before.

        If it ran without gradients then, gradients flow through this call only. Parts are
        recomputed in reverse order, so this is the last call without gradients.
        """
        waiting = self._ungraded.get(named.path) if self._records else None
        if not waiting or self._step != self._session.step or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        at = self._call(named, waiting.pop(), NOWHERE)
        self._watch(at, "input", argument_values(args, kwargs))
        result = call(*args, **kwargs)
        self._watch(at, "output", result_values(result))
        return result

    def _take(self, at: _ModuleCall, side: Side, positioned_values: list[tuple[str, Any]]) -> None:
        if self._session.active and at.is_wanted(side, self._session):
            if is_seen():
                with unseen():
                    self._put_each(at, side, positioned_values)
            else:
                self._put_each(at, side, positioned_values)
        if self._gradients is not None and torch.is_grad_enabled():
            self._watch(at, side, positioned_values)

    def _put_each(
        self, at: _ModuleCall, side: Side, positioned_values: list[tuple[str, Any]]
    ) -> None:
        for position, value in positioned_values:
            _put_value(self._session, at.site(side, position), value)

    def _watch(self, at: _ModuleCall, side: Side, positioned_values: list[tuple[str, Any]]) -> None:
        """Record the gradients of values."""
        if self._gradients is None:
            return
        for position, value in positioned_values:
            if isinstance(value, torch.Tensor) and value.requires_grad:
                self._gradients.watch(at.site(side, position), value)

    def _call(self, named: NamedModule, number: int, line: UserLine) -> _ModuleCall:
        key = (named.path, named.kind, number, line)
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            call = self._calls[key] = _ModuleCall(*key)
        return call

    def _remember_ungraded(self, at: _ModuleCall) -> None:
        if self._step != self._session.step:
            self._step = self._session.step
            self._ungraded.clear()
        self._ungraded.setdefault(at.path, []).append(at.number)

    def _stack(self) -> list[ModuleFrame]:
        try:
            return self._local.stack  # type: ignore[no-any-return]
        except AttributeError:
            self._local.stack = []
            return self._local.stack  # type: ignore[no-any-return]


def put_all(
    session: RecordingSession, site: Site, positioned_values: list[tuple[str, Any]]
) -> None:
    """Record wanted arguments or results, hidden from other dispatch modes."""
    if session.wants(site):
        with unseen():
            for position, value in positioned_values:
                value_site = site if position == site.position else replace(site, position=position)
                _put_value(session, value_site, value)


def _put_value(session: RecordingSession, site: Site, value: Any) -> None:
    """Record a tensor or a plain value; other objects cannot be compared."""
    if isinstance(value, torch.Tensor):
        if has_values(value):
            session.put(site, value)
        else:
            session.note(
                f"tensors of type {type(value).__name__} on {value.device} have no values to record"
                " and are left out"
            )
    elif isinstance(value, _PLAIN):
        session.put(site, value)
