"""The values that calls of a graph really receive: in a sample run, or in a dump."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.errors import ParitasError, UsageError, first_line
from paritas.core.numerics.bits import dtype_name
from paritas.core.numerics.random_tensors import between, normal
from paritas.core.results.wording import list_first
from paritas.formats.dumps.opening import open_dump
from paritas.formats.dumps.survey import RecordedCall, RecordedCalls
from paritas.formats.files.tensor_bytes import known_dtype
from paritas.sharding.graphs.calls import (
    CallValues,
    Graph,
    GraphCall,
    TensorValue,
    copy_values,
    items_in,
    split_arguments,
    tensors_by_path,
    values_for,
)
from paritas.sharding.graphs.operators import (
    bytes_words,
    function_of,
    numbers_in,
    predict_results,
    subject_of,
)
from paritas.sharding.operators.configuration import generator_for

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from paritas.formats.files.records import Record, Site


# --- Recorded arguments, and the inputs of a graph by name ----------------------------------------

_MOST_NAMES = 12


@dataclasses.dataclass(frozen=True)
class Samples:
    """The arguments of calls by position, and notes about what was not run."""

    values: Mapping[int, CallValues] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def bound_inputs(graph: Graph, inputs: Any) -> dict[str, torch.Tensor]:
    """The inputs by their names in the graph."""
    values = [value for value in graph.values.values() if value.kind == "input"]
    by_place, by_name = _given_tensors(inputs)
    tensors_by_name = {value.name: tensor for value, tensor in zip(values, by_place, strict=False)}
    names = ", ".join(
        f"{value.name} {show_forms([(value.shape, value.dtype)])}" for value in values
    )
    takes = f"the graph takes {len(values)} tensors: {names:.400}"
    if len(by_place) > len(values):
        raise UsageError(f"got {len(by_place)} positional input tensors; {takes}")
    for key, tensor in by_name.items():
        position = int(key) if key.isdigit() and int(key) < len(values) else None
        name = values[position].name if position is not None else key
        if name not in {value.name for value in values} or name in tensors_by_name:
            raise UsageError(f"the graph has no input {key!r:.80}, or it is given twice; {takes}")
        tensors_by_name[name] = tensor
    missing = [value.name for value in values if value.name not in tensors_by_name]
    if missing:
        raise UsageError(f"the inputs {', '.join(missing):.200} are missing; {takes}")
    for value in values:
        tensor = tensors_by_name[value.name]
        form, expected = (tuple(tensor.shape), tensor.dtype), (value.shape, value.dtype)
        if form != expected:
            raise UsageError(
                f"input {value.name} is {show_forms([form])}, but the graph has "
                f"{show_forms([expected])}; "
                "pass inputs of the shapes and dtypes that it was made with"
            )
    return tensors_by_name


def _given_tensors(inputs: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Input tensors by position and by name; the graph holds other inputs as constants."""
    args, kwargs = split_arguments(inputs)
    named = {str(key): tensor for key, tensor in kwargs.items() if isinstance(tensor, torch.Tensor)}
    inside = [argument for argument in kwargs.values() if not isinstance(argument, torch.Tensor)]
    if any(isinstance(item, torch.Tensor) for item in items_in(inside)):
        raise UsageError(
            "a named input holds several tensors; pass each under its own name in the graph"
        )
    return [item for item in items_in(args) if isinstance(item, torch.Tensor)], named


def show_forms(forms: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    """Shapes and dtypes for people: `float32[2, 4]`."""
    words = [f"{dtype_name(dtype)}{list(shape)}" for shape, dtype in forms]
    return ", ".join(words) or "nothing"


# --- Arguments from a recording of the model ------------------------------------------------------

# A recorded call is matched with a call of the graph if its node has the same name, operator and
# source line; if it is the only call of a module; or if it is the n-th call of an operator in a
# module, and both sides have equally many of them. Its inputs and outputs are then graph values.


def values_from_dump(graph: Graph, path: Path, keep: Collection[int]) -> Samples:
    """The arguments of a graph's calls that a dump contains.

    Only the first step of the first rank is read. Calls with unknown arguments are left out and
    listed in the notes.
    """
    dump = open_dump(path)
    records = [record for record in dump.records() if record.site.phase == "forward"]
    first = min(((record.rank, record.step) for record in records), default=(0, 0))
    calls = list(RecordedCalls(record for record in records if (record.rank, record.step) == first))
    record_by_name = _match_records(graph, calls)
    if not record_by_name:
        raise UsageError(
            f"{path}: none of its recorded calls is in {graph.name}. Record the model of the "
            'graph, with paritas.capture(..., level="module") or level="op"'
        )
    state = {} if graph.state is None else graph.state()

    def tensor_of(value: TensorValue) -> torch.Tensor:
        return (
            dump.read(record_by_name[value.name])
            if value.name in record_by_name
            else state[value.name]
        )

    values_by_position: dict[int, CallValues] = {}
    missing: list[str] = []
    for call in graph.calls:
        if call.position not in keep or call.idle:
            continue
        if all(value.name in record_by_name or value.name in state for value in call.tensors()):
            values_by_position[call.position] = copy_values(
                values_for(call.args, call.kwargs, tensor_of)
            )
        else:
            missing.append(call.name)
    count = len(values_by_position)
    notes = [f"{path.name} holds the arguments of {count} of {count + len(missing)} calls"]
    if missing:
        notes.append(
            f"it does not hold those of {list_first(missing, _MOST_NAMES)}, which are drawn"
        )
    return Samples(values_by_position, tuple(notes))


def _match_records(graph: Graph, calls: list[RecordedCall]) -> dict[str, Record]:
    """The record of each graph value that the dump holds."""
    record_by_name: dict[str, Record] = {}
    for recorded_call, ours in _pair_calls(graph, calls):
        inputs = tensors_by_path(ours.args, ours.kwargs)
        graph_values = [(".".join(map(str, path)), value) for path, value in inputs]
        graph_values += [(f"made {at}", value) for at, value in enumerate(ours.outputs)]
        dump_records = {
            **recorded_call.given,
            **{
                f"made {output_index}": result_record
                for output_index, result_record in recorded_call.made.items()
            },
        }
        if recorded_call.site.level == "module":
            # A module receives no parameters: its first argument is the first other tensor.
            moving = [
                path_and_value
                for path_and_value in graph_values
                if path_and_value[1].kind in {"input", "intermediate"}
            ]
            graph_values = (
                [("0", moving[0][1]), *graph_values[-len(ours.outputs) :]] if moving else []
            )
        for value_path, value in graph_values:
            record = dump_records.get(value_path)
            if record is not None and _record_fits(record, value):
                record_by_name.setdefault(value.name, record)
    return record_by_name


def _pair_calls(
    graph: Graph, calls: list[RecordedCall]
) -> Iterator[tuple[RecordedCall, GraphCall]]:
    ours = [call for call in graph.calls if not call.idle and call.outputs]
    nodes = {call.name: call for call in ours}
    modules = {call.module for call in ours}
    for recorded_call in calls:
        node = nodes.get(recorded_call.site.name)
        if (
            recorded_call.site.level == "node"
            and node is not None
            and _is_same_node(recorded_call.site, node)
        ):
            yield recorded_call, node
    by_operator = _group_by_site((call.module, call.operator, call) for call in ours)
    # The outermost module has its class name in a dump, and no name in a graph.
    recorded = _group_by_site(
        (call.site.module if call.site.module in modules else "", call.site.op, call)
        for call in calls
        if call.site.level == "op"
    )
    for key, group in recorded.items():
        if len(group) == len(by_operator.get(key, ())):
            yield from zip(group, by_operator[key], strict=True)
    by_module = _group_by_site((call.module, "", call) for call in ours)
    recorded_modules = _group_by_site(
        (call.site.name, "", call) for call in calls if call.site.level == "module"
    )
    for key, group in recorded_modules.items():
        if key[0] and len(group) == len(by_module.get(key, ())) == 1:
            yield group[0], by_module[key][0]


def _is_same_node(site: Site, call: GraphCall) -> bool:
    """Whether two nodes of one name are the same: each graph numbers its own nodes."""
    if site.op != call.operator:
        return False
    if site.line and call.source:
        return site.line.partition(", in ")[0].replace("\\", "/").endswith(call.source)
    return site.module == call.module


def _group_by_site(items: Iterable[tuple[str, str, Any]]) -> Mapping[tuple[str, str], list[Any]]:
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for module, name, item in items:
        groups[module, name].append(item)
    return groups


def _record_fits(record: Record, value: TensorValue) -> bool:
    facts = record.tensor
    if facts is None or record.payload is None:
        return False
    return tuple(facts.shape) == value.shape and known_dtype(facts.dtype) == value.dtype


# --- Arguments from running the graph once on sample inputs ---------------------------------------

# Drawn values suit an operator; recorded ones are those of the model, with real masks,
# probabilities that add up, and activations of the right size.

_MOST_BYTES = 4 << 30


def sample_values(
    graph: Graph,
    inputs: Any,
    keep: Collection[int],
    *,
    imports: Sequence[str] = (),
    seed: int = 0,
) -> Samples:
    """Run a graph and keep copies of the arguments of some of its calls.

    Args:
        inputs: of the graph: a tensor, a list or tuple, a dict by name or position, or `Inputs`.
        keep: positions of the calls.
        seed: for dropout, and for parameters that the graph does not hold.
    """
    run = _SampleRun(graph, bound_inputs(graph, inputs), imports, seed)
    values_by_position: dict[int, CallValues] = {}
    last = max(keep, default=-1)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for call in graph.calls[: last + 1]:
            call_values = run.gather_arguments(call)
            if call.position in keep and call_values is not None:
                values_by_position[call.position] = copy_values(call_values)
            run.run(call, call_values)
    missing = [
        call for call in graph.calls if call.position in set(keep) - values_by_position.keys()
    ]
    return Samples(values_by_position, run.notes(missing))


class _SampleRun:
    """The values of a graph while it runs."""

    def __init__(
        self, graph: Graph, inputs: dict[str, torch.Tensor], imports: Sequence[str], seed: int
    ) -> None:
        self._graph = graph
        self._imports = imports
        self._seed = seed
        self._state = {} if graph.state is None else graph.state()
        self._known: dict[str, torch.Tensor] = {key: x.clone() for key, x in inputs.items()}
        self._failed: list[str] = []
        self._drawn: list[str] = []
        self._last_use: dict[str, int] = {}
        for call in graph.calls:
            for value in call.tensors():
                self._last_use[value.name] = call.position

    def gather_arguments(self, call: GraphCall) -> CallValues | None:
        """The arguments of a call; None if one is unknown."""
        if not all(self._fetch(value) for value in call.tensors()):
            return None
        return values_for(call.args, call.kwargs, lambda value: self._known[value.name])

    def run(self, call: GraphCall, call_values: CallValues | None) -> None:
        """Run a call, keep its results unless it fails, and drop values no longer needed."""
        outputs = [value for value in call.outputs if value.name not in self._known]
        if call_values is not None and outputs:
            try:
                self._take(call, self._result(call, call_values))
            except Exception as error:  # noqa: BLE001  (goes into the notes)
                if not call.idle:
                    first = first_line(error) or type(error).__name__
                    text = first if isinstance(error, ParitasError) else f"{call.name}: {first}"
                    self._failed.append(text[:200])
        for value in (*call.tensors(), *call.outputs):
            if self._last_use.get(value.name, -1) <= call.position:
                self._known.pop(value.name, None)

    def notes(self, missing: list[GraphCall]) -> tuple[str, ...]:
        """What could not be run or had to be drawn."""
        notes: list[str] = []
        if self._drawn:
            names = list_first(self._drawn, _MOST_NAMES)
            notes.append(f"the graph does not hold {names}; drawn for the sample run")
        if self._failed:
            failed = list_first(self._failed, _MOST_NAMES, between="; ")
            notes.append(f"not run on the sample inputs: {failed}")
        checked = [call for call in missing if not call.idle]
        if checked:
            names = list_first([call.name for call in checked], _MOST_NAMES)
            notes.append(f"the arguments of these calls are unknown and are drawn: {names}")
        return tuple(notes)

    def _fetch(self, value: TensorValue) -> bool:
        """Make a tensor known, if possible."""
        if value.name in self._known:
            return True
        if value.kind in {"parameter", "buffer", "constant"}:
            parameter = self._state.get(value.name)
            if parameter is None:
                self._drawn.append(value.name)
                parameter = draw_parameter(value, self._seed)
            # A copy: the graph must not modify the user's model.
            self._known[value.name] = parameter.detach().clone()
            return True
        return False

    def _result(self, call: GraphCall, call_values: CallValues) -> list[torch.Tensor]:
        if call.obstacle and call.function is None:
            raise UsageError(f"{call.name}: {call.obstacle}")
        self._check_size(call)
        function = function_of(call, self._imports)
        returned = function(*call_values.args, **call_values.kwargs)
        return [item for item in items_in(returned) if isinstance(item, torch.Tensor)]

    def _check_size(self, call: GraphCall) -> None:
        """Refuse a call that does not fit in memory: a file may contain one."""
        size = sum(value.bytes for value in call.outputs)
        lengths = [math.prod(value.shape) for value in call.tensors()]
        numbers = math.prod(max(n, 1) for n in numbers_in((call.args, dict(call.kwargs))))
        widest = max(value.dtype.itemsize for value in call.outputs)
        most = numbers * max(lengths, default=1) * widest
        if most > _MOST_BYTES:
            predicted = predict_results(subject_of(call, self._imports))
            if predicted is not None:
                size = max(size, predicted.bytes)
            elif not lengths:
                size = most
        if size > _MOST_BYTES:
            allowed = bytes_words(_MOST_BYTES)
            raise UsageError(f"{call.name} returns {bytes_words(size)}; {allowed} are allowed")

    def _take(self, call: GraphCall, results: list[torch.Tensor]) -> None:
        graph_forms = [(value.shape, value.dtype) for value in call.outputs]
        returned_forms = [(tuple(tensor.shape), tensor.dtype) for tensor in results]
        if graph_forms != returned_forms:
            raise UsageError(
                f"{call.name} returned {show_forms(returned_forms)}, but the graph has "
                f"{show_forms(graph_forms)}"
            )
        for value, tensor in zip(call.outputs, results, strict=True):
            self._known[value.name] = tensor


def draw_parameter(value: TensorValue, seed: int) -> torch.Tensor:
    """A parameter that keeps activations in range, or a buffer that may be a variance."""
    generator = generator_for(seed, value.name)
    if not value.dtype.is_floating_point:
        return torch.zeros(value.shape, dtype=value.dtype)
    if len(value.shape) > 1:
        scale = 1 / math.sqrt(max(1, math.prod(value.shape[1:])))
        return (normal(value.shape, generator) * scale).to(value.dtype)
    return between(0.5, 1.5)(value.shape, generator).to(value.dtype)
