"""The values that calls of a graph were really given: in a sample run, or in a dump."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paritas.comparison.dataflow import RecordedCall, RecordedCalls
from paritas.dumps.opening import open_dump
from paritas.errors import ParitasError, UsageError, first_line
from paritas.files.dtypes import known_dtype
from paritas.graphs.calls import (
    CallValues,
    Graph,
    GraphCall,
    TensorValue,
    items_in,
    split_arguments,
    values_for,
)
from paritas.graphs.operators import bytes_words, foretold, function_of, numbers_in, subject_of
from paritas.partition.configuration.inputs import generator_for

if TYPE_CHECKING:
    from pathlib import Path

    from paritas.dumps.opening import ReadableDump
    from paritas.files.records import Record, Site


# --- What calls of a graph were given, and the inputs of a graph by the names it has for them -----

_MOST_NAMES = 12


@dataclasses.dataclass(frozen=True)
class Samples:
    """What calls were given.

    Attributes:
        values: by the position of the call; those that are missing are to be drawn.
        notes: what a reader should know: what was not run, and why.
    """

    values: Mapping[int, CallValues] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def bound_inputs(graph: Graph, inputs: Any) -> dict[str, torch.Tensor]:
    """The inputs by the names that the graph has for them."""
    wanted = [value for value in graph.values.values() if value.kind == "input"]
    by_place, by_name = _given_tensors(inputs)
    found = {value.name: tensor for value, tensor in zip(wanted, by_place, strict=False)}
    names = ", ".join(f"{value.name} {shown([(value.shape, value.dtype)])}" for value in wanted)
    takes = f"the graph takes {len(wanted)} tensors: {names:.400}"
    if len(by_place) > len(wanted):
        raise UsageError(f"{len(by_place)} input tensors are given by position; {takes}")
    for key, tensor in by_name.items():
        place = int(key) if key.isdigit() and int(key) < len(wanted) else None
        name = wanted[place].name if place is not None else key
        if name not in {value.name for value in wanted} or name in found:
            raise UsageError(f"there is no input {key!r:.80}, or it is given twice; {takes}")
        found[name] = tensor
    missing = [value.name for value in wanted if value.name not in found]
    if missing:
        raise UsageError(f"the inputs lack {', '.join(missing):.200}; {takes}")
    for value in wanted:
        _check(value, found[value.name])
    return found


def _check(value: TensorValue, tensor: torch.Tensor) -> None:
    found = (tuple(tensor.shape), tensor.dtype)
    if found != (value.shape, value.dtype):
        raise UsageError(
            f"input {value.name} is {shown([found])}, where the graph has "
            f"{shown([(value.shape, value.dtype)])}: give inputs of the shapes and dtypes that it "
            "was made with"
        )


def _given_tensors(inputs: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors by position and by name; what else a model is given, the graph holds as constants."""
    args, kwargs = split_arguments(inputs)
    named = {str(key): tensor for key, tensor in kwargs.items() if isinstance(tensor, torch.Tensor)}
    inside = [one for one in kwargs.values() if not isinstance(one, torch.Tensor)]
    if any(isinstance(one, torch.Tensor) for one in items_in(inside)):
        raise UsageError(
            "a named input holds several tensors: give each by the name that the graph has for it"
        )
    return [one for one in items_in(args) if isinstance(one, torch.Tensor)], named


def copied(given: CallValues) -> CallValues:
    """Copies that later calls do not write to; one tensor given twice stays one."""
    copies: dict[int, torch.Tensor] = {}

    def copy(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        return copies.setdefault(id(item), item.detach().clone())

    return given.map(copy)


def shown(found: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    """Shapes and dtypes for people: `float32[2, 4]`."""
    words = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in found]
    return ", ".join(words) or "nothing"


def listed(names: Sequence[str], between: str = ", ") -> str:
    """Names for people, not too many."""
    rest = len(names) - _MOST_NAMES
    return between.join(names[:_MOST_NAMES]) + (f"{between}{rest} more" if rest > 0 else "")


# --- What calls were given when another program, the model itself, was recorded -------------------

# A dump has calls of its own. Where one of them is a call of the graph, what it was given and what
# it made are values of the graph. It is one if the node bears the same name, calls the same
# operator and comes from the same line; if it is the one call of a module; or if it is the n-th of
# an operator in a module that has as many in both.


def values_from_dump(graph: Graph, path: Path, keep: Collection[int]) -> Samples:
    """What a dump says that calls of a graph were given.

    The first step of the first rank is read. Calls of which it does not say everything are left
    out, and told in the notes.

    Raises:
        UsageError: it is no dump, or none of its calls is one of the graph's.
    """
    dump = open_dump(path)
    found = _match_records(graph, _calls_of(dump))
    if not found:
        raise UsageError(
            f"{path}: none of its recorded calls is a call of {graph.name}. Record the model that "
            'the graph was made of, with paritas.capture(..., level="module") or level="op"'
        )
    state = {} if graph.state is None else graph.state()

    def tensor_of(value: TensorValue) -> torch.Tensor:
        return dump.read(found[value.name]) if value.name in found else state[value.name]

    kept: dict[int, CallValues] = {}
    missing: list[str] = []
    for call in graph.calls:
        if call.position not in keep or call.idle:
            continue
        if all(value.name in found or value.name in state for value in call.tensors()):
            kept[call.position] = copied(values_for(call.args, call.kwargs, tensor_of))
        else:
            missing.append(call.name)
    notes = [f"recorded in {path.name}: what {len(kept)} of {len(kept) + len(missing)} are given"]
    if missing:
        notes.append(f"it does not say what these are given, which is drawn: {listed(missing)}")
    return Samples(kept, tuple(notes))


def _calls_of(dump: ReadableDump) -> list[RecordedCall]:
    """The forward calls of the first step of the first rank."""
    records = [one for one in dump.records() if one.site.phase == "forward"]
    first = min(((one.rank, one.step) for one in records), default=(0, 0))
    return list(RecordedCalls(one for one in records if (one.rank, one.step) == first))


def _match_records(graph: Graph, calls: list[RecordedCall]) -> dict[str, Record]:
    """The record of each value of the graph that the dump is known to hold."""
    found: dict[str, Record] = {}
    for theirs, ours in _pair_calls(graph, calls):
        wanted = [
            *_tensors_by_place(ours),
            *((f"made {at}", x) for at, x in enumerate(ours.outputs)),
        ]
        held = {**theirs.given, **{f"made {place}": one for place, one in theirs.made.items()}}
        if theirs.site.level == "module":
            # A module is given no parameters: its first argument is the first other tensor.
            moving = [one for one in wanted if one[1].kind in {"input", "intermediate"}]
            wanted = [("0", moving[0][1]), *wanted[-len(ours.outputs) :]] if moving else []
        for place, value in wanted:
            record = held.get(place)
            if record is not None and _record_fits(record, value):
                found.setdefault(value.name, record)
    return found


def _pair_calls(
    graph: Graph, calls: list[RecordedCall]
) -> Iterator[tuple[RecordedCall, GraphCall]]:
    ours = [call for call in graph.calls if not call.idle and call.outputs]
    nodes = {call.name: call for call in ours}
    modules = {call.module for call in ours}
    for theirs in calls:
        node = nodes.get(theirs.site.name)
        if theirs.site.level == "node" and node is not None and _is_same_node(theirs.site, node):
            yield theirs, node
    by_operator = _group_by_site((call.module, call.operator, call) for call in ours)
    # The outermost module bears the name of its class in a dump, and none in a graph.
    recorded = _group_by_site(
        (one.site.module if one.site.module in modules else "", one.site.op, one)
        for one in calls
        if one.site.level == "op"
    )
    for key, group in recorded.items():
        if len(group) == len(by_operator.get(key, ())):
            yield from zip(group, by_operator[key], strict=True)
    by_module = _group_by_site((call.module, "", call) for call in ours)
    seen = _group_by_site((one.site.name, "", one) for one in calls if one.site.level == "module")
    for key, group in seen.items():
        if key[0] and len(group) == len(by_module.get(key, ())) == 1:
            yield group[0], by_module[key][0]


def _is_same_node(site: Site, call: GraphCall) -> bool:
    """Whether two nodes of one name are one: graphs number their nodes, each by itself."""
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


def _tensors_by_place(call: GraphCall) -> Iterator[tuple[str, TensorValue]]:
    """The tensors that a call is given, with their places as a dump writes them."""

    def below(place: str, value: Any) -> Iterator[tuple[str, TensorValue]]:
        if isinstance(value, TensorValue):
            yield place, value
        elif isinstance(value, list | tuple):
            for at, item in enumerate(value):
                yield from below(f"{place}.{at}", item)

    for at, value in enumerate(call.args):
        yield from below(str(at), value)
    for name, value in call.kwargs.items():
        yield from below(name, value)


def _record_fits(record: Record, value: TensorValue) -> bool:
    facts = record.tensor
    if facts is None or record.payload is None:
        return False
    return tuple(facts.shape) == value.shape and known_dtype(facts.dtype) == value.dtype


# --- A graph run once on sample inputs, call by call, to keep what calls were really given --------

# Drawn values fit an operator; recorded ones are those of the model: masks that mask, probabilities
# that add up, activations of the size they have.

_MOST_BYTES = 4 << 30


def sample_values(
    graph: Graph,
    inputs: Any,
    keep: Collection[int],
    *,
    imports: Sequence[str] = (),
    seed: int = 0,
) -> Samples:
    """Run a graph and keep copies of what some of its calls were given.

    Args:
        inputs: of the graph: a tensor, a list or tuple, a dict by name or position, or `Inputs`.
        keep: positions of the calls.
        imports: modules of the user's that hold functions of the graph.
        seed: of drawn numbers, those of dropout and of parameters that the graph does not hold.

    Raises:
        UsageError: the inputs are not those of the graph.
    """
    run = _SampleRun(graph, bound_inputs(graph, inputs), imports, seed)
    kept: dict[int, CallValues] = {}
    last = max(keep, default=-1)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for call in graph.calls[: last + 1]:
            given = run.given(call)
            if call.position in keep and given is not None:
                kept[call.position] = copied(given)
            run.run(call, given)
    missing = [call for call in graph.calls if call.position in set(keep) - kept.keys()]
    return Samples(kept, run.notes(missing))


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

    def given(self, call: GraphCall) -> CallValues | None:
        """What a call is given; None if some of it is unknown."""
        if not all(self._fetch(value) for value in call.tensors()):
            return None
        return values_for(call.args, call.kwargs, lambda value: self._known[value.name])

    def run(self, call: GraphCall, given: CallValues | None) -> None:
        """Run a call, whose results become known unless it fails, and forget what is used up."""
        wanted = [value for value in call.outputs if value.name not in self._known]
        if given is not None and wanted:
            try:
                self._take(call, self._result(call, given))
            except Exception as error:  # noqa: BLE001  (told of in the notes)
                if not call.idle:
                    first = first_line(error) or type(error).__name__
                    told = first if isinstance(error, ParitasError) else f"{call.name}: {first}"
                    self._failed.append(told[:200])
        for value in (*call.tensors(), *call.outputs):
            if self._last_use.get(value.name, -1) <= call.position:
                self._known.pop(value.name, None)

    def notes(self, missing: list[GraphCall]) -> tuple[str, ...]:
        """What did not go as asked."""
        notes: list[str] = []
        if self._drawn:
            notes.append(f"the graph does not hold {listed(self._drawn)}: drawn for the sample run")
        if self._failed:
            notes.append(f"not run on the sample inputs: {listed(self._failed, '; ')}")
        checked = [call for call in missing if not call.idle]
        if checked:
            names = listed([call.name for call in checked])
            notes.append(f"what these calls are given is not known, and drawn: {names}")
        return tuple(notes)

    def _fetch(self, value: TensorValue) -> bool:
        """Make a tensor known, if that can be."""
        if value.name in self._known:
            return True
        if value.kind in {"parameter", "buffer", "constant"}:
            held = self._state.get(value.name)
            if held is None:
                self._drawn.append(value.name)
                held = _draw_parameter(value, self._seed)
            # A copy: what the graph writes to is not to be written to in the user's model.
            self._known[value.name] = held.detach().clone()
            return True
        return False

    def _result(self, call: GraphCall, given: CallValues) -> list[torch.Tensor]:
        if call.obstacle and call.function is None:
            raise UsageError(f"{call.name}: {call.obstacle}")
        self._check_size(call)
        function = function_of(call, self._imports)
        made = function(*given.args, **given.kwargs)
        return [one for one in items_in(made) if isinstance(one, torch.Tensor)]

    def _check_size(self, call: GraphCall) -> None:
        """Refuse what does not fit the memory, as a file may ask for it."""
        size = sum(value.bytes for value in call.outputs)
        lengths = [math.prod(value.shape) for value in call.tensors()]
        numbers = math.prod(max(n, 1) for n in numbers_in((call.args, dict(call.kwargs))))
        widest = max(value.dtype.itemsize for value in call.outputs)
        most = numbers * max(lengths, default=1) * widest
        if most > _MOST_BYTES:
            told = foretold(subject_of(call, self._imports))
            if told is not None:
                size = max(size, told.bytes)
            elif not lengths:
                size = most
        if size > _MOST_BYTES:
            most_words = bytes_words(_MOST_BYTES)
            raise UsageError(f"{call.name} gives {bytes_words(size)}, more than {most_words}")

    def _take(self, call: GraphCall, results: list[torch.Tensor]) -> None:
        said = [(value.shape, value.dtype) for value in call.outputs]
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in results]
        if said != found:
            raise UsageError(f"{call.name} gave {shown(found)}, where the graph says {shown(said)}")
        for value, tensor in zip(call.outputs, results, strict=True):
            self._known[value.name] = tensor


def _draw_parameter(value: TensorValue, seed: int) -> torch.Tensor:
    """A parameter that keeps activations in their range; a buffer that may be a variance."""
    generator = generator_for(seed, value.name)
    if not value.dtype.is_floating_point:
        return torch.zeros(value.shape, dtype=value.dtype)
    if len(value.shape) > 1:
        scale = 1 / math.sqrt(max(1, math.prod(value.shape[1:])))
        return (torch.randn(value.shape, generator=generator) * scale).to(value.dtype)
    return (0.5 + torch.rand(value.shape, generator=generator)).to(value.dtype)
