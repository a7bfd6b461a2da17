"""The `parity` fixture: what a test can ask."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from paritas.checking.config import VerifyConfig
from paritas.errors import MismatchError, UsageError
from paritas.numerics.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.pytesting.golden_places import golden_folder, test_folder
from paritas.pytesting.goldens import (
    golden_of,
    judge_golden,
    missing_golden,
    read_golden,
    write_golden,
)
from paritas.pytesting.marks import GUARD_NAMES, VERIFY_NAMES, settings_of
from paritas.pytesting.outcomes import outcome_of
from paritas.pytesting.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from paritas.checking.guarding.backend import Guard
    from paritas.numerics.checkers import ValueChecker
    from paritas.pytesting.goldens import Golden
    from paritas.pytesting.options import Options

__all__ = ["Parity"]


class Parity:
    """Checks of one test. Each verdict goes into the test's report, whether it passes or not.

    Attributes:
        settings: what `@pytest.mark.parity(...)` says, of the test, its class and its module.
    """

    def __init__(self, item: pytest.Item, options: Options) -> None:
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
        from paritas.checking.verifying import verify

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
        from paritas.checking.guarding.backend import guard

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
