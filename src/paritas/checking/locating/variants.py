"""Other compilations of a suspect graph, run on the arguments of the call that differed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from paritas._torch.inductor import compile_again
from paritas.checking.guarding.graph_runs import copy_argument
from paritas.checking.observing import Observation
from paritas.recording.isolation import Copier, RandomState

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from paritas.checking.guarding.lowered import Suspect

# What is compiled to find something out must neither come out of the user's cache nor go into it.
_UNCACHED = {"fx_graph_cache": False}


@dataclasses.dataclass
class Variant:
    """What one compilation gave.

    Attributes:
        seen: its outputs and the inputs it wrote to, by name.
        extra: outputs beyond those of the graph.
        error: what compiling or running it raised.
    """

    seen: Observation
    given: list[Any]
    extra: list[Any]
    error: Exception | None = None


def run_variant(
    suspect: Suspect,
    module: GraphModule | None = None,
    options: dict[str, Any] | None = None,
) -> Variant:
    """Compile the graph, or a changed copy of it, with options on top of its own, and run it."""
    lowered = suspect.lowered if module is None else suspect.lowered.with_module(module)
    copier = Copier()
    given = [copy_argument(copier, value) for value in suspect.runs.kept]
    seen = Observation(rng_before=suspect.runs.rng)
    try:
        compiled = compile_again(lowered, {**(options or {}), **_UNCACHED})
        suspect.runs.rng.restore()
        results = list(compiled(list(given)))
    except Exception as error:  # noqa: BLE001  (a variant that does not work shows nothing)
        return Variant(seen, given, [], error)
    seen.rng_after = RandomState.now()
    count = len(suspect.runs.reference.outputs)
    suspect.runs.reference.name_results(seen, results[:count], given)
    return Variant(seen, given, results[count:])


def shows_it(suspect: Suspect, variant: Variant) -> bool:
    """Whether a variant has one of the suspect's failures."""
    if variant.error is not None:
        return False
    known = {(finding.path, finding.aspect) for finding in suspect.failures}
    return any(
        (finding.path, finding.aspect) in known and not finding.status.passes()
        for finding in suspect.compare(variant.seen, variant.given)
    )
