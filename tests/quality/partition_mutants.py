"""Rules of the library, changed at random: most of them are then wrong, some are still right."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import TYPE_CHECKING, NamedTuple

from paritas.core.errors import UsageError
from paritas.sharding.operators.annotation import Annotation, Option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas.core.operators.calls import OperatorCall
    from paritas.core.placement.placement import Recipe

_SUFFIXES = ("", "+", "+avg", "+max", "+min", "+product")
_REDUCTIONS = {"avg", "max", "min", "product"}
_NAME = re.compile(r"(?<![\w=!@/\[+])([a-z]\w*)")


class MutatedRule(NamedTuple):
    call: OperatorCall
    annotation: Annotation
    option: Option
    recipe: Recipe


def _names(text: str) -> list[str]:
    return [name for name in dict.fromkeys(_NAME.findall(text)) if name not in _REDUCTIONS]


def _replaced(text: str, old: str, new: str) -> str:
    return re.sub(rf"(?<![\w+]){re.escape(old)}(?!\w)", new, text)


def _suffix(inputs: str, outputs: str, draw: random.Random) -> tuple[str, str] | None:
    name, suffix = draw.choice(_names(inputs + outputs)), draw.choice(_SUFFIXES)
    own = rf"(?<![\w+]){name}(\+\w*|\^)?(?=[ ,)~]|$)"
    return re.sub(own, name + suffix, inputs), outputs


def _thaw(inputs: str, outputs: str, draw: random.Random) -> tuple[str, str] | None:
    del draw
    return inputs.replace("^", ""), outputs.replace("^", "")


def _swap(part: str, draw: random.Random) -> str | None:
    tensors = part.split(",")
    at = draw.randrange(len(tensors))
    dims = tensors[at].split()
    if len(dims) < 2 or ":" in dims or "(" in tensors[at]:
        return None
    i, j = draw.sample(range(len(dims)), 2)
    dims[i], dims[j] = dims[j], dims[i]
    tensors[at] = f" {' '.join(dims)} "
    return ",".join(tensors)


def _swap_inside(inputs: str, outputs: str, draw: random.Random) -> tuple[str, str] | None:
    swapped = _swap(inputs, draw)
    return None if swapped is None else (swapped, outputs)


def _swap_outside(inputs: str, outputs: str, draw: random.Random) -> tuple[str, str] | None:
    swapped = _swap(outputs, draw)
    return None if swapped is None else (inputs, swapped)


def _rename(inputs: str, outputs: str, draw: random.Random) -> tuple[str, str] | None:
    names = _names(inputs + outputs)
    tensors = inputs.split(",")
    at = draw.randrange(len(tensors))
    tensors[at] = _replaced(tensors[at], draw.choice(names), draw.choice(names))
    return ",".join(tensors), outputs


def _rename_outside(inputs: str, outputs: str, draw: random.Random) -> tuple[str, str] | None:
    names = _names(inputs + outputs)
    return inputs, _replaced(outputs, draw.choice(names), draw.choice([*names, "1", "zz"]))


def _drop_marks(inputs: str, outputs: str, draw: random.Random) -> tuple[str, str] | None:
    del draw
    return re.sub(r": *((!\w+ *)+|@\w+)", "", inputs), outputs


def _add_mark(inputs: str, outputs: str, draw: random.Random) -> tuple[str, str] | None:
    tensors = inputs.split(",")
    at = draw.randrange(len(tensors))
    if "?" in tensors[at] or ":" in tensors[at]:
        return None
    mark = f"{draw.choice('!/')}{draw.choice(_names(inputs + outputs))}"
    tensors[at] = f"{tensors[at].rstrip()} : {mark} "
    return ",".join(tensors), outputs


_KINDS: tuple[Callable[[str, str, random.Random], tuple[str, str] | None], ...] = (
    _suffix,
    _suffix,
    _thaw,
    _swap_inside,
    _swap_outside,
    _rename,
    _rename_outside,
    _drop_marks,
    _add_mark,
)


def mutated(text: str, draw: random.Random) -> str | None:
    """The text of a rule with one change; None if the change does not apply."""
    inputs, _, rest = text.partition("->")
    outputs, semicolon, numbers = rest.partition(";")
    if not _names(inputs + outputs):
        return None
    if semicolon and draw.random() < 0.2:
        return f"{inputs}->{outputs}"
    changed = draw.choice(_KINDS)(inputs, outputs, draw)
    return None if changed is None else f"{changed[0]}->{changed[1]}{semicolon}{numbers}"


def mutants(
    names: list[str],
    calls_of: Callable[[str], Iterator[tuple[OperatorCall, Annotation]]],
    seed: int,
    ranks: int = 2,
) -> Iterator[MutatedRule]:
    """Changed rules of operators drawn at random, without end."""
    draw = random.Random(seed)
    while True:
        call, annotation = draw.choice(list(calls_of(draw.choice(names))))
        text = mutated(annotation.text, draw)
        try:
            changed = Annotation.parse(text) if text else annotation
            options = [] if changed.text == annotation.text else changed.options(call)
            if not options:
                continue
            option = dataclasses.replace(draw.choice(options), num=ranks)
            yield MutatedRule(call, changed, option, changed.recipe(call, option))
        except UsageError:
            continue
