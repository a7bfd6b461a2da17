"""From a split that is wrong to the smallest shapes at which it is.

The operator is already alone; what is left to shrink are its shapes. They are capped, from small to
large, until the same split of it is wrong in the same way.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paritas.errors import UsageError
from paritas.graphs.grouping import group_calls
from paritas.graphs.reading.opening import open_graph
from paritas.graphs.results_folder import JSON
from paritas.graphs.scripts.failures import with_script
from paritas.graphs.settings import Settings
from paritas.graphs.verifying import versions_here
from paritas.graphs.working import check_work
from paritas.minimizing.reports import ShrinkReport
from paritas.minimizing.shrinking import NothingFailsError
from paritas.minimizing.split_attempts import Wanted, attempts_on, attempts_on_caps
from paritas.numerics.graph_reports import GraphReport, Outcome
from paritas.reporting.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paritas.checking.remembering import FailedSplit
    from paritas.graphs.calls import GraphCall
    from paritas.graphs.settings import Source
    from paritas.minimizing.split_attempts import Attempt
    from paritas.numerics.graph_reports import OperatorResult

__all__ = ["shrink_graph_results", "shrink_splits"]

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
    search = _Search(outdir, seconds, on_progress)
    report = GraphReport.from_json((folder / JSON).read_bytes())
    report = next((one for one in (report, *report.others) if one.exit_code == 1), report)
    failed = next((one for one in report.operators if one.outcome is Outcome.FAILED), None)
    if failed is None or not failed.failures:
        raise NothingFailsError(f"no split of an operator of {report.graph!r} is wrong")
    wanted = Wanted.of(failed.failures[0])
    settings = _settings(report.settings)
    search.tell(f"reading {report.graph}")
    call = _call(report.graph if graph is None else graph, settings, failed)
    return search.run(attempts_on_caps(call, settings, wanted, failed.key), report.versions)


def shrink_splits(
    failed: Sequence[FailedSplit],
    outdir: str | Path | None = None,
    *,
    seconds: float = 120.0,
    setup: Sequence[str] = (),
    on_progress: Callable[[str], None] | None = None,
) -> ShrinkReport:
    """Write the script of the first wrong split of an operator that is wrong again.

    Args:
        failed: splits of one operator.
        outdir: where the script goes; a new folder by default.
        setup: statements such as `import package.module`, of a module that registers the operator.

    Raises:
        NothingFailsError: none of them is wrong when it is checked again.
        UsageError: no script could do the same; the message says why.
    """
    if not seconds > 0:
        raise UsageError(f"seconds must be a positive number, not {seconds!r}")
    folder = Path(tempfile.mkdtemp(prefix="paritas-shrink-") if outdir is None else outdir)
    search = _Search(folder, seconds, on_progress)
    for position, one in enumerate(failed):
        try:
            return search.run(attempts_on(one, setup), versions_here())
        except NothingFailsError:
            if position == len(failed) - 1:
                raise
    raise NothingFailsError("no split is wrong: nothing to shrink")


class _Search:
    """A search for the smallest shapes, within a given time."""

    def __init__(
        self, outdir: Path, seconds: float, on_progress: Callable[[str], None] | None
    ) -> None:
        self.outdir = outdir
        self.seconds = seconds
        self.tell = on_progress or (lambda _: None)
        self.began = time.monotonic()
        self.queries = 0

    def run(self, attempts: Iterator[Attempt], versions: Mapping[str, str]) -> ShrinkReport:
        """Write the script of the first attempt that shows what is wanted."""
        attempt = None
        for attempt in attempts:
            if time.monotonic() - self.began > self.seconds:
                raise NothingFailsError(
                    f"{_title(attempt)}: {self.seconds:g} seconds were not enough to see it fail; "
                    "give more of them"
                )
            left = self.seconds - (time.monotonic() - self.began)
            self.tell(Progress(attempt.words, at_most=left))
            result = check_work(attempt.work)
            self.queries += 1
            shown = tuple(one for one in result.options if attempt.wanted.is_shown_by(one))
            if shown:
                self.tell("running the script by itself")
                return self._report(
                    attempt, msgspec.structs.replace(result, options=shown), versions
                )
        told = "it" if attempt is None else _title(attempt)
        raise NothingFailsError(f"{told}: checked again, it is not wrong in the same way")

    def _report(
        self, attempt: Attempt, result: OperatorResult, versions: Mapping[str, str]
    ) -> ShrinkReport:
        self.outdir.mkdir(parents=True, exist_ok=True)
        handed = with_script(self.outdir, attempt.work, result, versions)
        if not handed.script:
            raise UsageError(handed.notes[-1] if handed.notes else "no script shows it by itself")
        note = next((note for note in reversed(handed.notes) if handed.script in note), "")
        path = self.outdir / handed.script
        data = path.with_suffix(".safetensors")
        option = handed.failures[0]
        told = [one.diagnosis for one in option.verdict.failures if one.diagnosis is not None]
        return ShrinkReport(
            script=str(path),
            data=str(data) if data.exists() else None,
            shows=not note,
            what=f"{_title(attempt)}: {option.status}",
            before=result.signature,
            after=attempt.words,
            diagnosis=told[0] if told else None,
            queries=self.queries,
            seconds=time.monotonic() - self.began,
            said=note or "the fault is there",
        )


def _title(attempt: Attempt) -> str:
    wanted = attempt.wanted
    return f"{attempt.work.call.operator}, {wanted.split} over {wanted.ranks} ranks"


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
    device = words.get("device", _NONE)
    return Settings(
        options=known.get(options),
        ranks=tuple(int(number) for number in words.get("ranks", "2").split(",")),
        cap=None if cap == _NONE else int(cap),
        seed=int(words.get("seed", "0")),
        strict=words.get("strict") == "True",
        imports=() if imports == _NONE else tuple(name.strip() for name in imports.split(",")),
        device=None if device == _NONE else device,
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
