"""Approximations and rewrites whose error is that of float32."""

from __future__ import annotations

import math

import torch
from benchmarks.approximating.programs import Function, Program, in_float32, normal, one, positive
from torch import Tensor
from torch.nn import functional

LN2_HIGH, LN2_LOW = 0.693359375, -2.1219444005469057e-4
LOG2E = math.log2(math.e)


def horner(x: Tensor, coefficients: list[float]) -> Tensor:
    """A polynomial; the coefficient of the highest power comes first."""
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def magnitude(x: Tensor) -> Tensor:
    """The absolute value, with a slope at zero."""
    return torch.where(x < 0, -x, x)


def signed(value: Tensor, like: Tensor) -> Tensor:
    """With the sign of another."""
    return torch.where(like < 0, -value, value)


def within_range(function: Function, otherwise: Function) -> Function:
    """A function of normal numbers; zero, infinity and denormal numbers are left to torch's."""

    def kernel(x: Tensor) -> Tensor:
        size = x.abs()
        usual = (size > 2e-38) & (size < 2e37)
        return torch.where(usual, function(torch.where(usual, x, 1.0)), otherwise(x))

    return kernel


def _reduced(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clamp(-104.0, 89.0)
    k = torch.round(x * LOG2E)
    return k, x - k * LN2_HIGH - k * LN2_LOW


def _scaled(x: Tensor, k: Tensor) -> Tensor:
    half = torch.floor(k / 2)
    return x * torch.exp2(half) * torch.exp2(k - half)


def exp_taylor(x: Tensor) -> Tensor:
    """By nine terms after range reduction."""
    k, r = _reduced(x)
    return _scaled(horner(r, [1 / math.factorial(n) for n in range(8, -1, -1)]), k)


def exp_pade(x: Tensor) -> Tensor:
    """By a rational function of degree 4."""
    k, r = _reduced(x)
    above = [1 / 1680, 1 / 84, 3 / 28, 1 / 2, 1.0]
    below = [c if n % 2 == 0 else -c for n, c in zip(range(4, -1, -1), above, strict=True)]
    return _scaled(horner(r, above) / horner(r, below), k)


def exp_by_table(x: Tensor) -> Tensor:
    """By a table of 32 powers and five terms."""
    x = x.clamp(-104.0, 89.0)
    k = torch.round(x * (32 * LOG2E))
    r = x - k * (LN2_HIGH / 32) - k * (LN2_LOW / 32)
    whole = torch.floor(k / 32)
    table = torch.exp2(torch.arange(32, dtype=torch.float64) / 32).to(x.dtype)
    power = table[(k - 32 * whole).long()]
    return _scaled(power * horner(r, [1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0]), whole)


def _mantissa(x: Tensor) -> tuple[Tensor, Tensor]:
    m, e = torch.frexp(x)
    small = m < math.sqrt(0.5)
    return torch.where(small, 2 * m, m), e.to(x.dtype) - small.to(x.dtype)


def log_atanh(x: Tensor) -> Tensor:
    """By the series of atanh."""
    m, e = _mantissa(x)
    s = (m - 1) / (m + 1)
    odd = horner(s * s, [2 / n for n in range(13, 0, -2)])
    return s * odd + e * math.log(2)


def log1p_kahan(x: Tensor) -> Tensor:
    """Kahan's log1p."""
    u = 1 + x
    return torch.where(u == 1, x, torch.log(u) * (x / (u - 1)))


def expm1_series(x: Tensor) -> Tensor:
    """A series for small arguments, exp otherwise."""
    near = x.clamp(-0.5, 0.5)
    series = near * horner(near, [1 / math.factorial(n) for n in range(11, 0, -1)])
    return torch.where(x.abs() < 0.5, series, torch.exp(x) - 1)


def tanh_rational(x: Tensor) -> Tensor:
    """Eigen's tanh for float32."""
    x = x.clamp(-9.0, 9.0)
    y = x * x
    above = [
        -2.76076847742355e-16,
        2.00018790482477e-13,
        -8.60467152213735e-11,
        5.12229709037114e-08,
        1.48572235717979e-05,
        6.37261928875436e-04,
        4.89352455891786e-03,
    ]
    below = [1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03]
    return x * horner(y, above) / horner(y, below)


def tanh_expm1(x: Tensor) -> Tensor:
    """By expm1."""
    t = torch.expm1(-2 * magnitude(x))
    return signed(-t / (t + 2), x)


def tanh_by_exp(x: Tensor) -> Tensor:
    """By a polynomial exp for large arguments, a series for small ones."""
    small = x.clamp(-0.55, 0.55)
    y = small * small
    series = [
        -1.4558343870513183e-3,
        3.592128036572481e-3,
        -8.863235529902197e-3,
        2.1869488536155203e-2,
        -5.396825396825397e-2,
        2 / 15,
        -1 / 3,
        1.0,
    ]
    u = exp_taylor(-2 * x.abs())
    large = signed((1 - u) / (1 + u), x)
    return torch.where(x.abs() < 0.3, small * horner(y, series), large)


def sigmoid_exp2(x: Tensor) -> Tensor:
    """By exp2 of two thirds of a product."""
    return 1 / (1 + torch.exp2(-x * LOG2E))


def sigmoid_polynomial(x: Tensor) -> Tensor:
    """By a polynomial exp that never overflows."""
    z = exp_taylor(-magnitude(x))
    return torch.where(x >= 0, 1 / (1 + z), z / (1 + z))


def sigmoid_by_tanh(x: Tensor) -> Tensor:
    """By tanh of half."""
    return 0.5 + 0.5 * torch.tanh(0.5 * x)


def softplus_log1p(x: Tensor) -> Tensor:
    """Without torch's threshold of 20."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-magnitude(x)))


def bce(x: Tensor, z: Tensor) -> Tensor:
    """The loss by log1p."""
    return (x.clamp(min=0) - x * z + torch.log1p(torch.exp(-magnitude(x)))).mean()


def bce_of_softplus(x: Tensor, z: Tensor) -> Tensor:
    """The loss by two softplus."""
    return (z * functional.softplus(-x) + (1 - z) * functional.softplus(x)).mean()


_STEP, _LAST = 1 / 512, 9.5


def erf_table(x: Tensor) -> Tensor:
    """By a table of values and slopes, with four terms around the nearest entry."""
    at = torch.arange(int(_LAST / _STEP) + 1, dtype=torch.float64) * _STEP
    values, slopes = torch.erf(at), 1.1283791670955126 * torch.exp(-at * at)
    size = magnitude(x).clamp(max=_LAST)
    place = torch.round(size / _STEP).long()
    a = at.to(x.dtype)[place]
    d = size - a
    terms = 1 + d * (-a + d * ((2 * a * a - 1) / 3 + d * (3 * a - 2 * a * a * a) / 6))
    return signed(values.to(x.dtype)[place] + slopes.to(x.dtype)[place] * d * terms, x)


def erf_series(x: Tensor) -> Tensor:
    """A series for small arguments, erfc for large ones."""
    near = x.clamp(-1.0, 1.0)
    y = near * near
    terms = [(-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(11, -1, -1)]
    series = 1.1283791670955126 * near * horner(y, terms)
    return torch.where(x.abs() < 1, series, signed(1 - torch.erfc(x.abs()), x))


def gelu_table(x: Tensor) -> Tensor:
    """Gelu by the series of erf."""
    return 0.5 * x * (1 + erf_series(x * math.sqrt(0.5)))


def gelu_by_erfc(x: Tensor) -> Tensor:
    """Gelu by erfc, which is more accurate than torch's on the left."""
    return 0.5 * x * torch.erfc(-x * math.sqrt(0.5))


def gelu_by_sigmoid(x: Tensor) -> Tensor:
    """The tanh form by a sigmoid."""
    return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


def gelu_by_tanh_rational(x: Tensor) -> Tensor:
    """The tanh form by a rational tanh."""
    return 0.5 * x * (1 + tanh_rational(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def gelu_tanh(x: Tensor) -> Tensor:
    """Torch's tanh form."""
    return functional.gelu(x, approximate="tanh")


def silu_exp2(x: Tensor) -> Tensor:
    """By exp2."""
    return x / (1 + torch.exp2(-x * LOG2E))


def mish_rational(x: Tensor) -> Tensor:
    """By one exp."""
    u = torch.exp(x.clamp(max=20.0))
    n = u * (u + 2)
    return torch.where(x > 20, x, x * (n / (n + 2)))


def _rsqrt_of_mantissa(m: Tensor) -> Tensor:
    y = 1.79 - 0.8 * m
    for _ in range(4):
        y = y * (1.5 - 0.5 * m * y * y)
    return y


def rsqrt_newton(x: Tensor) -> Tensor:
    """By four steps of Newton's on the mantissa."""
    m, e = torch.frexp(x)
    odd = e % 2 != 0
    m = torch.where(odd, m / 2, m)
    e = torch.where(odd, e + 1, e)
    return _rsqrt_of_mantissa(m * 1.0) * torch.exp2(-(e / 2).to(x.dtype))


def sqrt_newton(x: Tensor) -> Tensor:
    """By a reciprocal root."""
    return x * rsqrt_newton(x)


def reciprocal_newton(x: Tensor) -> Tensor:
    """By four steps of Newton's on the mantissa."""
    m, e = torch.frexp(x)
    size = m.abs()
    y = 48 / 17 - 32 / 17 * size
    for _ in range(4):
        y = y * (2 - size * y)
    return torch.sign(x) * _scaled(y, -e.to(x.dtype))


def rms_norm_newton(x: Tensor) -> Tensor:
    """By Newton's reciprocal root."""
    root = within_range(rsqrt_newton, torch.rsqrt)
    return x * root(x.square().mean(-1, keepdim=True) + 1e-6)


def rms_norm(x: Tensor) -> Tensor:
    """The reference."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _around_pi(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.double()
    k = torch.round(wide / math.pi)
    r = (wide - k * math.pi - k * 1.2246467991473532e-16).to(x.dtype)
    return r, (1 - 2 * (k % 2)).to(x.dtype)


def sin_series(x: Tensor) -> Tensor:
    """Range reduction in float64, then seven terms."""
    r, sign = _around_pi(x)
    terms = [(-1) ** n / math.factorial(2 * n + 1) for n in range(8, -1, -1)]
    return sign * r * horner(r * r, terms)


def sin_of_small(x: Tensor) -> Tensor:
    """No range reduction: its arguments are bounded."""
    return horner(x * x, [(-1) ** n / math.factorial(2 * n + 1) for n in range(6, -1, -1)]) * x


def atan_reduced(x: Tensor) -> Tensor:
    """By the reciprocal for large arguments, and a shift by an eighth of a turn."""
    size = magnitude(x)
    inverted = size > 1
    y = torch.where(inverted, 1 / size.clamp(min=1.0), size)
    shifted = y > math.tan(math.pi / 8)
    z = torch.where(shifted, (y - 1) / (y + 1), y)
    series = z * horner(z * z, [(-1) ** n / (2 * n + 1) for n in range(10, -1, -1)])
    series = series + shifted.to(x.dtype) * (math.pi / 4)
    return signed(torch.where(inverted, math.pi / 2 - series, series), x)


def variance_welford(x: Tensor) -> Tensor:
    """One element after another."""
    mean, total = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
    for n in range(x.shape[1]):
        step = x[:, n] - mean
        mean = mean + step / (n + 1)
        total = total + step * (x[:, n] - mean)
    return total / (x.shape[1] - 1)


def variance_two_passes(x: Tensor) -> Tensor:
    """The mean first."""
    return (x - x.mean(-1, keepdim=True)).square().sum(-1) / (x.shape[-1] - 1)


def softmax_online(x: Tensor) -> Tensor:
    """In pieces, with a running maximum."""
    top, total = x.new_full((x.shape[0], 1), -torch.inf), x.new_zeros((x.shape[0], 1))
    for piece in x.split(8, dim=-1):
        higher = torch.maximum(top, piece.amax(-1, keepdim=True))
        total = total * torch.exp(top - higher) + torch.exp(piece - higher).sum(-1, keepdim=True)
        top = higher
    return torch.exp(x - top) / total


def softmax_exp2(x: Tensor) -> Tensor:
    """By exp2."""
    e = torch.exp2((x - x.amax(-1, keepdim=True)) * LOG2E)
    return e / e.sum(-1, keepdim=True)


def softmax_polynomial(x: Tensor) -> Tensor:
    """By a polynomial exp."""
    e = exp_taylor(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def logsumexp_polynomial(x: Tensor) -> Tensor:
    """By a polynomial exp."""
    top = x.amax(-1, keepdim=True)
    return (top + torch.log(exp_taylor(x - top).sum(-1, keepdim=True))).squeeze(-1)


def sum_kahan(x: Tensor) -> Tensor:
    """Compensated."""
    total, lost = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
    for n in range(x.shape[1]):
        y = x[:, n] - lost
        t = total + y
        total, lost = t, (t - total) - y
    return total


def convolve_winograd(x: Tensor, w: Tensor) -> Tensor:
    """F(2, 3) along the last axis."""
    d = x.unfold(-1, 4, 2)
    g0, g1, g2 = w[:, :, 0], w[:, :, 1], w[:, :, 2]
    u = torch.stack([g0, (g0 + g1 + g2) / 2, (g0 - g1 + g2) / 2, g2], -1)
    v = torch.stack(
        [
            d[..., 0] - d[..., 2],
            d[..., 1] + d[..., 2],
            d[..., 2] - d[..., 1],
            d[..., 1] - d[..., 3],
        ],
        -1,
    )
    m = torch.einsum("oiq,bitq->botq", u, v)
    left, right = m[..., 0] + m[..., 1] + m[..., 2], m[..., 1] - m[..., 2] - m[..., 3]
    return torch.stack([left, right], -1).flatten(-2)


def convolve_fft(x: Tensor, w: Tensor) -> Tensor:
    """By the Fourier transform."""
    n = x.shape[-1]
    product = torch.fft.rfft(x).unsqueeze(1) * torch.fft.rfft(w, n=n).conj().unsqueeze(0)
    return torch.fft.irfft(product.sum(2), n=n)[..., : n - w.shape[-1] + 1]


def _images() -> list[Tensor]:
    return [normal(2, 3, 18), normal(4, 3, 3, seed=1)]


def _labelled() -> list[Tensor]:
    return [normal(8, 32) * 4, (normal(8, 32, seed=1) > 0).float()]


def _picked() -> list[Tensor]:
    return [normal(8, 32), torch.arange(8) * 3]


def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    """By a polynomial exp."""
    return (logsumexp_polynomial(x) - x.gather(1, target[:, None])[:, 0]).mean()


def cubic_root(x: Tensor) -> Tensor:
    """The reference."""
    return x ** (1 / 3)


def cube_root(x: Tensor) -> Tensor:
    """By exp2, then Newton's steps."""
    y = torch.exp2(torch.log2(x) / 3)
    for _ in range(2):
        y = y - (y * y * y - x) / (3 * y * y)
    return y


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """By softplus, with its threshold."""
    return torch.maximum(a, b) + functional.softplus(-(a - b).abs())


_TENTH = torch.tensor(0.1)
_SCALE = torch.tensor(1 / math.sqrt(80))
_GELU = torch.tensor(math.sqrt(2 / math.pi))


def _stored(constant: Tensor, x: Tensor) -> Tensor:
    return constant.to(x.dtype)


PAIRS: dict[str, tuple[Function, Function, Function]] = {
    "exp by nine terms": (torch.exp, exp_taylor, one),
    "exp by a rational function": (torch.exp, exp_pade, one),
    "exp by a table": (torch.exp, exp_by_table, one),
    "log by atanh": (torch.log, within_range(log_atanh, torch.log), positive),
    "log by log2": (torch.log, lambda x: torch.log2(x) * math.log(2), positive),
    "log10 by log": (
        torch.log10,
        within_range(lambda x: log_atanh(x) * (1 / math.log(10)), torch.log10),
        positive,
    ),
    "log1p by Kahan": (torch.log1p, log1p_kahan, positive),
    "expm1 by a series": (torch.expm1, expm1_series, one),
    "tanh by a rational function": (torch.tanh, tanh_rational, one),
    "tanh by expm1": (torch.tanh, tanh_expm1, one),
    "tanh by a polynomial exp": (torch.tanh, tanh_by_exp, one),
    "sigmoid by exp2": (torch.sigmoid, sigmoid_exp2, one),
    "sigmoid by a polynomial exp": (torch.sigmoid, sigmoid_polynomial, one),
    "sigmoid by tanh": (torch.sigmoid, sigmoid_by_tanh, one),
    "softplus by log1p": (functional.softplus, softplus_log1p, one),
    "loss by log1p": (functional.binary_cross_entropy_with_logits, bce, _labelled),
    "loss by two softplus": (
        functional.binary_cross_entropy_with_logits,
        bce_of_softplus,
        _labelled,
    ),
    "erf by a table": (torch.erf, erf_table, one),
    "erf by a series": (torch.erf, erf_series, one),
    "gelu by a series": (functional.gelu, gelu_table, one),
    "gelu by erfc": (functional.gelu, gelu_by_erfc, one),
    "gelu (tanh) by a sigmoid": (gelu_tanh, gelu_by_sigmoid, one),
    "gelu (tanh) by a rational tanh": (gelu_tanh, gelu_by_tanh_rational, one),
    "silu by exp2": (functional.silu, silu_exp2, one),
    "mish by one exp": (functional.mish, mish_rational, one),
    "rsqrt by Newton": (torch.rsqrt, within_range(rsqrt_newton, torch.rsqrt), positive),
    "sqrt by Newton": (torch.sqrt, within_range(sqrt_newton, torch.sqrt), positive),
    "reciprocal by Newton": (
        torch.reciprocal,
        within_range(reciprocal_newton, torch.reciprocal),
        positive,
    ),
    "rms norm by Newton": (rms_norm, rms_norm_newton, one),
    "sin by a series": (torch.sin, sin_series, one),
    "sin of a bounded number": (
        lambda x: torch.sin(torch.tanh(x)),
        lambda x: sin_of_small(torch.tanh(x)),
        one,
    ),
    "atan by a series": (torch.atan, atan_reduced, one),
    "variance by Welford": (lambda x: x.var(-1), variance_welford, one),
    "variance in two passes": (lambda x: x.var(-1), variance_two_passes, one),
    "softmax online": (lambda x: x.softmax(-1), softmax_online, one),
    "softmax by exp2": (lambda x: x.softmax(-1), softmax_exp2, one),
    "softmax by a polynomial exp": (lambda x: x.softmax(-1), softmax_polynomial, one),
    "logsumexp by a polynomial exp": (lambda x: x.logsumexp(-1), logsumexp_polynomial, one),
    "cross entropy by a polynomial exp": (functional.cross_entropy, cross_entropy, _picked),
    "sum by Kahan": (lambda x: x.sum(-1), sum_kahan, one),
    "convolution by Winograd": (functional.conv1d, convolve_winograd, _images),
    "convolution by FFT": (functional.conv1d, convolve_fft, _images),
    "cube root by Newton": (cubic_root, within_range(cube_root, cubic_root), positive),
    "logaddexp by softplus": (torch.logaddexp, logaddexp, lambda: [*one(), normal(8, 32, seed=1)]),
    "a tenth stored in float32": (lambda x: x * 0.1, lambda x: x * _stored(_TENTH, x), one),
    "a root's reciprocal stored in float32": (
        lambda x: (x / math.sqrt(80)).softmax(-1),
        lambda x: (x * _stored(_SCALE, x)).softmax(-1),
        one,
    ),
    "gelu (tanh) with its constant in float32": (
        gelu_tanh,
        lambda x: 0.5 * x * (1 + torch.tanh(_stored(_GELU, x) * (x + 0.044715 * x**3))),
        one,
    ),
    "mean by the reciprocal": (lambda x: x.mean(-1), lambda x: x.sum(-1) * (1 / 32), one),
}
IN_MODULES = (
    "exp by nine terms",
    "tanh by a rational function",
    "sigmoid by a polynomial exp",
    "gelu by a series",
    "gelu (tanh) by a rational tanh",
    "softplus by log1p",
    "rms norm by Newton",
    "softmax by a polynomial exp",
)
COMPILED = (
    "tanh by a rational function",
    "gelu by a series",
    "softplus by log1p",
    "softmax by a polynomial exp",
)
IN_BFLOAT16 = (
    "exp by nine terms",
    "tanh by a rational function",
    "gelu by a series",
    "sigmoid by a polynomial exp",
    "softmax by a polynomial exp",
    "rsqrt by Newton",
)


def programs() -> list[Program]:
    """All of them."""
    found = [Program(name, "approximation", *pair) for name, pair in PAIRS.items()]
    found += [Program(n, "approximation", *PAIRS[n], form="module") for n in IN_MODULES]
    found += [Program(n, "approximation", *PAIRS[n], form="compiled") for n in COMPILED]
    for name in IN_BFLOAT16:
        reference, candidate, inputs = PAIRS[name]
        kernel = in_float32(candidate)
        found.append(
            Program(name, "approximation", reference, kernel, inputs, dtype=torch.bfloat16)
        )
    return found
