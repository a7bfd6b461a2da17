"""Fused operators of torch, and honest ways to compute them: float32 inside, one rounding after it.

The first form of each operator is the one that is degraded, by rounding one of its inner values.
Every form is written for any precision, so that it rounds nowhere in a lifted run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.inside.steps import Rounded, Steps, wide
from torch import Tensor

Form = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Fused:
    """An operator.

    Attributes:
        reference: as torch has it.
        forms: honest ways to compute it, by name. They take the inner steps first.
        shapes: of its floating arguments.
        regimes: which inputs it is tried on, of `REGIMES`.
        further: an argument that is no float, made from a generator.
    """

    reference: Callable[..., Any]
    forms: Mapping[str, Form]
    shapes: tuple[tuple[int, ...], ...]
    regimes: tuple[str, ...]
    further: Callable[[torch.Generator], Tensor] | None = None


# The mean of the first argument, and its scale. The other arguments are of scale 1.
REGIMES = {"mean 0": (0.0, 1.0), "mean 8": (8.0, 1.0), "mean 100": (100.0, 1.0)}
REGIMES |= {"large": (0.0, 8.0)}
NORMAL, MEANS, LARGE = ("mean 0",), ("mean 0", "mean 8", "mean 100"), ("mean 0", "large")


def arguments(fused: Fused, dtype: torch.dtype, regime: str, seed: int = 0) -> list[Tensor]:
    """Inputs of an operator; all that are floating require grad."""
    draws = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=draws) for shape in fused.shapes]
    mean, scale = REGIMES[regime]
    made[0] = made[0] * scale + mean
    floats = [value.to(dtype).requires_grad_() for value in made]
    return floats if fused.further is None else [*floats, fused.further(draws)]


# --- Norms ----------------------------------------------------------------------------------------


def _two_passes(rows: Tensor, at: Steps) -> tuple[Tensor, Tensor, Tensor]:
    mean = at("mean", rows.mean(-1, keepdim=True))
    centred = at("centred", rows - mean)
    return mean, centred, at("variance", centred.square().mean(-1, keepdim=True))


def _merged(rows: Tensor, _at: Steps) -> tuple[Tensor, Tensor, Tensor]:
    """Welford's way, in pieces of 8 that are merged pair by pair."""
    pieces = rows.unflatten(-1, (-1, 8))
    mean = pieces.mean(-1)
    squares = (pieces - mean.unsqueeze(-1)).square().sum(-1)
    count = 8
    while mean.shape[-1] > 1:
        left, right = (mean[..., side::2] for side in (0, 1))
        apart = right - left
        squares = squares[..., ::2] + squares[..., 1::2] + apart.square() * (count / 2)
        mean, count = left + apart / 2, 2 * count
    return mean, rows - mean, squares / count


def _one_pass(rows: Tensor, _at: Steps) -> tuple[Tensor, Tensor, Tensor]:
    mean = rows.mean(-1, keepdim=True)
    variance = (rows.square().mean(-1, keepdim=True) - mean.square()).clamp_min(0)
    return mean, rows - mean, variance


Moments = Callable[[Tensor, Steps], tuple[Tensor, Tensor, Tensor]]
MOMENTS: dict[str, Moments] = {
    "two passes": _two_passes,
    "Welford": _merged,
    "one pass": _one_pass,
}


def _normal(rows: Tensor, moments: Moments, at: Steps, eps: float = 1e-5) -> Tensor:
    _, centred, variance = moments(rows, at)
    return at("normal", centred * at("deviation", (variance + eps).rsqrt()))


def _layer_norm(moments: Moments) -> Form:
    def form(at: Steps, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        normal = _normal(wide(x), moments, at)
        return (normal * wide(weight) + wide(bias)).to(x.dtype)

    return form


def _group_norm(moments: Moments) -> Form:
    def form(at: Steps, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = wide(x).unflatten(1, (4, -1)).flatten(2)
        normal = _normal(rows, moments, at).view(x.shape)
        return (normal * wide(weight)[:, None, None] + wide(bias)[:, None, None]).to(x.dtype)

    return form


def _batch_norm(moments: Moments) -> Form:
    def form(at: Steps, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = wide(x).transpose(0, 1).flatten(1)
        normal = _normal(rows, moments, at) * wide(weight)[:, None] + wide(bias)[:, None]
        turned = normal.view(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)
        return turned.contiguous().to(x.dtype)

    return form


def _rms_norm(*, in_pieces: bool) -> Form:
    def form(at: Steps, x: Tensor, weight: Tensor) -> Tensor:
        rows = wide(x)
        squares = at("squares", rows.square())
        mean = squares.unflatten(-1, (-1, 8)).mean(-1) if in_pieces else squares
        scale = at("scale", (at("mean", mean.mean(-1, keepdim=True)) + 1e-5).rsqrt())
        return (at("normal", rows * scale) * wide(weight)).to(x.dtype)

    return form


def _all_moments(norm: Callable[[Moments], Form]) -> dict[str, Form]:
    return {name: norm(moments) for name, moments in MOMENTS.items()}


NORMS = {
    "layer_norm": Fused(
        lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias),
        _all_moments(_layer_norm),
        ((48, 256), (256,), (256,)),
        MEANS,
    ),
    "group_norm": Fused(
        lambda x, weight, bias: F.group_norm(x, 4, weight, bias),
        _all_moments(_group_norm),
        ((4, 16, 8, 8), (16,), (16,)),
        MEANS,
    ),
    "batch_norm": Fused(
        lambda x, weight, bias: F.batch_norm(x, None, None, weight, bias, training=True),
        _all_moments(_batch_norm),
        ((4, 16, 8, 8), (16,), (16,)),
        MEANS,
    ),
    "rms_norm": Fused(
        lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-5),
        {"in one sum": _rms_norm(in_pieces=False), "in pieces": _rms_norm(in_pieces=True)},
        ((48, 256), (256,)),
        MEANS,
    ),
}


# --- Softmax, attention, losses -------------------------------------------------------------------


def _softmax(at: Steps, x: Tensor) -> Tensor:
    shifted = at("shifted", wide(x) - wide(x).amax(-1, keepdim=True))
    powers = at("powers", shifted.exp())
    return (powers / at("sum", powers.sum(-1, keepdim=True))).to(x.dtype)


def _softmax_base_2(_at: Steps, x: Tensor) -> Tensor:
    scaled = wide(x) * math.log2(math.e)
    powers = (scaled - scaled.amax(-1, keepdim=True)).exp2()
    return (powers * powers.unflatten(-1, (-1, 8)).sum(-1).sum(-1, keepdim=True).reciprocal()).to(
        x.dtype
    )


def _log_softmax(at: Steps, x: Tensor) -> Tensor:
    shifted = at("shifted", wide(x) - wide(x).amax(-1, keepdim=True))
    total = at("sum", at("powers", shifted.exp()).sum(-1, keepdim=True))
    return (shifted - at("logarithm", total.log())).to(x.dtype)


def _log_softmax_in_pieces(_at: Steps, x: Tensor) -> Tensor:
    rows = wide(x)
    pieces = rows.unflatten(-1, (-1, 8)).logsumexp(-1)
    return (rows - pieces.logsumexp(-1, keepdim=True)).to(x.dtype)


def _weights(at: Steps, query: Tensor, key: Tensor, *, causal: bool) -> Tensor:
    scores = at("scores", wide(query) @ wide(key).mT * query.shape[-1] ** -0.5)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    shifted = at("shifted", scores - scores.amax(-1, keepdim=True))
    powers = at("powers", shifted.exp())
    return powers / at("sum", powers.sum(-1, keepdim=True))


def _attention(*, causal: bool) -> Form:
    def form(at: Steps, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = at("weights", _weights(at, query, key, causal=causal))
        return (weights @ wide(value)).to(value.dtype)

    return form


def _rounding_weights(*, causal: bool) -> Form:
    """As flash attention: the powers are rounded before they meet the values, their sum is not."""

    def form(_at: Steps, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        unit = torch.finfo(value.dtype).eps / 2
        round_powers = Rounded("powers", unit)
        scores = wide(query) @ wide(key).mT * query.shape[-1] ** -0.5
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        powers = (scores - scores.amax(-1, keepdim=True)).exp()
        weighted = round_powers("powers", powers) @ wide(value)
        return (weighted / powers.sum(-1, keepdim=True)).to(value.dtype)

    return form


def _online(*, causal: bool) -> Form:
    """The keys in blocks of 16, with running maxima and sums."""

    def form(_at: Steps, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = wide(query) @ wide(key).mT * query.shape[-1] ** -0.5
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -1e30)
        most = torch.full_like(scores[..., :1], -1e30)
        total: Any = 0.0
        out: Any = 0.0
        for part, values in zip(scores.split(16, -1), wide(value).split(16, -2), strict=True):
            now = torch.maximum(part.amax(-1, keepdim=True), most).detach()
            fade = torch.exp(most - now)
            powers = (part - now).exp()
            total = total * fade + powers.sum(-1, keepdim=True)
            out, most = out * fade + powers @ values, now
        return (out / total).to(value.dtype)

    return form


def _forms_of_attention(*, causal: bool) -> dict[str, Form]:
    return {
        "by definition": _attention(causal=causal),
        "weights rounded": _rounding_weights(causal=causal),
        "online": _online(causal=causal),
    }


def _cross_entropy(at: Steps, x: Tensor, target: Tensor) -> Tensor:
    """In one kernel, as fused losses compute it."""
    rows = wide(x)
    top = rows.amax(-1, keepdim=True)
    total = at("sum", at("powers", at("shifted", rows - top).exp()).sum(-1, keepdim=True))
    chosen = rows.gather(-1, target[:, None])
    return at("losses", total.log() + top - chosen).mean().to(x.dtype)


def _cross_entropy_in_two(_at: Steps, x: Tensor, target: Tensor) -> Tensor:
    """In two kernels with a rounding between them, as torch computes it."""
    logs = wide(x).log_softmax(-1).to(x.dtype)
    return -wide(logs).gather(-1, target[:, None]).mean().to(x.dtype)


def _classes(draws: torch.Generator) -> Tensor:
    return torch.randint(128, (48,), generator=draws)


def _mse(at: Steps, x: Tensor, y: Tensor) -> Tensor:
    return at("squares", at("difference", wide(x) - wide(y)).square()).mean().to(x.dtype)


def _bce(at: Steps, x: Tensor, y: Tensor) -> Tensor:
    logit, target = wide(x), wide(y)
    soft = at("logarithm", at("powers", (-logit.abs()).exp()).log1p())
    return at("losses", logit.clamp_min(0) - logit * target + soft).mean().to(x.dtype)


SOFT = {
    "softmax": Fused(
        lambda x: F.softmax(x, -1),
        {"by definition": _softmax, "base 2": _softmax_base_2},
        ((48, 128),),
        LARGE,
    ),
    "log_softmax": Fused(
        lambda x: F.log_softmax(x, -1),
        {"by definition": _log_softmax, "in pieces": _log_softmax_in_pieces},
        ((48, 128),),
        (*LARGE, "mean 100"),
    ),
    "attention": Fused(
        F.scaled_dot_product_attention,
        _forms_of_attention(causal=False),
        ((2, 2, 48, 32),) * 3,
        LARGE,
    ),
    "attention, causal": Fused(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        _forms_of_attention(causal=True),
        ((2, 2, 48, 32),) * 3,
        LARGE,
    ),
    "attention, 3-D": Fused(
        F.scaled_dot_product_attention,
        _forms_of_attention(causal=False),
        ((4, 48, 32),) * 3,
        LARGE,
    ),
    "cross_entropy": Fused(
        F.cross_entropy,
        {"in one kernel": _cross_entropy, "in two": _cross_entropy_in_two},
        ((48, 128),),
        LARGE,
        further=_classes,
    ),
    "mse_loss": Fused(F.mse_loss, {"by definition": _mse}, ((48, 128),) * 2, MEANS),
    "bce_with_logits": Fused(
        F.binary_cross_entropy_with_logits,
        {"by definition": _bce},
        ((48, 128),) * 2,
        LARGE,
    ),
}


# --- Reductions, functions of one value, products, cells ------------------------------------------


def _variance(moments: Moments) -> Form:
    def form(at: Steps, x: Tensor) -> Tensor:
        rows = wide(x)
        variance = moments(rows, at)[2] * (rows.shape[-1] / (rows.shape[-1] - 1))
        return variance.squeeze(-1).to(x.dtype)

    return form


def _log_sum_exp(at: Steps, x: Tensor) -> Tensor:
    top = wide(x).amax(-1, keepdim=True)
    total = at("sum", at("powers", at("shifted", wide(x) - top).exp()).sum(-1, keepdim=True))
    return (total.log() + top).squeeze(-1).to(x.dtype)


def _norm(at: Steps, x: Tensor) -> Tensor:
    return at("sum", at("squares", wide(x).square()).sum(-1)).sqrt().to(x.dtype)


def _gelu(at: Steps, x: Tensor) -> Tensor:
    y = wide(x)
    return (y * at("share", 0.5 * (1 + at("erf", torch.erf(y * math.sqrt(0.5)))))).to(x.dtype)


def _silu(at: Steps, x: Tensor) -> Tensor:
    y = wide(x)
    return (y / (1 + at("powers", at("negative", -y).exp()))).to(x.dtype)


def _exp(at: Steps, x: Tensor) -> Tensor:
    """By a power of two and a short polynomial's argument, as libraries do."""
    scaled = at("scaled", wide(x) * math.log2(math.e))
    return (
        at("rest", scaled - scaled.detach().round())
        .exp2()
        .mul(scaled.detach().round().exp2())
        .to(x.dtype)
    )


def _linear(pieces: int) -> Form:
    def form(at: Steps, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        total: Any = 0.0
        parts = zip(wide(x).chunk(pieces, -1), wide(weight).chunk(pieces, -1), strict=True)
        for part, columns in parts:
            total = at("partial sum", total + part @ columns.mT)
        return (total + wide(bias)).to(x.dtype)

    return form


def _convolution(at: Steps, x: Tensor, weight: Tensor) -> Tensor:
    columns = F.unfold(wide(x), 3)
    total: Any = 0.0
    parts = zip(columns.chunk(8, 1), wide(weight).flatten(1).chunk(8, 1), strict=True)
    for part, rows in parts:
        total = at("partial sum", total + rows @ part)
    return total.view(x.shape[0], -1, x.shape[2] - 2, x.shape[3] - 2).to(x.dtype)


def _lstm_cell(at: Steps, x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor) -> Any:
    gates = at("gates", wide(x) @ wide(w).mT + wide(h) @ wide(u).mT)
    i, f, g, o = gates.chunk(4, -1)
    cell = at("cell", f.sigmoid() * wide(c) + i.sigmoid() * g.tanh())
    return (o.sigmoid() * cell.tanh()).to(x.dtype), cell.to(x.dtype)


def _gru_cell(at: Steps, x: Tensor, h: Tensor, w: Tensor, u: Tensor) -> Tensor:
    given, kept = at("given", wide(x) @ wide(w).mT), at("kept", wide(h) @ wide(u).mT)
    r, z, n = zip(given.chunk(3, -1), kept.chunk(3, -1), strict=True)
    reset, update = sum(r).sigmoid(), sum(z).sigmoid()
    new = at("new", (n[0] + reset * n[1]).tanh())
    return (new + update * (wide(h) - new)).to(x.dtype)


OTHERS = {
    "var": Fused(lambda x: x.var(-1), _all_moments(_variance), ((48, 256),), MEANS),
    "logsumexp": Fused(
        lambda x: x.logsumexp(-1), {"by definition": _log_sum_exp}, ((48, 128),), LARGE
    ),
    "norm": Fused(
        lambda x: torch.linalg.vector_norm(x, dim=-1), {"by definition": _norm}, ((48, 256),), MEANS
    ),
    "gelu": Fused(F.gelu, {"by definition": _gelu}, ((48, 64),), LARGE),
    "silu": Fused(F.silu, {"by definition": _silu}, ((48, 64),), LARGE),
    "exp": Fused(torch.exp, {"by powers of two": _exp}, ((48, 64),), NORMAL),
    "linear": Fused(
        F.linear,
        {"in 8 pieces": _linear(8), "in one": _linear(1)},
        ((32, 256), (32, 256), (32,)),
        ("mean 0", "mean 8"),
    ),
    "conv2d": Fused(
        F.conv2d,
        {"by columns": _convolution},
        ((2, 16, 8, 8), (16, 16, 3, 3)),
        ("mean 0", "mean 8"),
    ),
    "lstm_cell": Fused(
        lambda x, h, c, w, u: torch.lstm_cell(x, (h, c), w, u),
        {"in one kernel": _lstm_cell},
        ((32, 32), (32, 32), (32, 32), (128, 32), (128, 32)),
        NORMAL,
    ),
    "gru_cell": Fused(
        torch.gru_cell,
        {"in one kernel": _gru_cell},
        ((32, 32), (32, 32), (96, 32), (96, 32)),
        NORMAL,
    ),
}

OPERATORS: dict[str, Fused] = {**NORMS, **SOFT, **OTHERS}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
