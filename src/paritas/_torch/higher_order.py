"""Higher-order operators as plain functions, so that a mode sees the operators inside them.

Torch runs them below its dispatch modes only where it has a rule for the mode. As functions that
call what is inside, they need none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._higher_order_ops.auto_functionalize import (
    auto_functionalized_dense,
    auto_functionalized_v2_dense,
)
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def checkpointed(body: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """A checkpoint that draws the same numbers again in backward, as the user's does.

    Of a captured checkpoint torch leaves that to the compiler, and its eager form does not do it.
    """
    context = {key: value for key, value in how.items() if key == "context_fn"}
    return checkpoint(body, *args, use_reentrant=False, preserve_rng_state=True, **context)


def run_and_save_state(op: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Run an operator that draws; the state of the generator it draws from comes first."""
    if _is_on_cuda(args, kwargs):
        return torch.cuda.get_rng_state(), op(*args, **kwargs)
    return torch.get_rng_state(), op(*args, **kwargs)


def run_with_state(state: Any, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an operator from a saved state, and leave the generator as it is."""
    if _is_on_cuda(args, kwargs):
        before = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(state.cpu())
        result = op(*args, **kwargs)
        torch.cuda.set_rng_state(before)
        return result
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    result = op(*args, **kwargs)
    torch.set_rng_state(before)
    return result


def run_with_generator(
    op: Callable[..., Any], *args: Any, rng_state: torch.Generator | None = None, **kwargs: Any
) -> Any:
    """Run an operator from the state of a generator that came as an argument.

    Torch lets the device's generator draw from that very state, which moves it on; here it draws
    from a copy, so that a second run of the graph draws the same.
    """
    if rng_state is None:
        return op(*args, **kwargs)
    generator = torch.cuda.default_generators[rng_state.device.index or 0]
    before = generator.graphsafe_get_state()
    generator.graphsafe_set_state(rng_state.clone_state())
    try:
        return op(*args, **kwargs)
    finally:
        generator.graphsafe_set_state(before)


def choose(condition: Any, yes: Callable[..., Any], no: Callable[..., Any], operands: Any) -> Any:
    """`torch.cond`."""
    return (yes if bool(condition) else no)(*operands)


def invoke(body: Callable[..., Any], _name: str, *operands: Any) -> Any:
    """A subgraph that is called in several places."""
    return body(*operands)


def _is_on_cuda(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "cuda"
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in args)


_ops = torch.ops.higher_order
PLAIN_FORMS: dict[Any, Callable[..., Any]] = {
    _ops.tag_activation_checkpoint: checkpointed,
    _ops.run_and_save_rng_state: run_and_save_state,
    _ops.run_with_rng_state: run_with_state,
    _ops.graphsafe_run_with_rng_state: run_with_generator,
    _ops.cond: choose,
    _ops.invoke_subgraph: invoke,
    _ops.auto_functionalized: auto_functionalized_dense,
    _ops.auto_functionalized_v2: auto_functionalized_v2_dense,
}
