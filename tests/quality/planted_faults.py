"""What can be wrong with one node of a graph: each fault writes other nodes behind it."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx.node import map_arg

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Node

    # The node whose readers are to read another one, and that other; None where it does not apply.
    Replaced = tuple[Node, Node] | None
    Fault = Callable[[Node, "Emit"], Replaced]

aten = torch.ops.aten
# What computes nothing and moves nothing, and what moves values without changing them.
IDLE = {"view", "reshape", "unsqueeze", "squeeze", "copy_", "unbind"}
MOVING = {"expand", "permute", "select", "clone"}
CONTRACTIONS = {"mm": 1, "bmm": 1, "addmm": 2}
REDUCTIONS = {"sum", "amax", "mean"}
STRICTER = {"le": aten.lt.Scalar, "lt": aten.le.Scalar, "ge": aten.gt.Scalar, "gt": aten.ge.Scalar}


class Emit:
    """Writes calls behind a node, one after the other, with the values that tracing would note."""

    def __init__(self, node: Node) -> None:
        self.last = node
        self.nodes: list[Node] = []

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        graph = self.last.graph
        with graph.inserting_after(self.last):
            self.last = graph.call_function(target, args, kwargs)
        self.nodes.append(self.last)
        args, kwargs = map_arg((args, kwargs), value)
        self.last.meta["val"] = target(*args, **kwargs)
        return self.last

    def undo(self) -> None:
        for node in reversed(self.nodes):
            node.graph.erase_node(node)


def value(node: Node) -> Any:
    return node.meta["val"]


def handles(node: Node) -> list[Node]:
    """The nodes that stand for the single values of a node with several."""
    if isinstance(value(node), Tensor):
        return []
    return [user for user in node.users if user.target is operator.getitem]


def kind(node: Node) -> str:
    """The name of the operator; "" for what is none or does nothing."""
    name = getattr(node.target, "_opname", "") if node.op == "call_function" else ""
    return "" if name in IDLE else name


def behind(change: Callable[[Node, Emit], Node | None], *, moving: bool) -> Fault:
    """A fault that spoils a value of a node after it was computed."""

    def fault(node: Node, emit: Emit) -> Replaced:
        if not kind(node) or (kind(node) in MOVING and not moving):
            return None
        for place in handles(node) or [node]:
            if isinstance(value(place), Tensor) and value(place).is_floating_point():
                emit.last = place
                changed = change(place, emit)
                return None if changed is None else (place, changed)
        return None

    return fault


def instead(change: Callable[[Node, Emit], Node | None]) -> Fault:
    """A fault that computes something else of the same shape from a node's arguments."""

    def fault(node: Node, emit: Emit) -> Replaced:
        changed = change(node, emit) if kind(node) else None
        fits = changed is not None and _shapes(value(changed)) == _shapes(value(node))
        return (node, changed) if changed is not None and fits else None

    return fault


def _shapes(item: Any) -> Any:
    return (
        item.shape
        if isinstance(item, Tensor)
        else [part.shape for part in item if part is not None]
    )


# --- a value spoilt -------------------------------------------------------------------------------


def scaled(factor: float) -> Fault:
    return behind(lambda node, emit: emit(aten.mul.Tensor, node, factor), moving=False)


def zero_at_the_end(axis: int) -> Fault:
    def change(node: Node, emit: Emit) -> Node | None:
        shape = value(node).shape
        if not shape or shape[axis] < 2:
            return None
        kept = emit(aten.slice.Tensor, node, axis % len(shape), 0, shape[axis] - 1)
        padding = [0, 0] * (len(shape) - 1 - axis % len(shape)) + [0, 1]
        return emit(aten.constant_pad_nd.default, kept, padding, 0.0)

    return behind(change, moving=True)


def _first_row_stale(node: Node, emit: Emit) -> Node | None:
    shape = value(node).shape
    if not shape or shape[0] < 2:
        return None
    last = emit(aten.slice.Tensor, node, 0, shape[0] - 1, shape[0])
    rest = emit(aten.slice.Tensor, node, 0, 1, shape[0])
    return emit(aten.cat.default, [last, rest], 0)


def _rolled(node: Node, emit: Emit) -> Node | None:
    shape = value(node).shape
    if not shape or shape[-1] < 2:
        return None
    axis = len(shape) - 1
    last = emit(aten.slice.Tensor, node, axis, shape[-1] - 1, shape[-1])
    rest = emit(aten.slice.Tensor, node, axis, 0, shape[-1] - 1)
    return emit(aten.cat.default, [last, rest], axis)


# --- something else computed ----------------------------------------------------------------------


def _operands_swapped(node: Node, emit: Emit) -> Node | None:
    if kind(node) not in {"sub", "div"} or not hasattr(node.args[1], "meta"):
        return None
    return emit(node.target, node.args[1], node.args[0])


def _leaky(node: Node, emit: Emit) -> Node | None:
    if kind(node) != "relu":
        return None
    leak = emit(aten.mul.Tensor, node.args[0], 0.01)
    return emit(aten.maximum.default, node.args[0], leak)


def _smooth(node: Node, emit: Emit) -> Node | None:
    if kind(node) != "relu":
        return None
    steep = emit(aten.mul.Tensor, node.args[0], 1.702)
    return emit(aten.mul.Tensor, node.args[0], emit(aten.sigmoid.default, steep))


def _other_sigmoid(node: Node, emit: Emit) -> Node | None:
    other = {"tanh": aten.erf.default, "erf": aten.tanh.default}.get(kind(node))
    return None if other is None else emit(other, node.args[0])


def _wrong_constant(node: Node, emit: Emit) -> Node | None:
    """A scale 10 % off, an epsilon a hundredfold, a count one too many."""
    if kind(node) not in {"mul", "div", "add"} or not isinstance(node.args[1], int | float):
        return None
    constant = node.args[1]
    if kind(node) == "add":
        wrong = constant * 100 if constant < 0.1 else constant + 1
    else:
        wrong = constant * 1.1
    return emit(node.target, node.args[0], wrong)


def _operand_transposed(node: Node, emit: Emit) -> Node | None:
    place = CONTRACTIONS.get(kind(node))
    return None if place is None else _with_transposed(node, emit, place)


def _kernel_transposed(node: Node, emit: Emit) -> Node | None:
    place = {"convolution": 1, "convolution_backward": 2}.get(kind(node))
    return None if place is None else _with_transposed(node, emit, place)


def _with_transposed(node: Node, emit: Emit, place: int) -> Node | None:
    operand: Any = node.args[place]
    shape = value(operand).shape
    if shape[-1] != shape[-2]:
        return None
    args = list(node.args)
    args[place] = emit(aten.permute.default, operand, _swapped(len(shape), -1, -2))
    return emit(node.target, *args, **node.kwargs)


def _bias_left_out(node: Node, emit: Emit) -> Node | None:
    return emit(aten.mm.default, *node.args[1:3]) if kind(node) == "addmm" else None


def _wrong_permutation(node: Node, emit: Emit) -> Node | None:
    if kind(node) != "permute":
        return None
    shape = value(node).shape
    for left in range(len(shape)):
        for right in range(left):
            if shape[left] == shape[right] > 1:
                return emit(aten.permute.default, node, _swapped(len(shape), left, right))
    return None


def _wrong_index(node: Node, emit: Emit) -> Node | None:
    place = {"select": 2, "select_scatter": 3}.get(kind(node))
    if place is None:
        return None
    args: list[Any] = list(node.args)
    args[place] = (args[place] + 1) % value(args[0]).shape[args[place - 1]]
    return emit(node.target, *args)


def _last_term_dropped(node: Node, emit: Emit) -> Node | None:
    if kind(node) not in REDUCTIONS:
        return None
    source, axes, *rest = node.args
    axis: Any = axes[0] % value(source).dim()
    size = value(source).shape[axis]
    short = emit(aten.slice.Tensor, source, axis, 0, size - 1) if size > 1 else None
    return None if short is None else emit(node.target, short, axes, *rest, **node.kwargs)


def _wrong_axis(node: Node, emit: Emit) -> Node | None:
    if kind(node) not in REDUCTIONS | {"var_mean"}:
        return None
    source, axes, *rest = node.args
    shape = value(source).shape
    reduced = [axis % len(shape) for axis in axes]
    for axis in reduced:
        for other in set(range(len(shape))) - set(reduced):
            if shape[axis] == shape[other] > 1:
                turned = emit(aten.permute.default, source, _swapped(len(shape), axis, other))
                return emit(node.target, turned, axes, *rest, **node.kwargs)
    return None


def _strict_comparison(node: Node, emit: Emit) -> Node | None:
    return emit(STRICTER[kind(node)], *node.args) if kind(node) in STRICTER else None


def _branches_swapped(node: Node, emit: Emit) -> Node | None:
    if kind(node) != "where":
        return None
    condition, left, right = node.args
    return emit(node.target, condition, right, left)


def _wrong_correction(node: Node, emit: Emit) -> Node | None:
    if kind(node) != "var_mean":
        return None
    correction = 1 - node.kwargs.get("correction", 1)
    return emit(node.target, *node.args, **{**node.kwargs, "correction": correction})


def _swapped(count: int, left: int, right: int) -> list[int]:
    order = list(range(count))
    order[left], order[right] = order[right], order[left]
    return order


ANYWHERE: dict[str, Fault] = {
    "scaled by 1.01": scaled(1.01),
    "scaled by 1.0005": scaled(1.0005),
    "negated": scaled(-1.0),
    "shifted by 0.01": behind(lambda node, emit: emit(aten.add.Tensor, node, 0.01), moving=False),
    "last row zero": zero_at_the_end(0),
    "last column zero": zero_at_the_end(-1),
    "first row stale": behind(_first_row_stale, moving=True),
    "rolled by one": behind(_rolled, moving=True),
}
OF_OPERATORS: dict[str, Fault] = {
    "operands swapped": instead(_operands_swapped),
    "leaky": instead(_leaky),
    "smooth": instead(_smooth),
    "another sigmoid": instead(_other_sigmoid),
    "wrong constant": instead(_wrong_constant),
    "operand transposed": instead(_operand_transposed),
    "kernel transposed": instead(_kernel_transposed),
    "bias left out": instead(_bias_left_out),
    "wrong permutation": instead(_wrong_permutation),
    "wrong index": instead(_wrong_index),
    "last term dropped": instead(_last_term_dropped),
    "wrong axis": instead(_wrong_axis),
    "comparison stricter": instead(_strict_comparison),
    "branches swapped": instead(_branches_swapped),
    "wrong correction": instead(_wrong_correction),
}
FAULTS = ANYWHERE | OF_OPERATORS
