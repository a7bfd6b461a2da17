"""Ways of running one model: whether one applies, and which part of the whole a call computes."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class DoesNotApply(Exception):  # noqa: N818  (not an error: the row of the relation says why)
    """The model or its inputs lack something that the relation is about."""


class NotPromised(Exception):  # noqa: N818  (as above)
    """The relation could be tried, but the model does not promise that it holds."""


class OtherShape(Exception):  # noqa: N818  (not an error: what it describes is a difference)
    """One call of a way gave a value of another shape than the plain call's."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of the whole result that one call of the model computes.

    Attributes:
        rows: the rows of the whole batch, in the order of the call.
        tokens: the tokens of the whole sequence.
        own: the same tokens in the call's own sequence, which may have padding: a slice, or for
            each row the places of its tokens.
    """

    rows: Any
    tokens: Any
    own: Any


_ALL = slice(None)
_WHOLE = Piece(_ALL, _ALL, _ALL)
_piece: contextvars.ContextVar[Piece] = contextvars.ContextVar("_piece")


@contextlib.contextmanager
def computing(*, rows: Any = _ALL, tokens: Any = _ALL, own: Any = _ALL) -> Iterator[None]:
    """Say which part of the whole the calls in this block compute, to locate a difference."""
    token = _piece.set(Piece(rows, tokens, own))
    try:
        yield
    finally:
        _piece.reset(token)


def computing_nothing() -> contextlib.AbstractContextManager[None]:
    """Say that the calls in this block compute nothing of the whole."""
    return computing(tokens=slice(0, 0), own=slice(0, 0))


def current_piece() -> Piece:
    """The part of the whole that is being computed."""
    return _piece.get(_WHOLE)
