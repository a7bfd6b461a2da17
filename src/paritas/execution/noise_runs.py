"""How much a program wavers by its own rounding, measured by running it again.

The arbiter is the reference in float64, perturbed runs are the reference with every rounding drawn
at random. Each run is made when the judge first asks for it.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.global_state import quietly
from paritas._torch.operators import COMPARISONS, WIDE, own_default
from paritas.execution.evidence import NoiseNotYetMeasured, WideDefault
from paritas.execution.observation import Observation, is_afterwards
from paritas.numerics.automatic import nonfinite_mismatch
from paritas.numerics.criterion import MAX_Z, UNIT_F64, unit_roundoff
from paritas.numerics.flattening import is_inexact
from paritas.numerics.metrics import promotable
from paritas.precision.lifting import DtypeLog, LiftMode
from paritas.precision.perturbing import NoisePool, PerturbMode
from paritas.reports.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


# --- The default dtype of a lifted run ------------------------------------------------------------

# --- The further runs of a program ----------------------------------------------------------------

DECIDING_RUNS = 12
# Where more of an item than this turns non-finite under a perturbation, the perturbed run is no
# measure of anything.
MOST_LEAVING = 0.5


@dataclasses.dataclass
class _Spread:
    runs: int = 0
    squares: dict[tuple[int, str], Tensor] = dataclasses.field(default_factory=dict)


class NoiseRuns(abc.ABC):
    """Further runs of a reference, call by call, made when the judge first asks for them.

    Attributes:
        native: what the reference did, call by call.
        notes: why something could not be run, for the verdict.
        settled: paths that need no evidence any more; their spread is not kept.
        puts_off: perturbed runs are refused for now, until it is known what needs them.
        tell: hears of every step that may take long.
        dtype: the floating dtype that most of the program is in.
        dtypes: all of them.
        default: the default dtype under which it runs.
        wide_default: how the reference gets another one in a lifted run.
        lift_unit: unit roundoff at which a lifted run is judged.
        seed: of the perturbations.
        shake_inputs: whether the inputs are themselves known to rounding only.
    """

    def __init__(
        self, native: list[Observation], dtypes: dict[torch.dtype, int], seed: int
    ) -> None:
        """`dtypes` counts the values of each floating dtype of the program."""
        self.native = native
        self.notes: list[str] = []
        self.settled: set[tuple[int, str]] = set()
        self.puts_off = False
        self.tell: Callable[[str], None] = lambda _: None
        self.default = own_default()
        self.wide_default = WideDefault()
        counts = dtypes or {self.default: 0}
        self.dtypes = set(counts)
        self.dtype = max(counts.items(), key=lambda item: item[1])[0]
        self.lift_unit = UNIT_F64
        self.seed = seed
        self.shake_inputs = False
        self._asked: set[str] = set()
        self._arbiter: list[Observation] | None = None
        self._shows_dtypes = False  # the arbiter: every cast in it was seen
        self._log: dict[Any, torch.dtype] | None = None
        self._spreads: dict[float, _Spread] = {}
        self._decided: dict[float, list[list[Observation]]] = {}
        self._pool = NoisePool(seed)

    def __init_subclass__(cls, **options: Any) -> None:
        """Make every further run quiet: the user did not ask for it, and its failure is a note."""
        super().__init_subclass__(**options)
        for name in ("run_reference", "lifted", "coarsest", "ran_uncompiled"):
            if name in cls.__dict__:
                setattr(cls, name, quietly()(cls.__dict__[name]))

    @abc.abstractmethod
    def run_reference(
        self,
        *,
        wide: bool = False,
        mode: LiftMode | None = None,
        watch: contextlib.AbstractContextManager[Any] | None = None,
    ) -> list[Observation]:
        """Run the reference once more; `wide` on inputs and state in float64."""

    @abc.abstractmethod
    def lifted(self) -> list[Observation] | None:
        """The candidate in float64, call by call, or None if that cannot be."""

    @abc.abstractmethod
    def complete(self, seen: Observation, path: str) -> Any:
        """An item of a run; an input or buffer it left alone has the value it came with."""

    def given(self) -> dict[str, Any]:
        """What the program was given, by name, as far as that is known."""
        return {}

    def arbiter(self) -> list[Observation] | None:
        """The reference in float64, call by call, or None if that cannot be."""
        if "arbiter" not in self._asked:
            self._asked.add("arbiter")
            if self.is_narrow:
                self.tell("running the reference in float64")
                mode = LiftMode(self.dtype, self.default, remember_sums=True)
                watch = _AutocastWatch()
                seen = self.run_reference(mode=mode, wide=True, watch=watch)
                if self.is_usable(seen, "no arbiter: the reference in float64"):
                    self._arbiter = seen
                self.dtypes |= mode.casts | watch.dtypes
                self._shows_dtypes = self._arbiter is not None and not mode.foreign
            else:
                self.notes.append("the program runs in float64: there is no wider arbiter")
        return self._arbiter

    @property
    def unit(self) -> float:
        """Unit roundoff of the coarsest arithmetic the reference does."""
        return max(unit_roundoff(dtype) for dtype in self.dtypes)

    def coarsest(self) -> float | None:
        """Unit roundoff of the coarsest dtype inside, for whoever has a cheap way to look."""
        return None

    @property
    def is_narrow(self) -> bool:
        """Whether there is a wider precision to lift the program to."""
        return self.unit > UNIT_F64

    def spread(self, unit: float, call: int, path: str, runs: int) -> Tensor | None:
        """The rms deviation of one item over perturbed runs; infinite where one left it."""
        spread = self._spreads.setdefault(unit, _Spread())
        while spread.runs < runs:
            if self.puts_off:
                raise NoiseNotYetMeasured
            whose = "float64" if unit <= UNIT_F64 else "the dtype of the run"
            self.tell(Progress(f"measuring rounding in {whose}", spread.runs, runs))
            seen = self.perturbed(unit, spread.runs)
            if not self.is_usable(seen, "a perturbed run of the reference"):
                return None
            self._add_run(spread, seen)
            spread.runs += 1
        squares = spread.squares.get((call, path))
        if squares is None:
            return None
        if float(torch.isinf(squares).double().mean()) > MOST_LEAVING:
            self.notes.append(f"{path}: most of it left the finite numbers when perturbed")
            return None
        return (squares / spread.runs).sqrt()

    def _add_run(self, spread: _Spread, seen: list[Observation]) -> None:
        base = self._base()
        for call, (still, moved) in enumerate(zip(base, seen, strict=False)):
            for path, value in still.items():
                key = (call, path)
                if key in self.settled or not is_inexact(value):
                    continue
                if spread.runs and key not in spread.squares:
                    continue
                deviation = _squared_deviation(value, self.complete(moved, path))
                known = spread.squares.get(key)
                spread.squares[key] = deviation if known is None else known + deviation

    def decided(self, unit: float) -> list[list[Observation]]:
        """Runs that remember what decided their discrete results: a plain one, then perturbed."""
        if unit not in self._decided:
            if self.puts_off:
                raise NoiseNotYetMeasured
            plain = LiftMode(self.dtype, self.default, remember_decisions=True)
            runs = [self.run_reference(wide=True, mode=plain)]
            runs += [
                self.perturbed(unit, seed, remember_decisions=True) for seed in range(DECIDING_RUNS)
            ]
            self._decided[unit] = runs
        return self._decided[unit]

    def unsettle(self) -> None:
        """Everything needs evidence again: other values are compared with the same runs."""
        self.settled.clear()
        self._spreads.clear()

    def perturbed(
        self, unit: float, seed: int, *, remember_decisions: bool = False
    ) -> list[Observation]:
        """Run the reference with its roundings drawn at random."""
        wide = self.arbiter() is not None or not self.is_narrow
        native = unit == self.unit and len(self.dtypes) > 1
        mode = PerturbMode(
            self.dtype,
            self.default,
            unit,
            self.seed + seed,
            log=self._dtype_log() if native else None,
            remember_decisions=remember_decisions,
            widen=wide,
            shake_inputs=self.shake_inputs,
            pool=self._pool,
        )
        return self.run_reference(wide=wide, mode=mode)

    def _dtype_log(self) -> dict[Any, torch.dtype]:
        """In which dtype each operator of a mixed-precision program runs natively."""
        if self._log is None:
            log = DtypeLog()
            self.run_reference(watch=log)
            self._log = log.calls
        return self._log

    def _base(self) -> list[Observation]:
        arbiter = self.arbiter()
        return self.native if arbiter is None else arbiter

    def is_usable(self, seen: list[Observation], who: str) -> bool:
        """Whether a run went well; if not, a note says why."""
        for observation in seen:
            error = observation.error or observation.gradient_error
            if error is not None:
                text = str(error).strip().splitlines()[0] if str(error).strip() else ""
                self.notes.append(f"{who} raised {type(error).__name__}: {text:.100}")
                return False
        return True


class _AutocastWatch(torch.overrides.TorchFunctionMode):
    """Notes the dtypes of autocast regions, which float64 values pass through untouched."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for value in args:
            if isinstance(value, torch.Tensor):
                kind = value.device.type
                with contextlib.suppress(RuntimeError):  # a device without autocast
                    if torch.is_autocast_enabled(kind):
                        self.dtypes.add(torch.get_autocast_dtype(kind))
                break
        return func(*args, **(kwargs or {}))


def _squared_deviation(value: Tensor, moved: Any) -> Tensor:
    """(moved - value)^2, infinite where the two are not both finite or both the same."""
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


# --- The runs, seen at one item -------------------------------------------------------------------


class ItemEvidence:
    """The runs, seen at one item of one call."""

    def __init__(self, runs: NoiseRuns, path: str, call: int = 0, *, lifts: bool = True) -> None:
        """`lifts=False` where the candidate has no lifted run of this call."""
        self.runs = runs
        self.path = path
        self.call = call
        self.lifts = lifts

    @property
    def unit(self) -> float | None:
        """Unit roundoff of the program's precision."""
        return self.runs.unit

    def coarsest(self) -> float | None:
        """Unit roundoff of the coarsest dtype inside the reference, where that is looked for."""
        return self.runs.coarsest() if self.lifts else None

    @property
    def lift_unit(self) -> float:
        """Unit roundoff at which the lifted run is judged."""
        return self.runs.lift_unit

    def arbiter(self) -> Tensor | None:
        """The reference's value in float64."""
        value = self._value(self.runs.arbiter())
        native: Any = self.runs.complete(self.runs.native[self.call], self.path)
        if value is None or not isinstance(native, torch.Tensor):
            return None
        return value if value.shape == native.shape else None

    def lifted(self) -> Tensor | None:
        """The candidate's value in float64."""
        arbiter = self.arbiter()
        value = self._value(self.runs.lifted()) if self.lifts and arbiter is not None else None
        if value is None or arbiter is None or value.shape != arbiter.shape:
            return None
        return value.to(arbiter.device)

    def spread(self, unit: float, runs: int) -> Tensor | None:
        """The rms deviation over perturbed runs."""
        return self.runs.spread(unit, self.call, self.path, runs)

    def least_spread(self) -> Tensor | None:
        """What the last sum behind a narrow value rounds, as the arbiter shows it."""
        arbiter = self.runs.arbiter()
        native: Any = self.runs.complete(self.runs.native[self.call], self.path)
        if arbiter is None or len(arbiter) <= self.call or not isinstance(native, torch.Tensor):
            return None
        least = arbiter[self.call].least_noise.get(self.path)
        # Of a sum in float64 there is no such rounding.
        narrow = native.dtype in WIDE and least is not None and least.shape == native.shape
        return least if narrow else None

    def undecided(self, candidate: Tensor, unit: float) -> Tensor | None:
        """Where rounding of size `unit` decides between the reference's value and this one."""
        native: Any = self.runs.complete(self.runs.native[self.call], self.path)
        if not isinstance(native, torch.Tensor) or candidate.shape != native.shape:
            return None
        reference, candidate = promotable(native, candidate.to(native.device))
        runs = [run[self.call] for run in self.runs.decided(unit) if len(run) > self.call]
        margins = [
            decision.margin(reference, candidate)
            for run in runs
            if (decision := run.decisions.get(self.path)) is not None
        ]
        known = [margin for margin in margins if margin is not None]
        if runs and len(known) == len(runs):
            # What separates the two choices, against how much rounding moves it.
            plain, *moved = known
            moves = torch.stack([(margin - plain).double() for margin in moved])
            spread = moves.square().mean(dim=0).sqrt()
            near = plain.abs() <= MAX_Z * spread
            if runs[0].decisions[self.path].kind in COMPARISONS:
                # Of two equal scores either may be chosen, and a half may be rounded either way;
                # but what no rounding moves lies on the side where the comparison puts it.
                near &= spread > 0
            return near & (reference != candidate)
        # Nothing is known of how it came about: rounding decides where it gives the candidate's.
        reached = torch.zeros_like(reference, dtype=torch.bool)
        for run in runs:
            value = self.runs.complete(run, self.path)
            if isinstance(value, torch.Tensor) and value.shape == reference.shape:
                reached |= torch.eq(*promotable(value, candidate))
        return reached & (reference != candidate)

    def _value(self, observations: list[Observation] | None) -> Tensor | None:
        if observations is None or len(observations) <= self.call:
            return None
        value = self.runs.complete(observations[self.call], self.path)
        if not isinstance(value, torch.Tensor):
            return None
        if value.dtype in WIDE:
            # Not float64, so not lifted, unless it is what came in and was left alone.
            return value.to(WIDE[value.dtype]) if is_afterwards(self.path) else None
        return value
