"""Names of modules, and of what their calls are given and return."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paritas.core.numerics.contents import children, leaves

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


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
        entry = self._find(module) or self._find_wrapped(module)
        if entry is not None:
            return entry
        self._roots = [root for root in self._roots if root.reference() is not None]
        own_name = self._free(type(_unwrap_module(module)).__name__)
        prefix = "" if all(root.prefix for root in self._roots) else f"{own_name}."
        named = self._add(module, own_name, prefix)
        self._roots.append(named)
        self._walk(module, own_name, prefix)
        return named

    def of(self, module: nn.Module) -> NamedModule:
        """The name of a module that another module calls."""
        entry = self._find(module) or self._find_wrapped(module)
        if entry is not None:
            return entry
        for root in self._roots:
            # It may have been added to the model after the first call.
            living = root.reference()
            if living is not None:
                self._walk(living, root.path, root.prefix)
        entry = self._find(module)
        if entry is not None:
            return entry
        # It belongs to no other module, so it is named after its class, without a number: it may
        # have been created for this call only, and the next call may create another one.
        name = type(_unwrap_module(module)).__name__
        named = self._add(module, name, f"{name}.")
        self._walk(module, name, f"{name}.")
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
        entry = self._owners.get(id(leaf))
        return entry[1] if entry is not None and entry[0]() is leaf else ""

    def _find(self, module: nn.Module) -> NamedModule | None:
        entry = self._known.get(id(module))
        # The address of a deleted module may be reused.
        return entry if entry is not None and entry.reference() is module else None

    def _find_wrapped(self, module: nn.Module) -> NamedModule | None:
        """A wrapper of a module that already has a name shares this name."""
        entry = self._find(_unwrap_module(module))
        if entry is None:
            return None
        self._known[id(module)] = dataclasses.replace(
            entry, reference=self._reference(module), wrapper=True
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
            own_path, below = path, prefix
            if not _stands_for(module, name):
                own_path = f"{prefix}{name}"
                below = f"{own_path}."
            if self._find(child) is None:
                self._add(child, own_path, below)
                self._walk(child, own_path, below)
            elif child is not module:
                entry = self._known[id(child)]
                if (
                    entry.path == own_path
                ):  # otherwise it was named elsewhere, with all its children
                    self._walk(child, own_path, below)

    def _free(self, expected: str) -> str:
        taken = {root.path for root in self._roots}
        others = (f"{expected}_{count}" for count in itertools.count(1))
        return next(name for name in itertools.chain([expected], others) if name not in taken)


def _stands_for(parent: nn.Module, child: str) -> bool:
    return child in _WRAPPED or (child == "module" and isinstance(parent, _PARALLEL))


def _unwrap_module(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        if _stands_for(module, name):
            return _unwrap_module(child)
    return module


def argument_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """All values in arguments, with their positions: "0", "1.0", "mask"."""
    if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
        return [("0", args[0])]  # the most common case
    named = [*((str(position), value) for position, value in enumerate(args)), *kwargs.items()]
    return [leaf for position, value in named for leaf in leaves(value, position, _join_position)]


def result_values(result: Any) -> list[tuple[str, Any]]:
    """All values in a result, with their positions; a single value is at "0"."""
    below = None if isinstance(result, torch.Tensor) else children(result)
    if below is None:
        return [("0", result)]
    return [
        leaf
        for suffix, child in below
        for leaf in leaves(child, _key_of_suffix(suffix), _join_position)
    ]


def _join_position(position: str, suffix: str) -> str:
    return f"{position}.{_key_of_suffix(suffix)}"


def _key_of_suffix(suffix: str) -> str:
    return suffix.strip("[].'\"")
