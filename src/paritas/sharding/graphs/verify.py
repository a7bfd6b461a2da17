"""Checks every operator of a graph: identical calls once, and no call left out."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import io
import pickle
import platform
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.call_options import takes_options
from paritas.core.errors import UsageError, in_one_line
from paritas.core.execution.executors import Failed, executor_of, run_batches
from paritas.core.execution.subjects import usable_device
from paritas.core.results.progress import Progress, shows_progress
from paritas.core.results.report import json_of
from paritas.core.settings import own_version
from paritas.sharding.graphs.calls import (
    CallGroup,
    Graph,
    GraphSettings,
    Source,
    calls_digest,
    group_calls,
    signature_of,
    values_digest,
)
from paritas.sharding.graphs.checking import check_call
from paritas.sharding.graphs.operators import import_modules, is_known_by_name
from paritas.sharding.graphs.proving import GraphPlacements, prove_placed, read_placements
from paritas.sharding.graphs.results_folder import (
    About,
    GraphJournal,
    clear_folder,
    prepare_folder,
    write_results,
)
from paritas.sharding.graphs.rows import CallOutcome, GraphReport, OperatorResult
from paritas.sharding.graphs.scripts import with_script
from paritas.sharding.operators.recipe_checks import check_confirm

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from paritas.core.results.rank_backends import BackendName
    from paritas.sharding.graphs.calls import CallValues, GraphCall
    from paritas.sharding.rows import GraphProof


# --- Operators are checked by workers, or here one after the other --------------------------------

# A check sees from torch's random state whether an operator draws, and restores the state. A
# process has only one state, so threads never check two operators at once.

_AHEAD = 2  # operators queued for each worker


@dataclasses.dataclass(frozen=True)
class OperatorWork:
    """An operator to check, with all that a worker needs; values are drawn if there are none."""

    number: int
    key: str
    call: GraphCall
    settings: GraphSettings
    values: CallValues | None = None


def check_work(work: OperatorWork) -> OperatorResult:
    """Check one operator; an exception becomes its result."""
    try:
        return check_call(work.call, work.settings, work.values)
    except Exception as error:  # noqa: BLE001  (becomes the result)
        return _unsupported_result(work, f"checking it raised {in_one_line(error)}")


def check_executor(executor: str | Executor, jobs: int | None) -> None:
    """Refuse an executor that cannot run operators in parallel."""
    if executor == "threads" or isinstance(executor, ThreadPoolExecutor):
        raise UsageError(
            f"executor={executor!r}: operators checked by threads would share torch's random "
            "state; use processes, or dask://host:port"
        )
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs={jobs}: give 1 or more workers")


def run_works(
    works: Sequence[OperatorWork],
    *,
    executor: str | Executor = "processes",
    jobs: int | None = None,
    suspects: Collection[str] = (),
    begin: Callable[[str], None],
) -> Iterator[tuple[OperatorWork, OperatorResult]]:
    """Check operators; yields each with its result as soon as it is ready.

    Args:
        executor: as for `paritas.compare`, except threads.
        jobs: the number of workers; by default everything runs in this process.
        suspects: keys that may have crashed an earlier process: each runs in its own process.
        begin: called with the key of each operator that this process checks.
    """
    if executor == "processes" and (jobs or 1) == 1:
        yield from _check_in_process(works, suspects, begin)
        return
    travelling = [work for work in works if not _has_known_result(work) and _is_picklable(work)]
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
        if _has_known_result(work):
            yield work, check_work(work)
        elif work.key in suspects and _is_picklable(work):
            yield work, _check_isolated(work)
        else:
            begin(work.key)
            yield work, check_work(work)


def _has_known_result(work: OperatorWork) -> bool:
    """Whether the reader of the graph already knows the result: nothing runs."""
    return bool(work.call.idle or work.call.obstacle)


def _check_isolated(work: OperatorWork) -> OperatorResult:
    """Check it in its own process, which it may crash."""
    with executor_of("processes", 1) as (pool, _):
        [(_, result)] = run_batches(pool, check_work, [work], ahead=1)
    return _result_of_worker(work, result)


def _is_picklable(work: OperatorWork) -> bool:
    """Whether it can be pickled: a function made in memory cannot."""
    try:
        pickle.Pickler(io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL).dump(work)
    except Exception:  # noqa: BLE001  (objects refuse in many ways; this one stays here)
        return False
    return True


def _result_of_worker(
    work: OperatorWork, result: OperatorResult | Failed[OperatorWork]
) -> OperatorResult:
    if isinstance(result, Failed):
        died = f"the process that checked it died twice ({result.error})"
        return _unsupported_result(work, f"{died}: the operator crashed, or memory ran out")
    return result


def _unsupported_result(work: OperatorWork, reason: str) -> OperatorResult:
    return OperatorResult(
        key=work.key,
        operator=work.call.operator,
        signature=signature_of(work.call),
        sites=(work.call.site,),
        outcome=CallOutcome.UNSUPPORTED,
        reason=reason,
    )


# --- The check of a graph -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class VerifyGraphOptions:
    """What `verify_graph` checks of a graph, where it runs, and what it writes.

    Attributes:
        outdir: the folder for results.json, results.csv, report.html and a script for each failure;
            None writes nothing.
        options: where splits come from: `declared` by the graph, from the `library`, by running the
            operator (`discover`), or `all`. None uses what the graph declares, and asks the library
            about calls for which it declares nothing.
        ranks: the number of ranks to split over, or several numbers.
        cap: the longest dimension allowed; None keeps the real shapes.
        inputs: of the graph, by position or by name, or the folder of a dump: operators then get
            the values of such a run. Otherwise values are drawn.
        seed: for drawn values and for the checks.
        strict: count `unstable` as a failure.
        imports: modules with your operators, annotations and functions.
        device: where operators run, for example `"cuda"`; the CPU by default.
        confirm: "gloo" or "nccl" checks each split again on ranks that are real processes; NCCL
            needs `device="cuda"` and a GPU for each rank.
        prove: also prove each split for all shapes and numbers of ranks. A split that is refuted is
            wrong, and one that is not decided is not verified.
        placements: of inputs and parameters, and the collectives between calls (`GraphPlacements`,
            the same as a dict, or a TOML file): the graph as a whole is then proved, or refuted by
            its numbers on simulated ranks.
        executor: `processes`, `dask://host:port`, or an executor of `concurrent.futures` whose
            workers are not threads.
        jobs: the number of workers; by default everything runs in this process.
        resume: reuse what an earlier run finished, and keep the results of other graphs in the
            folder; False starts over.
        html: also write report.html.
        on_progress: called before each step, with its description and the progress so far.
    """

    outdir: str | Path | None = None
    _: dataclasses.KW_ONLY
    options: Source | None = None
    ranks: int | Sequence[int] = (2,)
    cap: int | None = None
    inputs: Any = None
    seed: int = 0
    strict: bool = False
    imports: Sequence[str] = ()
    device: str | torch.device | None = None
    confirm: BackendName | None = None
    prove: bool = False
    placements: GraphPlacements | Mapping[str, Any] | str | Path | None = None
    executor: str | Executor = "processes"
    jobs: int | None = None
    resume: bool = True
    html: bool = True
    on_progress: Callable[[Progress], None] | None = None

    def settings(self) -> GraphSettings:
        """How every operator is checked, validated."""
        ranks, imports, device = self.ranks, self.imports, self.device
        return GraphSettings(
            options=self.options,
            ranks=(ranks,) if isinstance(ranks, int) else tuple(ranks),
            cap=self.cap,
            seed=self.seed,
            strict=self.strict,
            imports=(imports,) if isinstance(imports, str) else tuple(imports),
            device=None if device is None else str(usable_device(device, "device=")),
            confirm=self.confirm,
            prove=self.prove,
        )


@shows_progress
@takes_options(VerifyGraphOptions)
def verify_graph(graph: Any, options: VerifyGraphOptions) -> GraphReport:
    """Check every operator of a graph: unsplit against split over ranks.

    Identical calls are checked once and counted. With a folder, each result is written as soon as
    it is ready, and the same run, started again, resumes from there. An interruption
    (`KeyboardInterrupt`) writes the results so far and is raised again. Results of other graphs in
    the folder are kept: this graph is added to them, and what was verified for one of them is not
    verified again.

    Args:
        graph: a file (`.pt2`, or nnScaler's `.ckp`), a `torch.export.ExportedProgram`, a
            `torch.fx.GraphModule`, `(model, inputs)`, or a `Graph` that was read.
        options: given as keyword arguments; see `VerifyGraphOptions`.

    Raises:
        UsageError: the graph cannot be read, an argument is invalid, or the folder cannot be
            written to or holds results of other settings or of another program.
    """
    from paritas.sharding.graphs.opening import open_graph

    began = time.monotonic()
    settings = options.settings()
    stated = None if options.placements is None else read_placements(options.placements)
    check_confirm(options.confirm, torch.device(settings.device or "cpu"), max(settings.ranks))
    check_executor(options.executor, options.jobs)
    show = options.on_progress or _ignore
    show(Progress("reading the graph"))
    opened = open_graph(graph, inputs=options.inputs, imports=settings.imports)
    modules = {name: _module_digest(name) for name in settings.imports}
    import_modules(settings.imports)  # they may register rules, which are part of a call's key
    run = _GraphRun(opened, settings, options.inputs, modules, show, began, placements=stated)
    run.prove_placed()
    if options.outdir is None:
        return run.check_groups(None, options.executor, options.jobs)
    folder, about = Path(options.outdir), run.about()
    prepare_folder(folder, resume=options.resume)
    with GraphJournal(folder, about, run.report(ended=False), resume=options.resume) as journal:
        if not options.resume:
            clear_folder(folder)
        run.reuse_results(folder, journal)
        try:
            report = run.check_groups(journal, options.executor, options.jobs)
        except KeyboardInterrupt:
            journal.interrupt()
            run.write(folder, journal, run.report(ended=False), html=options.html)
            raise
        return run.write(folder, journal, report, html=options.html)


@dataclasses.dataclass
class _GraphRun:
    """One run over a graph, from its groups to its report."""

    graph: Graph
    settings: GraphSettings
    inputs: Any
    modules: dict[str, str]
    show: Callable[[Progress], None]
    began: float
    results: dict[int, OperatorResult] = dataclasses.field(default_factory=dict)
    resumed: int = 0
    shared: int = 0
    number: int = 1
    notes: list[str] = dataclasses.field(default_factory=list)
    suspects: frozenset[str] = frozenset()
    folder: Path | None = None
    placements: GraphPlacements | None = None
    proof: GraphProof | None = None

    def __post_init__(self) -> None:
        self.groups = group_calls(self.graph, self.settings)

    def prove_placed(self) -> None:
        """Prove the graph as a whole, if placements are stated; mistakes in them stop the run."""
        if self.placements is not None:
            self.show(Progress("proving the graph"))
            self.proof = prove_placed(self.graph, self.placements, self.settings, self.inputs)

    def reuse_results(self, folder: Path, journal: GraphJournal) -> None:
        """Reuse what an earlier run finished, for this graph or another."""
        self.folder, self.suspects = folder, frozenset(journal.suspects)
        self.number = journal.own.number
        self.notes += journal.notes
        for group in self.groups:
            finished_result = journal.finished.get(group.key)
            if finished_result is not None:
                self.results[group.number] = _with_call_sites(finished_result, group)
                self.resumed += 1
                continue
            elsewhere = (
                journal.verified_elsewhere(group.key) if is_known_by_name(group.first) else None
            )
            if elsewhere is not None:
                result, graph = elsewhere
                notes = (*result.notes, f"not verified again: already verified for {graph}")
                placed = _with_call_sites(msgspec.structs.replace(result, notes=notes), group)
                self.results[group.number] = placed
                self.shared += 1
                journal.finish(placed)

    def write(
        self, folder: Path, journal: GraphJournal, report: GraphReport, *, html: bool
    ) -> GraphReport:
        """Write a report with those of the folder's other graphs."""
        journal.end(report)
        others = tuple(registered.whole_report() for registered in journal.others())
        complete_report = msgspec.structs.replace(report, others=others)
        write_results(folder, complete_report, html=html)
        return complete_report

    def check_groups(
        self, journal: GraphJournal | None, executor: str | Executor, jobs: int | None
    ) -> GraphReport:
        """Check what is not finished yet."""
        values = self._sample_arguments()
        works = [
            OperatorWork(
                group.number, group.key, group.first, self.settings, values.get(group.number)
            )
            for group in self.groups
            if group.number not in self.results
        ]
        begin = journal.begin if journal is not None else _ignore
        self._show_count()
        done = run_works(works, executor=executor, jobs=jobs, suspects=self.suspects, begin=begin)
        for work, result in done:
            group = self.groups[work.number]
            placed = _with_call_sites(result, group)
            if self.folder is not None and placed.outcome is CallOutcome.FAILED:
                placed = with_script(self.folder, work, placed, versions_here(), graph=self.number)
            if journal is not None:
                journal.finish(placed)
            self.results[work.number] = placed
            self._show_count()
        return self.report(ended=True)

    def report(self, *, ended: bool) -> GraphReport:
        """The results so far, in the order of first calls."""
        return GraphReport(
            graph=self.graph.name,
            kind=self.graph.kind,
            settings=self._settings_words(),
            versions=versions_here(),
            operators=tuple(self.results[number] for number in sorted(self.results)),
            calls=len(self.graph.calls),
            notes=(*self.graph.notes, *self.notes),
            seconds=time.monotonic() - self.began,
            resumed=self.resumed,
            shared=self.shared,
            number=self.number,
            ended=ended,
            strict=self.settings.strict,
            proof=self.proof,
        )

    def about(self) -> About:
        """What the run is about."""
        return About(
            graph=self.graph.name,
            calls=calls_digest(self.graph.calls),
            settings=self._settings_words(),
            versions=versions_here(),
            inputs=self._inputs_digest(),
            modules=self.modules,
        )

    def _settings_words(self) -> dict[str, str]:
        words = _describe_settings(self.settings, self.inputs)
        if self.placements is not None:
            words["placements"] = json_of(self.placements).decode()
        return words

    def _inputs_digest(self) -> str:
        if self.inputs is None:
            return ""
        if isinstance(self.inputs, (str, Path)):
            return str(Path(self.inputs).absolute())
        state = {} if self.graph.state is None else self.graph.state()
        return values_digest((self.inputs, state))

    def _sample_arguments(self) -> Mapping[int, CallValues]:
        """By group number, the arguments of its first call when the graph ran."""
        if self.inputs is None:
            return {}
        from paritas.sharding.graphs import sampling

        waiting = [group for group in self.groups if group.number not in self.results]
        keep = {group.first.position: group.number for group in waiting}
        self.show(Progress("running the graph"))
        if isinstance(self.inputs, (str, Path)):
            samples = sampling.values_from_dump(self.graph, Path(self.inputs), keep)
        else:
            samples = sampling.sample_values(
                self.graph,
                self.inputs,
                keep,
                imports=self.settings.imports,
                seed=self.settings.seed,
            )
        self.notes += samples.notes
        if any(len(group.calls) > 1 for group in waiting):
            self.notes.append("identical calls are checked with the arguments of the first of them")
        return {keep[position]: values for position, values in samples.values.items()}

    def _show_count(self) -> None:
        failing = sum(
            operator_result.outcome is CallOutcome.FAILED
            for operator_result in self.results.values()
        )
        # Reused results took no time; counting them would distort the estimate of the time left.
        reused_count = self.resumed + self.shared
        done, total = len(self.results) - reused_count, len(self.groups) - reused_count
        self.show(Progress("checking operators", done, total, failing=failing))


def _with_call_sites(result: OperatorResult, group: CallGroup) -> OperatorResult:
    """The result with all calls of the group; an earlier run may have other names for them."""
    return msgspec.structs.replace(result, key=group.key, sites=group.sites)


def _ignore(_: object) -> None:
    pass


# --- the description of a run ---------------------------------------------------------------------


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
    """The versions of paritas, torch and Python."""
    return {
        "paritas": own_version(),
        "torch": str(torch.__version__),  # a subclass of str, which JSON does not take
        "python": platform.python_version(),
    }


def _module_digest(name: str) -> str:
    """Of a module's source: a changed annotation there needs another check."""
    try:
        spec = importlib.util.find_spec(name)
    except Exception as error:
        raise UsageError(
            f"imports: {name!r} cannot be found: {type(error).__name__}: {error}; give a module "
            "that Python can import from here"
        ) from error
    if spec is None:
        raise UsageError(
            f"imports: there is no module {name!r}; give one that Python can import from here"
        )
    path = Path(spec.origin) if spec.origin else None
    if path is None or not path.is_file():
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()
