"""What a check found, as data: findings, verdicts and their wording. Questions have their own rows.

Nothing here imports torch. `paritas.core.numerics` computes the numbers.

Results must not import the upper layers, of which one makes HTML of a verdict and one shrinks a
failing program. `paritas` itself, above all layers, registers callbacks here, which import what
they need on first use. `import paritas` imports this file, so it imports nothing itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_upper: dict[str, Callable[..., Any]] = {}


def show_by(maker: Callable[[object], str]) -> None:
    """Register the function that makes HTML of a verdict."""
    _upper["html"] = maker


def html_of(result: object) -> str:
    """A verdict as a piece of HTML, for `_repr_html_`."""
    html_text: str = _upper["html"](result)
    return html_text


def shrink_by(shrink: Callable[..., Any]) -> None:
    """Register the function that shrinks a failing program."""
    _upper["shrink"] = shrink


def shrink(verdict: object, **options: Any) -> Any:
    """Shrink the failing program, for `Verdict.shrink`."""
    return _upper["shrink"](verdict, **options)
