"""What is known of a failure: what kind of wrong it is, where it starts, what failed."""

from __future__ import annotations

import collections
import dataclasses
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas._torch.graphs import NodeProvenance, provenance
from paritas.numerics import criterion
from paritas.numerics.automatic import LIFTED_SLACK, RUNS
from paritas.numerics.checkers import NO_EVIDENCE
from paritas.numerics.flattening import is_dense
from paritas.results.findings import Aspect, Diagnosis, Origin, OriginKind, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.fx import GraphModule, Node

    from paritas._torch.dynamo import Backend
    from paritas.diagnosis.case import Context
    from paritas.numerics.automatic import JudgeEvidence
    from paritas.results.findings import Finding, Verdict


# --- What kind of wrong, asked within bounds ------------------------------------------------------

# The lifted run is asked first where it fails: there, rounding is far below any fault, so that a
# pattern either holds to many digits or does not. Natively the noise is what the judge measured.

# A reader looks at the first few; a model that is wrong from its first layer has hundreds.
MOST_EXPLAINED = 12
MOST_SECONDS = 30.0
# Far above what long programs lose in float64, and far below any fault.
PLAIN_SHARE = 1e-12
_WRONG = {Status.DIFFERENT, Status.DEGRADED}


@dataclasses.dataclass
class Explainer:
    """Diagnoses failing values, so many of them and for so long.

    Attributes:
        left: how many more are looked at.
        seconds: how much longer.
        notes: what is worth a note: that it was enough, or that a diagnosis failed.
    """

    left: int = MOST_EXPLAINED
    seconds: float = MOST_SECONDS
    notes: list[str] = dataclasses.field(default_factory=list)

    def explain(
        self,
        findings: Iterable[Finding],
        reference: Any,
        candidate: Any,
        evidence: JudgeEvidence = NO_EVIDENCE,
        context: Context | None = None,
    ) -> list[Finding]:
        """The findings about one pair, those of a wrong value with what kind of wrong it is."""
        return [
            self._explained(finding, reference, candidate, evidence, context)
            if finding.aspect is Aspect.VALUE and finding.status in _WRONG
            else finding
            for finding in findings
        ]

    def _explained(
        self,
        finding: Finding,
        reference: Any,
        candidate: Any,
        evidence: JudgeEvidence,
        context: Context | None,
    ) -> Finding:
        if not _can_be_diagnosed(reference, candidate):
            return finding
        if self.left <= 0 or self.seconds <= 0:
            self._note("further failing values were not diagnosed: these are the first ones")
            return finding
        self.left -= 1
        began = time.monotonic()
        try:
            found = _diagnose_value(finding, reference, candidate, evidence, context)
        except Exception as error:  # noqa: BLE001  (a diagnosis is an extra: the verdict stands)
            self._note(f"{finding.path} was not diagnosed: {type(error).__name__}: {error}"[:200])
            return finding
        finally:
            self.seconds -= time.monotonic() - began
        if found.where is None and not found.patterns:
            return finding
        return msgspec.structs.replace(finding, diagnosis=found)

    def _note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)


def _can_be_diagnosed(reference: Any, candidate: Any) -> bool:
    tensors = isinstance(reference, torch.Tensor) and isinstance(candidate, torch.Tensor)
    return tensors and reference.shape == candidate.shape and reference.numel() > 0


def _diagnose_value(
    finding: Finding,
    reference: Tensor,
    candidate: Tensor,
    evidence: JudgeEvidence,
    context: Context | None,
) -> Diagnosis:
    from paritas.diagnosis.diagnose import diagnose

    arbiter = evidence.arbiter()
    above = Diagnosis()
    plainly = finding.lifted is None and finding.native is None  # so far off that none is needed
    if plainly or (finding.lifted is not None and not finding.lifted.passed):
        lifted = evidence.lifted()
        if lifted is not None and arbiter is not None:
            noise = _lifted_noise(arbiter, lifted, evidence, measured=finding.lifted is not None)
            above = diagnose(lifted, arbiter, noise=noise, context=context)
            if above.patterns:
                return above
    native: Tensor | None = None
    unit = _coarser_unit(reference, candidate)
    if finding.native is not None and unit is not None and evidence.unit is not None:
        spread = evidence.spread(evidence.unit, RUNS[0])
        truth = reference if arbiter is None else arbiter
        own = None if arbiter is None else reference
        native = _element_noise((truth, candidate), own, spread, unit)
    found = diagnose(candidate, reference, arbiter=arbiter, noise=native, context=context)
    return found if found.patterns or above.where is None else above


def _lifted_noise(
    arbiter: Tensor, lifted: Tensor, evidence: JudgeEvidence, *, measured: bool
) -> Tensor | None:
    """The noise in float64; of what was too far off for the judge to measure it, a plain share."""
    small = evidence.lift_unit
    if not measured and small == criterion.UNIT_F64:
        size = _widen_tensor(arbiter).abs().nan_to_num(0.0, 0.0, 0.0)
        return PLAIN_SHARE * (size + criterion.rms(arbiter))
    noise = _element_noise((arbiter, lifted), None, evidence.spread(small, RUNS[0]), small)
    return None if noise is None else LIFTED_SLACK * noise


def _coarser_unit(*tensors: Tensor) -> float | None:
    """Of the coarser of the two; None where values are exact."""
    if not all(value.is_floating_point() or value.is_complex() for value in tensors):
        return None
    return max(criterion.unit_roundoff(value.dtype) for value in tensors)


def _element_noise(
    pair: tuple[Tensor, Tensor], reference: Tensor | None, spread: Tensor | None, unit: float
) -> Tensor | None:
    """The noise of each element, as the criterion has it; None where none was measured.

    A candidate that is larger than the truth rounds as what it is: twice the value plus one is not
    known to more digits than that.
    """
    if spread is None:
        return None
    truth, given = map(_widen_tensor, pair)
    size = torch.maximum(truth.abs(), given.abs().nan_to_num(0.0, 0.0, 0.0))
    local = torch.where(torch.isinf(spread), 0.0, spread).to("cpu", torch.float64)
    local = local.clamp(min=criterion.rms(spread) / 2)
    if reference is not None:
        own = (_widen_tensor(reference) - truth).abs().nan_to_num(0.0, 0.0, 0.0)
        local = torch.maximum(local, own / 2)
        local = local.clamp(min=criterion.rms_difference(reference, pair[0]) / 2)
    return local + unit * size / 2


def _widen_tensor(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def likely_mixups(given: Mapping[str, Any], value: Any) -> dict[str, Tensor]:
    """Of what a program was given, what a result may have been mixed up with."""
    shape = getattr(value, "shape", None)
    return {
        name: tensor.detach()
        for name, tensor in given.items()
        if isinstance(tensor, torch.Tensor)
        and is_dense(tensor)
        and (tensor.dim() == 1 or tensor.shape == shape)
    }


def call_context(target: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Context:
    """What is known of a value that one operator made."""
    from paritas.diagnosis.case import Context

    schema = getattr(target, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    inputs: list[Tensor] = []
    arguments: dict[str, object] = {}
    for place, value in enumerate(args):
        _sort_argument(names[place] if place < len(names) else str(place), value, inputs, arguments)
    for name, value in kwargs.items():
        _sort_argument(name, value, inputs, arguments)
    return Context(operator=str(target), inputs=tuple(inputs), arguments=arguments)


def _sort_argument(
    name: str, value: Any, inputs: list[Tensor], arguments: dict[str, object]
) -> None:
    if isinstance(value, torch.Tensor):
        inputs.append(value.detach())
    elif isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value):
        inputs += [item.detach() for item in value if isinstance(item, torch.Tensor)]
    elif value is not None:
        arguments[name] = value


# --- Where it starts ------------------------------------------------------------------------------


def node_origin(node: Node) -> Origin:
    """A single node."""
    return make_origin(OriginKind.NODE, node.name, provenance(node))


def make_origin(
    kind: OriginKind,
    name: str,
    where: NodeProvenance | None,
    nodes: tuple[str, ...] = (),
    remedies: tuple[str, ...] = (),
) -> Origin:
    """Anything, with the place in the user's program that stands for it."""
    where = where or NodeProvenance("", "")
    return Origin(
        kind=kind,
        name=name,
        operator=where.operator,
        module=where.module,
        source=where.source,
        code=where.code,
        nodes=nodes,
        remedies=remedies,
    )


# --- The live programs behind a verdict that failed -----------------------------------------------

# A verdict is data, and data holds no models. So what failed is kept beside its fields: only of the
# last few verdicts, and only while the verdict itself is in use.

# Each holds a model and its inputs.
MOST_REMEMBERED = 8


@dataclasses.dataclass(frozen=True)
class FailedPair:
    """What `verify` was given.

    Attributes:
        reference: the model.
        candidate: what was compared with it.
        inputs: the sets of inputs.
    """

    reference: Callable[..., Any]
    candidate: Callable[..., Any]
    inputs: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class GraphMaker:
    """How a guard's graphs are compiled.

    Attributes:
        backend: of the guard.
        given: mode and options of the `torch.compile` that called it.
    """

    backend: Backend
    given: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class FailedGraph:
    """A guarded graph and the arguments of a call that failed.

    Attributes:
        label: as findings call it.
        module: the graph, run op by op the reference.
        inputs: copies, as they were before the call.
        made_by: what compiled it.
        gradients: whether it was its gradients that failed.
    """

    label: str
    module: GraphModule
    inputs: Sequence[Any]
    made_by: GraphMaker
    gradients: bool = False


@dataclasses.dataclass(frozen=True)
class FailedSplit:
    """An operator that is not the same when it is split over ranks.

    The verdict itself is not in it: it would keep itself alive.

    Attributes:
        call: the `OperatorCall` of `paritas.partition`.
        recipe: how it was split; several for a mesh of ranks.
        annotation: the rule that the recipe was made from; None if there is none.
        ranks: over how many ranks.
        seed: of the check.
        status: how it ended.
        kinds: in what it is wrong, each with whether that is of a result or of a gradient.
    """

    call: Any
    recipe: Any
    annotation: str | None
    ranks: int | tuple[int, ...]
    seed: int
    status: Status
    kinds: frozenset[tuple[Aspect, str]]


FailedCase = FailedPair | FailedGraph | FailedSplit

# Under this name a verdict holds them: not as a field, so no file and no comparison sees them.
_CASES = "failed_cases"
_recent: collections.deque[weakref.ref[Verdict]] = collections.deque()


def remember_failed(verdict: Verdict, cases: Sequence[FailedCase]) -> None:
    """Keep what a verdict is about."""
    if not cases:
        return
    vars(verdict)[_CASES] = tuple(cases)
    _recent.append(weakref.ref(verdict))
    while len(_recent) > MOST_REMEMBERED:
        oldest = _recent.popleft()()
        if oldest is not None:
            vars(oldest).pop(_CASES, None)


def recall_failed(verdict: Verdict) -> tuple[FailedCase, ...]:
    """What a verdict is about; empty where that is not known any more."""
    cases: tuple[FailedCase, ...] = vars(verdict).get(_CASES, ())
    return cases
