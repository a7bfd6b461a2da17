"""A pair is settled by a gate or the general rule; then come the rules, then the diagnosis."""

from __future__ import annotations

import torch

from paritas.core.judging.pairs import UNTYPED, Pair, Ruling, judge_pair, reconsider
from paritas.core.numerics.metrics import pair_metrics
from paritas.core.results.findings import Aspect, Status
from paritas.core.results.items import output

ONES, TWOS = torch.ones(3), torch.full((3,), 2.0)


class RecordingExplainer:
    def __init__(self):
        self.contexts = []

    def explain(self, findings, reference, candidate, evidence, context):
        self.contexts.append(context)
        return findings


def test_the_first_gate_with_a_ruling_settles_the_pair():
    gates = (
        lambda pair: None,
        lambda pair: Ruling(Status.UNSTABLE, "a tie", {"metrics": pair_metrics(ONES, TWOS)}),
        lambda pair: Ruling(Status.DIFFERENT, "too late"),
    )
    (finding,), notes = judge_pair(Pair(output("out"), ONES, TWOS.double()), gates=gates)
    assert (finding.status, finding.reason, notes) == (Status.UNSTABLE, "a tie", [])
    assert (finding.aspect, finding.dtype, finding.shape) == (Aspect.VALUE, "float32", (3,))
    assert finding.metrics.mismatched == 3


def test_without_a_ruling_the_general_rule_judges_structure_and_values():
    findings, _ = judge_pair(Pair(output("out"), ONES, TWOS.double()), gates=(lambda pair: None,))
    assert [(one.aspect, one.status) for one in findings] == [
        (Aspect.DTYPE, Status.DIFFERENT),
        (Aspect.VALUE, Status.DIFFERENT),
    ]


def test_a_ruling_may_be_about_something_else_than_the_value():
    ruling = Ruling(Status.DIFFERENT, "a list", UNTYPED | {"aspect": Aspect.STRUCTURE})
    (finding,), _ = judge_pair(Pair(output("out"), ONES, TWOS), gates=(lambda pair: ruling,))
    assert (finding.aspect, finding.dtype, finding.shape) == (Aspect.STRUCTURE, None, None)


def test_rules_follow_each_other_and_what_they_accept_is_not_diagnosed():
    explainer = RecordingExplainer()
    rules = (
        lambda finding: Ruling(Status.DEGRADED) if finding.status is Status.DIFFERENT else None,
        lambda finding: Ruling(Status.EQUIVALENT, "") if finding.status.exit_code() else None,
    )
    pair = Pair(output("out"), ONES, TWOS)
    (plain,), _ = judge_pair(pair)
    (degraded,), _ = judge_pair(pair, rules=rules[:1])
    assert (degraded.status, degraded.reason) == (Status.DEGRADED, plain.reason)
    (finding,), _ = judge_pair(pair, rules=rules, explainer=explainer)
    assert (finding.status, finding.reason) == (Status.EQUIVALENT, "")
    assert finding.metrics == plain.metrics
    assert not explainer.contexts


def test_the_context_of_a_diagnosis_is_made_only_for_what_fails():
    explainer = RecordingExplainer()
    for candidate in (ONES, TWOS):
        pair = Pair(output("out"), ONES, candidate, context=lambda: "made")
        judge_pair(pair, explainer=explainer)
    assert explainer.contexts == ["made"]


def test_a_later_rule_leaves_other_findings_as_they_are():
    findings = [judge_pair(Pair(output(name), ONES, TWOS))[0][0] for name in ("a", "b")]

    def rule(finding):
        return Ruling(Status.UNVERIFIED, "drawn") if finding.item == output("b") else None

    left, right = reconsider(findings, rule)
    assert left is findings[0]
    assert (right.status, right.reason) == (Status.UNVERIFIED, "drawn")
