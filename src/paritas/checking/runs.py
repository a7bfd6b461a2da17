"""Further runs of both programs, made when the judge first asks for them.

The arbiter is the reference in float64, the lifted run the candidate in float64, and perturbed
runs are the reference with its roundings drawn at random.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.compiled import CountingBackend, lifted_backend, room_for_entries
from paritas._torch.lifting import WIDE, DtypeLog, LiftMode, is_rounding
from paritas._torch.perturbing import PerturbMode
from paritas.checking.observing import AFTER, Conditions, Observation, input_tensors, running
from paritas.numerics.automatic import nonfinite_mismatch
from paritas.numerics.criterion import UNIT_F32, UNIT_F64, unit_roundoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paritas.checking.config import Inputs
    from paritas.checking.isolation import RandomState
    from paritas.checking.subjects import Subject

DECIDING_RUNS = 12
# Where more of an item than this turns non-finite under a perturbation, the perturbed run is no
# measure of anything.
MOST_LEAVING = 0.5


@dataclasses.dataclass
class _Spread:
    runs: int = 0
    squares: dict[tuple[int, str], Tensor] = dataclasses.field(default_factory=dict)


class Runs:
    """The further runs for one set of inputs, shared by all items of it.

    Attributes:
        notes: why something could not be run, for the verdict.
        settled: paths that need no evidence any more; their spread is not kept.
        tell: hears of every step that may take long.
        changing: the parameters and buffers that either side changes, so worth looking at.
    """

    def __init__(
        self,
        reference: Subject,
        candidate: Subject,
        inputs: Inputs,
        rng: RandomState,
        conditions: Conditions,
        native: list[Observation],
        *,
        lift: bool = True,
    ) -> None:
        """`native` holds what the reference did, call by call."""
        self.reference = reference
        self.candidate = candidate
        self.inputs = inputs
        self.rng = rng
        self.conditions = conditions
        self.native = native
        self.lift = lift
        self.tell: Callable[[str], None] = lambda _: None
        self.notes: list[str] = []
        self.settled: set[tuple[int, str]] = set()
        self.changing: frozenset[str] | None = None
        self.lift_unit = UNIT_F64
        self.default = torch.get_default_dtype()
        self.dtypes = set(self._count_dtypes())
        self.dtype = max(self._count_dtypes().items(), key=lambda item: item[1])[0]
        self._arbiter: list[Observation] | None = None
        self._lifted: list[Observation] | None = None
        self._asked: set[str] = set()
        self._log: dict[Any, torch.dtype] | None = None
        self._spreads: dict[float, _Spread] = {}
        self._decided: dict[float, list[list[Observation]]] = {}
        self._graphs: int | None = None

    @property
    def unit(self) -> float:
        """Unit roundoff of the coarsest arithmetic the reference does."""
        return max(unit_roundoff(dtype) for dtype in self.dtypes)

    @property
    def is_narrow(self) -> bool:
        """Whether there is a wider precision to lift the program to."""
        return self.unit > UNIT_F64

    def arbiter(self) -> list[Observation] | None:
        """The reference in float64, call by call, or None if that cannot be."""
        if "arbiter" not in self._asked:
            self._asked.add("arbiter")
            if self.is_narrow:
                self.tell("running the reference in float64")
                mode = LiftMode(self.dtype, self.default)
                watch = _AutocastWatch()
                seen = self._observe(self.reference, mode=mode, wide=True, watch=watch)
                if self._usable(seen, "no arbiter: the reference in float64"):
                    self._arbiter = seen
                self.dtypes |= mode.casts | watch.dtypes
            else:
                self.notes.append("the program runs in float64: there is no wider arbiter")
        return self._arbiter

    def lifted(self) -> list[Observation] | None:
        """The candidate in float64, call by call, or None if that cannot be."""
        if "lifted" not in self._asked:
            self._asked.add("lifted")
            if self.arbiter() is None:
                return None
            reason = self._no_lift()
            if reason:
                self.notes.append(f"only the native run was made: {reason}")
                return None
            seen = self._lift_candidate()
            if seen is not None and self._usable(
                seen, "only the native run was made: the candidate in float64"
            ):
                self._lifted = seen
        return self._lifted

    def _no_lift(self) -> str | None:
        if not self.lift:
            return "the lifted run is switched off"
        if len(self.candidate.backends) > 1:
            return "the candidate is compiled by several backends"
        draws = any(seen.drew_random_numbers for seen in self.native)
        if draws and self.candidate.is_compiled and torch.cuda.is_available():
            return "random numbers drawn on the device depend on the dtype"
        return None

    def _lift_candidate(self) -> list[Observation] | None:
        self.tell("running the candidate in float64 (a compiler works on the first call)")
        if self.candidate.is_compiled:
            used = frozenset(self.dtypes)
            backend = lifted_backend(
                self.candidate.call, self.candidate.backends[0], self.dtype, used
            )
            with room_for_entries(), torch.compiler.set_stance("default", force_backend=backend):
                seen = self._observe(self.candidate, wide=True)
            self._graphs = backend.graphs
            if backend.graphs == 0:
                self.notes.append("only the native run was made: nothing was compiled in float64")
                return None
            leaks = set(backend.leaks)
            if not self.candidate.is_wholly_compiled:
                leaks.add("eager code around the compiled may compute in float32")
        elif self.candidate.is_foreign:
            leaks = set()
            seen = self._observe(self.candidate, wide=True)
        else:
            lifts = functools.partial(is_rounding, used=frozenset(self.dtypes))
            mode = LiftMode(self.dtype, self.default, lifts=lifts)
            seen = self._observe(self.candidate, wide=True, mode=mode)
            leaks = {f"{name} may compute in any precision inside" for name in mode.foreign}
        if leaks or not self.candidate.is_faithful:
            self.lift_unit = UNIT_F32
            reason = "; ".join(sorted(leaks)) or "the candidate may compute in float32 inside"
            self.notes.append(f"the lifted run is judged at float32 noise: {reason}")
        return seen

    def ran_uncompiled(self) -> bool:
        """Whether a compiled candidate really ran eagerly: Dynamo skips some code without a word.

        A program without a single operator leaves nothing to compile and does not count.
        """
        if not self.candidate.is_compiled:
            return False
        if self._graphs is None:
            backend = CountingBackend()
            conditions = dataclasses.replace(self.conditions, gradients=False)
            with (
                room_for_entries(),
                torch.compiler.set_stance("default", force_backend=backend),
                running(self.candidate, self.rng, conditions) as call,
            ):
                call(self.inputs)
            self._graphs = backend.graphs
        return self._graphs == 0 and bool(self._dtype_log())

    def spread(self, unit: float, call: int, path: str, runs: int) -> Tensor | None:
        """The rms deviation of one item over perturbed runs; infinite where one left it."""
        spread = self._spreads.setdefault(unit, _Spread())
        while spread.runs < runs:
            self.tell(f"measuring the noise, perturbed run {spread.runs + 1}")
            seen = self._perturbed(unit, spread.runs)
            if not self._usable(seen, "a perturbed run of the reference"):
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
                if key in self.settled or not _is_inexact(value):
                    continue
                if spread.runs and key not in spread.squares:
                    continue
                deviation = _squared_deviation(value, self.complete(moved, path))
                known = spread.squares.get(key)
                spread.squares[key] = deviation if known is None else known + deviation

    def decided(self, unit: float) -> list[list[Observation]]:
        """Runs that remember what decided their discrete results: a plain one, then perturbed."""
        if unit not in self._decided:
            plain = LiftMode(self.dtype, self.default, remember_decisions=True)
            runs = [self._observe(self.reference, wide=True, mode=plain)]
            runs += [
                self._perturbed(unit, seed, remember_decisions=True)
                for seed in range(DECIDING_RUNS)
            ]
            self._decided[unit] = runs
        return self._decided[unit]

    def _perturbed(
        self, unit: float, seed: int, *, remember_decisions: bool = False
    ) -> list[Observation]:
        wide = self._arbiter is not None or not self.is_narrow
        native = unit == self.unit and len(self.dtypes) > 1
        mode = PerturbMode(
            self.dtype,
            self.default,
            unit,
            self.conditions.seed + seed,
            log=self._dtype_log() if native else None,
            remember_decisions=remember_decisions,
            widen=wide,
        )
        return self._observe(self.reference, wide=wide, mode=mode)

    def _dtype_log(self) -> dict[Any, torch.dtype]:
        """In which dtype each operator of a mixed-precision program runs natively."""
        if self._log is None:
            log = DtypeLog()
            self._observe(self.reference, watch=log)
            self._log = log.calls
        return self._log

    def complete(self, seen: Observation, path: str) -> Any:
        """An item of a run; an input or buffer it left alone has the value it came with."""
        value = seen.value(path)
        if value is None and path.endswith(AFTER):
            return self.initial(path)
        return value

    def initial(self, path: str) -> Tensor | None:
        """What an input, parameter or buffer was before the call."""
        name = path.removesuffix(AFTER)
        known = dict(input_tensors(self.inputs))
        for side in (self.candidate, self.reference):
            known |= {f"state {key}": value for key, value in side.state.saved.items()}
        return known.get(name)

    def _base(self) -> list[Observation]:
        arbiter = self.arbiter()
        return self.native if arbiter is None else arbiter

    def _observe(
        self,
        subject: Subject,
        *,
        wide: bool = False,
        mode: LiftMode | None = None,
        watch: contextlib.AbstractContextManager[Any] | None = None,
    ) -> list[Observation]:
        conditions = dataclasses.replace(
            self.conditions, wide=wide, mode=mode, watch=watch, changing=self.changing
        )
        with running(subject, self.rng, conditions) as call:
            return [call(self.inputs) for _ in self.native]

    def _usable(self, seen: list[Observation], who: str) -> bool:
        for observation in seen:
            error = observation.error or observation.gradient_error
            if error is not None:
                text = str(error).strip().splitlines()[0] if str(error).strip() else ""
                self.notes.append(f"{who} raised {type(error).__name__}: {text:.100}")
                return False
        return True

    def _count_dtypes(self) -> dict[torch.dtype, int]:
        """The floating dtypes of the program's state, inputs and outputs, with element counts."""
        counts: dict[torch.dtype, int] = {}
        tensors = [*self.reference.state.saved.values()]
        tensors += [tensor for _, tensor in input_tensors(self.inputs)]
        tensors += [leaf for leaf in self.native[0].outputs.values() if _is_inexact(leaf)]
        for tensor in tensors:
            if _is_inexact(tensor) and (tensor.dtype in WIDE or _is_double(tensor)):
                counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
        return counts or {self.default: 0}


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


def _is_inexact(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _is_double(tensor: Tensor) -> bool:
    return tensor.dtype in {torch.float64, torch.complex128}
