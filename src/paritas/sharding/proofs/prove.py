"""Prove that a rule is right, find a counterexample, or say what the theory does not have."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.errors import UsageError
from paritas.core.numerics.random_tensors import between
from paritas.core.operators.catalogue import tensors_by_name
from paritas.core.operators.terms import OutsideTheoryError
from paritas.core.results.findings import Status
from paritas.sharding.operators.annotation import Annotation, Expansion, Option, expand
from paritas.sharding.operators.configuration import make_call
from paritas.sharding.operators.grammar import ANY_LENGTH, Bounds, Dim, Number
from paritas.sharding.operators.library import annotation_of_call
from paritas.sharding.operators.recipe_checks import check_recipe
from paritas.sharding.operators.resolving import resolve_operator
from paritas.sharding.proofs.certificates import certificate_of
from paritas.sharding.proofs.claims import Claims
from paritas.sharding.proofs.splits import Failure, find_proof
from paritas.sharding.proofs.validation import DisagreementError, lift_call, validate
from paritas.sharding.rows import Counterexample, RuleProof

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paritas.core.operators.calls import OperatorCall
    from paritas.core.operators.catalogue import Definition
    from paritas.core.placement.placement import Recipe
    from paritas.core.results.findings import Finding, Verdict
    from paritas.sharding.operators.configuration import PartitionConfig
    from paritas.sharding.proofs.splits import Claim


def prove(
    config: PartitionConfig,
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
    options = [Option.of(dict(option)) for option in config.parti_options] or rule.options(call)
    return tuple(prover.decide(option) for option in options)


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
        self._claims: Claims | None = None
        self._outside = ""
        self.disagreement: str | None = ""
        try:
            claims = Claims(lift_call(self.call), self.annotation)
            validate(claims.definition)
            self._claims = claims
        except OutsideTheoryError as error:
            self._outside = str(error)
            self.disagreement = str(error) if isinstance(error, DisagreementError) else None

    def decide(self, option: Option) -> RuleProof:
        """Decide one option."""
        began = time.perf_counter()
        ranked_option = dataclasses.replace(option, num=option.num or self.ranks)
        recipe = self.annotation.recipe(self.call, ranked_option)
        proof = self._decide_recipe(recipe)
        return msgspec.structs.replace(proof, seconds=time.perf_counter() - began)

    def _decide_recipe(self, recipe: Recipe) -> RuleProof:
        proof = self.prove(recipe)
        if proof.status == "proved":
            if not self.check:
                return proof
            verdict = check_recipe(self.call, recipe, self.ranks, seed=self.seed)
            if verdict.status in (Status.IDENTICAL, Status.EQUIVALENT, Status.UNSTABLE):
                return proof
            if proof.parts == "equal" and self._split_length(recipe) % self.ranks:
                return self._only_for_equal_parts(proof, recipe)
            return self._mark_contradicted(proof, verdict)
        example = self.refute(recipe)
        if example is not None:
            return msgspec.structs.replace(proof, status="refuted", counterexample=example)
        return proof

    def _mark_contradicted(self, rule_proof: RuleProof, verdict: Verdict) -> RuleProof:
        reason = (
            f"proved, but the numerical check says {verdict.status}: "
            f"{verdict.failures[0].reason if verdict.failures else ''}; please report this"
        )
        return msgspec.structs.replace(
            rule_proof, status="not decided", reason=reason, certificate=None
        )

    def _split_length(self, recipe: Recipe) -> int:
        return expand(self.annotation.signature, self.call).lengths.get(recipe.identifier, 0)

    def _only_for_equal_parts(self, rule_proof: RuleProof, recipe: Recipe) -> RuleProof:
        """The parts of this call are unequal, for which the split is wrong."""
        expansion = expand(self.annotation.signature, self.call)
        length = self._split_length(recipe)
        equal = resize_call(self.call, expansion, {recipe.identifier: length - length % self.ranks})
        again = check_recipe(equal, recipe, self.ranks, seed=self.seed)
        if again.status not in (Status.IDENTICAL, Status.EQUIVALENT, Status.UNSTABLE):
            return self._mark_contradicted(rule_proof, again)
        return msgspec.structs.replace(
            rule_proof,
            status="refuted",
            certificate=None,
            counterexample=self._fails(self.call, recipe, self.ranks),
        )

    def prove(self, recipe: Recipe) -> RuleProof:
        """The proof of one recipe, without the numerical check."""
        result = RuleProof(
            operator=self.call.name or getattr(self.call.function, "__name__", ""),
            rule=self.annotation.text,
            split_by=recipe.identifier,
            status="not decided",
            reason=self._outside,
        )
        claims = self._claims
        if claims is None:
            return result
        return prove_claim(
            result,
            claims.definition,
            lambda: claims.claim(recipe),
            self.annotation.text,
            recipe.identifier,
        )

    def refute(self, recipe: Recipe) -> Counterexample | None:
        """The smallest shapes on which the numerical check finds the split wrong."""
        try:
            expansion = expand(self.annotation.signature, self.call)
        except UsageError:
            return None
        counterexample = self._fails(self.call, recipe, self.ranks)
        most = _MOST_TRIED if counterexample is not None else _MOST_TRIED_IN_VAIN
        smaller = _smaller_calls(self.call, expansion, recipe.identifier, self.ranks)
        for call, ranks in itertools.islice(smaller, most):
            smaller_counterexample = self._fails_again(call, recipe.identifier, ranks)
            if smaller_counterexample is not None:
                return smaller_counterexample
        return counterexample or self._fails(_vary_values(self.call, self.seed), recipe, self.ranks)

    def _fails_again(
        self, call: OperatorCall, identifier: str, ranks: int
    ) -> Counterexample | None:
        """Check the same split of another call."""
        try:
            for option in self.annotation.options(call):
                ranked_option = dataclasses.replace(option, num=ranks)
                recipe = self.annotation.recipe(call, ranked_option)
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
        if not verdict.status.is_wrong:
            return None
        example = counterexample(call, verdict.failures[0], ranks, self.seed)
        tensors = tensors_by_name(call)
        if sum(tensor.numel() for tensor in tensors.values()) > _MOST_VALUES:
            return example
        values = {n: t.tolist() for n, t in tensors.items() if not t.is_complex()}
        return msgspec.structs.replace(example, values=values)


def prove_claim(
    undecided: RuleProof,
    definition: Definition,
    make_claim: Callable[[], Claim],
    rule: str | None = None,
    split_by: str | None = None,
) -> RuleProof:
    """The proof of a claim, with its certificate; undecided if there is none, which says why."""
    try:
        claim = make_claim()
        proof = find_proof(claim)
        if isinstance(proof, Failure):
            return msgspec.structs.replace(undecided, reason=proof.reason)
        parts, forms = proof
        certificate = certificate_of(definition, claim, parts, rule, split_by)
    except OutsideTheoryError as error:
        return msgspec.structs.replace(undecided, reason=str(error))
    return msgspec.structs.replace(
        undecided,
        status="proved",
        parts=parts,
        reason="; ".join(forms),
        assumes=tuple(definition.call.assumes),
        certificate=certificate,
    )


def counterexample(call: OperatorCall, worst: Finding, ranks: int, seed: int) -> Counterexample:
    """The shapes on which the numerical check finds a split wrong, and what it finds."""
    return Counterexample(
        shapes={name: tuple(tensor.shape) for name, tensor in tensors_by_name(call).items()},
        ranks=ranks,
        seed=seed,
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
    split_lengths = [
        size for size in (ranks, ranks + 1, 2 * ranks) if size != lengths.get(identifier)
    ]
    others = [name for name in lengths if name != identifier]
    small = {name: sorted({2, lengths[name]}) for name in others}
    all_small = {name: sizes[0] for name, sizes in small.items()}
    for size in split_lengths:
        yield resize_call(call, expansion, {**all_small, identifier: size}), ranks
    for size in split_lengths:
        yield resize_call(call, expansion, {identifier: size}), ranks
    for name in others:
        yield resize_call(call, expansion, {name: 2, identifier: split_lengths[-1]}), ranks


def resize_call(
    call: OperatorCall, expansion: Expansion, lengths: Mapping[str, int]
) -> OperatorCall:
    """The call with other lengths of identifiers; values are repeated or left out."""
    all_lengths = {**expansion.lengths, **lengths}
    args, kwargs = list(call.args), dict(call.kwargs)

    def size(dim: Dim) -> int:
        return math.prod(
            int(f.name) if f.is_number else all_lengths.get(f.name, 1) for f in dim.factors
        )

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


def _vary_values(call: OperatorCall, seed: int) -> OperatorCall:
    """The call with other values, of the same signs and not larger: equal ones hide faults."""
    generator = torch.Generator().manual_seed(seed)

    def value(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        factors = between(0.5, 1.0)(tuple(tensor.shape), generator)
        return (tensor.detach() * factors.to(tensor.device)).to(tensor.dtype)

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
