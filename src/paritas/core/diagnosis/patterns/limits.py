"""Beyond the limits of a format: NaN and infinity, clipped values, wrapped integers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import msgspec
import torch

from paritas.core.diagnosis.case import Case, Extent, first_supported, weigh, widen, wrong_block
from paritas.core.diagnosis.patterns.fits import weigh_fit
from paritas.core.numerics.criterion import MAX_Z
from paritas.core.results.findings import Pattern, PatternKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


# --- NaN and infinity -----------------------------------------------------------------------------

# Numbers beyond these round to infinity.
_OVERFLOWS = {"float8_e5m2": 61440.0, "float16": 65520.0, "float32": 3.4028235677973366e38}
_MOST = 0.98
_HALF = 0.5
_NEAR = 256.0


def propose_nonfinite(case: Case) -> list[Pattern]:
    """`overflow` and `nonfinite`."""
    wrong = case.wrong
    if not bool(wrong.any()) or case.is_exact or case.given.is_complex():
        return []
    infinite = wrong & torch.isinf(case.given)
    new_nans = wrong & torch.isnan(case.given)
    swallowed = wrong & torch.isfinite(case.given) & ~torch.isfinite(case.right)
    patterns = _overflow(case) if bool((infinite & torch.isfinite(case.right)).any()) else []
    for mask, name in ((new_nans, "NaN"), (infinite, "an infinity"), (swallowed, "")):
        share = float(mask.sum()) / float(wrong.sum())
        if share < _HALF or (patterns and name == "an infinity"):
            continue
        patterns.append(
            _describe_swallowed(case, mask, share)
            if not name
            else _became_nonfinite(case, mask, name, share)
        )
    return patterns


def _overflow(case: Case) -> list[Pattern]:
    """Infinite where it should be beyond a format's range, and only there.

    What is within the range may be wrong in its own way: a format that is too narrow rounds, too.
    """
    infinite = torch.isinf(case.given) & torch.isfinite(case.right)
    share = float((infinite & case.wrong).sum()) / float(case.wrong.sum())
    own_format = str(case.candidate.dtype).removeprefix("torch.")
    for name, limit in sorted(_OVERFLOWS.items(), key=lambda item: item[0] != own_format):
        beyond = case.right.abs() > limit
        if name != own_format and not _is_tried(case.right.abs(), limit):
            continue
        infinity = torch.full_like(case.right, torch.inf)
        prediction = torch.where(beyond, torch.copysign(infinity, case.right), case.given)
        agreed = float((infinite & (case.given == prediction) & beyond).sum())
        if agreed < _MOST * float(infinite.sum()) or agreed < _MOST * float(beyond.sum()):
            continue
        count = int(infinite.sum())
        evidence: dict[str, float | str] = {
            "format": name,
            "limit": limit,
            "elements": float(count),
            "share of the wrong": share,
        }
        sentence = f"overflow: values too large for {name} become infinity"
        certainty = (0.99 if share > _MOST else 0.9) * (1 - 2.0 ** -(count + 3))
        return [_overflow_pattern(certainty, sentence, evidence)]
    return _scaled_overflow(case, infinite, share)


# The evidence, in bits, that the size of a value decides whether it becomes infinite.
_ENOUGH_BITS = 10.0


def _scaled_overflow(case: Case, infinite: Tensor, share: float) -> list[Pattern]:
    """Infinite beyond a size, and only there: it was multiplied before, by an unknown factor."""
    size, told = case.right.abs(), torch.isfinite(case.right) & ~torch.isnan(case.given)
    count, total = int(infinite.sum()), int(told.sum())
    if bool((told != torch.isfinite(case.right)).any()) or count == total:
        return []
    least, largest = float(size[infinite].min()), float(size[told & ~infinite].max())
    signs = torch.sign(case.given) == torch.sign(case.right)
    # A gap of many powers of ten tells of no limit, as in `_is_tried`.
    if not least / _NEAR < largest < least or not bool(signs[infinite].all()):
        return []
    # How unlikely it is that the largest values are meant, each with its sign, by chance.
    choices = math.lgamma(total + 1) - math.lgamma(count + 1) - math.lgamma(total - count + 1)
    bits = choices / math.log(2) + count
    if bits < _ENOUGH_BITS:
        return []
    sentence = f"overflow: values beyond {least:.3g} become infinity, and no others"
    evidence: dict[str, float | str] = {
        "limit": least,
        "elements": float(count),
        "share of the wrong": share,
    }
    return [_overflow_pattern(0.97 * (1 - 2.0**-bits), sentence, evidence)]


def _overflow_pattern(
    confidence: float, sentence: str, evidence: dict[str, float | str]
) -> Pattern:
    kind = PatternKind.OVERFLOW
    return Pattern(kind=kind, confidence=confidence, sentence=sentence, evidence=evidence)


def _is_tried(sizes: Tensor, limit: float) -> bool:
    """Whether some value is near a format's limit: a gap of many powers of ten tells of no limit.

    The dtype's own limit needs no such evidence.
    """
    return bool(((sizes > limit / _NEAR) & (sizes < limit * _NEAR)).any())


def _became_nonfinite(case: Case, mask: Tensor, name: str, share: float) -> Pattern:
    """Values that became NaN or infinite, with the cause if the inputs show one."""
    count = int(mask.sum())
    evidence: dict[str, float | str] = {"elements": float(count), "share of the wrong": share}
    cause = _find_cause(case, mask)
    if cause is None:
        sentence = _name_exchange(name, case.right[mask])
        if bool((case.right[mask] == 0).all()):
            sentence += ", everywhere 0"
        confidence = 0.9
    else:
        sentence = f"{name} {cause.sentence}"
        evidence["cause"] = cause.name
        # Many conditions hold for few elements by chance.
        confidence = (0.97 if cause.is_specific else 0.9) * (1 - 2.0 ** -(count + 3))
    return Pattern(
        kind=PatternKind.NONFINITE,
        confidence=confidence * share,
        sentence=sentence,
        evidence=evidence,
    )


def _name_exchange(name: str, right: Tensor) -> str:
    if bool(torch.isfinite(right).all()):
        return f"{name} instead of a number"
    if bool(torch.isnan(right).all()):
        return f"{name} instead of NaN"
    if not bool(torch.isinf(right).all()):
        return f"{name} instead of other values"
    return f"{name} instead of {'an infinity' if name == 'NaN' else 'one of the other sign'}"


def _find_cause(case: Case, mask: Tensor) -> NonfiniteCause | None:
    """The first condition that holds where the result is not finite, and nowhere else."""
    count, others = int(mask.sum()), int((~mask).sum())
    for cause in nan_causes(case):
        here = int((cause.mask & mask).sum())
        elsewhere = int((cause.mask & ~mask & torch.isfinite(case.given)).sum())
        # A condition that holds everywhere says nothing.
        if here >= _MOST * count and elsewhere <= (1 - _MOST) * min(count, others) and others:
            return cause
    return None


def _describe_swallowed(case: Case, mask: Tensor, share: float) -> Pattern:
    right, candidate = case.right[mask], case.given[mask]
    lost = "NaN" if bool(torch.isnan(right).all()) else "infinity"
    if not (bool(torch.isnan(right).all()) or bool(torch.isinf(right).all())):
        lost = "NaN or infinity"
    value = float(candidate[0])
    constant = bool((candidate == value).all())
    sentence = f"{value:.6g} instead of {lost}" if constant else f"a number instead of {lost}"
    evidence: dict[str, float | str] = {
        "elements": float(mask.sum()),
        "share of the wrong": share,
        "cause": f"{lost} swallowed",
    }
    return Pattern(
        kind=PatternKind.NONFINITE, confidence=0.97 * share, sentence=sentence, evidence=evidence
    )


# --- Conditions on the inputs that give NaN or infinity -------------------------------------------

# Which functions of torch these are: the groups of `core/operators` have the names of aten.
_ROWS = frozenset(
    """
    softmax log_softmax logsumexp scaled_dot_product_attention layer_norm
    native_layer_norm rms_norm normalize norm linalg_vector_norm var std mean sum nanmean
    cosine_similarity group_norm batch_norm
    """.split()  # noqa: SIM905  (quoted names are harder to read)
)
_EXPONENTIALS = frozenset(
    """
    softmax log_softmax logsumexp exp sigmoid silu softplus tanh cosh sinh
    logaddexp gelu mish log_sigmoid elu expm1 scaled_dot_product_attention
    """.split()  # noqa: SIM905
)
_ROOTS = {
    "sqrt": "the square root",
    "rsqrt": "the root",
    "pow": "a power",
    **dict.fromkeys(("log", "log2", "log10", "log1p", "xlogy"), "the logarithm"),
}
_LARGEST = (("float16", 65504.0), ("float32", 3.4e38), ("float64", 1.79e308))


def nan_causes(case: Case) -> Iterator[NonfiniteCause]:
    """All conditions that hold somewhere, the most specific first."""
    causes = [*_pair_causes(case), *_element_causes(case), *_row_causes(case), *_sum_causes(case)]
    for cause in sorted(causes, key=lambda cause: not cause.is_specific):
        if bool(cause.mask.any()):
            yield cause


@dataclasses.dataclass(frozen=True)
class NonfiniteCause:
    """A condition that gives NaN or infinity.

    Attributes:
        name: in short, `0 * inf`.
        sentence: continues after "NaN ".
        mask: where it holds, in the shape of the result.
        is_specific: whether it depends on the operator, not only on the inputs.
    """

    name: str
    sentence: str
    mask: Tensor
    is_specific: bool


def _elementwise(case: Case) -> list[tuple[int, Tensor]]:
    """The inputs that broadcast to the result."""
    return [
        (position, widen(tensor).expand(case.shape))
        for position, tensor in enumerate(case.context.inputs)
        if _broadcasts_to(tensor, case.shape) and not tensor.is_complex()
    ]


def _pair_causes(case: Case) -> Iterator[NonfiniteCause]:
    inputs, name = _elementwise(case), case.context.operator_name
    for first, a in inputs:
        for second, b in inputs:
            if first == second:
                continue
            both = f"of inputs {first} and {second}"
            zero_inf = (a == 0) & torch.isinf(b)
            yield NonfiniteCause(
                "0 * inf", f"from 0 * inf {both}", zero_inf, name in {"mul", "where", ""}
            )
            if first < second:
                infs = torch.isinf(a) & torch.isinf(b)
                is_specific = name in {"add", "sub", "rsub"}
                yield NonfiniteCause("inf - inf", f"from inf - inf {both}", infs, is_specific)
                zeros = (a == 0) & (b == 0)
                yield NonfiniteCause("0 / 0", f"from 0 / 0 {both}", zeros, name in {"div", "where"})


def _element_causes(case: Case) -> Iterator[NonfiniteCause]:
    name = case.context.operator_name
    for position, x in _elementwise(case):
        yield NonfiniteCause(
            "NaN of an input", f"that came in with input {position}", torch.isnan(x), True
        )
        if name in _ROOTS:
            what = f"from {_ROOTS[name]} of negative numbers in input {position}"
            yield NonfiniteCause("root or log of a negative", what, x < 0, True)
        if name in _EXPONENTIALS - _ROWS:
            yield from _overflow_causes(f"input {position}", x)
        zero = f"where input {position} is 0: 0 / 0, 0 * inf or the logarithm of 0"
        yield NonfiniteCause(
            "zero", zero, x == 0, name in {"div", "log", "xlogy", "reciprocal", "rsqrt"}
        )
        infinite = f"where input {position} is infinite: inf - inf or 0 * inf"
        yield NonfiniteCause("inf - inf or 0 * inf", infinite, torch.isinf(x), False)
        negative = f"where input {position} is negative, as from its root or logarithm"
        if bool((x >= 0).any()):  # if all are, nothing shows that it is because of them
            yield NonfiniteCause("negative", negative, x < 0, False)


def _overflow_causes(what: str, x: Tensor) -> Iterator[NonfiniteCause]:
    """exp(x) overflows, and inf / inf follows."""
    for name, largest in _LARGEST:
        limit = math.log(largest)
        mask = (x > limit) & torch.isfinite(x)
        text = f"from inf / inf: exp of {what} is too large for {name} (over {limit:.4g})"
        yield NonfiniteCause("inf / inf", text, mask, True)
        twice = f"from inf / inf: exp of twice {what} is too large for {name}"
        yield NonfiniteCause("inf / inf", twice, (2 * x.abs() > limit) & torch.isfinite(x), True)


def _row_causes(case: Case) -> Iterator[NonfiniteCause]:
    name = case.context.operator_name
    if not case.context.inputs or name not in _ROWS:
        return
    x = case.context.inputs[0].detach().cpu()
    dim = case.context.arguments.get("dim", -1)
    dim = dim[0] if isinstance(dim, list | tuple) and dim else dim
    if x.is_complex() or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        return
    x = x.double()
    rows = [
        ("-inf - -inf", "from -inf - -inf: the whole row is masked", torch.isneginf(x).all(dim)),
        ("0 / 0", "from 0 / 0: the whole row is 0", (x == 0).all(dim)),
        ("0 / 0", "from 0 / 0: the whole row has one value", x.amin(dim) == x.amax(dim)),
        ("inf - inf", "from inf - inf: infinity in the row", torch.isposinf(x).any(dim)),
        ("NaN of an input", "that came in with input 0", torch.isnan(x).any(dim)),
    ]
    if name in _EXPONENTIALS:
        large = _overflow_causes("the row's largest", x.amax(dim))
        rows += [(cause.name, cause.sentence, cause.mask) for cause in large]
    for short, text, mask in rows:
        for shaped in (mask.unsqueeze(dim), mask):
            if _broadcasts_to(shaped, case.shape):
                yield NonfiniteCause(short, text, shaped.expand(case.shape), True)
                break


def _sum_causes(case: Case) -> Iterator[NonfiniteCause]:
    """0 * inf and inf - inf among the terms of a matrix product."""
    if case.context.operator_name not in {"mm", "bmm", "matmul"} or len(case.context.inputs) != 2:  # noqa: PLR2004
        return
    a, b = map(widen, case.context.inputs)
    if a.dim() < 2 or b.dim() < 2:  # noqa: PLR2004
        return
    zero = _any_pair(torch.isinf(a), b == 0) | _any_pair(a == 0, torch.isinf(b))
    above = _any_pair(a == torch.inf, b > 0) | _any_pair(a == -torch.inf, b < 0)
    above |= _any_pair(a > 0, b == torch.inf) | _any_pair(a < 0, b == -torch.inf)
    below = _any_pair(a == torch.inf, b < 0) | _any_pair(a == -torch.inf, b > 0)
    below |= _any_pair(a < 0, b == torch.inf) | _any_pair(a > 0, b == -torch.inf)
    if tuple(zero.shape) == case.shape:
        yield NonfiniteCause(
            "0 * inf", "from 0 * inf among the products that are summed", zero, True
        )
        yield NonfiniteCause(
            "inf - inf", "from inf - inf among the terms of a sum", above & below, True
        )


def _any_pair(left: Tensor, right: Tensor) -> Tensor:
    return (left.float() @ right.float()) > 0


def _broadcasts_to(value: Tensor, shape: tuple[int, ...]) -> bool:
    try:
        return tuple(torch.broadcast_shapes(value.shape, shape)) == shape
    except RuntimeError:
        return False


# --- Clipped values -------------------------------------------------------------------------------

# The largest and smallest numbers of formats; of unsigned ones, 0 has other reasons.
_RANGES: dict[str, tuple[float, ...]] = {
    "int8": (127.0, -128.0),
    "int8 of a symmetric range": (127.0, -127.0),
    "uint8": (255.0,),
    "int16": (32767.0, -32768.0),
    "uint16": (65535.0,),
    "int32": (2.0**31 - 1, -(2.0**31)),
    "uint32": (2.0**32 - 1,),
    "float8_e4m3": (448.0, -448.0),
    "float8_e4m3fnuz": (240.0, -240.0),
    "float8_e5m2": (57344.0, -57344.0),
    "float16": (65504.0, -65504.0),
    "bfloat16": (torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).min),
    "float32": (torch.finfo(torch.float32).max, torch.finfo(torch.float32).min),
}
LIMITS: dict[float, str] = {}
for _name, _bounds in _RANGES.items():
    for _word, _bound in zip(("largest", "smallest"), _bounds, strict=False):
        LIMITS.setdefault(_bound, f"the {_word} {_name}")


def propose_clipping(case: Case) -> list[Pattern]:
    """`clipped`: values beyond a bound became the bound."""
    if case.is_boolean or case.right.is_complex() or not case.is_beyond_noise:
        return []
    if not _may_be_cut_off(case):
        return []
    patterns = _clipping_of_runs(case) or _clipping(case)
    block = wrong_block(case)
    if patterns or block.is_whole:
        return patterns
    return [
        msgspec.structs.replace(
            pattern, sentence=f"{pattern.sentence}, but only in a part of the result"
        )
        for pattern in _clipping(block.case)
    ]


def _clipping_of_runs(case: Case) -> list[Pattern]:
    """With other operands beside those of the program, which may show one bound, or no other."""
    cases = (case, *case.repeated, *case.lengthened)
    if len(cases) == 1:
        return []
    sides = zip(
        *((repeated_case.candidate, repeated_case.reference) for repeated_case in cases),
        strict=True,
    )
    candidate, reference = (torch.cat([tensor.flatten() for tensor in side]) for side in sides)
    return _clipping(Case(candidate, reference))


# Fewer values than this that went through a limit show none.
_FEWEST_INSIDE = 3


def _clipping(case: Case) -> list[Pattern]:
    high, low = _find_clip_bound(case, 1.0), _find_clip_bound(case, -1.0)
    if high == low:
        return []  # no bound, or one value for all that is wrong
    prediction = case.right.clamp(
        min=-math.inf if low is None else low, max=math.inf if high is None else high
    )
    bounds = [bound for bound in (low, high) if bound is not None]
    cut = case.right[case.wrong]
    if len(cut) > 1 and bool((cut == cut[0]).all()):
        return []  # one value for another: a constant, rather
    # What lies at a bound by itself did not go through.
    at_bound = torch.stack([case.right == bound for bound in bounds]).any(0)
    inside = (prediction == case.right) & ~case.wrong & ~at_bound
    if int(inside.sum()) < min(_FEWEST_INSIDE, case.reference.numel() // 4):
        return []  # nothing that went through: a constant, rather
    is_known = all(bound in LIMITS or bound in {0.0, 1.0, -1.0} for bound in bounds)
    weight = weigh(case, prediction, parameters=0.0 if is_known else len(bounds), cost=2.0)
    if weight is None or not weight.whole:
        return []
    named = {"lower bound": low, "upper bound": high}
    figures = {name: bound for name, bound in named.items() if bound is not None}
    return [weight.pattern(PatternKind.CLIPPED, _describe_bounds(low, high), figures)]


# Fewer slices that are shortened may have the same length by chance.
_FEWEST_SHORTENED = 3
# A length that is above the bound by this share is above it.
_LENGTHS_APART = 1e-3


def propose_limited_lengths(case: Case) -> list[Pattern]:
    """`clipped`: slices that are longer than a bound were shortened to it."""
    if case.is_exact or case.right.is_complex() or len(case.shape) < 2 or not case.is_finite:  # noqa: PLR2004
        return []
    last = len(case.shape) - 1
    around = tuple(dim for dim in range(last + 1) if dim != 0)
    ways = {"each row along the last axis": (last,), "each slice along axis 0": around}
    return first_supported(
        _limited_lengths(case, words, dims) for words, dims in ways.items() if case.is_beyond_noise
    )


def _limited_lengths(case: Case, words: str, dims: tuple[int, ...]) -> Pattern | None:
    right, candidate = (
        torch.linalg.vector_norm(tensor, dim=dims, keepdim=True)
        for tensor in (case.right, case.given)
    )
    shortened = case.wrong.any(dim=dims, keepdim=True)
    if int(shortened.sum()) < _FEWEST_SHORTENED:
        return None
    bound = float(candidate[shortened].median())
    longer, passes = right[shortened], right[~shortened]
    if float(longer.max()) <= float(longer.min()) * (1 + _LENGTHS_APART):
        return None  # of one length, a factor gives the same
    if not bound > 0 or not passes.numel() or float(passes.max()) > bound * (1 + _LENGTHS_APART):
        return None  # without slices that went through, each has a factor of its own
    prediction = case.right * (bound / right.clamp(min=bound))
    weight = weigh_fit(case, prediction, parameters=1, cost=2.0)
    sentence = f"{words} is limited to the length {bound:.6g}"
    return None if weight is None else weight.pattern(PatternKind.CLIPPED, sentence)


def _may_be_cut_off(case: Case) -> bool:
    some = case.given.reshape(-1)[case.some_wrong]
    ends = (some == some.amax()) | (some == some.amin()) | ~torch.isfinite(some)
    middle = some.median()
    return float((ends | (some == middle)).double().mean()) >= 1 - 2 * (1 - _MOST)


def _find_clip_bound(case: Case, side: float) -> float | None:
    """The bound at which values are clipped above (side 1) or below (-1)."""
    cut = case.wrong & (side * (case.right - case.given) > 0) & torch.isfinite(case.given)
    if not bool(cut.any()):
        return None
    values = case.given[cut]
    bound = float(values.median())
    if float((values == bound).double().mean()) < _MOST:
        return None
    # Nothing may be beyond a bound.
    beyond = side * (case.given - bound) > MAX_Z * case.unit * (0 if case.is_exact else 1)
    return None if float(beyond.double().mean()) > 1 - _MOST else bound


def _describe_bounds(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"clipped below {low:.7g} and above {high:.7g}{_name_bound(high)}"
    side, bound = ("above", high) if low is None else ("below", low)
    if bound == 0.0:
        kind = "negative" if side == "below" else "positive"
        return f"clipped at 0: {kind} values become zero"
    return f"clipped {side} {bound:.7g}{_name_bound(bound)}"


def _name_bound(bound: float | None) -> str:
    name = LIMITS.get(bound) if bound is not None else None
    return f", {name}" if name else ""


# --- Integers that wrapped around -----------------------------------------------------------------

_WIDTHS = (4, 8, 16, 32)


def propose_wrapped(case: Case) -> list[Pattern]:
    """`wrapped`: modulo a power of two, signed or not; also floats beyond a range."""
    if case.is_boolean or case.right.is_complex() or not case.is_beyond_noise:
        return []
    if len(case.right[case.wrong].unique()) < _FEWEST_WRAPPED:
        return []  # of one or two values, any other is the same modulo some range
    some = case.given.reshape(-1)[case.some_wrong]
    if not case.is_exact and not (_are_whole(some) and _are_different(some)):
        return _wrapped_levels(case) or _begun_below(case)
    # Floats were rounded to integers before.
    rounded = case.right if case.is_exact else case.right.round()
    for bits in _WIDTHS:
        for signed in (True, False):
            wrapped = _wrap(_as_int64(case, rounded), bits, signed=signed)
            weight = weigh(case, wrapped.double(), cost=3.0)
            if weight is None or not _shows_wrapping(case, rounded, wrapped.double()):
                continue
            name = f"{'' if signed else 'u'}int{bits}"
            sentence = f"wrapped around: the right value modulo 2^{bits}, as in {name}"
            evidence: dict[str, float | str] = {"bits": float(bits), "signed": str(signed).lower()}
            return [weight.pattern(PatternKind.WRAPPED, sentence, evidence)]
    return _begun_again(case)


def _begun_again(case: Case) -> list[Pattern]:
    """`wrapped`: whole numbers that begin again at 0 after any number, which is solved for."""
    if not case.is_exact or not bool((case.given >= 0).all()):
        return []
    errors = (case.right - case.given)[case.wrong].to(torch.int64)
    modulus = math.gcd(*errors.unique().tolist())
    # Numbers that are all beyond it, or all below, show no beginning.
    below = case.right < modulus
    if modulus <= 1 or not bool(below.any()) or bool(case.wrong[below].any()):
        return []
    weight = weigh(case, case.right % modulus, parameters=1.0, extent=Extent.ALL)
    if weight is None:
        return []
    sentence = f"begins again at 0 after {modulus - 1}: the right value modulo {modulus}"
    return [weight.pattern(PatternKind.WRAPPED, sentence, {"modulus": float(modulus)})]


# Fewer values that wrapped, or that did not, show no range.
_FEWEST_WRAPPED = 3
# A number of two digits, within this share of it.
_CHOSEN = 1e-6


def _begun_below(case: Case) -> list[Pattern]:
    """`wrapped`: what is beyond a range, which is solved for, begins again at its other end."""
    error = case.error[case.wrong]
    is_enough = _FEWEST_WRAPPED <= len(error) <= case.reference.numel() - _FEWEST_WRAPPED
    if not case.is_finite or not is_enough:
        return []
    turns = (error / error.abs().min()).round()
    width = float((error * turns).sum() / turns.square().sum())
    # A format begins again after a number that somebody chose.
    if not math.isclose(width, float(f"{width:.2g}"), rel_tol=_CHOSEN) and math.log2(width) % 1:
        return []
    for low in (-width / 2, 0.0, float(case.given.min())):
        wrapped = case.right - width * ((case.right - low) / width).floor()
        weight = weigh(case, wrapped, parameters=2.0, extent=Extent.ALL)
        if weight is not None and _shows_wrapping(case, case.right, wrapped):
            ends = f"{low:.4g} and {low + width:.4g}"
            sentence = f"wrapped around: what is beyond {ends} begins again at the other end"
            return [weight.pattern(PatternKind.WRAPPED, sentence)]
    return []


# How many times the range a value may be beyond it.
_MOST_TURNS = 3
_LEVELS = {"int8": 256.0, "int4": 16.0}


def _wrapped_levels(case: Case) -> list[Pattern]:
    """`wrapped`: whole multiples of a scale, which is solved for, modulo 2^8 or 2^4."""
    if not case.is_finite or case.given.numel() < _FEWEST_LEVELS:
        return []
    # What wraps is off by the whole range, and all else by half a level at most.
    furthest = float(case.error.abs().max())
    for (name, count), turns in itertools.product(_LEVELS.items(), range(1, _MOST_TURNS + 1)):
        scale = furthest / (count * turns)
        for _ in range(2):  # each level tells the scale more precisely
            levels = (case.given / scale).round()
            scale = float((levels * case.given).sum() / levels.square().sum().clamp(min=1.0))
            if scale <= 0:
                break
        else:
            rounded = (case.right / scale).round()
            wrapped = (rounded + count / 2) % count - count / 2
            hit = wrapped != rounded
            weight = weigh(case, wrapped * scale, parameters=1.0, cost=3.0)
            if weight is None or not _shows_wrapping(case, rounded * scale, wrapped * scale):
                continue
            sentence = f"wrapped around: multiples of {scale:.4g}, as {name} without its limits"
            evidence: dict[str, float | str] = {"scale": scale, "elements beyond": float(hit.sum())}
            return [weight.pattern(PatternKind.WRAPPED, sentence, evidence)]
    return []


_FEWEST_LEVELS = 8


def _shows_wrapping(case: Case, rounded: Tensor, wrapped: Tensor) -> bool:
    """Whether what is beyond the range is nearer to what wraps around than to what does not.

    Without such values, they are rounded at most.
    """
    hit = wrapped != rounded
    nearer = (case.given - wrapped).abs() < (case.given - rounded).abs()
    return bool(hit.any()) and float(nearer[hit].double().mean()) >= _MOST


def _are_whole(values: Tensor) -> bool:
    finite = bool(torch.isfinite(values).all())
    return finite and bool((values == values.round()).all()) and values.numel() > 0


def _are_different(values: Tensor) -> bool:
    """Whether the values vary: zeros or another constant are not remainders."""
    return bool((values != values[0]).any())


def _as_int64(case: Case, rounded: Tensor) -> Tensor:
    """As int64; from the reference itself if float64 has too few digits."""
    if case.is_exact and case.arbiter is None:
        return case.reference.detach().cpu().to(torch.int64)
    finite = torch.where(torch.isfinite(rounded), rounded, 0.0)
    return finite.clamp(-(2.0**62), 2.0**62).to(torch.int64)


def _wrap(value: Tensor, bits: int, *, signed: bool) -> Tensor:
    modulus = 1 << bits
    remainder = value.remainder(modulus)
    return (
        torch.where(remainder >= modulus // 2, remainder - modulus, remainder)
        if signed
        else remainder
    )
