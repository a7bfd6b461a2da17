"""Run a program with random rounding in every operator, to measure the noise of this program.

Each operator's floating results are multiplied by (1 + u/2 * U), with U uniform in [-1, 1], unless
they need no rounding. So are the inputs of operators with more than one arithmetic step inside.
Operators that sum many terms also get the error of summing one by one, u/2 * a * U with the
amplitude a of `accumulation`. Half precisions accumulate in float32, so u is that of float32 there,
except in operators that add to memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paritas.core.call_options import takes_options
from paritas.core.numerics.bits import has_inexact, is_inexact
from paritas.core.operators.catalogue import operators_of, summation_of
from paritas.core.operators.rounding import call_rounds, rounds_once
from paritas.core.precision.accumulation import (
    accumulation,
    errors_of_inner_sums,
    errors_of_written_statistics,
    rounded_parts,
)
from paritas.core.precision.composites import ATTENTION, Inside, ListeningMode
from paritas.core.precision.lifting import CHOICES, COMPARISONS, WHOLE_NUMBERS, LiftMode
from paritas.core.precision.summing import SharedError, UnperturbedCall
from paritas.core.torch_private.kernels import attends_in_one_kernel, place_of_argument
from paritas.core.torch_private.operators import (
    map_tensors,
    may_use_tf32,
)
from paritas.core.torch_private.tensors import SPARSE_LAYOUTS, as_dense, map_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paritas.core.operators.definitions import Summation
    from paritas.core.precision.summing import Amplitudes
    from paritas.core.torch_private.operators import Operator, Traits


# --- Sums that cancel so far that float64 loses the rest ------------------------------------------

# (a + b) + c may be exact while a + (b + c) is not: if a and b cancel, and c is below the last
# digit of b. A perturbed run rounds only the sums that are computed, so it does not show this. Here
# sums of sums count as one sum, which may be computed in any order.
#
# Only terms of very different size count. Masks, counts and positions can also sum to zero, and are
# exact in every order: float64 holds every partial sum of terms that fit float32 and are within
# about 2^29 of each other.

_SUMS_OF_TWO = frozenset({"add", "sub", "rsub"})
# The digits of float64 beyond those of float32: 53 - 24.
_FAR_APART = 2.0**29


class CancelledSums:
    """The cancelled terms of the sums of one run, by the memory of their results."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._lost: dict[int, Tensor] = {}
        # Keeps the memory of results from being reused for other tensors.
        self._alive: list[Tensor] = []

    def amplitude(self, call: UnperturbedCall) -> Tensor | None:
        """The size of the terms that cancelled in an operand, if it is far above the rest.

        Almost always None: nothing cancelled.
        """
        lost = self._before(call)
        if lost is None:
            return None
        size = torch.maximum(*map(_size, call.args[:2]))
        return torch.where(lost > _FAR_APART * size, lost, 0.0).expand(call.result.shape)

    def note(self, call: UnperturbedCall, result: Any) -> None:
        """Remember a sum of two terms that cancel completely, or up to the last digits."""
        if not _is_sum_of_two(call):
            return
        size = torch.maximum(*map(_size, call.args[:2]))
        before = self._before(call)
        if before is not None:
            size = torch.maximum(size, before)
        gone = (size > _FAR_APART * call.result.abs()) & torch.isfinite(size)
        if bool(gone.any()):
            self._lost[result.untyped_storage().data_ptr()] = torch.where(gone, size, 0.0)
            self._alive.append(result)

    def _before(self, call: UnperturbedCall) -> Tensor | None:
        """The size of the terms that cancelled in the operands, if any."""
        if not self._lost or not _is_sum_of_two(call):
            return None
        largest_loss: Tensor | None = None
        for term in call.args[:2]:
            lost = self._lost.get(term.untyped_storage().data_ptr())
            if lost is not None and lost.shape == term.shape:
                largest_loss = lost if largest_loss is None else torch.maximum(largest_loss, lost)
        return largest_loss


def _size(terms: Tensor) -> Tensor:
    """How large each is; a mask may be a term, too, and has no absolute values."""
    return terms.double() if terms.dtype is torch.bool else terms.abs()


def is_exact_in_any_order(terms: Any, result: Tensor) -> bool:
    """Whether float64 holds every partial sum of these terms."""
    if not isinstance(terms, torch.Tensor) or terms.is_complex() or not terms.numel():
        return True
    sizes = _size(terms)
    some = sizes[sizes > 0]
    length = terms.numel() / max(1, result.numel())
    return not some.numel() or bool(some.max() * length <= _FAR_APART * some.min())


def _is_sum_of_two(call: UnperturbedCall) -> bool:
    return (
        call.name in _SUMS_OF_TWO
        and isinstance(call.result, torch.Tensor)
        and call.result.is_floating_point()
        and all(isinstance(term, torch.Tensor) for term in call.args[:2])
        and len(call.args) > 1
        and call.result.numel() > 0
    )


# --- Outcomes of decisions ------------------------------------------------------------------------

# Piecewise operators and their thresholds: which piece an element is on is a decision.
_EDGES = {
    "relu": (0.0,),
    "threshold": (0.0,),
    "leaky_relu": (0.0,),
    "prelu": (0.0,),
    "_prelu_kernel": (0.0,),
    "abs": (0.0,),
    "sign": (0.0,),
    "sgn": (0.0,),
    "hardtanh": (-1.0, 1.0),
    "hardsigmoid": (-3.0, 3.0),
    "hardswish": (-3.0, 3.0),
}
_CHOOSES = CHOICES | {"max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d"}

# Operators whose floating results have a derivative by their floating arguments everywhere they are
# finite: however they are rounded, they decide nothing. An operator that is not listed may decide.
_SMOOTH = operators_of(
    "smooth", "error function", "gelu", "arithmetic", "roots and reciprocals", "copies",
    "fills", "new tensors", "values passed on", "sum", "mean", "logarithm of a sum", "variance",
    "products", "products added to a tensor", "convolution", "convolution backward", "softmax",
    "softmax backward", "log softmax", "log softmax backward", "running sum", "layer norm",
    "layer norm backward", "rms norm", "group norm", "group norm backward", "losses of classes",
    "joins", "triangles", "embedding backward", "indexed sum",
)  # fmt: skip


def may_decide(kind: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Whether a result may jump where a floating argument moves a little.

    A result that is not floating, as of a cast to integers, is a decision whatever its operator. A
    gradient that was not asked for is none.
    """
    if not any(map(has_inexact, (*args, *kwargs.values()))):
        return False
    smooth = kind.namespace == "aten" and kind.name in _SMOOTH and "rounding_mode" not in kwargs
    if not smooth:
        return True
    results = result if isinstance(result, list | tuple) else (result,)
    return not all(call_result is None or has_inexact(call_result) for call_result in results)


class DecisionLog:
    """The outcome of each decision of a run, operator by operator: which side, which index."""

    def __init__(self) -> None:
        """Start with no decisions."""
        self.entries: list[tuple[str, Tensor]] = []

    def note(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Record the decisions of one operator, if it makes any."""
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or not first.is_floating_point():
            return
        outcome: Any = None
        if name in _EDGES:
            # In-place operators have overwritten their argument; its clipped values show as much.
            edges = args[1:3] if name == "hardtanh" and len(args) > 2 else _EDGES[name]  # noqa: PLR2004
            outcome = sum((first > edge).to(torch.uint8) for edge in edges)
        elif name in COMPARISONS or name in WHOLE_NUMBERS:
            outcome = result
        elif name in operators_of("limits"):
            outcome = result == first
        elif name in {"maximum", "minimum"}:
            outcome = first > args[1]
        elif name in _CHOOSES:
            outcome = result[1] if isinstance(result, list | tuple) else result
        if isinstance(outcome, torch.Tensor):
            self.entries.append((name, outcome.detach().clone()))

    def count_changes(self, other: DecisionLog) -> dict[str, tuple[int, int]]:
        """Operator -> how many of its decisions differ in the other run, of how many."""
        counts: dict[str, tuple[int, int]] = {}
        for (name, own_decisions), (theirs_name, other_decisions) in zip(
            self.entries, other.entries, strict=False
        ):
            if name != theirs_name or own_decisions.shape != other_decisions.shape:
                break  # the runs took different branches: the other entries have no counterpart
            changed, total = counts.get(name, (0, 0))
            counts[name] = (
                changed + int((own_decisions != other_decisions).sum()),
                total + own_decisions.numel(),
            )
        return counts


# --- The mode -------------------------------------------------------------------------------------


UNIT_F32 = 2.0**-24
_WIDEST = {torch.float64, torch.complex128}
_SMALLEST_POOL = 1 << 20
# A larger pool is not kept as factors as well: each size of noise would have its own.
_LARGEST_FACTORS = 1 << 22
# Elements that an operator on a tensor of any size handles in the time that calling it takes.
_LEAST_USE = 1 << 12
# Number of sampled values, and the share of them that must be repeated.
_SAMPLE_SIZE, _REPEATED_SHARE = 512, 0.1
# Few enough values for intermediate results to stay in a core's cache.
_BLOCK = 1 << 15
_UNIT_TF32 = 2.0**-10
# Values fall into bins; exact ones, between exact boundaries, into the same bin in every run.
_SORTING_INTO_BINS = frozenset({"histc", "histogram", "bucketize", "searchsorted"})
_ADDING_UP = frozenset({"sum", "mean", "running sum"})
# A sum cancels if its parts are this many times as large.
_CANCELS = 2.0
# Kernels of attention round the weights to the dtype of the program before they multiply the values
# with them, and so the gradients of scores in the backward. The argument that these meet, by its
# position, is perturbed in their place: the products err by as much.
_MEETS_ROUNDED: dict[Summation | None, int] = {"attention": 2, "attention backward": 0}
_MULTIPLIER = -7046029254386353131  # the golden ratio in 64 bits: mixes the bits of a product
_MASK = (1 << 40) - 1
_UNITS = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.bfloat16, torch.float16)}


class NoisePool:
    """Uniform numbers in [-1, 1] as a source of noise, kept over the runs of a program.

    Drawing numbers costs several times as much as using them.
    """

    def __init__(self, seed: int) -> None:
        """Use a generator with this seed; numbers are drawn on first use."""
        self.seed = seed
        self._uniform: dict[torch.device, Tensor] = {}
        self._factors: dict[tuple[torch.device, float], Tensor] = {}
        self._used: dict[tuple[torch.device, float], int] = {}

    def uniform(self, device: torch.device, count: int) -> Tensor:
        """At least twice `count` numbers."""
        pool = self._uniform.get(device)
        if pool is None or pool.numel() < 2 * count:
            pool = self._uniform[device] = _draw_uniform(
                self.seed, device, max(_SMALLEST_POOL, 2 * count)
            )
            for key in [key for key in self._factors if key[0] == device]:
                del self._factors[key]
        return pool

    def factors(self, tensor: Tensor, start: int, reach: float) -> Tensor:
        """The numbers from `start` on as factors 1 + reach * U, in the shape of a tensor.

        A small pool is turned into factors once that costs no more than the parts did so far.
        """
        key = tensor.device, reach
        uniform = self.uniform(tensor.device, tensor.numel())
        if key not in self._factors:
            self._used[key] = self._used.get(key, 0) + max(tensor.numel(), _LEAST_USE)
            if not self._used[key] >= uniform.numel() <= _LARGEST_FACTORS:
                return torch.mul(_cut_from_pool(uniform, start, tensor), reach).add_(1)
            self._factors[key] = torch.mul(uniform, reach).add_(1)
        return _cut_from_pool(self._factors[key], start, tensor)


@dataclasses.dataclass(frozen=True)
class _NoiseSource:
    """The start of a tensor's noise in the pool; None if its noise depends on its values."""

    tensor: Tensor
    start: int | None


@dataclasses.dataclass(frozen=True)
class Perturbation:
    """How a run is perturbed.

    Attributes:
        unit: the unit roundoff by which operators are perturbed, or that of the dtype that `log`
            has for a call.
        log: the dtype of each call.
        remember_decisions: see `LiftMode`.
        widen: without it the run stays in the program's own dtype, for programs without meaning in
            float64.
        shake_inputs: perturb the inputs of every operator: for a single operator, with inputs that
            were rounded before.
        pool: runs of one program may share one; each uses other parts of it.
        gain: a factor of all noise: two runs with one seed and opposite gains deviate by opposite
            amounts, except where a decision flips.
        decisions: records the outcome of each decision.
    """

    unit: float
    seed: int
    _: dataclasses.KW_ONLY
    log: dict[tuple[Any, int], torch.dtype] | None = None
    remember_decisions: bool = False
    widen: bool = True
    shake_inputs: bool = False
    pool: NoisePool | None = None
    gain: float = 1.0
    decisions: DecisionLog | None = None


class PerturbMode(ListeningMode, LiftMode):
    """A lifted run with random rounding of the program's own precision."""

    @takes_options(Perturbation)
    def __init__(
        self, native: torch.dtype, default: torch.dtype, perturbation: Perturbation
    ) -> None:
        """The fields of `Perturbation` are further arguments."""
        unit, seed, gain = perturbation.unit, perturbation.seed, perturbation.gain
        widen = perturbation.widen
        super().__init__(
            native,
            default,
            remember_decisions=perturbation.remember_decisions,
            widen=widen,
        )
        # Half a unit of a dtype narrower than the one computed in. In the same dtype, half a unit
        # would always be rounded away; two units move a value to a neighbour or leave it.
        self.gain = gain
        self.reach = gain * (0.5 if widen and unit > torch.finfo(torch.float64).eps else 2.0)
        self.unit = unit
        # Only in lifted runs: their noise is so far below any fault that it may be generous.
        lifted = widen and unit <= torch.finfo(torch.float64).eps
        self._cancelled = CancelledSums() if lifted else None
        self.shake_inputs = perturbation.shake_inputs
        self.seed = seed
        self.log = perturbation.log or {}
        self._counts: dict[Any, int] = {}
        self._log_decisions = perturbation.decisions
        self._draws = random.Random(seed)
        self._pool = perturbation.pool or NoisePool(seed)
        self._has_computed = False
        self._may_decide = False

    @property
    def is_smooth(self) -> bool:
        """Whether this run had operators, and none makes decisions that rounding can flip."""
        return self._has_computed and not self._may_decide

    def start_over(self) -> None:
        """Restart counting calls."""
        super().start_over()
        self._counts.clear()
        self._draws = random.Random(self.seed)
        self._has_computed = self._may_decide = False
        if self._log_decisions is not None:
            self._log_decisions.entries.clear()

    def compute(
        self, func: Operator, kind: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the operator on perturbed arguments and perturb its results."""
        result = self._compute(func, kind, args, kwargs)
        self._has_computed = True
        if not self._may_decide:
            self._may_decide = may_decide(kind, args, kwargs, result)
        if self._log_decisions is not None:
            self._log_decisions.note(kind.name, args, result)
        return result

    def _draw(
        self, func: Operator, kind: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if kind.name == "bernoulli":
            probabilities = args[1:] if kind.mutates else args[-1:]
            self._may_decide |= any(map(has_inexact, probabilities))  # they may be computed
        return super()._draw(func, kind, args, kwargs)

    def _compute(
        self, func: Operator, kind: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        unit = self._unit_of(func)
        rounds = call_rounds(kind, args, kwargs)
        exact = not rounds or (kind.name == "_to_copy" and not is_inexact(args[0]))
        if exact and not self.shake_inputs:
            return func(*args, **kwargs)
        shaken, summation = args, summation_of(kind.name)
        coarse = self._input_unit(kind, args, unit)
        if self.shake_inputs or not rounds_once(kind) or coarse > unit:
            # The inputs may come from a coarser dtype than the operator runs in: a widening cast.
            input_unit = max(unit, self.unit) if self.shake_inputs else unit_inside(kind, unit)
            fixed = set(kind.mutates)
            if summation == "attention backward":
                # The logarithms of sums were perturbed as results, and are in float32.
                fixed.add(place_of_argument(func, "logsumexp"))
            reaches = dict.fromkeys(range(len(args)), self._reach_of_inputs(input_unit, coarse))
            if summation in _MEETS_ROUNDED:
                rounded_position = _MEETS_ROUNDED[summation]
                reaches[rounded_position] = self._reach_of_inputs(max(input_unit, unit), coarse)
            shaken = tuple(
                value
                if position in fixed
                else map_tensors(value, functools.partial(self._shaken, reach=reaches[position]))
                for position, value in enumerate(args)
            )
            if kind.name in _SORTING_INTO_BINS:
                shaken = tuple(
                    self._inexact_part(value, noisy, unit)
                    for value, noisy in zip(args, shaken, strict=True)
                )
        if coarse > unit:
            shaken = tuple(map_tensors(value, self._perturb_truncation) for value in shaken)
        for rounded_position, error in errors_of_inner_sums(kind.name, func, args):
            uniform = self._draw_shared(error.amplitude, error)
            off = self.gain * min(unit, UNIT_F32) / 2 * error.amplitude * uniform
            moved = shaken[rounded_position] + off.to(shaken[rounded_position].dtype)
            shaken = (*shaken[:rounded_position], moved, *shaken[rounded_position + 1 :])
        result = self.kernel(func, kind, args)(*shaken, **kwargs)
        if exact:
            return result
        call = UnperturbedCall(
            kind.name, func, map_tensors(args, as_dense), kwargs, as_dense(result)
        )
        accumulated = accumulation(call)
        within, first = self.within, next(iter(accumulated), None)
        if within is not None and summation == "softmax backward" and isinstance(first, list):
            accumulated = [[*first, _error_of_rounded_output(within, *args[:3])]]
        for statistic, amplitude in errors_of_written_statistics(call):
            uniform = self._uniform(self._place(statistic, repeats=False))
            share = self.gain * min(unit, UNIT_F32) / 2
            statistic.add_((share * amplitude * uniform).to(statistic.dtype))
        if self._cancelled is None or kind.mutates:
            parts = rounded_parts(call, accumulated) if unit > UNIT_F32 else []
            return self._perturb_results(kind, result, accumulated, unit, parts)
        chained = self._cancelled.amplitude(call)
        lossy = chained is not None or (
            summation in _ADDING_UP and not is_exact_in_any_order(args[0], result)
        )
        noisy = self._perturb_results(kind, result, accumulated or [chained], unit, lossy=lossy)
        self._cancelled.note(call, noisy)
        return noisy

    def _perturb_results(
        self,
        kind: Traits,
        result: Any,
        accumulated: Amplitudes,
        unit: float,
        parts: Sequence[Tensor | None] = (),
        *,
        lossy: bool = False,
    ) -> Any:
        """Perturb by rounding, by the errors of sums, and by those of their rounded parts.

        With `lossy`, the result of a sum may be exact by chance, and inexact in another order.
        """
        if not isinstance(result, torch.Tensor | list | tuple):
            return result  # None, or an opaque object such as a profiler's marker
        single = isinstance(result, torch.Tensor)
        results: list[Any] = [result] if single else list(result)
        summation = summation_of(kind.name)
        # An indexed sum adds one by one to values in memory, which are in the program's dtype.
        accumulator = unit if summation == "indexed sum" else min(unit, UNIT_F32)
        for position, tensor in enumerate(results):
            if not is_inexact(tensor):
                continue
            if tensor.layout in SPARSE_LAYOUTS:
                noisy = self._shaken(tensor, unit * self.reach)
                results[position] = tensor.copy_(noisy) if kind.mutates else noisy
                continue
            repeats = self._looks_for_repeats and _has_repeats(tensor)
            # Beside its result, in its dtype, attention gives logarithms of sums, in float32.
            step = accumulator if summation == "attention" and position == 1 else unit
            noisy = self._times_noise(self._place(tensor, repeats=repeats), step * self.reach)
            extra = accumulated[position] if position < len(accumulated) else None
            share = self.gain * accumulator / 2
            if isinstance(extra, list):
                for error in extra:
                    uniform = self._draw_shared(tensor, error)
                    noisy = noisy + (share * error.amplitude * uniform).to(noisy.dtype)
                extra = extra[0].amplitude
            elif extra is not None:
                uniform = self._uniform(self._place(tensor, repeats=repeats))
                if noisy.dtype == extra.dtype == uniform.dtype:
                    noisy.addcmul_(extra, uniform, value=share)
                else:
                    noisy = noisy + share * extra * uniform.to(extra.dtype)
            part = parts[position] if position < len(parts) else None
            if part is not None:
                uniform = self._uniform(self._place(tensor, repeats=repeats))
                noisy = noisy + (self.gain * unit / 2 * part * uniform).to(noisy.dtype)
            fits = _needs_no_rounding(tensor, unit) if self.widths else None
            if fits is not None:
                lost = extra.abs() * accumulator if lossy and extra is not None else None
                for size in (lost, None if part is None else part / _CANCELS):
                    fits = fits if size is None else fits & (size <= tensor.abs())
                noisy = torch.where(fits, tensor, noisy)
            # In-place operators return their argument, which must keep its identity.
            results[position] = tensor.copy_(noisy) if kind.mutates else noisy
        return results[0] if single else type(result)(results)

    def _reach_of_inputs(self, unit: float, coarse: float) -> float:
        """The noise of an operator's inputs, of this unit, or of tensor cores if that is more."""
        reach = max(unit * abs(self.reach), abs(self.gain) * coarse / 2)
        return math.copysign(reach, self.gain)

    def _draw_shared(self, tensor: Tensor, error: SharedError) -> Tensor:
        """Uniform noise in [-1, 1], one number for all values that share an error."""
        pool = self._pool.uniform(tensor.device, tensor.numel())
        count = math.prod(error.shape)
        start = self._draws.randrange(pool.numel() - count + 1)
        drawn = pool.narrow(0, start, count).view(error.shape)
        if error.repeats > 1:
            drawn = drawn.repeat_interleave(error.repeats, dim=1)
        return drawn.expand(tensor.shape)

    def _input_unit(self, kind: Traits, args: tuple[Any, ...], unit: float) -> float:
        """The unit to which an operator rounds its inputs: tensor cores may use TF32."""
        # In a lifted run nothing is float32, on either side.
        if unit != UNIT_F32 or self._cancelled is not None:
            return 0.0
        on_cuda = any(isinstance(value, torch.Tensor) and value.is_cuda for value in args)
        return _UNIT_TF32 if on_cuda and may_use_tf32(kind.name) else 0.0

    def _perturb_truncation(self, tensor: Tensor) -> Tensor:
        """A factor of a product in TF32 with an error that all its values share.

        Some kernels round to TF32, others cut the digits off. Then all values are too small, by
        0.35 units on average, and such errors add up instead of cancelling.
        """
        if not is_inexact(tensor) or tensor.layout in SPARSE_LAYOUTS:
            return tensor
        return tensor * (1 + self.gain * _UNIT_TF32 / 2 * self._draws.uniform(-1, 1))

    def call_composite(self, func: Any, floats: dict[str, Tensor], options: dict[str, Any]) -> Any:
        """Run a function of several operators as the one that it is natively.

        Its result and the gradients that it passes back are rounded to its dtype; all else inside
        of it is in float32. The values and the gradient that meet what kernels of attention round
        inside are perturbed in its place, as in `_MEETS_ROUNDED`.
        """
        unit = self._unit_of(func)
        if func is ATTENTION and attends_in_one_kernel(floats, options):
            return func(**floats, **options)
        bordered_operands = {
            name: self._pass_border(value, unit if name == "value" else 0.0, unit)
            for name, value in floats.items()
        }
        inside = Inside(min(unit, UNIT_F32), unit)
        with self.inside(inside):
            result = func(**bordered_operands, **options)
        self.mark_backward(result, [value.grad_fn for value in bordered_operands.values()], inside)
        return self._pass_border(result, unit, unit if func is ATTENTION else 0.0)

    def _pass_border(self, value: Tensor, unit: float, back: float) -> Tensor:
        """A value rounded to a unit, and its gradient to the unit `back`."""
        with self.inside(Inside(unit, unit)):
            passed = value * 1.0
        if passed.grad_fn is not None:
            self.mark_node(passed.grad_fn, Inside(back, back))
        return passed

    def _unit_of(self, func: Any) -> float:
        if self.within is not None:
            return self.within.unit
        ordinal = self._counts.get(func, 0)
        self._counts[func] = ordinal + 1
        dtype = self.log.get((func, ordinal))
        return self.unit if dtype is None else torch.finfo(dtype).eps / 2

    def _shaken(self, tensor: Tensor, reach: float) -> Tensor:
        if not is_inexact(tensor):
            return tensor
        if tensor.layout in SPARSE_LAYOUTS:
            return map_values(tensor, lambda values: self._shaken(values, reach))
        repeats = self._looks_for_repeats and _has_repeats(tensor)
        return self._times_noise(self._place(tensor, repeats=repeats), reach)

    def _inexact_part(self, tensor: Any, noisy: Any, unit: float) -> Any:
        """The noise of values that are rounded; the number of an expert is none of them."""
        fits = _needs_no_rounding(tensor, unit) if isinstance(tensor, torch.Tensor) else None
        return noisy if fits is None else torch.where(fits, tensor, noisy)

    def _times_noise(self, noise_source: _NoiseSource, reach: float) -> Tensor:
        """A tensor times its noise; a factor keeps an infinity infinite instead of NaN."""
        tensor = noise_source.tensor
        if noise_source.start is None:
            factor = self._uniform(noise_source).mul_(reach).add_(1)
        else:
            factor = self._pool.factors(tensor, noise_source.start, reach)
        if tensor.dtype in _WIDEST:
            return tensor * factor
        return (tensor.to(torch.float64) * factor).to(tensor.dtype)

    @property
    def _looks_for_repeats(self) -> bool:
        return self.gain == 1

    def _place(self, tensor: Tensor, *, repeats: bool) -> _NoiseSource:
        """Where the noise of a tensor comes from.

        Rounding is a function of the rounded value: if values repeat, their errors repeat too and
        add up. Then the noise is a function of each value; otherwise it is a random part of the
        pool, which is cheaper. With a gain it always comes from the pool: the values of two runs
        with opposite gains differ, and their noise must be opposite.
        """
        if repeats and self._looks_for_repeats:
            return _NoiseSource(tensor, None)
        count = tensor.numel()
        pool = self._pool.uniform(tensor.device, count)
        return _NoiseSource(tensor, self._draws.randrange(pool.numel() - count + 1))

    def _uniform(self, noise_source: _NoiseSource) -> Tensor:
        """Uniform noise in [-1, 1]; a new tensor if it depends on the values."""
        tensor = noise_source.tensor
        if noise_source.start is None:
            return _noise_by_value(tensor, self._draws.getrandbits(62))
        pool = self._pool.uniform(tensor.device, tensor.numel())
        return _cut_from_pool(pool, noise_source.start, tensor)


def _error_of_rounded_output(
    within: Inside, grad: Tensor, weights: Tensor, dim: int
) -> SharedError:
    """Kernels of attention take the sum of each row from the output, which is rounded."""
    size = (grad * weights).square().sum(dim, keepdim=True).sqrt()
    coarser = within.outer / min(within.outer, UNIT_F32)
    return SharedError(weights.abs() * size * coarser, size.shape)


def unit_inside(kind: Traits, unit: float) -> float:
    """The unit of what an operator computes before it rounds its result.

    Kernels for half precisions compute in float32. Those of others may do anything.
    """
    return min(unit, UNIT_F32) if kind.namespace in {"aten", "prims"} else unit


def _draw_uniform(seed: int, device: torch.device, count: int) -> Tensor:
    if device.type == "cpu":
        return _draw_smallest(seed) if count == _SMALLEST_POOL else _draw_on_cpu(seed, count)
    generator = torch.Generator(device).manual_seed(seed)
    pool = torch.empty(count, dtype=torch.float64, device=device)
    return pool.uniform_(-1, 1, generator=generator)


@functools.lru_cache(maxsize=1)
def _draw_smallest(seed: int) -> Tensor:
    """The pool of small programs, kept for the next one: nothing writes to a pool."""
    return _draw_on_cpu(seed, _SMALLEST_POOL)


def _draw_on_cpu(seed: int, count: int) -> Tensor:
    # NumPy's generator is many times faster than torch's here.
    drawn = np.random.Generator(np.random.SFC64(seed)).random(count)
    with torch.inference_mode(mode=False):  # it may be used outside of a program's own
        return torch.from_numpy(drawn).mul_(2).sub_(1)


def _cut_from_pool(pool: Tensor, start: int, tensor: Tensor) -> Tensor:
    """A part of the pool in the shape of a tensor, with the same strides if they leave no gap.

    Operands with equal strides are multiplied five times faster than others.
    """
    if not tensor.is_contiguous() and _is_dense(tensor):
        return pool.as_strided(tensor.shape, tensor.stride(), start)
    return pool.narrow(0, start, tensor.numel()).view(tensor.shape)


def _flatten(tensor: Tensor) -> Tensor:
    """All values as one dimension, in an order that avoids a copy."""
    if not tensor.is_contiguous() and _is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gap or overlap, in some order of its axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _has_repeats(tensor: Tensor) -> bool:
    """Whether many values of a tensor are equal, judged by a sample."""
    count = tensor.numel()
    if tensor.is_complex() or count < 2:  # noqa: PLR2004
        return False
    sample = _flatten(tensor)[:: max(1, count // _SAMPLE_SIZE)]
    values = sample.tolist()
    zeros = values.count(0.0)  # they are exact, and repeat in many tensors
    different = len(set(values)) - bool(zeros)
    return len(values) - zeros - different > _REPEATED_SHARE * sample.numel()


def _noise_by_value(tensor: Tensor, salt: int) -> Tensor:
    """Noise in [-1, 1] as a function of each value: a hash of its bits."""
    bits = tensor.to(torch.float64).contiguous().view(torch.int64)
    mixed = (bits ^ salt).mul_(_MULTIPLIER)
    mixed.bitwise_xor_(mixed >> 29).mul_(_MULTIPLIER)
    mixed.bitwise_right_shift_(12).bitwise_and_(_MASK)
    return mixed.to(torch.float64).mul_(2.0 / _MASK).sub_(1.0)


def _needs_no_rounding(tensor: Tensor, unit: float) -> Tensor | None:
    """Where a result fits the dtype it is rounded to, and so is not rounded; None if nowhere.

    Masks, counts, positions and powers of two are exact in every precision; noise on them would be
    the noise of another program. In a float64 program, values that fit float32 count as such.
    """
    narrow = next((dtype for dtype, u in _UNITS.items() if unit >= u), torch.float32)
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if not parts.numel():
        return None
    if parts.device.type != "cpu":
        # To ask whether it fits anywhere, the host would have to wait for the device.
        fits = parts.to(narrow).to(parts.dtype) == parts
        return fits.all(dim=-1) if tensor.is_complex() else fits
    few = parts.numel() <= _BLOCK
    for piece in [parts] if few else _flatten(parts).split(_BLOCK):
        fits = piece.to(narrow).to(piece.dtype) == piece
        # The maximum of a mask's bytes is many times faster than `any`.
        if fits.view(torch.uint8).max():
            break
    else:
        return None
    if not few:
        fits = parts.to(narrow).to(parts.dtype) == parts
    return fits.all(dim=-1) if tensor.is_complex() else fits
