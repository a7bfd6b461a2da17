"""Prove that a rule is right, find a counterexample, or say what the theory does not have."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch

from paritas.errors import UsageError
from paritas.partition.annotation import Annotation, Expansion, Option, expand
from paritas.partition.grammar import ANY_LENGTH, Bounds, Dim, Members, Number
from paritas.partition.proofs import indices, operators
from paritas.partition.proofs.algebra import OutsideTheoryError
from paritas.partition.proofs.definitions import Definition, define
from paritas.partition.proofs.indices import LENGTH, ONE, Poly, constant, symbol
from paritas.partition.proofs.splits import Claim, Failure, RoleWords, find_proof
from paritas.partition.proofs.validation import lifted, validate
from paritas.partition.recipe_checks import check_recipe
from paritas.placement.recipes import Divided, Group, OperatorCall, Place, Range, Recipe
from paritas.results.findings import Status
from paritas.results.placements import Once, Partial, Replicate, Role, Shard

assert operators  # registers the definitions

ProofStatus = Literal["proved", "refuted", "not decided"]


class Counterexample(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes on which the numerical check finds a split wrong.

    Attributes:
        shapes: of each tensor argument, by its place.
        ranks: the number of ranks.
        seed: of the check.
        reason: what the check says.
    """

    shapes: dict[str, tuple[int, ...]]
    ranks: int
    seed: int
    reason: str


class RuleProof(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about the split of one identifier.

    Attributes:
        operator: its name.
        rule: the annotation.
        split_by: the identifier that is split.
        reason: why it is not proved, or what is proved.
        parts: whether parts may be unequal ("any") or must be equal ("equal").
        certificate: what `checker` checks, as JSON data.
        seconds: the time that it took.
    """

    operator: str
    rule: str
    split_by: str
    status: ProofStatus
    reason: str = ""
    parts: str = ""
    certificate: dict[str, Any] | None = None
    counterexample: Counterexample | None = None
    seconds: float = 0.0


# --- From a rule and a call to a claim ------------------------------------------------------------


def _symbolic_numbers(expansion: Expansion) -> dict[tuple[Place, int | None], Poly | None]:
    """The numbers that depend on lengths, and their values on the whole."""
    found: dict[tuple[Place, int | None], Poly | None] = {}
    call = expansion.call
    names = set(expansion.lengths)
    for name, value in call.kwargs.items():
        if name in names and isinstance(value, int) and not isinstance(value, bool):
            found[name, None] = _length(expansion, name)
    for number in expansion.signature.numbers:
        if isinstance(number, Number):
            found[number.place, number.item] = _size(expansion, number.dim)
        elif isinstance(number, Bounds):
            found[number.begin, None] = found[number.end, None] = None
    return found


def _length(expansion: Expansion, name: str) -> Poly:
    return ONE if expansion.lengths.get(name) == 1 else symbol(f"n:{name}")


def _size(expansion: Expansion, dim: Dim) -> Poly:
    factors = [
        constant(int(one.name)) if one.is_number else _length(expansion, one.name)
        for one in dim.factors
    ]
    return indices.multiply(*factors)


class _Claims:
    """The claims that an annotation makes about one call."""

    def __init__(self, call: OperatorCall, annotation: Annotation) -> None:
        self.call = lifted(call)
        self.annotation = annotation
        self.expansion = expand(annotation.signature, self.call)
        self.numbers = _symbolic_numbers(self.expansion)
        self.definition: Definition = define(self.call, self.numbers)
        self.elements = validate(self.definition)

    def claim(self, recipe: Recipe) -> Claim:
        """The claim that a recipe makes.

        Raises:
            OutsideTheoryError: the theory has no words for it.
        """
        split = {f"n:{recipe.identifier}": symbol(LENGTH)}
        tensors = {}
        for name, sizes in self._sizes().items():
            place = name.partition("[")[0]
            role = recipe.placement(int(place) if place.isdigit() else place)
            whole = tuple(indices.replace(size, split, {}) for size in sizes)
            tensors[name] = (whole, _role_words(role, name))
        numbers = self._numbers(recipe, split, tensors)
        outputs = []
        roles = iter(recipe.outputs)
        for output in self.definition.outputs:
            if output.written is None:
                outputs.append((output, _role_words(next(roles, Replicate()), "a result")))
                continue
            role = recipe.placement(
                int(output.written) if output.written.isdigit() else output.written
            )
            if not (isinstance(role, Replicate) and role.own):
                outputs.append((output, _role_words(role, output.written)))
        self._own_gradients(recipe, outputs)
        return Claim(tensors, numbers, tuple(outputs), tuple(self.definition.call.requires))

    def _sizes(self) -> dict[str, tuple[Poly, ...]]:
        """The sizes of all tensors in terms of lengths."""
        found = {
            name: tuple(
                ONE if size == 1 else symbol(f"{name}.{at}") for at, size in enumerate(tensor.shape)
            )
            for name, tensor in self.definition.tensors.items()
        }
        for operand in self.expansion.inputs:
            if operand.place is None or operand.dims is None:
                continue
            for name, sizes in found.items():
                if name.partition("[")[0] == str(operand.place) and len(sizes) == len(operand.dims):
                    found[name] = tuple(
                        size
                        if size == ONE or dim.factors[0].name == ANY_LENGTH
                        else _size(self.expansion, dim)
                        for size, dim in zip(sizes, operand.dims, strict=True)
                    )
        return found

    def _numbers(
        self,
        recipe: Recipe,
        split: Mapping[str, Poly],
        tensors: Mapping[str, tuple[tuple[Poly, ...], RoleWords]],
    ) -> dict[str, tuple[Poly, Poly]]:
        rules = {
            (place, rule.item if isinstance(rule, Divided) else None): rule
            for place, rule in recipe.numbers
        }
        if any(isinstance(rule, Group) for rule in rules.values()):
            raise OutsideTheoryError("an operator whose ranks exchange data")
        known = {key for key in rules if key not in self.numbers}
        if known:
            raise OutsideTheoryError(f"argument {next(iter(known))[0]} is divided")
        found: dict[str, tuple[Poly, Poly]] = {}
        for (place, item), value in self.numbers.items():
            name = f"#{place}" if item is None else f"#{place}[{item}]"
            given = self._value(place, item)
            whole = indices.replace(value, split, {}) if value else constant(given)
            local = whole
            rule = rules.get((place, item))
            if isinstance(rule, Divided):
                if LENGTH not in indices.atoms(whole):
                    raise OutsideTheoryError(f"argument {place} is divided, but is not a length")
                local = indices.replace(whole, {LENGTH: symbol("m")}, {})
            elif isinstance(rule, Range):
                whole, local = self._bounds(rule, given, tensors)
            elif value is None:
                whole, local = self._unsplit_bounds(place, given)
            found[name] = (whole, local)
        return found

    def _value(self, place: Place, item: int | None) -> Any:
        call = self.call
        value = call.kwargs.get(place) if isinstance(place, str) else call.args[place]
        return value if item is None else value[item]

    def _bounds(
        self,
        rule: Range,
        value: int,
        tensors: Mapping[str, tuple[tuple[Poly, ...], RoleWords]],
    ) -> tuple[Poly, Poly]:
        """The start or the end of a rank's part."""
        sizes, role = tensors[str(rule.of)]
        if role[0] != "shard":
            raise OutsideTheoryError("a range of something that is not split")
        size = sizes[role[1]]
        concrete = self.definition.tensors[str(rule.of)].shape[role[1]]
        unit = indices.quotient(size, symbol(LENGTH)) or ONE
        begin = indices.multiply(symbol("o"), unit)
        if rule.end == "begin":
            return constant(value), indices.add(constant(value), begin)
        # The end of the whole is where it begins plus its length.
        start = constant(value - concrete)
        end = indices.add(begin, indices.multiply(symbol("m"), unit))
        return indices.add(start, size), indices.add(start, end)

    def _unsplit_bounds(self, place: Place, value: int) -> tuple[Poly, Poly]:
        for number in self.expansion.signature.numbers:
            if isinstance(number, Bounds) and number.end == place:
                length = self.expansion.lengths.get(number.name)
                if length == value:
                    return _length(self.expansion, number.name), _length(
                        self.expansion, number.name
                    )
        return constant(value), constant(value)

    def _own_gradients(self, recipe: Recipe, outputs: Sequence[Any]) -> None:
        """A gradient that each rank has as a whole is known only if all results are replicated."""
        claimed = [
            place
            for place, role in recipe.inputs
            if isinstance(role, Replicate) and not role.summed and not role.own
        ]
        if claimed and any(role[0] != "replicate" for _, role in outputs):
            raise OutsideTheoryError(
                "a gradient that each rank is claimed to have as a whole (`/`)"
            )


def _role_words(role: Role, name: str) -> RoleWords:
    match role:
        case Shard(halo=halo) if halo != (0, 0):
            raise OutsideTheoryError("a halo")
        case Shard(pieces=1, order="natural", dim=dim):
            return ("shard", dim)
        case Replicate():
            return ("replicate",)
        case Once():
            return ("once",)
        case Partial(reduction=reduction):
            return ("partial", reduction)
    raise OutsideTheoryError(f"the placement of {name}: {role}")


# --- The decision ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Prover:
    """Decides the rules of one call.

    Attributes:
        ranks: the number of ranks of the numerical check.
        check: whether a proof is also checked numerically.
    """

    call: OperatorCall
    annotation: Annotation
    ranks: int = 2
    seed: int = 0
    check: bool = True

    def __post_init__(self) -> None:
        self._claims: _Claims | None = None
        self._outside = ""
        try:
            self._claims = _Claims(self.call, self.annotation)
        except OutsideTheoryError as error:
            self._outside = str(error)

    def decide(self, option: Option) -> RuleProof:
        """Decide one option."""
        began = time.perf_counter()
        asked = dataclasses.replace(option, num=option.num or self.ranks)
        recipe = self.annotation.recipe(self.call, asked)
        proof = self._decided(recipe)
        return msgspec.structs.replace(proof, seconds=time.perf_counter() - began)

    def _decided(self, recipe: Recipe) -> RuleProof:
        found = self.prove(recipe)
        if found.status == "proved":
            if not self.check:
                return found
            verdict = check_recipe(self.call, recipe, self.ranks, seed=self.seed)
            if verdict.status in (Status.IDENTICAL, Status.EQUIVALENT, Status.UNSTABLE):
                return found
            reason = (
                f"proved, but the numerical check says {verdict.status}: "
                f"{verdict.failures[0].reason if verdict.failures else ''}; please report this"
            )
            return msgspec.structs.replace(
                found, status="not decided", reason=reason, certificate=None
            )
        example = self.refute(recipe)
        if example is not None:
            return msgspec.structs.replace(
                found, status="refuted", reason=found.reason, counterexample=example
            )
        return found

    def prove(self, recipe: Recipe) -> RuleProof:
        """The proof of one recipe, without the numerical check."""
        result = RuleProof(
            operator=self.call.name or getattr(self.call.function, "__name__", ""),
            rule=self.annotation.text,
            split_by=recipe.identifier,
            status="not decided",
            reason=self._outside,
        )
        if self._claims is None:
            return result
        try:
            claim = self._claims.claim(recipe)
            proof = find_proof(claim)
        except OutsideTheoryError as error:
            return msgspec.structs.replace(result, reason=str(error))
        if isinstance(proof, Failure):
            return msgspec.structs.replace(result, reason=proof.reason)
        parts, forms = proof
        return msgspec.structs.replace(
            result, status="proved", parts=parts, reason="; ".join(forms)
        )

    def refute(self, recipe: Recipe) -> Counterexample | None:
        """The smallest shapes on which the numerical check finds the split wrong."""
        return None


__all__ = ["Callable", "Iterator", "Members", "UsageError", "itertools", "torch"]
