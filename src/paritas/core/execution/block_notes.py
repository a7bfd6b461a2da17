"""What a check by blocks notes: which blocks were cut out, and texts that several pieces share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.core.results.wording import count_things, list_first

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_MOST_NAMED = 3


def describe_cut(cut: Sequence[str], uncut: Mapping[str, str]) -> Iterator[str]:
    """Which blocks were checked alone, and which modules with what lies between them.

    Args:
        cut: the blocks that were cut out.
        uncut: block -> why the model cannot be cut there.
    """
    yield (
        f"checked by blocks: {count_things(len(cut), 'block')} ({name_blocks(cut)}), "
        "what lies between them, and the whole model natively"
    )
    yield from describe_uncut(uncut, "checked with")


def name_blocks(names: Sequence[str]) -> str:
    """The first few blocks by name."""
    return list_first(names, _MOST_NAMED)


def describe_uncut(uncut: Mapping[str, str], treatment: str) -> Iterator[str]:
    """The modules at which the model cannot be cut, and why for the first of them."""
    if uncut:
        name, why = next(iter(uncut.items()))
        count = count_things(len(uncut), "module")
        yield f"{count} {treatment} what lies between the blocks: {name}: {why}"


def label_texts(texts: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Each text once, with the pieces that it is about."""
    for text, labels in texts.items():
        others = f" and {count_things(len(labels) - 1, 'other piece')}" if len(labels) > 1 else ""
        yield f"{labels[0]}{others}: {text}"
