"""Which values of two dumps belong together: modules, selections, and the list of all pairs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paritas.comparison.matching import (
    align_graphs,
    match_ids,
    match_nodes,
    match_prefixed,
    match_renamed,
    skip_rewritten,
)
from paritas.comparison.module_pairing import match_modules
from paritas.comparison.operands import NearestNames, OperandLinks, Pair
from paritas.comparison.ordering import match_order
from paritas.comparison.rules import span_text
from paritas.comparison.selections import RecordedSelection, leave_out_unselected, note_unselected

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paritas.comparison.operands import MatchItem, Operand
    from paritas.comparison.rules import Rules

    # Step, rank and number on the golden side, then the number on mine.
    Place = tuple[int, int, int, int, int]


# Each of these is tried on what the previous ones have left:
#
# 1. the user's rename rules;
# 2. the canonical name;
# 3. the node of a captured graph that computed the value, for fused code and graph engines;
# 4. the module and the operator, for eager code against graphs, and names with a prefix;
# 5. the weights and values of a call;
# 6. order and shape, between what is matched by then.
#
# Before the last one, values that the other dump did not select are set aside: they have no
# counterpart to guess.
#
# Values that are not values of the program, or are compared elsewhere, are left out and counted.
# What remains has no counterpart, and gets the most similar names.


def match(
    my: Sequence[Operand],
    golden: Sequence[Operand],
    rules: Rules,
    steps: Mapping[int, int],
    selections: tuple[RecordedSelection, RecordedSelection] = (
        RecordedSelection(),
        RecordedSelection(),
    ),
) -> Matches:
    """Match the operands of two dumps.

    Args:
        my: in program order.
        golden: in program order.
        rules: the user's rules.
        steps: my steps, and the golden steps they match.
        selections: the recorded selections of my dump and the golden one.
    """
    operand_links = OperandLinks(my, golden, steps)
    _leave_out(operand_links, rules)
    match_renamed(operand_links, rules.renamings)
    match_ids(operand_links)
    align_graphs(operand_links)
    match_nodes(operand_links)
    leave_out_unselected(operand_links, *selections, of_graphs=True)
    skip_rewritten(operand_links)
    match_modules(operand_links)
    match_prefixed(operand_links)
    leave_out_unselected(operand_links, *selections)
    match_order(operand_links)
    alone = [
        Pair(item.operand, None, "") if item.mine else Pair(None, item.operand, "")
        for item, _ in operand_links.unselected
    ]
    notes = [*operand_links.notes, *note_unselected(operand_links)]
    return Matches(
        _make_pairs(operand_links, steps), operand_links.describe_skipped(), alone, notes
    )


@dataclasses.dataclass(frozen=True)
class Matches:
    """The result of matching.

    Attributes:
        pairs: in the program order of the golden side. A value that only my side has follows its
            predecessor in mine. An operand may be in several pairs: a kernel that reads a value is
            compared with the node that computed it.
        skipped: why values were left out, with counts.
        not_selected: values that the other dump's selection excludes.
        notes: for the user.
    """

    pairs: list[Pair]
    skipped: list[str]
    not_selected: list[Pair]
    notes: list[str]


def _leave_out(operand_links: OperandLinks, rules: Rules) -> None:
    for whose, items in (("my", operand_links.my), ("the golden", operand_links.golden)):
        unselected = span_text({item.operand.step for item in items if item.scope is None})
        for item in items:
            if rules.ignores(item.record.id, item.site.module):
                operand_links.skip(item, "value", f"of {whose} dump, ignored as requested")
            elif item.scope is None and rules.steps:
                operand_links.skip(
                    item, "value", f"of {whose} dump in unselected steps {unselected}"
                )


def _make_pairs(operand_links: OperandLinks, steps: Mapping[int, int]) -> list[Pair]:
    """All pairs, in program order."""
    placed: list[tuple[Place, Pair]] = []
    homes: dict[int, Place] = {
        id(link.my): _order_key(link.golden) for link in operand_links.links if link.is_home
    }
    # For each of my items, the golden position of the last matched item before it.
    behind: dict[int, Place] = {}
    at: dict[tuple[int, int], Place] = {}
    for item in operand_links.my:
        operand = item.operand
        key = (operand.step, operand.record.rank)
        step = steps.get(operand.step, operand.step)
        at[key] = homes.get(id(item)) or at.get(key, (step, key[1], -1, 0, 0))
        behind[id(item)] = (*at[key][:3], 1, item.at)
    for link in operand_links.links:
        # A repeated read is listed where it reads, not where the value was computed.
        is_own = link.is_home or link.golden.site.side == "input"
        where = _order_key(link.golden) if is_own else behind[id(link.my)]
        placed.append((where, Pair(link.operand, link.golden.operand, link.by)))
    placed += _list_unmatched(operand_links, behind)
    placed.sort(key=lambda placed_pair: placed_pair[0])
    return [pair for _, pair in placed]


def _order_key(item: MatchItem) -> Place:
    record = item.record
    return (record.step, record.rank, item.at, 0, 0)


def _list_unmatched(
    operand_links: OperandLinks, behind: dict[int, Place]
) -> list[tuple[Place, Pair]]:
    """Items without a counterpart, with the most similar names."""
    alone = [
        [item for item in side if not item.found and not item.gone]
        for side in (operand_links.my, operand_links.golden)
    ]
    unmatched_pairs: list[tuple[Place, Pair]] = []
    for items, others, side in zip(
        alone, alone[::-1], (operand_links.golden, operand_links.my), strict=True
    ):
        if not items:
            continue
        near = NearestNames(other_item.record.id for other_item in others or side)
        for item in items:
            names = near.of(item.record.id)
            if item.mine:
                unmatched_pairs.append((behind[id(item)], Pair(item.operand, None, "", names)))
            else:
                unmatched_pairs.append((_order_key(item), Pair(None, item.operand, "", names)))
    return unmatched_pairs
