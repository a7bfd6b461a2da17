"""The random numbers of Inductor, drawn outside of the program that is checked.

Inductor draws from generators of its own inside its kernels, and torch's eager forms of those
operators draw other numbers. So a reference draws by a kernel that Inductor makes of the draw
alone: one for each kind of number, for any size, since a draw depends on the seed and on the flat
position of each number.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch._inductor.config
import torch._inductor.inductor_prims  # defines the operators below
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import _disable_current_modes

from paritas._torch.graphs import node_draws
from paritas._torch.higher_order import PLAIN_FORMS
from paritas._torch.stance import unguarded
from paritas._torch.stances import taking_stance

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.fx import GraphModule

_SMALLEST, _LARGEST = -(2**63), 2**63 - 1


def use_twins(module: GraphModule) -> None:
    """Let a graph draw Inductor's random numbers when it is run op by op, and run quickly."""
    for node in module.graph.nodes:
        twin = None
        if node.op == "call_function":
            twin = _FORMS.get(node.target)
        if twin is not None:
            node.target = twin
    module.recompile()
    for child in module.children():
        if isinstance(child, torch.fx.GraphModule):
            use_twins(child)


def draws_random_numbers(module: GraphModule) -> bool:
    """Whether running a graph may move torch's random generators."""
    for node in module.graph.nodes:
        if isinstance(node.target, HigherOrderOperator) or node_draws(node):
            return True
    return False


def draws_by_inductor(target: Any) -> bool:
    """Whether an operator is one of Inductor's own random ones, or the twin of one."""
    return target in _TWINS or target in _TWINS.values()


def draw_seeds(count: int, device: torch.device) -> Tensor:
    """Seeds from torch's generator, as compiled code draws them."""
    seeds = torch.empty(count, dtype=torch.int64, device=device)
    torch.ops.aten.randint.low_out(_SMALLEST, _LARGEST, [count], out=seeds)
    return seeds


def draw_floats(size: list[int], seed: Tensor, mode: str, **alignment: Any) -> Tensor:
    """Uniform (`rand`) or normal (`randn`) float32 numbers of one seed."""
    count = math.prod(size)
    if count == 0:
        return torch.empty(size, dtype=torch.float32, device=seed.device)
    given = tuple(sorted((key, value) for key, value in alignment.items() if value is not None))
    return _drawn(_float_kernel(mode, given), (seed,), count).view(size)


def draw_integers(low: int, high: int, size: list[int], seed: Tensor) -> Tensor:
    """Integers of one seed."""
    count = math.prod(size)
    if count == 0:
        return torch.empty(size, dtype=torch.int64, device=seed.device)
    return _drawn(_integer_kernel(low, high), (seed,), count).view(size)


def _drawn(kernel: Callable[..., Tensor], args: tuple[Any, ...], count: int) -> Tensor:
    # One number more than one: sizes 0 and 1 would be compiled apart.
    shape = torch.empty(max(count, 2), dtype=torch.int8, device="cpu")
    with (
        _disable_current_modes(),
        torch.no_grad(),
        taking_stance("default"),
        unguarded(),
        torch._inductor.config.patch(fallback_random=False, cpp_wrapper=False),
    ):
        torch._dynamo.maybe_mark_dynamic(shape, 0)
        return kernel(*args, shape)[:count]


@functools.cache
def _float_kernel(mode: str, alignment: tuple[tuple[str, Any], ...]) -> Callable[..., Tensor]:
    def draw(seed: Tensor, shape: Tensor) -> Tensor:
        given = dict(alignment)
        drawn: Tensor = torch.ops.prims.inductor_random([shape.shape[0]], seed, mode, **given)
        return drawn

    return torch.compile(draw, fullgraph=True)


@functools.cache
def _integer_kernel(low: int, high: int) -> Callable[..., Tensor]:
    def draw(seed: Tensor, shape: Tensor) -> Tensor:
        drawn: Tensor = torch.ops.prims.inductor_randint(low, high, [shape.shape[0]], seed)
        return drawn

    return torch.compile(draw, fullgraph=True)


def count_up(length: int, *, start: int, step: int, **how: Any) -> Tensor:
    """`prims.iota`, without the detour of a prim."""
    how.pop("requires_grad", None)
    return torch.arange(start, start + length * step, step, **how)


def converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`prims.convert_element_type`, likewise."""
    return tensor.to(dtype, copy=True)


def reshaped(tensor: Tensor, size: list[int]) -> Tensor:
    """`aten.view`, as Inductor takes it: eager may lay out the viewed value in another way."""
    return tensor.reshape(size)


# Prims are written in Python, and cost more than what they do.
_DIRECT: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.view.default: reshaped,
    torch.ops.prims.iota.default: count_up,
    torch.ops.prims.convert_element_type.default: converted,
}
_TWINS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.prims.inductor_seeds.default: draw_seeds,
    torch.ops.prims.inductor_random.default: draw_floats,
    torch.ops.prims.inductor_randint.default: draw_integers,
}
_FORMS = {**_TWINS, **_DIRECT, **PLAIN_FORMS}
