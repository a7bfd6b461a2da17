"""Find the valid splits of an operator by running it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import string
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from paritas.core.errors import UsageError
from paritas.core.execution.cotangents import draw_cotangent
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.gates import agree
from paritas.core.placement.assembly import join
from paritas.core.placement.placement import Group, Range, Recipe
from paritas.core.results.items import Once, Partial, Replicate, Role, Shard, nth_output
from paritas.core.torch_private.global_state import quietly
from paritas.sharding.operators.grammar import (
    AnnotationSignature,
    Bounds,
    Control,
    Dim,
    DimFactor,
    InputMark,
    Members,
    Number,
    Suffix,
    Tensor,
)
from paritas.sharding.operators.trials import (
    DividedNumber,
    RandomTrials,
    TensorPlace,
    TrialCut,
    TrialSubject,
    argument,
    common_units,
    is_comparable,
)

if TYPE_CHECKING:
    from paritas.core.operators.calls import OperatorCall, Place
    from paritas.sharding.operators.trials import Tensors, TrialDraw


# --- Recipes as one annotation --------------------------------------------------------------------

Shape = tuple[int, ...]
_SCALAR = (Dim((DimFactor("1"),)),)


def annotation_text(
    inputs: Mapping[Place, Shape | None] | Sequence[Shape | None],
    outputs: Sequence[Shape | None],
    recipes: Sequence[Recipe],
    others: Mapping[Place, Any] | None = None,
) -> str:
    """Write recipes as one annotation, which gives the same recipes when it is parsed.

    Args:
        inputs: the shapes of the arguments, by place or in order; None for other arguments.
        outputs: the shapes of the results.
        recipes: each becomes an identifier, in this order.
        others: values of arguments that are not tensors. Identifiers avoid their names, and numbers
            that change with a split need their values.

    Raises:
        UsageError: one annotation cannot express all recipes, because two split the same dimension
            or the language cannot express one. The message names the recipe.
    """
    places: dict[Place, Shape | None] = {}
    places.update(inputs if isinstance(inputs, Mapping) else enumerate(inputs))
    return str(_Writer(places, list(outputs), list(recipes), dict(others or {})).signature())


def _identifiers(taken: set[str]) -> Iterator[str]:
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            if "".join(letters) not in taken:
                yield "".join(letters)


class _Writer:
    def __init__(
        self,
        inputs: dict[Place, Shape | None],
        outputs: list[Shape | None],
        recipes: list[Recipe],
        others: dict[Place, Any],
    ) -> None:
        self._inputs = inputs
        self._outputs = outputs
        self._recipes = recipes
        self._others = others
        numbers = {argument_place for recipe in recipes for argument_place, _ in recipe.numbers}
        names = _identifiers(
            {str(argument_place) for argument_place in {*inputs, *others, *numbers}}
        )
        # Names are assigned as they are written, so that they appear in alphabetical order.
        self._free = names
        self._given: dict[int, str] = {}
        self._lengths = [self._length(recipe) for recipe in recipes]
        self._suffixes: list[Suffix] = [_common_suffix(recipe) for recipe in recipes]

    def signature(self) -> AnnotationSignature:
        inputs = [
            self._input(argument_place, shape) for argument_place, shape in self._inputs.items()
        ]
        # Keywords come last, as in a call.
        inputs.sort(key=lambda tensor: tensor.keyword is not None)
        outputs = [self._output(at, shape) for at, shape in enumerate(self._outputs)]
        return AnnotationSignature(tuple(inputs), tuple(outputs), tuple(self._numbers()))

    def _length(self, recipe: Recipe) -> int:
        """The largest number of parts that this recipe allows."""
        for argument_place, placement in recipe.inputs:
            shape = self._inputs.get(argument_place)
            if isinstance(placement, Shard) and shape is not None and shape[placement.dim]:
                return shape[placement.dim] // placement.unit
        raise UsageError(
            f"{_title(recipe)} splits no input, which an annotation cannot express; remove it"
        )

    def _input(self, argument_place: Place, shape: Shape | None) -> Tensor:
        roles = [recipe.placement(argument_place) for recipe in self._recipes]
        dims: tuple[Dim, ...] | None = None
        if shape is not None:
            ats = range(len(shape))
            dims = (
                tuple(self._input_dim(roles, at, f"argument {argument_place}") for at in ats)
                or _SCALAR
            )
        controls = [
            Control(mark, self._name(which))
            for which, (recipe, role) in enumerate(zip(self._recipes, roles, strict=True))
            if (mark := _mark(recipe, role)) is not None
        ]
        return Tensor(
            dims, tuple(controls), argument_place if isinstance(argument_place, str) else None
        )

    def _input_dim(self, roles: list[Role], at: int, what: str) -> Dim:
        recipe_and_role = self._splitting(roles, at, what)
        if recipe_and_role is None:
            return self._frozen()
        which, role = recipe_and_role
        factor = DimFactor(self._name(which), self._suffixes[which])
        return _product_dim(factor, role.unit, role.halo)

    def _output(self, at: int, shape: Shape | None) -> Tensor:
        roles = [recipe.outputs[at] for recipe in self._recipes]
        dims: tuple[Dim, ...] | None = None
        if shape is not None:
            sizes = enumerate(shape)
            dims = tuple(self._output_dim(roles, *size, f"output {at}") for size in sizes)
            dims = dims or _SCALAR
        controls = []
        for which, (role, suffix) in enumerate(zip(roles, self._suffixes, strict=True)):
            reduction_suffix: Suffix = role.reduction if isinstance(role, Partial) else ""
            # `?` is replicated, whatever the suffix says.
            usual = "" if shape is None else suffix
            if not isinstance(role, Shard) and reduction_suffix != usual:
                controls.append(Control(reduction_suffix, self._name(which)))
        return Tensor(dims, tuple(controls))

    def _output_dim(self, roles: list[Role], dim: int, length: int, what: str) -> Dim:
        recipe_and_role = self._splitting(roles, dim, what)
        if recipe_and_role is None:
            return self._frozen()
        times, rest = divmod(length, self._lengths[recipe_and_role[0]])
        return _product_dim(DimFactor(self._name(recipe_and_role[0])), 1 if rest else times)

    def _splitting(self, roles: list[Role], dim: int, what: str) -> tuple[int, Shard] | None:
        """The recipe that splits a dimension, and the role of the tensor in it."""
        splitting_roles = [
            (which, role)
            for which, role in enumerate(roles)
            if isinstance(role, Shard) and role.dim == dim
        ]
        if len(splitting_roles) > 1:
            both = " and ".join(_title(self._recipes[which]) for which, _ in splitting_roles[:2])
            raise UsageError(
                f"{both} both split dimension {dim} of {what}, which one annotation cannot "
                "express; remove one"
            )
        return splitting_roles[0] if splitting_roles else None

    def _name(self, which: int) -> str:
        if which not in self._given:
            self._given[which] = next(self._free)
        return self._given[which]

    def _frozen(self) -> Dim:
        return Dim((DimFactor(next(self._free), "^"),))

    def _numbers(self) -> Iterator[Number | Bounds | Members]:
        yield from self._members()
        for which, (recipe, length) in enumerate(zip(self._recipes, self._lengths, strict=True)):
            name = self._name(which)
            ends: dict[str, Place] = {}
            for argument_place, rule in recipe.numbers:
                if isinstance(rule, Group):
                    continue
                if isinstance(rule, Range):
                    ends[rule.end] = argument_place
                    continue
                value: Any = self._others.get(argument_place)
                if rule.item is not None and value is not None:
                    value = value[rule.item]
                times = value // length if isinstance(value, int) and value % length == 0 else 1
                yield Number(argument_place, rule.item, _product_dim(DimFactor(name), times))
            if len(ends) == 1:
                raise UsageError(
                    f"{_title(recipe)} has only one end of a range, but an annotation needs both"
                )
            if ends:
                yield Bounds(ends["begin"], ends["end"], name)

    def _members(self) -> Iterator[Members]:
        """Process groups: one entry for all splits that need the group."""
        joined: dict[Place, list[str]] = {}
        for which, recipe in enumerate(self._recipes):
            for argument_place, rule in recipe.numbers:
                if rule == Group():
                    joined.setdefault(argument_place, []).append(self._name(which))
        yield from (Members(argument_key, tuple(names)) for argument_key, names in joined.items())


def _title(recipe: Recipe) -> str:
    splits = [
        f"argument {argument_place} at {each.dim}"
        for argument_place, each in recipe.inputs
        if isinstance(each, Shard)
    ]
    return f"the recipe `{recipe.words or ', '.join(splits) or 'without a split'}`"


def _common_suffix(recipe: Recipe) -> Suffix:
    """The most frequent reduction of the results; other results get a control."""
    reductions: list[Suffix] = []
    reductions += [each.reduction for each in recipe.outputs if isinstance(each, Partial)]
    return max(reductions, key=reductions.count, default="")


def _product_dim(factor: DimFactor, times: int, halo: tuple[int, int] = (0, 0)) -> Dim:
    return Dim((factor,) if times <= 1 else (factor, DimFactor(str(times))), halo)


def _mark(recipe: Recipe, placement: Role) -> InputMark | None:
    """The mark of an input after the colon."""
    if isinstance(placement, Partial):
        terms = f"terms of a {placement.reduction}"
        raise UsageError(f"{_title(recipe)} takes {terms}, which an annotation cannot express")
    if isinstance(placement, Once):
        return "!"
    if placement == Replicate(own=True):
        return "@"
    return "/" if placement == Replicate(summed=False) else None


# --- Gradients ------------------------------------------------------------------------------------

SEED = 1
# The relative size of the rounding in a gradient that should be zero.
ROUNDING = 1e-13


class GradientTrials:
    """The gradients of an operator for draws of its arguments and random cotangents."""

    def __init__(self, trials: RandomTrials, without: Collection[Place]) -> None:
        self._trials = trials
        self._without = frozenset(without)
        self._cotangents: dict[int, list[torch.Tensor]] = {}
        self._truths: dict[int, Tensors | None] = {}

    def agree(self, cut: TrialCut, ways: list[Role], draw: TrialDraw, ranks: int) -> bool | None:
        """Whether the gradients of the ranks give those of the whole; None if there are none."""
        truth = self._truth(draw)
        if truth is None:
            return None
        leaves = _leaves(draw, truth)
        try:
            with torch.enable_grad():
                results = self._combine_rank_results({**draw.tensors, **leaves}, cut, ways, ranks)
                split_gradients = self._differentiate(results, leaves, draw)
        except Exception:  # noqa: BLE001  (a backward pass that fails does not agree)
            return False
        if split_gradients is None:
            return False
        return all(
            agree(split_gradients[tensor_place], truth[tensor_place], _rounding(draw, tensor_place))
            for tensor_place in truth
        )

    def _combine_rank_results(
        self, tensors: Tensors, cut: TrialCut, ways: list[Role], ranks: int
    ) -> list[torch.Tensor]:
        outcomes = [self._trials.run_rank(tensors, cut, rank, ranks) for rank in range(ranks)]
        parts = zip(*(outcome.tensors for outcome in outcomes), strict=True)
        pairs = zip(ways, parts, strict=True)
        return [join(list(part), way, copies="mean") for way, part in pairs if is_inexact(part[0])]

    def _truth(self, draw: TrialDraw) -> Tensors | None:
        """The gradients of the whole."""
        if id(draw) not in self._truths:
            floating = [
                tensor_place for tensor_place, tensor in draw.tensors.items() if is_inexact(tensor)
            ]
            gradient_places = [
                tensor_place
                for tensor_place in floating
                if argument(tensor_place) not in self._without
            ]
            truth = self._whole(draw, gradient_places)
            if truth is None:  # a running mean, for example, makes all of them fail
                gradient_places = [
                    tensor_place
                    for tensor_place in gradient_places
                    if self._whole(draw, [tensor_place])
                ]
                truth = self._whole(draw, gradient_places)
            self._truths[id(draw)] = truth
        return self._truths[id(draw)]

    def _whole(self, draw: TrialDraw, tensor_places: list[TensorPlace]) -> Tensors | None:
        leaves = _leaves(draw, tensor_places)
        if not leaves:
            return None
        try:
            with torch.enable_grad():
                whole_inputs = {**draw.tensors, **leaves}
                outcome = self._trials.run_whole(whole_inputs)
                results = [result for result in outcome.tensors if is_inexact(result)]
                return self._differentiate(results, leaves, draw)
        except Exception:  # noqa: BLE001  (an operator without a gradient: nothing to compare)
            return None

    def _differentiate(
        self, results: list[torch.Tensor], leaves: Tensors, draw: TrialDraw
    ) -> Tensors | None:
        """Gradients for the cotangents of the draw; None if nothing can be differentiated."""
        if id(draw) not in self._cotangents:
            seed = SEED + len(self._cotangents)
            self._cotangents[id(draw)] = [
                draw_cotangent(nth_output(number), result, seed)
                for number, result in enumerate(results)
            ]
        cotangents = self._cotangents[id(draw)]
        pairs = [
            (result, cotangent)
            for result, cotangent in zip(results, cotangents, strict=True)
            if result.requires_grad
        ]
        if not pairs:
            return None
        gradients = torch.autograd.grad(
            [result for result, _ in pairs],
            list(leaves.values()),
            [cotangent for _, cotangent in pairs],
            allow_unused=True,
        )
        return {
            tensor_place: torch.zeros_like(leaf) if gradient is None else gradient
            for (tensor_place, leaf), gradient in zip(leaves.items(), gradients, strict=True)
        }


def _leaves(draw: TrialDraw, tensor_places: Collection[TensorPlace]) -> Tensors:
    return {
        tensor_position: draw.tensors[tensor_position].detach().requires_grad_()
        for tensor_position in tensor_places
    }


def _rounding(draw: TrialDraw, tensor_place: TensorPlace) -> float:
    """The rounding that a gradient of zero may have: results divided by arguments."""
    size = max(map(_size, draw.whole.tensors))
    argument_size = _size(draw.tensors[tensor_place])
    return ROUNDING * size / argument_size if argument_size else 0.0


def _size(tensor: torch.Tensor) -> float:
    if tensor.numel() == 0 or not is_inexact(tensor):
        return 0.0
    size: float = tensor.detach().abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return size


# --- The search for splits ------------------------------------------------------------------------

# The largest number of cuts to try. An operator with so many equal dimensions needs its own rule.
MOST_CUTS = 4000
MOST_RANKS = 8

Dims = tuple[tuple[TensorPlace, int], ...]
# For each result, the ways that still hold.
Ways = list[list[Role]]


@dataclasses.dataclass(frozen=True)
class SplitClaim:
    """A cut that was right in every trial, with the role of each result."""

    cut: TrialCut
    ways: list[Role]
    backward: bool | None


class Search:
    """The search over one operator's arguments."""

    def __init__(self, trials: RandomTrials, gradients: GradientTrials, ranks: int) -> None:
        self._trials = trials
        self._gradients = gradients
        self._ranks = ranks
        self._shapes = trials.shapes
        self._numbers = trials.subject.numbers()
        # Parts may have to be multiples of these: windows of a pooling, blocks of a shuffle.
        values = {number.value for number in self._numbers}
        self._factors = sorted(values | {value**2 for value in values})

    def claims(self) -> Iterator[SplitClaim]:
        """The smallest sets of dimensions that are split together, then those with a bias.

        A dimension has one identifier, so a dimension of a found set is not tried in another.
        """
        used: set[tuple[TensorPlace, int]] = set()
        terms: list[Dims] = []
        for dims in itertools.islice(_sets(self._shapes, self._ranks), MOST_CUTS):
            if not used.isdisjoint(dims):
                continue
            claim, may_be_terms = self._first_of(dims)
            if claim is not None:
                used.update(dims)
                yield claim
            elif may_be_terms:
                terms.append(dims)
        for dims in terms:
            claim = self._with_once(dims) if used.isdisjoint(dims) else None
            if claim is not None:
                used.update(dims)
                yield claim

    # --- what is tried ----------------------------------------------------------------------------

    def _first_of(self, dims: Dims) -> tuple[SplitClaim | None, bool]:
        """The claim of a set, possibly with the first number that is divided with it.

        If there is none, also whether the results of the ranks have the shape of the whole.
        """
        may_be_terms = False
        for cut in self._cuts(dims):
            claim, whole_sized = self._try(cut)
            if claim is not None:
                return claim, False
            may_be_terms |= whole_sized and cut.number is None
        return None, may_be_terms

    def _cuts(self, dims: Dims) -> Iterator[TrialCut]:
        plain = self._cut(dims, None)
        if plain is not None:
            coarser = (plain.times(factor) for factor in self._factors)
            yield from (
                cut for cut in (plain, *filter(self._is_uneven, coarser)) if self._fits(cut)
            )
        for number in self._numbers:
            cut = self._cut(dims, number)
            if cut is not None and self._fits(cut):
                yield cut

    def _fits(self, cut: TrialCut) -> bool:
        return cut.fits(self._shapes, self._ranks)

    def _is_uneven(self, cut: TrialCut) -> bool:
        """Whether its parts differ from those of a cut into single elements."""
        tensor_place, dim, unit = cut.dims[0]
        return self._shapes[tensor_place][dim] % (unit * self._ranks) != 0

    def _with_once(self, dims: Dims) -> SplitClaim | None:
        """A sum to which every rank adds too much: an argument such as a bias must count once."""
        split = {tensor_place for tensor_place, _ in dims}
        unsplit_places = [
            tensor_place
            for tensor_place, tensor in self._trials.first.tensors.items()
            if tensor_place not in split
            and tensor.is_floating_point()
            and argument(tensor_place) == tensor_place
        ]
        plain = self._cut(dims, None)
        if plain is None:
            return None
        choices = [(tensor_place,) for tensor_place in unsplit_places] + (
            [tuple(unsplit_places)] if len(unsplit_places) > 1 else []
        )
        tried = (self._try(plain._replace(once=once))[0] for once in choices)
        return next((claim for claim in tried if claim is not None), None)

    def _cut(self, dims: Dims, number: DividedNumber | None) -> TrialCut | None:
        sizes = tuple(self._shapes[tensor_place][dim] for tensor_place, dim in dims)
        units = common_units(sizes, number)
        if units is None:
            return None
        by_argument = {
            (argument(tensor_place), unit)
            for (tensor_place, _), unit in zip(dims, units, strict=True)
        }
        if len(by_argument) > len({argument(tensor_place) for tensor_place, _ in dims}):
            return None  # a recipe has one unit for all items of a list
        pairs = zip(dims, units, strict=True)
        return TrialCut(
            tuple((tensor_place, dim, unit) for (tensor_place, dim), unit in pairs), number
        )

    def _try(self, cut: TrialCut) -> tuple[SplitClaim | None, bool]:
        tried = self._trials.attempt(cut, self._trials.first, self._ranks)
        claim = None if tried.ways is None else self._confirm(cut, tried.ways)
        return claim, tried.whole_sized

    # --- what is claimed --------------------------------------------------------------------------

    def _confirm(self, cut: TrialCut, ways: Ways) -> SplitClaim | None:
        """Try a cut with other values, other numbers of ranks, and backward."""
        second = self._trials.second
        narrowed_ways = self._narrow_ways(cut, ways, second, self._ranks)
        if self._trials.given is not self._trials.first:
            narrowed_ways = self._narrow_ways(cut, narrowed_ways, self._trials.given, self._ranks)
        for coarser in self._coarser(cut):
            others = self._other_ranks(coarser)
            confirmed = narrowed_ways
            for ranks in others:
                confirmed = self._narrow_ways(coarser, confirmed, second, ranks)
            if confirmed is None:
                continue
            chosen = self._settle_ways(coarser, confirmed)
            if chosen is None:
                return None
            last = others[0] if others else self._ranks
            backward = self._gradients.agree(coarser, chosen, self._trials.first, self._ranks)
            if backward:
                backward = self._gradients.agree(coarser, chosen, second, last)
            return SplitClaim(coarser, chosen, backward)
        return None

    def _narrow_ways(
        self, cut: TrialCut, ways: Ways | None, draw: TrialDraw, ranks: int
    ) -> Ways | None:
        """The ways that are right for this draw too; None if none is left for some result."""
        attempted_ways = None if ways is None else self._trials.attempt(cut, draw, ranks).ways
        if ways is None or attempted_ways is None:
            return None
        remaining_ways = [
            [way for way in old if way in new]
            for old, new in zip(ways, attempted_ways, strict=True)
        ]
        return remaining_ways if all(remaining_ways) else None

    def _settle_ways(self, cut: TrialCut, ways: Ways) -> list[Role] | None:
        """One way for each result; if several are left, further draws decide."""
        draws: list[TrialDraw] = []
        if any(not isinstance(way, Shard) for options in ways for way in options):
            draws += self._trials.recounted
        undecided = any(len(options) > 1 or Replicate() in options for options in ways)
        if undecided or self._trials.second.is_constant:
            draws += self._trials.shades
        remaining_ways: Ways | None = ways
        for draw in draws:
            remaining_ways = self._narrow_ways(cut, remaining_ways, draw, self._ranks)
        # Equal results on all ranks also agree with every reduction except the sum.
        if remaining_ways is None or any(
            len(options) > 1 and Replicate() not in options for options in remaining_ways
        ):
            return None
        return [options[0] for options in remaining_ways]

    def _coarser(self, cut: TrialCut) -> Iterator[TrialCut]:
        """The cut, then the same with larger units: half of a view may be whole rows."""
        yield cut
        units = self._units(cut)
        if cut.number is not None or units % self._ranks:
            return
        each = units // self._ranks
        for factor in range(2, each + 1):
            if each % factor == 0:
                yield cut.times(factor)

    def _other_ranks(self, cut: TrialCut) -> list[int]:
        """Other numbers of ranks that divide it evenly, 3 before 2."""
        units = self._units(cut)
        possible = [ranks for ranks in (*range(3, MOST_RANKS + 1), 2) if units % ranks == 0]
        return [
            ranks for ranks in possible if ranks != self._ranks and cut.fits(self._shapes, ranks)
        ]

    def _units(self, cut: TrialCut) -> int:
        tensor_place, dim, unit = cut.dims[0]
        return self._shapes[tensor_place][dim] // unit


def _sets(shapes: Mapping[TensorPlace, torch.Size], ranks: int) -> Iterator[Dims]:
    """Sets of dimensions, at most one of each argument; those of equal length come first."""
    arguments: dict[Place, list[TensorPlace]] = {}
    for shape in shapes:
        arguments.setdefault(argument(shape), []).append(shape)
    dims = {
        name: [
            tuple((position, dim) for position in places)  # all items of a list are split
            for dim in range(min(len(shapes[position]) for position in places))
            if all(shapes[position][dim] >= ranks for position in places)
        ]
        for name, places in arguments.items()
    }
    unequal: list[Dims] = []
    for count in range(1, len(dims) + 1):
        for names in itertools.combinations(dims, count):
            for chosen in itertools.product(*(dims[name] for name in names)):
                joined_dims = tuple(itertools.chain(*chosen))
                if len({shapes[tensor_place][dim] for tensor_place, dim in joined_dims}) == 1:
                    yield joined_dims
                elif len(unequal) < MOST_CUTS:
                    unequal.append(joined_dims)
    yield from unequal


# --- Descriptions of splits -----------------------------------------------------------------------


def write_annotations(
    subject: TrialSubject, results: Sequence[torch.Tensor], recipes: Sequence[Recipe]
) -> list[str]:
    """For each recipe one annotation for all, or if there is none, one of its own.

    An annotation cannot express two splits of one dimension, and some splits not at all; those are
    described in words.
    """
    try:
        return [_annotation(subject, results, recipes)] * len(recipes)
    except UsageError:
        return [_annotate_alone(subject, results, recipe) for recipe in recipes]


def _annotate_alone(subject: TrialSubject, results: Sequence[torch.Tensor], recipe: Recipe) -> str:
    try:
        return _annotation(subject, results, [recipe])
    except UsageError:
        return recipe.words


def _annotation(
    subject: TrialSubject, results: Sequence[torch.Tensor], recipes: Sequence[Recipe]
) -> str:
    call_arguments = subject.arguments_by_place()
    tensors = subject.tensors()
    inputs: dict[Place, tuple[int, ...] | None] = {
        argument_place: tuple(tensors[argument_place].shape) if argument_place in tensors else None
        for argument_place in call_arguments
        if isinstance(argument_place, int) or argument_place in tensors
    }
    others = {
        argument_place: value
        for argument_place, value in call_arguments.items()
        if argument_place not in tensors
    }
    return annotation_text(
        inputs, [tuple(result_tensor.shape) for result_tensor in results], recipes, others
    )


def cut_words(cut: TrialCut, ways: list[Role]) -> str:
    """A description: what is split, what changes with it, and how results are joined."""
    dims = dict.fromkeys((argument(tensor_place), dim) for tensor_place, dim, _ in cut.dims)
    split = [f"dim {dim} of {_place_words(argument_place)}" for argument_place, dim in dims]
    once = [f"{_place_words(argument(tensor_place))} once" for tensor_place in cut.once]
    divided = []
    if cut.number is not None:
        item = "" if cut.number.item is None else f"[{cut.number.item}]"
        divided = [f"{_place_words(cut.number.place)}{item} divided"]
    parts = ", ".join([" and ".join(split), *once, *divided])
    return f"{parts} -> {', '.join(map(_way_words, ways))}"


def _way_words(way: Role) -> str:
    if isinstance(way, Shard):
        return f"concat {way.dim}"
    return way.reduction if isinstance(way, Partial) else "same"


def _place_words(argument_place: Place) -> str:
    return f"args[{argument_place}]" if isinstance(argument_place, int) else argument_place


# --- The discovery --------------------------------------------------------------------------------

# Discovery cuts every dimension of every argument, alone or together with dimensions of others, and
# runs the operator on the parts in float64. It joins the results in all possible ways. A way that
# gives the whole is tried again with other random values, other numbers of ranks and random
# cotangents. Only splits that are always right are claimed, for arguments of these shapes.


@dataclasses.dataclass(frozen=True)
class Discovered:
    """A split of an operator that was right in every trial.

    Attributes:
        annotation: one annotation for all splits that were found, or if there is none, for this
            one, or a description.
        forward: whether the results agreed.
        backward: whether the gradients agreed; None if the operator has none.
    """

    recipe: Recipe
    annotation: str
    forward: bool
    backward: bool | None


def discover_partitions(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: int = 2,
    name: str = "",
    without_gradient: Collection[Place] = (),
) -> list[Discovered]:
    """Find all splits of one identifier: the dimensions that are split together, and the results.

    The tensors of a list are split in the same way; more deeply nested ones are replicated. Numbers
    that change with a split (sizes of a view, heads, groups) are found too. Nothing is found for an
    operator that draws random numbers.

    Args:
        ranks: number of ranks; other numbers confirm a split if the sizes allow them.
        name: name of the operator for descriptions.
        without_gradient: arguments that need no gradient.

    Raises:
        UsageError: the operator fails on these arguments.
    """
    if ranks < 2:  # noqa: PLR2004
        raise UsageError(f"the number of ranks must be 2 or more, got {ranks!r}")
    subject = TrialSubject(function, tuple(args), dict(kwargs or {}))
    if not subject.tensors():
        return []
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _calm():
        trials = RandomTrials(subject)
        tensors = trials.first.whole.tensors
        if not tensors or not all(map(is_comparable, tensors)):
            return []
        search = Search(trials, GradientTrials(trials, without_gradient), ranks)
        claims = list(search.claims())
    recipes = [_recipe_of(name, claim) for claim in claims]
    texts = write_annotations(subject, tensors, recipes)
    return [
        Discovered(recipe, text, forward=True, backward=claim.backward)
        for recipe, text, claim in zip(recipes, texts, claims, strict=True)
    ]


def _recipe_of(name: str, claim: SplitClaim) -> Recipe:
    split_by = cut_words(claim.cut, claim.ways)
    words = f"{name}: split by {split_by}" if name else f"split by {split_by}"
    return Recipe(
        claim.cut.placements(), tuple(claim.ways), claim.cut.numbers(), words, identifier=split_by
    )


def discover_splits(call: OperatorCall, ranks: int) -> list[Discovered]:
    """Like `discover_partitions`, for a call."""
    return discover_partitions(
        call.function,
        call.args,
        call.kwargs,
        ranks=ranks,
        name=call.name,
        without_gradient=call.without_gradient,
    )


@contextlib.contextmanager
def _calm() -> Iterator[None]:
    """Suppress warnings about wrong cuts, and use the attention that checks its sizes.

    torch's fused attention on CPUs does not check them, and some sizes crash the process.
    """
    with quietly(), sdpa_kernel(SDPBackend.MATH):
        yield
