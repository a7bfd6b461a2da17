"""The rules by which people tell a wrong program from a rounding one, side by side.

Each judges all results of a program at once, from the same values: `e` the reference as it runs,
`c` the candidate, `r` the reference in float64. A rule alarms if any result alarms. All of them
alarm where the number or the shape of results differs; a dtype is looked at by `ours`,
`assert_close`, `allclose` (which raises) and `dynamo_same`; who shares memory with whom, and what
inputs are after the call, by `ours` alone.

The others are not made to look bad: where reference and candidate are NaN at the same places, none
of them alarms for it, although some would by default; and equal bits never alarm.
"""

# ruff: noqa: TID251  (the framework's own rule is among its private parts)

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paritas.core.errors import ParitasError
from paritas.core.results.findings import Status
from paritas.mutants.planting import judge_mutant

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule

    from paritas.mutants.planting import ProgramNoise

# What torch's own benchmark harness allows, for the dtypes it is asked for (`torchbench.py`).
DYNAMO_TOLERANCE = dict.fromkeys(("bfloat16", "float16", "autocast", "tf32"), 1e-3)
DYNAMO_TOLERANCE["float32"] = 1e-4
OURS, OURS_NATIVE = "ours", "ours_native"


class UndecidedError(ParitasError):
    """A rule that came to no verdict."""


@dataclasses.dataclass(frozen=True)
class Values:
    """What the rules are given.

    Attributes:
        noise: what is known of the reference, for the rule that runs programs itself.
        changed: the candidate, for the same.
        dtype: one of float32, bfloat16, float16, autocast, tf32.
        reference: e, all results.
        candidate: c, all results.
        arbiter: r, all results; in float64 where they are not exact by nature.
    """

    noise: ProgramNoise
    changed: GraphModule
    dtype: str
    reference: list[Tensor]
    candidate: list[Tensor]
    arbiter: list[Tensor]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A name to print, and what tells an alarm.

    Attributes:
        name: a key of the results.
        text: what it is, for people.
        judge: whether it alarms; it may raise, which is neither an alarm nor none.
    """

    name: str
    text: str
    judge: Callable[[Values], bool]


# --- ours -----------------------------------------------------------------------------------------


def verified(values: Values, *, lift: bool) -> bool:
    """What `paritas.verify` says; what it knows of the reference is shared by all candidates."""
    verdict = judge_mutant(values.changed, values.noise, lift=lift)
    if verdict.status is Status.UNVERIFIED:
        raise UndecidedError(f"unverified: {verdict.failures[0].reason:.120}")
    return not verdict.passed


# --- rules on pairs of tensors --------------------------------------------------------------------


def on_pairs(
    judge: Callable[[Tensor, Tensor, Tensor], bool], *, dtypes: bool = False, widen: bool = True
) -> Callable[[Values], bool]:
    """A rule on all results, from one on a pair with its arbiter.

    Args:
        judge: gets e, c and r, without the places where e and c are the same and not finite.
        dtypes: whether another dtype is an alarm.
        widen: whether e and c come in double precision, or as they are.
    """

    def all_of(values: Values) -> bool:
        if len(values.reference) != len(values.candidate):
            return True
        triples = zip(values.reference, values.candidate, values.arbiter, strict=True)
        for e, c, r in triples:
            if e.shape != c.shape or (dtypes and e.dtype != c.dtype):
                return True
            pair = [wide(e), wide(c), r] if widen else [e, c, r]
            left = _finite(*pair)
            if left is None or (not _equal(*left[:2]) and judge(*left)):
                return True
        return False

    return all_of


def _finite(e: Tensor, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Where both are finite; None if they are not the same elsewhere."""
    odd = ~(torch.isfinite(e) & torch.isfinite(c))
    if not bool(odd.any()):
        return e, c, r
    same = (e == c) | (torch.isnan(e) & torch.isnan(c))
    return (e[~odd], c[~odd], r[~odd]) if bool(same[odd].all()) else None


def _equal(e: Tensor, c: Tensor) -> bool:
    return e.dtype == c.dtype and torch.equal(e, c)


def wide(value: Tensor) -> Tensor:
    """In double precision, whatever it was."""
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def not_assert_close(e: Tensor, c: Tensor, _: Tensor) -> bool:
    """torch.testing's tolerances by dtype: 1.3e-6/1e-5, 1.6e-2/1e-5, 1e-3/1e-5; integers exact."""
    try:
        torch.testing.assert_close(c, e, equal_nan=True)
    except AssertionError:
        return True
    return False


def not_allclose(e: Tensor, c: Tensor, _: Tensor, tolerance: float | None = None) -> bool:
    """torch.allclose, by default with rtol 1e-5 and atol 1e-8."""
    if tolerance is None:
        return not torch.allclose(c, e)
    return not torch.allclose(c, e, rtol=tolerance, atol=tolerance)


def uncorrelated(e: Tensor, c: Tensor, _: Tensor, least: float = 0.99) -> bool:
    """Pearson's coefficient below `least`; a constant has none and is compared to 1 - `least`."""
    left, right = _real(e), _real(c)
    constant = min(float(left.std(correction=0)), float(right.std(correction=0))) == 0
    if left.numel() < 2 or constant:
        return not torch.allclose(right, left, rtol=1 - least, atol=1e-8)
    return not float(torch.corrcoef(torch.stack([left, right]))[0, 1]) >= least


def turned_away(e: Tensor, c: Tensor, _: Tensor, least: float = 0.999) -> bool:
    """Cosine of the angle below `least`; zeros have none."""
    left, right = _real(e), _real(c)
    size = float(left.norm() * right.norm())
    if size == 0:
        return bool(left.norm() != right.norm())
    return not float(left @ right) / size >= least


def _real(value: Tensor) -> Tensor:
    return (torch.view_as_real(value) if value.is_complex() else value).reshape(-1)


def beyond_twice(e: Tensor, c: Tensor, r: Tensor) -> bool:
    """FlashAttention's: at most twice the reference's own worst error, and one rounding at 0.3.

    Its tests round the exact result to the run dtype first, and so does this.
    """
    rounded = r.to(e.dtype)
    floor = 0.0
    if rounded.is_floating_point():
        floor = 2 * _worst(rounded + 0.3 - 0.3, rounded)
    return not _worst(c, rounded) <= 2 * _worst(e, rounded) + floor


def _worst(left: Tensor, right: Tensor) -> float:
    apart = (wide(left) - wide(right)).abs()
    return float(apart.max()) if apart.numel() else 0.0


# --- rules of other tools -------------------------------------------------------------------------


def dynamo_differs(values: Values) -> bool:
    """`same` of torch._dynamo, with the float64 results, as torch's benchmark harness calls it."""
    from torch._dynamo.utils import same

    return not same(
        values.reference,
        values.candidate,
        values.arbiter,
        tol=DYNAMO_TOLERANCE[values.dtype],
        equal_nan=True,
        log_error=lambda *_: None,
    )


def has_polygraphy() -> bool:
    """Whether Polygraphy can be imported: `pip install polygraphy`."""
    return importlib.util.find_spec("polygraphy") is not None


def polygraphy_differs(e: Tensor, c: Tensor, _: Tensor) -> bool:
    """Polygraphy's SimpleCompareFunc, element by element at 1e-5 absolute or relative."""
    from polygraphy.comparator import IterationResult
    from polygraphy.comparator.compare import SimpleCompareFunc
    from polygraphy.logger import G_LOGGER

    G_LOGGER.module_severity = G_LOGGER.CRITICAL
    sides = [IterationResult({"result": _numbers(side)}, runner_name="") for side in (c, e)]
    return not all(map(bool, SimpleCompareFunc()(*sides).values()))


def _numbers(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def rules() -> dict[str, Rule]:
    """Every rule that can be asked here, in the order of the tables."""
    fixed, as_is = functools.partial, {"dtypes": True, "widen": False}
    found = [
        Rule(OURS, "paritas, lifted and native", fixed(verified, lift=True)),
        Rule(OURS_NATIVE, "paritas, native only", fixed(verified, lift=False)),
        Rule("assert_close", "torch.testing.assert_close", on_pairs(not_assert_close, **as_is)),
        Rule("allclose", "torch.allclose", on_pairs(not_allclose, **as_is)),
        Rule("dynamo_same", "Dynamo's same, with float64", dynamo_differs),
        Rule("flash_attention", "FlashAttention's twice", on_pairs(beyond_twice, widen=False)),
        Rule("pcc_0.99", "Pearson >= 0.99", on_pairs(uncorrelated)),
        Rule("cosine_0.999", "cosine >= 0.999", on_pairs(turned_away)),
        Rule("fixed_1e-3", "rtol = atol = 1e-3", on_pairs(fixed(not_allclose, tolerance=1e-3))),
        Rule("fixed_1e-2", "rtol = atol = 1e-2", on_pairs(fixed(not_allclose, tolerance=1e-2))),
    ]
    if has_polygraphy():
        found.append(Rule("polygraphy", "Polygraphy's simple", on_pairs(polygraphy_differs)))
    return {rule.name: rule for rule in found}


def judged(rule: Rule, values: Values) -> bool | str:
    """Whether a rule alarms, or what kept it from saying so."""
    try:
        alarm = rule.judge(values)
    except Exception as error:  # noqa: BLE001  (what a rule raises is its answer, and kept)
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0]:.120}" if text else type(error).__name__
    return bool(alarm) if not isinstance(alarm, float) or not math.isnan(alarm) else "NaN"
