"""Fused attention by its definition, and with its weights rounded as other kernels round them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.detection.benign_kinds import Rewrite, if_narrow, narrow, wide
from torch import Tensor

if TYPE_CHECKING:
    from torch.fx import Node

BY_DEFINITION = Rewrite("attention_by_definition", "attention as softmax(q k^T) v in float32")
ROUNDED_WEIGHTS = Rewrite(
    "attention_rounding_weights", "weights rounded to 16 bits before they meet the values"
)

ATTENTION = (BY_DEFINITION, ROUNDED_WEIGHTS)


def _kernel(name: str) -> Any:
    return getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default


# Kernels, with the position of the dropout's probability; whether they are causal comes after it.
FORWARD = {
    _kernel("flash_attention_for_cpu"): 3,
    _kernel("flash_attention"): 3,
    _kernel("efficient_attention"): 5,
    _kernel("cudnn_attention"): 5,
}
BACKWARD = {
    _kernel("flash_attention_for_cpu_backward"): 6,
    _kernel("flash_attention_backward"): 10,
    _kernel("cudnn_attention_backward"): 13,
}


def _if_plain(node: Node) -> dict[str, dict[str, Any]]:
    """A call without dropout or bias; the function is told which operator it stands in for."""
    dropped = {**FORWARD, **BACKWARD}[node.target]
    options = [*node.args[dropped:], False, False][:2]
    bias = node.kwargs.get("attn_mask"), *node.args[3 : 4 if dropped == 5 else 3]
    if options[0] or any(one is not None for one in bias):
        return {}
    return {"": {"op": node.target, "causal": options[1]}}


def _if_plain_and_narrow(node: Node) -> dict[str, dict[str, Any]]:
    return _if_plain(node) if if_narrow(node) else {}


def _weights(query: Tensor, key: Tensor, scale: float, *, causal: bool) -> Tensor:
    scores = wide(query) @ wide(key).mT * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1)


def _attend(args: tuple[Any, ...], given: dict[str, Any], *, rounded: bool) -> tuple[Any, ...]:
    """The kernel's results with another output: the rest is what its backward kernel reads."""
    query, key, value = args[:3]
    scale = given.get("scale")
    weights = _weights(query, key, scale or query.shape[-1] ** -0.5, causal=given["causal"])
    if rounded:
        weights = wide(narrow(weights, value))
    return narrow(weights @ wide(value), value), *given["op"](*args, scale=scale)[1:]


def _gradients(args: tuple[Any, ...], given: dict[str, Any], *, rounded: bool) -> tuple[Any, ...]:
    above, query, key, value = args[:4]
    scale = given.get("scale") or query.shape[-1] ** -0.5
    weights = _weights(query, key, scale, causal=given["causal"])
    to_weights = wide(above) @ wide(value).mT
    to_scores = weights * (to_weights - (to_weights * weights).sum(-1, keepdim=True)) * scale
    if rounded:
        weights, to_scores = (wide(narrow(one, value)) for one in (weights, to_scores))
    found = to_scores @ wide(key), to_scores.mT @ wide(query), weights.mT @ wide(above)
    return tuple(narrow(one, value) for one in found)


@BY_DEFINITION.of(*FORWARD, settings=_if_plain)
def attend(*args: Any, **given: Any) -> tuple[Any, ...]:
    return _attend(args, given, rounded=False)


@BY_DEFINITION.of(*BACKWARD, settings=_if_plain)
def attend_backward(*args: Any, **given: Any) -> tuple[Any, ...]:
    return _gradients(args, given, rounded=False)


@ROUNDED_WEIGHTS.of(*FORWARD, settings=_if_plain_and_narrow)
def attend_rounding(*args: Any, **given: Any) -> tuple[Any, ...]:
    return _attend(args, given, rounded=True)


@ROUNDED_WEIGHTS.of(*BACKWARD, settings=_if_plain_and_narrow)
def attend_backward_rounding(*args: Any, **given: Any) -> tuple[Any, ...]:
    return _gradients(args, given, rounded=True)
