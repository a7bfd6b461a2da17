"""Proofs of graphs: calls whose rules are proved, put together by the placements between them.

A program with its collectives written out (`all_reduce`, `all_gather`, `reduce_scatter`,
`keep_slice`) is both the program on one device, where these return their argument, and the program
of a rank. If each call has a proved rule for the placements of its arguments, then by induction
every value of the graph is what its placement says, for all shapes and numbers of ranks that divide
what is split. Equal functions have equal gradients, so the proof also holds for backward, where the
gradients of replicated inputs are summed over the ranks.

A rule that is proved for parts of any size holds for parts of one element, so the operator treats
all elements along that dimension alike. Such a rule also holds for packed shards, of which each
rank has a part of each of several pieces.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, fx

from paritas.core.errors import UsageError
from paritas.core.operators.calls import OperatorCall
from paritas.core.operators.catalogue import define
from paritas.core.operators.terms import OutsideTheoryError
from paritas.core.results.items import Once, Partial, Replicate, Role, Shard, read_role, role_word
from paritas.core.torch_private.operators import tensors_in
from paritas.sharding.operators import nnscaler_functions
from paritas.sharding.operators.library import annotation_of_call
from paritas.sharding.proofs.certificates import GRAPH_VERSION, describe_tensor
from paritas.sharding.proofs.claims import placed_claim
from paritas.sharding.proofs.prove import Prover, prove_claim
from paritas.sharding.proofs.validation import (
    combine_parts,
    distance,
    layout_of,
    lift_call,
    numbers_by_layout,
    parts_of,
    run_part,
    validate,
)
from paritas.sharding.rows import GraphProof, ProofStatus, RuleProof

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paritas.core.placement.placement import Recipe
    from paritas.sharding.operators.annotation import Annotation, Option
    from paritas.sharding.proofs.splits import RoleWords

# --- Collectives, as a program writes them --------------------------------------------------------


def all_reduce(x: Any, reduction: str = "sum") -> Any:
    """The sum (max, min) of the ranks' terms, on every rank; on one device, the value itself."""
    return _collective(all_reduce, x, reduction)


def all_gather(x: Any, dim: int) -> Any:
    """The ranks' parts along a dimension, joined on every rank; on one device, the value itself."""
    return _collective(all_gather, x, dim)


def reduce_scatter(x: Any, dim: int) -> Any:
    """A rank's part of the sum of all terms; on one device, the value itself."""
    return _collective(reduce_scatter, x, dim)


def keep_slice(x: Any, dim: int) -> Any:
    """A rank's part of what every rank has; on one device, the value itself."""
    return _collective(keep_slice, x, dim)


def _collective(kind: Callable[..., Any], x: Any, dim_or_reduction: Any) -> Any:
    if isinstance(x, fx.Proxy):
        return x.tracer.create_proxy("call_function", kind, (x, dim_or_reduction), {})
    return x


COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "keep_slice": keep_slice,
}


def _after(kind: str, before: Role, dim_or_reduction: Any) -> Role | None:
    """The placement after a collective; None if it does not fit the one before."""
    if kind == "all_reduce":
        unchanged = before == Replicate() and dim_or_reduction in {
            "max",
            "min",
        }  # of what all ranks have
        return Replicate() if before == Partial(dim_or_reduction) or unchanged else None
    if kind == "all_gather":
        return Replicate() if before == Shard(dim_or_reduction) else None
    fits = Partial("sum") if kind == "reduce_scatter" else Replicate()
    return Shard(dim_or_reduction) if before == fits else None


# --- A program as data ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ref:
    """A value of the program, by its name, in place of an argument."""

    name: str


@dataclasses.dataclass(frozen=True)
class GraphStep:
    """One call.

    Attributes:
        name: of what it returns.
        function: None if it cannot be called, and `obstacle` says why.
        args: with a `Ref` in place of each value.
        operator: the name under which rules are known; by default the function's.
        results: the names of the tensors, if it returns several.
    """

    name: str
    function: Callable[..., Any] | None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    operator: str = ""
    results: tuple[str, ...] = ()
    obstacle: str = ""


@dataclasses.dataclass(frozen=True)
class GraphProgram:
    """Steps in order, and the names of the results."""

    steps: tuple[GraphStep, ...]
    outputs: tuple[str, ...]


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
        placements: input -> `shard(0)`, `replicate`, `partial(sum)`, `once` for what only the first
            rank has while the others have zeros, or `_S(0, 3)` for 3 pieces that are each split; by
            default replicated.
        outputs: what the results should be.
        ranks: of the numerical check, which a proof must pass too.

    Raises:
        UsageError: the function cannot be traced, or a placement is unknown.
    """
    try:
        graph = fx.symbolic_trace(function).graph
    except Exception as error:
        raise UsageError(f"torch.fx cannot trace the function: {error!s:.200}") from error
    output_placements = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    return decide_program(
        _traced_program(graph), inputs, placements, output_placements, ranks=ranks
    )


def decide_program(
    program: GraphProgram,
    inputs: Mapping[str, Tensor],
    placements: Mapping[str, str],
    outputs: Sequence[str],
    *,
    ranks: int = 2,
    shown: Sequence[str] | None = None,
) -> GraphProof:
    """Decide whether a program computes the same on ranks as on one device.

    Args:
        shown: the inputs whose shapes a counterexample shows; by default all.
    """
    unknown = set(placements) - set(inputs)
    if unknown:
        raise UsageError(f"placements of unknown inputs: {', '.join(sorted(unknown))}")
    if len(outputs) != len(program.outputs):
        raise UsageError(f"the program has {len(program.outputs)} results, not {len(outputs)}")
    roles = {name: _read(placements.get(name, "replicate")) for name in inputs}
    run = _Decision(dict(inputs), roles, ranks)
    with torch.no_grad():
        for step in program.steps:
            run.follow(step)
        proof = run.proof(program.outputs, tuple(map(_read, outputs)))
    shown_shapes = proof.shapes if shown is None else {n: proof.shapes[n] for n in shown}
    return msgspec.structs.replace(proof, shapes=shown_shapes)


def _traced_program(graph: fx.Graph) -> GraphProgram:
    steps: list[GraphStep] = []
    outputs: tuple[str, ...] = ()
    for node in graph.nodes:
        args, kwargs = _with_refs(node)
        if node.op == "output":
            outputs = tuple(ref.name for ref in _refs(args))
        elif node.op == "call_function":
            target: Any = node.target
            steps.append(GraphStep(node.name, _FUNCTIONS.get(target, target), args, kwargs))
        elif node.op == "call_method":
            method = getattr(torch.Tensor, str(node.target), None)
            steps.append(GraphStep(node.name, method, args, kwargs))
        elif node.op != "placeholder":
            raise UsageError(f"{node.name}: {node.op} {node.target} is not a function of tensors")
    return GraphProgram(tuple(steps), outputs)


def _with_refs(node: fx.Node) -> tuple[Any, Any]:
    def item(argument: Any) -> Any:
        return Ref(argument.name) if isinstance(argument, fx.Node) else argument

    args: Any = fx.node.map_aggregate(node.args, item)
    kwargs: Any = fx.node.map_aggregate(dict(node.kwargs), item)
    return args, kwargs


_FUNCTIONS = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.div,
    operator.matmul: torch.matmul,
    operator.neg: torch.neg,
    operator.pow: torch.pow,
}


def subscript(args: tuple[Any, ...]) -> tuple[Callable[..., Any], str, tuple[Any, ...]]:
    """`x[a, b]` as the function that rules are about, its name, and its arguments."""
    spread = nnscaler_functions.as_fullslice(args)
    return nnscaler_functions.fullslice, nnscaler_functions.SUBSCRIPT, spread


def _refs(tree: Any) -> list[Ref]:
    refs: list[Ref] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            refs.append(leaf)
        return leaf

    fx.node.map_aggregate(tree, note)
    return refs


def _read(word: str) -> Role:
    role: Role | None = Once() if word == "once" else read_role(word)
    if role is None:
        raise UsageError(
            f"unknown placement {word!r}: use shard(0), replicate, partial(sum), once, or _S(0, 3) "
            "for 3 pieces that are each split"
        )
    return _plain(role)


def _plain(role: Role) -> Role:
    """A role without what does not matter for equal parts."""
    match role:
        case Shard(dim=dim, pieces=pieces, order="natural", halo=(0, 0)):
            return Shard(dim, pieces=pieces)
        case Replicate():
            return Replicate()
        case _:
            return role


def _word(role: Role | None) -> str:
    return "unknown" if role is None else "once" if role == Once() else role_word(role)


# --- The decision ---------------------------------------------------------------------------------

_ROUNDING = 1e-9
# Calls that cut a tensor into pieces along a dimension.
_CUTS = {"chunk", "split", "split_with_sizes", "unsafe_chunk", "unsafe_split"}
_PACKED_HINT = "; if each piece is to be split, it must be packed, as in _S(0, 3)"


@dataclasses.dataclass
class _Value:
    """A value: on one device, on each rank, and its placement if it is known.

    `constant` if it does not depend on inputs: its sizes are those of one device.
    """

    whole: Any
    parts: list[Any]
    role: Any
    constant: bool = False


class _Stopped(Exception):  # noqa: N818  (the proof ends here)
    pass


class _Decision:
    """Follows a program on one device, on all ranks, and by placements, all at once."""

    def __init__(self, inputs: dict[str, Tensor], roles: dict[str, Role], ranks: int) -> None:
        self.inputs = {
            name: value.double() if value.is_floating_point() else value
            for name, value in inputs.items()
        }
        self.roles, self.ranks = roles, ranks
        self.values: dict[str, _Value] = {}
        self.calls: list[dict[str, Any]] = []
        self.stopped: tuple[str, str] | None = None
        self.comparable = True  # whether the ranks' numbers mean anything
        self.proofs: dict[Any, RuleProof] = {}
        for name, whole_tensor in self.inputs.items():
            parts = parts_of(whole_tensor, roles[name], ranks)
            if parts is None:
                shape = list(whole_tensor.shape)
                raise UsageError(f"{name} of shape {shape} cannot be {_word(roles[name])}")
            self.values[name] = _Value(whole_tensor, parts, roles[name])

    def proof(self, names: Sequence[str], roles: Sequence[Role]) -> GraphProof:
        """The result, from the placements and the numbers of the results."""
        results = [self._get(name) for name in names]
        for number, (value, role) in enumerate(zip(results, roles, strict=True)):
            if self.stopped is None and value.role != role:
                what = f"result {number} is {_word(value.role)}, not {_word(role)}"
                self.stopped = ("output", f"{what}{_missing(value.role, role)}")
        off = max(
            (
                distance(result_value.whole, result_value.parts, role)
                for result_value, role in zip(results, roles, strict=True)
            ),
            default=0.0,
        )
        node, reason = self.stopped or ("", "")
        graph_proof = GraphProof(
            status="not decided",
            node=node,
            reason=reason,
            placements={
                name: _word(value.role)
                for name, value in self.values.items()
                if not isinstance(value.role, tuple)
            },
            shapes={name: tuple(value.shape) for name, value in self.inputs.items()},
            ranks=self.ranks,
        )
        wrong = not off <= _ROUNDING and self.comparable
        if self.stopped is not None:
            status: ProofStatus = "refuted" if wrong else "not decided"
            return msgspec.structs.replace(
                graph_proof, status=status, off_by=off if wrong else None
            )
        if wrong:
            reason = f"proved, but the ranks are off by {off:.2g}; please report this"
            return msgspec.structs.replace(graph_proof, reason=reason)
        certificate = {
            "paritas graph certificate": GRAPH_VERSION,
            "inputs": {
                name: {"placement": _word(role), **describe_tensor(self.inputs[name])}
                for name, role in self.roles.items()
            },
            "calls": self.calls,
            "outputs": [
                {"value": name, "placement": _word(role)}
                for name, role in zip(names, roles, strict=True)
            ],
        }
        assumes = tuple(
            dict.fromkeys(
                words
                for call in self.calls
                for words in call.get("certificate", {}).get("assumes", ())
            )
        )
        return msgspec.structs.replace(
            graph_proof, status="proved", assumes=assumes, certificate=certificate
        )

    def _get(self, name: str) -> _Value:
        if name not in self.values:
            raise UsageError(f"input {name!r} is missing")
        return self.values[name]

    def _stop(self, node: str, reason: str, *, comparable: bool = True) -> None:
        if self.stopped is None:
            self.stopped = (node, reason)
        self.comparable = self.comparable and comparable

    # --- calls ------------------------------------------------------------------------------------

    def follow(self, step: GraphStep) -> None:
        """Run one step everywhere."""
        if step.function in COLLECTIVES.values():
            self.values[step.name] = self._collective(step)
            return
        source = step.args[0] if step.args else None
        first = self._get(source.name) if isinstance(source, Ref) else None
        if step.function is operator.getitem and first is not None:
            if not isinstance(first.whole, torch.Tensor):
                self.values[step.name] = self._item(step, step.args[0].name, step.args[1])
                return
            function, name, args = subscript(step.args)
            step = dataclasses.replace(step, function=function, args=args, operator=name)
        value = self._call(step)
        self.values[step.name] = value
        if step.results:
            self._name_results(step, value)

    def _name_results(self, step: GraphStep, value: _Value) -> None:
        if isinstance(value.whole, torch.Tensor):
            if step.results != (step.name,):
                self.values[step.results[0]] = value
                words = [_word(value.role)]
                entry = {"value": step.results[0], "same as": step.name, "placements": words}
                self.calls.append(entry)
            return
        for at, name in enumerate(step.results):
            self.values[name] = self._item(step, step.name, at, name)

    def _item(self, step: GraphStep, source: str, at: Any, name: str = "") -> _Value:
        value = self.values[source]
        role = value.role[at] if isinstance(value.role, tuple) else value.role
        entry = {"value": name or step.name, "item": [source, at], "placements": [_word(role)]}
        self.calls.append(entry)
        parts = [run_part(operator.getitem, (part, at), {}) for part in value.parts]
        whole_item = None if value.whole is None else value.whole[at]
        return _Value(whole_item, parts, role, value.constant)

    def _call(self, step: GraphStep) -> _Value:
        argument_values = [self._get(ref.name) for ref in _refs((step.args, step.kwargs))]
        constant = all(argument_value.constant for argument_value in argument_values)
        if step.function is None or any(
            argument_value.whole is None for argument_value in argument_values
        ):
            self._stop(step.name, step.obstacle or "it cannot be run", comparable=False)
            return _Value(None, [None] * self.ranks, None)
        args, kwargs = self._with_values(step, lambda value: value.whole)
        call = OperatorCall(step.function, args, kwargs, step.operator)
        whole_result = self._run_whole(step, call)
        annotation = _annotation(call)
        role: Any = None
        if self.stopped is None:
            try:
                role = self._place_result(step, call, annotation, whole_result)
            except _Stopped as stop:
                self._stop(step.name, str(stop))
        if whole_result is None:
            return _Value(None, [None] * self.ranks, None)
        return _Value(
            whole_result, self._on_ranks(step, call, annotation, whole_result), role, constant
        )

    def _run_whole(self, step: GraphStep, call: OperatorCall) -> Any:
        """The result on one device; stops at what is not a function of its arguments."""
        tensors = [
            tensor for value in (*call.args, *call.kwargs.values()) for tensor in tensors_in(value)
        ]
        before = [tensor.clone() for tensor in tensors]
        try:
            first, second = (call.function(*call.args, **call.kwargs) for _ in range(2))
        except Exception as error:  # noqa: BLE001  (the proof ends here, and says so)
            self._stop(step.name, f"{_name(call)} raises: {error!s:.200}", comparable=False)
            return None
        if not _all_equal(before, tensors):
            self._stop(step.name, f"{_name(call)} writes to its argument", comparable=False)
        elif not _all_equal(tensors_in(first), tensors_in(second)):
            self._stop(step.name, f"{_name(call)} draws random numbers", comparable=False)
        return first

    def _on_ranks(
        self, step: GraphStep, call: OperatorCall, annotation: Annotation | None, whole_result: Any
    ) -> list[Any]:
        """The result of each rank, which has its own parts and the lengths of these parts."""
        pieces = self._pieces(step, whole_result)
        if pieces is not None:
            source = self.values[step.args[0].name]
            dim, count = pieces
            return [None if part is None else part.chunk(count, dim) for part in source.parts]
        places = {argument_place: tree for argument_place, tree in _places(step) if _refs(tree)}
        layouts = {
            argument_place: {layout_of(self.values[ref.name]) for ref in _refs(tree)}
            for argument_place, tree in places.items()
        }
        numbers = numbers_by_layout(call, annotation, layouts, self.ranks)
        parts = []
        for rank in range(self.ranks):
            args, kwargs = self._with_values(step, _on_rank(rank))
            args = tuple(numbers[rank].get(at, argument) for at, argument in enumerate(args))
            kwargs = {name: numbers[rank].get(name, argument) for name, argument in kwargs.items()}
            parts.append(run_part(call.function, args, kwargs))
        if any(part is None for part in parts):
            self._explain_failure(step, annotation)
        return parts

    def _explain_failure(self, step: GraphStep, annotation: Annotation | None) -> None:
        """A rank that cannot run it shows a fault only if its arguments are surely its own."""
        argument_values = [self.values[ref.name] for ref in _refs((step.args, step.kwargs))]
        lost = any(
            part is None for argument_value in argument_values for part in argument_value.parts
        )
        sizes = annotation is None or bool(annotation.signature.numbers)
        if not lost and (
            sizes or any(argument_value.constant for argument_value in argument_values)
        ):
            reason = "it cannot be run on ranks: its lengths are those of one device"
            self._stop(step.name, reason, comparable=False)

    def _with_values(
        self, step: GraphStep, part: Callable[[_Value], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def item(argument: Any) -> Any:
            return part(self.values[argument.name]) if isinstance(argument, Ref) else argument

        args = fx.node.map_aggregate(step.args, item)
        return tuple(args), dict(fx.node.map_aggregate(dict(step.kwargs), item))

    # --- placements -------------------------------------------------------------------------------

    def _place_result(
        self, step: GraphStep, call: OperatorCall, annotation: Annotation | None, whole_result: Any
    ) -> Any:
        """The placement of the result, by a proved rule for those of the arguments."""
        names = {
            argument_place: [ref.name for ref in _refs(tree)]
            for argument_place, tree in _places(step)
        }
        names = {
            argument_place: value_names
            for argument_place, value_names in names.items()
            if any(tensors_in(self.values[name].whole) for name in value_names)
        }
        roles = {
            argument_place: {self.values[name].role for name in value_names}
            for argument_place, value_names in names.items()
        }
        entry: dict[str, Any] = {
            "value": step.name,
            "arguments": {
                str(argument_place): value_names for argument_place, value_names in names.items()
            },
        }
        if any(None in role for role in roles.values()):
            raise _Stopped("the placement of an argument is unknown")
        if all(role == {Replicate()} for role in roles.values()):
            results = [describe_tensor(tensor) for tensor in tensors_in(whole_result)]
            self.calls.append({**entry, "same on all ranks": results, "placements": ["replicate"]})
            return Replicate()
        pieces = self._pieces(step, whole_result)
        if pieces is not None:
            dim, count = pieces
            words = [_word(Shard(dim))] * count
            self.calls.append(
                {
                    "value": step.name,
                    "pieces": count,
                    "of": step.args[0].name,
                    "dim": dim,
                    "placements": words,
                }
            )
            return (Shard(dim),) * count
        if annotation is None:
            raise _Stopped(f"no rule is known for {_name(call)}")
        shown = ", ".join(
            f"{names[argument_place][0]} is {' or '.join(sorted(map(_word, place_roles)))}"
            for argument_place, place_roles in roles.items()
        )
        if any(len(role) > 1 for role in roles.values()):
            raise _Stopped(f"no rule of {_name(call)} fits: {shown}")
        one_role = {
            argument_place: next(iter(place_roles)) for argument_place, place_roles in roles.items()
        }
        return self._by_rule(call, annotation, one_role, entry, names, shown)

    def _pieces(self, step: GraphStep, whole_result: Any) -> tuple[int, int] | None:
        """The dimension and number of pieces, if a packed shard is cut into them."""
        source = step.args[0] if step.args else None
        function: Any = step.function
        word = (step.operator or getattr(function, "__name__", "")).split(".")
        if not isinstance(source, Ref) or not _CUTS & set(word):
            return None
        role, shapes = (
            self.values[source.name].role,
            {tensor.shape for tensor in tensors_in(whole_result)},
        )
        if (
            not isinstance(role, Shard)
            or role.pieces == 1
            or isinstance(whole_result, torch.Tensor)
        ):
            return None
        count, size = len(whole_result), self.values[source.name].whole.shape[role.dim]
        along = {shape[role.dim] * count for shape in shapes}
        return (role.dim, count) if count == role.pieces and along == {size} else None

    def _by_rule(
        self,
        call: OperatorCall,
        annotation: Annotation,
        roles: Mapping[int | str, Role],
        entry: dict[str, Any],
        names: Mapping[int | str, list[str]],
        shown: str,
    ) -> Any:
        pieces = {role.pieces for role in roles.values() if isinstance(role, Shard)}
        packed = max(pieces, default=1)
        plain = {
            argument_place: Shard(role.dim) if isinstance(role, Shard) else role
            for argument_place, role in roles.items()
        }
        reasons = []
        for option in annotation.options(call) if len(pieces) <= 1 else ():
            try:
                recipe = annotation.recipe(call, dataclasses.replace(option, num=self.ranks))
            except UsageError:  # a length that cannot be divided
                continue
            if any(
                _plain(recipe.placement(argument_place)) != role
                for argument_place, role in plain.items()
            ):
                continue
            proof = self._prove_option(call, annotation, option)
            if proof.status != "proved" or proof.certificate is None:
                reasons.append(proof.words)
                continue
            if packed > 1 and not _holds_for_pieces(recipe, proof):
                continue
            results = [_pack_role(_plain(role), packed) for role in recipe.outputs]
            words = list(map(_word, results))
            self.calls.append({**entry, "certificate": proof.certificate, "placements": words})
            return results[0] if len(results) == 1 else tuple(results)
        linear = self._by_linearity(call, roles, entry)
        if linear is not None:
            return linear
        hint = "" if not _CUTS & set(_name(call).split(".")) else _PACKED_HINT
        hint += "".join(
            f"; an all_reduce of {names[argument_place][0]} is missing before it"
            for argument_place, role in roles.items()
            if isinstance(role, Partial)
        )
        raise _Stopped(reasons[0] if reasons else f"no rule of {_name(call)} fits: {shown}{hint}")

    def _by_linearity(
        self, call: OperatorCall, roles: Mapping[int | str, Role], entry: dict[str, Any]
    ) -> Any:
        """Terms of a sum that stay terms: a row-parallel result that is scaled or transposed."""
        terms = Partial("sum")
        if terms not in roles.values() or set(roles.values()) - {terms, Replicate()}:
            return None
        try:
            definition = define(lift_call(call))
            validate(definition)
            words: dict[str, RoleWords] = {
                name: ("partial", "sum")
                if roles[int(argument_place) if argument_place.isdigit() else argument_place]
                == terms
                else ("replicate",)
                for name in definition.tensors
                for argument_place in [name.partition("[")[0]]
            }
        except OutsideTheoryError:
            return None
        results: list[RoleWords] = [("partial", "sum")] * len(definition.outputs)
        undecided = RuleProof(operator=_name(call), rule="", split_by="", status="not decided")
        proof = prove_claim(undecided, definition, lambda: placed_claim(definition, words, results))
        if proof.status != "proved":
            return None
        placements = [_word(terms)] * len(results)
        self.calls.append({**entry, "certificate": proof.certificate, "placements": placements})
        return terms if len(results) == 1 else (terms,) * len(results)

    def _prove_option(
        self, call: OperatorCall, annotation: Annotation, option: Option
    ) -> RuleProof:
        """The proof of an option; layers that are alike share it, unless values count."""
        described = repr(fx.node.map_aggregate((call.args, call.kwargs), _describe_value))
        key = (_name(call), described, annotation.text, option)
        if key in self.proofs:
            return self.proofs[key]
        proof = Prover(call, annotation, self.ranks).decide(option)
        if not proof.assumes:
            self.proofs[key] = proof
        return proof

    def _collective(self, step: GraphStep) -> _Value:
        source = step.args[0].name
        value = self._get(source)
        function: Any = step.function
        kind, dim_or_reduction = function.__name__, step.args[1]
        if kind != "all_reduce" and isinstance(value.whole, torch.Tensor) and value.whole.dim():
            dim_or_reduction %= value.whole.dim()
        role = None if value.role is None else _after(kind, value.role, dim_or_reduction)
        if role is None:
            reason = f"{kind} of {source}, which is {_word(value.role)}"
            if kind == "all_reduce" and value.role == Replicate():
                reason += ": it is reduced once too often"
            self._stop(step.name, reason)
        entry = {"value": step.name, "collective": kind, "of": source, "with": dim_or_reduction}
        self.calls.append({**entry, "placements": [_word(role)]})
        return _Value(value.whole, combine_parts(kind, value.parts, dim_or_reduction), role)


def _on_rank(rank: int) -> Callable[[_Value], Any]:
    return lambda value: value.parts[rank]


def _annotation(call: OperatorCall) -> Annotation | None:
    try:
        return annotation_of_call(call)
    except UsageError:  # a rule that does not fit the call
        return None


def _pack_role(role: Role, pieces: int) -> Role:
    return Shard(role.dim, pieces=pieces) if isinstance(role, Shard) else role


def _holds_for_pieces(recipe: Recipe, proof: RuleProof) -> bool:
    """Whether the rule treats all elements along the split dimension alike."""
    certificate = proof.certificate or {}
    shards = [role for _, role in recipe.inputs if isinstance(role, Shard)]
    return (
        proof.parts == "any"
        and not recipe.numbers
        and all(role.unit == 1 for role in shards)
        and not any(isinstance(role, Once) for _, role in recipe.inputs)
        and not any(name.startswith("draw ") for name in certificate["tensors"])
    )


def _describe_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype))
    return value


def _places(step: GraphStep) -> Iterator[tuple[int | str, Any]]:
    yield from enumerate(step.args)
    yield from step.kwargs.items()


def _all_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(tensor.nan_to_num(), other.nan_to_num()) for tensor, other in pairs)


def _name(call: OperatorCall) -> str:
    return call.name or getattr(call.function, "__name__", str(call.function))


def _missing(role: Role | None, expected_role: Role) -> str:
    if isinstance(role, Partial) and expected_role == Replicate():
        return ": an all_reduce is missing"
    return ""
