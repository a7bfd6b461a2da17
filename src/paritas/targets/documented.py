"""The shapes that a model's documentation gives for the arguments of its forward method.

The docstring of transformers' models describes each argument in a line such as

    prompt_masks (`torch.FloatTensor` of shape `(batch_size, num_channels, height, width)`):
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\((.*)|:.*)$")
_SHAPE = re.compile(r"(?:of )?shape:?\s*`{0,2}[(\[]([^()\[\]]*)[)\]]")
_KIND = re.compile(r"\b(Float|Long|Int|Bool|Double)Tensor\b")
_LINES = 3  # the lines of a description that may hold the shape


class Documented(NamedTuple):
    """What the documentation says about a tensor.

    Attributes:
        kind: `float`, `long` or `bool`; empty if it is not said.
        sizes: the names of its sizes, such as `batch_size`, or numbers.
    """

    kind: str
    sizes: tuple[str, ...]


def read_shapes(forward: Callable[..., Any], names: set[str]) -> dict[str, Documented]:
    """Read the shapes of arguments with these names from the documentation of a function."""
    lines = (getattr(forward, "__doc__", None) or "").split("\n")
    found: dict[str, Documented] = {}
    for number, line in enumerate(lines):
        start = _ARGUMENT.match(line)
        if start is None or start[1] not in names or start[1] in found:
            continue
        text = line
        for more in lines[number + 1 : number + _LINES]:
            nested = _ARGUMENT.match(more)
            if nested is not None and nested[1] in names:
                break
            text += " " + more.strip()
        shape = _SHAPE.search(text)
        if shape is None:
            continue
        kind = _KIND.search(text[: shape.start()])
        sizes = tuple(one.strip(" `") for one in shape[1].split(",") if one.strip(" `."))
        found[start[1]] = Documented(_kind_named(kind[1] if kind else ""), sizes)
    return found


def _kind_named(name: str) -> str:
    return {"Float": "float", "Double": "float", "Bool": "bool", "": ""}.get(name, "long")
