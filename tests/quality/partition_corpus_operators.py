"""Operators of the partition corpora that torch has not, right ones and wrong ones."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

# Of one argument, with the least value that it takes; and of two.
UNARY = {
    "relu": (torch.relu, None),
    "gelu": (functional.gelu, None),
    "silu": (functional.silu, None),
    "sigmoid": (torch.sigmoid, None),
    "tanh": (torch.tanh, None),
    "exp": (torch.exp, None),
    "sin": (torch.sin, None),
    "neg": (torch.neg, None),
    "square": (torch.square, None),
    "softplus": (functional.softplus, None),
    "elu": (functional.elu, None),
    "sqrt": (torch.sqrt, 0.5),
    "log": (torch.log, 0.5),
    "rsqrt": (torch.rsqrt, 0.5),
    "erf": (torch.erf, None),
    "log_sigmoid": (functional.logsigmoid, None),
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "atan2": torch.atan2,
}


def vocabulary_part(ids, weight, start, stop):
    """Rows of a part of a vocabulary; zeros for what others have."""
    outside = (ids < start) | (ids >= stop)
    rows = functional.embedding((ids - start).masked_fill(outside, 0), weight)
    return rows.masked_fill(outside.unsqueeze(-1), 0.0)


def heads_apart(x, heads):
    """(b, s, heads * d) -> (b, heads, s, d)."""
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def row_norm(x):
    """Each row over its own length."""
    return x / torch.linalg.vector_norm(x, dim=1, keepdim=True)


# --- operators of which a later rank does something else ------------------------------------------


class _Backward(torch.autograd.Function):
    """The identity; its gradient is another function's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, change: Callable) -> torch.Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return ctx.change(gradient), None


@dataclasses.dataclass(frozen=True)
class Later:
    """What ranks other than the first do to a value, or to its gradient."""

    change: Callable[[torch.Tensor], torch.Tensor]
    backward: bool = False

    def __call__(self, x: torch.Tensor, start: int) -> torch.Tensor:
        result = torch.sin(x)
        if start == 0:
            return result
        return _Backward.apply(result, self.change) if self.backward else self.change(result)


def rows_of_another(like, x, start, stop):
    """Its own rows of x; but a later rank takes the first ones."""
    begin = 0 if start else start
    return like * x[begin : begin + stop - start]


def rows_in_reverse(like, x, start, stop):
    """Rows of x counted from the end, as with ranks in the wrong order."""
    whole = len(x)
    return like * x[start:stop] if stop - start == whole else like * x[whole - stop : whole - start]


def counting(x, total):
    """Adds what it sees to a buffer."""
    total.add_(x.detach().sum(dim=0))
    return x * 2


def mean_and_shape(x):
    """Two results, one of them the same whatever x is."""
    return x * 2, torch.zeros_like(x[0])


def masked_mean(x, mask):
    """A mean over what is not masked."""
    return (x * mask).sum() / mask.sum()


def lower_triangle(x):
    """Which rows it keeps depends on where they are."""
    return torch.tril(x)


# --- by name, so that they can be sent to another process -------------------------------------


def scaled(x):
    return x * (1 + 1e-6)


def shifted(x):
    return x + 1e-6


def doubled(x):
    return x * 2


def all_lost(x):
    return x * torch.nan


def one_column_wrong(x):
    return x.index_fill(1, torch.tensor([3]), 0.5)


def one_column_lost(x):
    return x.index_fill(1, torch.tensor([3]), torch.nan)


def rows_flipped(x):
    return x.flip(0)


def running_maximum(x):
    return torch.cummax(x, 1).values


def off_the_mean(x):
    return x - x.mean(dim=1, keepdim=True)


def sorted_rows(x):
    return torch.sort(x, 1).values
