"""A block of three modules: `gate` and `up` read what `norm` gives, and `mlp` is around them."""

from __future__ import annotations

import torch
from torch import nn

from paritas.core.placement.rank_pieces import RankPiece
from paritas.sharding.plans.locating import LOSS_MODULE, WatchedStep, locate_backward, own_share
from paritas.sharding.plans.plan import make_program
from paritas.sharding.plans.traces import INPUT_SIDE, OUTPUT_SIDE, ModuleCall, StepTrace, ValuePlace

NORM, GATE, UP, MLP, MODEL = range(5)
NAMES = ["norm", "mlp.gate", "mlp.up", "mlp", ""]
ORDER = [
    ValuePlace(MODEL, OUTPUT_SIDE, ""),
    ValuePlace(MLP, OUTPUT_SIDE, ""),
    ValuePlace(UP, OUTPUT_SIDE, ""),
    ValuePlace(UP, INPUT_SIDE, ""),
    ValuePlace(GATE, OUTPUT_SIDE, ""),
    ValuePlace(GATE, INPUT_SIDE, ""),
    ValuePlace(MLP, INPUT_SIDE, ""),
    ValuePlace(NORM, OUTPUT_SIDE, ""),
    ValuePlace(NORM, INPUT_SIDE, ""),
]
SOURCES = {
    ORDER[1]: (ORDER[0],),
    ORDER[2]: (ORDER[1],),
    ORDER[3]: (ORDER[2],),
    ORDER[4]: (ORDER[1],),
    ORDER[5]: (ORDER[4],),
    ORDER[6]: (ORDER[3], ORDER[5]),
    ORDER[7]: (ORDER[6],),
    ORDER[8]: (ORDER[7],),
}
RIGHT = {
    place: torch.randn(4, 6, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    for n, place in enumerate(ORDER)
}
TERM = torch.randn(4, 6, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def step(values):
    calls = [ModuleCall(name, "Kind", {}) for name in NAMES]
    for place, value in values.items():
        calls[place.call].back(place.side)[""] = RankPiece(value)
    return StepTrace(modules=calls, backward=ORDER, sources=SOURCES)


def seen(first, second=None, split=None):
    """What two ranks have in place of what is right; the second has what the first has."""
    program = make_program(nn.Linear(2, 2), lambda m, mesh: m, [torch.ones(4, 2)], split=split)
    ranks = {
        0: step({**RIGHT, **first}),
        1: step({**RIGHT, **(first if second is None else second)}),
    }
    samples = {0: (0, 2), 1: (2, 4)} if split else {0: None, 1: None}
    return WatchedStep(program, step(RIGHT), ranks, samples, 2.0**-53)


def terms_at(*places):
    return (
        dict.fromkeys(places, TERM),
        {place: RIGHT[place] - TERM for place in places},
    )


def test_right_gradients_have_no_location():
    assert locate_backward(seen({})) is None


def test_of_two_readers_the_one_that_sends_back_terms_is_named():
    for number, name in ((3, "mlp.up"), (5, "mlp.gate")):
        first, second = terms_at(ORDER[number])
        after = ORDER[6:]
        ranks = [
            {**rank, **{p: RIGHT[p] + n for p in after}} for n, rank in ((1, first), (2, second))
        ]
        found = locate_backward(seen(*ranks))
        assert found.module == name
        assert found.words == (
            f"the gradient at the input of {name} is one rank's term of a sum that is never reduced"
        )


def test_of_two_readers_the_one_that_is_wrong_is_named():
    wrong = {place: 2 * RIGHT[place] for place in ORDER[5:]}
    assert locate_backward(seen(wrong)).module == "mlp.gate"


def test_terms_that_the_module_around_adds_up_are_no_fault():
    assert locate_backward(seen(*terms_at(ORDER[3], ORDER[5]))) is None


def test_terms_that_the_module_around_adds_up_twice_are_its_fault():
    first, second = terms_at(ORDER[3], ORDER[5])
    after = {place: 2 * RIGHT[place] for place in ORDER[6:]}
    assert locate_backward(seen({**first, **after}, {**second, **after})).module == "mlp"


def test_a_gradient_that_goes_wrong_between_modules_is_the_fault_of_the_one_around():
    wrong = {place: RIGHT[place] + 1 for place in ORDER[2:4]}
    assert locate_backward(seen(wrong)).module == "mlp"


def test_a_gradient_that_is_wrong_before_any_module_is_the_loss_s():
    wrong = {place: 3 * RIGHT[place] for place in ORDER}
    assert locate_backward(seen(wrong)).module == LOSS_MODULE


def test_the_share_of_split_samples_is_read_off_the_first_gradient():
    def halves(factor):
        table = {p: factor * v for p, v in RIGHT.items()}
        return {p: v[:2] for p, v in table.items()}, {p: v[2:] for p, v in table.items()}

    assert own_share(seen(*halves(2.0), split="ranks")) == 2
    assert own_share(seen(*halves(1.0), split="ranks")) == 1
    assert own_share(seen(*halves(3.0), split="ranks")) is None
