"""How a graph is compiled: a backend by its name, with its options."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.errors import UsageError
from paritas.core.importing import import_named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.fx import GraphModule


_INDUCTOR = "torch._inductor.compile_fx"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """How a graph is compiled, as for `torch.compile`.

    Attributes:
        backend: a name, or `module:function`.
        setup: statements that a new process must run first, such as the import of a module that
            registers a backend.
    """

    backend: str = "inductor"
    mode: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dynamic: bool | None = None
    setup: tuple[str, ...] = ()

    def compile(self, module: GraphModule, *, dynamic: bool | None = None) -> Callable[..., Any]:
        """`torch.compile` of a graph, as the user would call it."""
        dynamic_mode = self.dynamic if dynamic is None else dynamic
        keywords: dict[str, Any] = {"backend": self.resolve(), "dynamic": dynamic_mode}
        if self.mode is not None:
            keywords["mode"] = self.mode
        if self.options:
            keywords["options"] = dict(self.options)
        compiled: Callable[..., Any] = torch.compile(module, **keywords)
        return compiled

    @property
    def may_use_inductor(self) -> bool:
        """Whether Inductor compiles it, or has been loaded by a backend that may call it."""
        return self.backend == "inductor" or _INDUCTOR in sys.modules

    def resolve(self) -> Any:
        """The name of the backend, or the function that `module:function` names."""
        if ":" not in self.backend:
            return self.backend
        try:
            return import_named(self.backend)
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"the backend {self.backend!r} cannot be imported ({error}); give module:function "
                "of a module that Python can import"
            ) from error
