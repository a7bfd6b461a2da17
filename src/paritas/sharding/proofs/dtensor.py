"""Decide what DTensor claims about an operator."""

from __future__ import annotations

import dataclasses
import operator
import re
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import fx

from paritas.core.operators.catalogue import Definition, define, tensors_by_name
from paritas.core.operators.terms import OutsideTheoryError
from paritas.core.placement.placement import OperatorCall
from paritas.sharding.plans.dtensor import DTensorClaim, argument_tensors, examine_dtensor
from paritas.sharding.proofs.certificates import certificate_of
from paritas.sharding.proofs.claims import placed_claim
from paritas.sharding.proofs.graphs import subscript
from paritas.sharding.proofs.splits import Claim, Failure, RoleWords, find_proof
from paritas.sharding.proofs.validation import lifted, validate
from paritas.sharding.rows import Counterexample, RuleProof

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterator, Mapping

_SHARD = re.compile(r"S\((\d+)\)")
_PARTIAL = re.compile(r"P\((sum|avg|max|min)\)")


def prove_dtensor(
    op: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    ranks: int = 2,
    seed: int = 0,
    within: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
) -> Iterator[RuleProof]:
    """Decide every claim of DTensor about an operator on these arguments.

    A claim that the numerical check finds wrong is refuted. Of the others, the value is proved for
    all shapes and numbers of ranks where it can be. DTensor differentiates in its own way, so its
    gradients are checked on these shapes, but not proved.

    Args:
        op: the operator, or a function of tensors that calls one.
        name: the operator's name, if the function does not know it.
        within: makes a context for forward and backward, such as `loss_parallel`.
    """
    known = _defined(op, tuple(args), dict(kwargs or {}), name)
    for claim in examine_dtensor(op, args, kwargs, ranks=ranks, seed=seed, within=within):
        if claim.verdict is not None:
            yield _decided(known, claim, ranks, seed)


# --- The definition of what is called -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Defined:
    """The call as index algebra, if the theory has it.

    Attributes:
        places: for each tensor of the definition, its number among the arguments.
        outside: what the theory does not have.
    """

    name: str
    call: OperatorCall
    definition: Definition | None = None
    places: tuple[int, ...] = ()
    outside: str = ""


def _defined(
    op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> _Defined:
    call = lifted(OperatorCall(op, args, kwargs, name))
    known = _Defined(name or getattr(op, "__name__", ""), call)
    given = list(argument_tensors(call.args, call.kwargs).values())
    inner = call if name else _called(call) or call
    try:
        definition = define(inner)
        validate(definition)
    except OutsideTheoryError as error:
        return dataclasses.replace(known, outside=str(error))
    found = [_number(tensor, given) for tensor in definition.tensors.values()]
    places = tuple(place for place in found if place is not None)
    if len(places) != len(found):
        return dataclasses.replace(known, outside="a tensor that is not an argument")
    return dataclasses.replace(known, definition=definition, places=places)


def _number(tensor: Any, given: list[Any]) -> int | None:
    return next((at for at, one in enumerate(given) if one is tensor), None)


def _called(call: OperatorCall) -> OperatorCall | None:
    """The one operator that a function of tensors calls; None if it calls others too."""
    if call.kwargs or not all(isinstance(one, torch.Tensor) for one in call.args):
        return None
    try:
        graph = fx.symbolic_trace(call.function).graph
    except Exception:  # noqa: BLE001  (a function that cannot be traced is taken as it is)
        return None
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    calls = [node for node in graph.nodes if node.op not in {"placeholder", "output"}]
    (output,) = graph.find_nodes(op="output")
    if len(calls) != 1 or output.args != (calls[0],) or len(inputs) != len(call.args):
        return None
    values = dict(zip(inputs, call.args, strict=True))

    def item(one: Any) -> Any:
        return values[one] if isinstance(one, fx.Node) else one

    target: Any = calls[0].target
    function = getattr(torch.Tensor, target) if calls[0].op == "call_method" else target
    args: Any = fx.node.map_aggregate(calls[0].args, item)
    kwargs: Any = fx.node.map_aggregate(dict(calls[0].kwargs), item)
    if function is operator.getitem:
        function, name, args = subscript(args)
        return OperatorCall(function, args, {}, name)
    return OperatorCall(function, tuple(map(_plain, args)), dict(kwargs))


def _plain(value: Any) -> Any:
    """A list of torch.fx as an ordinary one."""
    return list(value) if isinstance(value, list) else value


# --- The decision ---------------------------------------------------------------------------------


def _decided(known: _Defined, claim: DTensorClaim, ranks: int, seed: int) -> RuleProof:
    proof = RuleProof(
        operator=known.name,
        rule=claim.words,
        split_by="DTensor",
        status="not decided",
        reason=known.outside,
    )
    verdict = claim.verdict
    if verdict is not None and not verdict.passed:
        worst = verdict.failures[0]
        example = Counterexample(
            shapes={n: tuple(t.shape) for n, t in tensors_by_name(known.call).items()},
            ranks=ranks,
            seed=seed,
            reason=f"{worst.path}: {worst.reason or worst.status}",
        )
        return msgspec.structs.replace(proof, status="refuted", counterexample=example)
    if known.definition is None:
        return proof
    try:
        stated = _claim(claim, known.definition, known.places)
        found = find_proof(stated)
        if isinstance(found, Failure):
            return msgspec.structs.replace(proof, reason=found.reason)
        certificate = certificate_of(known.definition, stated, found[0], None, None)
    except OutsideTheoryError as error:
        return msgspec.structs.replace(proof, reason=str(error))
    parts, forms = found
    return msgspec.structs.replace(
        proof,
        status="proved",
        parts=parts,
        reason="; ".join(forms),
        assumes=tuple(known.definition.call.assumes),
        certificate=certificate,
    )


def _claim(claim: DTensorClaim, definition: Definition, places: tuple[int, ...]) -> Claim:
    """The placements of the arguments and results."""
    given = zip(definition.tensors, places, strict=True)
    roles = {name: _role(claim.placements[place]) for name, place in given}
    return placed_claim(definition, roles, list(map(_role, claim.results)))


def _role(word: str) -> RoleWords:
    if word in ("R", "plain"):
        return ("replicate",)
    if found := _SHARD.fullmatch(word):
        return ("shard", int(found[1]))
    if found := _PARTIAL.fullmatch(word):
        return ("partial", found[1])
    raise OutsideTheoryError(f"the placement {word}")
