"""Wrong values that come of what a format can hold: garbage, bounds, infinities, roundings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paritas.core.diagnosis.case import Case, Context
from quality.diagnosis_values import Make, Setting

__all__ = ["CLIPPED", "GARBAGE", "NOT_NUMBERS", "OUTPUTS", "OVERFLOWS", "PRODUCTS"]


def _garbage(style: str) -> Make:
    def make(at: Setting) -> tuple[str, Case]:
        case = at.case(at.right)
        where = ... if at.region is None else at.region
        wide = at.dtype.itemsize == 4
        whole = torch.int32 if wide else torch.int16
        high = 31 if wide else 15
        count = case.candidate.numel()
        bits = torch.randint(0, 2**high - 1, (count,), generator=at.generator)
        if style == "signed":
            bits = bits * (1 - 2 * torch.randint(0, 2, (count,), generator=at.generator))
        elif style == "small":  # counters and sizes, read as floats: denormal
            bits = bits % 100 + 1
        elif style == "pointers":
            bits = torch.where(torch.arange(count) % 2 == 0, bits % 512 + 1, 0x7F00 >> (1 - wide))
        elif style == "half zero":
            bits = torch.where(torch.arange(count) % 2 == 0, bits, 0)
        values = bits.to(whole).view(at.dtype).reshape(case.shape)
        case.candidate[where] = values[where]
        return f"garbage {style}", case

    return make


GARBAGE = tuple(map(_garbage, ("random", "signed", "small", "pointers", "half zero")))


def _clipped(low: float, high: float, scale: float) -> Make:
    def make(at: Setting) -> tuple[str, Case]:
        at.right.div_(at.right.square().mean().sqrt()).mul_(scale)
        case = at.case(at.right)
        clamped = case.candidate.double().clamp(low, high).to(at.dtype)
        return f"clipped {low} {high}", Case(clamped, case.reference, at.right, case.noise)

    return make


CLIPPED = (
    _clipped(-1.0, 1.0, 2.0),
    _clipped(0.0, math.inf, 1.0),
    _clipped(-math.inf, 448.0, 400.0),
    _clipped(-0.5, 0.75, 1.0),
    _clipped(-128.0, 127.0, 200.0),
    _clipped(-448.0, 448.0, 600.0),
)


def _overflow(style: str) -> Make:
    def make(at: Setting) -> tuple[str, Case]:
        at.right.div_(at.right.square().mean().sqrt())
        limit = {"e5m2": 61440.0}.get(style, 65520.0)
        at.right.mul_(
            {"few": 0.6, "half": 1.5, "most": 8.0, "e5m2": 1.0, "large": 2.0}[style] * limit
        )
        right = at.right
        wrong = torch.where(
            right.abs() > limit, torch.copysign(torch.tensor(math.inf), right), right
        )
        storage = torch.bfloat16 if at.dtype == torch.float16 else at.dtype
        setting = Setting(right, storage, at.generator, at.with_noise, at.region)
        return f"overflow {style}", setting.case(wrong)

    return make


OVERFLOWS = tuple(map(_overflow, ("few", "half", "most", "e5m2", "large")))


def _not_a_number(style: str) -> Make:
    def make(at: Setting) -> tuple[str, Case]:
        x, y = at.normal(*at.right.shape), at.normal(*at.right.shape)
        chosen = torch.rand(at.right.shape, generator=at.generator) < 0.2
        chosen.view(-1)[0] = True
        chosen.view(-1)[1] = False
        operator, inputs = "", [x, y]
        if style == "0 * inf":
            x[chosen], y[chosen] = 0.0, math.inf
            operator = "aten.mul.Tensor"
        elif style == "negative root":
            x = torch.where(chosen, -x.abs() - 0.1, x.abs() + 0.1)
            operator, inputs = "aten.sqrt.default", [x]
        elif style == "inf - inf":
            x[chosen], y[chosen] = math.inf, math.inf
            operator = "aten.sub.Tensor"
        elif style == "exp":
            x = torch.where(chosen, 100.0 + x.abs(), x)
            operator, inputs = "aten.sigmoid.default", [x]
        elif style == "0 / 0":
            x[chosen], y[chosen] = 0.0, 0.0
            operator = "aten.div.Tensor"
        else:
            inputs = []
        wrong = torch.where(chosen, math.nan, at.right)
        stored = tuple(one.to(at.dtype) for one in inputs)
        return f"NaN {style}", at.case(wrong, Context(operator=operator, inputs=stored))

    return make


NOT_NUMBERS = tuple(
    map(_not_a_number, ("0 * inf", "negative root", "inf - inf", "exp", "0 / 0", "unknown"))
)


ROUNDED = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


def _lowered(style: str) -> Make:
    """Only of float32: what narrower dtypes lose on the way is within their own noise."""

    def make(at: Setting) -> tuple[str, Case]:
        single = Setting(at.right, torch.float32, at.generator, at.with_noise, at.region)
        if style in {"bfloat16", "float16"}:
            low = getattr(torch, style)
            case = single.case(at.right)
            return f"rounded to {style}", _with(
                case, _where(at, case, case.candidate.to(low).float())
            )
        if style == "fp8":
            case = single.case(at.right)
            low = case.candidate.to(torch.float8_e4m3fn).float()
            return "rounded to fp8", _with(case, _where(at, case, low))
        if style == "truncated":
            case = single.case(at.right)
            low = (case.candidate.view(torch.int32) & -65536).view(torch.float32)
            return "truncated to bfloat16", _with(case, _where(at, case, low))
        return _product(single, style)

    return make


def _with(case: Case, candidate: Tensor) -> Case:
    return Case(candidate, case.reference, case.arbiter, case.noise, case.context)


def _where(at: Setting, case: Case, low: Tensor) -> Tensor:
    result = case.candidate.clone()
    where = ... if at.region is None else at.region
    result[where] = low[where]
    return result


def _product(at: Setting, style: str) -> tuple[str, Case]:
    """A matrix product on rounded inputs, or with sums in bfloat16."""
    rows, columns = 16 + at.right.shape[0], 8 + at.right.shape[-1]
    a, b = at.normal(rows, 48).float(), at.normal(48, columns).float()
    right = a.double() @ b.double()
    reference = a @ b
    if style == "sums":
        total = torch.zeros(rows, columns, dtype=torch.bfloat16)
        for k in range(48):
            total = total + (a[:, k : k + 1] * b[k]).to(torch.bfloat16)
        candidate = total.float()
    elif style == "late sums":
        total = torch.zeros(rows, columns, dtype=torch.bfloat16)
        for k in range(48):
            total = total + (a[:, k : k + 1] * b[k]).to(torch.bfloat16)
        candidate = total.float() * 1.1
        right, reference = right * 1.1, reference * 1.1
    elif style == "tf32":
        kept = [((one.view(torch.int32) + 4096) & -8192).view(torch.float32) for one in (a, b)]
        candidate = kept[0] @ kept[1]
    else:
        candidate = a.to(torch.bfloat16).float() @ b.to(torch.bfloat16).float()
    own = (reference.double() - right).square().mean().sqrt()
    noise = own + 2.0**-25 * right.abs() if at.with_noise else None
    # In float64 the product is right: sums in bfloat16 cannot be repeated from the inputs.
    context = Context(operator="aten.mm.default", inputs=(a, b), lifted_agrees=True)
    return f"product {style}", Case(candidate, reference, right, noise, context)


OUTPUTS = tuple(map(_lowered, ("bfloat16", "float16", "e4m3", "e5m2", "truncated")))
PRODUCTS = tuple(map(_lowered, ("tf32", "inputs", "sums", "late sums")))
