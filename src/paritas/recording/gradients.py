"""Gradients of a running eager program: of what its modules take and give, of its parameters."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from msgspec.structs import replace
from torch.nn.parameter import is_lazy

from paritas._torch.watching import has_values, unseen
from paritas.dumps.records import Site

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from paritas.recording.module_names import ModuleNames
    from paritas.recording.session import Session

__all__ = ["Gradients"]


class Gradients:
    """Hooks on tensors, each of which hands a gradient to the session; none changes it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._handles: list[RemovableHandle] = []
        self._parameters: dict[int, tuple[weakref.ref[nn.Parameter], RemovableHandle]] = {}
        self._step = -1
        self._ids: set[str] = set()

    def watch(self, site: Site, tensor: Tensor) -> None:
        """Record the gradient of a value that was seen at a site, once it is there."""
        backward = replace(site, phase="backward")
        if not self._session.wants(backward):
            return
        self._forget_dead()
        self._handles.append(tensor.register_hook(self._recorder(backward)))

    def watch_parameters(self, root: nn.Module, names: ModuleNames) -> bool:
        """Record the gradients of all parameters below a module, each time one is added to.

        Returns:
            Whether that is all: those of lazy modules are made when these are called.
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
        """Take all hooks away."""
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
            # A hook of the user's may have used it up already.
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
        """A site of its own for a gradient that comes again: a graph may be gone through twice."""
        if self._step != self._session.step:
            self._step = self._session.step
            self._ids.clear()
        while site.id in self._ids:
            site = replace(site, call=site.call + 1)
        self._ids.add(site.id)
        return site

    def _forget_dead(self) -> None:
        """Drop the handles of tensors that are gone, now and then."""
        many = 4096
        if len(self._handles) >= many and len(self._handles) % many == 0:
            self._handles = [each for each in self._handles if each.hooks_dict_ref() is not None]
