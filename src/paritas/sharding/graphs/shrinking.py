"""Shrinks a wrong split to the smallest shapes that show it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.candidates.loading import find_graph
from paritas.core.errors import UsageError
from paritas.core.operators.calls import OperatorCall
from paritas.core.placement.placement import Recipe
from paritas.core.reporting.scripts import SHOWN, NoScriptError
from paritas.core.shrinking import FolderShrinker, NothingFailsError, ShrinkReport, ShrinkSearch
from paritas.core.time_limit import TimeLimit
from paritas.sharding.graphs.calls import (
    OPTION_SOURCES,
    CallValues,
    GraphCall,
    GraphSettings,
    TensorValue,
    group_calls,
)
from paritas.sharding.graphs.checking import option_of
from paritas.sharding.graphs.opening import open_graph
from paritas.sharding.graphs.results_folder import JSON
from paritas.sharding.graphs.rows import CallOutcome, GraphReport
from paritas.sharding.graphs.scripts import function_text, write_first_script
from paritas.sharding.graphs.verify import OperatorWork, check_work, versions_here
from paritas.sharding.operators.annotation import Annotation, Option
from paritas.sharding.operators.library.registry import name_of
from paritas.sharding.operators.recipe_checks import kinds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paritas.core.judging.failures import FailedSplit
    from paritas.core.operators.calls import OperatorCall, Place
    from paritas.core.results.findings import Aspect, Status
    from paritas.sharding.graphs.rows import OperatorResult, OptionResult


# --- The shapes to try, from small to large -------------------------------------------------------

_LARGEST_CAP = 1024


@dataclasses.dataclass(frozen=True)
class WantedSplit:
    """The wrong split to reproduce: `split` in the words of the rule, `kinds` of failure."""

    idx: int
    dim: int
    split: str
    ranks: int
    status: Status
    kinds: frozenset[tuple[Aspect, str]]

    @classmethod
    def of(cls, option: OptionResult) -> WantedSplit:
        """The split of a checked option."""
        kinds = kinds_of(option.verdict)
        return cls(option.idx, option.dim, option.split, option.ranks, option.status, kinds)

    def is_shown_by(self, option: OptionResult) -> bool:
        """Whether the same split is wrong in the same way."""
        return WantedSplit.of(option) == self


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A call on smaller shapes, and the failure that it must show."""

    words: str
    work: OperatorWork
    wanted: WantedSplit


def attempts_on_caps(
    call: GraphCall, settings: GraphSettings, wanted_split: WantedSplit, key: str = ""
) -> Iterator[Attempt]:
    """The call with dimensions cut to increasing lengths, and finally as it was checked."""
    for cap in _caps(call, wanted_split.ranks, settings.cap):
        capped = dataclasses.replace(settings, cap=cap, ranks=(wanted_split.ranks,))
        words = f"no dimension longer than {cap}" if cap else "the original shapes"
        yield Attempt(words, OperatorWork(0, key, call, capped), wanted_split)


def _caps(call: GraphCall, ranks: int, usual: int | None) -> Iterator[int | None]:
    """Lengths that divide evenly, while they shorten anything."""
    longest = max((length for value in call.tensors() for length in value.shape), default=0)
    cap = ranks
    while cap < min(longest, _LARGEST_CAP + 1, usual or longest):
        yield cap
        cap *= 2
    yield usual


# --- from the call of an operator -----------------------------------------------------------------


def attempts_on(failed: FailedSplit, setup: Sequence[str] = ()) -> Iterator[Attempt]:
    """A split on smaller shapes with drawn values, and finally on the values of the check.

    Raises:
        UsageError: no script could do the same; the message says why.
    """
    call, recipe, ranks = failed.call, failed.recipe, failed.ranks
    if not isinstance(recipe, Recipe) or not isinstance(ranks, int):
        raise UsageError(
            f"{_name(call)} is split over a mesh of {ranks} ranks, but scripts support one axis; "
            "check the axes one by one and shrink the wrong one"
        )
    settings = GraphSettings(ranks=(ranks,), seed=failed.seed, imports=_imported_modules(setup))
    _check_importable(call, settings.imports)
    return _attempts(failed, graph_call(call), settings)


def _attempts(failed: FailedSplit, bare: GraphCall, settings: GraphSettings) -> Iterator[Attempt]:
    option = option_of(failed.recipe, failed.call)
    plain = dataclasses.replace(bare, annotation=failed.recipe)
    wanted_split = WantedSplit(
        option.idx, option.dim, option.split, settings.ranks[0], failed.status, failed.kinds
    )
    first = _first_option(failed, wanted_split.ranks)
    if first is None:
        yield from attempts_on_caps(plain, settings, wanted_split)
    else:
        # The rule makes another recipe for other shapes.
        named = dataclasses.replace(bare, annotation=failed.annotation)
        there = dataclasses.replace(wanted_split, idx=first.idx, dim=first.dim)
        yield from attempts_on_caps(named, settings, there)
    values = CallValues(failed.call.args, failed.call.kwargs)
    yield Attempt(
        "the values of the check", OperatorWork(0, "", plain, settings, values), wanted_split
    )


def _first_option(failed: FailedSplit, ranks: int) -> Option | None:
    """The option of a rule that produced the failed split; None if there is none."""
    if failed.annotation is None:
        return None
    annotation = Annotation.parse(failed.annotation)
    for option in annotation.options(failed.call):
        wanted_option = dataclasses.replace(option, num=ranks)
        try:
            recipe = annotation.recipe(failed.call, wanted_option)
        except UsageError:  # not over this number of ranks
            continue
        if recipe == failed.recipe:
            return option
    return None


def graph_call(call: OperatorCall) -> GraphCall:
    """A call as a graph has it, with shapes in place of tensors."""
    names: dict[int, str] = {}

    def bare(argument_place: Place, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = names.setdefault(
                id(value), f"tensor{len(names)}"
            )  # one tensor may be passed twice
            grad = argument_place not in call.without_gradient
            return TensorValue(name, tuple(value.shape), value.dtype, requires_grad=grad)
        if isinstance(value, dict):
            return {key: bare(argument_place, item) for key, item in value.items()}
        if isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields")):
            return type(value)(bare(argument_place, item) for item in value)
        return value

    return GraphCall(
        position=0,
        name="",
        operator=_name(call),
        args=tuple(bare(position, value) for position, value in enumerate(call.args)),
        kwargs={name: bare(name, value) for name, value in call.kwargs.items()},
        function=call.function,
    )


def _name(call: OperatorCall) -> str:
    return call.name.removeprefix("torch.ops.") or name_of(call.function)


def _imported_modules(setup: Sequence[str]) -> tuple[str, ...]:
    import_matches = [re.fullmatch(r"\s*import\s+([\w.]+)\s*", statement) for statement in setup]
    for statement, form in zip(setup, import_matches, strict=True):
        if form is None:
            raise UsageError(
                f"setup {statement!r}: only imports are supported for a split; write "
                "'import package.module'"
            )
    return tuple(form[1] for form in import_matches if form is not None)


def _check_importable(call: OperatorCall, imports: tuple[str, ...]) -> None:
    """Refuse an operator that no script could call, before the search."""
    try:
        function_text(_name(call), call.function, imports)
    except NoScriptError as error:
        home = getattr(call.function, "__module__", None)
        raise UsageError(
            f"{error} (its module is {home or 'unknown'}); define it at the top level of a module, "
            "and if a module registers it, import that: setup=['import package.module']"
        ) from None


# --- The search -----------------------------------------------------------------------------------

# There is only one operator, so only its shapes can shrink. They are capped, from small to large,
# until the same split is wrong in the same way.

_NONE = "none"


def shrink_graph_results(
    folder: Path,
    outdir: Path,
    *,
    graph: str | None = None,
    seconds: float = 120.0,
    on_progress: Callable[[str], None] | None = None,
) -> ShrinkReport:
    """Write the script of the first operator with a wrong split, on the smallest shapes.

    Args:
        graph: what was checked, a file or `module:factory`, if it is not the file named in the
            results.
    """
    search = ShrinkSearch(outdir, TimeLimit(seconds), on_progress)
    report = GraphReport.from_json((folder / JSON).read_bytes())
    report = next(
        (
            candidate_report
            for candidate_report in (report, *report.others)
            if candidate_report.exit_code == 1
        ),
        report,
    )
    failed = next(
        (operator for operator in report.operators if operator.outcome is CallOutcome.FAILED), None
    )
    if failed is None or not failed.failures:
        raise NothingFailsError(f"no operator of {report.graph!r} has a wrong split")
    wanted_split = WantedSplit.of(failed.failures[0])
    settings = _parse_settings(report.settings)
    search.show(f"reading {report.graph}")
    call = _read_call(report.graph if graph is None else find_graph(graph), settings, failed)
    attempts = attempts_on_caps(call, settings, wanted_split, failed.key)
    return _run_attempts(search, attempts, report.versions)


FOLDER_SHRINKER = FolderShrinker(JSON, shrink_graph_results)


def shrink_splits(
    failed: Sequence[FailedSplit],
    outdir: str | Path | None = None,
    *,
    seconds: float = 120.0,
    setup: Sequence[str] = (),
    on_progress: Callable[[str], None] | None = None,
) -> ShrinkReport:
    """Write the script of the first split that fails again.

    Args:
        failed: splits of one operator.
        outdir: the folder for the script; a new folder by default.
        setup: statements such as `import package.module`, for a module that registers the operator.
    """
    search = ShrinkSearch(outdir, TimeLimit(seconds), on_progress)
    for position, failed_split in enumerate(failed):
        try:
            return _run_attempts(search, attempts_on(failed_split, setup), versions_here())
        except NothingFailsError:
            if position == len(failed) - 1:
                raise
    raise NothingFailsError("no split is wrong, so there is nothing to shrink")


def _run_attempts(
    search: ShrinkSearch, attempts: Iterator[Attempt], versions: Mapping[str, str]
) -> ShrinkReport:
    """Write the script of the first attempt that shows the failure."""
    attempt, queries = None, 0
    for queries, attempt in enumerate(attempts, start=1):
        if search.limit.is_over:
            raise NothingFailsError(
                f"{_title(attempt)}: it did not fail within {search.limit.seconds:g} seconds; "
                "allow more time"
            )
        search.show_step(attempt.words)
        result = check_work(attempt.work)
        shown = tuple(option for option in result.options if attempt.wanted.is_shown_by(option))
        if shown:
            search.show("running the script")
            result = msgspec.structs.replace(result, options=shown)
            return _report_script(search, attempt, result, versions, queries)
    name = "" if attempt is None else f"{_title(attempt)}: "
    raise NothingFailsError(f"{name}when checked again, it is not wrong in the same way")


def _report_script(
    search: ShrinkSearch,
    attempt: Attempt,
    result: OperatorResult,
    versions: Mapping[str, str],
    queries: int,
) -> ShrinkReport:
    search.folder.mkdir(parents=True, exist_ok=True)
    outcome = write_first_script(search.folder, attempt.work, result, versions)
    if not outcome.path:
        raise UsageError(outcome.note or "no standalone script")
    path = search.folder / outcome.path
    data = path.with_suffix(".safetensors")
    option = result.failures[0]
    diagnoses = (
        failure.diagnosis for failure in option.verdict.failures if failure.diagnosis is not None
    )
    return ShrinkReport(
        script=str(path),
        data=str(data) if data.exists() else None,
        shows=not outcome.note,
        what=f"{_title(attempt)}: {option.status}",
        before=result.signature,
        after=attempt.words,
        diagnosis=next(diagnoses, None),
        queries=queries,
        seconds=search.limit.spent,
        said=outcome.note or SHOWN,
    )


def _title(attempt: Attempt) -> str:
    wanted_split = attempt.wanted
    return f"{attempt.work.call.operator}, {wanted_split.split} over {wanted_split.ranks} ranks"


def _parse_settings(words: Mapping[str, str]) -> GraphSettings:
    """The settings of a run, from its results."""
    if words.get("inputs", "drawn") == "given":
        raise UsageError(
            "its values were passed in Python and are not in the folder; use the script in the "
            "folder, which has them"
        )
    options: Any = words.get("options")
    cap, imports = words.get("cap", _NONE), words.get("imports", _NONE)
    device = words.get("device", _NONE)
    return GraphSettings(
        options=options if options in OPTION_SOURCES else None,
        ranks=tuple(int(number) for number in words.get("ranks", "2").split(",")),
        cap=None if cap == _NONE else int(cap),
        seed=int(words.get("seed", "0")),
        strict=words.get("strict") == "True",
        imports=() if imports == _NONE else tuple(name.strip() for name in imports.split(",")),
        device=None if device == _NONE else device,
    )


def _read_call(source: Any, settings: GraphSettings, failed: OperatorResult) -> GraphCall:
    if isinstance(source, str) and not Path(source).is_file():
        raise UsageError(
            f"the graph {source!r} is not a file here; use --graph with the graph that "
            "verify-graph checked"
        )
    graph = open_graph(source, imports=settings.imports)
    nodes = {site.node for site in failed.sites}
    for group in group_calls(graph, settings):
        if group.first.operator == failed.operator and group.first.name in nodes:
            return group.first
    raise UsageError(f"the graph no longer has {failed.operator} at {failed.sites[0].node}")
