"""Fused attention of CUDA in float64, which its kernels do not know: the formula written out.

Only what is defined is given: without dropout the state of the generator that those operators
return is not, so that there is nothing to compare it with.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._ops import OpOverload

_aten = torch.ops.aten


def wide_attention(func: OpOverload) -> Callable[..., Any] | None:
    """The float64 form of a fused attention operator, if it is one."""
    return _FORMS.get(func)


def attend(func: OpOverload, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Forward: output, logarithm of the sum of exponentials, and the rest as it may be."""
    given = _named(func, args, kwargs)
    _refuse_dropout(given)
    scores = _scores(given)
    top = scores.logsumexp(dim=-1)
    output = torch.nan_to_num(scores.softmax(dim=-1), nan=0.0) @ given["value"]
    results: list[Any] = []
    for item in func._schema.returns:
        if item.name == "output":
            results.append(output)
        elif item.name in {"logsumexp", "log_sumexp"}:
            wanted = given.get("compute_log_sumexp", True)
            results.append(_padded(func, top) if wanted else top[..., :0])
        elif item.name in {"max_q", "max_k"}:
            results.append(given["query" if item.name == "max_q" else "key"].shape[-2])
        else:
            results.append(torch.zeros((), dtype=torch.int64, device=output.device))
    return tuple(results)


def attend_backward(func: OpOverload, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Gradients of query, key, value and, where there is one, of the bias."""
    given = _named(func, args, kwargs)
    _refuse_dropout(given)
    grad = given["grad_out" if "grad_out" in given else "grad_out_"]
    query, key, value = (given[name] for name in ("query", "key", "value"))
    weights = torch.nan_to_num(_scores(given).softmax(dim=-1), nan=0.0)
    upstream = grad @ value.mT
    inner = weights * (upstream - (upstream * weights).sum(dim=-1, keepdim=True))
    scale = _scale(given)
    results = [inner @ key * scale, inner.mT @ query * scale, weights.mT @ grad]
    if len(func._schema.returns) > len(results):
        bias = given.get("attn_bias")
        results.append(None if bias is None else _summed_to(inner, bias))
    return tuple(results)


def _scores(given: dict[str, Any]) -> Tensor:
    query, key = given["query"], given["key"]
    scores: Tensor = query @ key.mT * _scale(given)
    bias = given.get("attn_bias")
    if bias is not None:
        scores = scores + bias
    if given.get("is_causal"):
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores


def _scale(given: dict[str, Any]) -> float:
    scale = given.get("scale")
    return 1 / math.sqrt(given["query"].shape[-1]) if scale is None else float(scale)


def _padded(func: OpOverload, top: Tensor) -> Tensor:
    """The memory-efficient kernel pads each row to a multiple of 32, with infinities."""
    if "efficient" not in func._schema.name:
        return top
    missing = -top.shape[-1] % 32
    return torch.nn.functional.pad(top, (0, missing), value=math.inf)


def _summed_to(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.sum_to_size(like.shape)


def _refuse_dropout(given: dict[str, Any]) -> None:
    if given.get("dropout_p"):
        message = "fused attention with dropout draws inside its kernel"
        raise NotImplementedError(message)


def _named(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by their names in the schema."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _form(function: Callable[..., Any], func: OpOverload) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(func, *args, **kwargs)

    return run


_FORWARD = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
_BACKWARD = (
    _aten._scaled_dot_product_flash_attention_backward.default,
    _aten._scaled_dot_product_efficient_attention_backward.default,
    _aten._scaled_dot_product_cudnn_attention_backward.default,
)
_FORMS = {
    **{func: _form(attend, func) for func in _FORWARD},
    **{func: _form(attend_backward, func) for func in _BACKWARD},
}
