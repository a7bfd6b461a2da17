"""What is seen of a model while it trains: values as a rank has them, and calls of modules."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paritas._torch.placements import local_part
from paritas.numerics.trees import leaves
from paritas.partition.plans.flows import Flows
from paritas.partition.plans.traces import INPUT, OUTPUT, ModuleCall, Piece, Place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.partition.plans.traces import StepTrace, Trace

__all__ = ["ModuleWatch", "Names", "named_pieces", "piece_of", "plain_name", "watched_modules"]

# Under these names a wrapper keeps the module that it wraps.
_INNER = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def piece_of(tensor: Tensor) -> Piece:
    """A copy of what this rank holds, on the host; no collective is started."""
    part = local_part(tensor)
    if part is None:
        local = _on_host(tensor)
        return Piece(local, global_shape=tuple(local.shape), global_offset=(0,) * local.dim())
    told = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return Piece(**{**told, "local": _on_host(part.local)})


def _on_host(tensor: Tensor) -> Tensor:
    # A copy also waits for a collective that is still under way.
    with torch.no_grad():
        return tensor.detach().clone().cpu()


def named_pieces(tree: Any, name: str = "") -> dict[str, Piece]:
    """Every tensor of an output by its path."""
    return {
        f"{name}{path}": piece_of(leaf)
        for path, leaf in leaves(tree)
        if isinstance(leaf, torch.Tensor)
    }


@dataclasses.dataclass(frozen=True)
class Names:
    """What modules, parameters and buffers are called, whatever was put around the user's model.

    Attributes:
        model: as it runs.
        prefix: where in it the user's own model is, by its plain name.
    """

    model: nn.Module
    prefix: str = ""

    @classmethod
    def within(cls, model: nn.Module, original: nn.Module) -> Names:
        """Names of what the user's model became; it may have been put into another."""
        places = (path for path, module in model.named_modules() if module is original)
        return cls(model, plain_name(model, next(places, "")))

    def of(self, path: str) -> str:
        """The name of what is at a path of the model."""
        name = plain_name(self.model, path)
        return "" if name == self.prefix else name.removeprefix(f"{self.prefix}.")


def plain_name(model: nn.Module, path: str) -> str:
    """A path in a model without the wrappers that a plan, a compiler or a checkpoint put there."""
    kept: list[str] = []
    module: Any = model
    for part in path.split(".") if path else ():
        wraps = part in _INNER or (part == "module" and isinstance(module, _PARALLEL))
        if not wraps:
            kept.append(part)
        module = getattr(module, part, None)
    return ".".join(kept)


def watched_modules(names: Names) -> dict[str, tuple[nn.Module, str]]:
    """Name -> the outermost module of that name, and the class of the innermost.

    Nothing within a compiled module is watched: hooks there would be compiled.
    """
    found: dict[str, tuple[nn.Module, str]] = {}
    compiled: list[str] = []
    for path, module in names.model.named_modules():
        inside = any(path.startswith(prefix) for prefix in compiled)
        if "_orig_mod" in dict(module.named_children()):
            compiled.append(f"{path}." if path else "")
        name = names.of(path)
        if name in found:
            found[name] = (found[name][0], _kind(module))
        elif not inside and not isinstance(module, torch.jit.ScriptModule):
            found[name] = (module, _kind(module))
    return found


def _kind(module: nn.Module) -> str:
    """The class that the user knows: FSDP puts one of its own in front."""
    own = type(module)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a model is not under what was never loaded
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        return next((base.__name__ for base in own.__bases__ if base is not fsdp.FSDPModule), "")
    return own.__name__


class ModuleWatch:
    """Hooks on all modules of a model: which one is running and, if asked, what each handed on.

    They are set after the plan has set its own, so that they see what a module finally gives.

    While it runs, `error_at` of the trace is where the program is: a rank that never ends cannot
    say it afterwards.
    """

    def __init__(self, names: Names, trace: Trace, *, keep: int | None = None) -> None:
        """Set the hooks; in step `keep`, note what modules give and gradients on both sides.

        One step alone, since all that passes between modules is a multiple of the model.
        """
        self._trace = trace
        self._keep = keep
        self._stack: list[_Entered] = []
        self._backward = False
        self._handles: list[Any] = []
        self._flows = Flows()
        for name, (module, kind) in watched_modules(names).items():
            self._handles += [
                module.register_forward_pre_hook(
                    self._entering(name), prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(self._leaving(name, kind)),
            ]

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Within it, a module that is called is one that is computed again, and not noted."""
        self._stack.clear()
        self._trace.error_at = ""
        self._backward = True
        if self._keeps and self._trace.ranks == 1:
            self._trace.steps[-1].sources = self._flows.sources()
        self._flows.clear()
        try:
            yield
        finally:
            self._backward = False
        self._trace.error_at = ""

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def _keeps(self) -> bool:
        return self._keep == len(self._trace.steps)

    def _entering(self, name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if self._backward:
                return None
            entered = _Entered(name)
            self._stack.append(entered)
            self._trace.error_at = name
            if not self._keeps:
                return None
            given = _Given(self, self._trace.steps[-1], entered)
            return given.replaced(args, "args"), given.replaced(kwargs, "kwargs")

        return hook

    def _leaving(self, name: str, kind: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if self._backward:
                return
            entered = self._stack.pop() if self._stack else _Entered(name)
            self._trace.error_at = self._stack[-1].name if self._stack else ""
            if self._trace.steps:
                self._note(self._trace.steps[-1], entered, kind, output)

        return hook

    def _note(self, step: StepTrace, entered: _Entered, kind: str, output: Any) -> None:
        if self._keeps:
            entered.position.append(len(step.modules))
            call = ModuleCall(
                entered.name,
                kind,
                named_pieces(output),
                entered.gradients[OUTPUT],
                entered.gradients[INPUT],
            )
            step.modules.append(call)
        for path, leaf in leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                self.follow(step, entered, OUTPUT, path, leaf)

    def follow(
        self, step: StepTrace, entered: _Entered, side: str, path: str, tensor: Tensor
    ) -> None:
        """Hear of the gradient of a tensor."""
        keeps = self._keeps

        def arrived(gradient: Tensor) -> None:
            self._trace.error_at = entered.name
            if keeps and entered.position:
                place = Place(entered.position[0], side, path)
                if path not in entered.gradients[side]:
                    step.backward.append(place)
                entered.gradients[side][path] = piece_of(gradient)

        tensor.register_hook(arrived)
        if keeps and self._trace.ranks == 1:  # the reference's ways are those of the ranks
            self._flows.mark(tensor, entered.position, side, path)


@dataclasses.dataclass
class _Entered:
    """A call of a module that is under way.

    Attributes:
        position: among all calls, once it has ended; empty until then.
        gradients: side -> path -> the gradient there.
    """

    name: str
    position: list[int] = dataclasses.field(default_factory=list)
    gradients: dict[str, dict[str, Piece]] = dataclasses.field(
        default_factory=lambda: {INPUT: {}, OUTPUT: {}}
    )


@dataclasses.dataclass
class _Given:
    """What a call is given, each tensor as a view of its own.

    The gradient of such a view is what this call alone sends back. A tensor that is given twice
    stays one tensor; containers that the module may write to are left alone.
    """

    watch: ModuleWatch
    step: StepTrace
    entered: _Entered
    views: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    def replaced(self, given: Any, path: str) -> Any:
        """The same with views in place of the tensors that gradients go to."""
        if type(given) is tuple:
            return tuple(self.replaced(one, f"{path}[{n}]") for n, one in enumerate(given))
        if type(given) is dict and path == "kwargs":
            return {name: self.replaced(one, f"{path}[{name!r}]") for name, one in given.items()}
        if not isinstance(given, torch.Tensor) or not given.requires_grad:
            return given
        if not torch.is_grad_enabled():
            return given
        if id(given) not in self.views:
            try:
                view = given.view_as(given)
            except (RuntimeError, NotImplementedError):  # of a layout that has no views
                return given
            self.views[id(given)] = view
            self.watch.follow(self.step, self.entered, INPUT, path, view)
        return self.views[id(given)]
