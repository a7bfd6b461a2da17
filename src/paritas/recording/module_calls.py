"""Inputs, outputs and gradients of the modules of a running eager program."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import linecache
import os
import sys
import threading
import weakref
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.parameter import is_lazy

from paritas._torch.watching import (
    has_values,
    in_backward,
    is_compiled,
    is_seen,
    is_symbolic,
    unseen,
)
from paritas.files.records import Site
from paritas.numerics.contents import children

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import FrameType

    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

    from paritas.files.records import Side
    from paritas.recording.session import RecordingSession


# --- The user's own line --------------------------------------------------------------------------

# The folders of torch and paritas, whose frames are between the user's line and this code.
_OTHERS = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)


class UserLine(NamedTuple):
    """A line, `file.py:18, in forward`, and its text."""

    line: str
    code: str


NOWHERE = UserLine("", "")


def user_line(above: int = 1) -> UserLine:
    """The innermost line that belongs neither to torch nor to paritas.

    Args:
        above: how many callers certainly belong to paritas; checking each frame takes time.
    """
    frame = sys._getframe(above)  # noqa: SLF001  (a whole traceback takes a hundred times as long)
    while frame is not None:
        code = frame.f_code
        # By name: hashing a code object hashes all its constants.
        if is_user_file(code.co_filename):
            return format_line(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return NOWHERE


def user_frames(above: int = 1, within: Collection[str] = ()) -> tuple[tuple[str, int, str], ...]:
    """The running lines that belong neither to torch nor to paritas, the outermost first.

    Each is a file, a number and a function, as `format_line` takes them.

    Args:
        above: as of `user_line`.
        within: names of functions of torch or paritas; what called them is not looked at.
    """
    frame = sys._getframe(above)  # noqa: SLF001  (a whole traceback takes a hundred times as long)
    frames = []
    while frame is not None and frame.f_code.co_name not in within:
        code = frame.f_code
        if is_user_file(code.co_filename):
            frames.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(reversed(frames))


def user_frame(above: int = 1) -> FrameType | None:
    """The innermost running function that belongs neither to torch nor to paritas."""
    frame: FrameType | None = sys._getframe(above)  # noqa: SLF001  (as `user_frames`)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def function_of(frame: FrameType) -> FunctionType | None:
    """The function that runs in a frame, if its module or one of its callers has it by name."""
    value: Any = frame.f_globals
    for part in frame.f_code.co_qualname.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    callers: list[FrameType] = []
    caller = frame.f_back
    while caller is not None and len(callers) < _MOST_CALLERS:
        callers.append(caller)
        caller = caller.f_back
    nested = (one for each in callers for one in each.f_locals.values())
    for one in (value, *nested):
        if isinstance(one, FunctionType) and one.__code__ is frame.f_code:
            return one
    return None


_MOST_CALLERS = 4


@functools.cache
def is_user_file(file: str) -> bool:
    """Whether a file belongs neither to torch nor to paritas."""
    return not file.startswith((*_OTHERS, "<frozen "))


@functools.cache
def format_line(file: str, number: int, function: str) -> UserLine:
    """A line and its text."""
    return UserLine(f"{file}:{number}, in {function}", linecache.getline(file, number).strip())


# --- Names of modules -----------------------------------------------------------------------------

# Children that are only wrapped by their parent.
_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@dataclasses.dataclass(frozen=True)
class NamedModule:
    """A module and its name.

    Attributes:
        path: the path from its root, or the class of a root.
        prefix: the prefix for the names of its children and parameters.
        kind: its class; for a wrapper, the class of the wrapped module.
        wrapper: whether it only wraps another module and shares its name.
        number: unique in the run, except that wrappers share it.
    """

    reference: weakref.ref[nn.Module]
    path: str
    prefix: str
    kind: str
    wrapper: bool
    number: int


class ModuleNames:
    """Gives each module one name for the whole recording.

    Below the first outermost module, names are plain paths; below others, paths start with the
    class of the root. A module with two paths keeps the first.
    """

    def __init__(self) -> None:
        self._known: dict[int, NamedModule] = {}
        self._roots: list[NamedModule] = []
        self._owners: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
        self._numbers = itertools.count()

    def of_root(self, module: nn.Module) -> NamedModule:
        """The name of a module that no other module calls."""
        known = self._find(module) or self._find_wrapped(module)
        if known is not None:
            return known
        self._roots = [root for root in self._roots if root.reference() is not None]
        own = self._free(type(_unwrap_module(module)).__name__)
        prefix = "" if all(root.prefix for root in self._roots) else f"{own}."
        named = self._add(module, own, prefix)
        self._roots.append(named)
        self._walk(module, own, prefix)
        return named

    def of(self, module: nn.Module) -> NamedModule:
        """The name of a module that another module calls."""
        known = self._find(module) or self._find_wrapped(module)
        if known is not None:
            return known
        for root in self._roots:
            # It may have been added to the model after the first call.
            living = root.reference()
            if living is not None:
                self._walk(living, root.path, root.prefix)
        known = self._find(module)
        if known is not None:
            return known
        # It belongs to no other module, so it is named after its class, without a number: it may
        # have been created for this call only, and the next call may create another one.
        own = type(_unwrap_module(module)).__name__
        named = self._add(module, own, f"{own}.")
        self._walk(module, own, f"{own}.")
        return named

    def parameters(self, root: nn.Module) -> Iterator[tuple[str, NamedModule, nn.Parameter]]:
        """Each parameter below a module once, with its name and its module."""
        met: set[int] = set()
        for module in root.modules():
            named = self.of(module)
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in met:
                    met.add(id(parameter))
                    yield f"{named.prefix}{name}", named, parameter

    def owner(self, leaf: Tensor) -> str:
        """The path of a parameter's module, or an empty string."""
        found = self._owners.get(id(leaf))
        return found[1] if found is not None and found[0]() is leaf else ""

    def _find(self, module: nn.Module) -> NamedModule | None:
        known = self._known.get(id(module))
        # The address of a deleted module may be reused.
        return known if known is not None and known.reference() is module else None

    def _find_wrapped(self, module: nn.Module) -> NamedModule | None:
        """A wrapper of a module that already has a name shares this name."""
        known = self._find(_unwrap_module(module))
        if known is None:
            return None
        self._known[id(module)] = dataclasses.replace(
            known, reference=self._reference(module), wrapper=True
        )
        return self._known[id(module)]

    def _reference(self, module: nn.Module) -> weakref.ref[nn.Module]:
        key = id(module)

        def forget(gone: weakref.ref[nn.Module]) -> None:
            if key in self._known and self._known[key].reference is gone:
                del self._known[key]

        return weakref.ref(module, forget)

    def _add(self, module: nn.Module, path: str, prefix: str) -> NamedModule:
        named = NamedModule(
            reference=self._reference(module),
            path=path,
            prefix=prefix,
            kind=type(_unwrap_module(module)).__name__,
            wrapper=_unwrap_module(module) is not module,
            number=next(self._numbers),
        )
        self._known[id(module)] = named
        for parameter in module.parameters(recurse=False):
            self._owners.setdefault(id(parameter), (weakref.ref(parameter), path))
        return named

    def _walk(self, module: nn.Module, path: str, prefix: str) -> None:
        for name, child in module.named_children():
            own, below = path, prefix
            if not _stands_for(module, name):
                own = f"{prefix}{name}"
                below = f"{own}."
            if self._find(child) is None:
                self._add(child, own, below)
                self._walk(child, own, below)
            elif child is not module:
                known = self._known[id(child)]
                if known.path == own:  # otherwise it was named elsewhere, with all its children
                    self._walk(child, own, below)

    def _free(self, wanted: str) -> str:
        taken = {root.path for root in self._roots}
        others = (f"{wanted}_{count}" for count in itertools.count(1))
        return next(name for name in itertools.chain([wanted], others) if name not in taken)


def _stands_for(parent: nn.Module, child: str) -> bool:
    return child in _WRAPPED or (child == "module" and isinstance(parent, _PARALLEL))


def _unwrap_module(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        if _stands_for(module, name):
            return _unwrap_module(child)
    return module


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
            known = self._parameters.get(id(parameter))
            if known is not None and known[0]() is parameter:
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
            handle = parameter.register_post_accumulate_grad_hook(self._accumulated(site))
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

    def _accumulated(self, site: Site) -> Callable[[Tensor], None]:
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
        wanted = self._wanted.get(side)
        if wanted is None:
            wanted = self._wanted[side] = session.wants(self.site(side, "0"))
        return wanted

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
            return self._called(module, named, args, kwargs, call)
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

    def _called(
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

    def _take(self, at: _ModuleCall, side: Side, found: list[tuple[str, Any]]) -> None:
        if self._session.active and at.is_wanted(side, self._session):
            if is_seen():
                with unseen():
                    self._put_each(at, side, found)
            else:
                self._put_each(at, side, found)
        if self._gradients is not None and torch.is_grad_enabled():
            self._watch(at, side, found)

    def _put_each(self, at: _ModuleCall, side: Side, found: list[tuple[str, Any]]) -> None:
        for position, value in found:
            _put_value(self._session, at.site(side, position), value)

    def _watch(self, at: _ModuleCall, side: Side, found: list[tuple[str, Any]]) -> None:
        """Record the gradients of values."""
        if self._gradients is None:
            return
        for position, value in found:
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


def argument_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """All values in arguments, with their positions: "0", "1.0", "mask"."""
    if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
        return [("0", args[0])]  # the most common case
    named = [*((str(place), value) for place, value in enumerate(args)), *kwargs.items()]
    return [leaf for position, value in named for leaf in _leaves_below(position, value)]


def result_values(result: Any) -> list[tuple[str, Any]]:
    """All values in a result, with their positions; a single value is at "0"."""
    below = None if isinstance(result, torch.Tensor) else children(result)
    if below is None:
        return [("0", result)]
    return [
        leaf for suffix, child in below for leaf in _leaves_below(_key_of_suffix(suffix), child)
    ]


def put_all(session: RecordingSession, site: Site, found: list[tuple[str, Any]]) -> None:
    """Record wanted arguments or results, hidden from other dispatch modes."""
    if session.wants(site):
        with unseen():
            for position, value in found:
                own = site if position == site.position else replace(site, position=position)
                _put_value(session, own, value)


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


def _leaves_below(position: str, tree: Any) -> Iterator[tuple[str, Any]]:
    below = children(tree)
    if below is None:
        yield position, tree
        return
    for suffix, child in below:
        yield from _leaves_below(f"{position}.{_key_of_suffix(suffix)}", child)


def _key_of_suffix(suffix: str) -> str:
    return suffix.strip("[].'\"")
