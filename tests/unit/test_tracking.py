"""Verdicts in TensorBoard and MLflow: what is written where."""

from __future__ import annotations

import math
import sys
import types

import pytest

from paritas.core.errors import UsageError
from paritas.core.results.findings import Aspect, Coverage, Finding, Score, Status, Verdict
from paritas.core.results.items import Item, ItemKind
from paritas.tracking import log_to_mlflow, log_to_tensorboard, scalars


def score(max_z):
    return Score(max_z=max_z, max_limit=12.0, rms_z=1.0, rms_limit=2.5)


def verdict(*statuses, worst=6.0):
    findings = tuple(
        Finding(
            item=Item(ItemKind.OUTPUT, f"output[{i}]"),
            aspect=Aspect.VALUE,
            status=status,
            native=score(worst),
        )
        for i, status in enumerate(statuses)
    )
    return Verdict(findings=findings, coverage=Coverage(compared=len(findings)))


class Writer:
    def __init__(self):
        self.scalars, self.texts = {}, {}

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.scalars[tag, global_step] = scalar_value

    def add_text(self, tag, text_string, global_step=None):
        self.texts[tag, global_step] = text_string


def test_the_numbers_are_shares_and_the_worst_error_over_its_limit():
    found = scalars(verdict(Status.IDENTICAL, Status.IDENTICAL, Status.EQUIVALENT, Status.DEGRADED))
    assert found["paritas/passed"] == 0.0
    assert found["paritas/compared"] == 4.0
    assert found["paritas/share/identical"] == 0.5
    assert found["paritas/share/different"] == 0.0
    assert found["paritas/worst/native"] == 0.5
    assert "paritas/worst/lifted" not in found


def test_nothing_compared_is_no_pass_and_has_no_shares():
    assert scalars(Verdict()) == {"paritas/passed": 0.0, "paritas/compared": 0.0}


def test_an_error_that_is_no_number_stays_visible():
    found = scalars(verdict(Status.DIFFERENT, worst=math.nan))
    assert math.isnan(found["paritas/worst/native"])


def test_tensorboard_gets_numbers_and_words_at_their_step():
    writer = Writer()
    log_to_tensorboard(verdict(Status.EQUIVALENT), writer, 7, prefix="check")
    assert writer.scalars["check/passed", 7] == 1.0
    assert writer.texts["check/verdict", 7].startswith("    equivalent: ")


def test_mlflow_gets_metrics_a_tag_the_words_and_all_of_it(monkeypatch):
    calls = []
    module = types.ModuleType("mlflow")
    for name in ("log_metrics", "set_tag", "log_text"):
        setattr(module, name, lambda *args, _name=name, **kw: calls.append((_name, args, kw)))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    given = verdict(Status.EQUIVALENT)
    log_to_mlflow(given, 3)
    named = {(name, args[-1]): args for name, args, _ in calls if name == "log_text"}
    assert calls[0][0] == "log_metrics"
    assert calls[0][2] == {"step": 3}
    assert ("set_tag", ("paritas.status", "equivalent"), {}) in calls
    stored = named["log_text", "paritas/step_3/verdict.json"][0]
    assert Verdict.from_json(stored) == given


def test_without_mlflow_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UsageError, match=r"pip install 'paritas\[tracking\]'"):
        log_to_mlflow(verdict(Status.EQUIVALENT))
