"""What is known about a failure: what kind of wrong it is, where it starts, what failed."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import functools
import operator
import time
import weakref
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.judging.node_words import describe_arguments, find_chain
from paritas.core.numerics import criterion
from paritas.core.numerics.automatic import LIFTED_SLACK
from paritas.core.numerics.checkers import NO_EVIDENCE
from paritas.core.numerics.flattening import is_dense
from paritas.core.numerics.pooling import NO_NOISE, populations
from paritas.core.results.findings import (
    Aspect,
    Diagnosis,
    Origin,
    OriginKind,
    PatternKind,
    Status,
)
from paritas.core.results.items import ItemKind
from paritas.core.torch_private.graphs import NodeProvenance, provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.fx import GraphModule, Node

    from paritas.core.diagnosis.calls import LiveCall
    from paritas.core.diagnosis.case import Context
    from paritas.core.diagnosis.place_runs import PlaceRuns
    from paritas.core.execution.graph_runs import CapturedProgram
    from paritas.core.numerics.judge_evidence import JudgeEvidence
    from paritas.core.results.findings import Finding, Verdict
    from paritas.core.results.pictures import Picture
    from paritas.core.torch_private.dynamo import Backend


# --- What kind of wrong, within limits of number and time -----------------------------------------

# If the lifted run fails, it is diagnosed first: there, rounding is far below any fault, and a
# pattern either holds to many digits or does not. What follows from the right values alone and does
# not hold there is refuted. Natively, the noise is what the judge measured.

# Readers look at the first few; a model that is wrong from its first layer has hundreds.
MOST_EXPLAINED = 12
MOST_SECONDS = 30.0
# Far above the rounding of long programs in float64, and far below any fault.
PLAIN_SHARE = 1e-12
# What these predict follows from the right values alone, so it holds in float64 or not at all.
_OF_RIGHT_VALUES = {
    PatternKind.CLIPPED,
    PatternKind.ZEROS,
    PatternKind.SIGN,
    PatternKind.CONSTANT,
    PatternKind.SCALE,
    PatternKind.OFFSET,
    PatternKind.SHIFT,
    PatternKind.TRANSPOSE,
    PatternKind.PERMUTATION,
    PatternKind.AXIS_OFFSET,
    PatternKind.AXIS_SCALE,
}


_judges_only = contextvars.ContextVar("paritas_judges_only", default=False)


@contextlib.contextmanager
def judging_only() -> Iterator[None]:
    """Make verdicts without explaining what fails, for a search that asks whether it does."""
    token = _judges_only.set(True)
    try:
        yield
    finally:
        _judges_only.reset(token)


def is_judging_only() -> bool:
    """Whether nobody asks why something fails."""
    return _judges_only.get()


# A graph or process, an option, a set of inputs, a step.
_Run = tuple[str, str, int, int]


@dataclasses.dataclass
class Explainer:
    """Diagnoses failing values, up to a number and a time.

    Attributes:
        left: how many more values are diagnosed.
        seconds: the time left.
        notes: that the limit was reached, or that a diagnosis failed.
        wrong_runs: those with a wrong output, from which their gradients result.
        pictured: whether it has drawn a value already. A picture takes more room than all else in
            a finding, so only what one operator computed is always drawn.
    """

    left: int = MOST_EXPLAINED
    seconds: float = MOST_SECONDS
    notes: list[str] = dataclasses.field(default_factory=list)
    wrong_runs: set[_Run] = dataclasses.field(default_factory=set)
    pictured: bool = False

    def explain(
        self,
        findings: Iterable[Finding],
        reference: Any,
        candidate: Any,
        evidence: JudgeEvidence = NO_EVIDENCE,
        context: Context | None = None,
    ) -> list[Finding]:
        """Return the findings about one pair, with a diagnosis for each wrong value."""
        if is_judging_only():
            return list(findings)
        return [
            self._explain_finding(finding, reference, candidate, evidence, context)
            if finding.aspect is Aspect.VALUE and finding.status.is_wrong
            else finding
            for finding in findings
        ]

    def _explain_finding(
        self,
        finding: Finding,
        reference: Any,
        candidate: Any,
        evidence: JudgeEvidence,
        context: Context | None,
    ) -> Finding:
        from paritas.core.diagnosis.case import Context

        if is_wrong_output(finding):
            self.wrong_runs.add(_run_of(finding))
        if not _can_be_diagnosed(reference, candidate):
            return finding
        known_context = context or Context()
        follows = finding.item.kind.is_gradient and _run_of(finding) in self.wrong_runs
        is_result = follows and not known_context.operator
        if self.left <= 0 or self.seconds <= 0:
            if not is_result:
                self._note("only the first failing values were diagnosed")
            return finding
        self.left -= 1
        began = time.monotonic()
        try:
            known_context = dataclasses.replace(
                known_context, only_where=known_context.only_where or is_result
            )
            diagnose_value = _diagnose_value(finding, reference, candidate, evidence, known_context)
            picture = self._draw(finding, (reference, candidate), evidence, context, diagnose_value)
        except Exception as error:  # noqa: BLE001  (a diagnosis is an extra: the verdict stands)
            self._note(f"{finding.path} was not diagnosed: {type(error).__name__}: {error}"[:200])
            return finding
        finally:
            self.seconds -= time.monotonic() - began
        if diagnose_value.where is None and not diagnose_value.patterns:
            return finding
        return msgspec.structs.replace(finding, diagnosis=diagnose_value, picture=picture)

    def _draw(
        self,
        finding: Finding,
        pair: tuple[Tensor, Tensor],
        evidence: JudgeEvidence,
        context: Context | None,
        diagnosis: Diagnosis,
    ) -> Picture | None:
        """A picture of what one operator computed, and of the first value of other programs."""
        is_known = diagnosis.where is not None or diagnosis.patterns
        if not is_known or (self.pictured and not (context is not None and context.operator)):
            return None
        from paritas.core.diagnosis.pictures import draw_picture

        self.pictured = True
        native_fails = finding.native is not None and not finding.native.passed
        if finding.lifted is not None and not finding.lifted.passed and not native_fails:
            lifted, arbiter = evidence.lift_candidate(), evidence.arbiter()
            if lifted is not None and arbiter is not None and lifted.shape == arbiter.shape:
                return draw_picture(arbiter, lifted, diagnosis.where, lifted=True)
        return draw_picture(*pair, diagnosis.where)

    def _note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)


# A kind is stated where a difference may start: at the place that was found, or, if none was, at
# wrong values that nothing else explains. What results from another wrong value has none: a summand
# that is lost leaves zeros in one gradient, a factor in the next one and a sign in a third.


def without_kind(finding: Finding) -> Finding:
    """A finding that only results from another one: where it is wrong, but not what kind it is."""
    if finding.diagnosis is None or not finding.diagnosis.patterns:
        return finding
    where = Diagnosis(where=finding.diagnosis.where) if finding.diagnosis.where else None
    return msgspec.structs.replace(finding, diagnosis=where)


def state_kinds_at_starts(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings, without kinds of gradients where the outputs of the run are wrong already."""
    wrong = {_run_of(finding) for finding in findings if is_wrong_output(finding)}
    return tuple(
        without_kind(finding)
        if finding.item.kind.is_gradient and _run_of(finding) in wrong
        else finding
        for finding in findings
    )


def _run_of(finding: Finding) -> _Run:
    item = finding.item
    return item.place, item.option, item.inputs, item.step


def is_wrong_output(finding: Finding) -> bool:
    """Whether the value of an output is wrong, which makes gradients wrong."""
    is_value = finding.aspect is Aspect.VALUE and finding.item.kind is ItemKind.OUTPUT
    return is_value and finding.status.is_wrong


def _can_be_diagnosed(reference: Any, candidate: Any) -> bool:
    tensors = isinstance(reference, torch.Tensor) and isinstance(candidate, torch.Tensor)
    return tensors and reference.shape == candidate.shape and reference.numel() > 0


# The share of the usual time that is spent on a value whose run in float64 was diagnosed before.
_PATIENCE_AGAIN = 0.3


def _diagnose_value(
    finding: Finding,
    reference: Tensor,
    candidate: Tensor,
    evidence: JudgeEvidence,
    context: Context,
) -> Diagnosis:
    from paritas.core.diagnosis.diagnose import diagnose
    from paritas.core.diagnosis.experiments import experiment

    arbiter = evidence.arbiter()
    above = _diagnose_lifted(finding, arbiter, evidence, context)
    if above is not None and above.patterns:
        return above
    if finding.lifted is not None:
        agrees: bool | None = finding.lifted.passed
    else:
        agrees = context.lifted_agrees if above is None else above.where is None
    # What float64 does not show is seldom seen in the native run.
    patience = 1.0 if above is None or above.where is None else _PATIENCE_AGAIN
    context = dataclasses.replace(context, lifted_agrees=agrees, patience=patience)
    native: Tensor | None = None
    unit = _coarser_unit(reference, candidate)
    if finding.native is not None and unit is not None and evidence.unit is not None:
        spread = evidence.spread(evidence.unit, 1)
        truth = reference if arbiter is None else arbiter
        native_reference = None if arbiter is None else reference
        native = _element_noise((truth, candidate), native_reference, spread, unit)
    diagnosis = diagnose(candidate, reference, arbiter=arbiter, noise=native, context=context)
    if above is not None and above.where is not None:
        patterns = tuple(
            pattern for pattern in diagnosis.patterns if pattern.kind not in _OF_RIGHT_VALUES
        )
        where = diagnosis.where if patterns else above.where
        diagnosis = Diagnosis(where=where, patterns=patterns, note=diagnosis.note)
    if diagnosis.patterns or context.only_where:
        return diagnosis
    # No prediction reproduces the candidate: ask the candidate itself.
    experiment_diagnosis = experiment(context)
    note = "; ".join(filter(None, (experiment_diagnosis.note, diagnosis.note)))
    return msgspec.structs.replace(diagnosis, patterns=experiment_diagnosis.patterns, note=note)


def _diagnose_lifted(
    finding: Finding, arbiter: Tensor | None, evidence: JudgeEvidence, context: Context
) -> Diagnosis | None:
    """The diagnosis of the lifted run; empty if it agrees, None if there is none."""
    from paritas.core.diagnosis.diagnose import diagnose

    plainly = finding.lifted is None and finding.native is None  # far off: neither was needed
    if not plainly and (finding.lifted is None or finding.lifted.passed):
        return None
    lifted = evidence.lift_candidate()
    if lifted is None or arbiter is None:
        return None
    noise = _lifted_noise(arbiter, lifted, evidence, measured=finding.lifted is not None)
    context = dataclasses.replace(context, lifted_agrees=False)
    return diagnose(lifted, arbiter, noise=noise, context=context)


def _lifted_noise(
    arbiter: Tensor, lifted: Tensor, evidence: JudgeEvidence, *, measured: bool
) -> Tensor | None:
    """The noise in float64; a fixed share if the value was too far off for the judge to measure."""
    small = evidence.lift_unit
    if not measured and small == criterion.UNIT_F64:
        size = _widen_tensor(arbiter).abs().nan_to_num(0.0, 0.0, 0.0)
        return PLAIN_SHARE * (size + populations(criterion.real_view(arbiter)).scale(size))
    noise = _element_noise((arbiter, lifted), None, evidence.spread(small, 1), small)
    return None if noise is None else LIFTED_SLACK * noise


def _coarser_unit(*tensors: Tensor) -> float | None:
    """The unit roundoff of the coarser of the two; None if values are exact."""
    if not all(value.is_floating_point() or value.is_complex() for value in tensors):
        return None
    return max(criterion.unit_roundoff(value.dtype) for value in tensors)


def _element_noise(
    pair: tuple[Tensor, Tensor], reference: Tensor | None, spread: Tensor | None, unit: float
) -> Tensor | None:
    """The noise of each element, as in the criterion; None if none was measured.

    A candidate that is larger than the truth rounds at its own size.
    """
    if spread is None:
        return None
    truth, candidate_values = map(_widen_tensor, pair)
    size = torch.maximum(truth.abs(), candidate_values.abs().nan_to_num(0.0, 0.0, 0.0))
    local = torch.where(torch.isinf(spread), 0.0, spread).to("cpu", torch.float64)
    own_noise = NO_NOISE
    if reference is not None:
        error = (_widen_tensor(reference) - truth).abs().nan_to_num(0.0, 0.0, 0.0)
        local = torch.maximum(local, error / 2)
        own_noise = criterion.own_noise(reference, pair[0])
    _, plain, noise = criterion.as_reals(
        pair[1], pair[0], criterion.Noise(unit=unit, own=own_noise, spread=spread)
    )
    floors = criterion.NoiseFloors.of(plain, noise)
    local = torch.maximum(local, floors.at(truth.abs(), truth.abs()))
    return local + unit * size / 2


def _widen_tensor(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def likely_mixups(named_values: Mapping[str, Any], value: Any) -> dict[str, Tensor]:
    """The inputs of a program that a result may have been mixed up with."""
    shape = getattr(value, "shape", None)
    return {
        name: tensor.detach()
        for name, tensor in named_values.items()
        if isinstance(tensor, torch.Tensor)
        and is_dense(tensor)
        and (tensor.dim() == 1 or tensor.shape == shape)
    }


def call_context(
    target: Any,
    args: Iterable[Any],
    kwargs: Mapping[str, Any],
    *,
    lifted_agrees: bool | None = None,
    is_method: bool = False,
) -> Context:
    """The context of a value that one operator computed.

    Args:
        target: the operator or function; a name if only that is known, or for a method.
        lifted_agrees: whether the fault vanishes if the candidate runs in float64, if that is known
            from the whole program.
        is_method: the target is the name of a method of the first argument, a tensor.
    """
    from paritas.core.diagnosis.calls import call_of
    from paritas.core.diagnosis.case import Context

    args = tuple(args)
    schema = getattr(target, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    inputs: list[Tensor] = []
    arguments: dict[str, object] = {}
    for position, value in enumerate(args):
        _sort_argument(
            names[position] if position < len(names) else str(position), value, inputs, arguments
        )
    for name, value in kwargs.items():
        _sort_argument(name, value, inputs, arguments)
    function = getattr(torch.Tensor, target, None) if is_method else target
    call = call_of(function, args, kwargs) if callable(function) else None
    return Context(
        operator=str(target),
        inputs=tuple(inputs),
        arguments=arguments,
        lifted_agrees=lifted_agrees,
        call=call,
    )


def gradient_call(program: Any) -> tuple[str, LiveCall] | None:
    """The backward pass of a graph of one operator, as a call, and the operator's name."""
    from paritas.core.diagnosis.calls import LiveCall
    from paritas.core.execution.graph_runs import CapturedProgram

    if not isinstance(program, CapturedProgram) or not program.cotangents:
        return None
    module = program.reference.module
    nodes = [
        node
        for node in module.graph.nodes
        if node.op.startswith("call_") and not _is_handed_on(node)
    ]
    if len(nodes) != 1 or any(cotangent.inside for cotangent in program.cotangents.values()):
        return None

    def differentiate(kept_args: list[Any], output_gradients: list[Tensor]) -> list[Tensor]:
        gradients = _differentiate(program, module, kept_args, output_gradients)
        return [gradient for gradient in gradients if gradient is not None]

    totals = [cotangent.total for cotangent in program.cotangents.values()]
    call = LiveCall(differentiate, (list(program.kept), totals), {})
    target = nodes[0].target
    return f"{getattr(target, '__name__', target)}_backward", call


def _is_handed_on(node: Node) -> bool:
    """Whether a node only takes a result of the one before it, or copies it."""
    source = node.args[0] if node.args else None
    takes = node.target is operator.getitem and isinstance(node.args[1], int)
    is_later = isinstance(source, torch.fx.Node) and source.op.startswith("call_")
    return is_later and (takes or node.target is torch.clone)


@dataclasses.dataclass(frozen=True)
class GraphCode:
    """A backend's code for a graph.

    Attributes:
        call: the code.
        remake: compiles the graph again, for arguments of other shapes.
    """

    call: Callable[..., Any]
    remake: Callable[[list[Any]], Callable[..., Any]]


def gradient_runs(
    program: Any, code: GraphCode, name: str, pair: tuple[Tensor, Tensor]
) -> PlaceRuns | None:
    """The gradient of one input by a graph and by other code for it; None if it has none.

    Its operands are the tensors among the arguments, and then the gradients of the outputs.
    """
    from paritas.core.diagnosis.place_runs import PlaceRuns
    from paritas.core.execution.graph_runs import CapturedProgram

    if not isinstance(program, CapturedProgram):
        return None
    cotangents = program.cotangents or {}
    named = program.reference.name_arguments(program.kept)
    differentiable_names = [
        input_name for input_name, value in named.items() if _requires_grad(value)
    ]
    if name not in differentiable_names or any(
        cotangent.inside for cotangent in cotangents.values()
    ):
        return None
    kept_args = list(program.kept)
    places = [
        number for number, argument in enumerate(kept_args) if isinstance(argument, torch.Tensor)
    ]

    def arguments(operands: Sequence[Tensor]) -> list[Any]:
        args = list(kept_args)
        for position, operand in zip(places, operands, strict=False):
            args[position] = operand
        return args

    def run(call: Callable[..., Any], operands: Sequence[Tensor]) -> Any:
        args = arguments(operands)
        with program.surroundings.around():
            gradients = _differentiate(program, call, args, list(operands[len(places) :]))
        value = gradients[differentiable_names.index(name)]
        return (
            torch.zeros_like(program.reference.name_arguments(args)[name])
            if value is None
            else value
        )

    def remake(operands: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
        with program.surroundings.around(), torch.enable_grad():
            remade_code = code.remake(_leaves(program, arguments(operands)))
        return functools.partial(run, remade_code)

    totals = [cotangent.total for cotangent in cotangents.values()]
    operands = (*(kept_args[position] for position in places), *totals)
    run_reference = functools.partial(run, program.reference.module)
    run_candidate = functools.partial(run, code.call)
    return PlaceRuns(operands, run_reference, lambda: run_candidate, *pair, remake_candidate=remake)


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _differentiate(
    program: CapturedProgram,
    code: Callable[..., Any],
    kept_args: list[Any],
    output_gradients: list[Tensor],
) -> list[Tensor | None]:
    """The gradients that code for a graph gives for its arguments that need some."""
    needed = list(map(_requires_grad, program.kept))
    with torch.enable_grad():
        args = _leaves(program, kept_args)
        results = code(*args)
        outputs = [results[position] for position in program.cotangents or ()]
        ends = [
            output_gradient.to(output.dtype)
            for output_gradient, output in zip(output_gradients, outputs, strict=True)
        ]
        differentiable_args = [
            argument for argument, need in zip(args, needed, strict=True) if need
        ]
        return list(torch.autograd.grad(outputs, differentiable_args, ends, allow_unused=True))


def _leaves(program: CapturedProgram, kept_args: list[Any]) -> list[Any]:
    """The arguments of a call, of which some get a gradient."""
    return [
        argument.detach().requires_grad_() if _requires_grad(first) else argument
        for argument, first in zip(kept_args, program.kept, strict=True)
    ]


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


def node_origin(node: Node, ends: Collection[Node] = ()) -> Origin:
    """The origin of a single node; `ends` are the nodes of the failing results, if known."""
    origin = make_origin(OriginKind.NODE, node.name, provenance(node))
    return msgspec.structs.replace(
        origin, arguments=describe_arguments(node), chain=find_chain(node, ends)
    )


def make_origin(
    kind: OriginKind,
    name: str,
    where: NodeProvenance | None,
    nodes: tuple[str, ...] = (),
    remedies: tuple[str, ...] = (),
) -> Origin:
    """An origin with its place in the user's program."""
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

# A verdict is data and holds no models. What failed is kept beside its fields, for the last few
# verdicts only, and only while the verdict itself is in use.

# Each one holds a model and its inputs.
MOST_REMEMBERED = 8


@dataclasses.dataclass(frozen=True)
class FailedPair:
    """The arguments of `verify`, with one or more sets of inputs."""

    reference: Callable[..., Any]
    candidate: Callable[..., Any]
    inputs: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class GraphMaker:
    """How a guard's graphs are compiled.

    Attributes:
        given: mode and options of the `torch.compile` that called the backend.
    """

    backend: Backend
    given: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class FailedGraph:
    """A guarded graph and the arguments of a call that failed.

    Attributes:
        label: its name in findings.
        module: the graph; run op by op, it is the reference.
        inputs: copies of the arguments before the call.
        made_by: what compiled it.
        gradients: whether the gradients failed.
    """

    label: str
    module: GraphModule
    inputs: Sequence[Any]
    made_by: GraphMaker
    gradients: bool = False


@dataclasses.dataclass(frozen=True)
class FailedSplit:
    """An operator that computes something else when it is split over ranks.

    It does not hold the verdict, which would keep itself alive.

    Attributes:
        call: the `OperatorCall` of `paritas.partition`.
        recipe: how it was split; several recipes for a mesh of ranks.
        annotation: the rule that the recipe was made from, if any.
        ranks: number of ranks.
        seed: the seed of the check.
        status: the status of the check.
        kinds: each aspect that is wrong, with whether it is in a result or in a gradient.
    """

    call: Any
    recipe: Any
    annotation: str | None
    ranks: int | tuple[int, ...]
    seed: int
    status: Status
    kinds: frozenset[tuple[Aspect, str]]


FailedCase = FailedPair | FailedGraph | FailedSplit

# The attribute of a verdict that holds them. It is not a field: files and comparisons ignore it.
_CASES = "failed_cases"
_recent: collections.deque[weakref.ref[Verdict]] = collections.deque()


def remember_failed(verdict: Verdict, cases: Sequence[FailedCase]) -> None:
    """Keep the failed cases of a verdict."""
    if not cases:
        return
    vars(verdict)[_CASES] = tuple(cases)
    _recent.append(weakref.ref(verdict))
    while len(_recent) > MOST_REMEMBERED:
        oldest = _recent.popleft()()
        if oldest is not None:
            vars(oldest).pop(_CASES, None)


def recall_failed(verdict: Verdict) -> tuple[FailedCase, ...]:
    """The failed cases of a verdict; empty if they are no longer kept."""
    cases: tuple[FailedCase, ...] = vars(verdict).get(_CASES, ())
    return cases
