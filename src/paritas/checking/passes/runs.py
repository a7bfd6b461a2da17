"""Two graphs that should compute the same, run on made-up inputs and compared.

In float64, where rounding is far below any fault; in the program's own dtypes where an operator
has no meaning or no kernel in float64. Of a graph that draws random numbers both sides draw the
same.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.default_dtypes import own_default
from paritas._torch.frozen import FrozenGraph, UnplayableError, may_write
from paritas._torch.graphs import as_traced
from paritas._torch.lifting import WIDE, LiftMode, is_rounding
from paritas._torch.replaying import replay
from paritas.checking.defaults import WideDefault
from paritas.checking.evidence import ItemEvidence
from paritas.checking.explaining import Explainer
from paritas.checking.noise import NoiseRuns
from paritas.checking.observing import AFTER, Observation
from paritas.checking.passes.inputs import Inputs, Numbers, make_up
from paritas.numerics.criterion import unit_roundoff
from paritas.numerics.findings import Aspect, Finding, Status
from paritas.numerics.flattening import as_plain
from paritas.numerics.metrics import bitwise_equal
from paritas.numerics.pairing import Checks, check_pair
from paritas.numerics.trees import leaves
from paritas.recording.isolation import RandomState

if TYPE_CHECKING:
    from torch import Tensor

# Inputs that make more of the results NaN than this are joined by others.
MANY_NANS = 0.1


class Program(abc.ABC):
    """What can be run on made-up inputs: a graph, or two one after the other."""

    def __init__(self) -> None:
        """Nothing is run yet."""
        self._seen: dict[tuple[Numbers, bool], Observation] = {}
        self._wide_default = WideDefault()

    @abc.abstractmethod
    def play(self, inputs: Inputs, *, wide: bool) -> tuple[list[Any], dict[str, Tensor]]:
        """Its results, and by name the inputs that it may have written to."""

    @property
    @abc.abstractmethod
    def graphs(self) -> tuple[FrozenGraph, ...]:
        """What it is made of."""

    @property
    @abc.abstractmethod
    def returned(self) -> list[Any]:
        """The nodes and constants that it returns, in order."""

    def dtypes(self) -> dict[torch.dtype, int]:
        """The floating dtypes that it computes in or casts to, counted."""
        counts: dict[torch.dtype, int] = {}
        for graph in self.graphs:
            for node in graph.nodes:
                for dtype in _dtypes_of(node):
                    counts[dtype] = counts.get(dtype, 0) + 1
        return counts

    def observe(self, inputs: Inputs, *, wide: bool, mode: LiftMode | None = None) -> Observation:
        """Run it once; torch's generators are left as they were."""

        def once() -> Observation:
            return self._observe_once(inputs, wide=wide, mode=mode)

        return self._wide_default.run(mode, once) if wide else once()

    def _observe_once(self, inputs: Inputs, *, wide: bool, mode: LiftMode | None) -> Observation:
        seen = Observation()
        rng = RandomState.now()
        try:
            with (
                torch.inference_mode(mode=False),
                as_traced(),
                mode or contextlib.nullcontext(),
            ):
                results, after = self.play(inputs, wide=wide)
        except Exception as error:  # noqa: BLE001  (the judge is told that there is no such run)
            seen.error = error
            return seen
        finally:
            rng.restore()
        for path, leaf in leaves(results):
            seen.outputs[f"output{path}"] = leaf
            if mode is not None and isinstance(leaf, torch.Tensor):
                decision = mode.decision_for(leaf)
                if decision is not None:
                    seen.decisions[f"output{path}"] = decision
        for name, value in after.items():
            if not bitwise_equal(value, inputs.copy(name, wide=wide, always=False)):
                seen.after[f"{name}{AFTER}"] = value
        return seen

    def seen(
        self, inputs: Inputs, *, wide: bool, used: frozenset[torch.dtype] | None = None
    ) -> Observation:
        """What it did on these inputs; run when first asked.

        A cast in it is not lifted if it is narrower than what is `used` otherwise.
        """
        key = (inputs.numbers, wide)
        if key not in self._seen:
            mode = None
            if wide:
                lifts = None if used is None else functools.partial(is_rounding, used=used)
                mode = LiftMode(torch.float64, own_default(), lifts=lifts)
            self._seen[key] = self.observe(inputs, wide=wide, mode=mode)
        return self._seen[key]


class GraphProgram(Program):
    """A frozen graph and the keys of its random draws."""

    def __init__(self, graph: FrozenGraph, keys: dict[str, str]) -> None:
        """`keys` are those of `draw_keys`."""
        super().__init__()
        self.graph = graph
        self.keys = keys

    @property
    def graphs(self) -> tuple[FrozenGraph, ...]:
        """The one graph."""
        return (self.graph,)

    @property
    def returned(self) -> list[Any]:
        """What the graph returns."""
        return [leaf for _, leaf in leaves(self.graph.returned)]

    def play(self, inputs: Inputs, *, wide: bool) -> tuple[list[Any], dict[str, Tensor]]:
        """Run the graph."""
        writes = may_write(self.graph)
        args = inputs.of(self.graph, wide=wide, copied=writes)
        results = replay(self.graph, args, self.keys, wide=wide)
        results = list(results) if isinstance(results, list | tuple) else [results]
        return results, tensors_in(self.graph, args) if writes else {}


def tensors_in(graph: FrozenGraph, args: list[Any]) -> dict[str, Tensor]:
    """The tensors that a graph is given, by name."""
    named = zip(graph.placeholders, args, strict=True)
    return {node.name: value for node, value in named if isinstance(value, torch.Tensor)}


class ProgramRuns(NoiseRuns):
    """The runs of the program before, for the judge."""

    def __init__(self, program: Program, inputs: Inputs, *, wide: bool) -> None:
        """Run it, unless it was run already."""
        dtypes = {torch.float64: 1} if wide else program.dtypes()
        super().__init__([program.seen(inputs, wide=wide)], dtypes, seed=0)
        self.program = program
        self.inputs = inputs

    def run_reference(
        self,
        *,
        wide: bool = False,
        mode: LiftMode | None = None,
        watch: contextlib.AbstractContextManager[Any] | None = None,
    ) -> list[Observation]:
        """Run it once more."""
        with watch or contextlib.nullcontext():
            return [self.program.observe(self.inputs, wide=wide, mode=mode)]

    def lifted(self) -> list[Observation] | None:
        """In float64 the two are compared as they are."""
        return None

    def complete(self, seen: Observation, path: str) -> Any:
        """An item of a run; an input it left alone has the value it came with."""
        value = seen.value(path)
        if value is None and path.endswith(AFTER):
            return self.inputs.copy(path.removesuffix(AFTER), wide=not self.is_narrow)
        return value


class _WideEvidence(ItemEvidence):
    """Both sides in float64: the one is the arbiter, the other the lifted run."""

    def __init__(self, runs: ProgramRuns, path: str, before: Any, after: Any) -> None:
        super().__init__(runs, path)
        self._pair = before, after

    def arbiter(self) -> Tensor | None:
        value = self._pair[0]
        return value if isinstance(value, torch.Tensor) else None

    def lifted(self) -> Tensor | None:
        before, after = self._pair
        both = isinstance(after, torch.Tensor) and isinstance(before, torch.Tensor)
        return after if both and after.shape == before.shape else None


@dataclasses.dataclass
class Comparison:
    """How two programs compare.

    Attributes:
        differ: a finding for each result that is another.
        compared: how many results were compared.
        undecided: results that rounding decides.
        unknown: results that could not be compared, and why.
    """

    differ: list[Finding] = dataclasses.field(default_factory=list)
    compared: int = 0
    undecided: list[str] = dataclasses.field(default_factory=list)
    unknown: list[str] = dataclasses.field(default_factory=list)


def inputs_for(program: GraphProgram, constants: dict[str, Tensor]) -> list[Inputs]:
    """Sets of inputs that a graph runs on; raises `UnplayableError` if there are none.

    `constants` are values that some inputs have of their own.
    """
    chosen: list[Inputs] = []
    fewest, failed = 1.0, ""  # the share of NaN, and why it did not run
    for numbers in Numbers:
        inputs = make_up(program.graph, numbers).with_values(constants)
        seen = program.seen(inputs, wide=True)
        if seen.error is not None:
            seen = program.seen(inputs, wide=False)
        if seen.error is not None:
            failed = failed or told(seen.error)
            continue
        share = _share_of_nans(seen)
        if not chosen or share < fewest:
            chosen, fewest = [*chosen[:1], inputs], share
        if fewest <= MANY_NANS:
            break
    if not chosen:
        raise UnplayableError(failed)
    if fewest == 1:
        message = "on all made-up inputs it gives NaN alone"
        raise UnplayableError(message)
    return chosen


def compare(before: Program, after: Program, inputs: Inputs) -> Comparison:
    """Run both and compare every result; raises `UnplayableError` if a side cannot be run."""
    failed = ""
    used = frozenset(before.dtypes())
    for wide in (True, False):
        left = before.seen(inputs, wide=wide)
        right = after.seen(inputs, wide=wide, used=used)
        error = left.error or right.error
        if error is None:
            runs = ProgramRuns(before, inputs, wide=wide)
            # What was computed of constants was computed in their own dtype, and rounded to it.
            folded = [unit_roundoff(dtype) for dtype in new_constants(before, after)]
            runs.lift_unit = max([runs.lift_unit, *folded])
            return _compare_runs(runs, left, right, wide=wide)
        side = "before" if left.error is not None else "after"
        failed = f"the graph {side} it cannot be run op by op: {told(error)}"
    raise UnplayableError(failed)


def new_constants(before: Program, after: Program) -> set[torch.dtype]:
    """The dtypes of the floating constants that only the program after has."""

    def constants(program: Program) -> dict[str, torch.dtype]:
        return {
            name: value.dtype
            for graph in program.graphs
            for name, value in graph.attributes.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        }

    known = constants(before)
    return {dtype for name, dtype in constants(after).items() if name not in known}


def _compare_runs(
    runs: ProgramRuns, left: Observation, right: Observation, *, wide: bool
) -> Comparison:
    result = Comparison()
    checks = Checks(dtype=False)
    paths = [*left.outputs, *left.after]
    paths += [path for path in (*right.outputs, *right.after) if path not in paths]
    for path in paths:
        pair = as_plain(runs.complete(left, path)), as_plain(runs.complete(right, path))
        result.compared += 1
        evidence = _WideEvidence(runs, path, *pair) if wide else ItemEvidence(runs, path)
        kinds = [_kind(value) for value in pair]
        if kinds[0] != kinds[1]:
            reason = f"{kinds[1]} instead of {kinds[0]}"
            result.differ.append(
                Finding(path=path, aspect=Aspect.DTYPE, status=Status.DIFFERENT, reason=reason)
            )
            continue
        findings, _ = check_pair(path, *pair, checks, evidence)
        if not result.differ:  # the first is what a reader is told
            findings = Explainer(left=1).explain(findings, *pair, evidence)
        for finding in findings:
            if finding.status is Status.DIFFERENT and not wide and _is_unmeasured(runs, finding):
                result.unknown.append(f"{path} differs, and its noise cannot be measured")
            elif finding.status is Status.DIFFERENT:
                result.differ.append(finding)
            elif finding.status is Status.UNVERIFIED:
                result.unknown.append(f"{path}: {finding.reason}")
            elif finding.status is Status.UNSTABLE:
                result.undecided.append(f"{path}: {finding.reason}")
    return result


def _is_unmeasured(runs: ProgramRuns, finding: Finding) -> bool:
    """Whether a difference may be rounding, for all that is known: half of the digits agree."""
    size = finding.metrics.rel_l2 if finding.metrics is not None else math.inf
    small = size <= math.sqrt(runs.unit)
    return small and runs.spread(runs.unit, 0, finding.path, 1) is None


def output_dtypes(before: Program, after: Program, inputs: Inputs) -> list[Finding]:
    """Results that come in another dtype; told from the traces, or from a run where they differ."""
    traced = [list(map(_traced_dtype, program.returned)) for program in (before, after)]
    if None not in traced[0] and traced[0] == traced[1]:
        return []
    native = [program.seen(inputs, wide=False) for program in (before, after)]
    if any(seen.error is not None for seen in native):
        return []
    found = []
    for path, left in native[0].outputs.items():
        right = native[1].outputs.get(path)
        dtypes = getattr(left, "dtype", None), getattr(right, "dtype", None)
        if dtypes[0] is not dtypes[1]:
            reason = f"dtype {dtypes[1]} instead of {dtypes[0]}"
            found.append(
                Finding(path=path, aspect=Aspect.DTYPE, status=Status.DIFFERENT, reason=reason)
            )
    return found


def _traced_dtype(returned: Any) -> str | None:
    """The dtype of a returned node, or what else it is; None if tracing does not say."""
    meta = getattr(returned, "meta", {"val": returned})
    if not {"val", "example_value"} & meta.keys():
        return None
    value = meta.get("val", meta.get("example_value"))
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__


def _dtypes_of(node: Any) -> list[torch.dtype]:
    value = node.meta.get("val", node.meta.get("example_value"))
    named = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, torch.dtype)]
    found = [value.dtype] if isinstance(value, torch.Tensor) else []
    return [dtype for dtype in (*found, *named) if dtype in WIDE or dtype is torch.float64]


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.is_floating_point() or value.is_complex():
        return "complex numbers" if value.is_complex() else "floating numbers"
    return str(value.dtype)


def _share_of_nans(seen: Observation) -> float:
    values = [v for _, v in seen.items() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    count = sum(value.numel() for value in values)
    return sum(int(value.isnan().sum()) for value in values) / count if count else 0.0


def told(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]:.160}" if lines else type(error).__name__
