"""Compilers with one mistake: backends for `torch.compile` that edit a graph and run it.

A plan says which fault is planted where; `faulty` takes it from the environment, so that a script
can import the backend by name. There are two levels: the graph that Dynamo captured, and those of
AOTAutograd, forward and backward. A fault is planted

- at a `place`: in one node, and in the same node of every part of the graph that is compiled again;
- `first`: in the first call of each graph that it fits, as a pass does that knows no names;
- `every`: in each call that it fits.
"""

# ruff: noqa: TID251  (a backend is built from torch's own parts)

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.places.calls import Call, Fault, first, operator_of, try_fault
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

if TYPE_CHECKING:
    from collections.abc import Callable

PLAN = "PLACES_PLAN"
_PER_LINE = "Gradient addition node"  # of no line of the program


@dataclasses.dataclass(frozen=True)
class Node:
    """A node, named so that a part of its graph has it under the same name.

    Attributes:
        captured: the name of the node of Dynamo's graph that it comes from.
        operator: as `operator_of` says it.
        ordinal: which of the nodes of this operator that come from the same node.
        backward: whether it is in a backward graph.
    """

    captured: str
    operator: str
    ordinal: int = 0
    backward: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """A fault and where it is planted.

    Attributes:
        half: the module that has the fault.
        level: `captured` or `lowered`.
        way: `place`, `first` or `every`.
        node: for `place`.
    """

    half: str
    fault: str
    level: str
    way: str
    node: Node = Node("", "")

    def to_text(self) -> str:
        """For the environment."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Plan:
        """From the environment."""
        fields = json.loads(text)
        return cls(**{**fields, "node": Node(**fields["node"])})


def faults_of(half: str) -> dict[str, Fault]:
    """The faults of a half."""
    found: dict[str, Fault] = importlib.import_module(f"benchmarks.places.{half}").FAULTS
    return found


# --- Names of nodes -------------------------------------------------------------------------------


class Names:
    """Names the nodes of AOTAutograd's graphs after those of Dynamo's graph."""

    def __init__(self) -> None:
        self._by_sequence: dict[int, list[tuple[str, str]]] = {}

    def of(self, graph: fx.Graph, *, backward: bool) -> dict[fx.Node, Node]:
        """The forward graph has to come first: a backward node is told by its number only."""
        counts: dict[Any, int] = {}
        found = {}
        for node in graph.nodes:
            if node.op not in {"call_function", "call_method"}:
                continue
            captured = self._captured(node, backward=backward)
            if not captured:
                continue
            key = captured, operator_of(node.target)
            found[node] = Node(*key, counts.get(key, 0), backward)
            counts[key] = counts.get(key, 0) + 1
        return found

    def _captured(self, node: fx.Node, *, backward: bool) -> str:
        sequence = node.meta.get("seq_nr")
        if backward:
            known = self._by_sequence.get(sequence, []) if sequence is not None else []
            if not known or _PER_LINE in (node.stack_trace or ""):
                return ""
            # A call that is not differentiated has the number of the one before it that is.
            named = [name for name, op in known if op in operator_of(node.target)]
            return named[0] if named else known[0][0]
        sources = node.meta.get("from_node") or []
        name = sources[0].name if sources else ""
        if name and sequence is not None:
            self._by_sequence.setdefault(sequence, []).append((name, operator_of(node.target)))
        return name


def captured_names(graph: fx.Graph) -> dict[fx.Node, Node]:
    """The nodes of Dynamo's graph."""
    return {
        node: Node(node.name, operator_of(node.target))
        for node in graph.nodes
        if node.op in {"call_function", "call_method"}
    }


# --- Looking at a model ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Seen:
    """A call that was made, and the node that made it.

    Attributes:
        graph: the number of its graph.
        source: the innermost line of its stack trace, `file:line`.
        module: the path of the module that it was called in.
        target: the node in the graph.
        inputs: its inputs by their names.
    """

    graph: int
    node: Node
    call: Call
    source: str
    module: str
    target: fx.Node
    inputs: dict[str, Any]

    @property
    def statement(self) -> str:
        """The code of the node, as torch.fx prints it."""
        from benchmarks.places.texts import statement_of

        return statement_of(self.target)


class Survey:
    """A backend that notes all calls of the graphs it is given."""

    def __init__(self, level: str) -> None:
        self.level = level
        self.seen: list[Seen] = []
        self.graphs = 0
        self.captured: dict[str, tuple[str, str]] = {}

    def __call__(self, graph: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """Run a graph node by node."""
        for node in graph.graph.nodes:
            if node.op.startswith("call"):
                self.captured[node.name] = line_of(node), module_of(node)
        if self.level == "captured":
            self.graphs += 1
            return self._noting(graph, captured_names(graph.graph))
        names = Names()
        return compile_below(
            graph,
            examples,
            lambda module, back: self._below(module, names.of(module.graph, backward=back)),
        )

    def _below(self, graph: fx.GraphModule, names: dict[fx.Node, Node]) -> Callable[..., Any]:
        self.graphs += 1
        return self._noting(graph, names)

    def _noting(self, graph: fx.GraphModule, names: dict[fx.Node, Node]) -> Callable[..., Any]:
        number = self.graphs

        def run(*args: Any) -> Any:
            return _Noting(graph, names, self, number).run(*args)

        return run


class _Noting(fx.Interpreter):
    def __init__(
        self, graph: fx.GraphModule, names: dict[fx.Node, Node], survey: Survey, number: int
    ) -> None:
        super().__init__(graph)
        self.names, self.survey, self.number = names, survey, number

    def run_node(self, n: fx.Node) -> Any:
        name = self.names.get(n)
        if name is not None:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            call = Call.of(n.target, _kept(tuple(args)), _kept(dict(kwargs)))
            places = self.survey.captured.get(name.captured, ("", ""))
            inputs = {given.name: _kept(self.env[given]) for given in n.all_input_nodes}
            self.survey.seen.append(Seen(self.number, name, call, *places, n, inputs))
        return super().run_node(n)


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _kept(one) for key, one in value.items()}
    if type(value) in {tuple, list}:
        return type(value)(map(_kept, value))
    return value


def line_of(node: fx.Node) -> str:
    """The user's line: the innermost that is not torch's own."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    files = [line.split('"') for line in lines if line.startswith('File "')]
    own = [one for one in files if f"{os.sep}torch{os.sep}" not in one[1]] or files
    if not own:
        return ""
    return f"{own[-1][1]}:{own[-1][2].split('line ')[1].split(',')[0]}"


def module_of(node: fx.Node) -> str:
    """The path of the innermost module."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    text = paths[-1] if paths else ""
    for word in ("L['self']", "L['s']", "._modules", "self."):
        text = text.replace(word, "")
    return text.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "").strip(".")


# --- Planting -------------------------------------------------------------------------------------


def compile_below(
    graph: fx.GraphModule,
    examples: list[Any],
    make: Callable[[fx.GraphModule, bool], Callable[..., Any]],
) -> Callable[..., Any]:
    """Compile with AOTAutograd; `make` gets each graph, and whether it is a backward one."""

    def boxed(run: Callable[..., Any]) -> Callable[[list[Any]], Any]:
        def call(args: list[Any]) -> Any:
            given = list(args)
            args.clear()
            return run(*given)

        call._boxed_call = True  # type: ignore[attr-defined]  # noqa: SLF001  (how torch is told)
        return call

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=lambda module, _: boxed(make(module, False)),
        bw_compiler=lambda module, _: boxed(make(module, True)),
    )(graph, examples)
    return compiled


def plant(graph: fx.GraphModule, plan: Plan, names: dict[fx.Node, Node]) -> Callable[..., Any]:
    """The graph with the fault in it."""
    fault = faults_of(plan.half)[plan.fault]
    done: list[str] = []

    def faulty_call(node: fx.Node) -> Callable[..., Any]:
        target = node.target

        def faulty(*args: Any, **kwargs: Any) -> Any:
            call = Call.of(target, args, kwargs)
            if plan.way == "first" and done:
                return call.run()
            try:
                value = fault.wrong(call)
                if isinstance(first(value), Tensor) and plan.way != "place":
                    right = first(call.run())
                    if first(value).shape != right.shape or first(value).dtype != right.dtype:
                        return call.run()
            except Exception:
                if plan.way == "place":
                    raise
                return call.run()
            done.append(node.name)
            return value

        faulty.__name__ = f"{operator_of(target)}_by_a_faulty_compiler"
        return faulty

    for node, name in names.items():
        if plan.way == "place":
            wanted = name == plan.node
        else:
            wanted = name.operator in fault.operators and fault.backward in {None, name.backward}
        if wanted:
            node.target, node.op = faulty_call(node), "call_function"
    graph.recompile()

    def run(*args: Any) -> Any:
        done.clear()
        return graph.forward(*args)

    return run


def compile_faulty(plan: Plan, graph: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """Compile Dynamo's graph with a fault."""
    if plan.level == "captured":
        edited = fx.GraphModule(graph, _copied(graph.graph))
        return plant(edited, plan, captured_names(edited.graph))
    names = Names()
    return compile_below(
        graph,
        examples,
        lambda module, back: plant(module, plan, names.of(module.graph, backward=back)),
    )


def _copied(graph: fx.Graph) -> fx.Graph:
    """A copy with the same names: a compiler does not write to what it was given."""
    copy = fx.Graph()
    table: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        table[node] = copy.node_copy(node, table.__getitem__)
        table[node].name = node.name
    return copy


def faulty(graph: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """The backend with the fault that the environment names."""
    return compile_faulty(Plan.of_text(os.environ[PLAN]), graph, examples)


def fitting(seen: list[Seen], fault: Fault) -> list[Seen]:
    """The calls that a fault fits and changes."""
    with torch.no_grad():
        return [
            one
            for one in seen
            if one.call.name in fault.operators
            and try_fault(fault, one.call, backward=one.node.backward) is not None
        ]
