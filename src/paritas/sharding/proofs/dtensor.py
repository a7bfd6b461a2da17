"""Decide what DTensor claims about an operator."""

from __future__ import annotations

import dataclasses
import operator
import re
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import fx

from paritas.core.operators.calls import OperatorCall
from paritas.core.operators.catalogue import Definition, define
from paritas.core.operators.terms import OutsideTheoryError
from paritas.sharding.plans.dtensor import DTensorClaim, argument_tensors, examine_dtensor
from paritas.sharding.proofs.claims import placed_claim
from paritas.sharding.proofs.graphs import subscript
from paritas.sharding.proofs.prove import counterexample, prove_claim
from paritas.sharding.proofs.validation import lift_call, validate
from paritas.sharding.rows import RuleProof

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterator, Mapping

    from paritas.sharding.proofs.splits import Claim, RoleWords

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
    defined = _define_call(op, tuple(args), dict(kwargs or {}), name)
    for claim in examine_dtensor(op, args, kwargs, ranks=ranks, seed=seed, within=within):
        if claim.verdict is not None:
            yield _decide_claim(defined, claim, ranks, seed)


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


def _define_call(
    op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> _Defined:
    call = lift_call(OperatorCall(op, args, kwargs, name))
    defined = _Defined(name or getattr(op, "__name__", ""), call)
    call_tensors = list(argument_tensors(call).values())
    inner = call if name else _find_called_operator(call) or call
    try:
        definition = define(inner)
        validate(definition)
    except OutsideTheoryError as error:
        return dataclasses.replace(defined, outside=str(error))
    argument_numbers = [_number(tensor, call_tensors) for tensor in definition.tensors.values()]
    places = tuple(
        argument_number for argument_number in argument_numbers if argument_number is not None
    )
    if len(places) != len(argument_numbers):
        return dataclasses.replace(defined, outside="a tensor that is not an argument")
    return dataclasses.replace(defined, definition=definition, places=places)


def _number(tensor: Any, call_tensors: list[Any]) -> int | None:
    return next((at for at, call_tensor in enumerate(call_tensors) if call_tensor is tensor), None)


def _find_called_operator(call: OperatorCall) -> OperatorCall | None:
    """The one operator that a function of tensors calls; None if it calls others too."""
    if call.kwargs or not all(isinstance(argument, torch.Tensor) for argument in call.args):
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

    def item(argument: Any) -> Any:
        return values[argument] if isinstance(argument, fx.Node) else argument

    target: Any = calls[0].target
    function = getattr(torch.Tensor, target) if calls[0].op == "call_method" else target
    args: Any = fx.node.map_aggregate(calls[0].args, item)
    kwargs: Any = fx.node.map_aggregate(dict(calls[0].kwargs), item)
    if function is operator.getitem:
        function, name, args = subscript(args)
        return OperatorCall(function, args, {}, name)
    return OperatorCall(function, tuple(map(_plain, args)), dict(kwargs))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


# --- The decision ---------------------------------------------------------------------------------


def _decide_claim(defined: _Defined, claim: DTensorClaim, ranks: int, seed: int) -> RuleProof:
    proof = RuleProof(
        operator=defined.name,
        rule=claim.words,
        split_by="DTensor",
        status="not decided",
        reason=defined.outside,
    )
    verdict = claim.verdict
    if verdict is not None and not verdict.passed:
        worst = verdict.failures[0]
        example = counterexample(defined.call, worst, ranks, seed)
        return msgspec.structs.replace(proof, status="refuted", counterexample=example)
    definition = defined.definition
    if definition is None:
        return proof
    return prove_claim(proof, definition, lambda: _claim(claim, definition, defined.places))


def _claim(claim: DTensorClaim, definition: Definition, places: tuple[int, ...]) -> Claim:
    """The placements of the arguments and results."""
    numbered_tensors = zip(definition.tensors, places, strict=True)
    roles = {
        name: _role(claim.placements[argument_number]) for name, argument_number in numbered_tensors
    }
    return placed_claim(definition, roles, list(map(_role, claim.results)))


def _role(word: str) -> RoleWords:
    if word in ("R", "plain"):
        return ("replicate",)
    if match := _SHARD.fullmatch(word):
        return ("shard", int(match[1]))
    if match := _PARTIAL.fullmatch(word):
        return ("partial", match[1])
    raise OutsideTheoryError(f"the placement {word}")
