"""From a folder of `paritas verify-graph` to the smallest shapes at which a split is wrong.

The operator is already alone; what is left to shrink are its shapes. They are capped, from small to
large, until the same split of it is wrong in the same way.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas.errors import UsageError
from paritas.graphs.grouping import group_calls
from paritas.graphs.reading.opening import open_graph
from paritas.graphs.results_folder import JSON
from paritas.graphs.scripts.failures import with_script
from paritas.graphs.settings import Settings
from paritas.graphs.working import Work, check_work
from paritas.minimizing.reports import ShrinkReport
from paritas.minimizing.shrinking import NothingFailsError
from paritas.numerics.graph_reports import GraphReport, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from paritas.graphs.calls import GraphCall
    from paritas.graphs.settings import Source
    from paritas.numerics.graph_reports import OperatorResult, OptionResult

__all__ = ["shrink_graph_results"]

_LARGEST_CAP = 1024
_NONE = "none"


def shrink_graph_results(
    folder: Path,
    outdir: Path,
    *,
    graph: Any = None,
    seconds: float = 120.0,
    on_progress: Callable[[str], None] | None = None,
) -> ShrinkReport:
    """Write the script of the first operator whose split is wrong, on shapes as small as they get.

    Args:
        graph: what was checked, where it is not the file that the results name.

    Raises:
        NothingFailsError: no split is wrong.
        UsageError: the graph is not to be had any more, or its values were given in Python.
    """
    began = time.monotonic()
    tell = on_progress or (lambda _: None)
    report = GraphReport.from_json((folder / JSON).read_bytes())
    failed = next((one for one in report.operators if one.outcome is Outcome.FAILED), None)
    if failed is None or not failed.failures:
        raise NothingFailsError(f"no split of an operator of {report.graph!r} is wrong")
    wanted = failed.failures[0]
    settings = _settings(report.settings)
    tell(f"reading {report.graph}")
    call = _call(report.graph if graph is None else graph, settings, failed)
    queries = 0
    found: tuple[Work, OperatorResult] | None = None
    ended = True
    for cap in _caps(wanted.ranks, settings.cap):
        if time.monotonic() - began > seconds:
            ended = False
            break
        tell(f"no dimension longer than {cap}" if cap else "shapes as they are")
        capped = dataclasses.replace(settings, cap=cap, ranks=(wanted.ranks,))
        work = Work(0, failed.key, call, capped, None)
        result = check_work(work)
        queries += 1
        if any(_same(option, wanted) for option in result.failures):
            found = work, _only(result, wanted)
            break
    if found is None:
        raise NothingFailsError(
            f"{failed.operator}, {wanted.split}: checked again, it is not wrong on drawn values"
            if ended
            else f"{failed.operator}: {seconds:g} seconds were not enough to see it fail"
        )
    tell("running the script by itself")
    outdir.mkdir(parents=True, exist_ok=True)
    return _report(found, wanted, outdir, report.versions, (failed, queries, began))


def _report(
    found: tuple[Work, OperatorResult],
    wanted: OptionResult,
    outdir: Path,
    versions: Mapping[str, str],
    course: tuple[OperatorResult, int, float],
) -> ShrinkReport:
    work, result = found
    failed, queries, began = course
    handed = with_script(outdir, work, result, versions)
    note = next((note for note in reversed(handed.notes) if handed.script in note), "")
    if not handed.script:
        raise UsageError(handed.notes[-1] if handed.notes else "no script shows it by itself")
    path = outdir / handed.script
    data = path.with_suffix(".safetensors")
    option = handed.failures[0]
    told = [one.diagnosis for one in option.verdict.failures if one.diagnosis is not None]
    shows = "does not show the failure" not in note
    return ShrinkReport(
        script=str(path),
        data=str(data) if data.exists() else None,
        shows=shows,
        what=f"{failed.operator}, {wanted.split} over {wanted.ranks} ranks: {option.status}",
        before=failed.signature,
        after=f"no dimension longer than {work.settings.cap}" if work.settings.cap else "as it was",
        diagnosis=told[0] if told else None,
        queries=queries,
        seconds=time.monotonic() - began,
        said="the fault is there" if shows else note,
    )


def _settings(words: Mapping[str, str]) -> Settings:
    """The settings of a run, from how its results spell them."""
    if words.get("inputs", "drawn") == "given":
        raise UsageError(
            "its values were given in Python and are not in the folder; the script that lies in "
            "it has them"
        )
    options = words.get("options", "")
    known: dict[str, Source | None] = {
        "declared": "declared",
        "library": "library",
        "discover": "discover",
        "all": "all",
    }
    cap, imports = words.get("cap", _NONE), words.get("imports", _NONE)
    return Settings(
        options=known.get(options),
        ranks=tuple(int(number) for number in words.get("ranks", "2").split(",")),
        cap=None if cap == _NONE else int(cap),
        seed=int(words.get("seed", "0")),
        strict=words.get("strict") == "True",
        imports=() if imports == _NONE else tuple(name.strip() for name in imports.split(",")),
    )


def _call(source: Any, settings: Settings, failed: OperatorResult) -> GraphCall:
    if isinstance(source, str) and not Path(source).is_file():
        raise UsageError(
            f"the graph {source!r} is not a file that can be read again from here; say with "
            "--graph what verify-graph was given"
        )
    graph = open_graph(source, imports=settings.imports)
    nodes = {site.node for site in failed.sites}
    for group in group_calls(graph, settings):
        if group.first.operator == failed.operator and group.first.name in nodes:
            return group.first
    raise UsageError(f"the graph has no {failed.operator} at {failed.sites[0].node} any more")


def _caps(ranks: int, usual: int | None) -> Iterator[int | None]:
    """Lengths from small to large that can be divided evenly, and last what it was."""
    cap = ranks
    while cap <= min(_LARGEST_CAP, usual or _LARGEST_CAP):
        yield cap
        cap *= 2
    yield usual


def _same(option: OptionResult, wanted: OptionResult) -> bool:
    """Whether the same split is wrong in the same way, as far as that can be told."""
    aspects = {finding.aspect for finding in wanted.verdict.failures}
    return (
        (option.idx, option.dim, option.split) == (wanted.idx, wanted.dim, wanted.split)
        and option.status is wanted.status
        and {finding.aspect for finding in option.verdict.failures} <= aspects
    )


def _only(result: OperatorResult, wanted: OptionResult) -> OperatorResult:
    import msgspec

    kept = tuple(option for option in result.options if _same(option, wanted))
    return msgspec.structs.replace(result, options=kept)
