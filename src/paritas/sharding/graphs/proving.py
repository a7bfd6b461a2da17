"""Proofs for a graph that was read: of each split, and of the graph under stated placements.

A file of placements says how inputs and parameters are placed, and which collectives follow which
modules or nodes. The graph itself has none: it is the program of one device.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.errors import UsageError
from paritas.core.results.wording import list_first
from paritas.sharding.graphs.calls import (
    Graph,
    GraphCall,
    GraphSettings,
    TensorValue,
    draw_values,
    map_items,
    tensors_by_path,
)
from paritas.sharding.graphs.exported import UNPACKS
from paritas.sharding.graphs.operators import subject_of
from paritas.sharding.graphs.sampling import bound_inputs, draw_parameter
from paritas.sharding.operators.annotation import Annotation, Option
from paritas.sharding.proofs.graphs import (
    COLLECTIVES,
    GraphProgram,
    GraphStep,
    Ref,
    decide_program,
)
from paritas.sharding.proofs.prove import Prover
from paritas.sharding.rows import GraphProof, RuleProof

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paritas.core.operators.calls import OperatorCall

_MOST_NAMES = 8


# --- One split ------------------------------------------------------------------------------------


def prove_split(
    call: OperatorCall, rule: str, idx: int, dim: int, split: str, settings: GraphSettings
) -> RuleProof:
    """Decide one split of a call for all shapes and numbers of ranks."""
    undecided = RuleProof(operator=call.name, rule=rule, split_by=split, status="not decided")
    if "->" not in rule:
        reason = "no annotation says how it is split"
        return msgspec.structs.replace(undecided, reason=reason)
    try:
        annotation = Annotation.parse(rule)
        ranks = settings.ranks[0]
        return Prover(call, annotation, ranks, settings.seed).decide(Option(idx, dim))
    except UsageError as error:
        return msgspec.structs.replace(undecided, reason=str(error))


# --- Placements, as a file states them ------------------------------------------------------------


class GraphPlacements(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a graph is placed on ranks.

    Attributes:
        inputs: input, parameter or buffer -> placement. A name may have wildcards; what is not
            named is replicated.
        collectives: module or node -> what follows its result: `all_reduce`, `all_reduce(max)`,
            `all_gather(1)`, `reduce_scatter(1)`, `keep_slice(1)`, or a list of these.
        outputs: the placement of each result, or of all.
    """

    inputs: dict[str, str] = {}
    collectives: dict[str, str | list[str]] = {}
    outputs: str | list[str] = "replicate"


def read_placements(source: GraphPlacements | Mapping[str, Any] | str | Path) -> GraphPlacements:
    """Placements from data or from a TOML file.

    Raises:
        UsageError: the file cannot be read, or says something else.
    """
    if isinstance(source, GraphPlacements):
        return source
    where = "placements"
    data: Any = source
    if isinstance(source, str | Path):
        where = str(source)
        try:
            data = tomllib.loads(Path(source).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"cannot read {where!r}: {error.strerror or error}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{where!r} is not TOML: {error}") from None
    try:
        return msgspec.convert(dict(data), GraphPlacements)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{where}: {error}; it may have the tables `inputs` and `collectives`, and `outputs`"
        ) from None


_COLLECTIVE = re.compile(r"(\w+)(?:\(\s*(-?\w+)\s*\))?")
_REDUCTIONS = ("sum", "max", "min")


def _read_collectives(where: str, written: str | list[str]) -> list[tuple[str, Any]]:
    """`["all_gather(1)"]` as `[("all_gather", 1)]`."""
    collectives: list[tuple[str, Any]] = []
    for spelling in [written] if isinstance(written, str) else written:
        parts = _COLLECTIVE.fullmatch(spelling.strip())
        name, argument = (parts[1], parts[2]) if parts else ("", None)
        if name == "all_reduce" and argument in {None, *_REDUCTIONS}:
            collectives.append((name, argument or "sum"))
        elif (
            name in COLLECTIVES
            and name != "all_reduce"
            and argument is not None
            and re.fullmatch(r"-?\d+", argument)
        ):
            collectives.append((name, int(argument)))
        else:
            raise UsageError(
                f"collective {spelling!r} of {where!r} is unknown: use all_reduce, "
                "all_reduce(max), "
                "all_gather(DIM), reduce_scatter(DIM) or keep_slice(DIM)"
            )
    return collectives


# --- The graph as a program with collectives ------------------------------------------------------


def prove_placed(
    graph: Graph,
    placements: GraphPlacements | Mapping[str, Any] | str | Path,
    settings: GraphSettings,
    inputs: Any = None,
) -> GraphProof:
    """Decide whether a graph computes the same on ranks under placements as on one device.

    Args:
        inputs: of the numerical check; None draws suitable ones.

    Raises:
        UsageError: the placements name what the graph does not have.
    """
    stated = read_placements(placements)
    if not graph.outputs:
        raise UsageError(f"{graph.name} does not say what it returns: nothing can be proved")
    roles = _input_roles(graph, stated.inputs)
    stated_outputs = stated.outputs
    outputs = (
        [stated_outputs] * len(graph.outputs)
        if isinstance(stated_outputs, str)
        else list(stated_outputs)
    )
    if len(outputs) != len(graph.outputs):
        raise UsageError(
            f"{graph.name} returns {len(graph.outputs)} tensors, but {len(outputs)} placements of "
            "outputs are stated"
        )
    values = _values(graph, settings, inputs)
    shown = [name for name, value in graph.values.items() if value.kind == "input"]
    proof = decide_program(
        _program(graph, stated, settings),
        values,
        roles,
        outputs,
        ranks=settings.ranks[0],
        shown=shown,
    )
    return msgspec.structs.replace(proof, place=_place(graph, proof.node))


def _place(graph: Graph, node: str) -> str:
    """The module and source line of a node; a collective has those of the value before it."""
    for call in graph.calls:
        names = {call.name, *(value.name for value in call.outputs)}
        if node in names or any(node.startswith(f"{name}.") for name in names):
            return ", ".join(filter(None, (call.module, call.source)))
    return ""


def _input_roles(graph: Graph, stated: Mapping[str, str]) -> dict[str, str]:
    """The placement of each input that is named; the last pattern that fits decides."""
    roles: dict[str, str] = {}
    for pattern, role in stated.items():
        fits = [
            name
            for name in graph.values
            if fnmatch.fnmatchcase(name, pattern)
            or fnmatch.fnmatchcase(graph.names.get(name, name), pattern)
        ]
        if not fits:
            names = list_first(
                [graph.names.get(value, value) for value in graph.values], _MOST_NAMES
            )
            raise UsageError(f"no input or parameter matches {pattern!r}; the graph has {names}")
        roles |= dict.fromkeys(fits, role)
    return roles


def _values(graph: Graph, settings: GraphSettings, inputs: Any) -> dict[str, torch.Tensor]:
    """All inputs, parameters and buffers; inputs that are not given are drawn to suit their use."""
    bound_tensors: dict[str, torch.Tensor] = {}
    if inputs is not None and not isinstance(inputs, str | Path):
        bound_tensors = bound_inputs(graph, inputs)
    state_tensors = {} if graph.state is None else graph.state()
    tensors: dict[str, torch.Tensor] = {}
    for name, value in graph.values.items():
        tensor = bound_tensors.get(name, state_tensors.get(name))
        if tensor is None and value.kind == "input":
            tensor = _draw_input(graph, value, settings)
        if tensor is None:
            tensor = draw_parameter(value, settings.seed)
        tensors[name] = tensor.detach()
    return tensors


def _draw_input(graph: Graph, value: TensorValue, settings: GraphSettings) -> torch.Tensor | None:
    """A tensor that suits the first call that gets this input."""
    for call in graph.calls:
        for path, used in tensors_by_path(call.args, call.kwargs):
            if used.name == value.name and not call.idle and not call.obstacle:
                subject = subject_of(call, settings.imports)
                drawn = draw_values(subject.name, call.args, call.kwargs, settings.seed)
                argument_place, *keys = path
                drawn_value: Any = (
                    drawn.kwargs[argument_place]
                    if isinstance(argument_place, str)
                    else drawn.args[argument_place]
                )
                for key in keys:
                    drawn_value = drawn_value[key]
                return drawn_value if isinstance(drawn_value, torch.Tensor) else None
    return None


def _program(graph: Graph, stated: GraphPlacements, settings: GraphSettings) -> GraphProgram:
    following = _Following(graph, stated.collectives)
    steps: list[GraphStep] = []
    for call in graph.calls:
        if call.idle or not call.outputs:
            continue
        steps.append(_step(call, following, settings))
        for value in call.outputs:
            steps += following.steps(value.name)
    outputs = tuple(following.name(name, None) for name in graph.outputs)
    return GraphProgram(tuple(steps), outputs)


def _step(call: GraphCall, following: _Following, settings: GraphSettings) -> GraphStep:
    names = tuple(value.name for value in call.outputs)
    results = names if names != (call.name,) else ()
    if call.obstacle and call.function is None:
        return GraphStep(call.name, None, results=results, obstacle=call.obstacle)

    def item(leaf: Any) -> Any:
        return Ref(following.name(leaf.name, call)) if isinstance(leaf, TensorValue) else leaf

    try:
        subject = subject_of(call, settings.imports)
    except UsageError as error:
        return GraphStep(call.name, None, results=results, obstacle=str(error))
    return GraphStep(
        call.name,
        subject.function,
        map_items(subject.args, item),
        map_items(dict(subject.kwargs), item),
        subject.name,
        results,
    )


@dataclasses.dataclass
class _Moved:
    """What replaces a value for the calls after its collectives."""

    name: str
    module: str
    steps: list[GraphStep]


class _Following:
    """The collectives that follow values."""

    def __init__(self, graph: Graph, stated: Mapping[str, str | list[str]]) -> None:
        self.graph = graph
        self.moved: dict[str, _Moved] = {}
        self.made_by = {v.name: call for call in graph.calls for v in call.outputs}
        self.inputs = set(graph.values)
        for pattern, written in stated.items():
            kinds = _read_collectives(pattern, written)
            targets = self._targets(pattern)
            if not targets:
                modules = list_first(sorted(self._modules()), _MOST_NAMES)
                raise UsageError(f"no module or node matches {pattern!r}; modules are {modules}")
            for value, module in targets:
                if value in self.moved:
                    raise UsageError(f"two entries of `collectives` follow {value}: join them")
                self.moved[value] = _chain(value, module, kinds)

    def steps(self, value: str) -> list[GraphStep]:
        """The collectives after a value."""
        return self.moved[value].steps if value in self.moved else []

    def name(self, value: str, user: GraphCall | None) -> str:
        """The name of a value for a call; None for the results of the graph."""
        moved = self.moved.get(value)
        if moved is None or (user is not None and _is_within(user, moved.module)):
            return value
        return moved.name

    def _modules(self) -> set[str]:
        module_paths = set()
        for call in self.graph.calls:
            parts = call.module.split(".") if call.module else []
            module_paths |= {".".join(parts[: at + 1]) for at in range(len(parts))}
        return module_paths

    def _targets(self, pattern: str) -> list[tuple[str, str]]:
        """The values that a pattern means, each with the module that returns it."""
        named = [(name, "") for name in self.made_by if fnmatch.fnmatchcase(name, pattern)]
        modules = [module for module in self._modules() if fnmatch.fnmatchcase(module, pattern)]
        return named or [
            (value, module) for module in modules for value in self._returned_by(module)
        ]

    def _returned_by(self, module: str) -> list[str]:
        """The value that each run of a module returns: what it computes and others use."""
        leaving: dict[str, None] = {}
        for call in self.graph.calls:
            if call.idle == UNPACKS or _is_within(call, module):
                continue
            for value in call.tensors():
                if value.name in self.made_by and _is_within(self.made_by[value.name], module):
                    leaving[value.name] = None
        for name in self.graph.outputs:
            if name in self.made_by and _is_within(self.made_by[name], module):
                leaving[name] = None
        runs: dict[int, list[str]] = {}
        for name in leaving:
            runs.setdefault(self._run_of(module, self.made_by[name]), []).append(name)
        for names in runs.values():
            if len(names) > 1:
                raise UsageError(
                    f"module {module} returns {list_first(names, _MOST_NAMES)}: name the node that "
                    "the collective follows"
                )
        return list(leaving)

    def _run_of(self, module: str, call: GraphCall) -> int:
        """Which run of the module a call belongs to: where this run began."""
        at = call.position
        while at > 0 and _is_within(self.graph.calls[at - 1], module):
            at -= 1
        return at


def _chain(value: str, module: str, kinds: Sequence[tuple[str, Any]]) -> _Moved:
    steps: list[GraphStep] = []
    name = value
    for kind, argument in kinds:
        after = f"{name}.{kind}"
        steps.append(GraphStep(after, COLLECTIVES[kind], (Ref(name), argument)))
        name = after
    return _Moved(name, module, steps)


def _is_within(call: GraphCall, module: str) -> bool:
    return bool(module) and (call.module == module or call.module.startswith(f"{module}."))
