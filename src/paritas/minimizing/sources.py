"""From what failed to programs that can be shrunk: models, guarded graphs, verdicts."""

from __future__ import annotations

import importlib
import operator
from typing import TYPE_CHECKING, Any

from paritas._torch.backends import find_backend, is_registered
from paritas._torch.compiled import backends_of, dynamic_of, original_of
from paritas._torch.graphs import copy_graph, placeholders
from paritas.checking.remembering import FailedGraph, FailedPair, FailedSplit, recall
from paritas.errors import UsageError
from paritas.minimizing.capturing import capture_programs, program_of
from paritas.minimizing.programs import Candidate, Program, Signature, signature_of
from paritas.minimizing.reports import ShrinkReport, report_of
from paritas.minimizing.shrinking import shrink
from paritas.numerics.findings import Status
from paritas.reporting.progress import shows_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from paritas._torch.backends import Backend
    from paritas.numerics.findings import Verdict

__all__ = ["candidate_of", "programs_of_graph", "programs_of_pair", "shrink_verdict"]

_MAIN = "__main__"


@shows_progress
def shrink_verdict(
    verdict: Verdict,
    *,
    seconds: float = 120.0,
    outdir: str | Path | None = None,
    setup: tuple[str, ...] = (),
    on_progress: Callable[[str], None] | None = None,
) -> ShrinkReport:
    """Shrink what a verdict of `verify`, of a guard or of a partition is about.

    Raises:
        UsageError: nothing failed, the programs are not at hand, or no graph fails by itself.
    """
    if verdict.passed or not verdict.enabled:
        raise UsageError(f"nothing failed (the verdict is {verdict.status}): nothing to shrink")
    failed = recall(verdict)
    if not failed:
        raise UsageError(_why_unknown(verdict))
    splits = [one for one in failed if isinstance(one, FailedSplit)]
    if splits:
        from paritas.minimizing.partitions import shrink_splits

        return shrink_splits(splits, outdir, seconds=seconds, setup=setup, on_progress=on_progress)
    pairs = [one for one in failed if not isinstance(one, FailedSplit)]
    programs, candidate = programs_of(pairs[0], setup)
    for other in pairs[1:]:
        more, made = programs_of(other, setup)
        # One oracle asks one compiler.
        programs += more if made == candidate else []
    shrunk = shrink(
        programs,
        candidate,
        signature=_signature(verdict) if isinstance(pairs[0], FailedPair) else None,
        seconds=seconds,
        outdir=outdir,
        on_progress=on_progress,
    )
    return report_of(shrunk)


def _why_unknown(verdict: Verdict) -> str:
    if not any(one.status in {Status.DIFFERENT, Status.DEGRADED} for one in verdict.failures):
        return f"nothing is wrong for certain (the verdict is {verdict.status}): nothing to shrink"
    return (
        "the programs behind this verdict are not at hand: it was read from a file, merged from "
        "others, or comes from another process; shrink the verdict that verify(), "
        "guard().verdict() or check_partition() gave, or use the command paritas shrink"
    )


def _signature(verdict: Verdict) -> Signature | None:
    """How it fails, where the verdict tells: of a graph below autograd it tells it otherwise."""
    found = signature_of(verdict)
    return None if found is None else found[0]


def programs_of(
    failed: FailedPair | FailedGraph, setup: tuple[str, ...] = ()
) -> tuple[list[Program], Candidate]:
    """The programs of what failed, and how their candidates are made."""
    if isinstance(failed, FailedGraph):
        return programs_of_graph(failed, setup)
    return programs_of_pair(failed, setup)


def programs_of_pair(
    failed: FailedPair, setup: tuple[str, ...] = ()
) -> tuple[list[Program], Candidate]:
    """The graphs of what `torch.compile` was given, as `verify` was asked to compare it.

    Raises:
        UsageError: the candidate is not what `torch.compile` made, so that there are no graphs.
    """
    backends = backends_of(failed.candidate)
    if not backends:
        raise UsageError(
            f"the candidate {failed.candidate!r:.80} was not made by torch.compile: there is no "
            "graph that both sides share, and so nothing to cut down; where a compiler of your "
            "own made it, give it to torch.compile as a backend"
        )
    backend = find_backend(backends[0])
    candidate = candidate_of(backend, setup=setup, dynamic=dynamic_of(failed.candidate))
    given = failed.inputs[0]
    return capture_programs(original_of(failed.candidate), given, candidate), candidate


def programs_of_graph(
    failed: FailedGraph, setup: tuple[str, ...] = ()
) -> tuple[list[Program], Candidate]:
    """A guarded graph on the arguments of the call that failed; a backward graph is one, too."""
    candidate = candidate_of(failed.made_by.backend, failed.made_by.given, setup=setup)
    module = copy_graph(failed.module)
    for node in placeholders(module):
        # Below autograd the traced value, which says what sizes are dynamic, has another name.
        if "example_value" not in node.meta and "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    program = program_of(module, list(failed.inputs))
    return [program], candidate


def candidate_of(
    backend: Backend,
    given: Mapping[str, Any] | None = None,
    *,
    setup: tuple[str, ...] = (),
    dynamic: bool | None = None,
) -> Candidate:
    """How a backend is called by its name, so that a script can do so.

    Args:
        given: mode and options of `torch.compile`, beside those of the backend itself.
        setup: statements that come first in a script.
        dynamic: of `torch.compile`.

    Raises:
        UsageError: the backend is a function that cannot be imported.
    """
    if backend.is_inductor:
        options = backend.inductor_options(dict(given or {}))
        return Candidate("inductor", options=options, dynamic=dynamic, setup=setup)
    asked = {**backend.settings, **(given or {})}
    options, mode = asked.get("options") or {}, asked.get("mode")
    function = backend.function
    home = str(getattr(function, "__module__", ""))
    if is_registered(backend.name, function):
        own = home.partition(".")[0] in {"torch", "functorch", _MAIN, ""}
        first = () if own else (f"import {home}",)
        statements = tuple(dict.fromkeys((*setup, *first)))
        return Candidate(backend.name, mode, options, dynamic, statements)
    name = str(getattr(function, "__qualname__", ""))
    if not _is_importable(home, name, function):
        raise UsageError(
            f"the backend {backend.name!r} cannot be imported by name (module {home!r}), so no "
            "script could call it; put it into a module of its own, as a function at its top level"
        )
    return Candidate(f"{home}:{name}", mode, options, dynamic, setup)


def _is_importable(home: str, name: str, function: Any) -> bool:
    if home in {"", _MAIN} or not name or "<" in name:
        return False
    try:
        found = operator.attrgetter(name)(importlib.import_module(home))
    except (ImportError, AttributeError):
        return False
    return found is function
