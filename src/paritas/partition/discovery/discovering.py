"""Which ways there are to split an operator, found by running it.

Every dimension of every argument is cut, alone or together with dimensions of the others, and the
operator is run on the parts in float64. What the ranks give is put together in each way there is;
a way that gives the whole is tried again on other random values, with other numbers of ranks, and
with random cotangents. Only what held every time is claimed, for arguments of these shapes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from paritas._torch.quiet import quietly
from paritas.errors import UsageError
from paritas.partition.discovery.combines import is_telling
from paritas.partition.discovery.cuts import Subject
from paritas.partition.discovery.gradients import Gradients
from paritas.partition.discovery.search import Search
from paritas.partition.discovery.trials import Bench
from paritas.partition.discovery.wording import cut_words, write_annotations
from paritas.partition.recipes import Place, Recipe

__all__ = ["Discovered", "discover_partitions"]


@dataclasses.dataclass(frozen=True)
class Discovered:
    """A way to split an operator that held in every trial.

    Attributes:
        annotation: all ways that were found together, written as one annotation; where there is
            none that says it, this one in words.
        forward: whether the results agreed.
        backward: whether the gradients did; None where the operator has none.
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
    """Find every split of one identifier: the dimensions that go together, and what becomes of it.

    The tensors of a list are split alike; those deeper inside are given whole. Numbers that go with
    a split (a size of a view, heads, groups) are found; all other arguments are left as they are.
    Nothing can be confirmed of an operator that draws random numbers.

    Args:
        ranks: over how many ranks; other numbers confirm it where the sizes allow.
        name: what the operator is called, for people.
        without_gradient: arguments of which no gradient is asked.

    Raises:
        UsageError: the operator fails on these very arguments.
    """
    if ranks < 2:  # noqa: PLR2004
        raise UsageError(f"ranks={ranks!r}: a split takes at least 2 ranks")
    subject = Subject(function, tuple(args), dict(kwargs or {}))
    if not subject.tensors():
        return []
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _calm():
        bench = Bench(subject)
        whole = bench.first.whole.tensors
        if not whole or not all(map(is_telling, whole)):
            return []
        search = Search(bench, Gradients(bench, without_gradient), ranks)
        claims = list(search.claims())
    recipes = [
        Recipe(
            claim.cut.placements(),
            tuple(claim.ways),
            claim.cut.numbers(),
            words=cut_words(name, claim.cut, claim.ways),
        )
        for claim in claims
    ]
    texts = write_annotations(subject, whole, recipes)
    return [
        Discovered(recipe, text, forward=True, backward=claim.backward)
        for recipe, text, claim in zip(recipes, texts, claims, strict=True)
    ]


@contextlib.contextmanager
def _calm() -> Iterator[None]:
    """No warnings about cuts that make no sense, and attention by products that refuse these.

    torch's fused attention on CPUs does not look at its sizes: some of them end the process.
    """
    with quietly(), sdpa_kernel(SDPBackend.MATH):
        yield
