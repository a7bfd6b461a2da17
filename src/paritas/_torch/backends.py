"""Backends of `torch.compile`, to be called from within another backend."""

from __future__ import annotations

import dataclasses
import difflib
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo

from paritas._torch.compiled import backend_name
from paritas.errors import UnsupportedTorchError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend and what `torch.compile` was told about it.

    Attributes:
        name: what the user calls it.
        function: from a graph and example inputs to a callable.
        settings: keyword arguments for it; of Inductor, its options.
        is_inductor: whether graphs can be watched below AOTAutograd.
    """

    name: str
    function: Callable[..., Any]
    settings: dict[str, Any]
    is_inductor: bool

    def compile(self, graph: GraphModule, example_inputs: list[Any], **given: Any) -> Any:
        """Compile one captured graph; `given` is the mode and options of `torch.compile`."""
        if self.is_inductor:
            patches = self.inductor_options(given)
            return self.function(graph, example_inputs, config_patches=patches or None)
        return self.function(graph, example_inputs, **self.settings, **given)

    def inductor_options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Inductor's options: those of the backend, then those of `torch.compile`."""
        asked = _inductor_options(given.get("mode"), given.get("options"))
        return {**self.settings, **asked}


def inductor_backend() -> Callable[..., Any]:
    """What `torch.compile(backend="inductor")` calls: a captured graph in, a callable out."""
    try:
        backend: Any = torch._dynamo.lookup_backend("inductor")
    except (AttributeError, RuntimeError) as error:
        message = f"torch {torch.__version__} does not give its backend 'inductor': {error}"
        raise UnsupportedTorchError(message) from error
    if not callable(backend):
        message = f"torch {torch.__version__} gives as its backend 'inductor' {backend!r:.80}"
        raise UnsupportedTorchError(message)
    return backend  # type: ignore[no-any-return]


def find_backend(backend: Any, options: dict[str, Any] | None = None) -> Backend:
    """A backend by its name, as a function, or as `torch.compile` wraps either."""
    if options is not None and not isinstance(options, dict):
        message = f"options must be a dict of compiler options, not {options!r:.80}"
        raise UsageError(message)
    if isinstance(backend, str):
        return _named(backend, options)
    if not callable(backend):
        message = f"backend must be a name or a function, not {backend!r:.80}"
        raise UsageError(message)
    name = backend_name(backend)
    inner = getattr(backend, "compiler_fn", backend)
    if inner is inductor_backend() or type(backend) is torch._TorchCompileInductorWrapper:
        own = getattr(backend, "config", {})
        settings = {**own, **_inductor_options(None, options)}
        return Backend(name, inductor_backend(), settings, is_inductor=True)
    settings = {**getattr(backend, "kwargs", {}), **({"options": options} if options else {})}
    return Backend(name, inner, settings, is_inductor=False)


def is_registered(name: str, function: Callable[..., Any]) -> bool:
    """Whether `torch.compile` knows a backend of that name, and it is this one."""
    if name not in torch._dynamo.list_backends(exclude_tags=()):
        return False
    return torch._dynamo.lookup_backend(name) is function


def _named(name: str, options: dict[str, Any] | None) -> Backend:
    known = torch._dynamo.list_backends(exclude_tags=())
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
        message = f"torch.compile knows no backend {name!r}; {hint}"
        raise UsageError(message)
    if name == "inductor":
        return Backend(name, inductor_backend(), _inductor_options(None, options), is_inductor=True)
    settings = {"options": options} if options else {}
    return Backend(name, torch._dynamo.lookup_backend(name), settings, is_inductor=False)


def _inductor_options(mode: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
    """Options in Inductor's own spelling, checked by torch."""
    try:
        wrapper = torch._TorchCompileInductorWrapper(mode, options, None)
    except RuntimeError as error:
        message = str(error).split(", known options")[0]
        raise UsageError(f"{message}; see torch._inductor.list_options()") from None
    return dict(wrapper.config)
