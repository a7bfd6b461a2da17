"""Prove that a rule is right, find a counterexample, or say what the theory does not have."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.errors import UsageError
from paritas.partition.annotation import Annotation, Expansion, Option, expand
from paritas.partition.configuration import make_call
from paritas.partition.grammar import ANY_LENGTH, Bounds, Dim, Number
from paritas.partition.library import annotation_of_call
from paritas.partition.proofs import indices
from paritas.partition.proofs.algebra import OutsideTheoryError
from paritas.partition.proofs.definitions import Definition, SymbolicCall, define, tensors_by_name
from paritas.partition.proofs.indices import LENGTH, ONE, Poly, constant, symbol
from paritas.partition.proofs.splits import Claim, Failure, RoleWords, find_proof
from paritas.partition.proofs.validation import DisagreementError, lifted, validate
from paritas.partition.recipe_checks import check_recipe
from paritas.partition.resolving import resolve_operator
from paritas.placement.placement import (
    Divided,
    Group,
    OperatorCall,
    Place,
    Range,
    Recipe,
    tensors_in,
)
from paritas.results.findings import Status
from paritas.results.graph_reports import Counterexample, RuleProof
from paritas.results.items import Once, Partial, Replicate, Role, Shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paritas.partition.configuration import VerifyConfig


def prove(
    config: VerifyConfig,
    *,
    annotation: str | Annotation | None = None,
    ranks: int = 2,
    seed: int = 0,
) -> tuple[RuleProof, ...]:
    """Decide whether a rule is right for every shape and every number of ranks.

    A rule is proved if both sides have the same normal form over the real numbers. It is refuted if
    the numerical check finds it wrong on some shape, which is then the counterexample. Otherwise it
    is not decided, and the reason names what the theory does not have.

    Args:
        config: the operator, its arguments and the options; without options, all of the rule. Each
            dimension of length 1 stays of length 1, and other numbers stay as they are.
        annotation: the rule; by default the registered one, or the library's.
        ranks: the number of ranks of the numerical check, which each proof must pass too.

    Raises:
        UsageError: the operator or its rule cannot be found, or an option cannot be split.
    """
    config = config.as_used()
    function = resolve_operator(config.fsig, config.import_customized_func)
    call = make_call(config, function, seed=seed)
    rule = Annotation.parse(annotation) if isinstance(annotation, str) else annotation
    rule = rule or annotation_of_call(call)
    if rule is None:
        raise UsageError(f"no rule is known for {call.name}: pass annotation=")
    prover = Prover(call, rule, ranks, seed)
    asked = [Option.of(dict(option)) for option in config.parti_options] or rule.options(call)
    return tuple(prover.decide(option) for option in asked)


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
        value: Any = call.kwargs.get(place) if isinstance(place, str) else call.args[place]
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


def placed_claim(
    definition: Definition, roles: Mapping[str, RoleWords], results: Sequence[RoleWords]
) -> Claim:
    """A claim without an annotation: placements of tensors and results; shards have one length.

    Raises:
        OutsideTheoryError: shards of different lengths, or another number of results.
    """
    tensors: dict[str, tuple[tuple[Poly, ...], RoleWords]] = {}
    lengths: set[int] = set()
    for name, tensor in definition.tensors.items():
        role = roles[name]
        sizes = [
            ONE if size == 1 else symbol(f"{name}.{at}") for at, size in enumerate(tensor.shape)
        ]
        if role[0] == "shard":
            lengths.add(tensor.shape[role[1]])
            sizes[role[1]] = symbol(LENGTH)
        tensors[name] = (tuple(sizes), role)
    if len(lengths) > 1:
        raise OutsideTheoryError("arguments that are sharded along dimensions of different length")
    if len(results) != len(definition.outputs):
        raise OutsideTheoryError("another number of results")
    outputs = tuple(zip(definition.outputs, results, strict=True))
    return Claim(tensors, {}, outputs, tuple(definition.call.requires))


# --- Certificates ---------------------------------------------------------------------------------

VERSION = 1


def certificate_of(
    proof: RuleProof,
    claim: Claim,
    parts: str,
    forms: tuple[str, ...],
    definition: SymbolicCall,
    elements: int,
) -> dict[str, Any]:
    """All that `checker` needs, as JSON data.

    Args:
        elements: how many the definition and torch were compared on.
    """
    drawn: dict[str, Any] = {}
    outputs = [
        {
            "shape": output.shape,
            "index": output.index,
            "term": _with_draws(output.term, claim, drawn),
            "role": role,
            "written": output.written,
            "normal form": form,
        }
        for (output, role), form in zip(claim.outputs, forms, strict=True)
    ]
    certificate = {
        "paritas certificate": VERSION,
        "operator": proof.operator,
        "rule": proof.rule,
        "split by": proof.split_by,
        "arguments": {
            name: repr(value)
            for name, value in definition.bound.values.items()
            if not tensors_in(value)
        },
        "parts": parts,
        "assumes": definition.assumes,
        "tensors": {
            name: {"sizes": sizes, "role": role}
            for name, (sizes, role) in {**claim.tensors, **drawn}.items()
        },
        "numbers": claim.numbers,
        "requires": claim.requires,
        "outputs": outputs,
        "compared with torch": {"version": str(torch.__version__), "elements": elements},
    }
    # Tuples become lists, as in a file.
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(certificate))
    return decoded


def _with_draws(term: Any, claim: Claim, drawn: dict[str, Any]) -> Any:
    """A term in which random tensors are arguments, of which each rank has its part."""
    if not isinstance(term, tuple):
        return term
    if term[:1] != ("draw",):
        return tuple(_with_draws(part, claim, drawn) for part in term)
    whole = {
        f"{n}.{at}": s for n, (sizes, _) in claim.tensors.items() for at, s in enumerate(sizes)
    }
    split = {f"{n}.{role[1]}" for n, (_, role) in claim.tensors.items() if role[0] == "shard"}
    sizes = tuple(indices.replace(size, whole, {}) for size in term[2])
    dims = [at for at, size in enumerate(term[2]) if split & set(indices.atoms(size))]
    drawn[f"draw {term[1]}"] = (sizes, ("shard", dims[0]) if dims else ("replicate",))
    return ("read", f"draw {term[1]}", term[3])


# --- The decision ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Prover:
    """Decides the rules of one call.

    Attributes:
        ranks: the number of ranks of the numerical check.
        check: whether a proof is also checked numerically.
        disagreement: how the definition of the operator and torch disagree on this call; empty if
            they agree, None if there is no definition.
    """

    call: OperatorCall
    annotation: Annotation
    ranks: int = 2
    seed: int = 0
    check: bool = True

    def __post_init__(self) -> None:
        self._claims: _Claims | None = None
        self._outside = ""
        self.disagreement: str | None = ""
        try:
            self._claims = _Claims(self.call, self.annotation)
        except OutsideTheoryError as error:
            self._outside = str(error)
            self.disagreement = str(error) if isinstance(error, DisagreementError) else None

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
            result,
            status="proved",
            parts=parts,
            reason="; ".join(forms),
            certificate=certificate_of(
                result,
                claim,
                parts,
                forms,
                self._claims.definition.call,
                self._claims.elements,
            ),
        )

    def refute(self, recipe: Recipe) -> Counterexample | None:
        """The smallest shapes on which the numerical check finds the split wrong."""
        try:
            expansion = expand(self.annotation.signature, self.call)
        except UsageError:
            return None
        given = self._fails(self.call, recipe, self.ranks)
        most = _MOST_TRIED if given is not None else _MOST_TRIED_IN_VAIN
        smaller = _smaller_calls(self.call, expansion, recipe.identifier, self.ranks)
        for call, ranks in itertools.islice(smaller, most):
            found = self._fails_again(call, recipe.identifier, ranks)
            if found is not None:
                return found
        return given or self._fails(_varied(self.call, self.seed), recipe, self.ranks)

    def _fails_again(
        self, call: OperatorCall, identifier: str, ranks: int
    ) -> Counterexample | None:
        """Check the same split of another call."""
        try:
            for option in self.annotation.options(call):
                asked = dataclasses.replace(option, num=ranks)
                recipe = self.annotation.recipe(call, asked)
                if recipe.identifier == identifier:
                    return self._fails(call, recipe, ranks)
        except UsageError:  # not for these sizes
            pass
        return None

    def _fails(self, call: OperatorCall, recipe: Recipe, ranks: int) -> Counterexample | None:
        try:
            verdict = check_recipe(call, recipe, ranks, seed=self.seed)
        except UsageError:
            return None
        if verdict.status not in (Status.DIFFERENT, Status.DEGRADED):
            return None
        worst = verdict.failures[0]
        tensors = tensors_by_name(call)
        small = sum(tensor.numel() for tensor in tensors.values()) <= _MOST_VALUES
        return Counterexample(
            shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
            values={n: t.tolist() for n, t in tensors.items() if not t.is_complex()}
            if small
            else {},
            ranks=ranks,
            seed=self.seed,
            reason=f"{worst.path}: {worst.reason or worst.status}",
        )


# --- Smaller shapes for the same rule -------------------------------------------------------------

_MOST_TRIED = 8
_MOST_TRIED_IN_VAIN = 4
_MOST_VALUES = 256


def _smaller_calls(
    call: OperatorCall, expansion: Expansion, identifier: str, ranks: int
) -> Iterator[tuple[OperatorCall, int]]:
    """The call with other lengths, from the smallest to the given ones.

    Each length is short, or as given: an operator may need it to be what it is.
    """
    lengths = {
        name: length for name, length in expansion.lengths.items() if length > 1 and name != "_"
    }
    own = [size for size in (ranks, ranks + 1, 2 * ranks) if size != lengths.get(identifier)]
    others = [name for name in lengths if name != identifier]
    small = {name: sorted({2, lengths[name]}) for name in others}
    all_small = {name: sizes[0] for name, sizes in small.items()}
    for size in own:
        yield resized(call, expansion, {**all_small, identifier: size}), ranks
    for size in own:
        yield resized(call, expansion, {identifier: size}), ranks
    for name in others:
        yield resized(call, expansion, {name: 2, identifier: own[-1]}), ranks


def resized(call: OperatorCall, expansion: Expansion, lengths: Mapping[str, int]) -> OperatorCall:
    """The call with other lengths of identifiers; values are repeated or left out."""
    known = {**expansion.lengths, **lengths}
    args, kwargs = list(call.args), dict(call.kwargs)

    def size(dim: Dim) -> int:
        return math.prod(int(f.name) if f.is_number else known.get(f.name, 1) for f in dim.factors)

    for operand in expansion.inputs:
        if operand.place is not None and operand.dims is not None:
            holder: Any = kwargs if isinstance(operand.place, str) else args
            lengths_of = [
                None if dim.factors[0].name == ANY_LENGTH else size(dim) for dim in operand.dims
            ]
            holder[operand.place] = _resized_tensor(holder[operand.place], lengths_of)
    for name in set(kwargs) & set(lengths):
        kwargs[name] = lengths[name]
    for number in expansion.signature.numbers:
        if isinstance(number, Number):
            _set_number(args, kwargs, number, size(number.dim))
        elif isinstance(number, Bounds) and number.name in lengths:
            holder = kwargs if isinstance(number.end, str) else args
            shift = lengths[number.name] - expansion.lengths[number.name]
            holder[number.end] = holder[number.end] + shift
    return dataclasses.replace(call, args=tuple(args), kwargs=kwargs)


def _varied(call: OperatorCall, seed: int) -> OperatorCall:
    """The call with other values, of the same signs and not larger: equal ones hide faults."""
    generator = torch.Generator().manual_seed(seed)

    def value(one: torch.Tensor) -> torch.Tensor:
        if not one.is_floating_point():
            return one
        factors = 0.5 + torch.rand(one.shape, generator=generator, dtype=torch.float64) / 2
        return (one.detach() * factors.to(one.device)).to(one.dtype)

    return call.map_tensors(value)


def _resized_tensor(value: Any, sizes: Sequence[int | None]) -> Any:
    """A tensor, or those of a list, with other sizes; None and 1 stay."""
    if isinstance(value, list | tuple):
        return type(value)(_resized_tensor(item, sizes) for item in value)
    if not isinstance(value, torch.Tensor) or value.dim() != len(sizes):
        return value
    for at, size in enumerate(sizes):
        if size is not None and value.shape[at] != 1:
            order = torch.arange(size, device=value.device) % value.shape[at]
            value = value.index_select(at, order)
    return value


def _set_number(args: list[Any], kwargs: dict[str, Any], number: Number, value: int) -> None:
    holder: Any = kwargs if isinstance(number.place, str) else args
    if isinstance(number.place, str) and number.place not in kwargs:
        return
    old = holder[number.place]
    if number.item is None:
        holder[number.place] = value if old != -1 else old
    elif old[number.item] != -1:
        items = list(old)
        items[number.item] = value
        holder[number.place] = type(old)(items) if isinstance(old, tuple | list) else items
