"""How much a planted fault changes, in exact arithmetic, over the program's own rounding noise.

Both programs are run in float64, where rounding is far below any fault, and what the fault changes
is divided by the noise `d` of the program in its own dtype: the very one that the judge measures,
from perturbed runs and the reference's own error. So one can say of a fault, before any judge has
seen it, whether it can be told from rounding at all.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from paritas._torch.lifting import LiftMode
from paritas.checking.config import Inputs
from paritas.checking.defaults import WideDefault
from paritas.checking.evidence import ItemEvidence
from paritas.checking.noise import is_inexact
from paritas.checking.observing import Conditions, Observation, running
from paritas.checking.runs import Runs
from paritas.checking.subjects import subject
from paritas.errors import UsageError
from paritas.mutants.planting import exact_form
from paritas.numerics import criterion
from paritas.numerics.automatic import (
    BLIND_NOISE,
    BLIND_SHARE,
    LIFTED_SLACK_SCALED,
    RUNS,
    nonfinite_mismatch,
)
from paritas.numerics.criterion import UNIT_F64, Noise
from paritas.recording.isolation import RandomState

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from paritas.mutants.programs import Program

Band = Literal["clear", "moderate", "faint", "none"]

CLEAR, MODERATE = 8.0, 2.0
# An effect on few elements counts by the worst of them, in proportion to what the judge allows of
# each: it takes 12 times the noise in one element for an alarm, 2.5 times in all of them.
WORST_SHARE = 5.0
# Below this share of a result, a fault that changes nothing cannot be told from float64's rounding.
NO_EFFECT = 1e-12


@dataclasses.dataclass(frozen=True)
class Effect:
    """What a fault changes.

    Attributes:
        relative: rms of the change over rms of the result, of the result where it is largest.
        over_noise: the change over the noise: the larger of its rms and a fifth of its worst
            element, of the result where that is largest; infinite for what is exact (integers,
            NaN positions, aliases, dtypes) and is different.
        band: "clear" above 8 times the noise, "moderate" above 2, "faint" below; "none" where
            nothing changes: the fault is none.
        result: the result where it is largest, "" for none.
    """

    relative: float
    over_noise: float
    band: Band
    result: str = ""


NO_CHANGE = Effect(0.0, 0.0, "none")


@dataclasses.dataclass(frozen=True)
class _Item:
    """One floating result: its true value and what is known of its noise."""

    truth: Tensor
    noise: Noise
    blur: float  # relative; what float64 itself may do to it


@dataclasses.dataclass(frozen=True)
class ProgramNoise:
    """The noise of one program, measured once for all faults planted in it.

    Attributes:
        program: whose noise it is.
        runs: the program's further runs, of which the noise was made.
        native: what the program did in its own dtype.
        base: what it did in float64, or the same again where it has no wider form.
        items: its floating results.
        names: a name for every path.
    """

    program: Program
    runs: Runs
    native: Observation
    base: Observation
    items: dict[str, _Item]
    names: dict[str, str]


def program_noise(program: Program, seed: int = 0) -> ProgramNoise:
    """Measure a program: once in its own dtype, once in float64, three times perturbed.

    A program that draws random numbers draws those of `seed`; whoever judges its mutants on other
    draws judges other effects.

    Raises:
        UsageError: the program itself cannot be run.
    """
    whole = subject(program.module, "reference", "program")
    before = RandomState.now()
    torch.manual_seed(seed)
    rng = RandomState.now()
    conditions = Conditions(gradients=False, seed=seed)
    inputs = Inputs(tuple(program.fresh_inputs()))
    try:
        with running(whole, rng, conditions) as call:
            native = call(inputs)
        if native.error is not None:
            raise UsageError(f"the program cannot be run: {native.error}") from native.error
        runs = Runs(whole, whole, inputs, rng, conditions, [native])
        arbiter = runs.arbiter()
        items = {path: _item(runs, path) for path, value in native.items() if is_inexact(value)}
    finally:
        before.restore()
    names = dict(zip(native.outputs, program.results, strict=True))
    base = native if arbiter is None else arbiter[0]
    return ProgramNoise(program, runs, native, base, items, names)


def _item(runs: Runs, path: str) -> _Item:
    """The noise of one item, as the judge of a native run has it."""
    evidence = ItemEvidence(runs, path)
    reference, arbiter = runs.native[0].value(path), evidence.arbiter()
    own_error = 0.0 if arbiter is None else criterion.rms_difference(reference, arbiter)
    truth = reference if arbiter is None else arbiter
    unit = criterion.unit_roundoff(reference.dtype)
    noise = Noise(
        unit=unit,
        step=criterion.smallest_step(reference.dtype),
        own_error=own_error,
        reference=None if arbiter is None else reference,
        spread=evidence.spread(runs.unit, RUNS[1]),
        factor=1.0 if arbiter is not None else 2.0,
    )
    if noise.spread is None:
        coarsest = max(unit, runs.unit)  # a float32 result of bfloat16 values is no better
        noise = dataclasses.replace(noise, relative=min(BLIND_NOISE * coarsest, BLIND_SHARE))
    size = criterion.rms(truth)
    blur = LIFTED_SLACK_SCALED * own_error * UNIT_F64 / runs.unit / size if size else 0.0
    return _Item(truth, noise, max(NO_EFFECT, blur))


def measure_effect(program: Program, mutant: GraphModule, noise: ProgramNoise) -> Effect:
    """How much `mutant`, a changed copy of the program, changes of its results.

    One run in float64; a second one in the program's dtype only where the first shows nothing, to
    see whether a dtype, an alias or an exception is different.

    Raises:
        UsageError: the noise is another program's, or the mutant cannot be run in float64, though
            it can in its own dtype.
    """
    if noise.program is not program:
        raise UsageError(
            "the noise was measured of another program; call program_noise on this one"
        )
    wide = noise.base is not noise.native
    before = RandomState.now()
    try:
        seen = _run(exact_form(mutant), noise, wide=wide)
        if seen.error is not None:
            own = _run(mutant, noise, wide=False)
            if own.error is not None:
                return _exactly("the call")
            message = f"the planted fault has no float64 form: {seen.error}"
            raise UsageError(message) from seen.error
        found = _differences(noise, seen)
        worst = max(found, key=lambda effect: effect.over_noise, default=NO_CHANGE)
        if worst.band != "none":
            largest = max(effect.relative for effect in found)
            return dataclasses.replace(worst, relative=largest)
        return _of_form(noise, _run(mutant, noise, wide=False))
    finally:
        before.restore()


def _run(mutant: GraphModule, noise: ProgramNoise, *, wide: bool) -> Observation:
    runs = noise.runs
    mode = LiftMode(runs.dtype, runs.default) if wide else None
    conditions = dataclasses.replace(runs.conditions, wide=wide, mode=mode)
    side = subject(mutant, "candidate", "mutant")

    def once() -> Observation:
        with running(side, runs.rng, conditions) as call:
            return call(runs.inputs)

    return WideDefault().run(mode, once) if wide else once()


def _differences(noise: ProgramNoise, seen: Observation) -> list[Effect]:
    """The effects on all values, and on aliases; those of rounding only are left out."""
    paths = dict.fromkeys([*noise.base.outputs, *noise.base.after, *seen.after])
    found = []
    for path in paths:
        truth = noise.runs.complete(noise.base, path)
        value = noise.runs.complete(seen, path)
        item = noise.items.get(path)
        name = noise.names.get(path, path)
        if item is not None and isinstance(value, Tensor) and value.shape == item.truth.shape:
            effect = _of_value(item, value, name)
        else:
            effect = NO_CHANGE if _same(truth, value) else _exactly(name)
        if effect.band != "none":
            found.append(effect)
    if seen.aliases != noise.base.aliases:
        found.append(_exactly("memory"))
    return found


def _of_value(item: _Item, value: Tensor, name: str) -> Effect:
    mismatch = nonfinite_mismatch(item.truth, value)
    if mismatch is not None:
        spread = item.noise.spread
        # Where a perturbed run left the finite numbers, rounding decides that.
        decided = mismatch if spread is None else mismatch & torch.isfinite(spread)
        if bool(decided.any()):
            return _exactly(name)
    change, size = criterion.rms_difference(value, item.truth), criterion.rms(item.truth)
    if change == 0:
        return NO_CHANGE
    relative = change / size if size else math.inf
    if relative < item.blur:
        return NO_CHANGE
    score = criterion.score(value, item.truth, item.noise).score
    over = max(score.rms_z, score.max_z / WORST_SHARE)
    # A figure that is no number must not pass for a faint one.
    over = math.inf if math.isnan(over) else over
    return Effect(relative, over, band_of(over), name)


def band_of(over_noise: float) -> Band:
    """The band of an effect that is there."""
    if over_noise > CLEAR:
        return "clear"
    return "moderate" if over_noise > MODERATE else "faint"


def _of_form(noise: ProgramNoise, seen: Observation) -> Effect:
    """What differs though no value does: exceptions, shapes, dtypes, aliases."""
    native = noise.native
    if seen.error is not None:
        return _exactly("the call")
    if seen.aliases != native.aliases:
        return _exactly("memory")
    for path, value in native.outputs.items():
        other = seen.outputs.get(path)
        if not isinstance(value, Tensor) or not isinstance(other, Tensor):
            continue
        if (value.dtype, value.shape) != (other.dtype, other.shape):
            return _exactly(noise.names.get(path, path))
    return NO_CHANGE


def _exactly(name: str) -> Effect:
    return Effect(math.inf, math.inf, "clear", name)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and bool(torch.equal(left, right.to(left.dtype)))
    return type(left) is type(right) and bool(left == right)
