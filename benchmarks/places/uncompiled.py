"""Candidates that nobody compiled: a copy with one module replaced, an exported graph edited."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.places.calls import Call, Fault, operator_of, try_fault
from benchmarks.places.passes import line_of, module_of
from benchmarks.places.planting import SOURCES, Planted, Subject, Truth, in_turn
from torch import Tensor, fx, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# --- One module is replaced -----------------------------------------------------------------------


def _norm(module: nn.Module, x: Tensor) -> Call:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return Call.of(functional.rms_norm, (x, list(module.weight.shape), module.weight, eps), {})


# By class: the call of torch's operator that a module makes.
_CALLS: dict[str, Callable[[Any, Tensor], Call]] = {
    "Linear": lambda m, x: Call.of(functional.linear, (x, m.weight, m.bias), {}),
    "LayerNorm": lambda m, x: Call.of(
        functional.layer_norm, (x, m.normalized_shape, m.weight, m.bias, m.eps), {}
    ),
    "Conv1d": lambda m, x: Call.of(
        functional.conv1d, (x, m.weight, m.bias, m.stride, m.padding, m.dilation, m.groups), {}
    ),
    "Conv2d": lambda m, x: Call.of(
        functional.conv2d, (x, m.weight, m.bias, m.stride, m.padding, m.dilation, m.groups), {}
    ),
    "Embedding": lambda m, x: Call.of(functional.embedding, (x, m.weight), {}),
    "GroupNorm": lambda m, x: Call.of(
        functional.group_norm, (x, m.num_groups, m.weight, m.bias, m.eps), {}
    ),
    "BatchNorm2d": lambda m, x: Call.of(
        functional.batch_norm,
        (x, m.running_mean, m.running_var, m.weight, m.bias, False, 0.0, m.eps),
        {},
    ),
    "GELUActivation": lambda _, x: Call.of(functional.gelu, (x,), {}),
    "GELU": lambda _, x: Call.of(functional.gelu, (x,), {}),
    "SiLU": lambda _, x: Call.of(functional.silu, (x,), {}),
    "SiLUActivation": lambda _, x: Call.of(functional.silu, (x,), {}),
    "ReLU": lambda _, x: Call.of(functional.relu, (x,), {}),
    "Tanh": lambda _, x: Call.of(torch.tanh, (x,), {}),
}


def call_of(module: nn.Module, x: Any) -> Call | None:
    """What a module calls, if that is one operator."""
    name = type(module).__name__
    make = _CALLS.get(name) or (_norm if name.endswith("RMSNorm") else None)
    return None if make is None or not isinstance(x, Tensor) else make(module, x)


def is_fitting(fault: Fault, call: Call) -> bool:
    """Whether a fault can be planted in a call, and changes it."""
    with torch.no_grad():
        return try_fault(fault, call, backward=False) is not None


def by_module(subject: Subject) -> Iterator[Planted]:
    """A copy of the model in which the forward of one module has a fault."""
    calls: dict[str, Call] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            call = call_of(module, args[0]) if len(args) == 1 else None
            if call is not None:
                calls.setdefault(path, call)

        return hook

    hooks = [m.register_forward_pre_hook(note(p)) for p, m in subject.model.named_modules()]
    with torch.no_grad():
        subject.model(*subject.inputs.args, **subject.inputs.kwargs)
        for hook in hooks:
            hook.remove()
    groups = {
        name: [(path, path) for path, call in calls.items() if call.name in fault.operators]
        for name, fault in subject.faults.items()
    }
    lines = {
        seen.module: seen.source
        for seen in subject.survey("captured").seen
        if seen.module in calls and seen.node.operator == calls[seen.module].name
    }

    def fits(name: str, path: str) -> bool:
        return is_fitting(subject.faults[name], calls[path])

    for name, path in in_turn(subject, groups, f"{subject.name} module", fits):
        fault = subject.faults[name]
        yield Planted(
            "module",
            name,
            Truth((), (calls[path].name, type(subject.model.get_submodule(path)).__name__),
                  (lines.get(path, ""),), (path,)),
            tuple(sorted(fault.kinds)),
            tuple(sorted(fault.loose)),
            lambda path=path, fault=fault: replaced(subject.model, path, fault),
        )  # fmt: skip


def replaced(model: nn.Module, path: str, fault: Fault) -> nn.Module:
    """A copy of a model with a fault in one of its modules."""
    candidate = copy.deepcopy(model)
    module = candidate.get_submodule(path)

    class Rewritten(type(module)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            return fault.wrong(call_of_rewritten(self, x))

    module.__class__ = Rewritten
    return candidate


def call_of_rewritten(module: nn.Module, x: Tensor) -> Call:
    """What a module called before its class was replaced by a derived one."""
    before = type(module).__bases__[0].__name__
    make = _CALLS.get(before) or _norm
    return make(module, x)


# --- An exported graph is edited ------------------------------------------------------------------


def by_export(subject: Subject) -> Iterator[Planted]:
    """The graph of torch.export, with a fault in one node, as an uncompiled function."""
    model = copy.deepcopy(subject.model)
    try:
        program = torch.export.export(
            model, subject.inputs.args, subject.inputs.kwargs, strict=False
        )
    except Exception:  # noqa: BLE001  (not every model can be exported)
        return
    module = program.module()
    noting = _Calls(module)
    with torch.no_grad():
        leaves = torch.utils._pytree.tree_leaves(  # noqa: SLF001, TID251
            (subject.inputs.args, subject.inputs.kwargs)
        )
        noting.run(*leaves)
    groups = {
        name: [(node.name, (node, call)) for node, call in noting.calls
               if call.name in fault.operators]
        for name, fault in subject.faults.items()
    }  # fmt: skip

    def fits(name: str, found: tuple[fx.Node, Call]) -> bool:
        return is_fitting(subject.faults[name], found[1])

    for name, (node, call) in in_turn(subject, groups, f"{subject.name} export", fits):
        fault = subject.faults[name]
        yield Planted(
            "exported graph",
            name,
            Truth((node.name,), (call.name,), (line_of(node),), (module_of(node),)),
            tuple(sorted(fault.kinds)),
            tuple(sorted(fault.loose)),
            lambda node=node, fault=fault: _edited(module, node, fault),
        )


class _Calls(fx.Interpreter):
    """Notes the calls of a graph; `self.calls` has them with their nodes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.calls: list[tuple[fx.Node, Call]] = []

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and not operator_of(n.target).endswith("_"):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self.calls.append((n, Call.of(n.target, tuple(args), dict(kwargs))))
        return super().run_node(n)


def _edited(module: fx.GraphModule, node: fx.Node, fault: Fault) -> nn.Module:
    target = node.target

    def rewritten(*args: Any, **kwargs: Any) -> Any:
        return fault.wrong(Call.of(target, args, kwargs))

    rewritten.__name__ = f"{operator_of(target)}_rewritten"
    node.target = rewritten
    module.recompile()
    return module


SOURCES["module"] = by_module
SOURCES["exported graph"] = by_export
