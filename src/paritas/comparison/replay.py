"""Rerun recorded operators in float64, to separate their own error from inherited error."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any

import torch

from paritas.comparison.operands import read_value
from paritas.core.errors import UsageError, first_line, in_one_line
from paritas.core.execution.evidence import Evidence
from paritas.core.execution.item_evidence import ItemEvidence
from paritas.core.execution.program import VALUE, ValueProgram
from paritas.core.numerics.automatic import nonfinite_mismatch
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.checkers import AutomaticValueChecker
from paritas.core.results.findings import Status
from paritas.core.torch_private.global_state import quietly
from paritas.core.torch_private.named_operators import operator_named
from paritas.core.torch_private.operators import WIDE, map_tensors
from paritas.formats.dumps.survey import RecordedCall, is_result, scope_of
from paritas.formats.files.tensor_bytes import known_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from paritas.core.execution.observation import RunOptions
    from paritas.core.numerics.automatic import Judgement
    from paritas.core.torch_private.named_operators import NamedOperator
    from paritas.formats.dumps.survey import RecordedCalls, Scope
    from paritas.formats.files.records import Record


# --- Operators as a program: natively, in float64, perturbed --------------------------------------

# Batch normalisation in training writes to these, although its schema does not say so.
_SILENTLY_WRITTEN = frozenset({"running_mean", "running_var"})


@dataclasses.dataclass(frozen=True)
class ReplayLeaf:
    """Stands for a tensor or a size that comes from outside."""

    key: str


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Stands for the result of an earlier step."""

    step: str


@dataclasses.dataclass(frozen=True)
class ReplayStep:
    """A call; its arguments are plain values, leaves, results, and lists of them."""

    name: str
    operator: NamedOperator
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ReplayProgram:
    """Calls in order.

    Attributes:
        position: which result of the last call to return: a number, or the name of an argument
            that the call wrote to.
    """

    steps: tuple[ReplayStep, ...]
    position: str = "0"

    def run(self, values: Mapping[str, Any], most_bytes: int | None = None) -> Any:
        """Run it without modifying its inputs."""
        done: dict[str, Any] = {}
        room = most_bytes
        result: Any = None
        for step in self.steps:
            args = [_fill_arguments(value, values, done) for value in step.args]
            named = {
                key: _fill_arguments(value, values, done) for key, value in step.kwargs.items()
            }
            named = step.operator.settle_options(named)
            if room is not None:
                room -= step.operator.foretell(args, named)
                if room < 0:
                    raise UsageError(f"{step.operator.name} is too large to rerun")
            _copy_written(step.operator, args, named)
            result = done[step.name] = step.operator.run(*args, **named)
            if step is self.steps[-1] and not self.position.isdecimal():
                names = [name for name, _ in step.operator.takes]
                result = {**dict(zip(names, args, strict=False)), **named}.get(self.position)
        return _select_result(result, self.position)


class ReplayRuns:
    """The runs of a program on given values."""

    def __init__(
        self, program: ReplayProgram, values: Mapping[str, Any], most_bytes: int, seed: int = 0
    ) -> None:
        """Run it natively, unless it would allocate more than `most_bytes`."""
        self.program = program
        self.values = values
        self._room: int | None = most_bytes
        self.evidence = Evidence(ValueProgram(self._prepare, values.values()), seed=seed)
        self._room = None
        result: Any = self.evidence.native[0].outputs.get(VALUE)
        if is_inexact(result):
            self.evidence.dtypes.add(result.dtype)

    @property
    def result(self) -> Tensor:
        """The result of the native run."""
        observation = self.evidence.native[0]
        value = observation.outputs.get(VALUE)
        if isinstance(observation.error, UsageError):
            raise observation.error
        if not isinstance(value, torch.Tensor):
            last = self.program.steps[-1].operator.name
            why = (
                "no tensor returned"
                if observation.error is None
                else first_line(observation.error, 160)
            )
            raise UsageError(f"{last} cannot be rerun: {why}")
        return value

    def truth(self) -> Tensor:
        """The result in float64; if that run failed, the native result."""
        lifted = self.evidence.arbiter()
        value = None if lifted is None else lifted[0].outputs.get(VALUE)
        if isinstance(value, torch.Tensor) and value.shape == self.result.shape:
            return value
        return self.result

    def _prepare(self, options: RunOptions) -> Callable[[], Any]:
        values = self.values
        if options.wide:
            values = {key: _widen(value) for key, value in values.items()}
        return lambda: self.program.run(values, self._room)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in WIDE:
        return value.to(WIDE[value.dtype])
    return value


def _copy_written(operator: NamedOperator, args: list[Any], named: dict[str, Any]) -> None:
    for position, (name, _) in enumerate(operator.takes):
        if name not in operator.writes and name not in _SILENTLY_WRITTEN:
            continue
        if name in named:
            named[name] = map_tensors(named[name], torch.clone)
        elif position < len(args):
            args[position] = map_tensors(args[position], torch.clone)


def _fill_arguments(value: Any, values: Mapping[str, Any], done: Mapping[str, Any]) -> Any:
    if isinstance(value, ReplayLeaf):
        return values[value.key]
    if isinstance(value, StepResult):
        return done[value.step]
    if isinstance(value, list | tuple):
        return [_fill_arguments(item, values, done) for item in value]
    return value


def _select_result(result: Any, position: str) -> Any:
    if isinstance(result, list | tuple):
        result_index = int(position) if position.isdecimal() else -1
        return result[result_index] if 0 <= result_index < len(result) else None
    return result if position == "0" or not position.isdecimal() else None


# --- Which operators to rerun, on which values ----------------------------------------------------

# If both dumps have the inputs of the call, that call is rerun. A dump of fused code has what a
# kernel read and wrote: then the nodes of the kernel are rerun as the other dump recorded them, one
# by one.

# Their result depends only on the seed.
_SEEDED = re.compile(r"prims\.inductor_(random|randint)\.default")
_MOST_STEPS = 200
_MOST_NAMED = 6


@dataclasses.dataclass(frozen=True)
class Binding:
    """A leaf's value on either side; None where the other side's value is used."""

    my: Record | None
    golden: Record | None


@dataclasses.dataclass(frozen=True)
class ReplayPlan:
    """A program, its inputs on either side, and a description.

    Attributes:
        unsure: nodes whose value one side did not record, so it may have been different there.
    """

    program: ReplayProgram
    bindings: dict[str, Binding]
    words: str
    unsure: tuple[str, ...] = ()


def make_plan(
    my: Record, golden: Record, my_calls: RecordedCalls, golden_calls: RecordedCalls
) -> ReplayPlan:
    """How to recompute a pair of values.

    Raises:
        UsageError: the dumps do not have enough data; the message says what is missing.
    """
    my_call, golden_call = my_calls.call_of(my), golden_calls.call_of(golden)
    if my_call is None or golden_call is None:
        raise UsageError("it does not belong to a recorded call")
    if my_call.is_given or golden_call.is_given:
        raise UsageError("it is an input of the graph")
    if "parameter" in (my.site.level, golden.site.level):
        raise UsageError("it is the gradient of a parameter; the operator has its own row")
    if "module" in (my.site.level, golden.site.level):
        raise UsageError("it belongs to a module, and the dump does not list its operators")
    if not (my.site.exact and golden.site.exact):
        raise UsageError("it is not known whether the buffer holds the value of a node")
    buffered = "buffer" in (my.site.level, golden.site.level)
    if my_call.given and golden_call.given and not buffered:
        return _call_plan(my, golden, my_call, golden_call)
    if _is_node(golden_calls, golden):
        return _Grouping(golden, golden_calls, my, my_calls, planned="golden").plan()
    if _is_node(my_calls, my):
        return _Grouping(my, my_calls, golden, golden_calls, planned="my").plan()
    if buffered:
        raise UsageError("neither dump has the operators' arguments: record one with source='fx'")
    raise UsageError("the inputs of the operator are not recorded")


def _is_node(calls: RecordedCalls, record: Record) -> bool:
    call = calls.node(scope_of(record.site), record.site.name)
    return call is not None and bool(call.given)


def _call_plan(
    my: Record, golden: Record, recorded_call: RecordedCall, golden_call: RecordedCall
) -> ReplayPlan:
    """The same operator on both sides, argument by argument."""
    if my.site.op != golden.site.op:
        raise UsageError(f"my side runs {my.site.op}, the golden side {golden.site.op}")
    if my.site.position != golden.site.position:
        raise UsageError("the two are different results of the operator")
    arguments: dict[str, Any] = {}
    bindings: dict[str, Binding] = {}
    differ: list[str] = []
    for position, record in golden_call.given.items():
        other = recorded_call.given.get(position)
        if record.tensor is not None:
            if other is None or other.tensor is None:
                raise UsageError(f"my side has no tensor for argument {position} of {my.site.op}")
            bindings[position] = Binding(other, record)
            arguments[position] = ReplayLeaf(position)
            continue
        value = _read_plain(record)
        my_value = value if other is None or other.tensor is not None else _read_plain(other)
        if isinstance(value, torch.dtype) and isinstance(my_value, torch.dtype):
            value = my_value  # each side computes in its own dtype
        elif repr(my_value) != repr(value):
            differ.append(
                f"argument {position} is {my_value!r} on my side, {value!r} on the golden side"
            )
        arguments[position] = value
    step = _make_step(golden.site.name, golden.site.op, arguments)
    words = f"{golden.site.op}, rerun on its recorded inputs"
    return ReplayPlan(
        ReplayProgram((step,), golden.site.position), bindings, "; ".join([words, *differ])
    )


class _Grouping:
    """Collects the nodes between a value and the values that the other side recorded."""

    def __init__(
        self,
        target: Record,
        graph: RecordedCalls,
        other: Record,
        recorded_calls: RecordedCalls,
        *,
        planned: str,
    ) -> None:
        """`planned` is the side whose graph has the nodes; `recorded_calls` are of the other."""
        self.target = target
        self.graph = graph
        self.scope: Scope = scope_of(target.site)
        self.other = other
        self.seen = recorded_calls
        self.planned = planned
        kernel = recorded_calls.call_of(other)
        self.read = {
            record.site.nodes[-1]: record
            for record in (kernel.given.values() if kernel is not None else ())
            if record.site.nodes and record.site.exact and record.site.level == "buffer"
        }
        self.group = {*other.site.nodes, target.site.name}
        self.steps: dict[str, ReplayStep] = {}
        self.bindings: dict[str, Binding] = {}
        self.borrowed: list[str] = []
        self.unsure: list[str] = []

    def plan(self) -> ReplayPlan:
        """Walk back from the value to recorded values."""
        waiting = [self.target.site.name]
        while waiting:
            name = waiting[-1]
            call = self.graph.node(self.scope, name)
            if call is None:
                raise UsageError(f"node {name} is not recorded in the dump with the graph")
            before = [node for node in self._inputs_to_recompute(call) if node not in self.steps]
            if before:
                waiting += before
                if len(waiting) + len(self.steps) > _MOST_STEPS:
                    raise UsageError(
                        f"more than {_MOST_STEPS} nodes lie between it and recorded values"
                    )
                continue
            waiting.pop()
            if name not in self.steps:
                getitem_arguments = {
                    position: self._argument(record) for position, record in call.given.items()
                }
                if call.site.op == "getitem":
                    getitem_arguments = _getitem_arguments(getitem_arguments)
                self.steps[name] = _make_step(name, call.site.op, getitem_arguments)
        self.steps = dict(sorted(self.steps.items(), key=lambda item: self._order(item[0])))
        if not self.target.site.position.isdecimal():
            raise UsageError("it is an argument that a node wrote to")
        return ReplayPlan(
            ReplayProgram(tuple(self.steps.values()), self.target.site.position),
            self.bindings,
            self._words(),
            tuple(self.unsure),
        )

    def _order(self, name: str) -> int:
        """The position of a node in the program."""
        call = self.graph.node(self.scope, name)
        return -1 if call is None else min(record.sequence for record in call.made.values())

    def _inputs_to_recompute(self, call: RecordedCall) -> list[str]:
        """The inputs of a node that must be recomputed."""
        names = (self._producer(record) for record in call.given.values())
        return [name for name in dict.fromkeys(names) if name and self._is_run(name, call)]

    def _is_run(self, name: str, reader: RecordedCall) -> bool:
        call = self.graph.node(self.scope, name)
        if call is None or call.is_given or not call.given:
            return False
        if _SEEDED.fullmatch(call.site.op):
            if not self._same_seeds(call):
                raise UsageError(f"{name} draws random numbers, which may differ between the dumps")
            return False
        if name in self.group or reader.site.op == "getitem":
            return True
        return self._find_recorded(name) is None

    def _same_seeds(self, call: RecordedCall) -> bool:
        """Whether the seeds of a node are recorded on both sides and equal."""
        has_seeds = False
        for record in call.given.values():
            name = self._producer(record)
            producer_call = self.graph.node(self.scope, name) if name else None
            if record.tensor is None or producer_call is None:
                continue
            other = self._find_recorded(name)
            if other is None:
                same = self._same_seeds(producer_call)
            else:
                same = bool(other.digest) and other.digest == record.digest
            if not same:
                return False
            has_seeds = True
        return has_seeds

    def _find_recorded(self, name: str) -> Record | None:
        """The other side's value of a node."""
        other_record = self.read.get(name) or self.seen.value_of(scope_of(self.other.site), name)
        if (
            other_record is None
            or other_record.tensor is None
            or (other_record.payload is None and not other_record.digest)
        ):
            return None
        return other_record

    def _producer(self, record: Record) -> str:
        nodes = record.site.nodes
        if not nodes and record.tensor is not None:
            raise UsageError(f"the dump does not say which node computed {record.id}")
        return nodes[-1] if nodes and nodes[-1] != record.site.name else ""

    def _argument(self, record: Record) -> Any:
        name = self._producer(record)
        if name in self.steps:
            return StepResult(name)
        if record.tensor is None:
            return _read_plain(record)
        # A node with several values has one leaf per position.
        several = record.site.op == "getitem"
        key = f"{name or record.site.name}/{record.site.position}" if several or not name else name
        other_record = self._find_recorded(name) if name and not several else None
        if other_record is not None and other_record.tensor is not None:
            if other_record.tensor.shape != record.tensor.shape:
                raise UsageError(f"node {name} has different shapes on the two sides")
        elif key not in self.bindings:
            self.borrowed.append(name or f"a constant of {record.site.name}")
            producer_call = self.graph.node(self.scope, name) if name else None
            if producer_call is not None and not _SEEDED.fullmatch(producer_call.site.op):
                self.unsure.append(name)
        my_record, golden_record = (
            (other_record, record) if self.planned == "golden" else (record, other_record)
        )
        self.bindings[key] = Binding(my_record, golden_record)
        return ReplayLeaf(key)

    def _words(self) -> str:
        names = list(self.steps)
        kernel = self.other.site.kernel
        read = f" on what kernel {kernel} read" if kernel else ""
        words = f"{_describe_nodes(names)} rerun in order{read}"
        if self.borrowed:
            nodes = _describe_nodes(self.borrowed)
            words += f"; {nodes} taken from the {self.planned} dump for both sides"
        return words


def _describe_nodes(names: list[str]) -> str:
    if len(names) == 1:
        return f"node {names[0]}"
    more = f" ... {names[-1]}" if len(names) > _MOST_NAMED else ""
    shown = names[: _MOST_NAMED - 1] if more else names
    return f"{len(names)} nodes ({', '.join(shown)}{more})"


def _getitem_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `getitem`: the container and the index."""
    items = [value for position, value in arguments.items() if position.startswith("0")]
    container = items[0] if items and isinstance(items[0], StepResult) else list(items)
    return {"0": container, "1": arguments.get("1")}


def _read_plain(record: Record) -> Any:
    if record.value is None:
        raise UsageError(f"argument {record.site.position} of {record.site.op} is not recorded")
    return read_value(record.value)


def _make_step(name: str, op: str, arguments: Mapping[str, Any]) -> ReplayStep:
    """Call an operator with arguments by position: `0`, `1.2` within a list, or a name."""
    operator = operator_named(op)
    tree: dict[str, Any] = {}
    for position, value in arguments.items():
        first, *inner = position.split(".")
        if inner and (len(inner) > 1 or not inner[0].isdecimal()):
            raise UsageError(f"{op} has an argument at the unsupported position {position!r}")
        if inner:
            tree.setdefault(first, {})[int(inner[0])] = value
        else:
            tree[first] = value
    outer_arguments = {outer_position: _as_lists(value) for outer_position, value in tree.items()}
    numbers = [
        int(outer_position) for outer_position in outer_arguments if outer_position.isdecimal()
    ]
    count = max(numbers, default=-1) + 1
    if count > max(len(operator.takes), 2):
        raise UsageError(f"{op} takes {len(operator.takes)} arguments, not {count}")
    takes = [*operator.takes, *[("", False)] * count]
    # An empty list is not recorded.
    args = tuple(
        outer_arguments.get(str(argument_index), [] if takes[argument_index][1] else None)
        for argument_index in range(count)
    )
    kwargs = {
        argument_name: value
        for argument_name, value in outer_arguments.items()
        if not argument_name.isdecimal()
    }
    names = [name for name, _ in operator.takes]
    drop = {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p")
    if drop:
        raise UsageError(f"{op} draws random numbers")
    return ReplayStep(name, operator, args, kwargs)


def _as_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    last = max(value)
    if last >= 1 << 12:
        raise UsageError(f"a list of {last + 1} arguments is too long")
    return [value.get(index) for index in range(last + 1)]


# --- Own error and inherited error ----------------------------------------------------------------

# With my value c, the golden value g, the operator f and its inputs x: c - f(x_my) is the own error
# of my operator, f(x_my) - f(x_golden) the inherited error, both with f in float64. The own
# error is judged as everywhere else, with the noise of runs of f on my inputs.

MOST_BYTES = 256 << 20
_NOT_REPRODUCED = (
    "rerunning it reproduces neither the golden nor my output: it depends on something that is not "
    "recorded, or draws random numbers"
)


@dataclasses.dataclass(frozen=True)
class Replayed:
    """The result of rerunning an operator.

    Attributes:
        own: norm of my value's own error, relative to the golden value.
        inherited: norm of the inherited error, relative to the golden value.
        judgement: my value, against the operator on my inputs.
        golden_ok: whether the operator on the golden inputs reproduces the golden value.
        words: what was done.
    """

    own: float
    inherited: float
    judgement: Judgement
    golden_ok: bool
    words: str


@dataclasses.dataclass(frozen=True)
class Unreplayed:
    """Why an operator could not be rerun."""

    reason: str


@quietly()
def replay(
    my: Record,
    golden: Record,
    my_calls: RecordedCalls,
    golden_calls: RecordedCalls,
    read_my: Callable[[Record], Tensor],
    read_golden: Callable[[Record], Tensor],
    *,
    most_bytes: int = MOST_BYTES,
) -> Replayed | Unreplayed:
    """Recompute a pair of values from the inputs of either side.

    Args:
        my_calls: all records of my rank and step.
        golden_calls: all records of the golden rank and step.
        most_bytes: the limit for all inputs and results; a run takes a few times as much.
    """
    try:
        if not (is_result(my.site) and is_result(golden.site)):
            raise UsageError("it is an input of a call")
        plan = make_plan(my, golden, my_calls, golden_calls)
        room = most_bytes - _bytes_read(my, golden, plan)
        if room < 0:
            raise UsageError(f"its inputs and results have more than {most_bytes} bytes")
        return _rerun(plan, (my, read_my), (golden, read_golden), room)
    except UsageError as error:
        return Unreplayed(str(error))
    except Exception as error:  # noqa: BLE001  (the row says that it was not rerun)
        return Unreplayed(f"rerunning it raised {in_one_line(error, 160)}")


def _rerun(
    plan: ReplayPlan,
    my: tuple[Record, Callable[[Record], Tensor]],
    golden: tuple[Record, Callable[[Record], Tensor]],
    room: int,
) -> Replayed | Unreplayed:
    my_inputs, golden_inputs = _read_inputs(plan, my[1], golden[1])
    runs = ReplayRuns(plan.program, my_inputs, room)
    # With the same inputs, one run is enough.
    others = runs if golden_inputs is my_inputs else ReplayRuns(plan.program, golden_inputs, room)
    value, expected = my[1](my[0]), golden[1](golden[0])
    judgement, counter = _judge_value(runs, value), _judge_value(others, expected)
    mine_ok, golden_ok = judgement.status.passes(), counter.status.passes()
    if not mine_ok and not golden_ok:
        return Unreplayed(_NOT_REPRODUCED)
    if plan.unsure and not (mine_ok and golden_ok):
        # With the actual value, the result might have been right.
        return Unreplayed(f"one side did not record the value of {', '.join(plan.unsure[:4])}")
    return Replayed(
        own=_relative_distance(value, runs.truth(), expected),
        inherited=0.0
        if others is runs
        else _relative_distance(runs.truth(), others.truth(), expected),
        judgement=judgement,
        golden_ok=golden_ok,
        words=plan.words,
    )


def _judge_value(runs: ReplayRuns, value: Tensor) -> Judgement:
    reference = runs.result
    if reference.shape != value.shape:
        rerun_shape, recorded = list(reference.shape), list(value.shape)
        raise UsageError(
            f"rerunning it gives shape {rerun_shape}, but the recorded shape is {recorded}"
        )
    judgement = AutomaticValueChecker().check(reference, value, ItemEvidence(runs.evidence, VALUE))
    if judgement is None or judgement.status is Status.UNVERIFIED:
        raise UsageError("the result of rerunning it cannot be compared")
    return judgement


def _read_inputs(
    plan: ReplayPlan, read_my: Callable[[Record], Tensor], read_golden: Callable[[Record], Tensor]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of the leaves on both sides; the same dictionary if all are equal."""
    my_values: dict[str, Any] = {}
    golden_values: dict[str, Any] = {}
    for key, bound in plan.bindings.items():
        if bound.my is None or (bound.golden is not None and _same_values(bound.my, bound.golden)):
            assert bound.golden is not None  # noqa: S101  (one of them is there)
            my_values[key] = golden_values[key] = read_golden(bound.golden)
        elif bound.golden is None:
            my_values[key] = golden_values[key] = read_my(bound.my)
        else:
            my_values[key], golden_values[key] = read_my(bound.my), read_golden(bound.golden)
    shared = all(my_values[key] is golden_values[key] for key in my_values)
    return my_values, my_values if shared else golden_values


def _same_values(left: Record, right: Record) -> bool:
    if not left.digest or left.digest != right.digest:
        return False
    left_tensor, other = left.tensor, right.tensor
    if left_tensor is None or other is None:
        return False
    # An expanded tensor is stored once, and its bytes do not show how it was expanded.
    repeated = 0 in left_tensor.stride or 0 in other.stride
    return (left_tensor.dtype, left_tensor.shape) == (other.dtype, other.shape) and not repeated


def _bytes_read(my: Record, golden: Record, plan: ReplayPlan) -> int:
    bound = [record for both in plan.bindings.values() for record in (both.my, both.golden)]
    return sum(_nbytes(record) for record in (my, golden, *bound) if record is not None)


def _nbytes(record: Record) -> int:
    if record.tensor is None:
        raise UsageError("it is not a tensor")
    return math.prod(record.tensor.shape) * known_dtype(record.tensor.dtype).itemsize


def _relative_distance(value: Tensor, truth: Tensor, golden: Tensor) -> float:
    """Norm of the difference relative to the golden value, over finite elements.

    Infinite if NaN or infinities differ.
    """
    value, truth, golden = (_widen_tensor(tensor) for tensor in (value, truth, golden))
    if nonfinite_mismatch(truth, value) is not None:
        return math.inf
    finite = torch.isfinite(truth)
    error = float(torch.linalg.vector_norm(torch.where(finite, value - truth, 0.0)))
    if error == 0.0:
        return 0.0
    scale = float(torch.linalg.vector_norm(torch.where(torch.isfinite(golden), golden, 0.0)))
    return error / scale if scale else math.inf


def _widen_tensor(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
