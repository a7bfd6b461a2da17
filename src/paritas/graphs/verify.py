"""Check every operator of a graph: each once, however many calls it has, and none left out."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import io
import pickle
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.errors import UsageError, in_one_line
from paritas.execution.executors import Failed, executor_of, run_batches
from paritas.execution.subjects import usable_device
from paritas.graphs.calls import (
    CallGroup,
    Graph,
    GraphSettings,
    Source,
    calls_digest,
    group_calls,
    signature_of,
    values_digest,
)
from paritas.graphs.checking import check_call
from paritas.graphs.operators import import_modules, is_known_by_name
from paritas.graphs.results_folder import (
    About,
    GraphJournal,
    clear_folder,
    prepare_folder,
    write_results,
)
from paritas.graphs.scripts import with_script
from paritas.partition.recipe_checks import check_confirm
from paritas.results.graph_reports import (
    CallOutcome,
    Confirm,
    GraphReport,
    OperatorResult,
)
from paritas.results.progress import Progress, shows_progress
from paritas.settings.versions import own_version

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from paritas.graphs.calls import CallValues, GraphCall


# --- Operators go to workers, or are checked here one after the other -----------------------------

# Checking an operator tells from torch's random state whether it draws, and puts it back: there is
# one state in a process, so that two operators are never checked at once by threads of one.

_AHEAD = 2  # for each worker, so that none waits for the next


@dataclasses.dataclass(frozen=True)
class OperatorWork:
    """An operator that is to be checked, with all that a worker needs.

    Attributes:
        number: in the order of the report.
        key: of its group.
        values: what it was given when the graph ran; None if values are to be drawn.
    """

    number: int
    key: str
    call: GraphCall
    settings: GraphSettings
    values: CallValues | None = None


def check_work(work: OperatorWork) -> OperatorResult:
    """Check one operator; whatever goes wrong at that is its result."""
    try:
        return check_call(work.call, work.settings, work.values)
    except Exception as error:  # noqa: BLE001  (becomes the result: the others are checked still)
        return _unsupported_result(work, f"checking it raised {in_one_line(error)}")


def check_executor(executor: str | Executor, jobs: int | None) -> None:
    """Refuse what cannot spread operators, before the work.

    Raises:
        UsageError: threads, or no worker at all.
    """
    if executor == "threads" or isinstance(executor, ThreadPoolExecutor):
        raise UsageError(
            f"executor={executor!r}: operators that are checked at once by threads would share "
            "torch's random state; give processes, or dask://host:port"
        )
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs={jobs}: give one worker at least")


def run_works(
    works: Sequence[OperatorWork],
    *,
    executor: str | Executor = "processes",
    jobs: int | None = None,
    suspects: Collection[str] = (),
    begin: Callable[[str], None],
) -> Iterator[tuple[OperatorWork, OperatorResult]]:
    """Check operators; gives each with its result as soon as that is there.

    Args:
        executor: as `paritas.compare` takes it, but for threads.
        jobs: how many workers; unless given, processes are not started, and all happens here.
        suspects: keys that may have ended an earlier process: these get one of their own.
        begin: told the key of each operator that is checked in this process.
    """
    if executor == "processes" and (jobs or 1) == 1:
        yield from _check_in_process(works, suspects, begin)
        return
    travelling = [work for work in works if not _is_settled(work) and _can_travel(work)]
    with executor_of(executor, jobs) as (pool, workers):
        results = run_batches(pool, check_work, travelling, ahead=_AHEAD * workers, ordered=False)
        for work, result in results:
            yield work, _result_of_worker(work, result)
    away = {work.number for work in travelling}
    yield from _check_in_process([work for work in works if work.number not in away], (), begin)


def _check_in_process(
    works: Sequence[OperatorWork], suspects: Collection[str], begin: Callable[[str], None]
) -> Iterator[tuple[OperatorWork, OperatorResult]]:
    for work in works:
        if _is_settled(work):
            yield work, check_work(work)
        elif work.key in suspects and _can_travel(work):
            yield work, _check_isolated(work)
        else:
            begin(work.key)
            yield work, check_work(work)


def _is_settled(work: OperatorWork) -> bool:
    """Whether the reader of the graph knows already how it ends: nothing is run for it."""
    return bool(work.call.idle or work.call.obstacle)


def _check_isolated(work: OperatorWork) -> OperatorResult:
    """Checked in a process of its own, which it may end."""
    with executor_of("processes", 1) as (pool, _):
        [(_, result)] = run_batches(pool, check_work, [work], ahead=1)
    return _result_of_worker(work, result)


def _can_travel(work: OperatorWork) -> bool:
    """Whether another process can be given it: a function that was made in memory has no name."""
    try:
        pickle.Pickler(io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL).dump(work)
    except Exception:  # noqa: BLE001  (each kind of object refuses in its own way; it stays here)
        return False
    return True


def _result_of_worker(
    work: OperatorWork, result: OperatorResult | Failed[OperatorWork]
) -> OperatorResult:
    if isinstance(result, Failed):
        died = f"the process that checked it died, twice ({result.error})"
        return _unsupported_result(work, f"{died}: a crash in the operator, or no memory left")
    return result


def _unsupported_result(work: OperatorWork, reason: str) -> OperatorResult:
    call = work.call
    return OperatorResult(
        key=work.key,
        operator=call.operator,
        signature=signature_of(call),
        sites=(call.site,),
        outcome=CallOutcome.UNSUPPORTED,
        reason=reason,
    )


# --- The check of a graph -------------------------------------------------------------------------


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
    settings = GraphSettings(
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
    opened = graph if isinstance(graph, Graph) else _open_given(graph, inputs, settings)
    modules = {name: _module_digest(name) for name in settings.imports}
    import_modules(settings.imports)  # which may register rules: they are part of a question
    run = _GraphRun(opened, settings, inputs, modules, tell, began)
    if outdir is None:
        return run.checked(None, executor, jobs)
    folder, about = Path(outdir), run.about()
    prepare_folder(folder, resume=resume)
    with GraphJournal(folder, about, run.report(ended=False), resume=resume) as journal:
        if not resume:
            clear_folder(folder)
        run.take_over(folder, journal)
        try:
            report = run.checked(journal, executor, jobs)
        except KeyboardInterrupt:
            journal.interrupt()
            run.write(folder, journal, run.report(ended=False), html=html)
            raise
        return run.write(folder, journal, report, html=html)


class _GraphRun:
    """One run over a graph, from its groups to its report."""

    def __init__(
        self,
        graph: Graph,
        settings: GraphSettings,
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

    def take_over(self, folder: Path, journal: GraphJournal) -> None:
        """Take over what an earlier run has finished, of this graph or of another."""
        self.folder, self.suspects = folder, frozenset(journal.suspects)
        self.number = journal.own.number
        self.notes += journal.notes
        for group in self.groups:
            known = journal.finished.get(group.key)
            if known is not None:
                self.results[group.number] = _with_call_sites(known, group)
                self.resumed += 1
                continue
            found = journal.verified_elsewhere(group.key) if is_known_by_name(group.first) else None
            if found is not None:
                result, graph = found
                notes = (*result.notes, f"not verified again: it was for {graph}")
                placed = _with_call_sites(msgspec.structs.replace(result, notes=notes), group)
                self.results[group.number] = placed
                self.shared += 1
                journal.finish(placed)

    def write(
        self, folder: Path, journal: GraphJournal, report: GraphReport, *, html: bool
    ) -> GraphReport:
        """Write a report with those of the folder's other graphs."""
        journal.end(report)
        others = tuple(one.whole_report() for one in journal.others())
        whole = msgspec.structs.replace(report, others=others)
        write_results(folder, whole, html=html)
        return whole

    def checked(
        self, journal: GraphJournal | None, executor: str | Executor, jobs: int | None
    ) -> GraphReport:
        """Check what is not finished yet."""
        values = self._sampled()
        works = [
            OperatorWork(
                group.number, group.key, group.first, self.settings, values.get(group.number)
            )
            for group in self.groups
            if group.number not in self.results
        ]
        begin = journal.begin if journal is not None else _begin_nothing
        self._told()
        done = run_works(works, executor=executor, jobs=jobs, suspects=self.suspects, begin=begin)
        for work, result in done:
            group = self.groups[work.number]
            placed = _with_call_sites(result, group)
            if self.folder is not None and placed.outcome is CallOutcome.FAILED:
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
            settings=_describe_settings(self.settings, self.inputs),
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
            settings=_describe_settings(self.settings, self.inputs),
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
        failing = sum(one.outcome is CallOutcome.FAILED for one in self.results.values())
        # Without what was taken over, which took no time: the time left is told from the rest.
        known = self.resumed + self.shared
        done, total = len(self.results) - known, len(self.groups) - known
        self._tell(Progress("checking operators", done, total, failing=failing))


def _open_given(graph: Any, inputs: Any, settings: GraphSettings) -> Graph:
    from paritas.graphs.opening import open_graph

    return open_graph(graph, inputs=inputs, imports=settings.imports)


def _with_call_sites(result: OperatorResult, group: CallGroup) -> OperatorResult:
    """With all the places at which it is called, also of a run that had other names for them."""
    return msgspec.structs.replace(result, key=group.key, sites=group.sites)


def _tell_nobody(progress: Progress) -> None:
    pass


def _begin_nothing(key: str) -> None:
    pass


# --- what is told of a run ------------------------------------------------------------------------


def _describe_settings(settings: GraphSettings, inputs: Any) -> dict[str, str]:
    words = {
        field.name: _setting_text(getattr(settings, field.name))
        for field in dataclasses.fields(settings)
    }
    words["options"] = settings.options or "declared, else library"
    if inputs is None:
        words["inputs"] = "drawn"
    else:
        words["inputs"] = str(inputs) if isinstance(inputs, (str, Path)) else "given"
    return words


def _setting_text(value: Any) -> str:
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
