"""What torch knows of the values of an FX graph, and how it can be asked without running it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node

from paritas.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = [
    "foretell_values",
    "is_bracket",
    "is_higher_order",
    "is_operator",
    "size_number",
    "symbol_ranges",
]


def is_bracket(target: Any, args: Sequence[Any]) -> bool:
    """Whether a node only says whether gradients are kept inside the graph that it is given."""
    return (
        is_higher_order(target)
        and getattr(target, "__name__", "") == "wrap_with_set_grad_enabled"
        and len(args) > 1
    )


def is_operator(target: Any) -> bool:
    """Whether a node's target is an operator of torch's dispatcher: `aten.mm.default`."""
    return isinstance(target, OpOverload | OpOverloadPacket)


def is_higher_order(target: Any) -> bool:
    """Whether a node's target is an operator that is given graphs: `cond`, `flex_attention`."""
    return isinstance(target, HigherOrderOperator)


def size_number(
    value: torch.SymInt | torch.SymFloat | torch.SymBool, guess: Callable[[str], int]
) -> int | float | bool | None:
    """The number that a size had when its graph was made.

    Args:
        guess: the number for a symbol that had none, because it depends on values.
    """
    node = value.node
    if not hasattr(node, "hint"):
        raise UnsupportedTorchError(
            f"torch {torch.__version__}: {type(node).__name__} has no `hint`, which says the "
            "number behind a symbolic size"
        )
    hint = node.hint
    if isinstance(hint, int | float):
        return hint
    settled = node.expr.subs({one: guess(str(one)) for one in node.expr.free_symbols})
    try:
        if isinstance(value, torch.SymBool):
            return bool(settled)
        return int(settled) if isinstance(value, torch.SymInt) else float(settled)
    except TypeError:
        return None  # an expression that does not come to a number


def symbol_ranges(program: ExportedProgram) -> dict[str, tuple[int | None, int | None]]:
    """Between which numbers the symbols of a program lie; None where there is no end."""

    def whole(bound: Any) -> int | None:
        return int(bound) if getattr(bound, "is_Integer", False) else None

    return {
        str(symbol): (whole(within.lower), whole(within.upper))
        for symbol, within in program.range_constraints.items()
    }


def foretell_values(module: GraphModule, inputs: Sequence[Any]) -> dict[Node, Any]:
    """What each node of a graph gives on inputs like these: shapes and dtypes, no values.

    A node that fails leaves its value, and those that depend on it, out. Nothing of the module is
    written to.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def hollow(value: Any) -> Any:
        # A fake of torch's own would belong to another mode, and not mix with ours.
        if isinstance(value, FakeTensor):
            with mode:
                return torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    found = _Foretelling(module, hollow)
    with mode:
        found.run(*[hollow(one) for one in inputs])
    return found.values


class _Foretelling(Interpreter):
    """Runs a graph on tensors without contents, with parameters that have none either."""

    def __init__(self, module: GraphModule, hollow: Callable[[Any], Any]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._hollow = functools.cache(hollow)
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        if n.op == "output" or any(one not in self.values for one in n.all_input_nodes):
            return None
        try:
            self.values[n] = super().run_node(n)
        except Exception:  # noqa: BLE001  (told of as a call whose shapes are unknown)
            return None
        return self.values[n]

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = super().get_attr(target, args, kwargs)
        return self._hollow(found) if isinstance(found, torch.Tensor) else found

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        submodule = self.fetch_attr(target)
        tensors = {**dict(submodule.named_parameters()), **dict(submodule.named_buffers())}
        held = {name: self._hollow(tensor) for name, tensor in tensors.items()}
        return torch.func.functional_call(submodule, held, args, kwargs)
