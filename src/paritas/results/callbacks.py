"""What a result asks of the layers above it: who makes HTML of it, and who shrinks what failed.

A result lies far below both and must not import them. `paritas` itself, which is above all layers,
names them, and they import what they need when they are first asked. `import paritas` imports this
module, so it imports nothing itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_upper: dict[str, Callable[..., Any]] = {}


def show_by(maker: Callable[[object], str]) -> None:
    """Let this function make the HTML of every result."""
    _upper["html"] = maker


def html_of(result: object) -> str:
    """A result as a piece of HTML, for `_repr_html_`."""
    made: str = _upper["html"](result)
    return made


def shrink_by(shrink: Callable[..., Any]) -> None:
    """Let this function shrink what a verdict found."""
    _upper["shrink"] = shrink


def shrink(verdict: object, **options: Any) -> Any:
    """What failed, made as small as it gets, for `Verdict.shrink`."""
    return _upper["shrink"](verdict, **options)
