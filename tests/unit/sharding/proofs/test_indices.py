"""Integer expressions: what is simplified has the same value."""

from __future__ import annotations

import functools
import math
import random

import pytest

from paritas.core.operators import indices
from paritas.core.operators.indices import ONE, add, constant, multiply, subtract, symbol

SIZES = ("a", "b", "c")
INDICES = {"%i": symbol("a"), "%j": multiply(symbol("b"), constant(2)), "%k": symbol("c")}


def value(poly, env):
    total = 0
    for monomial, size in poly:
        total += size * math.prod(atom(one, env) for one in monomial)
    return total


def atom(one, env):
    if isinstance(one, str):
        return env[one]
    left, right = value(one[1], env), value(one[2], env)
    return left // right if one[0] == "//" else left % right


def divided(before, by, kind, env):
    left, right = before(env), value(by, env)
    return left // right if kind == "//" else left % right


def added(before, step, env):
    return before(env) + value(step, env)


def drawn(draw):
    """An expression with divisions, and what it should be, as a function of the symbols."""
    start = draw.randrange(-2, 4)
    poly, meaning = constant(start), lambda _: start
    for _ in range(draw.randrange(1, 5)):
        name = draw.choice([*SIZES, *INDICES])
        scale = draw.randrange(1, 4)
        before = meaning
        if draw.random() < 0.4:
            by = multiply(*(symbol(draw.choice(SIZES)) for _ in range(draw.randrange(1, 3))))
            kind = draw.choice(("//", "%"))
            divide = indices.floor_divide if kind == "//" else indices.remainder
            poly = divide(poly, by, INDICES)
            meaning = functools.partial(divided, before, by, kind)
        else:
            step = multiply(constant(scale), symbol(name), symbol(draw.choice(SIZES)))
            poly = add(poly, step)
            meaning = functools.partial(added, before, step)
    return poly, meaning


@pytest.mark.parametrize("seed", range(20))
def test_simplified_divisions_have_the_same_value(seed):
    draw = random.Random(seed)
    for _ in range(30):
        poly, meaning = drawn(draw)
        for _ in range(5):
            env = {name: draw.randrange(1, 6) for name in SIZES}
            env |= {name: draw.randrange(value(size, env)) for name, size in INDICES.items()}
            assert value(poly, env) == meaning(env)


def test_an_index_within_its_size_is_split_off():
    place = add(multiply(symbol("%i"), symbol("c")), symbol("%k"))

    assert indices.floor_divide(place, symbol("c"), INDICES) == symbol("%i")
    assert indices.remainder(place, symbol("c"), INDICES) == symbol("%k")


def test_an_index_that_may_be_larger_is_kept():
    place = add(symbol("%j"), constant(1))

    assert indices.remainder(place, symbol("b"), INDICES) != place
    assert not indices.is_within(symbol("%j"), symbol("b"), INDICES)
    assert not indices.is_within(subtract(symbol("%i"), ONE), symbol("a"), INDICES)
