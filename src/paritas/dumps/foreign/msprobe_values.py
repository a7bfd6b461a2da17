"""What msprobe's JSON says of a value: a tensor's facts and statistics, or a plain value's text."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from paritas.dumps.foreign.raw_values import contiguous_stride
from paritas.dumps.records import TensorFacts
from paritas.errors import UsageError
from paritas.numerics.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "checksum_of",
    "facts_of",
    "is_tensor",
    "leaves",
    "load_json",
    "statistics_of",
    "text_of",
]

_LARGEST_JSON = 1 << 30
_DEEPEST = 100
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 2**58  # so that their bytes, too, are a number that fits a file
_LONGEST_VALUE = 1000
_LONGEST_DTYPE = 100
_LONGEST_CHECKSUM = 32
# Numbers that JSON has no sign for, as tools write them.
_SPELLED = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_SPELLED |= {"infinity": math.inf, "-infinity": -math.inf}


def load_json(path: Path) -> Any:
    """Read a file of JSON, with the NaN and Infinity that Python's writer leaves in it.

    Raises:
        UsageError: it is too large, or none.
    """
    size = path.stat().st_size
    if size > _LARGEST_JSON:
        raise UsageError(
            f"{path.name} has {size} bytes, and at most {_LARGEST_JSON} are read: dump fewer steps "
            f"or layers"
        )
    with path.open("rb") as file:
        content = file.read(size)
    try:
        return json.loads(content)
    except RecursionError as error:
        raise UsageError(f"{path.name} is nested too deeply") from error
    except ValueError as error:  # bytes that are no text, and numbers of thousands of digits, too
        raise UsageError(
            f"{path.name} is damaged: {error}; msprobe completes it when its debugger is stopped"
        ) from error


def leaves(tree: Any, position: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every value in what msprobe wrote of arguments or results, with its position.

    Raises:
        UsageError: the containers are nested too deeply.
    """
    if depth > _DEEPEST:
        raise UsageError(f"{position[:80]!r} lies more than {_DEEPEST} containers deep")
    below: Iterator[tuple[Any, Any]]
    if isinstance(tree, list):
        below = iter(enumerate(tree))
    elif isinstance(tree, dict) and tree.get("type") == "torch.Size":
        sizes = tree.get("value")
        below = iter(enumerate(sizes if isinstance(sizes, list) else []))
    elif isinstance(tree, dict) and not isinstance(tree.get("type"), str):
        below = iter(tree.items())
    else:
        yield position or "0", tree
        return
    for key, value in below:
        yield from leaves(value, f"{position}.{key}" if position else str(key), depth + 1)


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf is a tensor or an array of numbers."""
    return (
        isinstance(leaf, dict) and "shape" in leaf and _dtype(leaf)[:1] not in ("", "<", ">", "|")
    )


def facts_of(leaf: dict[str, Any]) -> TensorFacts:
    """What a tensor was.

    Raises:
        UsageError: its shape is none.
    """
    shape = leaf["shape"]
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise UsageError(f"its shape is {str(shape)[:80]}")
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise UsageError(f"its shape is {str(shape)[:80]}")
    if math.prod(max(extent, 1) for extent in shape) > _MOST_ELEMENTS:
        raise UsageError(f"its shape is {str(shape)[:80]}, larger than any memory")
    extents = tuple(shape)
    return TensorFacts(
        dtype=_dtype(leaf),
        shape=extents,
        stride=contiguous_stride(extents),
        requires_grad=leaf.get("requires_grad") is True,
    )


def _dtype(leaf: dict[str, Any]) -> str:
    """Torch's name: numpy's are the same, and MindSpore's begin with a capital letter."""
    name = leaf.get("dtype")
    if not isinstance(name, str) or len(name) > _LONGEST_DTYPE:
        return ""
    return name.rpartition(".")[2].lower()


def statistics_of(leaf: dict[str, Any], shape: tuple[int, ...]) -> Statistics | None:
    """What msprobe computed of a tensor; None where it did not.

    It knows the extremes, the mean and the norm of all values, so of finite ones only where all
    are. Of how many are not finite it shows that there are some: a count of 1 stands for that.
    """
    count = math.prod(shape)
    if not count:
        return Statistics(count=0)
    high, low = _figure(leaf, "Max"), _figure(leaf, "Min")
    if high is None or low is None:
        return None
    if math.isnan(high) or math.isnan(low):
        return Statistics(count=count, nans=1)
    if not low <= high:
        raise UsageError(f"its least value is {low}, and its greatest {high}")
    if math.isinf(high) or math.isinf(low):
        alike = count if high == low else 1
        return Statistics(
            count=count,
            minimum=low if math.isfinite(low) else None,
            maximum=high if math.isfinite(high) else None,
            positive_infinities=alike if high == math.inf else 0,
            negative_infinities=alike if low == -math.inf else 0,
        )
    norm = _finite(leaf, "Norm")
    return Statistics(
        count=count,
        minimum=low,
        maximum=high,
        mean=_finite(leaf, "Mean"),
        # The norm of a tensor without dimensions is written as its value, whatever its sign.
        l2=None if norm is None else abs(norm),
        zeros=count if low == high == 0 else 0,
    )


def _figure(leaf: dict[str, Any], name: str) -> float | None:
    value = leaf.get(name)
    if isinstance(value, str):
        return _SPELLED.get(value.strip().lower())
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            return None
    return None


def _finite(leaf: dict[str, Any], name: str) -> float | None:
    """Of finite values: one that overflowed while it was computed is not known."""
    figure = _figure(leaf, name)
    return figure if figure is not None and math.isfinite(figure) else None


def checksum_of(leaf: dict[str, Any]) -> str:
    """What msprobe has instead of statistics if asked so, with the name of what it is."""
    text = leaf.get("md5")
    if not isinstance(text, str) or not 0 < len(text) <= _LONGEST_CHECKSUM or not text.isalnum():
        return ""
    # Called md5 in the file; it is a CRC of 32 bits, or words of 64 bits added without carry.
    return f"xor:{text[2:]}" if text.startswith("0x") else f"crc32:{text}"


def text_of(leaf: Any) -> str:
    """A plain value as paritas writes it: as Python does, as far as that can be told."""
    text = _written(leaf)
    if len(text) > _LONGEST_VALUE:
        text = text[: _LONGEST_VALUE - 3] + "..."
    return text.encode(errors="replace").decode()


def _written(leaf: Any) -> str:
    if not isinstance(leaf, dict):
        return repr(leaf)
    match leaf:
        case {"shape": shape}:
            text = f"{leaf.get('type')} of {leaf.get('dtype')}, shape {shape}"
        case {"type": "slice", "value": [_, _, _] as bounds}:
            text = f"slice({', '.join(map(repr, bounds))})"
        case {"type": "ellipsis"}:
            text = "Ellipsis"
        case {"type": "torch.dtype", "value": str(name)}:
            text = name
        case {"type": "torch.device", "value": str(name)}:
            device, _, index = name.partition(":")
            text = f"device(type={device!r}" + (f", index={index})" if index.isdigit() else ")")
        case {"type": "torch.memory_format", "format": str(name)}:
            text = f"torch.{name}"
        case {"value": value}:
            text = repr(value)
        case _:
            text = repr(leaf)
    return text
