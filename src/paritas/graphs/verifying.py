"""Check every operator of a graph: each once, however many calls it has, and none left out."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.checking.devices import usable_device
from paritas.errors import UsageError
from paritas.graphs.calls import Graph
from paritas.graphs.grouping import Group, calls_digest, group_calls, values_digest
from paritas.graphs.journal import About, Journal
from paritas.graphs.operators.resolving import import_modules, is_known_by_name
from paritas.graphs.results_folder import clear, prepare, write_results
from paritas.graphs.scripts.failures import with_script
from paritas.graphs.settings import Settings, Source
from paritas.graphs.working import Work, check_executor, run_works
from paritas.numerics.graph_reports import Confirm, GraphReport, OperatorResult, Outcome
from paritas.partition.confirming import check_confirm
from paritas.reporting.progress import Progress, shows_progress
from paritas.settings.versions import own_version

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from paritas.graphs.operators.values import CallValues

__all__ = ["verify_graph", "versions_here"]


@shows_progress
def verify_graph(  # noqa: PLR0913  (what can be asked)
    graph: Any,
    outdir: str | Path | None = None,
    *,
    options: Source | None = None,
    ranks: int | Sequence[int] = (2,),
    cap: int | None = None,
    inputs: Any = None,
    seed: int = 0,
    strict: bool = False,
    imports: Sequence[str] = (),
    device: str | torch.device | None = None,
    confirm: Confirm | None = None,
    executor: str | Executor = "processes",
    jobs: int | None = None,
    resume: bool = True,
    html: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
) -> GraphReport:
    """Check every operator of a graph, whole against split over ranks.

    Identical calls are checked once and counted. With a folder, each operator is written down as
    soon as it is done: the same run, started again, goes on from there. An interruption
    (`KeyboardInterrupt`) writes what there is, and is raised again. A folder that holds results of
    other graphs keeps them: this graph is registered beside them, and what was verified for one of
    them is not verified again.

    Args:
        graph: a file (`.pt2`, or nnScaler's `.ckp`), a `torch.export.ExportedProgram`, a
            `torch.fx.GraphModule`, `(model, inputs)`, or a `Graph` that was read.
        outdir: where the results go: results.json, results.csv, report.html and a script for each
            failure; None writes nothing.
        options: where splits come from: `declared` by the graph, from the `library`, by running
            the operator (`discover`), or `all`. None takes what the graph declares, and asks the
            library about calls of which it declares nothing.
        ranks: over how many ranks each is split; several numbers are checked one after the other.
        cap: no dimension is longer than this; None leaves the shapes as they are.
        inputs: of the graph, by position or by name, or the folder of a dump: operators are given
            the values that they have in such a run. Otherwise values are drawn.
        seed: of drawn values and of the checks.
        strict: count `unstable` as a failure.
        imports: modules that bring operators, annotations and functions of yours.
        device: where operators run, for example `"cuda"`; otherwise on the host.
        confirm: "gloo" or "nccl" checks each split a second time, on ranks that are real
            processes; NCCL needs `device="cuda"` and a GPU for each rank.
        executor: `processes`, `dask://host:port`, or an executor of `concurrent.futures` whose
            workers are no threads.
        jobs: how many workers; unless given, all happens in this process.
        resume: take over what an earlier run has finished, and keep what the folder holds of other
            graphs; False starts anew.
        html: write report.html, too.
        on_progress: called with a few words before each step, and how far it has come.

    Raises:
        UsageError: the graph cannot be read, the folder cannot be written to or holds what another
            question of this graph or another program gave, or what is asked makes no sense.
    """
    began = time.monotonic()
    settings = Settings(
        options=options,
        ranks=(ranks,) if isinstance(ranks, int) else tuple(ranks),
        cap=cap,
        seed=seed,
        strict=strict,
        imports=(imports,) if isinstance(imports, str) else tuple(imports),
        device=None if device is None else str(usable_device(device, "device=")),
        confirm=confirm,
    )
    check_confirm(confirm, torch.device(settings.device or "cpu"), max(settings.ranks))
    check_executor(executor, jobs)
    tell = on_progress or _tell_nobody
    tell(Progress("reading the graph"))
    opened = graph if isinstance(graph, Graph) else _opened(graph, inputs, settings)
    modules = {name: _module_digest(name) for name in settings.imports}
    import_modules(settings.imports)  # which may register rules: they are part of a question
    run = _Run(opened, settings, inputs, modules, tell, began)
    if outdir is None:
        return run.checked(None, executor, jobs)
    folder, about = Path(outdir), run.about()
    prepare(folder, resume=resume)
    with Journal(folder, about, run.report(ended=False), resume=resume) as journal:
        if not resume:
            clear(folder)
        run.take_over(folder, journal)
        try:
            report = run.checked(journal, executor, jobs)
        except KeyboardInterrupt:
            journal.interrupt()
            run.write(folder, journal, run.report(ended=False), html=html)
            raise
        return run.write(folder, journal, report, html=html)


class _Run:
    """One run over a graph, from its groups to its report."""

    def __init__(
        self,
        graph: Graph,
        settings: Settings,
        inputs: Any,
        modules: dict[str, str],
        tell: Callable[[Progress], None],
        began: float,
    ) -> None:
        self.graph, self.settings, self.inputs = graph, settings, inputs
        self.modules = modules
        self.groups = group_calls(graph, settings)
        self.results: dict[int, OperatorResult] = {}
        self.resumed = self.shared = 0
        self.number = 1
        self.notes: list[str] = []
        self.suspects: frozenset[str] = frozenset()
        self.folder: Path | None = None
        self._tell, self._began = tell, began

    def take_over(self, folder: Path, journal: Journal) -> None:
        """Take over what an earlier run has finished, of this graph or of another."""
        self.folder, self.suspects = folder, frozenset(journal.suspects)
        self.number = journal.own.number
        self.notes += journal.notes
        for group in self.groups:
            known = journal.finished.get(group.key)
            if known is not None:
                self.results[group.number] = _placed(known, group)
                self.resumed += 1
                continue
            found = journal.verified_elsewhere(group.key) if is_known_by_name(group.first) else None
            if found is not None:
                result, graph = found
                notes = (*result.notes, f"not verified again: it was for {graph}")
                placed = _placed(msgspec.structs.replace(result, notes=notes), group)
                self.results[group.number] = placed
                self.shared += 1
                journal.finish(placed)

    def write(
        self, folder: Path, journal: Journal, report: GraphReport, *, html: bool
    ) -> GraphReport:
        """Write a report with those of the folder's other graphs."""
        journal.end(report)
        others = tuple(one.whole_report() for one in journal.others())
        whole = msgspec.structs.replace(report, others=others)
        write_results(folder, whole, html=html)
        return whole

    def checked(
        self, journal: Journal | None, executor: str | Executor, jobs: int | None
    ) -> GraphReport:
        """Check what is not finished yet."""
        values = self._sampled()
        works = [
            Work(group.number, group.key, group.first, self.settings, values.get(group.number))
            for group in self.groups
            if group.number not in self.results
        ]
        begin = journal.begin if journal is not None else _begin_nothing
        self._told()
        done = run_works(works, executor=executor, jobs=jobs, suspects=self.suspects, begin=begin)
        for work, result in done:
            group = self.groups[work.number]
            placed = _placed(result, group)
            if self.folder is not None and placed.outcome is Outcome.FAILED:
                placed = with_script(self.folder, work, placed, versions_here(), graph=self.number)
            if journal is not None:
                journal.finish(placed)
            self.results[work.number] = placed
            self._told()
        return self.report(ended=True)

    def report(self, *, ended: bool) -> GraphReport:
        """What there is, in the order of first calls."""
        return GraphReport(
            graph=self.graph.name,
            kind=self.graph.kind,
            settings=_settings_in_words(self.settings, self.inputs),
            versions=versions_here(),
            operators=tuple(self.results[number] for number in sorted(self.results)),
            calls=len(self.graph.calls),
            notes=(*self.graph.notes, *self.notes),
            seconds=time.monotonic() - self._began,
            resumed=self.resumed,
            shared=self.shared,
            number=self.number,
            ended=ended,
            strict=self.settings.strict,
        )

    def about(self) -> About:
        """What the run is about."""
        return About(
            graph=self.graph.name,
            calls=calls_digest(self.graph.calls),
            settings=_settings_in_words(self.settings, self.inputs),
            versions=versions_here(),
            inputs=self._inputs_digest(),
            modules=self.modules,
        )

    def _inputs_digest(self) -> str:
        if self.inputs is None:
            return ""
        if isinstance(self.inputs, (str, Path)):
            return str(Path(self.inputs).absolute())
        state = {} if self.graph.state is None else self.graph.state()
        return values_digest((self.inputs, state))

    def _sampled(self) -> Mapping[int, CallValues]:
        """By number of a group, what its first call was given when the graph ran."""
        if self.inputs is None:
            return {}
        from paritas.graphs import sampling

        waiting = [group for group in self.groups if group.number not in self.results]
        keep = {group.first.position: group.number for group in waiting}
        self._tell(Progress("running the graph"))
        if isinstance(self.inputs, (str, Path)):
            found = sampling.values_from_dump(self.graph, Path(self.inputs), keep)
        else:
            found = sampling.sample_values(
                self.graph,
                self.inputs,
                keep,
                imports=self.settings.imports,
                seed=self.settings.seed,
            )
        self.notes += found.notes
        if any(len(group.calls) > 1 for group in waiting):
            self.notes.append("identical calls are checked with what the first of them was given")
        return {keep[position]: values for position, values in found.values.items()}

    def _told(self) -> None:
        failing = sum(one.outcome is Outcome.FAILED for one in self.results.values())
        # Without what was taken over, which took no time: the time left is told from the rest.
        known = self.resumed + self.shared
        done, total = len(self.results) - known, len(self.groups) - known
        self._tell(Progress("checking operators", done, total, failing=failing))


def _opened(graph: Any, inputs: Any, settings: Settings) -> Graph:
    from paritas.graphs.reading.opening import open_graph

    return open_graph(graph, inputs=inputs, imports=settings.imports)


def _placed(result: OperatorResult, group: Group) -> OperatorResult:
    """With all the places at which it is called, also of a run that had other names for them."""
    return msgspec.structs.replace(result, key=group.key, sites=group.sites)


def _tell_nobody(progress: Progress) -> None:
    pass


def _begin_nothing(key: str) -> None:
    pass


# --- what is told of a run ------------------------------------------------------------------------


def _settings_in_words(settings: Settings, inputs: Any) -> dict[str, str]:
    words = {
        field.name: _words(getattr(settings, field.name)) for field in dataclasses.fields(settings)
    }
    words["options"] = settings.options or "declared, else library"
    if inputs is None:
        words["inputs"] = "drawn"
    else:
        words["inputs"] = str(inputs) if isinstance(inputs, (str, Path)) else "given"
    return words


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def versions_here() -> dict[str, str]:
    """Of what takes part in a check."""
    return {
        "paritas": own_version(),
        "torch": str(torch.__version__),  # a subclass of str, which JSON does not take
        "python": platform.python_version(),
    }


def _module_digest(name: str) -> str:
    """Of the text of a module: an annotation that was mended there asks another question."""
    try:
        found = importlib.util.find_spec(name)
    except Exception as error:
        raise UsageError(
            f"imports: {name!r} cannot be found: {type(error).__name__}: {error}; name a module "
            "that Python can import from here"
        ) from error
    if found is None:
        raise UsageError(
            f"imports: there is no module {name!r}; name one that Python can import from here"
        )
    path = Path(found.origin) if found.origin else None
    if path is None or not path.is_file():
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()
