"""What the modules of a running program are called, found out as it runs."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["ModuleNames", "Named"]

# Children that stand for their parent: it only wraps them.
_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@dataclasses.dataclass(frozen=True)
class Named:
    """A module and what it is called.

    Attributes:
        reference: the module, as long as it lives.
        path: its name: the path from its root, or the class of a root.
        prefix: what the names of its children and parameters begin with.
        kind: its class; of a wrapper, the class of what it wraps.
        wrapper: whether it only stands before another one, under whose name it goes.
        number: the same for no other module of the run, its wrappers apart.
    """

    reference: weakref.ref[nn.Module]
    path: str
    prefix: str
    kind: str
    wrapper: bool
    number: int


class ModuleNames:
    """Gives each module one name for the whole of a recording.

    The first outermost module lends its children their paths as they are; those of others are
    preceded by its class. A module that is met under two paths keeps the first.
    """

    def __init__(self) -> None:
        self._known: dict[int, Named] = {}
        self._roots: list[Named] = []
        self._owners: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
        self._numbers = itertools.count()

    def of_root(self, module: nn.Module) -> Named:
        """The name of a module that no other one calls."""
        known = self._find(module) or self._find_wrapped(module)
        if known is not None:
            return known
        self._roots = [root for root in self._roots if root.reference() is not None]
        own = self._free(type(_unwrapped(module)).__name__)
        prefix = "" if all(root.prefix for root in self._roots) else f"{own}."
        named = self._add(module, own, prefix)
        self._roots.append(named)
        self._walk(module, own, prefix)
        return named

    def of(self, module: nn.Module) -> Named:
        """The name of a module that another one calls."""
        known = self._find(module) or self._find_wrapped(module)
        if known is not None:
            return known
        for root in self._roots:
            # It may have been put into the model after that was called first.
            living = root.reference()
            if living is not None:
                self._walk(living, root.path, root.prefix)
        known = self._find(module)
        if known is not None:
            return known
        # It belongs to no other: its class is all there is to call it by. It may have been made
        # for this call alone, as another one will be for the next, so it gets no number.
        own = type(_unwrapped(module)).__name__
        named = self._add(module, own, f"{own}.")
        self._walk(module, own, f"{own}.")
        return named

    def parameters(self, root: nn.Module) -> Iterator[tuple[str, Named, nn.Parameter]]:
        """Each parameter below a module once, with its name and the module that holds it."""
        met: set[int] = set()
        for module in root.modules():
            named = self.of(module)
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in met:
                    met.add(id(parameter))
                    yield f"{named.prefix}{name}", named, parameter

    def owner(self, leaf: Tensor) -> str:
        """The path of the module that holds a parameter, or ""."""
        found = self._owners.get(id(leaf))
        return found[1] if found is not None and found[0]() is leaf else ""

    def _find(self, module: nn.Module) -> Named | None:
        known = self._known.get(id(module))
        # The address of a module that is gone may be given to another one.
        return known if known is not None and known.reference() is module else None

    def _find_wrapped(self, module: nn.Module) -> Named | None:
        """A wrapper made of a module that has a name already is that module."""
        known = self._find(_unwrapped(module))
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

    def _add(self, module: nn.Module, path: str, prefix: str) -> Named:
        named = Named(
            reference=self._reference(module),
            path=path,
            prefix=prefix,
            kind=type(_unwrapped(module)).__name__,
            wrapper=_unwrapped(module) is not module,
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
                if known.path == own:  # else it was named, with all below it, elsewhere
                    self._walk(child, own, below)

    def _free(self, wanted: str) -> str:
        taken = {root.path for root in self._roots}
        others = (f"{wanted}_{count}" for count in itertools.count(1))
        return next(name for name in itertools.chain([wanted], others) if name not in taken)


def _stands_for(parent: nn.Module, child: str) -> bool:
    return child in _WRAPPED or (child == "module" and isinstance(parent, _PARALLEL))


def _unwrapped(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        if _stands_for(module, name):
            return _unwrapped(child)
    return module
