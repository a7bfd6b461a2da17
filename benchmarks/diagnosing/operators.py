"""Faults in one operator, with all that is known at a located place: its inputs and arguments.

Reference and candidate run in the native dtype and in float64, as at a node that `verify` or `guard`
has located; every other fault is seen without the candidate's float64 run, as in `guard`.
"""

# ruff: noqa: ARG005, E501, SLF001  (a fault is a line, and takes what the operator takes)

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.diagnosing.parts import Sample
from torch import Tensor

from paritas.core.diagnosis.stating import COUNTED
from paritas.core.judging.failures import Explainer, call_context
from paritas.core.judging.pairs import Pair, judge_pair
from paritas.core.numerics.checkers import NoEvidence
from paritas.core.numerics.criterion import unit_roundoff
from paritas.core.results.items import nth_output

ATEN = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16)
Make = Callable[["Draw"], tuple[Any, tuple[Any, ...], Callable[..., Tensor]]]


@dataclasses.dataclass(frozen=True)
class OperatorFault:
    """A fault: `make` gives the operator, its arguments and the wrong function of these."""

    family: str
    kinds: tuple[str, ...]
    make: Make
    dtypes: tuple[torch.dtype, ...] = DTYPES


@dataclasses.dataclass(frozen=True)
class Draw:
    """Random arguments in a dtype."""

    generator: torch.Generator
    dtype: torch.dtype

    def __call__(self, *shape: int) -> Tensor:
        """Normally distributed numbers."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def whole(self, high: int, *shape: int) -> Tensor:
        """Whole numbers below a limit."""
        return torch.randint(0, high, shape, generator=self.generator)

    def mask(self, share: float, *shape: int) -> Tensor:
        """True for about this share."""
        return torch.rand(shape, generator=self.generator) < share


class OperatorEvidence(NoEvidence):
    """What the judge asks for, of one operator: its noise is that of perturbed inputs."""

    def __init__(self, target: Any, args: tuple[Any, ...], lifted: Tensor | None) -> None:
        self._target, self._args, self._lifted = target, args, lifted
        first = target(*args)
        self.unit = unit_roundoff(first.dtype) if first.is_floating_point() else None
        self._floats = first.is_floating_point()

    def arbiter(self) -> Tensor | None:
        """The operator in float64."""
        return self._target(*map(widened, self._args)) if self._floats else None

    def lift_candidate(self) -> Tensor | None:
        """The wrong function in float64, if it is known."""
        return self._lifted

    def spread(self, unit: float, runs: int) -> Tensor | None:
        """How far rounded inputs move each element."""
        right = self.arbiter()
        if right is None:
            return None
        generator = torch.Generator().manual_seed(7)
        total = torch.zeros_like(right)
        for _ in range(4):
            moved = [perturbed(widened(one), unit, generator) for one in self._args]
            total += (self._target(*moved) - right).nan_to_num(0.0).square()
        return (total / 4).sqrt() + unit * right.abs() / 2


def widened(value: Any) -> Any:
    """Floats in float64."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return [widened(one) for one in value] if isinstance(value, list) else value


def perturbed(value: Any, unit: float, generator: torch.Generator) -> Any:
    """Floats off by about a rounding."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value * (1 + unit * torch.randn(value.shape, generator=generator).double())
    if isinstance(value, list):
        return [perturbed(one, unit, generator) for one in value]
    return value


def say(fault: OperatorFault, seed: int) -> Iterator[Sample]:
    """What is said of a fault in each dtype; nothing of a fault that is within the noise."""
    for number, dtype in enumerate(fault.dtypes):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        target, args, wrong = fault.make(Draw(generator, dtype))
        reference = target(*args)
        candidate = wrong(*args).to(reference.dtype)
        lifts = (seed + number) % 2 == 0 and reference.is_floating_point()
        lifted = wrong(*map(widened, args)) if lifts else None
        evidence = OperatorEvidence(target, args, lifted)
        context = functools.partial(call_context, target, args, {})
        pair = Pair(nth_output(0), reference, candidate, evidence, context)
        findings, _ = judge_pair(pair, explainer=Explainer())
        if all(finding.status.passes() for finding in findings):
            continue
        (finding,) = findings
        best = finding.diagnosis.best if finding.diagnosis else None
        name = f"{fault.family}, {dtype}, seed {seed}{', lifted' * lifts}"
        if best is None:
            yield Sample(fault.family, name, fault.kinds)
        else:
            grade = str(best.evidence[COUNTED])
            yield Sample(fault.family, name, fault.kinds, best.kind, grade, best.confidence)


# --- Helpers of the faults ------------------------------------------------------------------------


def natively(low: torch.dtype, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Computed in a narrower dtype, unless the program runs in float64."""

    def run(*args: Any) -> Tensor:
        if any(isinstance(one, Tensor) and one.dtype == torch.float64 for one in args):
            return compute(*args)
        low_args = [
            one.to(low) if isinstance(one, Tensor) and one.is_floating_point() else one
            for one in args
        ]
        return compute(*low_args).to(args[0].dtype)

    return run


def cut_off(x: Tensor) -> Tensor:
    """Truncated to tf32, as tensor cores take their operands; float64 as it is."""
    return x if x.dtype != torch.float32 else (x.view(torch.int32) & -8192).view(torch.float32)


def summed_in(low: torch.dtype, x: Tensor, dim: int) -> Tensor:
    """A sum whose accumulator is narrow; float64 as it is."""
    if x.dtype == torch.float64:
        return x.sum(dim)
    total = torch.zeros_like(x.select(dim, 0), dtype=low)
    for part in x.unbind(dim):
        total = total + part.to(low)
    return total.to(x.dtype)


def normalised(
    x: Tensor, eps: float, *, mean: bool, less: int = 0, outside: bool = False
) -> Tensor:
    """A layer norm or RMS norm without weights."""
    x = x - x.mean(-1, keepdim=True) if mean else x
    square = x.square().sum(-1, keepdim=True) / (x.shape[-1] - less)
    return x / (square.sqrt() + eps) if outside else x / (square + eps).sqrt()


def attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """Attention by its formula."""
    scores = q @ k.mT * scale
    scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


SINGLE = (torch.float32,)
HALF = torch.bfloat16


# --- The faults -----------------------------------------------------------------------------------


def norm_args(draw: Draw, scale: float = 1.0) -> tuple[Any, ...]:
    """Arguments of a layer norm."""
    return scale * draw(24, 32), [32], draw(32), draw(32), 1e-5


def attention_args(draw: Draw) -> tuple[Any, ...]:
    """Arguments of causal attention."""
    return draw(2, 2, 12, 16), draw(2, 2, 12, 16), draw(2, 2, 12, 16), None, 0.0, True


SDPA = ATEN.scaled_dot_product_attention.default
CAUSAL = torch.ones(12, 12, dtype=torch.bool).tril()
REDUCED = ("off by one reduction", "partial sum")
BIAS = ("missing bias", "repeated bias", "axis offset", "offset", "residual")

OPERATOR_FAULTS = (
    # Rounding: in float64 it vanishes, or it is repeated from the recorded inputs.
    OperatorFault("mm in bfloat16", ("precision",), lambda d: (ATEN.mm.default, (d(24, 64), d(64, 20)), natively(HALF, torch.mm)), SINGLE),
    OperatorFault("bmm in float16", ("precision",), lambda d: (ATEN.bmm.default, (d(3, 12, 40), d(3, 40, 9)), natively(torch.float16, torch.bmm)), SINGLE),
    OperatorFault("linear in bfloat16", ("precision",), lambda d: (ATEN.linear.default, (d(30, 48), d(40, 48), d(40)), natively(HALF, F.linear)), SINGLE),
    OperatorFault("mm of a truncated operand", ("precision",), lambda d: (ATEN.mm.default, (d(24, 64), d(64, 20)), lambda a, b: cut_off(a) @ b), SINGLE),
    OperatorFault("linear of truncated operands", ("precision",), lambda d: (ATEN.linear.default, (d(24, 64), d(20, 64)), lambda a, b: F.linear(cut_off(a), cut_off(b))), SINGLE),
    OperatorFault("result in float16", ("precision",), lambda d: (ATEN.tanh.default, (d(24, 64),), lambda x: x.tanh().half().to(x.dtype)), SINGLE),
    OperatorFault("result in bfloat16", ("precision",), lambda d: (ATEN.add.Tensor, (d(24, 64), d(24, 64)), lambda x, y: (x + y).bfloat16().to(x.dtype)), SINGLE),
    OperatorFault("softmax in bfloat16", ("precision",), lambda d: (ATEN._softmax.default, (d(24, 64), -1, False), natively(HALF, lambda x, *_: x.softmax(-1))), SINGLE),
    OperatorFault("layer norm in bfloat16", ("precision",), lambda d: (ATEN.layer_norm.default, norm_args(d), natively(HALF, F.layer_norm)), SINGLE),
    OperatorFault("gelu in bfloat16", ("precision",), lambda d: (ATEN.gelu.default, (d(40, 50),), natively(HALF, F.gelu)), SINGLE),
    OperatorFault("sum in bfloat16", ("precision",), lambda d: (ATEN.sum.dim_IntList, (d(80, 64), [1]), lambda x, _: summed_in(HALF, x, 1)), SINGLE),
    OperatorFault("mean in float16", ("precision",), lambda d: (ATEN.mean.dim, (d(64, 90), [0]), lambda x, _: summed_in(torch.float16, x, 0) / 64), SINGLE),
    OperatorFault("convolution in bfloat16", ("precision",), lambda d: (ATEN.conv2d.default, (d(2, 8, 9, 9), d(6, 8, 3, 3)), natively(HALF, F.conv2d)), SINGLE),
    OperatorFault("attention in bfloat16", ("precision",), lambda d: (SDPA, attention_args(d), natively(HALF, lambda q, k, v, *_: F.scaled_dot_product_attention(q, k, v, is_causal=True))), SINGLE),
    # No rounding, though it may look like it; most have no name.
    OperatorFault("gelu by tanh", (), lambda d: (ATEN.gelu.default, (d(40, 50),), lambda x: F.gelu(x, approximate="tanh"))),
    OperatorFault("gelu by sigmoid", (), lambda d: (ATEN.gelu.default, (d(40, 50),), lambda x: x * (1.702 * x).sigmoid())),
    OperatorFault("exp by a polynomial", (), lambda d: (ATEN.exp.default, (0.5 * d(40, 50),), lambda x: 1 + x + x**2 / 2 + x**3 / 6 + x**4 / 24 + x**5 / 120)),
    OperatorFault("erf by a fraction", (), lambda d: (ATEN.erf.default, (d(40, 50),), lambda x: x.sign() * (1 - 1 / (1 + 0.278393 * x.abs() + 0.230389 * x**2 + 0.000972 * x.abs() ** 3 + 0.078108 * x**4) ** 4))),
    OperatorFault("rsqrt by one step", ("scale",), lambda d: (ATEN.rsqrt.default, (d(30, 40).abs() + 0.5,), lambda x: (y := 0.99 * x.rsqrt()) * (1.5 - 0.5 * x * y * y))),
    OperatorFault("tanh by a fraction", (), lambda d: (ATEN.tanh.default, (d(30, 40),), lambda x: x * (27 + x * x) / (27 + 9 * x * x))),
    OperatorFault("softmax with eps", (), lambda d: (ATEN._softmax.default, (d(24, 64), -1, False), lambda x, *_: x.exp() / (x.exp().sum(-1, keepdim=True) + 1e-2 * x.exp().amin(-1, keepdim=True)))),
    OperatorFault("noise on the weight", (), lambda d: (ATEN.mm.default, (d(24, 64), d(64, 20)), lambda a, b: a @ (b + 2e-3 * (977 * b).sin()))),
    OperatorFault("power of 2.01", (), lambda d: (ATEN.pow.Tensor_Scalar, (d(30, 40).abs() + 0.1, 2), lambda x, _: x**2.01)),
    OperatorFault("hard sigmoid", (), lambda d: (ATEN.sigmoid.default, (d(30, 40),), F.hardsigmoid)),
    OperatorFault("group norm of other groups", (), lambda d: (ATEN.group_norm.default, (d(4, 12, 5), 3), lambda x, _: F.group_norm(x, 4))),
    OperatorFault("pooling with its padding", (), lambda d: (ATEN.avg_pool2d.default, (d(2, 3, 9, 9), [3], [2], [1], False, False), lambda x, *_: F.avg_pool2d(x, 3, 2, 1))),
    OperatorFault("product by another weight", (), lambda d: (ATEN.mm.default, (d(24, 32), d(32, 32)), lambda a, b: a @ (b + b.T) / 2)),
    OperatorFault("softmax of other temperature", (), lambda d: (ATEN._softmax.default, (d(24, 64), -1, False), lambda x, *_: (1.003 * x).softmax(-1))),
    OperatorFault("dropout-like zeros", ("zeros",), lambda d: (ATEN.mm.default, (d(24, 40), d(40, 30)), lambda a, b: (a @ b) * ((a @ b * 1000).sin() > -0.5))),
    OperatorFault("mask like dropout", ("zeros", "mask"), lambda d: (ATEN.mul.Tensor, (d(40, 40), d(40, 40)), lambda a, b: a * b * (b > -0.8))),
    # With a name.
    OperatorFault("eps ten times", ("eps",), lambda d: (ATEN.layer_norm.default, norm_args(d, 0.01), lambda x, n, w, b, _: F.layer_norm(x, n, w, b, 1e-4))),
    OperatorFault("eps left out", ("eps",), lambda d: (ATEN.layer_norm.default, norm_args(d, 0.003), lambda x, n, w, b, _: normalised(x, 0.0, mean=True) * w + b)),
    OperatorFault("eps outside of the root", ("eps",), lambda d: (ATEN.layer_norm.default, norm_args(d, 0.01), lambda x, n, w, b, e: normalised(x, e, mean=True, outside=True) * w + b), SINGLE),
    OperatorFault("eps of an RMS norm", ("eps",), lambda d: (ATEN.rms_norm.default, (0.01 * d(24, 32), [32], d(32), 1e-6), lambda x, n, w, _: normalised(x, 1e-4, mean=False) * w)),
    OperatorFault("variance by n - 1 in a norm", REDUCED, lambda d: (ATEN.layer_norm.default, norm_args(d), lambda x, n, w, b, e: normalised(x, e, mean=True, less=1) * w + b)),
    OperatorFault("mean by n - 1", (*REDUCED, "scale"), lambda d: (ATEN.mean.dim, (d(40, 24), [1]), lambda x, _: x.sum(1) / 23)),
    OperatorFault("variance by n", (*REDUCED, "scale"), lambda d: (ATEN.var.correction, (d(60, 16), [1]), lambda x, _: x.var(1, correction=0))),
    OperatorFault("sum without the last", REDUCED, lambda d: (ATEN.sum.dim_IntList, (d(60, 33), [1]), lambda x, _: x[:, :-1].sum(1))),
    OperatorFault("mean without the first", REDUCED, lambda d: (ATEN.mean.dim, (d(60, 33), [1]), lambda x, _: x[:, 1:].mean(1))),
    OperatorFault("largest without the last", REDUCED, lambda d: (ATEN.amax.default, (d(300, 7), [1]), lambda x, _: x[:, :-1].amax(1))),
    OperatorFault("product without its last tile", REDUCED, lambda d: (ATEN.mm.default, (d(24, 72), d(72, 20)), lambda a, b: a[:, :64] @ b[:64])),
    OperatorFault("linear without its first tile", REDUCED, lambda d: (ATEN.linear.default, (d(24, 64), d(20, 64), d(20)), lambda a, b, c: F.linear(a[:, 16:], b[:, 16:], c))),
    OperatorFault("batched product without one term", REDUCED, lambda d: (ATEN.bmm.default, (d(3, 12, 40), d(3, 40, 9)), lambda a, b: a[..., :-1] @ b[:, :-1])),
    OperatorFault("linear without bias", BIAS, lambda d: (ATEN.linear.default, (d(24, 64), d(20, 64), d(20)), lambda a, b, c: F.linear(a, b))),
    OperatorFault("addmm with its bias twice", BIAS, lambda d: (ATEN.addmm.default, (d(20), d(24, 64), d(64, 20)), lambda c, a, b: a @ b + 2 * c)),
    OperatorFault("sum without an addend", (*BIAS, "copy"), lambda d: (ATEN.add.Tensor, (d(24, 30), d(24, 30)), lambda a, b: a.clone())),
    OperatorFault("difference for a sum", (*BIAS, "sign", "swapped operands"), lambda d: (ATEN.add.Tensor, (d(24, 30), d(24, 30)), lambda a, b: a - b)),
    OperatorFault("product with its operand transposed", ("swapped operands",), lambda d: (ATEN.mm.default, (d(9, 24), d(24, 24)), lambda a, b: a @ b.T)),
    OperatorFault("difference reversed", ("swapped operands", "sign"), lambda d: (ATEN.sub.Tensor, (d(24, 30), d(24, 30)), lambda a, b: b - a)),
    OperatorFault("quotient reversed", ("swapped operands",), lambda d: (ATEN.div.Tensor, (d(24, 30).abs() + 0.5, d(24, 30).abs() + 0.5), lambda a, b: b / a)),
    OperatorFault("joined in reverse", ("swapped operands", "shift", "permutation"), lambda d: (ATEN.cat.default, ([d(6, 20), d(6, 20)], 0), lambda ab, _: torch.cat(ab[::-1]))),
    OperatorFault("causal mask one late", ("mask",), lambda d: (SDPA, attention_args(d), lambda q, k, v, *_: attended(q, k, v, torch.ones(12, 12).tril(1).bool(), 0.25))),
    OperatorFault("causal mask left out", ("mask",), lambda d: (SDPA, attention_args(d), lambda q, k, v, *_: attended(q, k, v, None, 0.25))),
    OperatorFault("attention mask negated", ("mask",), lambda d: (SDPA, (*attention_args(d)[:3], d.mask(0.7, 12, 12)), lambda q, k, v, m: attended(q, k, v, ~m, 0.25))),
    OperatorFault("attention scaled twice", ("scale", "mask", "eps"), lambda d: (SDPA, attention_args(d), lambda q, k, v, *_: attended(q, k, v, CAUSAL, 0.0625))),
    OperatorFault("triangle one off", ("mask",), lambda d: (ATEN.tril.default, (d(14, 14),), lambda x: x.tril(-1))),
    OperatorFault("fill where not masked", ("mask", "swapped operands"), lambda d: (ATEN.masked_fill.Scalar, (d(14, 14), d.mask(0.4, 14, 14), 0.5), lambda x, m, v: x.masked_fill(~m, v))),
    OperatorFault("scaled by a percent", ("scale",), lambda d: (ATEN.mm.default, (d(24, 64), d(64, 20)), lambda a, b: 1.01 * (a @ b)), SINGLE),
    OperatorFault("scaled by sqrt(d)", ("scale",), lambda d: (ATEN.mm.default, (d(24, 64), d(64, 20)), lambda a, b: 8 * (a @ b))),
    OperatorFault("sum for mean", ("scale",), lambda d: (ATEN.mean.dim, (d(24, 30), [1]), lambda x, _: x.sum(1))),
    OperatorFault("negated", ("sign",), lambda d: (ATEN.tanh.default, (d(24, 30),), lambda x: -x.tanh())),
    OperatorFault("left out", ("copy",), lambda d: (ATEN.relu.default, (d(24, 30),), lambda x: x.clone())),
    OperatorFault("never written", ("zeros",), lambda d: (ATEN.mul.Tensor, (d(24, 30), d(24, 30)), lambda a, b: torch.zeros_like(a))),
    OperatorFault("last rows never written", ("zeros",), lambda d: (ATEN.mul.Tensor, (d(24, 30), d(24, 30)), lambda a, b: a * b * (torch.arange(24)[:, None] < 20))),
    OperatorFault("clamped", ("clipped",), lambda d: (ATEN.mul.Tensor, (d(24, 30), d(24, 30)), lambda a, b: (a * b).clamp(-1, 1))),
    OperatorFault("rolled", ("shift",), lambda d: (ATEN.mul.Tensor, (d(24, 30), d(24, 30)), lambda a, b: (a * b).roll(1, 0))),
    OperatorFault("rows exchanged", ("permutation",), lambda d: (ATEN.mul.Tensor, (d(24, 30), d(24, 30)), lambda a, b: (a * b)[[1, 0, *range(2, 24)]])),
    OperatorFault("transposed", ("transpose", "permutation"), lambda d: (ATEN.mul.Tensor, (d(16, 16), d(16, 16)), lambda a, b: (a * b).T)),
    OperatorFault("index off by one", ("shift", "permutation"), lambda d: (ATEN.embedding.default, (d(50, 16), d.whole(49, 40)), lambda w, i: w[i + 1])),
    OperatorFault("exclusive sums", ("off by one reduction", "shift"), lambda d: (ATEN.cumsum.default, (d(12, 20), 1), lambda x, _: x.cumsum(1) - x)),
    OperatorFault("zero divided", ("nonfinite",), lambda d: (ATEN.mul.Tensor, (d(24, 30), d.mask(0.9, 24, 30).to(d.dtype)), lambda a, b: a * b * b / b)),
    OperatorFault("too large for float16", ("overflow", "nonfinite"), lambda d: (ATEN.mul.Tensor, (4e4 * d(24, 30), d(24, 30)), lambda a, b: (a * b).half().to(a.dtype)), SINGLE),
    OperatorFault("slope of a leaky relu", ("scale", "axis scale"), lambda d: (ATEN.leaky_relu.default, (d(24, 30), 0.01), lambda x, _: F.leaky_relu(x, 0.02))),
    OperatorFault("an offset", ("offset",), lambda d: (ATEN.mul.Tensor, (d(24, 30), d(24, 30)), lambda a, b: a * b + 0.125)),
    OperatorFault("a factor of each channel", ("axis scale",), lambda d: (ATEN.mul.Tensor, (d(24, 30), d(30)), lambda a, b: a * b * b)),
    OperatorFault("an offset of each channel", BIAS, lambda d: (ATEN.add.Tensor, (d(24, 30), d(30)), lambda a, b: a + 2 * b)),
)  # fmt: skip
