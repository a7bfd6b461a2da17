"""Faults drawn at random, only for counting how often what is stated is right.

A fault is an operator or a small program, its sizes and numbers, and something done to a result or
to an operand; all of it is drawn. The words that are right were written down before anything was
run, and no fault of this file was looked at by itself to change what paritas states.
"""

# ruff: noqa: B008, E501  (a fault is a line, with what is drawn for it)

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.diagnosing.operators import ATEN, SINGLE, Draw, OperatorFault, say
from benchmarks.diagnosing.parts import Sample
from torch import Tensor, nn

import paritas
from paritas.core.diagnosis.stating import COUNTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class Dice:
    """Random sizes and numbers."""

    generator: torch.Generator

    def size(self, low: int = 5, high: int = 36) -> int:
        """A size of an axis."""
        return int(torch.randint(low, high, (), generator=self.generator))

    def number(self, low: float, high: float) -> float:
        """A number of three digits."""
        share = float(torch.rand((), generator=self.generator))
        return float(f"{low + share * (high - low):.3g}")

    def pick(self, options: Any) -> Any:
        """One of several."""
        return options[int(torch.randint(0, len(options), (), generator=self.generator))]


# --- What is done to a value ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Change:
    """Something done to a value: `make` draws it."""

    name: str
    kinds: tuple[str, ...]
    make: Callable[[Dice], Callable[[Tensor], Tensor]]


def natively(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Not in float64."""
    return lambda x: x if x.dtype == torch.float64 else change(x)


def tail_of(x: Tensor, share: float) -> int:
    """Where the last indices of the last axis begin."""
    return min(x.shape[-1] - 1, max(1, int((1 - share) * x.shape[-1])))


def with_tail(x: Tensor, share: float, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A change of the last indices of the last axis."""
    start = tail_of(x, share)
    return torch.cat([x[..., :start], change(x[..., start:])], -1)


def scrambled(x: Tensor, size: float) -> Tensor:
    """Like noise of a size, and the same for the same values."""
    return size * (3137 * x.float().double()).sin().to(x.dtype)


def exchanged(x: Tensor, first: int) -> Tensor:
    """Two slices of the first axis in each other's place."""
    order = list(range(len(x)))
    order[first % len(x)], order[(first + 2) % len(x)] = (
        order[(first + 2) % len(x)],
        order[first % len(x)],
    )
    return x[order]


def overwritten(x: Tensor, place: int) -> Tensor:
    """A slice of the first axis in the place of another."""
    order = list(range(len(x)))
    order[place % len(x)] = (place + 3) % len(x)
    return x[order]


def with_odd_values(x: Tensor, by: float) -> Tensor:
    """Three values that are off by different amounts."""
    flat = x.flatten().clone()
    for number in range(3):
        flat[(number * 7 + 2) % len(flat)] += by * (number + 1) ** 1.7 * (flat[0].abs() + 0.3)
    return flat.reshape(x.shape)


MOVED = ("shift", "permutation", "wrong index")
CHANGES = (
    Change("scaled", ("scale", "wrong factor"), lambda d: (lambda x, f=d.pick([d.number(0.2, 0.9), d.number(1.1, 4)]): f * x)),
    Change("scaled by little", ("scale", "wrong factor"), lambda d: (lambda x, f=1 + d.number(0.001, 0.02): f * x)),
    Change("moved by a number", ("offset",), lambda d: (lambda x, b=d.pick([1, -1]) * d.number(0.01, 2): x + b)),
    Change("negated", ("sign", "swapped operands", "wrong factor", "scale"), lambda _: (lambda x: -x)),
    Change("a tail of zeros", ("zeros",), lambda d: (lambda x, s=d.number(0.1, 0.4): with_tail(x, s, torch.zeros_like))),
    Change("a tail of one number", ("constant",), lambda d: (lambda x, s=d.number(0.1, 0.4), v=d.number(-3, 3): with_tail(x, s, lambda y: torch.full_like(y, v)))),
    Change("rolled", MOVED, lambda d: (lambda x, by=d.size(1, 4), axis=d.pick([0, -1]): x.roll(by, axis))),
    Change("reversed", MOVED, lambda d: (lambda x, axis=d.pick([0, -1]): x.flip(axis))),
    Change("two slices exchanged", MOVED, lambda d: (lambda x, at=d.size(0, 9): exchanged(x, at))),
    Change("a slice twice", ("copy", "stale", "wrong index"), lambda d: (lambda x, at=d.size(0, 9): overwritten(x, at))),
    Change("cut off", ("clipped",), lambda d: (lambda x, s=d.number(0.3, 0.8): x.clamp(-s * float(x.abs().max()), s * float(x.abs().max())))),
    Change("in bfloat16", ("precision",), lambda _: natively(lambda x: x.bfloat16().to(x.dtype))),
    Change("in float16", ("precision",), lambda _: natively(lambda x: x.half().to(x.dtype))),
    Change("not a number", ("nonfinite",), lambda d: (lambda x, s=d.number(0.5, 0.9): x.masked_fill(x > s * x.max(), torch.nan))),
    # Without a word.
    Change("noise", (), lambda d: (lambda x, s=d.number(0.003, 0.05): x * (1 + scrambled(x, s)))),
    Change("noise of one size", (), lambda d: (lambda x, s=d.number(0.003, 0.05): x + scrambled(x, s))),
    Change("mixed with a neighbour", (), lambda d: (lambda x, s=d.number(0.05, 0.5): (1 - s) * x + s * x.roll(1, -1))),
    Change("mixed with its mean", (), lambda d: (lambda x, s=d.number(0.05, 0.5): (1 - s) * x + s * x.square().mean(-1, keepdim=True))),
    Change("a mixed tail", (), lambda d: (lambda x, s=d.number(0.1, 0.4), f=d.number(0.2, 0.8): with_tail(x, s, lambda y: f * y + 0.3 * y.roll(1, 0).abs()))),
    Change("odd values", (), lambda d: (lambda x, by=d.number(0.3, 2): with_odd_values(x, by))),
)  # fmt: skip
# A function of the value: of a function of one input, another one.
BENT = (
    Change("bent", (), lambda d: (lambda x, a=d.number(0.01, 0.1), b=d.number(1, 4): x + a * (b * x).sin())),
    Change("to a power", (), lambda d: (lambda x, a=d.number(1.05, 1.4): x.sign() * x.abs() ** a)),
)  # fmt: skip


# --- What is done to an operand -------------------------------------------------------------------

TO_OPERANDS = (
    Change("operand rounded", ("precision",), lambda _: natively(lambda x: x.bfloat16().to(x.dtype))),
    Change("operand moved", (*MOVED, "swapped operands", "copy"), lambda d: (lambda x, axis=d.pick([0, -1]): x.roll(1, axis))),
    Change("operand negated", ("sign", "swapped operands", "wrong factor", "other function", "scale"), lambda _: (lambda x: -x)),
    Change("operand with noise", (), lambda d: (lambda x, s=d.number(0.01, 0.1): x * (1 + scrambled(x, s)))),
    Change("operand mixed", (), lambda d: (lambda x, s=d.number(0.05, 0.5): (1 - s) * x + s * x.roll(1, -1))),
    Change("operand bent", (), lambda d: (lambda x, a=d.number(0.01, 0.1): x + a * (3 * x).sin())),
)  # fmt: skip
Call = tuple[Any, tuple[Any, ...]]


def operators(dice: Dice, draw: Draw) -> dict[str, tuple[Call, int]]:
    """Operators on random tensors, and which argument may be changed; -1 if none."""
    a, b, k = dice.size(), dice.size(), dice.size(8, 60)
    x, y = draw(a, b), draw(a, b)
    index = draw.whole(k, a)
    return {
        "mm": ((ATEN.mm.default, (draw(a, k), draw(k, b))), dice.pick([0, 1])),
        "bmm": ((ATEN.bmm.default, (draw(3, a, k), draw(3, k, b))), dice.pick([0, 1])),
        "linear": ((ATEN.linear.default, (draw(a, k), draw(b, k), draw(b))), dice.pick([0, 1, 2])),
        "addmm": ((ATEN.addmm.default, (draw(b), draw(a, k), draw(k, b))), dice.pick([0, 1, 2])),
        "conv2d": ((ATEN.conv2d.default, (draw(2, 5, 9, 8), draw(6, 5, 3, 3), draw(6))), dice.pick([0, 1])),
        "conv1d": ((ATEN.conv1d.default, (draw(2, 5, a + 4), draw(6, 5, 4))), dice.pick([0, 1])),
        "add": ((ATEN.add.Tensor, (x, y)), dice.pick([0, 1])),
        "sub": ((ATEN.sub.Tensor, (x, y)), dice.pick([0, 1])),
        "mul": ((ATEN.mul.Tensor, (x, y)), dice.pick([0, 1])),
        "mul by a row": ((ATEN.mul.Tensor, (x, draw(b))), 1),
        "div": ((ATEN.div.Tensor, (x, y.abs() + 0.5)), 0),
        "maximum": ((ATEN.maximum.default, (x, y)), dice.pick([0, 1])),
        "where": ((ATEN.where.self, (draw.mask(0.5, a, b), x, y)), dice.pick([1, 2])),
        "softmax": ((ATEN._softmax.default, (x, -1, False)), 0),  # noqa: SLF001
        "layer norm": ((ATEN.layer_norm.default, (x, [b], draw(b), draw(b), 1e-5)), dice.pick([2, 3])),
        "rms norm": ((ATEN.rms_norm.default, (x, [b], draw(b), 1e-6)), 2),
        "group norm": ((ATEN.group_norm.default, (draw(3, 8, b), 4)), -1),
        "attention": ((ATEN.scaled_dot_product_attention.default, (draw(2, 2, a, 8), draw(2, 2, a, 8), draw(2, 2, a, 8), None, 0.0, dice.pick([True, False]))), dice.pick([0, 1, 2])),
        "sum": ((ATEN.sum.dim_IntList, (draw(a, b, k), [dice.pick([0, 1, 2])])), -1),
        "mean": ((ATEN.mean.dim, (draw(a, b, k), [dice.pick([0, 1, 2])])), -1),
        "amax": ((ATEN.amax.default, (draw(a, b, k), [1])), -1),
        "cumsum": ((ATEN.cumsum.default, (x, dice.pick([0, 1]))), -1),
        "embedding": ((ATEN.embedding.default, (draw(k, b), index)), -1),
        "index_select": ((ATEN.index_select.default, (draw(k, b), 0, index)), -1),
        "pooling": ((ATEN.avg_pool2d.default, (draw(2, 3, 10, 8), [2])), -1),
        "transpose": ((ATEN.transpose.int, (draw(3, a, b), 1, 2)), -1),
    }  # fmt: skip


UNARY: tuple[tuple[Any, float], ...] = (
    *((one, 1.0) for one in (ATEN.gelu.default, ATEN.silu.default, ATEN.tanh.default, ATEN.sigmoid.default, ATEN.exp.default, ATEN.erf.default, ATEN.softplus.default, ATEN.sin.default)),
    *((one, 3.0) for one in (ATEN.log.default, ATEN.sqrt.default, ATEN.rsqrt.default)),
)  # fmt: skip
CURVES = ("approximation", "other function")


def drawn_fault(seed: int) -> OperatorFault:
    """A fault at an operator."""
    dice = Dice(torch.Generator().manual_seed(seed))
    if seed % 4 == 0:
        return _fault_of_a_function(dice)
    at_operand = seed % 4 == 1

    def make(draw: Draw) -> tuple[Any, tuple[Any, ...], Callable[..., Tensor]]:
        (target, args), place = operators(again(seed), draw)[name]
        if not at_operand:
            return target, args, lambda *given: done(target(*given))
        return (
            target,
            args,
            lambda *given: target(*given[:place], done(given[place]), *given[place + 1 :]),
        )

    known = operators(again(seed), Draw(torch.Generator().manual_seed(seed), torch.float32))
    options = sorted(name for name, (_, place) in known.items() if place >= 0 or not at_operand)
    name = dice.pick(options)
    change = dice.pick(TO_OPERANDS if at_operand else (*CHANGES, *BENT))
    done = change.make(dice)
    return OperatorFault(f"{name}: {change.name}", change.kinds, make, SINGLE)


def again(seed: int) -> Dice:
    """The dice for the sizes, always the same of a seed."""
    return Dice(torch.Generator().manual_seed(seed + 1_000_000))


def _fault_of_a_function(dice: Dice) -> OperatorFault:
    target, least = dice.pick(UNARY)
    change = dice.pick((*CHANGES, *BENT, *BENT, *BENT))
    done = change.make(dice)
    shape = dice.size(), dice.size()

    def make(draw: Draw) -> tuple[Any, tuple[Any, ...], Callable[..., Tensor]]:
        x = draw(*shape) if least == 1 else draw(*shape).abs() + 0.2
        return target, (x,), lambda x: done(target(x))

    kinds = CURVES if change in BENT else change.kinds
    return OperatorFault(f"{target}: {change.name}", kinds, make, SINGLE)


def at_operators(seeds: range) -> Iterator[Sample]:
    """What is stated of drawn faults at operators."""
    for seed in seeds:
        yield from say(drawn_fault(seed), seed)


# --- Programs -------------------------------------------------------------------------------------


class Changed(nn.Module):
    """A layer whose result is changed."""

    def __init__(self, layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.change = layer, change

    def forward(self, x: Tensor) -> Tensor:
        """The changed result."""
        return self.change(self.layer(x))


class Residual(nn.Module):
    """A layer whose input is added to its result."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        return x + self.layer(x)


def drawn_program(dice: Dice) -> tuple[nn.Sequential, tuple[int, int]]:
    """Some layers, and the shape of their input."""
    width = dice.size(8, 40)
    first, layers = width, []
    for _ in range(dice.size(2, 6)):
        other = dice.size(8, 40)
        layer = dice.pick([
            nn.Linear(width, other), nn.Linear(width, width, bias=False), nn.LayerNorm(width),
            nn.GELU(), nn.Tanh(), nn.SiLU(), nn.Softmax(-1), Residual(nn.Linear(width, width)),
            nn.Sequential(nn.Linear(width, width), nn.ReLU()), nn.RMSNorm(width),
        ])  # fmt: skip
        width = other if isinstance(layer, nn.Linear) and layer.out_features == other else width
        layers.append(layer)
    return nn.Sequential(*layers).eval(), (dice.size(), first)


def at_outputs(seeds: range) -> Iterator[Sample]:
    """What is stated at the output of drawn programs, with a fault after one of their layers."""
    config = paritas.VerifyConfig(raise_on_mismatch=False, verify_gradients=False, locate_seconds=0)
    for seed in seeds:
        torch.manual_seed(seed)
        dice = Dice(torch.Generator().manual_seed(seed))
        reference, shape = drawn_program(dice)
        change = dice.pick((*CHANGES, *BENT))
        candidate = copy.deepcopy(reference)
        # As often after the last layer as before.
        place = len(candidate) - 1 if seed % 2 else dice.size(0, len(candidate))
        candidate[place] = Changed(candidate[place], change.make(dice))
        name = f"{change.name} after layer {place} of {len(candidate)}, seed {seed}"
        verdict = paritas.verify([torch.randn(shape)], reference, candidate, config)
        for finding in verdict.failures[:1]:
            best = finding.diagnosis.best if finding.diagnosis else None
            said = (best.kind, str(best.evidence[COUNTED]), best.confidence) if best else ()
            yield Sample(change.name, name, change.kinds, *said)
