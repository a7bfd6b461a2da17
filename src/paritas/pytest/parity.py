"""The `parity` fixture: what a test can ask, its marks, and goldens."""

from __future__ import annotations

import ast
import dataclasses
import datetime as dt
import os
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.checks.guard_settings import GuardSettings
from paritas.dumps.reading import Dump
from paritas.dumps.writing import DumpWriter
from paritas.errors import MismatchError, UsageError, did_you_mean
from paritas.execution.subjects import VerifyConfig
from paritas.files.dtypes import as_stored
from paritas.files.folders import LOCK, run_identity
from paritas.files.records import Entry, Header, Site, TensorFacts
from paritas.numerics.checkers import AutomaticValueChecker, ValueChecker
from paritas.numerics.contents import Opaque
from paritas.numerics.flattening import flattened
from paritas.numerics.judge import Checks, check_pair
from paritas.pytest.outcomes import Recorder, golden_folder, outcome_of, test_folder
from paritas.results.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.results.wording import enumerated
from paritas.settings.versions import own_version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import pytest

    from paritas.checks.guard import Guard
    from paritas.pytest import PluginOptions


# --- `@pytest.mark.parity(...)` -------------------------------------------------------------------

VERIFY_NAMES = frozenset(field.name for field in dataclasses.fields(VerifyConfig))
# Not read off `paritas.guard` itself, which imports all of the compiler.
_GUARD_FIELDS = frozenset(field.name for field in dataclasses.fields(GuardSettings)) - {"seed"}
GUARD_NAMES = _GUARD_FIELDS | {"enabled", "options"}


def settings_of(item: pytest.Item) -> dict[str, Any]:
    """What the marks of a test say, for `verify` and `guard` together.

    Raises:
        UsageError: a name is unknown, a value is not what it takes, or comes without its name.
    """
    settings: dict[str, Any] = {}
    marks = list(item.iter_markers("parity"))  # the nearest first
    for mark in reversed(marks):
        if mark.args:
            raise UsageError(
                f"@pytest.mark.parity of {item.nodeid} has {mark.args[0]!r:.80} without a name; "
                "write name=value, such as strict=True"
            )
        settings |= mark.kwargs
    check_names(settings, f"@pytest.mark.parity of {item.nodeid}")
    # Made and thrown away: a wrong value is told before the test runs.
    VerifyConfig(**{name: value for name, value in settings.items() if name in VERIFY_NAMES})
    GuardSettings(**{name: value for name, value in settings.items() if name in _GUARD_FIELDS})
    return settings


def check_names(settings: dict[str, Any], place: str) -> None:
    """Refuse a name that neither `verify` nor `guard` knows, and tell its nearest."""
    known = sorted(VERIFY_NAMES | GUARD_NAMES)
    for name in settings:
        if name not in known:
            raise UsageError(f"{place}: unknown setting {name!r}; {did_you_mean(name, known)}")


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
    """A tree of values, flat.

    Attributes:
        values: by their path: tensors on the CPU, and what Python writes as a literal.
        containers: the class of each container, by its path.
    """

    values: dict[str, Any]
    containers: dict[str, str]


def golden_of(tree: Any) -> Golden:
    """What is kept of a tree.

    Raises:
        UsageError: a value is neither a tensor nor a number, a string or None.
    """
    values: dict[str, Any] = {}
    flat = flattened(tree, _ROOT)
    for path, leaf in flat.leaves.items():
        if isinstance(leaf, torch.Tensor):
            values[path] = leaf.detach().resolve_conj().resolve_neg().cpu()
        elif type(leaf) in _AS_TEXT:
            values[path] = leaf
        else:
            raise UsageError(
                f"a golden cannot hold {path}, a {_class_name(leaf)}: give tensors, numbers, "
                "strings and None, in lists, tuples, dicts or dataclasses"
            )
    if not values:
        raise UsageError(f"a golden of {tree!r:.80} would hold no value; give it at least one")
    return Golden(values, {path: kind.name for path, kind in flat.kinds.items()})


def write_golden(path: Path, golden: Golden, test: str) -> None:
    """Write it as a dump, in place of one that is there."""
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
            stored = as_stored(value)
            entry = Entry(
                sequence=sequence, step=0, site=site, tensor=_tensor_facts(value), stored=stored
            )
        else:
            entry = Entry(sequence=sequence, step=0, site=site, value=repr(value))
        writer.add(entry)
    writer.close(header)
    (writer.folder / LOCK).unlink(missing_ok=True)  # a golden goes into a repository


def read_golden(path: Path) -> Golden:
    """Read it back; nothing in it is trusted, and none of it is run.

    Raises:
        UsageError: it is damaged, or was not written to its end.
    """
    dump = Dump.open(path)
    header = dump.header(0)
    if dump.problems or not header.closed:
        why = "; ".join(dump.problems) or "it was not written to its end"
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
        raise UsageError(f"{path} is no golden: {type(error).__name__}: {error}") from error
    return Golden(values, classes)


def judge_golden(
    golden: Golden,
    present: Golden,
    checkers: Sequence[ValueChecker] = (AutomaticValueChecker(),),
    *,
    strict: bool = False,
) -> Verdict:
    """Compare what a test has now with what it had: names, containers, dtypes, shapes, values.

    There is no program to measure noise with, so that floats are judged by their dtype alone.
    """
    findings: list[Finding] = []
    notes: list[str] = []
    gone = [path for path in golden.values if path not in present.values]
    new = [path for path in present.values if path not in golden.values]
    if gone or new:
        told = [f"{len(gone)} gone ({enumerated(gone, _MOST_NAMED)})"] if gone else []
        told += [f"{len(new)} new ({enumerated(new, _MOST_NAMED)})"] if new else []
        findings.append(_structure(f"the values have other names: {', '.join(told)}"))
    for path in dict.fromkeys((*golden.containers, *present.containers)):
        if path in golden.values and path not in golden.containers:
            continue  # what a number was, older goldens do not say
        before, now = (side.containers.get(path, "a value") for side in (golden, present))
        if before != now:
            findings.append(_structure(f"{path} is {now} instead of {before}"))
    checks = Checks(checkers=tuple(checkers))
    both = [path for path in golden.values if path in present.values]
    for path in both:
        found, noted = check_pair(path, golden.values[path], present.values[path], checks)
        findings += found
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
    """Nothing to compare with is no pass."""
    found = Finding(
        path=f"golden {name!r}",
        aspect=Aspect.HARNESS,
        status=Status.UNVERIFIED,
        reason=reason,
        advice="run pytest with --paritas-update to write it, look at what it holds (paritas "
        "inspect), and commit it",
    )
    return Verdict(findings=(found,))


def _tensor_facts(tensor: torch.Tensor) -> TensorFacts:
    return TensorFacts(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
    )


def _class_name(leaf: Any) -> str:
    return type(leaf.value if isinstance(leaf, Opaque) else leaf).__name__


def _structure(reason: str) -> Finding:
    return Finding(path=_ROOT, aspect=Aspect.STRUCTURE, status=Status.DIFFERENT, reason=reason)


# --- The fixture ----------------------------------------------------------------------------------


class Parity:
    """Checks of one test. Each verdict goes into the test's report, whether it passes or not.

    Attributes:
        settings: what `@pytest.mark.parity(...)` says, of the test, its class and its module.
    """

    def __init__(self, item: pytest.Item, options: PluginOptions) -> None:
        """`item` is the test."""
        self.settings = {"strict": options.strict, **settings_of(item)}
        self._item = item
        self._options = options
        self._recorder = Recorder(item, options)
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
            config: what to compare, in place of what the marks say.
            settings: fields of `VerifyConfig`, before those of `config` or of the marks.

        Returns:
            The verdict; one that does not pass only where `raise_on_mismatch` is off.

        Raises:
            MismatchError: the verdict does not pass.
        """
        __tracebackhide__ = True
        from paritas.checks.verify import verify

        if not isinstance(config, VerifyConfig | None):
            raise UsageError(f"config must be a VerifyConfig, not {config!r:.120}")
        marked = {name: self.settings[name] for name in self.settings if name in VERIFY_NAMES}
        before = marked if config is None else vars(config)
        asked = VerifyConfig.from_options(**(before | settings))
        quiet = dataclasses.replace(asked, raise_on_mismatch=False)
        verdict = verify(inputs, model, candidate, quiet)
        self._recorder.record("verify", verdict)
        if asked.raise_on_mismatch and verdict.enabled and not verdict.passed:
            raise MismatchError(str(verdict), verdict)
        return verdict

    def guard(self, backend: str | Callable[..., Any] = "inductor", **settings: Any) -> Guard:
        """A backend for `torch.compile` that checks every graph; the test fails at its end.

        Args:
            backend: a name that `torch.compile` knows, or a function.
            settings: of `paritas.guard`, before those of the marks. Unless `on_mismatch` says
                otherwise, the test goes on after a mismatch, and fails when it ends.
        """
        from paritas.checks.guard import guard

        marked = {name: self.settings[name] for name in self.settings if name in GUARD_NAMES}
        made = guard(backend, **({"on_mismatch": "record"} | marked | settings))
        self._guards.append(made)
        return made

    def golden(
        self, tensor_tree: Any, name: str, *, value_checker: ValueChecker | None = None
    ) -> Verdict:
        """Fail the test unless these values are those that were stored under this name.

        They are stored beside the test, in `golden/<test file>/<test>/<name>`, by a run of pytest
        with `--paritas-update`.

        Args:
            tensor_tree: tensors, numbers and strings in lists, tuples, dicts or dataclasses.
            name: of the golden, once in a test.
            value_checker: in place of the one that the marks name, or the automatic one.

        Raises:
            MismatchError: they differ by more than rounding, or nothing is stored.
        """
        __tracebackhide__ = True
        if name in self._goldens:
            raise UsageError(f"this test has a golden {name!r} already; give each its own name")
        options = self._options
        tests = test_folder(options.root, options.golden_dir, self._item.nodeid)
        path = golden_folder(tests, name)
        self._goldens.add(name)
        present = golden_of(tensor_tree)
        before = self._judge_golden(path, name, present, value_checker)
        facts: dict[str, Any] = {"name": name, "golden": self._near(path)}
        if not options.update or before.passed:
            self._recorder.record("golden", before, **facts)
            if not before.passed:
                raise MismatchError(str(before), before)
            return before
        # What was there is told beside what is there now: an update is for reading, too.
        is_new = not path.exists()
        write_golden(path, present, self._item.nodeid)
        verdict = self._judge_golden(path, name, present, value_checker)
        facts["written"] = "written" if is_new else "changed"
        if not is_new:
            facts["worst"] = outcome_of("golden", before).worst
        self._recorder.record("golden", verdict, **facts)
        if not verdict.passed:
            raise MismatchError(str(verdict), verdict)
        return verdict

    def conclude(self, *, interrupted: bool) -> list[Verdict]:
        """Judge the guards that the test was given; gives the verdicts that do not pass.

        Args:
            interrupted: the test did not come to its end, so that a guard may not have been used.
        """
        failed: list[Verdict] = []
        guards, self._guards = self._guards, []
        for made in guards:
            graphs = made.journal.graphs
            if interrupted and not graphs:
                continue
            verdict = _verdict_of(made)
            self._recorder.record(
                "guard",
                verdict,
                name=made.backend.name,
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
            return missing_golden(name, f"there is none at {self._near(path)}")
        marked = {key: self.settings[key] for key in ("value_checker",) if key in self.settings}
        if value_checker is not None:
            marked["value_checker"] = value_checker
        checkers = VerifyConfig(**marked).checkers
        try:
            stored = read_golden(path)
        except UsageError as error:
            return missing_golden(name, str(error))
        return judge_golden(stored, present, checkers, strict=bool(self.settings["strict"]))

    def _near(self, path: Path) -> str:
        """Relative to the root of the run, which is the same on every worker."""
        return os.path.relpath(path, self._options.root)


def _verdict_of(made: Guard) -> Verdict:
    """Of a guard that never saw a graph, too: nothing compared is no pass."""
    if not made.enabled:
        note = "the guard was switched off: nothing was compared"
        return Verdict(notes=(note,), enabled=False)
    if made.journal.graphs:
        return made.verdict()
    found = Finding(
        path=f"guard({made.backend.name!r})",
        aspect=Aspect.HARNESS,
        status=Status.UNVERIFIED,
        reason="the test compiled nothing with it",
        advice="pass it on: torch.compile(model, backend=parity.guard(...)), and call the result",
    )
    return Verdict(findings=(found,), coverage=Coverage(), notes=made.verdict().notes)
