"""How each kind of wrong values is made; `diagnosis_values` says where they are planted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.case import Case, Context
from quality.diagnosis_values import Make, Planted, Setting
from quality.diagnosis_values_limits import (
    CLIPPED,
    GARBAGE,
    NOT_NUMBERS,
    OUTPUTS,
    OVERFLOWS,
    PRODUCTS,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FAULTS", "exact_faults"]


def _scaled(name: str, factor: float, context: Context | None = None) -> Make:
    def make(at: Setting) -> tuple[str, Case]:
        return f"scale {name}", at.case(at.right * factor, context)

    return make


def _scaled_by_size(at: Setting) -> tuple[str, Case]:
    return "scale sqrt(d)", at.case(at.right * math.sqrt(at.right.shape[-1]))


SCALES = (
    _scaled("world size", 4.0, Context(world={"dp": 4})),
    _scaled("1 / mesh axis", 0.125, Context(world={"dp": 2, "tp": 8})),
    _scaled("1 / (1 - p)", 1 / 0.7, Context(arguments={"p": 0.3})),
    _scaled("one half", 0.5),
    _scaled("log2 e", math.log2(math.e)),
    _scaled("free", 1.37),
    _scaled("-2.5", -2.5),
    _scaled_by_size,
)


def _axis_scaled(axis: int, spread: float) -> Make:
    def make(at: Setting) -> tuple[str, Case]:
        dim = axis % at.right.dim()
        view = [-1 if other == dim else 1 for other in range(at.right.dim())]
        factors = 1 + spread * at.normal(at.right.shape[dim]).abs().clamp(min=0.3)
        return f"axis scale {axis}", at.case(at.right * factors.view(view))

    return make


AXIS_SCALES = tuple(
    _axis_scaled(*one) for one in ((0, 1.0), (-1, 1.0), (0, 4.0), (-1, 4.0), (1, 2.0))
)


def _offset(amount: float) -> Make:
    def make(at: Setting) -> tuple[str, Case]:
        size = float(at.right.square().mean().sqrt())
        return f"offset {amount}", at.case(at.right + amount * size)

    return make


OFFSETS = tuple(map(_offset, (1.0, -0.5, 3.0, 0.75, -8.0)))


def _bias(times: float, place: str, axis: int) -> Make:
    def make(at: Setting) -> tuple[str, Case]:
        dim = axis % at.right.dim()
        size = float(at.right.square().mean().sqrt())
        bias = (size * at.normal(at.right.shape[dim])).to(at.dtype).double()
        view = [-1 if other == dim else 1 for other in range(at.right.dim())]
        context = Context(named={"bias": bias.to(at.dtype)}, world={"tp": 4})
        if place == "inputs":
            context = Context(inputs=(bias.to(at.dtype),), world={"tp": 4})
        elif place == "unknown":
            context = Context()
        return f"bias {times} {place} {axis}", at.case(at.right + times * bias.view(view), context)

    return make


BIASES = (
    _bias(-1, "named", -1),
    _bias(1, "named", -1),
    _bias(3, "named", -1),
    _bias(-1, "inputs", 1),
    _bias(-0.75, "inputs", -1),
)
UNKNOWN_BIASES = tuple(
    _bias(times, "unknown", axis) for times, axis in ((-1, -1), (1, 0), (2, -1), (3, 0), (-2, 1))
)


def _residual(times: float, place: str) -> Make:
    def make(at: Setting) -> tuple[str, Case]:
        size = float(at.right.square().mean().sqrt())
        other = (size * at.normal(*at.right.shape)).to(at.dtype)
        known = {"residual": other} if place == "named" else {}
        context = Context(named=known, inputs=(other,) if place == "inputs" else ())
        return f"residual {times} {place}", at.case(at.right + times * other.double(), context)

    return make


RESIDUALS = (
    _residual(-1, "named"),
    _residual(1, "named"),
    _residual(-1, "inputs"),
    _residual(1, "inputs"),
    _residual(-2, "inputs"),
)


def _changed(name: str, scale: float = 1.0, shift: float = 0.0) -> Make:
    """The sign flipped, of values of several kinds."""

    def make(at: Setting) -> tuple[str, Case]:
        at.right.mul_(scale).add_(shift)
        return f"sign {name}", at.case(-at.right)

    return make


def _absolute(at: Setting) -> tuple[str, Case]:
    return "sign lost", at.case(at.right.abs())


SIGNS = (
    _changed("plain"),
    _changed("large", 100.0),
    _changed("tiny", 1e-3),
    _changed("shifted", shift=3.0),
    _absolute,
)


def _zeros(name: str, shift: float, share: float) -> Make:
    def make(at: Setting) -> tuple[str, Case]:
        at.right.add_(shift)
        kept = torch.rand(at.right.shape, generator=at.generator) >= share
        kept.view(-1)[:2] = False
        return f"zeros {name}", at.case(at.right * kept)

    return make


ZEROS = (
    _zeros("all", 0.0, 1.0),
    _zeros("all positive", 5.0, 1.0),
    _zeros("half", 0.0, 0.5),
    _zeros("few", 0.0, 0.1),
    _zeros("most, negative", -5.0, 0.9),
)


def _stale(name: str, wobble: float, count: int) -> Make:
    def make(at: Setting) -> tuple[str, Case]:
        before = {
            f"step {step}": (wobble * at.right + at.normal(*at.right.shape) * 2).to(at.dtype)
            for step in range(1, count + 1)
        }
        before["initial"] = (5 * at.normal(*at.right.shape)).to(at.dtype)
        chosen = "initial" if name == "initial" else f"step {count}"
        return f"stale {name}", at.case(before[chosen].double(), Context(earlier=before))

    return make


STALE = tuple(
    _stale(*one)
    for one in (
        ("initial", 0.0, 1),
        ("last", 0.0, 1),
        ("last", 1.0, 1),
        ("last", 0.5, 3),
        ("initial", 1.0, 4),
    )
)


def _constant(amount: float) -> Make:
    def make(at: Setting) -> tuple[str, Case]:
        wrong = torch.full_like(at.right, amount)
        case = at.case(wrong)
        # A constant has no rounding of its own.
        where = ... if at.region is None else at.region
        case.candidate[where] = amount
        return f"constant {amount}", case

    return make


CONSTANTS = tuple(map(_constant, (1.0, -3.0, 0.5, 100.0, 0.125)))


FAULTS: tuple[tuple[str, bool, tuple[Make, ...]], ...] = (
    ("scale", True, SCALES),
    ("axis scale", False, AXIS_SCALES),
    ("offset", True, OFFSETS),
    ("axis offset", True, BIASES),
    ("axis offset", False, UNKNOWN_BIASES),
    ("residual", True, RESIDUALS),
    ("sign", True, SIGNS),
    ("zeros", True, ZEROS),
    ("stale", True, STALE),
    ("constant", True, CONSTANTS),
    ("uninitialised", True, GARBAGE),
    ("clipped", False, CLIPPED),
    ("overflow", False, OVERFLOWS),
    ("nonfinite", True, NOT_NUMBERS),
    ("precision", True, OUTPUTS),
    ("precision", False, PRODUCTS),
)


def exact_faults(seed: int) -> Iterator[Planted]:
    """Whole numbers: wrapped, saturated, scaled, moved, negated, zero."""
    generator = torch.Generator().manual_seed(seed)
    for shape in ((40,), (8, 16), (4, 6, 20)):
        for width, signed in ((8, True), (8, False), (16, True), (16, False), (32, True)):
            high = 1 << (width + 2)
            right = torch.randint(-high, high, shape, generator=generator)
            low, top = (
                (-(1 << (width - 1)), (1 << (width - 1)) - 1) if signed else (0, (1 << width) - 1)
            )
            modulus = 1 << width
            wrapped = (right - low).remainder(modulus) + low
            name = f"{width} {signed} {shape}"
            yield Planted("wrapped", f"wrapped {name}", Case(wrapped, right))
            yield Planted("clipped", f"saturated {name}", Case(right.clamp(low, top), right))
            yield Planted("scale", f"whole scale {name}", Case(right * width, right))
            yield Planted("offset", f"whole offset {name}", Case(right + width, right))
            yield Planted("sign", f"whole sign {name}", Case(-right, right))
            yield Planted("zeros", f"whole zeros {name}", Case(right * 0, right))
