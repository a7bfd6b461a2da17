"""The text of a script that shows a failure: the operator whole, and split with every step written.

Nothing of paritas is in it. What each rank is given, and how the results become one, stands there
line by line, so that a reader sees the rule that is wrong.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas.graphs.scripts.fixed_text import BODY, JUDGING, JUDGING_NATIVE, LOADER, MAIN
from paritas.graphs.scripts.storing import taken_back
from paritas.graphs.scripts.values import NoScriptError, drawn, function_text, literal
from paritas.partition.recipes import Concat, Once, Partial, Reduce, Same, Split, Whole
from paritas.partition.running.placing import Terms, bounds, name_of, split_values, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.partition.recipes import Combine, OperatorCall, Place, Recipe

__all__ = ["Facts", "script_text"]

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """One failure, with all that a script tells of it and does.

    Attributes:
        operator: as the graph names it.
        call: the operator and its arguments.
        recipe: how it was split.
        ranks: over how many ranks.
        heading: what the script says of itself, line by line.
        written: arguments that the operator writes to.
        native: in the dtypes of the call; otherwise in float64, where rounding excuses nothing.
        stored: name of the file that holds the arguments; empty if they are drawn.
        seed: of what is drawn.
        imports: modules of yours that bring operators.
    """

    operator: str
    call: OperatorCall
    recipe: Recipe
    ranks: int
    heading: tuple[str, ...]
    written: tuple[Place, ...] = ()
    native: bool = False
    stored: str = ""
    seed: int = 0
    imports: tuple[str, ...] = ()

    @property
    def values(self) -> dict[Place, Any]:
        """Arguments by position and by name."""
        return dict([*enumerate(self.call.args), *self.call.kwargs.items()])


def script_text(facts: Facts) -> str:
    """The whole script.

    Raises:
        NoScriptError: an argument, the function or the rule cannot be written so.
    """
    lines, module = function_text(facts.operator, facts.call.function, facts.imports)
    needs = ["", f"It imports {module}: run it where that can be found."] if module else []
    heading = "\n".join((*facts.heading, *needs)).replace("\\", "\\\\").replace('"""', "'''")
    path = ['sys.path.insert(0, "")'] if module else []
    parts = [
        f'"""{heading}\n"""',
        "",
        *(["import json", "import struct"] if facts.stored else []),
        "import sys",
        *(["from pathlib import Path"] if facts.stored else []),
        "",
        "import torch",
        "",
        *path,
        *lines,
        "",
        f"RANKS = {facts.ranks}",
        f"DTYPE = {_dtype_words(facts)}",
        *(LOADER.format(name=facts.stored).splitlines() if facts.stored else []),
        "",
        "",
        *_arguments(facts),
        "",
        "",
        *_ranks(facts),
        "",
        "",
        *_together(facts),
        BODY,
        JUDGING_NATIVE if facts.native else JUDGING,
        MAIN.format(asked=_asked(facts), claimed=_claimed(facts)),
    ]
    return "\n".join(parts) + "\n"


def _dtype_words(facts: Facts) -> str:
    return "None  # as the arguments are" if facts.native else "torch.float64"


# --- what the operator is given -------------------------------------------------------------------


def _arguments(facts: Facts) -> Iterator[str]:
    yield "def arguments(wide):"
    yield '    """What the operator is given, by position and by name."""'
    if facts.stored:
        yield "    stored = load()"
    else:
        yield f"    generator = torch.Generator().manual_seed({facts.seed})"
    yield "    given = {}"
    seen: dict[int, str] = {}
    for place, value in facts.values.items():
        yield f"    given[{place!r}] = {_argument(facts, value, place, seen)}"
    yield "    return {place: lifted(value, wide) for place, value in given.items()}"
    yield ""
    yield ""
    yield "def lifted(value, wide):"
    yield "    if isinstance(value, (list, tuple)):"
    yield "        return type(value)(lifted(item, wide) for item in value)"
    yield "    if isinstance(value, torch.dtype):"
    yield "        return WIDE.get(value, value) if wide else value"
    yield "    if not isinstance(value, torch.Tensor) or not wide:"
    yield "        return value"
    yield "    return value.to(WIDE.get(value.dtype, value.dtype))"
    yield ""
    yield ""
    yield "WIDE = {"
    for narrow, wide in _WIDE.items():
        yield f"    {narrow}: {wide},"
    yield "}"


def _argument(facts: Facts, value: Any, place: Place, seen: dict[int, str]) -> str:
    if not tensors_in(value):
        return literal(value)
    return _tensor(facts, value, name_of(place), f"given[{place!r}]", seen)


def _tensor(facts: Facts, value: Any, name: str, here: str, seen: dict[int, str]) -> str:
    if isinstance(value, list | tuple):
        items = [_tensor(facts, item, f"{name}[{at}]", "", seen) for at, item in enumerate(value)]
        inside = ", ".join(items)
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)"
    if not isinstance(value, torch.Tensor):
        return literal(value)
    if id(value) in seen:  # the same tensor twice
        return f"{seen[id(value)]}.clone()"
    if here:
        seen[id(value)] = here
    if facts.stored:
        return taken_back(f"stored[{name!r}]", value.dtype)
    return drawn(value, value.dtype)


def _asked(facts: Facts) -> tuple[Place, ...]:
    """Arguments of which a gradient is asked."""
    return tuple(
        place
        for place, value in facts.values.items()
        if place not in facts.call.without_gradient
        and any(one.is_floating_point() or one.is_complex() for one in tensors_in(value))
    )


def _claimed(facts: Facts) -> tuple[Place, ...]:
    """Of these, those whose gradient each rank claims to have already."""
    found = []
    for place in _asked(facts):
        placement = facts.recipe.placement(place)
        if isinstance(placement, Whole) and not placement.summed:
            found.append(place)
    return tuple(found)


# --- what each rank is given ----------------------------------------------------------------------


def _ranks(facts: Facts) -> Iterator[str]:
    yield "def rank_arguments(given):"
    yield '    """What each of the ranks is given."""'
    yield "    ranks = [dict(given) for _ in range(RANKS)]"
    for place, placement in facts.recipe.inputs:
        value = facts.values[place]
        if not tensors_in(value) or placement in (Whole(), Whole(own=True)):
            continue
        yield f"    # {name_of(place)}: {_placement_words(placement)}"
        for rank in range(facts.ranks):
            part = _part(value, placement, f"given[{place!r}]", rank, facts.ranks)
            yield f"    ranks[{rank}][{place!r}] = {part}"
    yield from _numbers(facts)
    yield "    return ranks"


def _numbers(facts: Facts) -> Iterator[str]:
    """Arguments that go with the split, as each rank has them."""
    if facts.recipe.exchanges:
        raise NoScriptError("ranks that exchange something are not written into scripts")
    places = [place for place, _ in facts.recipe.numbers]
    if not places:
        return
    # Drawn terms of partial arguments are of no interest here.
    each = split_values(facts.values, facts.recipe, facts.ranks, Terms(facts.seed, lifted=False))
    for place in places:
        yield f"    # {name_of(place)} goes with the split"
        for rank, mine in enumerate(each):
            yield f"    ranks[{rank}][{place!r}] = {literal(mine[place])}"


def _placement_words(placement: Any) -> str:
    match placement:
        case Split(dim=dim, unit=1, halo=(0, 0)):
            return f"split along dimension {dim}"
        case Split(dim=dim, unit=unit, halo=halo):
            return f"split along dimension {dim}, in units of {unit}, with a halo of {halo}"
        case Whole():
            return "whole on each rank, whose gradient is claimed to be the whole's"
        case Once():
            return "one rank has it, the others zeros"
        case _:
            return f"each rank has a term of its {placement.reduction}"


def _part(value: Any, placement: Any, path: str, rank: int, ranks: int) -> str:
    if isinstance(value, list | tuple):
        items = [
            _part(one, placement, f"{path}[{at}]", rank, ranks) for at, one in enumerate(value)
        ]
        inside = ", ".join(items)
        return f"[{inside}]" if isinstance(value, list) else f"({inside},)"
    if not isinstance(value, torch.Tensor):
        return path
    match placement:
        case Split(dim=dim, unit=unit, halo=(before, after)):
            axis = dim % max(value.dim(), 1)
            size = value.shape[axis]
            begin, end = bounds(size, unit, ranks, path)[rank]
            begin, end = max(0, begin - before), min(size, end + after)
            return f"{path}.narrow({axis}, {begin}, {end - begin})"
        case Whole():
            return f"weighted({path}, {_weights(ranks)[rank]})"
        case Once():
            return path if rank == 0 else f"torch.zeros_like({path})"
        case Partial(reduction="sum" | "avg"):
            by = 1 if placement.reduction == "sum" else ranks
            return f"{path} * {_weights(ranks)[rank] * by}"
    raise NoScriptError(f"terms of a {placement.reduction} are not written into scripts")


def _weights(ranks: int) -> list[float]:
    """Unlike one another, of both signs; their sum is 1."""
    rest = [-0.5 if rank % 2 else 0.25 for rank in range(1, ranks)]
    return [1 - sum(rest), *rest]


# --- how the results become one -------------------------------------------------------------------


def _together(facts: Facts) -> Iterator[str]:
    yield "def together(results, written, full):"
    yield '    """What the results of the ranks are, put together as the rule says."""'
    yield f"    if any(len(result) != {len(facts.recipe.outputs)} for result in results):"
    told = f"the rule tells of {len(facts.recipe.outputs)} results"
    yield f'        raise ValueError("{told}, a rank gives " + str(len(results[0])))'
    yield "    found = {}"
    for at, combine in enumerate(facts.recipe.outputs):
        parts = f"[result[{at}] for result in results]"
        yield f"    found['output[{at}]'] = {_combined(combine, parts)}"
    for place in facts.written:
        rule = _written_rule(facts.recipe.placement(place))
        if rule is not None:
            parts = f"[mine[{place!r}] for mine in written]"
            yield f"    found[{name_of(place) + ' after the call'!r}] = {_combined(rule, parts)}"
    yield "    return found"
    yield ""
    yield ""
    yield f"WEIGHTS = {_weights(facts.ranks)}  # their sum is 1"
    yield f"WRITTEN = {facts.written!r}"


def _combined(combine: Combine, parts: str) -> str:
    match combine:
        case Concat(dim=dim):
            return f"torch.cat({parts}, dim={dim})"
        case Same():
            return f"same({parts}, full)"
        case Reduce(reduction="sum"):
            return f"torch.stack({parts}).sum(dim=0)"
        case Reduce(reduction="avg"):
            return f"torch.stack({parts}).mean(dim=0)"
        case Reduce(reduction="product"):
            return f"torch.stack({parts}).prod(dim=0)"
        case Reduce(reduction=reduction):
            return f"torch.stack({parts}).a{reduction}(dim=0)"


def _written_rule(placement: Any) -> Combine | None:
    match placement:
        case Split(dim=dim, halo=(0, 0)):
            return Concat(dim)
        case Whole(own=False):
            return Same()
    return None
