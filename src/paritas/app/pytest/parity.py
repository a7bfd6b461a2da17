"""The part of the plugin that needs torch: the `parity` fixture, goldens, the suite's journal."""

from __future__ import annotations

import ast
import dataclasses
import datetime as dt
import functools
import os
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.app.pytest.session import (
    CheckedCalls,
    golden_folder,
    outcome_of,
    record_outcome,
    test_folder,
)
from paritas.core.compiled.guard_settings import GuardOptions
from paritas.core.compiled.guarded_calls import GraphEntry, GuardJournal
from paritas.core.errors import MismatchError, UsageError, did_you_mean
from paritas.core.execution.subjects import VerifyConfig
from paritas.core.judging.pairs import Checks, Pair, judge_pair
from paritas.core.numerics.checkers import AutomaticValueChecker, ValueChecker
from paritas.core.numerics.contents import Opaque
from paritas.core.numerics.flattening import flatten_value
from paritas.core.results.findings import (
    Aspect,
    Coverage,
    Finding,
    Status,
    Verdict,
    mismatch,
    unverified,
)
from paritas.core.results.items import Item
from paritas.core.results.wording import list_first
from paritas.core.settings import own_version
from paritas.formats.dumps.reading import Dump
from paritas.formats.dumps.writing import DumpWriter
from paritas.formats.files.records import LOCK, Entry, Header, Site, TensorFacts, run_identity
from paritas.formats.files.tensor_bytes import as_stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    import pytest

    from paritas.app.pytest import PluginOptions
    from paritas.core.compiled.guard import Guard
    from paritas.core.judging.failures import FailedGraph
    from paritas.relations.rows import InvariantsReport


# --- `@pytest.mark.parity(...)` -------------------------------------------------------------------

VERIFY_NAMES = frozenset(field.name for field in dataclasses.fields(VerifyConfig))
GUARD_NAMES = frozenset(field.name for field in dataclasses.fields(GuardOptions)) - {"backend"}


def settings_of(item: pytest.Item) -> dict[str, Any]:
    """The settings in the marks of a test, for `verify` and `guard` together.

    Raises:
        UsageError: a name is unknown, a value is wrong, or a value has no name.
    """
    settings: dict[str, Any] = {}
    marks = list(item.iter_markers("parity"))  # the nearest first
    for mark in reversed(marks):
        if mark.args:
            raise UsageError(
                f"@pytest.mark.parity of {item.nodeid} has a positional value "
                f"{mark.args[0]!r:.80}; write name=value, such as strict=True"
            )
        settings |= mark.kwargs
    check_names(settings, f"@pytest.mark.parity of {item.nodeid}")
    # Discarded: this reports a wrong value before the test runs.
    VerifyConfig(**{name: value for name, value in settings.items() if name in VERIFY_NAMES})
    GuardOptions(**{name: value for name, value in settings.items() if name in GUARD_NAMES})
    return settings


def check_names(settings: dict[str, Any], position: str) -> None:
    """Raise `UsageError` for a name that neither `verify` nor `guard` knows."""
    names = sorted(VERIFY_NAMES | GUARD_NAMES)
    for name in settings:
        if name not in names:
            raise UsageError(f"{position}: unknown setting {name!r}; {did_you_mean(name, names)}")


# --- Goldens --------------------------------------------------------------------------------------

_ROOT = "value"
_CONTAINERS = "containers"
_AS_TEXT = (bool, int, str, bytes, type(None))
_MOST_NAMED = 5
_NO_GOLDEN = (
    KeyError,
    MemoryError,
    RecursionError,
    SyntaxError,
    ValueError,
    msgspec.MsgspecError,
)


@dataclasses.dataclass(frozen=True)
class Golden:
    """A flattened tree of values.

    Attributes:
        values: tensors on the CPU and plain Python values, by path.
        containers: the class of each container, by path.
    """

    values: dict[str, Any]
    containers: dict[str, str]


def golden_of(tree: Any) -> Golden:
    """Flatten a tree of values.

    Raises:
        UsageError: a value is not a tensor, a number, a string or None.
    """
    values: dict[str, Any] = {}
    flat = flatten_value(tree, _ROOT)
    for path, leaf in flat.leaves.items():
        if isinstance(leaf, torch.Tensor):
            values[path] = leaf.detach().resolve_conj().resolve_neg().cpu()
        elif type(leaf) in _AS_TEXT:
            values[path] = leaf
        else:
            kind = type(leaf.value if isinstance(leaf, Opaque) else leaf).__name__
            raise UsageError(
                f"a golden cannot store {path}, a {kind}: give tensors, numbers, strings and None, "
                "in lists, tuples, dicts or dataclasses"
            )
    if not values:
        raise UsageError(f"a golden of {tree!r:.80} would be empty; give it at least one value")
    return Golden(values, {path: kind.name for path, kind in flat.kinds.items()})


def write_golden(path: Path, golden: Golden, test: str) -> None:
    """Write it as a dump; an existing one is replaced."""
    header = Header(
        run=run_identity(0, 1),
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        torch=str(torch.__version__),
        paritas=own_version(),
        program=test,
        sources=("file",),
        selection={_CONTAINERS: msgspec.json.encode(golden.containers).decode()},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = DumpWriter(path, header, overwrite=True)
    for sequence, (name, value) in enumerate(golden.values.items()):
        site = Site(source="file", level="tensor", name=name)
        if isinstance(value, torch.Tensor):
            facts = TensorFacts(
                dtype=str(value.dtype).removeprefix("torch."),
                shape=tuple(value.shape),
                stride=tuple(value.stride()),
            )
            stored = as_stored(value)
            entry = Entry(sequence=sequence, step=0, site=site, tensor=facts, stored=stored)
        else:
            entry = Entry(sequence=sequence, step=0, site=site, value=repr(value))
        writer.add(entry)
    writer.close(header)
    (writer.folder / LOCK).unlink(missing_ok=True)  # goldens are committed to a repository


def read_golden(path: Path) -> Golden:
    """Read it; the file is not trusted, and no code in it is executed.

    Raises:
        UsageError: it is damaged or incomplete.
    """
    dump = Dump.open(path)
    header = dump.header(0)
    if dump.problems or not header.closed:
        why = "; ".join(dump.problems) or "it is incomplete"
        raise UsageError(f"{path} cannot be used: {why}")
    values: dict[str, Any] = {}
    try:
        classes = msgspec.json.decode(header.selection[_CONTAINERS], type=dict[str, str])
        for record in dump.records():
            is_tensor = record.tensor is not None
            values[record.site.name] = (
                dump.read(record) if is_tensor else ast.literal_eval(record.value or "")
            )
    except _NO_GOLDEN as error:
        raise UsageError(f"{path} is not a golden: {type(error).__name__}: {error}") from error
    return Golden(values, classes)


def judge_golden(
    golden: Golden,
    present: Golden,
    checkers: Sequence[ValueChecker] = (AutomaticValueChecker(),),
    *,
    strict: bool = False,
) -> Verdict:
    """Compare stored and present values: names, containers, dtypes, shapes, values.

    There is no program to measure noise with, so floats are judged by their dtype alone.
    """
    findings: list[Finding] = []
    notes: list[str] = []
    gone = [path for path in golden.values if path not in present.values]
    new = [path for path in present.values if path not in golden.values]
    if gone or new:
        changes = [f"{len(gone)} missing ({list_first(gone, _MOST_NAMED)})"] if gone else []
        changes += [f"{len(new)} new ({list_first(new, _MOST_NAMED)})"] if new else []
        findings.append(_structure(f"the values have other names: {', '.join(changes)}"))
    for path in dict.fromkeys((*golden.containers, *present.containers)):
        if path in golden.values and path not in golden.containers:
            continue  # older goldens do not store the class of a number
        before, now = (side.containers.get(path, "a value") for side in (golden, present))
        if before != now:
            findings.append(_structure(f"{path} is {now} instead of {before}"))
    checks = Checks(checkers=tuple(checkers))
    both = [path for path in golden.values if path in present.values]
    for path in both:
        pair_findings, noted = judge_pair(
            Pair(Item(name=path), golden.values[path], present.values[path]), checks
        )
        findings += pair_findings
        notes += noted
    unmatched = [f"{path} (golden only)" for path in gone]
    unmatched += [f"{path} (not in the golden)" for path in new]
    return Verdict(
        findings=tuple(findings),
        coverage=Coverage(compared=len(both), unmatched=tuple(unmatched)),
        notes=tuple(notes),
        strict=strict,
    )


def missing_golden(name: str, reason: str) -> Verdict:
    """The verdict without a golden to compare with: unverified."""
    advice = (
        "run pytest with --paritas-update to write it, check its content (paritas inspect), and "
        "commit it"
    )
    return Verdict(findings=(unverified(f"golden {name!r}", reason, advice),))


def _structure(reason: str) -> Finding:
    item = Item(name=_ROOT)
    return mismatch(item, Aspect.STRUCTURE, reason)


# --- The journal of `--paritas-guard` -------------------------------------------------------------


class SuiteJournal(GuardJournal):
    """Counts graphs over the whole run, and keeps findings on one page per phase of a test.

    Attributes:
        raised: calls in which the compiled code and its graph both raised. There is nothing to
            compare, and whether the error was expected is for the test to decide.
    """

    def __init__(self, *, strict: bool = False) -> None:
        super().__init__(strict=strict)
        self._page = _Page(strict=strict)
        self.raised = 0

    def turn(self, *, strict: bool) -> CheckedCalls | None:
        """Start a new page; return the calls on the old one, None if it is empty."""
        with self._lock:
            page, self._page = self._page, _Page(strict=strict)
            page.passes, self.passes = self.passes, 0
            page.splits, self.splits = self.splits, 0
            calls = sum(entry.calls for entry in self.graphs)
            for entry in self.graphs:
                entry.calls = 0
        if not page.has_something:
            return None
        checked = sum(entry.checked for entry in page.graphs)
        return CheckedCalls(page.verdict(), len(page.graphs), calls, checked)

    def enter(self, label: str, source: str = "", unguarded: str = "") -> GraphEntry:
        """Enter a graph; it is on the page only once it is called, or cannot be guarded."""
        with self._lock:
            if unguarded:
                return self._page.enter(label, source, unguarded)
            return super().enter(label, source)

    def note_call(self, entry: GraphEntry, part: Verdict) -> None:
        """Record a checked call on the current page."""
        both_raised = (
            finding.aspect is Aspect.EXCEPTION and finding.status is Status.UNVERIFIED
            for finding in part.findings
        )
        with self._lock:
            if part.findings and all(both_raised):
                self.raised += 1
                return
            self._page.note_call(self._page.entry_like(entry), part)

    def add(self, findings: Iterable[Finding], notes: Iterable[str] = ()) -> None:
        """Add findings to the current page."""
        with self._lock:
            self._page.add(findings, notes)

    def keep(self, label: str, make: Callable[[], FailedGraph | None]) -> list[FailedGraph]:
        """Keep a failing call as long as its page."""
        with self._lock:
            return self._page.keep(label, make)

    def verdict(self) -> Verdict:
        """The verdict on the current page."""
        with self._lock:
            return self._page.verdict()


class _Page(GuardJournal):
    """The calls between two turns."""

    def __init__(self, *, strict: bool) -> None:
        super().__init__(strict=strict)
        self._entries: dict[str, GraphEntry] = {}

    @property
    def has_something(self) -> bool:
        """Whether anything was checked, could not be checked, or has a finding."""
        return bool(self.graphs or self._findings or self.passes or self.splits)

    def entry_like(self, entry: GraphEntry) -> GraphEntry:
        """This page's own entry for a graph."""
        if entry.label not in self._entries:
            self._entries[entry.label] = self.enter(entry.label, entry.source)
        return self._entries[entry.label]


# --- The fixture ----------------------------------------------------------------------------------


class Parity:
    """The checks of one test. Each verdict goes into the test's report.

    Attributes:
        settings: from `@pytest.mark.parity(...)` on the test, its class and its module.
    """

    def __init__(self, item: pytest.Item, options: PluginOptions) -> None:
        self.settings = {"strict": options.strict, **settings_of(item)}
        if options.locate_seconds is not None:
            self.settings.setdefault("locate_seconds", options.locate_seconds)
        self._item = item
        self._options = options
        self._record = functools.partial(record_outcome, item, options)
        self._guards: list[Guard] = []
        self._goldens: set[str] = set()

    def verify(
        self,
        inputs: Any,
        model: Callable[..., Any],
        candidate: Callable[..., Any],
        config: VerifyConfig | None = None,
        **settings: Any,
    ) -> Verdict:
        """Fail the test unless the candidate computes what the model computes.

        Args:
            inputs: a list or tuple of positional inputs, `Inputs(args, kwargs)`, or a list of
                `Inputs`.
            model: the reference, an `nn.Module` or any callable.
            candidate: an `nn.Module` or any callable.
            config: replaces the settings of the marks.
            settings: fields of `VerifyConfig`, which override `config` or the marks.

        Returns:
            The verdict; it can be a failure only if `raise_on_mismatch` is off.

        Raises:
            MismatchError: the verdict does not pass.
        """
        __tracebackhide__ = True
        from paritas.verification.verify import verify

        if not isinstance(config, VerifyConfig | None):
            raise UsageError(f"config must be a VerifyConfig, not {config!r:.120}")
        marked = {name: self.settings[name] for name in self.settings if name in VERIFY_NAMES}
        base = marked
        if config is not None:
            base = {name: getattr(config, name) for name in VERIFY_NAMES}
        expected = VerifyConfig.from_options(**(base | settings))
        quiet = dataclasses.replace(expected, raise_on_mismatch=False)
        verdict = verify(inputs, model, candidate, quiet)
        self._record("verify", verdict)
        if expected.raise_on_mismatch and verdict.enabled and not verdict.passed:
            raise MismatchError(str(verdict), verdict)
        return verdict

    def guard(self, backend: str | Callable[..., Any] = "inductor", **settings: Any) -> Guard:
        """A backend for `torch.compile` that checks every graph.

        By default the test continues after a mismatch and fails at its end; `on_mismatch` changes
        that.

        Args:
            backend: a name that `torch.compile` knows, or a function.
            settings: of `paritas.guard`, which override those of the marks.
        """
        from paritas.core.compiled.guard import guard

        marked = {name: self.settings[name] for name in self.settings if name in GUARD_NAMES}
        guard_made = guard(backend, **({"on_mismatch": "record"} | marked | settings))
        self._guards.append(guard_made)
        return guard_made

    def invariants(
        self,
        model: Any,
        inputs: Any,
        *,
        only: Sequence[str] | str | None = None,
        candidate: Any = None,
    ) -> InvariantsReport:
        """Fail the test unless the ways of running a model that must agree, agree.

        Args:
            model: an `nn.Module` or any callable.
            inputs: as for `verify`.
            only: names of relations, or `serving`, `training` or `own`; by default, all that apply.
            candidate: a changed form of the model, which runs the other ways.

        Raises:
            MismatchError: a relation does not hold or could not be compared, or none applies.
        """
        __tracebackhide__ = True
        from paritas.relations.checking import invariants

        strict = bool(self.settings["strict"])
        report = invariants(model, inputs, only=only, candidate=candidate, strict=strict)
        self._record("invariants", report.verdict)
        report.raise_if_failed()
        return report

    def golden(
        self, tensor_tree: Any, name: str, *, value_checker: ValueChecker | None = None
    ) -> Verdict:
        """Fail the test unless these values equal those stored under this name.

        A pytest run with `--paritas-update` stores them beside the test, in
        `golden/<test file>/<test>/<name>`.

        Args:
            tensor_tree: tensors, numbers and strings in lists, tuples, dicts or dataclasses.
            name: of the golden, unique in a test.
            value_checker: replaces the one of the marks, or the automatic one.

        Raises:
            MismatchError: they differ by more than rounding, or nothing is stored.
        """
        __tracebackhide__ = True
        if name in self._goldens:
            raise UsageError(f"this test already has a golden {name!r}; give each its own name")
        options = self._options
        tests = test_folder(options.root, options.golden_dir, self._item.nodeid)
        path = golden_folder(tests, name)
        self._goldens.add(name)
        present = golden_of(tensor_tree)
        before = self._judge_golden(path, name, present, value_checker)
        facts: dict[str, Any] = {"name": name, "golden": self._near(path)}
        verdict = before
        if options.update and not before.passed:
            is_new = not path.exists()
            write_golden(path, present, self._item.nodeid)
            verdict = self._judge_golden(path, name, present, value_checker)
            facts["written"] = "written" if is_new else "changed"
            if not is_new:  # the summary shows what changed
                facts["worst"] = outcome_of("golden", before).worst
        self._record("golden", verdict, **facts)
        if not verdict.passed:
            raise MismatchError(str(verdict), verdict)
        return verdict

    def conclude(self, *, interrupted: bool) -> list[Verdict]:
        """Judge the guards of the test; return the verdicts that do not pass.

        Args:
            interrupted: the test did not finish, so a guard may not have been used.
        """
        failed: list[Verdict] = []
        guards, self._guards = self._guards, []
        for guard in guards:
            graphs = guard.journal.graphs
            if interrupted and not graphs:
                continue
            verdict = _verdict_of(guard)
            self._record(
                "guard",
                verdict,
                name=guard.backend.name,
                graphs=len(graphs),
                calls=sum(entry.calls for entry in graphs),
                checked=sum(entry.checked for entry in graphs),
            )
            if verdict.enabled and not verdict.passed:
                failed.append(verdict)
        return failed

    def _judge_golden(
        self, path: Path, name: str, present: Golden, value_checker: ValueChecker | None
    ) -> Verdict:
        if not path.exists():
            return missing_golden(name, f"{self._near(path)} does not exist")
        checker = self.settings.get("value_checker") if value_checker is None else value_checker
        config = VerifyConfig() if checker is None else VerifyConfig(value_checker=checker)
        try:
            stored = read_golden(path)
        except UsageError as error:
            return missing_golden(name, str(error))
        strict = bool(self.settings["strict"])
        return judge_golden(stored, present, config.checkers, strict=strict)

    def _near(self, path: Path) -> str:
        """Relative to the root of the run, which is the same on every worker."""
        return os.path.relpath(path, self._options.root)


def _verdict_of(guard: Guard) -> Verdict:
    """The verdict of a guard; unverified if it was never used."""
    if not guard.enabled:
        note = "the guard was disabled: nothing was compared"
        return Verdict(notes=(note,), enabled=False)
    if guard.journal.graphs:
        return guard.verdict()
    finding = unverified(
        f"guard({guard.backend.name!r})",
        "the test compiled nothing with it",
        "use it: torch.compile(model, backend=parity.guard(...)), and call the result",
    )
    return Verdict(findings=(finding,), notes=guard.verdict().notes)
