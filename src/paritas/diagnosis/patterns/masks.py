"""Masks that are missing, negated, or off by one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.operations import Operation, first_variant, operation_of
from paritas.diagnosis.patterns.weighing import beyond_noise

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paritas.diagnosis.cases import Case
    from paritas.numerics.diagnoses import Pattern

__all__ = ["propose"]

_ATTENTIONS = frozenset(
    {
        "scaled_dot_product_attention",
        "scaled_dot_product_attention_math",
        "scaled_dot_product_flash_attention_for_cpu",
        "scaled_dot_product_flash_attention",
        "scaled_dot_product_efficient_attention",
        "scaled_dot_product_cudnn_attention",
    }
)
_Variants = tuple["Callable[[], Tensor] | None", "list[tuple[str, Callable[[], Tensor]]]"]


def propose(case: Case) -> list[Pattern]:
    """The operator without its mask, or with its mask off by one, if that is what came out."""
    operation = operation_of(case)
    if operation is None or not beyond_noise(case):
        return []
    return first_variant(case, operation, "mask", *_variants(operation))


def _variants(operation: Operation) -> _Variants:
    name, inputs = operation.name, operation.inputs
    if name in _ATTENTIONS and len(inputs) >= 3:  # noqa: PLR2004
        return _attention(operation)
    if name in ("tril", "triu"):
        x = inputs[0]
        cut: Callable[[Tensor, int], Tensor] = torch.tril if name == "tril" else torch.triu
        offset = operation.argument("diagonal", 1, 0)
        if not isinstance(offset, int):
            return None, []
        return lambda: cut(x, offset), [
            ("the mask is not applied", lambda: x),
            *_off_by_one(lambda less: cut(x, offset + less)),
        ]
    if name == "masked_fill" and len(inputs) >= 2:  # noqa: PLR2004
        x, mask = inputs[0], inputs[1].bool()
        value = operation.argument("value", 2, None)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None, []
        return lambda: x.masked_fill(mask, value), [
            ("the mask is not applied", lambda: x),
            ("the mask is negated", lambda: x.masked_fill(~mask, value)),
            *_off_by_one(lambda less: x.masked_fill(mask.roll(less, -1), value)),
        ]
    return None, []


def _off_by_one(
    compute: Callable[[int], Tensor],
) -> list[tuple[str, Callable[[], Tensor]]]:
    return [
        ("the mask is off by one: it begins one position too late", lambda: compute(1)),
        ("the mask is off by one: it begins one position too early", lambda: compute(-1)),
    ]


def _attention(operation: Operation) -> _Variants:
    query, key, value = operation.inputs[:3]
    mask = operation.inputs[3] if len(operation.inputs) > 3 else None  # noqa: PLR2004
    causal = operation.argument("is_causal", 5, False) is True
    scale = operation.argument("scale", 6, None)
    factor = scale if isinstance(scale, float) else 1 / math.sqrt(query.shape[-1])

    def attend(*, mask: Tensor | None, diagonal: int | None, by: float = factor) -> Tensor:
        scores = by * (query @ key.mT)
        if diagonal is not None:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(diagonal)
            scores = scores.masked_fill(~seen, -math.inf)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:
            scores = scores + mask
        # A row that sees nothing gives zeros in torch's own kernels.
        return scores.softmax(dim=-1).nan_to_num(0.0) @ value

    diagonal = 0 if causal else None
    found: list[tuple[str, Callable[[], Tensor]]] = []
    if causal:
        found.append(("the causal mask is not applied", lambda: attend(mask=mask, diagonal=None)))
        found += [
            (
                "the causal mask is off by one: each token sees the next",
                lambda: attend(mask=mask, diagonal=1),
            ),
            (
                "the causal mask is off by one: no token sees itself",
                lambda: attend(mask=mask, diagonal=-1),
            ),
        ]
    if mask is not None:
        found.append(("the mask is not applied", lambda: attend(mask=None, diagonal=diagonal)))
        if mask.dtype == torch.bool:
            found.append(
                ("the mask is negated", lambda: attend(mask=~mask, diagonal=diagonal)),
            )
        found += _off_by_one(lambda less: attend(mask=mask.roll(less, -1), diagonal=diagonal))
    if mask is None and not causal:
        found.append(
            (
                "a causal mask is applied unasked",
                lambda: attend(mask=None, diagonal=0),
            )
        )
    return lambda: attend(mask=mask, diagonal=diagonal), found
