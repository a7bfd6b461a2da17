"""Findings as JUnit's XML, which nearly every system that runs tests can show."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from paritas.numerics.findings import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paritas.reporting.annotations import Account, Annotation

__all__ = ["junit"]

_ORDER = {"error": 0, "warning": 1, "pass": 2, "note": 3}


def junit(account: Account) -> str:
    """One suite, a case for each compared item, whatever of it was compared.

    `different` and `degraded` are failures, `unverified` is an error, what was left out is skipped.
    `unstable` passes with its words in the output, unless it was asked to count as a failure.
    """
    items: dict[str, list[Annotation]] = {}
    for one in account.items:
        items.setdefault(one.item, []).append(one)
    suite = ET.Element("testsuite", name=f"paritas {account.command} {account.subject}")
    properties = ET.SubElement(suite, "properties")
    ET.SubElement(properties, "property", name="verdict", value=account.headline)
    for name, found in items.items():
        suite.append(_case(name, found, account))
    kinds = [case[0].tag if len(case) else "" for case in suite.findall("testcase")]
    counts = {
        "tests": str(len(kinds)),
        "failures": str(kinds.count("failure")),
        "errors": str(kinds.count("error")),
        "skipped": str(kinds.count("skipped")),
    }
    suite.attrib.update(counts)
    suites = ET.Element("testsuites", counts)
    suites.append(suite)
    ET.indent(suites)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(suites, encoding="unicode")}\n'


def _case(name: str, found: Sequence[Annotation], account: Account) -> ET.Element:
    ranked = sorted(found, key=lambda one: (_ORDER[one.level], one.status == Status.UNVERIFIED))
    gravest = ranked[0]
    case = ET.Element("testcase", classname=f"paritas.{account.command}", name=name)
    if gravest.path:
        case.attrib.update(file=gravest.path, line=str(gravest.line))
    told = [one for one in ranked if one.level in {"error", "warning"}]
    text = "\n\n".join(f"{one.title}\n{one.message}".strip() for one in told)
    match gravest.level:
        case "error":
            kind = "error" if gravest.status == Status.UNVERIFIED else "failure"
            ET.SubElement(case, kind, type=gravest.rule, message=_summary(gravest)).text = text
        case "warning":
            ET.SubElement(case, "system-out").text = text
        case "note":
            ET.SubElement(case, "skipped", message=gravest.title)
        case "pass":
            pass
    return case


def _summary(one: Annotation) -> str:
    first = one.message.partition("\n")[0]
    return f"{one.title}: {first}" if first else one.title
