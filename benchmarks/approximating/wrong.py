"""Wrong parameters, from obvious ones down to a few roundings of float32.

Many candidates are also written in another way than their reference, so that they differ from it in
every bit, as a port does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from benchmarks.approximating.honest import (
    _mantissa,
    _reduced,
    _scaled,
    gelu_tanh,
    horner,
    tanh_rational,
    within_range,
)
from benchmarks.approximating.programs import (
    Function,
    Label,
    Program,
    in_float32,
    normal,
    one,
    positive,
)
from torch import Tensor
from torch.nn import functional

Of = Callable[[float], Function]


def layer_norm(eps: float) -> Function:
    def norm(x: Tensor) -> Tensor:
        d = x - x.mean(-1, keepdim=True)
        return d * torch.rsqrt(d.square().mean(-1, keepdim=True) + eps)

    return norm


def rms_norm(eps: float) -> Function:
    return lambda x: x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def cosine(eps: float) -> Function:
    return lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=eps)


def leaky(slope: float) -> Function:
    return lambda x: torch.where(x > 0, x, x * slope)


def elu(alpha: float) -> Function:
    return lambda x: torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0.0)))


def soft_threshold(limit: float) -> Function:
    return lambda x: x - x.clamp(-limit, limit)


def hard_shrink(limit: float) -> Function:
    return lambda x: torch.where(x.abs() > limit, x, torch.zeros_like(x))


def clipped(limit: float) -> Function:
    return lambda x: torch.tanh(x).clamp(-limit, limit)


def capped(limit: float) -> Function:
    """Soft-capping of logits."""
    return lambda x: limit * torch.tanh(x / limit)


def temperature(value: float) -> Function:
    return lambda x: (x / value).softmax(-1)


def attention(scale: float) -> Function:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT) * scale).softmax(-1) @ v

    return attend


def momentum(share: float) -> Function:
    return lambda mean, x: mean * (1 - share) + share * x.mean(0)


def decay(rate: float) -> Function:
    return lambda w, g: w * (1 - 1e-3 * rate) - 1e-3 * g


def adam(eps: float) -> Function:
    return lambda g, v: g / (v.abs().sqrt() + eps)


def gelu(cubic: float = 0.044715, root: float = 0.7978845608028654) -> Function:
    return lambda x: 0.5 * x * (1 + torch.tanh(root * (x + cubic * x * x * x)))


def gelu_erf(root: float) -> Function:
    return lambda x: 0.5 * x * (1 + torch.erf(x * root))


def quick_gelu(factor: float) -> Function:
    return lambda x: x * torch.sigmoid(factor * x)


def exp_of(log2e: float) -> Function:
    return lambda x: torch.exp2(x * log2e)


def log_of(ln2: float) -> Function:
    return lambda x: torch.log2(x) * ln2


def degrees(pi: float) -> Function:
    return lambda x: x * (180 / pi)


def turned(pi: float) -> Function:
    return lambda x: torch.sin(2 * pi * torch.sigmoid(x))


def variance(less: float) -> Function:
    return lambda x: (x - x.mean(-1, keepdim=True)).square().sum(-1) / (x.shape[-1] - less)


def mean_of(count: float) -> Function:
    return lambda x: x.sum(-1) * (1 / count)


def inverted_dropout(keep: float) -> Function:
    return lambda x, mask: x * mask * (1 / keep)


def smoothed(share: float) -> Function:
    def loss(x: Tensor, target: Tensor) -> Tensor:
        logs = x.log_softmax(-1)
        picked = logs.gather(1, target[:, None])[:, 0]
        return (-(1 - share) * picked - share * logs.mean(-1)).mean()

    return loss


def huber(beta: float) -> Function:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        size = (x - y).abs()
        near = size.clamp(max=beta)
        return (near * (size - 0.5 * near)).mean()

    return loss


def softplus(threshold: float) -> Function:
    return lambda x: torch.where(x > threshold, x, torch.log1p(torch.exp(x.clamp(max=threshold))))


def biased(offset: float) -> Function:
    return lambda x: torch.sigmoid(x) + offset


def exp_terms(count: float) -> Function:
    def exp(x: Tensor) -> Tensor:
        k, r = _reduced(x)
        return _scaled(horner(r, [1 / math.factorial(n) for n in range(int(count), -1, -1)]), k)

    return exp


def exp_coefficient(third: float) -> Function:
    def exp(x: Tensor) -> Tensor:
        k, r = _reduced(x)
        terms = [1 / math.factorial(n) for n in range(8, -1, -1)]
        terms[-4] = third
        return _scaled(horner(r, terms), k)

    return exp


def log_terms(count: float) -> Function:
    def log(x: Tensor) -> Tensor:
        m, e = _mantissa(x)
        s = (m - 1) / (m + 1)
        return s * horner(s * s, [2 / n for n in range(int(count), 0, -2)]) + e * math.log(2)

    return within_range(log, torch.log)


def tanh_factor(factor: float) -> Function:
    return lambda x: tanh_rational(x * factor)


def tanh_saturated(limit: float) -> Function:
    return lambda x: torch.where(x.abs() > limit, torch.sign(x), torch.tanh(x))


def newton(steps: float) -> Function:
    def reciprocal(x: Tensor) -> Tensor:
        m, e = torch.frexp(x)
        y = 48 / 17 - 32 / 17 * m
        for _ in range(int(steps)):
            y = y * (2 - m * y)
        return _scaled(y, -e.to(x.dtype))

    return within_range(reciprocal, torch.reciprocal)


def erf_of_seven(last: float) -> Function:
    """Abramowitz and Stegun 7.1.26: 1.5e-7 at best."""

    def erf(x: Tensor) -> Tensor:
        size = x.abs()
        t = 1 / (1 + 0.3275911 * size)
        terms = [last, -1.453152027, 1.421413741, -0.284496736, 0.254829592, 0.0]
        return torch.sign(x) * (1 - horner(t, terms) * torch.exp(-size * size))

    return erf


def _pairs() -> list[Tensor]:
    return [normal(8, 32), normal(8, 32, seed=1)]


def _heads() -> list[Tensor]:
    return [normal(2, 8, 16, seed=n) for n in range(3)]


def _mean_and_rows() -> list[Tensor]:
    return [normal(32, seed=1), normal(8, 32)]


def _masked() -> list[Tensor]:
    return [normal(8, 32), (normal(8, 32, seed=1) > -1).float()]


def _picked() -> list[Tensor]:
    return [normal(8, 32), torch.arange(8) * 3]


def _large() -> list[Tensor]:
    return [normal(8, 32) * 100]


def _long() -> list[Tensor]:
    return [normal(4, 4096)]


def _few_ulp(value: float, ulps: int) -> float:
    """A number that is so many steps of float32 above another."""
    return value + ulps * 2.0 ** (math.floor(math.log2(value)) - 23)


# The name, the right function, the wrong one for a number, the numbers with their labels (w: wrong,
# i: invisible), and the inputs.
Row = tuple[str, Function, Of, dict[float, str], Callable[[], list[Tensor]]]
ROWS: list[Row] = [
    (
        "eps of a layer norm",
        lambda x: functional.layer_norm(x, (32,), eps=1e-5),
        layer_norm,
        {1e-3: "w", 1e-6: "w", 1.1e-5: "w", 1.001e-5: "w"},
        one,
    ),
    (
        "eps of a layer norm, large inputs",
        layer_norm(1e-5),
        layer_norm,
        {1e-6: "w", 0.0: "w"},
        _large,
    ),
    (
        "eps of an rms norm",
        lambda x: functional.rms_norm(x, (32,), eps=1e-6),
        rms_norm,
        {1e-5: "w", 1e-8: "w", 1.01e-6: "w"},
        one,
    ),
    (
        "eps of a normalization",
        lambda x: functional.normalize(x, dim=-1, eps=1e-12),
        cosine,
        {1e-3: "w", 1e-8: "w"},
        one,
    ),
    ("eps of Adam", adam(1e-8), adam, {1e-6: "w", 1e-7: "w", 1.1e-8: "w"}, _pairs),
    (
        "slope of a leaky relu",
        lambda x: functional.leaky_relu(x, 0.01),
        leaky,
        {0.02: "w", 0.0101: "w", 0.010001: "w", _few_ulp(0.01, 4): "w"},
        one,
    ),
    ("alpha of an elu", functional.elu, elu, {1.0001: "w", _few_ulp(1.0, 6): "w"}, one),
    (
        "limit of a softshrink",
        functional.softshrink,
        soft_threshold,
        {0.51: "w", 0.50001: "w", _few_ulp(0.5, 8): "w"},
        one,
    ),
    ("limit of a hardshrink", functional.hardshrink, hard_shrink, {0.51: "w", 0.5001: "w"}, one),
    ("limit of a clamp", clipped(0.9), clipped, {0.91: "w", 0.90001: "w"}, one),
    (
        "limit of a clamp that nothing reaches",
        clipped(0.999),
        clipped,
        {0.9999: "w"},
        lambda: [normal(8, 32) / 4],
    ),
    ("cap of logits", capped(30.0), capped, {50.0: "w", 30.001: "w"}, one),
    (
        "temperature",
        temperature(0.7),
        temperature,
        {0.71: "w", 0.70001: "w", _few_ulp(0.7, 8): "w"},
        one,
    ),
    (
        "scale of attention",
        functional.scaled_dot_product_attention,
        attention,
        {0.25001: "w", 0.2500005: "w"},
        _heads,
    ),
    ("momentum", momentum(0.1), momentum, {0.11: "w", 0.10001: "w", 0.9: "w"}, _mean_and_rows),
    ("weight decay", decay(0.01), decay, {0.1: "w", 0.011: "w"}, _pairs),
    (
        "coefficient of gelu (tanh)",
        gelu_tanh,
        lambda c: gelu(cubic=c),
        {0.04: "w", 0.0447: "w", 0.04471: "w", 0.0447151: "w", 0.044715000001: "i"},
        one,
    ),
    (
        "root of gelu (tanh)",
        gelu_tanh,
        lambda c: gelu(root=c),
        {0.8: "w", 0.7979: "w", 0.79788: "w", 0.797885: "w", 0.7978845608: "i"},
        one,
    ),
    (
        "root of gelu",
        functional.gelu,
        gelu_erf,
        {0.7: "w", 0.7071: "w", 0.70711: "w", 0.707107: "w", 0.70710678: "i"},
        one,
    ),
    ("factor of quick gelu", quick_gelu(1.702), quick_gelu, {1.7: "w", 1.70201: "w"}, one),
    (
        "log2(e) of exp",
        torch.exp,
        exp_of,
        {1.44: "w", 1.4427: "w", 1.44269: "w", 1.442695: "w", 1.44269504: "i"},
        one,
    ),
    (
        "ln(2) of log",
        torch.log,
        log_of,
        {0.6931: "w", 0.69315: "w", 0.693147: "w", 0.69314718: "i"},
        positive,
    ),
    (
        "pi of degrees",
        torch.rad2deg,
        degrees,
        {3.14: "w", 3.1416: "w", 3.141593: "w", 3.1415926536: "i"},
        one,
    ),
    ("pi of a turn", turned(math.pi), turned, {3.1416: "w", 3.141593: "w"}, one),
    ("divisor of a variance", lambda x: x.var(-1), variance, {0.0: "w", 1.01: "w"}, one),
    ("divisor of a variance of many", lambda x: x.var(-1), variance, {0.0: "w"}, _long),
    ("divisor of a mean of many", lambda x: x.mean(-1), mean_of, {4095.0: "w", 4097.0: "w"}, _long),
    (
        "factor of dropout",
        inverted_dropout(0.9),
        inverted_dropout,
        {0.91: "w", 0.9001: "w", 1.0: "w"},
        _masked,
    ),
    (
        "share of label smoothing",
        lambda x, t: functional.cross_entropy(x, t, label_smoothing=0.1),
        smoothed,
        {0.11: "w", 0.1001: "w"},
        _picked,
    ),
    ("beta of a huber loss", functional.huber_loss, huber, {1.1: "w", 1.001: "w"}, _pairs),
    ("threshold of softplus", functional.softplus, softplus, {5.0: "w", 10.0: "w"}, one),
    ("offset", torch.sigmoid, biased, {1e-3: "w", 1e-6: "w", 1e-8: "w"}, one),
    ("terms of exp", torch.exp, exp_terms, {3.0: "w", 4.0: "w", 5.0: "w"}, one),
    (
        "coefficient of exp",
        torch.exp,
        exp_coefficient,
        {0.1667: "w", 0.16667: "w"},
        one,
    ),
    ("terms of log", torch.log, log_terms, {3.0: "w", 5.0: "w"}, positive),
    ("argument of tanh", torch.tanh, tanh_factor, {1.001: "w", 1.000001: "w"}, one),
    (
        "limit of tanh",
        torch.tanh,
        tanh_saturated,
        {3.0: "w", 5.0: "w"},
        lambda: [normal(8, 32) / 2],
    ),
    ("steps of Newton", torch.reciprocal, newton, {1.0: "w", 2.0: "w"}, positive),
    ("coefficient of erf", torch.erf, erf_of_seven, {1.061405429: "w", 1.0614: "w"}, one),
]
IN_MODULES = {
    "eps of a layer norm": (1e-6, 1.1e-5),
    "eps of an rms norm": (1e-5,),
    "slope of a leaky relu": (0.010001,),
    "coefficient of gelu (tanh)": (0.0447, 0.04471),
    "root of gelu": (0.70711, 0.707107),
    "temperature": (0.70001,),
    "offset": (1e-6,),
    "terms of exp": (4.0,),
    "limit of tanh": (5.0,),
}
COMPILED = {
    "eps of a layer norm": (1e-6,),
    "coefficient of gelu (tanh)": (0.0447,),
    "root of gelu": (0.70711,),
}
IN_BFLOAT16 = {
    "eps of a layer norm": {1e-3: "w", 1e-6: "w"},
    "slope of a leaky relu": {0.011: "w", 0.0101: "w"},
    "coefficient of gelu (tanh)": {0.04: "w", 0.0447151: "i"},
    "root of gelu": {0.7: "w", 0.707107: "i"},
    "temperature": {0.71: "w", 0.70001: "i"},
    "terms of exp": {2.0: "w", 5.0: "i"},
    "offset": {1e-3: "w"},
}
LABELS: dict[str, Label] = {"w": "wrong parameter", "i": "invisible"}


def programs() -> list[Program]:
    """All of them."""
    found = []
    for name, right, wrong, numbers, inputs in ROWS:
        for number, label in numbers.items():
            said, pair = f"{name}: {number:.10g}", (right, wrong(number), inputs)
            found.append(Program(said, LABELS[label], *pair))
            if number in IN_MODULES.get(name, ()):
                found.append(Program(said, LABELS[label], *pair, form="module"))
            if number in COMPILED.get(name, ()):
                found.append(Program(said, LABELS[label], *pair, form="compiled"))
        for number, label in IN_BFLOAT16.get(name, {}).items():
            kernel = in_float32(wrong(number))
            said = f"{name}: {number:.10g}"
            found.append(Program(said, LABELS[label], right, kernel, inputs, dtype=torch.bfloat16))
    return found
