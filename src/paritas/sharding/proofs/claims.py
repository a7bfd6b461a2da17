"""From a rule and a call to a claim: which tensors, numbers and results each rank has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paritas.core.operators import indices
from paritas.core.operators.catalogue import Definition, define
from paritas.core.operators.definitions import number_name
from paritas.core.operators.indices import LENGTH, ONE, Poly, constant, symbol
from paritas.core.operators.terms import OutsideTheoryError
from paritas.core.placement.placement import Divided, Group, Range, Recipe
from paritas.core.results.items import Once, Partial, Replicate, Role, Shard
from paritas.sharding.operators.annotation import Annotation, Expansion, expand
from paritas.sharding.operators.grammar import ANY_LENGTH, Bounds, Dim, Number
from paritas.sharding.proofs.splits import Claim, RoleWords

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paritas.core.operators.calls import OperatorCall, Place


def symbolic_numbers(expansion: Expansion) -> dict[tuple[Place, int | None], Poly | None]:
    """The numbers that depend on lengths, and their values on the whole."""
    number_values: dict[tuple[Place, int | None], Poly | None] = {}
    call = expansion.call
    names = set(expansion.lengths)
    for name, value in call.kwargs.items():
        if name in names and isinstance(value, int) and not isinstance(value, bool):
            number_values[name, None] = _length(expansion, name)
    for number in expansion.signature.numbers:
        if isinstance(number, Number):
            number_values[number.place, number.item] = _size(expansion, number.dim)
        elif isinstance(number, Bounds):
            number_values[number.begin, None] = number_values[number.end, None] = None
    return number_values


def _length(expansion: Expansion, name: str) -> Poly:
    return ONE if expansion.lengths.get(name) == 1 else symbol(f"n:{name}")


def _size(expansion: Expansion, dim: Dim) -> Poly:
    factors = [
        constant(int(factor.name)) if factor.is_number else _length(expansion, factor.name)
        for factor in dim.factors
    ]
    return indices.multiply(*factors)


class Claims:
    """The claims that an annotation makes about one call.

    Args:
        call: with floating tensors in float64.
        assumed: what to take for granted about values; by default, what holds for those given.
    """

    def __init__(
        self, call: OperatorCall, annotation: Annotation, assumed: Sequence[str] | None = None
    ) -> None:
        self.call = call
        self.expansion = expand(annotation.signature, call)
        self.numbers = symbolic_numbers(self.expansion)
        self.definition: Definition = define(call, self.numbers, assumed)

    def claim(self, recipe: Recipe) -> Claim:
        """The claim that a recipe makes.

        Raises:
            OutsideTheoryError: the theory has no words for it.
        """
        split = {f"n:{recipe.identifier}": symbol(LENGTH)}
        tensors = {}
        for name, sizes in self._sizes().items():
            argument_name = name.partition("[")[0]
            role = recipe.placement(
                int(argument_name) if argument_name.isdigit() else argument_name
            )
            whole_sizes = tuple(indices.replace(size, split, {}) for size in sizes)
            tensors[name] = (whole_sizes, _role_words(role, name))
        numbers = self._numbers(recipe, split, tensors)
        outputs = []
        count = sum(output.written is None for output in self.definition.outputs)
        if len(recipe.outputs) != count:
            raise OutsideTheoryError(
                f"a rule for {len(recipe.outputs)} results of an operator that returns {count}"
            )
        roles = iter(recipe.outputs)
        for output in self.definition.outputs:
            if output.written is None:
                outputs.append((output, _role_words(next(roles), "a result")))
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
        sizes_by_name = {
            name: tuple(
                ONE if size == 1 else symbol(f"{name}.{at}") for at, size in enumerate(tensor.shape)
            )
            for name, tensor in self.definition.tensors.items()
        }
        for operand in self.expansion.inputs:
            if operand.place is None or operand.dims is None:
                continue
            for name, sizes in sizes_by_name.items():
                if name.partition("[")[0] == str(operand.place) and len(sizes) == len(operand.dims):
                    sizes_by_name[name] = tuple(
                        size
                        if size == ONE or dim.factors[0].name == ANY_LENGTH
                        else _size(self.expansion, dim)
                        for size, dim in zip(sizes, operand.dims, strict=True)
                    )
        return sizes_by_name

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
        unsupported_keys = {key for key in rules if key not in self.numbers}
        if unsupported_keys:
            raise OutsideTheoryError(f"argument {next(iter(unsupported_keys))[0]} is divided")
        bounds_by_name: dict[str, tuple[Poly, Poly]] = {}
        for (argument_place, item), value in self.numbers.items():
            name = number_name(argument_place, item)
            call_value = self._value(argument_place, item)
            whole_value = indices.replace(value, split, {}) if value else constant(call_value)
            local = whole_value
            rule = rules.get((argument_place, item))
            if isinstance(rule, Divided):
                if LENGTH not in indices.atoms(whole_value):
                    raise OutsideTheoryError(
                        f"argument {argument_place} is divided, but is not a length"
                    )
                local = indices.replace(whole_value, {LENGTH: symbol("m")}, {})
            elif isinstance(rule, Range):
                whole_value, local = self._bounds(rule, call_value, tensors)
            elif value is None:
                whole_value, local = self._unsplit_bounds(argument_place, call_value)
            bounds_by_name[name] = (whole_value, local)
        return bounds_by_name

    def _value(self, argument_place: Place, item: int | None) -> Any:
        call = self.call
        value: Any = (
            call.kwargs.get(argument_place)
            if isinstance(argument_place, str)
            else call.args[argument_place]
        )
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

    def _unsplit_bounds(self, argument_place: Place, value: int) -> tuple[Poly, Poly]:
        for number in self.expansion.signature.numbers:
            if isinstance(number, Bounds) and number.end == argument_place:
                length = self.expansion.lengths.get(number.name)
                if length == value:
                    return _length(self.expansion, number.name), _length(
                        self.expansion, number.name
                    )
        return constant(value), constant(value)

    def _own_gradients(self, recipe: Recipe, outputs: Sequence[Any]) -> None:
        """A gradient that each rank has as a whole is known only if all results are replicated."""
        claimed = [
            argument_place
            for argument_place, role in recipe.inputs
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
