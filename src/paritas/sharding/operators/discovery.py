"""Find the valid splits of an operator by running it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from paritas.core.errors import UsageError
from paritas.core.placement.placement import Recipe
from paritas.core.results.items import Partial, Role, Shard
from paritas.core.torch_private.global_state import quietly
from paritas.sharding.operators.recipe_annotations import annotation_text
from paritas.sharding.operators.split_search import GradientTrials, Search, SplitClaim
from paritas.sharding.operators.trials import (
    RandomTrials,
    TrialCut,
    TrialSubject,
    argument,
    is_comparable,
)

if TYPE_CHECKING:
    from paritas.core.operators.calls import OperatorCall, Place


# --- The discovery --------------------------------------------------------------------------------

# Discovery cuts every dimension of every argument, alone or together with dimensions of others, and
# runs the operator on the parts in float64. It joins the results in all possible ways. A way that
# gives the whole is tried again with other random values, other numbers of ranks and random
# cotangents. Only splits that are always right are claimed, for arguments of these shapes.


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


def _recipe_of(name: str, claim: SplitClaim) -> Recipe:
    split_by = cut_words(claim.cut, claim.ways)
    words = f"{name}: split by {split_by}" if name else f"split by {split_by}"
    return Recipe(
        claim.cut.placements(), tuple(claim.ways), claim.cut.numbers(), words, identifier=split_by
    )


@contextlib.contextmanager
def _calm() -> Iterator[None]:
    """Suppress warnings about wrong cuts, and use the attention that checks its sizes.

    torch's fused attention on CPUs does not check them, and some sizes crash the process.
    """
    with quietly(), sdpa_kernel(SDPBackend.MATH):
        yield


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
