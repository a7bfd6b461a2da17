"""Proofs of graphs: calls whose rules are proved, put together by the placements between them.

A function of tensors, with its collectives written out (`all_reduce`, `all_gather`,
`reduce_scatter`, `keep_slice`), is both the program on one device, where these return their
argument, and the program of a rank. If each call has a proved rule for the placements of its
arguments, then by induction every value of the graph is what its placement says, for all shapes and
numbers of ranks that divide what is split. Equal functions have equal gradients, so the proof also
holds for backward, where the gradients of replicated inputs are summed over the ranks.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, fx

from paritas.errors import UsageError
from paritas.partition.library import annotation_for
from paritas.partition.proofs.prove import ProofStatus, Prover
from paritas.placement.placement import Terms
from paritas.placement.recipes import OperatorCall, Recipe, split_values, tensors_in
from paritas.results.placements import Once, Partial, Replicate, Role, Shard, read_role, role_word

# --- Collectives, as a program writes them --------------------------------------------------------


def all_reduce(x: Any) -> Any:
    """The sum of the ranks' terms, on every rank; on one device, the value itself."""
    return _collective(all_reduce, x)


def all_gather(x: Any, dim: int) -> Any:
    """The ranks' parts along a dimension, joined on every rank; on one device, the value itself."""
    return _collective(all_gather, x, dim)


def reduce_scatter(x: Any, dim: int) -> Any:
    """A rank's part of the sum of all terms; on one device, the value itself."""
    return _collective(reduce_scatter, x, dim)


def keep_slice(x: Any, dim: int) -> Any:
    """A rank's part of what every rank has; on one device, the value itself."""
    return _collective(keep_slice, x, dim)


def _collective(kind: Callable[..., Any], x: Any, *dim: int) -> Any:
    if isinstance(x, fx.Proxy):
        return x.tracer.create_proxy("call_function", kind, (x, *dim), {})
    return x


def _after(kind: Callable[..., Any], before: Role, dim: int | None) -> Role | None:
    """The placement after a collective; None if it does not fit the one before."""
    if kind is all_reduce:
        return Replicate() if before == Partial("sum") else None
    if kind is all_gather:
        return Replicate() if isinstance(before, Shard) and before.dim == dim else None
    fits = Partial("sum") if kind is reduce_scatter else Replicate()
    return Shard(dim or 0) if before == fits else None


COLLECTIVES = {all_reduce, all_gather, reduce_scatter, keep_slice}


# --- The result -----------------------------------------------------------------------------------


class GraphProof(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a graph under placements.

    Attributes:
        node: where the proof stopped; empty if it is proved.
        reason: why it stopped there.
        placements: value -> its placement, as far as it is known.
        off_by: how far the ranks are off in the counterexample, relative to the largest value.
        shapes: of the inputs of the counterexample.
        ranks: its number of ranks.
        certificate: what `graph_checker` checks, as JSON data.
    """

    status: ProofStatus
    node: str = ""
    reason: str = ""
    placements: dict[str, str] = {}
    off_by: float | None = None
    shapes: dict[str, tuple[int, ...]] = {}
    ranks: int = 2
    certificate: dict[str, Any] | None = None

    @property
    def words(self) -> str:
        """The result in one line."""
        if self.status == "proved":
            return (
                "proved over the reals, forward and backward, for all lengths and ranks that the "
                "rules allow, parts of equal size"
            )
        at = f"{self.node}: " if self.node else ""
        if self.status == "not decided":
            return f"not decided: {at}{self.reason}"
        shapes = ", ".join(str(list(shape)) for shape in self.shapes.values())
        return (
            f"refuted on {shapes} over {self.ranks} ranks, which are off by {self.off_by:.2g} "
            f"times the largest value; {at}{self.reason}"
        )


def prove_graph(
    function: Callable[..., Any],
    inputs: Mapping[str, Tensor],
    placements: Mapping[str, str],
    outputs: str | tuple[str, ...] = "replicate",
    *,
    ranks: int = 2,
) -> GraphProof:
    """Decide whether a function with collectives computes the same on ranks as on one device.

    Args:
        function: of the inputs, by name. It must be traceable by `torch.fx`.
        inputs: an example, whose shapes `ranks` divides where they are split.
        placements: input -> `shard(0)`, `replicate`, `partial(sum)`, or `once` for what only the
            first rank has while the others have zeros; by default replicated.
        outputs: what the results should be.
        ranks: of the numerical check, which a proof must pass too.

    Raises:
        UsageError: the function cannot be traced, or a placement is unknown.
    """
    wanted = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    roles = {name: _read(placements.get(name, "replicate")) for name in inputs}
    unknown = set(placements) - set(inputs)
    if unknown:
        raise UsageError(f"placements of unknown inputs: {', '.join(sorted(unknown))}")
    graph = _Graph(function, dict(inputs), roles, ranks)
    return graph.decide(tuple(map(_read, wanted)))


def _read(word: str) -> Role:
    role: Role | None = Once() if word == "once" else read_role(word)
    if role is None:
        raise UsageError(f"unknown placement {word!r}: use shard(0), replicate, partial(sum), once")
    return _plain(role)


def _plain(role: Role) -> Role:
    """A role without what does not matter for equal parts."""
    match role:
        case Shard(dim=dim, pieces=1, order="natural", halo=(0, 0)):
            return Shard(dim)
        case Replicate():
            return Replicate()
        case _:
            return role


def _word(role: Role | None) -> str:
    return "unknown" if role is None else "once" if role == Once() else role_word(role)


# --- The graph ------------------------------------------------------------------------------------

_FUNCTIONS = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.div,
    operator.matmul: torch.matmul,
    operator.neg: torch.neg,
    operator.pow: torch.pow,
}


@dataclasses.dataclass
class _Value:
    """A value of the graph: on one device, on each rank, and its placement if it is known."""

    whole: Any
    parts: list[Any]
    role: Role | None


class _Stopped(Exception):  # noqa: N818  (the proof ends here)
    pass


class _Graph:
    def __init__(
        self,
        function: Callable[..., Any],
        inputs: dict[str, Tensor],
        roles: dict[str, Role],
        ranks: int,
    ) -> None:
        try:
            self.graph = fx.symbolic_trace(function).graph
        except Exception as error:
            raise UsageError(f"torch.fx cannot trace the function: {error!s:.200}") from error
        self.inputs = {
            name: value.double() if value.is_floating_point() else value
            for name, value in inputs.items()
        }
        self.roles, self.ranks = roles, ranks
        self.values: dict[fx.Node, _Value] = {}
        self.calls: list[dict[str, Any]] = []
        self.stopped: tuple[str, str] | None = None
        self.drawn = False

    def decide(self, wanted: tuple[Role, ...]) -> GraphProof:
        results: list[_Value] = []
        for node in self.graph.nodes:
            if node.op == "output":
                given = node.args[0]
                nodes = given if isinstance(given, tuple) else (given,)
                results = [self.values[one] for one in nodes]
            elif node.op == "placeholder":
                self._input(node)
            else:
                self._call(node)
        if len(results) != len(wanted):
            raise UsageError(f"the function has {len(results)} results, not {len(wanted)}")
        for number, (value, role) in enumerate(zip(results, wanted, strict=True)):
            if self.stopped is None and value.role != role:
                what = f"result {number} is {_word(value.role)}, not {_word(role)}"
                self.stopped = ("output", f"{what}{_missing(value.role, role)}")
        return self._proof(results, wanted)

    def _proof(self, results: list[_Value], wanted: tuple[Role, ...]) -> GraphProof:
        off = max((_distance(*one) for one in zip(results, wanted, strict=True)), default=0.0)
        node, reason = self.stopped or ("", "")
        found = GraphProof(
            status="not decided",
            node=node,
            reason=reason,
            placements={one.name: _word(value.role) for one, value in self.values.items()},
            shapes={name: tuple(value.shape) for name, value in self.inputs.items()},
            ranks=self.ranks,
        )
        wrong = off > _ROUNDING and not self.drawn
        if self.stopped is not None:
            status: ProofStatus = "refuted" if wrong else "not decided"
            return msgspec.structs.replace(found, status=status, off_by=off if wrong else None)
        if wrong:
            reason = f"proved, but the ranks are off by {off:.2g}; please report this"
            return msgspec.structs.replace(found, reason=reason)
        certificate = {
            "paritas graph certificate": 1,
            "inputs": {name: _word(role) for name, role in self.roles.items()},
            "calls": self.calls,
            "outputs": [
                {"value": node.name, "placement": _word(role)}
                for node, role in zip(self._result_nodes(), wanted, strict=True)
            ],
        }
        return msgspec.structs.replace(found, status="proved", certificate=certificate)

    def _result_nodes(self) -> list[fx.Node]:
        given: Any = next(node for node in self.graph.nodes if node.op == "output").args[0]
        return list(given) if isinstance(given, tuple) else [given]

    def _input(self, node: fx.Node) -> None:
        if node.name not in self.inputs:
            raise UsageError(f"input {node.name!r} is missing")
        whole, role = self.inputs[node.name], self.roles[node.name]
        parts = _parts_of(whole, role, self.ranks)
        if parts is None:
            raise UsageError(f"{node.name} of shape {list(whole.shape)} cannot be {_word(role)}")
        self.values[node] = _Value(whole, parts, role)

    # --- calls ------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> None:
        if node.op == "call_function" and node.target in COLLECTIVES:
            self.values[node] = self._collective(node)
            return
        if node.op == "call_function" and node.target is operator.getitem:
            self.values[node] = self._item(node)
            return
        function = _function_of(node)
        whole = OperatorCall(function, *self._given(node, lambda value: value.whole))
        recipe: Recipe | None = None
        role: Any = None
        if self.stopped is None:
            try:
                recipe, role = self._rule(node, whole)
            except _Stopped as stop:
                self.stopped = (node.name, str(stop))
        if function is None:
            raise UsageError(f"{node.name}: {node.op} {node.target} is not a function of tensors")
        self._refuse_effects(node, whole)
        numbers = _numbers(whole, recipe, self.ranks)
        parts = []
        for rank in range(self.ranks):
            args, kwargs = self._given(node, _on_rank(rank))
            args = tuple(numbers[rank].get(at, one) for at, one in enumerate(args))
            kwargs = {name: numbers[rank].get(name, one) for name, one in kwargs.items()}
            parts.append(_run(function, args, kwargs))
        self.values[node] = _Value(function(*whole.args, **whole.kwargs), parts, role)

    def _refuse_effects(self, node: fx.Node, call: OperatorCall) -> None:
        """Stop at what is not a function of its arguments."""
        given = [one for value in (*call.args, *call.kwargs.values()) for one in tensors_in(value)]
        before = [tensor.clone() for tensor in given]
        first, second = (call.function(*call.args, **call.kwargs) for _ in range(2))
        if not _all_equal(before, given):
            raise UsageError(f"{node.name}: {_name(call)} writes to its argument")
        if not _all_equal(tensors_in(first), tensors_in(second)) and not self.drawn:
            self.drawn = True
            self.stopped = (node.name, f"{_name(call)} draws random numbers")

    def _given(
        self, node: fx.Node, part: Callable[[_Value], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = fx.node.map_arg((node.args, node.kwargs), lambda one: part(self.values[one]))
        return tuple(given[0]), dict(given[1])

    def _rule(self, node: fx.Node, call: OperatorCall) -> tuple[Recipe | None, Any]:
        """A proved rule for the placements of the arguments, and the placement of the result."""
        roles = dict(self._roles_of(node))
        if any(role is None for role in roles.values()):
            raise _Stopped("the placement of an argument is unknown")
        entry: dict[str, Any] = {
            "value": node.name,
            "arguments": {str(place): self._names(node, place) for place in roles},
        }
        if all(role == Replicate() for role in roles.values()):
            self.calls.append({**entry, "same on all ranks": True, "placements": ["replicate"]})
            return None, Replicate()
        annotation = annotation_for(call.function, call.args, call.kwargs)
        if annotation is None:
            raise _Stopped(f"no rule is known for {_name(call)}")
        reasons = []
        for option in annotation.options(call):
            asked = dataclasses.replace(option, num=self.ranks)
            recipe = annotation.recipe(call, asked)
            if any(_plain(recipe.placement(place)) != role for place, role in roles.items()):
                continue
            proof = Prover(call, annotation, self.ranks).decide(option)
            if proof.status != "proved" or proof.certificate is None:
                reasons.append(proof.words)
                continue
            results = [_plain(role) for role in recipe.outputs]
            words = list(map(_word, results))
            self.calls.append({**entry, "certificate": proof.certificate, "placements": words})
            return recipe, results[0] if len(results) == 1 else tuple(results)
        shown = ", ".join(
            f"{self._names(node, place)[0]} is {_word(role)}" for place, role in roles.items()
        )
        hint = "".join(
            f"; an all_reduce of {self._names(node, place)[0]} is missing before it"
            for place, role in roles.items()
            if isinstance(role, Partial)
        )
        raise _Stopped(reasons[0] if reasons else f"no rule of {_name(call)} fits: {shown}{hint}")

    def _roles_of(self, node: fx.Node) -> Iterator[tuple[int | str, Role | None]]:
        """Place -> placement of each argument that has tensors."""
        given_by_place: dict[Any, Any] = {**dict(enumerate(node.args)), **node.kwargs}
        for place, given in given_by_place.items():
            found = {self.values[one].role for one in _nodes_in(given) if self._has_tensors(one)}
            if found:
                yield place, next(iter(found)) if len(found) == 1 else None

    def _has_tensors(self, node: fx.Node) -> bool:
        return bool(tensors_in(self.values[node].whole))

    def _names(self, node: fx.Node, place: int | str) -> list[str]:
        given = node.args[place] if isinstance(place, int) else node.kwargs[place]
        return [one.name for one in _nodes_in(given)]

    def _item(self, node: fx.Node) -> _Value:
        source: Any = node.args[0]
        at: Any = node.args[1]
        value = self.values[source]
        role: Any = value.role
        one = role[at] if isinstance(role, tuple) else role
        self.calls.append(
            {"value": node.name, "item": [source.name, at], "placements": [_word(one)]}
        )
        return _Value(value.whole[at], [part[at] for part in value.parts], one)

    def _collective(self, node: fx.Node) -> _Value:
        source: Any = node.args[0]
        value = self.values[source]
        dim: Any = node.args[1] if len(node.args) > 1 else None
        kind: Any = node.target
        if dim is not None and value.whole.dim():
            dim %= value.whole.dim()
        role = None if value.role is None else _after(kind, value.role, dim)
        if role is None and self.stopped is None:
            reason = f"{kind.__name__} of {source.name}, which is {_word(value.role)}"
            if kind is all_reduce and value.role == Replicate():
                reason += ": it is reduced once too often"
            self.stopped = (node.name, reason)
        entry = {"value": node.name, "collective": kind.__name__, "of": source.name, "dim": dim}
        self.calls.append({**entry, "placements": [_word(role)]})
        return _Value(value.whole, _combine(kind, value.parts, dim), role)


def _on_rank(rank: int) -> Callable[[_Value], Any]:
    return lambda value: value.parts[rank]


def _all_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs)


def _nodes_in(given: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(given, found.append)
    return found


def _function_of(node: fx.Node) -> Any:
    if node.op == "call_function":
        target: Any = node.target
        return _FUNCTIONS.get(target, target)
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), None)
    return None


def _name(call: OperatorCall) -> str:
    return call.name or getattr(call.function, "__name__", str(call.function))


def _missing(role: Role | None, wanted: Role) -> str:
    if isinstance(role, Partial) and wanted == Replicate():
        return ": an all_reduce is missing"
    return ""


# --- The same program on all ranks at once --------------------------------------------------------

_ROUNDING = 1e-9


def _parts_of(whole: Tensor, role: Role, ranks: int) -> list[Tensor] | None:
    """The part of each rank; None if it cannot be split so."""
    match role:
        case Shard(dim=dim) if dim < whole.dim() and whole.shape[dim] % ranks == 0:
            return list(whole.chunk(ranks, dim))
        case Replicate():
            return [whole] * ranks
        case Once():
            return [whole if rank == 0 else torch.zeros_like(whole) for rank in range(ranks)]
        case Partial(reduction="sum"):
            terms = [whole * (rank + 2) for rank in range(ranks - 1)]
            return [*terms, whole - sum(terms)]
    return None


def _combine(kind: Callable[..., Any], parts: list[Any], dim: int | None) -> list[Any]:
    ranks = len(parts)
    try:
        if kind is all_gather:
            return [torch.cat(parts, dim or 0)] * ranks
        total = parts[0] if kind is keep_slice else sum(parts[1:], parts[0])
        if kind is all_reduce:
            return [total] * ranks
        slices = list(total.chunk(ranks, dim or 0))
        return slices if len(slices) == ranks else parts
    except (RuntimeError, TypeError):  # parts that do not fit together: nothing is computed
        return [None] * ranks


def _numbers(call: OperatorCall, recipe: Recipe | None, ranks: int) -> list[dict[Any, Any]]:
    """Place -> the value on each rank, for arguments that change with the split."""
    if recipe is None or not recipe.numbers:
        return [{} for _ in range(ranks)]
    values: dict[Any, Any] = {**dict(enumerate(call.args)), **call.kwargs}
    places = {place for place, _ in recipe.numbers}
    each = split_values(values, recipe, ranks, Terms(0, lifted=True))
    return [{place: value for place, value in one.items() if place in places} for one in each]


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError):  # a wrong plan may not even run
        return None


def _distance(value: _Value, role: Role) -> float:
    """How far the ranks' result is off, relative to the largest value."""
    whole, parts = value.whole, value.parts
    if any(not isinstance(part, torch.Tensor) for part in parts):
        return float("inf")
    match role:
        case Shard(dim=dim):
            together = [torch.cat(parts, dim)] if dim < whole.dim() else parts
        case Partial():
            together = [sum(parts[1:], parts[0])]
        case _:
            together = parts
    if any(one.shape != whole.shape for one in together):
        return float("inf")
    largest = max(float(whole.abs().max()) if whole.numel() else 0.0, 1e-300)
    return max((float((one - whole).abs().max()) / largest for one in together), default=0.0)
