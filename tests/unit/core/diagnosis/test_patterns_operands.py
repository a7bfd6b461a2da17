"""What was read instead of an operand: solved for from the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional as F

from paritas.core.diagnosis.calls import LiveCall
from paritas.core.diagnosis.case import Context
from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.judging.failures import call_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

DRAW = torch.Generator().manual_seed(3)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAW, dtype=torch.float64)


def diagnosed(candidate: Tensor, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    reference = function(*args, **kwargs)
    return diagnose(candidate, reference, context=call_context(function, args, kwargs)).best


def stale(x: Tensor, size: int, axis: int = -1) -> Tensor:
    """The second tile is the first one again."""
    order = torch.arange(x.shape[axis])
    order[size : 2 * size] -= size
    return x.index_select(axis, order)


@pytest.mark.parametrize(
    ("rows", "terms", "columns"), [(4, 48, 6), (4, 32, 40), (50, 32, 6)], ids=str
)
def test_a_tile_that_is_not_loaded_again_is_named_whichever_operand_it_is_of(
    rows: int, terms: int, columns: int
) -> None:
    x, w, b = normal(rows, terms), normal(columns, terms), normal(columns)
    for candidate in (F.linear(stale(x, 16), w, b), F.linear(x, stale(w, 16), b)):
        best = diagnosed(candidate, F.linear, x, w, b)
        assert best.kind == "stale", best
    best = diagnosed(F.linear(stale(x, 16), stale(w, 16), b), F.linear, x, w, b)
    assert best.kind in ("stale", "doubled reduction"), best


A, C, SQUARE = normal(7, 12), normal(9, 12), normal(9, 9)
LEFT, RIGHT = normal(2, 5, 7), normal(7, 2, 5).permute(1, 2, 0)
Q, K, V = normal(1, 3, 9, 8), normal(1, 3, 12, 8), normal(1, 3, 12, 8)
IMAGE, KERNEL, BIAS = normal(2, 3, 9, 9), normal(4, 3, 3, 3), normal(4)
ATTEND = F.scaled_dot_product_attention
CASES: dict[str, tuple[str, str, Any]] = {
    "last ragged tile": (
        "stale",
        "is not loaded|not loaded, those",
        lambda: diagnosed(
            torch.cat([C, C[:, 4:8]], 1) @ normal_table(),
            torch.mm,
            torch.cat([C, SQUARE[:, :4]], 1),
            normal_table(),
        ),
    ),
    "strides of a summand": (
        "permutation",
        "read from other places|the memory of other is read",
        lambda: diagnosed(LEFT + RIGHT.permute(2, 0, 1).reshape(2, 5, 7), torch.add, LEFT, RIGHT),
    ),
    "bias along rows": (
        "wrong axis",
        "self is read from other places",
        lambda: diagnosed(
            normal_bias()[:, None] + SQUARE @ SQUARE, torch.addmm, normal_bias(), SQUARE, SQUARE
        ),
    ),
    "operand for the other": (
        "missing operand",
        "self is used in the place of other, too",
        lambda: diagnosed(LEFT * LEFT, torch.mul, LEFT, RIGHT),
    ),
    "input after its activation": (
        "other function",
        "relu of",
        lambda: diagnosed(F.linear(C.relu(), A), F.linear, C, A),
    ),
    "kernel transposed": (
        "transpose",
        "",
        lambda: diagnosed(F.conv2d(IMAGE, KERNEL.mT), F.conv2d, IMAGE, KERNEL),
    ),
    "bias of a convolution four times": (
        "repeated bias",
        "the bias is added 4 times",
        lambda: diagnosed(F.conv2d(IMAGE, KERNEL, 4 * BIAS), F.conv2d, IMAGE, KERNEL, BIAS),
    ),
    "tile of values": (
        "stale",
        "value",
        lambda: diagnosed(ATTEND(Q, K, stale(V, 4, 2)), ATTEND, Q, K, V),
    ),
    "tile of keys": (
        "stale",
        "key",
        lambda: diagnosed(ATTEND(Q, stale(K, 4, 2), V), ATTEND, Q, K, V),
    ),
    "halves of glu": (
        "swapped operands",
        "the halves are exchanged",
        lambda: diagnosed(F.glu(A.roll(6, 1)), F.glu, A),
    ),
    "other part of a packed tensor": (
        "wrong index",
        "other elements of self are read",
        lambda: diagnosed(A.view(7, 4, 3)[..., 1], lambda x: x.chunk(3, 1)[1], A),
    ),
    "rows that are shorter in memory": (
        "wrong index",
        "read with the strides (11, 1) instead of (12, 1)",
        lambda: diagnosed(torch.as_strided(A, (7, 12), (11, 1)), torch.clone, A),
    ),
    "first of each group of lanes": (
        "copy",
        "the first value of each group of 4 along axis 1 is used for the others",
        lambda: diagnosed(torch.tanh(A)[:, torch.arange(12) // 4 * 4], torch.tanh, A),
    ),
}


def normal_table() -> Tensor:
    return torch.linspace(-1, 1, 96, dtype=torch.float64).reshape(16, 6).sin() + torch.eye(16, 6)


def normal_bias() -> Tensor:
    return torch.linspace(-1, 2, 9, dtype=torch.float64).exp()


@pytest.mark.parametrize("name", CASES)
def test_what_was_read_instead_of_an_operand_is_named(name: str) -> None:
    kind, words, diagnose_it = CASES[name]
    best = diagnose_it()
    assert best is not None
    assert best.kind == kind, best
    assert any(one in best.sentence for one in words.split("|")), best.sentence


def backward(function: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    def differentiate(kept: list[Tensor], given: list[Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            inputs = [
                one.detach().requires_grad_() if one.is_floating_point() else one for one in kept
            ]
            wanted = [one for one in inputs if one.requires_grad]
            return list(torch.autograd.grad([function(*inputs)], wanted, given))

    return differentiate


MASK = torch.arange(35).reshape(5, 7) % 3 == 0
IDS = torch.tensor([[1, 4, 4], [0, 1, 8]])
GRADIENTS: dict[str, tuple[str, Any, list[Tensor], int, Any]] = {
    "the factor's own": (
        "missing operand",
        torch.mul,
        [normal(5, 7), normal(5, 7)],
        0,
        lambda kept, given: given * kept[0],
    ),
    "no mask": (
        "mask",
        lambda x, mask: torch.where(mask, x, torch.zeros_like(x)),
        [normal(5, 7), MASK],
        0,
        lambda kept, given: given,
    ),
    "another part": (
        "shift",
        lambda a, b: torch.cat([a, b], 1),
        [normal(3, 4), normal(3, 6)],
        1,
        lambda kept, given: given[:, 3:9].clone(),
    ),
    "other rows": (
        "wrong index",
        F.embedding,
        [IDS, normal(9, 7)],
        0,
        lambda kept, given: torch.zeros_like(kept[1]).index_add(
            0, kept[0].T.reshape(-1), given.reshape(6, 7)
        ),
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_mistake_in_a_gradient_is_named_whatever_else_the_call_computes(name: str) -> None:
    kind, function, kept, which, wrong = GRADIENTS[name]
    given = normal(*function(*kept).shape)
    call = LiveCall(backward(function), (kept, [given]), {})
    right = call.target(*call.args)[which]
    context = Context(operator="backward", call=call)
    best = diagnose(wrong(kept, given), right, context=context).best
    assert best is not None
    assert best.kind == kind, best


def test_an_operand_that_is_something_else_altogether_gets_no_word() -> None:
    x, w = normal(20, 12), normal(16, 12)
    assert diagnosed(F.linear(x + normal(20, 12), w), F.linear, x, w) is None
    assert diagnosed(LEFT + normal(2, 5, 7), torch.add, LEFT, RIGHT) is None
