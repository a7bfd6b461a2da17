"""The operators of a graph as data that travels inside a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paritas.numerics.findings import spell_nonfinite
from paritas.numerics.graph_reports import Outcome
from paritas.numerics.wording import finding_lines
from paritas.reporting.graph_words import confirmation_words, loss_gap, option_words
from paritas.reporting.html.graph_rules import drawn_rules
from paritas.reporting.terminal import cells

if TYPE_CHECKING:
    from paritas.numerics.findings import Finding
    from paritas.numerics.graph_reports import GraphReport, OperatorResult, OptionResult, Site
    from paritas.reporting.html.graph_rules import Token

__all__ = ["SLUGS", "payload"]

# Outcomes as names of classes in a style sheet.
SLUGS = {
    Outcome.VERIFIED: "verified",
    Outcome.NOTHING: "nothing",
    Outcome.UNSUPPORTED: "unsupported",
    Outcome.FAILED: "failed",
}


def payload(report: GraphReport) -> dict[str, Any]:
    """Every operator with its calls, splits and findings."""
    operators = [_operator(one, strict=report.strict) for one in report.operators]
    return {"operators": spell_nonfinite(operators)}


def _operator(one: OperatorResult, *, strict: bool) -> dict[str, Any]:
    return {
        "operator": one.operator,
        "signature": one.signature,
        "outcome": SLUGS[one.outcome],
        "reason": one.reason,
        "notes": one.notes,
        "script": one.script,
        "seconds": one.seconds,
        "sites": [_site(site) for site in one.sites],
        "options": [_option(option, strict=strict) for option in one.options],
        "rules": [
            {
                "origins": rule.origins,
                "tokens": [_token(token) for token in rule.tokens],
                "loose": [_token(token) for token in rule.loose],
            }
            for rule in drawn_rules(one.options)
        ],
    }


def _site(site: Site) -> list[str]:
    return [site.node, site.source, site.code, site.module]


def _option(option: OptionResult, *, strict: bool) -> dict[str, Any]:
    return {
        "words": option_words(option),
        "rule": option.rule,
        "origin": option.origin,
        "ranks": option.ranks,
        "status": option.status.value,
        "confirmation": confirmation_words(option),
        "passes": option.status.passes(strict=strict),
        "reason": option.reason,
        "whole": option.loss_whole,
        "split": option.loss_split,
        "gap": loss_gap(option),
        "gradients": option.gradients,
        "seconds": option.seconds,
        "findings": [_finding(finding) for finding in option.verdict.findings],
        "not_compared": [*option.verdict.coverage.skipped, *option.verdict.coverage.unmatched],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    _, item, value, off_by, worst = (cell.plain for cell in cells(finding))
    return {
        "status": finding.status.value,
        "item": item,
        "value": value,
        "off_by": off_by,
        "worst": worst,
        # The first line says again which one it is.
        "words": [line.strip() for line in finding_lines(finding)[1:]],
    }


def _token(token: Token) -> list[str]:
    return [token.text, token.kind, token.status.value if token.status else "", token.hint]
