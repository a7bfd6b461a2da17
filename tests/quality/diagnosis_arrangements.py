"""Tensors with a planted fault of arrangement, each with the kind that has to be named first.

The right values come from a float64 computation; reference and candidate are both rounded on their
way, each in its own manner, as two kernels would. Half of the cases come with the arbiter and a
measured noise, half without.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paritas.core.diagnosis.case import Case, Context
from paritas.core.numerics.criterion import unit_roundoff

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Planted:
    """A wrong tensor and what is to be said of it; benign ones have no kind."""

    name: str
    kinds: tuple[str, ...]
    case: Case


class Maker:
    """Makes cases of one seed and one dtype; every other one knows its noise."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.made = 0

    def normal(self, *shape: int) -> Tensor:
        """Inputs, exact in the dtype."""
        made = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return made.to(self.dtype).double()

    def whole(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def order(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self.generator)

    def rounded(self, value: Tensor) -> Tensor:
        """As a kernel would give it: a rounding or two away, in the dtype."""
        if not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=self.generator, dtype=torch.float64)
        return (value * (1 + unit_roundoff(self.dtype) * noise / 2)).to(self.dtype)

    def case(self, wrong: Tensor, right: Tensor, context: Context | None = None) -> Case:
        self.made += 1
        candidate, reference = self.rounded(wrong), self.rounded(right)
        context = context or Context()
        if self.made % 2 or not right.is_floating_point():
            return Case(candidate, reference, context=context)
        unit = unit_roundoff(self.dtype)
        spread = unit * right.abs() / math.sqrt(3)
        floor = float(spread.square().mean().sqrt()) / 2
        noise = spread.clamp(min=floor) + unit * right.abs() / 2
        return Case(candidate, reference, right, noise, context)


def planted(seed: int) -> Iterator[Planted]:
    """Every kind in every variant and dtype."""
    for number, dtype in enumerate(FLOATS):
        make = Maker(1000 * seed + number, dtype)
        for source in (_shifts, _orders, _operands, _reductions, _partials, _others):
            for name, kinds, case in source(make):
                yield Planted(f"{name} in {dtype}", kinds, case)
    make = Maker(1000 * seed + 9, torch.float32)
    for name, kinds, case in (*_whole_numbers(make), *_ties(make)):
        yield Planted(name, kinds, case)


_Made = Iterator[tuple[str, tuple[str, ...], Case]]


def _shifts(make: Maker) -> _Made:
    for shape, axis, distance in (
        ((257,), 0, 1),
        ((64, 33), 0, -3),
        ((64, 33), 1, 1),
        ((4, 8, 96), 2, 40),
        ((2, 3, 16, 24), 1, 1),
        ((3, 500), 1, -100),
    ):
        x = make.normal(*shape)
        yield f"roll {distance} {shape}", ("shift",), make.case(x.roll(distance, axis), x)
    for shape, axis, distance in (((300, 7), 0, 2), ((6, 128), 1, -1), ((40, 50), 1, 4)):
        x = make.normal(*shape)
        y = x.roll(distance, axis)
        gap = y.narrow(axis, 0 if distance > 0 else shape[axis] + distance, abs(distance))
        gap.zero_()
        yield f"shift {distance} {shape} with zeros", ("shift",), make.case(y, x)
    x = make.normal(32, 64).cumsum(1)
    yield "smooth rows off by one", ("shift",), make.case(x.roll(1, 1), x)
    x = make.normal(12, 80)
    y = x.clone()
    y[3:7] = x[3:7].roll(5, 1)
    yield "some rows rolled", ("shift",), make.case(y, x)
    x = make.normal(20, 100)
    y = x.clone()
    y[:, 40:90] = x[:, 41:91]
    yield "a block read one further on", ("shift",), make.case(y, x)
    x = make.normal(24, 36)
    yield "wrong pointer", ("shift",), make.case(x.flatten().roll(7).reshape(24, 36), x)


def _orders(make: Maker) -> _Made:
    for shape, a, b in (((16, 16), 0, 1), ((5, 24, 24), 1, 2), ((8, 8, 30), 0, 1),
                        ((2, 6, 10, 6), 1, 3), ((3, 3), 0, 1), ((100, 100), 0, 1)):  # fmt: skip
        x = make.normal(*shape)
        yield f"transposed {a}, {b} of {shape}", ("transpose",), make.case(x.transpose(a, b), x)
    x = make.normal(4, 12, 12)
    y = x.clone()
    y[2] = x[2].T
    yield "one head transposed", ("transpose",), make.case(y, x)
    kind = ("permutation",)
    for shape, axes in (((50, 6), (0,)), ((9, 31), (1,)), ((3, 20, 20), (1, 2)), ((90,), (0,))):
        x = make.normal(*shape)
        yield f"flipped {axes} of {shape}", kind, make.case(x.flip(axes), x)
    for rows, heads, size in ((10, 4, 16), (7, 2, 32), (16, 8, 8)):
        x = make.normal(rows, heads * size)
        y = x.reshape(rows, heads, size).transpose(1, 2).reshape(rows, heads * size)
        yield f"({heads} {size}) as ({size} {heads})", kind, make.case(y, x)
    for shape in ((12, 20), (3, 8, 14), (30, 5)):
        x = make.normal(*shape)
        y = x.transpose(-1, -2).reshape(shape)
        yield f"reshaped without a transpose {shape}", kind, make.case(y, x)
    x = make.normal(2, 6, 5, 8)
    yield "heads and tokens", kind, make.case(x.transpose(1, 2).reshape(x.shape), x)
    for rows, columns in ((40, 12), (9, 64)):
        x = make.normal(rows, columns)
        yield f"{rows} rows permuted", kind, make.case(x[make.order(rows)], x)
    x = make.normal(20, 40)
    y = x.clone()
    y[[3, 11]] = x[[11, 3]]
    yield "two rows exchanged", kind, make.case(y, x)
    x = make.normal(6, 128)
    y = x.clone()
    y[:, 16:32], y[:, 80:96] = x[:, 80:96], x[:, 16:32]
    yield "two tiles exchanged", kind, make.case(y, x)
    x = make.normal(400)
    yield "elements permuted", kind, make.case(x[make.order(400)], x)


def _context(name: str, *inputs: Tensor, dtype: torch.dtype, **arguments: object) -> Context:
    given = tuple(one.to(dtype) if one.is_floating_point() else one for one in inputs)
    return Context(operator=name, inputs=given, arguments=arguments)


def _operands(make: Maker) -> _Made:
    kind = ("swapped operands",)
    pairs: tuple[tuple[str, Callable[[Tensor, Tensor], Tensor], tuple[int, ...]], ...] = (
        ("aten.div.Tensor", torch.div, (30, 20)),
        ("aten.pow.Tensor_Tensor", torch.pow, (64,)),
        ("aten.atan2.default", torch.atan2, (8, 9)),
        ("aten.mm.default", torch.mm, (24, 24)),
        ("aten.bmm.default", torch.bmm, (3, 10, 10)),
    )
    for name, compute, shape in pairs:
        a, b = make.normal(*shape), make.normal(*shape)
        if name == "aten.pow.Tensor_Tensor":
            a, b = a.abs() + 0.5, b.abs() + 0.5
        context = _context(name, a, b, dtype=make.dtype)
        a, b = (one.double() for one in context.inputs)
        yield f"{name} exchanged", kind, make.case(compute(b, a), compute(a, b), context)
    a, b = make.normal(40), make.normal(40)
    context = _context("aten.sub.Tensor", a, b, dtype=make.dtype)
    yield "sub exchanged", (*kind, "sign"), make.case(b - a, a - b, context)
    a, b = make.normal(7, 32), make.normal(32, 32)
    context = _context("aten.mm.default", a, b, dtype=make.dtype)
    yield "second factor transposed", ("transpose",), make.case(a @ b.T, a @ b, context)
    bias = make.normal(32)
    context = _context("aten.linear.default", a, b, bias, dtype=make.dtype)
    made = make.case(a @ b + bias, a @ b.T + bias, context)
    yield "linear by the weight as it is", ("transpose",), made
    test = make.normal(12, 13) > 0
    a, b = make.normal(12, 13), make.normal(12, 13)
    context = _context("aten.where.self", test, a, b, dtype=make.dtype)
    wrong, right = torch.where(test, b, a), torch.where(test, a, b)
    yield "where exchanged", kind, make.case(wrong, right, context)
    a, b = make.normal(6, 20), make.normal(6, 20)
    context = _context("aten.cat.default", a, b, dtype=make.dtype, dim=0)
    made = make.case(torch.cat([b, a]), torch.cat([a, b]), context)
    yield "cat exchanged", (*kind, "shift", "permutation"), made


def _reductions(make: Maker) -> _Made:
    kind = ("off by one reduction",)
    for name, compute, shape, dim in (
        ("aten.sum.dim_IntList", torch.sum, (30, 40), 1),
        ("aten.mean.dim", torch.mean, (16, 50), 0),
        ("aten.amax.default", torch.amax, (200, 8), 1),
        ("aten.logsumexp.default", torch.logsumexp, (40, 12), 1),
    ):
        x = make.normal(*shape)
        context = _context(name, x, dtype=make.dtype, dim=[dim])
        for cut, which in ((0, "last"), (1, "first")):
            wrong = compute(x.narrow(dim, cut, shape[dim] - 1), dim)
            made = make.case(wrong, compute(x, dim), context)
            yield f"{name} without the {which}", (*kind, "partial sum"), made
    x = make.normal(60, 9)
    context = _context("aten.mean.dim", x, dtype=make.dtype, dim=[1])
    yield "mean by n - 1", kind, make.case(x.sum(1) / 8, x.mean(1), context)
    for name, size in (("aten.var.correction", 6), ("aten.std.correction", 4)):
        x = make.normal(50, size)
        context = _context(name, x, dtype=make.dtype, dim=[1], correction=1)
        compute = torch.var if "var" in name else torch.std
        wrong, right = compute(x, dim=1, correction=0), compute(x, dim=1, correction=1)
        yield f"{name} of n", kind, make.case(wrong, right, context)
    x = make.normal(20, 10)
    context = _context("aten._softmax.default", x, dtype=make.dtype, dim=-1)
    wrong = (x - x[:, :-1].logsumexp(1, keepdim=True)).exp()
    yield "softmax without the last", kind, make.case(wrong, x.softmax(1), context)
    context = _context("aten.cumsum.default", x, dtype=make.dtype, dim=1)
    made = make.case(x.cumsum(1) - x, x.cumsum(1), context)
    yield "exclusive cumsum", (*kind, "shift"), made
    weight, bias = make.normal(12), make.normal(12)
    x = make.normal(40, 12)
    context = _context("aten.native_layer_norm.default", x, weight, bias, dtype=make.dtype,
                       normalized_shape=[12], eps=1e-5)  # fmt: skip
    right = torch.nn.functional.layer_norm(x, (12,), weight, bias)
    spread = (x.var(1, keepdim=True, correction=1) + 1e-5).sqrt()
    wrong = (x - x.mean(1, keepdim=True)) / spread * weight + bias
    yield "layer norm by n - 1", kind, make.case(wrong, right, context)


def _partials(make: Maker) -> _Made:
    kind = ("partial sum",)
    for ranks, shape in ((2, (30, 8)), (4, (64,)), (8, (5, 6, 7))):
        parts = tuple(make.normal(*shape) for _ in range(ranks))
        total = torch.stack(parts).sum(0)
        held = tuple(make.rounded(one) for one in parts)
        context = Context(held=dict(enumerate(held)), world={"tp": ranks})
        made = make.case(parts[1], total, context)
        yield f"rank 1 of {ranks} alone", kind, made
        made = make.case(parts[0], total / ranks, context)
        yield f"rank 0 of {ranks}, not averaged", kind, made
        made = make.case(total - parts[-1], total, context)
        yield f"all but the last of {ranks}", kind, made
        made = make.case(total * ranks, total, context)
        yield f"{ranks} ranks reduced twice", ("doubled reduction", "scale"), made
        context = Context(
            held=dict.fromkeys(range(ranks), make.rounded(total)), world={"tp": ranks}
        )
        made = make.case(total * ranks, total, context)
        yield f"{ranks} whole parts added up", ("doubled reduction", "scale"), made
    for m, k, n, missing in ((20, 64, 30, 16), (8, 100, 9, 4), (16, 33, 16, 1), (40, 256, 4, 128)):
        a, b = make.normal(m, k), make.normal(k, n)
        context = _context("aten.mm.default", a, b, dtype=make.dtype)
        wrong = a[:, : k - missing] @ b[: k - missing]
        yield f"last {missing} of {k} terms", kind, make.case(wrong, a @ b, context)
    a, b, bias = make.normal(3, 5, 64), make.normal(12, 64), make.normal(12)
    context = _context("aten.linear.default", a, b, bias, dtype=make.dtype)
    wrong = a[..., 32:] @ b[:, 32:].T + bias
    yield "first 32 of 64 terms", kind, make.case(wrong, a @ b.T + bias, context)
    a, b = make.normal(4, 6, 96), make.normal(4, 96, 7)
    context = _context("aten.bmm.default", a, b, dtype=make.dtype)
    wrong = a @ b - a[..., 32:64] @ b[:, 32:64]
    yield "a tile of 32 in the middle", kind, make.case(wrong, a @ b, context)


def _others(make: Maker) -> _Made:
    kind = ("different random stream",)
    for rate, shape in ((0.1, (64, 32)), (0.5, (40, 50)), (0.2, (2000,))):
        x = make.normal(*shape)
        masks = [torch.rand(shape, generator=make.generator) >= rate for _ in range(2)]
        wrong, right = (x * mask / (1 - rate) for mask in masks)
        name = "aten.native_dropout.default" if rate != 0.5 else ""
        known = Context(operator=name, draws=True)
        yield f"dropout {rate}", kind, make.case(wrong, right, known)
    for shape in ((900,), (30, 40)):
        case = make.case(make.normal(*shape), make.normal(*shape), Context(operator="aten.randn"))
        yield f"randn {shape}", kind, case
    yield (
        "uniform",
        kind,
        make.case(
            *(torch.rand(25, 40, generator=make.generator, dtype=torch.float64) for _ in range(2)),
            Context(operator="aten.rand.default"),
        ),
    )
    query, key, value = (make.normal(2, 2, 12, 8) for _ in range(3))
    name = "aten.scaled_dot_product_attention.default"
    seen = torch.ones(12, 12, dtype=torch.bool)
    for causal, diagonal, text in ((True, None, "none"), (True, 1, "one late"),
                                   (True, -1, "one early"), (False, 0, "unasked")):  # fmt: skip
        context = _context(name, query, key, value, dtype=make.dtype, is_causal=causal)
        scores = query @ key.mT / math.sqrt(8)
        right = scores.masked_fill(~seen.tril(), -math.inf) if causal else scores
        wrong = scores if diagonal is None else scores.masked_fill(~seen.tril(diagonal), -math.inf)
        wrong, right = wrong.softmax(-1).nan_to_num(0.0) @ value, right.softmax(-1) @ value
        yield f"causal mask {text}", ("mask",), make.case(wrong, right, context)
    x = make.normal(14, 14)
    context = _context("aten.tril.default", x, dtype=make.dtype, diagonal=0)
    yield "tril one late", ("mask",), make.case(x.tril(1), x.tril(), context)
    for eps, other, scale in ((1e-5, 1e-3, 0.05), (1e-5, 0.0, 1e-3), (1e-6, 1e-2, 0.3)):
        x = (scale * make.normal(30, 16)).to(make.dtype).double()
        weight = make.normal(16)
        context = _context("aten.layer_norm.default", x, weight, dtype=make.dtype,
                           normalized_shape=[16], eps=eps)  # fmt: skip
        norm = torch.nn.functional.layer_norm
        wrong, right = norm(x, (16,), weight, eps=other), norm(x, (16,), weight, eps=eps)
        yield f"eps {other:g} for {eps:g}", ("eps",), make.case(wrong, right, context)
    root = x.square().mean(1, keepdim=True).sqrt()
    x = x / root * 0.01
    x = x.to(make.dtype).double()
    mean = x.square().mean(1, keepdim=True)
    context = _context("aten.rms_norm.default", x, weight, dtype=make.dtype, eps=1e-6)
    wrong, right = x / (mean.sqrt() + 1e-6) * weight, x / (mean + 1e-6).sqrt() * weight
    if make.dtype == torch.float32:
        yield "eps outside of the root", ("eps",), make.case(wrong, right, context)


def _whole_numbers(make: Maker) -> _Made:
    x = make.whole(50000, 40, 30)
    yield "tokens rolled", ("shift",), make.case(x.roll(1, 1), x)
    yield "tokens flipped", ("permutation",), make.case(x.flip(1), x)
    x = make.whole(1000, 20, 20)
    yield "table transposed", ("transpose",), make.case(x.T, x)
    a, b = make.whole(9, 50), make.whole(9, 50)
    context = _context("aten.lt.Tensor", a, b, dtype=torch.float32)
    yield "comparison exchanged", ("swapped operands",), make.case(b < a, a < b, context)
    x = make.whole(1000, 300)
    y = make.whole(1000, 300)
    made = make.case(y, x, Context(operator="aten.randint.low"))
    yield "randint", ("different random stream",), made


def _ties(make: Maker) -> _Made:
    kind = ("tie-breaking",)
    for size in (10, 40):
        scores = make.whole(5, 60, size).float()
        context = _context("aten.argmax.default", scores, dtype=torch.float32, dim=1)
        last = size - 1 - scores.flip(1).argmax(1)
        yield f"argmax of {size}, the last", kind, make.case(last, scores.argmax(1), context)
    scores = make.whole(30, 8, 50).float()
    context = _context("aten.sort.default", scores, dtype=torch.float32, dim=-1)
    right = scores.argsort(dim=-1, stable=True)
    wrong = 49 - scores.flip(-1).argsort(dim=-1, stable=True)
    yield "unstable sort", kind, make.case(wrong, right, context)
    context = _context("aten.topk.default", scores, dtype=torch.float32, k=6, dim=-1)
    yield "topk", kind, make.case(wrong[:, :6], right[:, :6], context)
    scores = make.whole(3, 200).float()
    context = _context("aten.argmin.default", scores, dtype=torch.float32)
    right = scores.argmin()
    wrong = (scores == scores.min()).nonzero()[-1, 0]
    yield "argmin of all", kind, make.case(wrong, right, context)


def benign(seed: int) -> Iterator[Planted]:
    """Nothing wrong: two roundings of the same values, with all the context that could mislead."""
    shapes = ((1,), (7,), (64, 33), (5, 24, 24), (2, 6, 10, 6), (16, 16), (900,), (100, 100))
    for number, dtype in enumerate(FLOATS):
        make = Maker(1000 * seed + 500 + number, dtype)
        for shape in shapes:
            x = make.normal(*shape)
            smooth = x.cumsum(-1) + 100
            sparse = x.clamp(min=0)
            for name, value in (("plain", x), ("smooth", smooth), ("sparse", sparse)):
                parts = (make.rounded(value / 2),) * 2
                for context in (
                    Context(),
                    Context(held=dict(enumerate(parts))),
                    Context(operator="aten.dropout"),
                ):
                    case = make.case(value, value, context)
                    yield Planted(f"benign {name} {shape} {dtype}", (), case)
        a, b = make.normal(24, 24), make.normal(24, 24)
        context = _context("aten.mm.default", a, b, dtype=dtype)
        yield Planted(f"benign mm {dtype}", (), make.case(a @ b, a @ b, context))


def unexplained(seed: int) -> Iterator[Planted]:
    """Wrong in a way that has no name: whatever is claimed here is claimed wrongly."""
    for number, dtype in enumerate(FLOATS):
        make = Maker(1000 * seed + 700 + number, dtype)
        for shape in ((40,), (64, 33), (5, 24, 24), (30, 16)):
            x = make.normal(*shape)
            y = make.normal(*shape)
            other: tuple[tuple[str, Tensor, Tensor], ...] = (
                ("gelu for relu", torch.nn.functional.gelu(x), x.relu()),
                ("tanh for sigmoid", x.tanh(), x.sigmoid()),
                ("square for cube", x.square(), x**3),
                ("other weights", x @ make.normal(shape[-1], 16), x @ make.normal(shape[-1], 16)),
                ("product for sum", x * y, x + y),
                ("log for root", (1 + x.abs()).log(), x.abs().sqrt()),
                ("sine", x + 0.3 * torch.sin(20 * x), x),
            )
            for name, wrong, right in other:
                yield Planted(f"{name} {shape} {dtype}", (), make.case(wrong, right))
