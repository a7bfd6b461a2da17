"""What hangs on a tensor for the backward pass: hooks, and the nodes of the graph behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paritas.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

__all__ = ["accumulation_hooks", "copy_hooks", "gradient_hooks", "refuse_once_differentiable"]

# The node that it puts in place of the graph.
ONCE_DIFFERENTIABLE = "torch::autograd::Error"


def gradient_hooks(tensor: Tensor) -> tuple[Callable[..., Any], ...]:
    """What `register_hook` was given: may replace the gradient on its way."""
    return _registered(tensor, "_backward_hooks")


def accumulation_hooks(tensor: Tensor) -> tuple[Callable[..., Any], ...]:
    """What `register_post_accumulate_grad_hook` was given; `torch.autograd.grad` passes it by."""
    return _registered(tensor, "_post_accumulate_grad_hooks")


def copy_hooks(source: Tensor, target: Tensor) -> None:
    """Let the hooks of one leaf stand on another as well."""
    for hook in gradient_hooks(source):
        target.register_hook(hook)
    for hook in accumulation_hooks(source):
        target.register_post_accumulate_grad_hook(hook)


def refuse_once_differentiable(tensors: Iterable[Tensor]) -> None:
    """Raise what `@once_differentiable` raises, where a gradient in `tensors` bears that mark.

    Its node leads nowhere. `.backward()` comes by and raises; `torch.autograd.grad`, which goes
    only where its inputs are, leaves that part out without a word.
    """
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.name() == ONCE_DIFFERENTIABLE:
            message = "a backward function was marked with @once_differentiable"
            raise RuntimeError(message)
        following = {behind for behind, _ in node.next_functions if behind is not None} - seen
        seen |= following
        waiting += following


def _registered(tensor: Tensor, place: str) -> tuple[Callable[..., Any], ...]:
    try:
        hooks = getattr(tensor, place)
    except AttributeError:
        message = f"a tensor no longer has {place}: its hooks cannot be seen"
        raise UnsupportedTorchError(message) from None
    return tuple(hooks.values()) if hooks else ()
