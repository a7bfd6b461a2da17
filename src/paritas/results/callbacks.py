"""What a result asks of the layers above it: who makes HTML of it when a notebook asks.

A result lies far below what turns it into tables, and must not import it. The maker is named from
above, by `paritas` itself, and imports what it needs when it is first asked. `import paritas`
imports this module, so it imports nothing itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_makers: list[Callable[[object], str]] = []


def show_by(maker: Callable[[object], str]) -> None:
    """Let this function make the HTML of every result."""
    _makers[:] = [maker]


def html_of(result: object) -> str:
    """A result as a piece of HTML, for `_repr_html_`."""
    (maker,) = _makers
    return maker(result)
