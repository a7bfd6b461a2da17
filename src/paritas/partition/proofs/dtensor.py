"""Decide what DTensor claims about an operator."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from paritas.parallel.dtensor import DTensorClaim, examine_dtensor
from paritas.partition.proofs.algebra import OutsideTheoryError
from paritas.partition.proofs.definitions import Definition, define, tensors_by_name
from paritas.partition.proofs.indices import LENGTH, ONE, Poly, symbol
from paritas.partition.proofs.splits import Claim, Failure, RoleWords, find_proof
from paritas.partition.proofs.validation import lifted, validate
from paritas.placement.recipes import OperatorCall
from paritas.results.proofs import Counterexample, RuleProof

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
        name: the operator's name, if the function does not know it.
        within: makes a context for forward and backward, such as `loss_parallel`.
    """
    call = lifted(OperatorCall(op, tuple(args), dict(kwargs or {}), name))
    definition: Definition | None = None
    outside = ""
    try:
        definition = define(call)
        validate(definition)
    except OutsideTheoryError as error:
        definition, outside = None, str(error)
    for claim in examine_dtensor(op, args, kwargs, ranks=ranks, seed=seed, within=within):
        if claim.verdict is None:
            continue
        proof = RuleProof(
            operator=name or getattr(op, "__name__", ""),
            rule=claim.words,
            split_by="DTensor",
            status="not decided",
            reason=outside,
        )
        yield _decided(proof, claim, definition, call, ranks, seed)


def _decided(
    proof: RuleProof,
    claim: DTensorClaim,
    definition: Definition | None,
    call: OperatorCall,
    ranks: int,
    seed: int,
) -> RuleProof:
    import msgspec

    verdict = claim.verdict
    if verdict is not None and not verdict.passed:
        worst = verdict.failures[0]
        example = Counterexample(
            shapes={n: tuple(t.shape) for n, t in tensors_by_name(call).items()},
            ranks=ranks,
            seed=seed,
            reason=f"{worst.path}: {worst.reason or worst.status}",
        )
        return msgspec.structs.replace(proof, status="refuted", counterexample=example)
    if definition is None:
        return proof
    try:
        found = find_proof(_claim(claim, definition))
    except OutsideTheoryError as error:
        return msgspec.structs.replace(proof, reason=str(error))
    if isinstance(found, Failure):
        return msgspec.structs.replace(proof, reason=found.reason)
    parts, forms = found
    return msgspec.structs.replace(proof, status="proved", parts=parts, reason="; ".join(forms))


def _claim(claim: DTensorClaim, definition: Definition) -> Claim:
    """The placements of the arguments and results; what is sharded has one length."""
    tensors: dict[str, tuple[tuple[Poly, ...], RoleWords]] = {}
    lengths: set[int] = set()
    for (name, tensor), word in zip(definition.tensors.items(), claim.placements, strict=True):
        role = _role(word)
        sizes = [
            ONE if size == 1 else symbol(f"{name}.{at}") for at, size in enumerate(tensor.shape)
        ]
        if role[0] == "shard":
            lengths.add(tensor.shape[role[1]])
            sizes[role[1]] = symbol(LENGTH)
        tensors[name] = (tuple(sizes), role)
    if len(lengths) > 1:
        raise OutsideTheoryError("arguments that are sharded along dimensions of different length")
    if len(claim.results) != len(definition.outputs):
        raise OutsideTheoryError("another number of results")
    outputs = tuple(
        (output, _role(word))
        for output, word in zip(definition.outputs, claim.results, strict=True)
    )
    return Claim(tensors, {}, outputs, tuple(definition.call.requires))


def _role(word: str) -> RoleWords:
    if word in ("R", "plain"):
        return ("replicate",)
    if found := _SHARD.fullmatch(word):
        return ("shard", int(found[1]))
    if found := _PARTIAL.fullmatch(word):
        return ("partial", found[1])
    raise OutsideTheoryError(f"the placement {word}")
