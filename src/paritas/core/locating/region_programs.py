"""A few operators of a trace as a program of its own, to be judged and called alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.execution.evidence import Evidence
from paritas.core.execution.graph_runs import copy_argument
from paritas.core.execution.item_evidence import GivenLift
from paritas.core.execution.program import VALUE, ValueProgram
from paritas.core.execution.responses import computes_in_float64, nudge_tensor, responds_smoothly
from paritas.core.execution.saved_state import Copier
from paritas.core.judging.failures import Explainer, call_context
from paritas.core.judging.pairs import judge_pair
from paritas.core.locating.values_alone import pair_alone
from paritas.core.numerics.criterion import unit_roundoff
from paritas.core.precision.lifting import LiftMode
from paritas.core.torch_private import unseen_kernels
from paritas.core.torch_private.operators import own_default, traits
from paritas.core.tracing.traces import Operation, TracedCall, ValueRef

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.calls import LiveCall
    from paritas.core.diagnosis.case import Context, InnerValues
    from paritas.core.diagnosis.place_runs import PlaceRuns
    from paritas.core.execution.observation import RunOptions
    from paritas.core.results.findings import Finding
    from paritas.core.results.items import Item


@dataclasses.dataclass(frozen=True)
class Region:
    """Operators that compute one value, as a function of the values they read.

    Attributes:
        operations: in order.
        result: the value that it returns.
        given: for each value that it reads from outside, the place of the argument.
        fixed: the values it reads that are not arguments.
        shared: for each value that it computes and that is an argument of the other side, the place
            of the argument.
        before: computes those of the arguments that follow from others.
        strides: of the values that it reads from outside, in its own run: what is contiguous on one
            side may be a transposed view on the other, and not every operator takes that.
    """

    operations: Sequence[Operation]
    result: int
    given: Mapping[int, int]
    fixed: Mapping[int, Tensor]
    strides: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    shared: Mapping[int, int] = dataclasses.field(default_factory=dict)
    before: Region | None = None

    def __call__(self, *tensors: Tensor) -> Any:
        """Call the operators."""
        return self._compute(tensors, self.operations)[self.result]

    def _compute(
        self, tensors: Sequence[Tensor], operations: Sequence[Operation]
    ) -> dict[int, Any]:
        """The values after some of the operators."""
        values: dict[int, Any] = {
            index: _lay_out(tensors[argument_index], self.strides.get(index))
            for index, argument_index in self.given.items()
        }
        values |= self.fixed
        for operation in operations:
            args, kwargs = fill_arguments(operation, values)
            results: list[Any] = []
            _collect(operation.func(*args, **kwargs), results)
            for index, value in zip(operation.outputs, results, strict=False):
                values[index] = value
        return values

    def fill_shared(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The arguments with the values that it computes where the other side reads these."""
        filled = list(tensors)
        values = self._compute(tensors, self.operations) if self.shared else {}
        for index, argument_index in self.shared.items():
            filled[argument_index] = values[index]
        return filled

    def places_before_shared(self) -> set[int]:
        """The arguments that the shared values depend on."""
        places = {index: {argument_index} for index, argument_index in self.given.items()}
        for operation in self.operations:
            before = set().union(*(places.get(index, set()) for index in operation.inputs))
            places.update(dict.fromkeys(operation.outputs, before))
        return set().union(*(places[index] for index in self.shared))

    def context(self, tensors: Sequence[Tensor]) -> Context | None:
        """What is known about its result: the call that computes it."""
        *before, last = self.operations
        if not all(traits(operation.func).view for operation in before):
            context = call_context(self.__call__, tensors, {})
            return dataclasses.replace(context, operator=self._name)
        with torch.no_grad():
            values = self._compute(tensors, before)
        return call_context(last.func, *fill_arguments(last, values))

    @property
    def _name(self) -> str:
        """Its operators; no name that an operator may have."""
        names = [traits(operation.func).name for operation in self.operations if operation.computes]
        return f"region of {', '.join(names)}"

    def inner_values(self, tensors: Sequence[Tensor], *, wide: bool) -> list[Tensor]:
        """What its operators compute and read, except its result."""
        program, copies = self._copy_fixed_values(tensors, wide=wide)
        default = own_default()
        lift = LiftMode(default, default) if wide else contextlib.nullcontext()
        with torch.no_grad(), lift:
            values = program._compute(copies, self.operations)  # noqa: SLF001  (its own)
        inside = (inner_value for index, inner_value in values.items() if index != self.result)
        return [inner_value for inner_value in inside if isinstance(inner_value, torch.Tensor)]

    def program(self, tensors: Sequence[Tensor]) -> ValueProgram:
        """It on some arguments, in several precisions."""

        def prepare(options: RunOptions) -> Callable[[], Any]:
            program, copies = self._copy_fixed_values(tensors, wide=options.wide)
            return lambda: program(*copies)

        return ValueProgram(prepare, tensors)

    def _copy_fixed_values(
        self, tensors: Sequence[Tensor], *, wide: bool
    ) -> tuple[Region, list[Tensor]]:
        """It with copies of its fixed values, and copies of some arguments."""
        copier = Copier(widen=wide)
        copies = [copy_argument(copier, tensor) for tensor in tensors]
        fixed = {key: copy_argument(copier, tensor) for key, tensor in self.fixed.items()}
        return dataclasses.replace(self, fixed=fixed), copies


def _lay_out(tensor: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """A tensor with these strides, if it can have them."""
    if strides is None or tensor.stride() == strides or len(strides) != tensor.dim():
        return tensor
    other = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    fills_memory = other.untyped_storage().nbytes() == other.numel() * other.element_size()
    return other.copy_(tensor) if fills_memory else tensor


def fill_arguments(
    operation: Operation | TracedCall, values: Mapping[int, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operator or a function, with values for its tensors."""

    def fill(value: Any) -> Any:
        if isinstance(value, ValueRef):
            return values[value.index]
        if isinstance(value, list | tuple):
            return type(value)(map(fill, value))
        return value

    return fill(operation.args), {name: fill(value) for name, value in operation.kwargs.items()}


def _collect(result: Any, results: list[Any]) -> None:
    if isinstance(result, torch.Tensor):
        results.append(result)
    elif isinstance(result, list | tuple):
        for item in result:
            _collect(item, results)


def judge_regions(
    item: Item,
    reference: Region,
    candidate: Region,
    tensors: Sequence[Tensor],
    seed: int,
    call: LiveCall | None = None,
    *,
    is_known: bool = False,
) -> list[Finding]:
    """The findings about the candidate's operators on the reference's inputs, with a diagnosis.

    None if the candidate's only make memory: what writes to it, such as a kernel of one's own, is
    not among the operators. `call` is the call of a function of torch that consists of the
    reference's operators, if there is one. `is_known`: the kind is known, and only asked where it
    is wrong.
    """
    if reference.given and not candidate.given:
        return []
    candidate_runs = Evidence(candidate.program(tensors), seed=seed)
    wrong = candidate_runs.native[0].outputs.get(VALUE)
    if not isinstance(wrong, torch.Tensor):
        return []
    rounded = () if _computes_in_float64(reference, candidate, tensors, seed) else (torch.float32,)
    lifted = GivenLift(candidate_runs.arbiter, rounded)
    pair = pair_alone(item, reference.program(tensors), wrong, seed, lifted=lifted)
    if pair is None:
        return []
    values = pair.reference, pair.candidate

    @functools.cache
    def describe_context() -> Context | None:
        from paritas.core.diagnosis.case import Context

        if is_known:
            return Context(only_where=True)
        context = reference.context(tensors) if reference.operations else None
        if call is not None:
            context = call_context(call.target, call.args, call.kwargs)
        if context is None:
            return None
        return dataclasses.replace(
            context,
            runs=_runs_of(reference, candidate, tensors, values, has_call=call is not None),
            inner=functools.partial(candidate.inner_values, tensors),
        )

    pair = dataclasses.replace(pair, context=describe_context)
    findings, _ = judge_pair(pair, explainer=Explainer())
    if is_known or not _is_narrower(*values):
        return findings
    # What comes later casts it back: how wrong the values are then says more than the dtype.
    pair = dataclasses.replace(pair, candidate=pair.candidate.to(pair.reference.dtype))
    widened, _ = judge_pair(pair, explainer=Explainer())
    diagnosis = next(
        (
            widened_finding.diagnosis
            for widened_finding in widened
            if widened_finding.diagnosis is not None
        ),
        None,
    )
    return [
        finding
        if finding.status.passes() or finding.diagnosis is not None
        else msgspec.structs.replace(finding, diagnosis=diagnosis)
        for finding in findings
    ]


def _computes_in_float64(
    reference: Region, candidate: Region, tensors: Sequence[Tensor], seed: int
) -> bool:
    """Whether the candidate computes in float64 if it is given that; see `responses`."""
    kinds = (traits(operation.func) for operation in candidate.operations)
    if not any(kind.namespace == unseen_kernels.NAMESPACE for kind in kinds):
        return True

    def value(side: Region, direction: int) -> Any:
        nudged = [nudge_tensor(tensor, seed, direction) for tensor in tensors]
        runs = Evidence(side.program(nudged), seed=seed)
        return runs.native[0].outputs.get(VALUE)

    before, middle, after = (value(candidate, direction) for direction in (-1, 0, 1))
    right = value(reference, 1), value(reference, 0)
    return bool(computes_in_float64([responds_smoothly(before, middle, after, right)]))


def _runs_of(
    reference: Region,
    candidate: Region,
    tensors: Sequence[Tensor],
    pair: tuple[Tensor, Tensor],
    *,
    has_call: bool,
) -> PlaceRuns:
    """Both regions; without a call of a function, the reference's is the call of its operators.

    What the candidate's operators read of the reference's is no operand, but follows from those: a
    call of a function begins before the operator that is wrong.
    """
    from paritas.core.diagnosis.place_runs import PlaceRuns

    shared = {*reference.shared.values()}
    places = [
        argument_index for argument_index in range(len(tensors)) if argument_index not in shared
    ]
    read = {*candidate.given.values()} | reference.places_before_shared()

    def fill(operands: Sequence[Tensor]) -> list[Tensor]:
        values = list(tensors)
        for position, operand in zip(places, operands, strict=True):
            values[position] = operand
        return values

    def settle(operands: Sequence[Tensor]) -> list[Tensor]:
        values = fill(operands)
        values = values if reference.before is None else reference.before.fill_shared(values)
        return [values[position] for position in places]

    def run_reference(operands: Sequence[Tensor]) -> Any:
        return reference(*fill(operands))

    def run_candidate(operands: Sequence[Tensor]) -> Any:
        return candidate(*reference.fill_shared(fill(operands)))

    def recall(operands: Sequence[Tensor]) -> LiveCall | None:
        context = reference.context(fill(operands)) if reference.operations else None
        return None if context is None else context.call

    def find_inner(operands: Sequence[Tensor]) -> InnerValues:
        return functools.partial(candidate.inner_values, reference.fill_shared(fill(operands)))

    return PlaceRuns(
        tuple(tensors[position] for position in places),
        run_reference,
        lambda: run_candidate,
        *pair,
        reads_all=read >= {*reference.given.values()},
        recall=None if has_call else recall,
        inner=find_inner,
        settle=None if reference.before is None else settle,
    )


def _is_narrower(right: Tensor, wrong: Tensor) -> bool:
    """Whether a result is in a floating-point format with fewer digits than it should."""
    both = right.is_floating_point() and wrong.is_floating_point()
    return both and unit_roundoff(wrong.dtype) > unit_roundoff(right.dtype)
