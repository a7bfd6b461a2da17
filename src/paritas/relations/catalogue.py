"""All relations by name: those of paritas, then those that the user registered."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from paritas.errors import UsageError
from paritas.relations.relation import Relation, own_relations

if TYPE_CHECKING:
    from collections.abc import Sequence


def built_in() -> dict[str, Relation]:
    """The relations of paritas, by name."""
    from paritas.relations.attention import ATTENTION
    from paritas.relations.caches import CACHES
    from paritas.relations.continuous import CONTINUOUS
    from paritas.relations.generation import GENERATION
    from paritas.relations.resharding import RESHARDING
    from paritas.relations.serving import SERVING
    from paritas.relations.training import TRAINING

    families = (SERVING, CACHES, GENERATION, CONTINUOUS, ATTENTION, TRAINING, RESHARDING)
    return {one.name: one for family in families for one in family}


def all_relations() -> dict[str, Relation]:
    """All known relations, by name."""
    return {**built_in(), **own_relations()}


def chosen(only: Sequence[str] | None) -> list[Relation]:
    """The relations of these names or families; without names, all but those on request.

    Raises:
        UsageError: there is none of that name.
    """
    known = all_relations()
    if only is None:
        return [one for one in known.values() if not one.on_request]
    found: dict[str, Relation] = {}
    for name in only:
        fitting = {
            key: one
            for key, one in known.items()
            if key == name or (one.family.value == name and not one.on_request)
        }
        if not fitting:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"no relation {name!r}; {hint}known are {', '.join(known)}")
        found |= fitting
    return list(found.values())
