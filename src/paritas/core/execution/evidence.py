"""How far rounding moves a program's results, measured by running it again.

The arbiter is the reference in float64; perturbed runs are the reference with random rounding
errors. Each run is made on first use. The candidate in float64 comes from elsewhere: it is not
evidence about the reference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

import torch

from paritas.core.errors import in_one_line
from paritas.core.execution.observation import RunOptions, same_value
from paritas.core.execution.program import Program
from paritas.core.execution.run_plan import RunStep
from paritas.core.numerics.automatic import nonfinite_mismatch
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.criterion import (
    UNIT_F64,
    Jumps,
    rms_difference,
    unit_roundoff,
)
from paritas.core.numerics.pooling import sample
from paritas.core.numerics.whole_error import WholeError, whole_error
from paritas.core.precision.lifting import DtypeLog, LiftMode
from paritas.core.precision.perturbing import DecisionLog, NoisePool, PerturbMode
from paritas.core.results.progress import Progress
from paritas.core.torch_private.global_state import quietly
from paritas.core.torch_private.operators import default_dtype, own_default

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.execution.observation import Observation
    from paritas.core.results.items import Item


# --- Running a program once more ------------------------------------------------------------------

_Seen = TypeVar("_Seen")


class WideDefault:
    """Float64 for tensors that a program creates without a dtype.

    Under a lifting mode, the mode does this without an effect on other threads. A program that
    uses the default where the mode cannot see it (`torch.tensor(0.1)`, a custom operator) runs
    again under another default dtype, and so do its later runs. Without a mode, all programs do.
    """

    def __init__(self) -> None:
        """Start without knowledge of the program."""
        self.is_asked = False

    def run(self, mode: LiftMode | None, once: Callable[[], _Seen]) -> _Seen:
        """Call `once`, which runs the program under `mode`, once or twice; return its result."""
        if mode is not None and mode.widths and not self.is_asked:
            run_result = once()
            if not mode.asked_default:
                return run_result
            self.is_asked = True
            mode.start_over()
        with default_dtype(torch.float64):
            return once()


@quietly()
def run_quietly(program: Program, options: RunOptions, default: WideDefault) -> list[Observation]:
    """Run a program without its logs and warnings: the user did not request this run."""
    if not options.wide or program.sets_default:
        return program.run(options)
    return default.run(options.mode, lambda: program.run(options))


# --- What is known about a program ----------------------------------------------------------------

# Decisions are searched with noise this many times larger than the program's. A decision that the
# candidate's rounding can flip then flips in nearly every second pair of runs.
JUMP_GAIN = 4.0
# Kernels may round more than predicted, as Winograd convolutions do. The outputs show how much,
# and the noise of pairs of runs grows by at most this factor.
MOST_KERNEL_NOISE = 4.0
# Beyond relative noise of this size a smooth program no longer moves by opposite amounts, and the
# rest of a pair would hide faults. bfloat16 reaches it without any larger gain.
MOST_SHAKE = 2.0**-6
_FIRST_PAIR_SEED = 1 << 16
# Two native runs further apart than this many times the error of one differ by more than rounding.
OWN_ERRORS = 4.0
# If a larger share of an item becomes non-finite under a perturbation, the perturbed runs measure
# nothing.
MOST_LEAVING = 0.5

P_co = TypeVar("P_co", bound=Program, covariant=True)


class NoiseNotYetMeasured(Exception):  # noqa: N818  (not an error: the caller asks again later)
    """Perturbed runs were requested while they are deferred."""


class Notes(list[str]):
    """Notes for a verdict.

    Attributes:
        weaker: the notes that say why the check is weaker than it could be.
    """

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.weaker: set[str] = set()

    def add_weaker(self, note: str) -> None:
        """Add a note that says why the check is weaker than it could be."""
        self.append(note)
        self.weaker.add(note)


@dataclasses.dataclass
class _Spread:
    is_native: bool  # at the noise of the program's own precision
    runs: int = 0
    squares: dict[tuple[int, Item], Tensor] = dataclasses.field(default_factory=dict)
    whole: dict[tuple[int, Item], list[WholeError | None]] = dataclasses.field(default_factory=dict)

    def forget(self, key: tuple[int, Item]) -> None:
        """Drop the sums of one item."""
        for sums in (self.squares, self.whole):
            sums.pop(key, None)


@dataclasses.dataclass
class _Pairs:
    """Sums over pairs of runs: squares of the sum of opposite deviations, and of their sizes.

    `moves` has the deviations themselves, pair by pair, for a sample of the elements.
    """

    runs: int = 0
    gain: float = JUMP_GAIN
    left: dict[tuple[int, Item], Tensor] = dataclasses.field(default_factory=dict)
    size: dict[tuple[int, Item], Tensor] = dataclasses.field(default_factory=dict)
    moves: dict[tuple[int, Item], list[Tensor]] = dataclasses.field(default_factory=dict)

    def forget(self, key: tuple[int, Item]) -> None:
        """Drop the sums of one item."""
        for sums in (self.left, self.size, self.moves):
            sums.pop(key, None)


class Demand:
    """What one comparison still needs from perturbed runs, and their results so far.

    Attributes:
        settled: calls and items that need no more evidence; their spread is not kept.
        puts_off: perturbed runs are deferred until it is known which items need them.
        at_second: gradients of gradients are judged now, and perturbed runs compute them.
        spreads: unit roundoff -> sums over the runs so far.
        jumps: the same for pairs of runs, for the effect of decisions.
        repeats: what further native runs gave for items that need it.
    """

    def __init__(self, *, settles: bool = True) -> None:
        """Everything is needed at first; without `settles`, everything stays needed."""
        self.settles = settles
        self.settled: set[tuple[int, Item]] = set()
        self.puts_off = False
        self.at_second = False
        self.spreads: dict[float, _Spread] = {}
        self.jumps: dict[float, _Pairs] = {}
        self.repeats: list[dict[tuple[int, Item], Any]] = []

    def settle(self, call: int, item: Item) -> None:
        """Note that an item needs no more evidence."""
        if not self.settles:
            return
        self.settled.add((call, item))
        for spread in self.spreads.values():
            spread.forget((call, item))
        for pairs in self.jumps.values():
            pairs.forget((call, item))

    def unsettle(self) -> None:
        """Start again: other values are compared."""
        self.settled.clear()
        self._forget_runs()

    def go_on_to_second(self) -> None:
        """Judge gradients of gradients next, by separate perturbed runs."""
        self.at_second = True
        self._forget_runs()

    def _forget_runs(self) -> None:
        self.spreads.clear()
        self.jumps.clear()
        self.repeats.clear()


@final
class Evidence(Generic[P_co]):
    """Further runs of a reference, call by call, made on first use.

    Attributes:
        native: the native runs, call by call.
        notes: why something could not be run, for the verdict.
        tell: called before every step that may take long.
        dtype: the most frequent floating dtype of the program.
        dtypes: all its floating dtypes.
        casts: the narrow dtypes that the program casts to, as seen in lifted runs so far.
        shapes: other shapes that values had in perturbed runs, by call and item.
        shows_dtypes: the arbiter was made, and every cast in it was seen.
        default: the default dtype under which it runs.
        everything: the demand for comparisons without one of their own.
        open_decisions: operator -> how many of its decisions rounding can flip, of how many, in the
            pair of runs that flipped most.
        seed: the seed of the perturbations.
        has_perturbed: whether any perturbed run was made.
        is_smooth: perturbed runs were made, and nothing in them decides: pairs of runs can show no
            more than the first of them does.
    """

    def __init__(
        self, program: P_co, native: list[Observation] | None = None, seed: int = 0
    ) -> None:
        """`native` are the native runs, if there are any already."""
        self._program = program
        self.seed = seed
        self.notes = Notes()
        self.tell: Callable[[str], None] = lambda _: None
        self.default = own_default()
        self.casts: set[torch.dtype] = set()
        self.shapes: dict[tuple[int, Item], set[torch.Size]] = {}
        self.shows_dtypes = False
        self._wide_default = WideDefault()
        # Before any other run: the first run sets the dtypes of the cotangents.
        self.native = self.run(RunOptions()) if native is None else native
        counts = program.dtypes(self.native) or {self.default: 0}
        self.dtypes = set(counts)
        self.dtype = max(counts.items(), key=lambda item: item[1])[0]
        self.has_perturbed = False
        self.is_smooth = False
        self._is_asked = False
        self._arbiter: list[Observation] | None = None
        self._baseline: list[Observation] | None = None
        self._log: dict[Any, torch.dtype] | None = None
        self._decided: dict[float, list[list[Observation]]] = {}
        self._drawn: set[tuple[int, Item]] = set()
        self._draw_runs = 0
        self.open_decisions: dict[str, tuple[int, int]] = {}
        self.everything = Demand(settles=False)
        self._pool = NoisePool(seed)

    @property
    def program(self) -> P_co:
        """The program that the evidence is about."""
        return self._program

    def run(self, options: RunOptions) -> list[Observation]:
        """Run the reference once more."""
        return run_quietly(self._program, options, self._wide_default)

    @property
    def unit(self) -> float:
        """Unit roundoff of the coarsest arithmetic the reference does."""
        return max(unit_roundoff(dtype) for dtype in self.dtypes)

    def summed_unit(self, item: Item, call: int = 0) -> float:
        """Unit roundoff of a gradient of which the native run keeps a sketch; else 0."""
        form = self.native[call].gradient_forms.get(item)
        return 0.0 if form is None else unit_roundoff(form.dtype)

    @property
    def is_narrow(self) -> bool:
        """Whether there is a wider precision to lift the program to."""
        return self.unit > UNIT_F64

    def lift_mode(self, **how: Any) -> LiftMode:
        """A mode for a lifted run of this program."""
        return LiftMode(self.dtype, self.default, **how)

    @property
    def has_arbiter(self) -> bool:
        """Whether the reference has run in float64."""
        return self._arbiter is not None

    def arbiter(self) -> list[Observation] | None:
        """The reference in float64, call by call, or None if that is not possible."""
        if not self._is_asked:
            self._is_asked = True
            if not self._program.can_be_lifted:
                return None
            if self.is_narrow:
                quick = self._program.quick_wide()
                self._arbiter = self._lift_by_mode() if quick is None else [quick]
            elif self._program.notes_float64:
                self.notes.add_weaker("the program runs in float64: there is no wider arbiter")
        return self._arbiter

    def _lift_by_mode(self) -> list[Observation] | None:
        """Run the reference in float64 by a dispatch mode, which also shows its casts."""
        self.tell(RunStep.ARBITER)
        looks = not self._program.knows_dtypes
        mode = self.lift_mode(remember_sums=looks)
        watch = _AutocastWatch() if looks else None
        observations = self.run(RunOptions(mode=mode, wide=True, watch=watch))
        usable = is_usable(observations, "no arbiter: the reference in float64", self.notes)
        if watch is not None:
            self.casts |= mode.casts
            self.dtypes |= mode.casts | watch.dtypes
        self.shows_dtypes = usable and not mode.foreign
        if usable:
            self._program.arbiter_made(observations)
        return observations if usable else None

    def spread(
        self, unit: float, call: int, item: Item, runs: int, demand: Demand | None = None
    ) -> Tensor | None:
        """The rms deviation of one item over perturbed runs; infinite where a run is not finite."""
        demand = demand or self.everything
        spread = demand.spreads.setdefault(unit, _Spread(is_native=unit == self.unit))
        while spread.runs < runs:
            if demand.puts_off:
                raise NoiseNotYetMeasured
            whose = "float64" if unit <= UNIT_F64 else "the dtype of the run"
            self.tell(f"measuring rounding in {whose}, run {spread.runs + 1}")
            observations = self.run_perturbed(unit, spread.runs, demand)
            if not is_usable(
                observations, "a perturbed run of the reference", self.notes, weakens=False
            ):
                return None
            self._add_run(spread, observations, demand)
            spread.runs += 1
        squares = spread.squares.get((call, item))
        if squares is None:
            return None
        if float(torch.isinf(squares).double().mean()) > MOST_LEAVING:
            changed = (call, item) in self.shapes
            how = "its shape changed" if changed else "most of it became NaN or infinite"
            self.notes.append(f"{item}: {how} when perturbed")
            return None
        return (squares / spread.runs).sqrt()

    def runs_made(self, unit: float, demand: Demand | None = None) -> int:
        """The number of perturbed runs of the spread so far."""
        spread = (demand or self.everything).spreads.get(unit)
        return 0 if spread is None else spread.runs

    def whole_errors(
        self, unit: float, call: int, item: Item, demand: Demand | None = None
    ) -> tuple[WholeError, ...]:
        """The errors of one item as a whole in the runs of its spread; none if not all are known.

        A run that is not finite has none.
        """
        spread = (demand or self.everything).spreads.get(unit)
        run_errors = [] if spread is None else spread.whole.get((call, item), [])
        known_errors = tuple(error for error in run_errors if error is not None)
        return known_errors if len(known_errors) == len(run_errors) else ()

    def _add_run(self, spread: _Spread, observations: list[Observation], demand: Demand) -> None:
        for key, value, (run,) in self._open_values(demand, observations):
            if spread.runs and key not in spread.squares:
                continue
            if isinstance(run, torch.Tensor) and run.shape != value.shape:
                self.shapes.setdefault(key, set()).add(run.shape)
            deviation = _squared_deviation(value, run)
            square_sum = spread.squares.get(key)
            spread.squares[key] = deviation if square_sum is None else square_sum + deviation
            if spread.is_native:
                total_error = whole_error(run, value) if isinstance(run, torch.Tensor) else None
                spread.whole.setdefault(key, []).append(total_error)

    def _open_values(
        self, demand: Demand, *runs: list[Observation]
    ) -> Iterator[tuple[tuple[int, Item], Tensor, tuple[Any, ...]]]:
        """Call and item, value, and its values in other runs, of what is not settled yet."""
        for call, (still, *moved) in enumerate(zip(self._base(), *runs, strict=False)):
            for item, value in still.items():
                if (call, item) not in demand.settled and is_inexact(value):
                    values = tuple(self.complete(observation, item) for observation in moved)
                    yield (call, item), value, values

    def repeats(
        self, call: int, item: Item, runs: int, demand: Demand | None = None
    ) -> list[Tensor]:
        """One item in further native runs; empty if the first of them changes nothing at all."""
        demand = demand or self.everything
        while len(demand.repeats) < runs and not (demand.repeats and not demand.repeats[0]):
            self.tell(f"running the reference once more, run {len(demand.repeats) + 1}")
            observations = self.run(RunOptions(second=demand.at_second))
            if not is_usable(observations, "the reference, run again,", self.notes, weakens=False):
                return []
            value_pairs = {
                (number, compared_item): (native_value, self.complete(moved, compared_item))
                for number, (still, moved) in enumerate(
                    zip(self.native, observations, strict=False)
                )
                for compared_item, native_value in still.items()
                if (number, compared_item) not in demand.settled and is_inexact(native_value)
            }
            is_same = all(same_value(*pair) for pair in value_pairs.values())
            values = {} if is_same and not demand.repeats else value_pairs
            demand.repeats.append({key: moved for key, (_, moved) in values.items()})
        repeat_values: list[Any] = [run.get((call, item)) for run in demand.repeats]
        return [value.detach() for value in repeat_values if is_inexact(value)]

    def jumps(
        self, unit: float, call: int, item: Item, pairs: int, demand: Demand | None = None
    ) -> Jumps | None:
        """The effect of decisions that rounding can flip.

        Two runs with opposite noise deviate by opposite amounts, except where a decision differs
        between them. So the sum of their deviations is the effect of the decisions, whichever
        operators decide, and almost zero elsewhere.
        """
        demand = demand or self.everything
        unit_pairs = demand.jumps.setdefault(unit, _Pairs())
        while unit_pairs.runs < pairs:
            if demand.puts_off:
                raise NoiseNotYetMeasured
            self.tell(f"looking for decisions within rounding, pair {unit_pairs.runs + 1} of runs")
            logs = DecisionLog(), DecisionLog()
            plus, minus = (
                self.run_perturbed(
                    unit, _FIRST_PAIR_SEED + unit_pairs.runs, demand, gain=gain, log=log
                )
                for gain, log in zip((unit_pairs.gain, -unit_pairs.gain), logs, strict=True)
            )
            for perturbed_run in (plus, minus):
                what = "a perturbed run of the reference"
                if not is_usable(perturbed_run, what, self.notes, weakens=False):
                    return None
            for name, change_counts in logs[0].count_changes(logs[1]).items():
                self.open_decisions[name] = max(
                    change_counts, self.open_decisions.get(name, (0, 0))
                )
            self._add_pair(unit_pairs, plus, minus, demand)
            unit_pairs.runs += 1
            if unit_pairs.runs == 1:
                gain = unit_pairs.gain * self._kernel_noise(plus[0], minus[0])
                unit_pairs.gain = min(gain, max(JUMP_GAIN, MOST_SHAKE / unit))
        uncancelled_square, size = (
            unit_pairs.left.get((call, item)),
            unit_pairs.size.get((call, item)),
        )
        if uncancelled_square is None or size is None:
            return None
        # A decision flips in at most one run of a pair: its squared effect is twice the mean
        # square. Then one of the two deviations remains; smooth ones cancel almost completely.
        moves = unit_pairs.moves.get((call, item), [])
        sampled = torch.stack(moves) if len(moves) == unit_pairs.runs else None
        return Jumps(
            (2 * uncancelled_square / unit_pairs.runs).sqrt(),
            uncancelled_square > size / 2,
            sampled,
        )

    def _kernel_noise(self, plus: Observation, minus: Observation) -> float:
        """The rounding of the native run relative to the predicted one, at least 1."""
        ratios = []
        for item, true in self._base()[0].outputs.items():
            native, up, down = (
                observation.value(item) for observation in (self.native[0], plus, minus)
            )
            if all(is_inexact(value) and value.shape == true.shape for value in (native, up, down)):
                foreseen = rms_difference(up, down) / 2 / JUMP_GAIN
                ratios += [rms_difference(native, true) / foreseen] if foreseen else []
        # The smallest ratio: in other outputs a decision may have flipped.
        return min(max(1.0, min(ratios, default=1.0)), MOST_KERNEL_NOISE)

    def _add_pair(
        self,
        pairs: _Pairs,
        plus: list[Observation],
        minus: list[Observation],
        demand: Demand,
    ) -> None:
        for key, value, pair in self._open_values(demand, plus, minus):
            if pairs.runs and key not in pairs.left:
                continue
            squares = _pair_squares(value, *pair)
            for sums, square in zip((pairs.left, pairs.size), squares, strict=False):
                before = sums.get(key)
                sums[key] = square if before is None else before + square
            if not value.is_complex() and all(map(_is_finite, pair)):
                true = sample(value)
                moved = torch.stack([sample(run) - true for run in pair])
                pairs.moves.setdefault(key, []).append(moved)

    def _base(self) -> list[Observation]:
        """The runs that perturbed runs are compared with."""
        if self._baseline is None:
            own_baseline = self._program.baseline(self)
            arbiter = self.arbiter() if own_baseline is None else own_baseline
            self._baseline = self.native if arbiter is None else arbiter
        return self._baseline

    def run_with_decisions(
        self, unit: float, runs: int, demand: Demand | None = None
    ) -> list[list[Observation]]:
        """Runs that record what decided their discrete results: a plain one, then perturbed.

        There are at least `runs` perturbed ones.
        """
        demand = demand or self.everything
        decision_runs = self._decided.setdefault(unit, [])
        if len(decision_runs) <= runs and demand.puts_off:
            raise NoiseNotYetMeasured
        if not decision_runs:
            plain = self.lift_mode(remember_decisions=True)
            decision_runs.append(self.run(RunOptions(wide=True, mode=plain)))
            self.casts |= plain.casts
        while len(decision_runs) <= runs:
            self.tell(f"looking for ties, run {len(decision_runs)}")
            seed = len(decision_runs) - 1
            decision_runs.append(self.run_perturbed(unit, seed, demand, remember_decisions=True))
        return decision_runs

    def run_perturbed(
        self,
        unit: float,
        seed: int,
        demand: Demand,
        *,
        remember_decisions: bool = False,
        gain: float = 1.0,
        log: DecisionLog | None = None,
    ) -> list[Observation]:
        """Run the reference with random rounding errors; settled gradients are left out.

        Runs that record decisions compute no gradients, which are not discrete.
        """
        is_first, self.has_perturbed = not self.has_perturbed, True
        leaving = _LeavingWatch() if is_first else None
        wide = self.arbiter() is not None or not self.is_narrow
        native = unit == self.unit and len(self.dtypes) > 1
        mode = PerturbMode(
            self.dtype,
            self.default,
            unit,
            self.seed + seed,
            log=self.dtype_log() if native else None,
            remember_decisions=remember_decisions,
            widen=wide,
            shake_inputs=self._program.shakes_inputs,
            pool=self._pool,
            gain=gain,
            decisions=log,
        )
        observations = self.run(
            RunOptions(
                wide=wide,
                mode=mode,
                watch=leaving,
                wanted=self._wanted_gradients(demand, none=remember_decisions),
                second=demand.at_second,
            )
        )
        before = not leaving.has_left if leaving is not None else self.is_smooth
        self.is_smooth = before and mode.is_smooth
        return observations

    def _wanted_gradients(self, demand: Demand, *, none: bool) -> frozenset[Item] | None:
        """The gradients that a perturbed run computes; None for all.

        All of them if a second call continues from the state of the first. If the order of
        operators identifies their dtypes, all or none: the backward pass comes last.
        """
        if len(self.native) > 1:
            return None
        items = (*self.native[0].gradients, *self.native[0].further)
        unsettled_items = frozenset(item for item in items if (0, item) not in demand.settled)
        if none or not unsettled_items:
            return frozenset()
        return unsettled_items if len(self.dtypes) == 1 else None

    def dtype_log(self) -> dict[Any, torch.dtype]:
        """The native dtype of each operator call of a mixed-precision program."""
        if self._log is None:
            log = DtypeLog()
            self.run(RunOptions(watch=log))
            self._log = log.calls
        return self._log

    def depends_on_draws(
        self, call: int | None = None, item: Item | None = None, runs: int = 1
    ) -> bool:
        """Whether an item, or any item, changes if the program draws other random numbers.

        Some programs draw numbers that they do not use, or use only in training. Rare uses, such as
        dropping a layer, take many runs to detect.
        """
        if not any(observation.drew_random_numbers for observation in self.native):
            return False
        while self._draw_runs < runs and not (item is None and self._drawn):
            self.tell(Progress("running with other random numbers", self._draw_runs, runs))
            self._draw_runs += 1
            moved = self.run(RunOptions(other_draws=self._draw_runs))
            what = "the reference with other random numbers"
            usable = is_usable(moved, what, self.notes, weakens=False)
            self._drawn |= {
                (number, compared_item)
                for number, still in enumerate(self.native)
                for compared_item, value in still.items()
                if not usable
                or len(moved) <= number
                or not self._is_same_but_for_rounding(number, compared_item, value, moved[number])
            }
        return bool(self._drawn) if item is None else (call, item) in self._drawn

    def _is_same_but_for_rounding(
        self, call: int, item: Item, value: Any, observation: Observation
    ) -> bool:
        """Whether another native run gives the same, to the bit or to its own error.

        Numbers that only decide an order, as of patches, change no more than that.
        """
        other = self.complete(observation, item)
        if same_value(value, other):
            return True
        arbiter = self.arbiter()
        true = None if arbiter is None else self.complete(arbiter[call], item)
        comparable = is_inexact(value) and is_inexact(other) and is_inexact(true)
        if true is None or not comparable or not value.shape == other.shape == true.shape:
            return False
        return rms_difference(value, other) <= OWN_ERRORS * rms_difference(value, true)

    def complete(self, observation: Observation, item: Item) -> Any:
        """An item of a run; an unchanged input or buffer has its initial value."""
        return complete_item(observation, item, self._program)


def complete_item(observation: Observation, item: Item, program: Program) -> Any:
    """An item of a run; an unchanged one has its initial value, or `MISSING`."""
    is_present = any(
        item in table for table in (observation.outputs, observation.after, observation.state)
    )
    if is_present or not item.kind.is_afterwards:
        return observation.value(item)
    if item.kind.is_after_backward:
        return complete_item(observation, item.of(item.kind.after_call), program)
    return program.initial(item)


def is_usable(
    observations: list[Observation], who: str, notes: Notes, *, weakens: bool = True
) -> bool:
    """Whether a run succeeded; if not, a note says why."""
    for observation in observations:
        error = observation.error or observation.gradient_error
        if error is not None:
            note = f"{who} raised {in_one_line(error, 100)}"
            notes.add_weaker(note) if weakens else notes.append(note)
            return False
    return True


class _FunctionWatch(torch.overrides.TorchFunctionMode):
    """Notes each function of torch that a program calls."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.note(func, args)
        return func(*args, **(kwargs or {}))

    def note(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Note a call before it runs."""
        raise NotImplementedError


class _AutocastWatch(_FunctionWatch):
    """Records the dtypes of autocast regions, which do not change float64 values."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def note(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        for value in args:
            if isinstance(value, torch.Tensor):
                kind = value.device.type
                with contextlib.suppress(RuntimeError):  # a device without autocast
                    if torch.is_autocast_enabled(kind):
                        self.dtypes.add(torch.get_autocast_dtype(kind))
                break


class _LeavingWatch(_FunctionWatch):
    """Notes whether values leave torch where no dispatch mode sees it, to decide in Python."""

    _LEAVES = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})

    def __init__(self) -> None:
        super().__init__()
        self.has_left = False

    def note(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.has_left |= getattr(function, "__name__", "") in self._LEAVES


def _squared_deviation(value: Tensor, moved: Any) -> Tensor:
    """(moved - value)^2; infinite where the two have different NaN or infinite values."""
    value = value.to(torch.complex128 if value.is_complex() else torch.float64)
    wide = torch.float64
    if not isinstance(moved, torch.Tensor) or moved.shape != value.shape:
        return torch.full(value.shape, math.inf, dtype=wide, device=value.device)
    moved = moved.to(value.device, value.dtype)
    squared = (moved - value).abs().square()
    agree = torch.isfinite(squared)
    squared = torch.where(agree, squared, 0.0)
    differ = nonfinite_mismatch(value, moved)
    return squared if differ is None else torch.where(differ, math.inf, squared)


def _is_finite(value: Any) -> bool:
    return is_inexact(value) and bool(torch.isfinite(value.double()).all())


def _pair_squares(value: Tensor, plus: Any, minus: Any) -> list[Tensor]:
    """For two deviations from `value`: the square of their sum, and the sum of their squares."""
    wide = torch.complex128 if value.is_complex() else torch.float64
    value = value.to(wide)
    for moved in (plus, minus):
        if not isinstance(moved, torch.Tensor) or moved.shape != value.shape:
            return []
    up, down = (moved.to(value.device, wide) - value for moved in (plus, minus))
    uncancelled_square, size = (up + down).abs().square(), up.abs().square() + down.abs().square()
    finite = torch.isfinite(uncancelled_square) & torch.isfinite(size)
    return [torch.where(finite, square, 0.0) for square in (uncancelled_square, size)]
