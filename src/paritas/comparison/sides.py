"""What the table says of one side of a pair."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

import msgspec

from paritas.comparison.sharding.recipes import Assembly
from paritas.numerics.comparisons import SideFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from paritas.comparison.operands import Operand
    from paritas.dumps.records import Record
    from paritas.numerics.figures import Extremes
    from paritas.numerics.statistics import Statistics

__all__ = ["are_other_bits", "as_read", "described", "same_digest", "with_extremes"]

_OUR_DIGEST = re.compile(r"[0-9a-f]{32}")


def described(operand: Operand, kind: str) -> SideFacts:
    """What is known without reading a value; `kind` is that of the dump."""
    record = operand.record
    facts = record.tensor
    return SideFacts(
        path=_path(record, kind),
        id=record.id,
        op=record.site.op,
        dtype=facts.dtype if facts is not None else record.dtype or "",
        shape=_shape(operand),
        value=record.value,
        step=record.step,
        ranks=operand.ranks,
        made_of=operand.words,
        **_extremes_of(record.statistics if operand.recipe is None else None),
    )


def as_read(side: SideFacts, tensor: Tensor, extremes: Extremes | None = None) -> SideFacts:
    """The same, with what was found when the values were read."""
    read = {"dtype": _dtype_name(tensor.dtype), "shape": tuple(tensor.shape)}
    if extremes is None:
        return msgspec.structs.replace(side, **read)
    return msgspec.structs.replace(
        side, minimum=extremes.minimum, maximum=extremes.maximum, mean=extremes.mean, **read
    )


def with_extremes(side: SideFacts, statistics: Statistics) -> SideFacts:
    """The same, with what statistics say that were taken of the values."""
    return msgspec.structs.replace(side, **_extremes_of(statistics))


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def same_digest(my: Operand, golden: Operand) -> bool:
    """Whether the two are known to be the same bits without a look at them.

    Checksums of other tools are too short to go by.
    """
    return my.record.digest == golden.record.digest and _digests_tell(my, golden)


def are_other_bits(my: Operand, golden: Operand) -> bool:
    """Whether the two are known not to be the same bits without a look at them."""
    return my.record.digest != golden.record.digest and _digests_tell(my, golden)


def _digests_tell(my: Operand, golden: Operand) -> bool:
    """Whether both have digests of ours, of bytes that mean the same."""
    if my.recipe is not None or golden.recipe is not None:
        return False
    left, right = my.record, golden.record
    if left.tensor is None or right.tensor is None:
        return False
    return (
        _OUR_DIGEST.fullmatch(left.digest) is not None
        and _OUR_DIGEST.fullmatch(right.digest) is not None
        and left.tensor.dtype == right.tensor.dtype
        and left.tensor.shape == right.tensor.shape
        and _stored_shape(left) == _stored_shape(right)
    )


def _shape(operand: Operand) -> tuple[int, ...] | None:
    if isinstance(operand.recipe, Assembly):
        return operand.recipe.result_shape
    facts = operand.record.tensor
    # What a rule makes of a tensor is known when it is read.
    return None if facts is None or operand.recipe is not None else facts.shape


def _stored_shape(record: Record) -> Sequence[int] | None:
    return None if record.payload is None else record.payload.shape


def _path(record: Record, kind: str) -> str:
    if record.payload is None:
        return ""
    # Such a file holds all that an operator takes and gives.
    several = f",{record.site.side}s,{record.site.position}" if kind == "ge" else ""
    return f"{record.payload.file}{several}"


def _extremes_of(statistics: Statistics | None) -> dict[str, float | None]:
    if statistics is None:
        return {}
    return {
        "minimum": statistics.minimum,
        "maximum": statistics.maximum,
        "mean": statistics.mean,
    }
