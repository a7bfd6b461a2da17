"""The results of a command for CI systems: GitHub annotations, SARIF and JUnit.

All three are written from the same records, one for each item. A failure has one for its cause.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote
from xml.etree import ElementTree as ET

from paritas.core.errors import plain
from paritas.core.reporting.terminal import with_near_paths
from paritas.core.results.causes import Cause, group_causes
from paritas.core.results.findings import Status
from paritas.core.results.wording import MEANING, cause_lines, headline, item_words, list_first
from paritas.core.settings import own_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paritas.core.results.findings import Finding, Verdict
    from paritas.core.results.report import Report

# Fails; passes with a warning; was not compared on purpose, or results from a failure; passes.
Level = Literal["error", "warning", "note", "pass"]
_SOURCE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?:, in .*)?", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemAnnotation:
    """One compared item, or one cause with all that results from it.

    Attributes:
        rule: its status, and the pattern of the error if one was recognised: `different/scale`.
        item: what was compared; several annotations may be about one item.
        title: the item and its status, in one line.
        message: everything else that is known, in several lines.
        path: the source file, relative to the root of the repository; empty if it is not in it.
        outside: the source file if it is not in the repository, such as a library's.
        line: of either file.
        code: the text of the source line.
        place: the node, module or pass where the difference starts.
        group: what several items have in common, such as their target; may be empty.
        results: the items that are wrong as a result.
        seconds: how long it took; None if unknown.
    """

    level: Level
    rule: str
    item: str
    title: str
    message: str = ""
    path: str = ""
    outside: str = ""
    line: int = 0
    code: str = ""
    place: str = ""
    group: str = ""
    results: tuple[str, ...] = ()
    seconds: float | None = None

    @property
    def status(self) -> str:
        """The rule without its pattern."""
        return self.rule.partition("/")[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
    """The result of a command.

    Attributes:
        command: its name, without `paritas`.
        subject: the command's argument.
        headline: the verdict in one line.
        exit_code: of the command; if it is not 0, at least one item has level `error`.
        items: in the order of the program.
        file: of the subject, relative to the root of the repository; empty if it is not in it.
        line: where the subject is defined in that file.
    """

    command: str
    subject: str
    headline: str
    exit_code: int
    items: tuple[ItemAnnotation, ...]
    file: str = ""
    line: int = 1

    def __post_init__(self) -> None:
        for name in ("subject", "headline", "file"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        # Fail closed: a failure without an item must not look like a success.
        if self.exit_code and not any(item.level == "error" for item in self.items):
            missing = ItemAnnotation(
                level="error",
                rule=Status.UNVERIFIED.value,
                item=self.subject,
                title=self.headline,
            )
            object.__setattr__(self, "items", (*self.items, missing))

    def source_of(self, item_annotation: ItemAnnotation) -> tuple[str, int]:
        """File and line of an item: systems show what has none at no line, or not at all.

        If it has no line in the repository, it is put down to the definition of the subject. If
        that has none, as a dump, to its line in a library or another folder.
        """
        if item_annotation.path:
            return item_annotation.path, item_annotation.line
        if item_annotation.outside and not self.file.endswith(".py"):
            return item_annotation.outside, item_annotation.line
        return (self.file, self.line) if self.file else (self.subject, 1)

    @property
    def gravest_first(self) -> list[ItemAnnotation]:
        """Errors and warnings, the gravest first, otherwise in the order of the program."""
        items = [item for item in self.items if item.level in {"error", "warning"}]
        order = {status.value: -status.gravity for status in Status}
        return sorted(items, key=lambda item: (item.level != "error", order.get(item.status, 0)))


def verdict_account(
    verdict: Verdict, *, command: str, subject: str, file: str = "", line: int = 1
) -> Account:
    """The result of `verify`, `run`, `partition` and `verify-parallel`.

    What results from a located failure is a note: its cause is the failure, and names it.
    """
    starts: dict[int, Cause] = {}
    results: dict[int, Cause] = {}
    for cause in group_causes(verdict.failures):
        starts[id(cause.start)] = cause
        results |= {id(result): cause for result in cause.results}
    items = [
        _annotate_result(finding, results[id(finding)])
        if id(finding) in results
        else _annotate_cause(starts.get(id(finding), Cause(finding)), strict=verdict.strict)
        for finding in verdict.findings
    ]
    items += _annotate_left_out(verdict.coverage.skipped, "skipped")
    items += _annotate_left_out(verdict.coverage.not_selected, "not selected")
    items += _annotate_left_out(verdict.coverage.unmatched, "unmatched")
    return Account(
        command=command,
        subject=subject,
        headline=headline(verdict),
        exit_code=verdict.exit_code,
        items=tuple(items),
        file=file,
        line=line,
    )


def report_account(
    report: Report, *, command: str, subject: str, file: str = "", line: int = 1
) -> Account:
    """The result of `invariants` and `engine`: their verdict, under their own headline."""
    account = verdict_account(
        report.verdict, command=command, subject=subject, file=file, line=line
    )
    return dataclasses.replace(account, headline=report.headline)


def _annotate_cause(cause: Cause, *, strict: bool) -> ItemAnnotation:
    finding = cause.start
    status, diagnosis = finding.status, finding.diagnosis
    level = level_of(status, strict=strict)
    if level == "pass":  # there may be a hundred thousand of them, and nobody reads the details
        title = f"{finding.path}: {status.value}"
        return ItemAnnotation(
            level=level, rule=status.value, item=plain(finding.path), title=plain(title)
        )
    pattern = diagnosis.best.kind if diagnosis is not None and diagnosis.best is not None else ""
    origin = finding.origin
    source = finding.source or (origin.source if origin is not None else "")
    path, outside, line = locate_source(source)
    near = dataclasses.replace(cause, start=with_near_paths(finding))
    return ItemAnnotation(
        level=level,
        rule=f"{status.value}/{pattern.replace(' ', '-')}" if pattern else status.value,
        item=plain(finding.path),
        title=plain(f"{item_words(finding)}: {status.value}"),
        message=plain("\n".join(words.strip() for words in cause_lines(near)[1:])),
        path=plain(path),
        outside=plain(outside),
        line=line,
        code=plain(origin.code) if origin is not None else "",
        place=plain(origin.module or origin.name) if origin is not None else "",
        results=tuple(plain(result.path) for result in cause.results),
    )


def _annotate_result(finding: Finding, cause: Cause) -> ItemAnnotation:
    words = f"{item_words(finding)}: {finding.status.value}, as a result of {cause.start.path}"
    rule, item = finding.status.value, plain(finding.path)
    return ItemAnnotation(level="note", rule=rule, item=item, title=plain(words))


def level_of(status: Status, *, strict: bool) -> Level:
    """How a status counts."""
    if not status.passes(strict=strict):
        return "error"
    return "warning" if status is Status.UNSTABLE else "pass"


def _annotate_left_out(items: Sequence[str], why: str) -> Iterator[ItemAnnotation]:
    for text in map(plain, items):
        yield ItemAnnotation(level="note", rule=why, item=text, title=f"{why}: {text}")


# --- source files in the repository ---------------------------------------------------------------


def locate_source(source: str) -> tuple[str, str, int]:
    """The file of a source relative to the root or, if it is outside, as it is; and its line."""
    source_match = _SOURCE.fullmatch(source)
    if source_match is None:
        return "", "", 0
    path, line = in_repository(source_match["file"]), max(1, int(source_match["line"]))
    outside = "" if path or not Path(source_match["file"]).is_file() else source_match["file"]
    return (path, outside, line) if path or outside else ("", "", 0)


def in_repository(file: str | os.PathLike[str]) -> str:
    """The path of a file relative to the root; empty if it is not in the repository."""
    return _locate_file(os.fspath(file), Path.cwd(), os.environ.get("GITHUB_WORKSPACE") or "")


@functools.lru_cache(maxsize=4096)  # many findings share a source line
def _locate_file(file: str, here: Path, workspace: str) -> str:
    root, path = _repository_root(here, workspace), Path(file)
    for file_path in (here / path, root / path, *_imported_files(path)):
        try:
            if file_path.is_file() and file_path.is_relative_to(root):
                return file_path.relative_to(root).as_posix()
        except (OSError, ValueError):
            continue
    return ""


def _repository_root(here: Path, workspace: str) -> Path:
    """The root of the repository: CI systems resolve paths against it."""
    if workspace and here.is_relative_to(workspace):
        return Path(workspace)
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)


def _imported_files(path: Path) -> Iterator[Path]:
    """Files of imported modules that end in `path`: exported graphs store only folder and name."""
    if len(path.parts) > 1 and not path.is_absolute():
        files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        yield from (Path(file) for file in files if file and Path(file).match(str(path)))


# --- GitHub: `::error file=...::message` in the output of a step ----------------------------------

# GitHub shows this many annotations of each level per step and silently drops the rest.
MOST_LINES = 10
_MOST_NAMED = 8


def github_lines(account: Account) -> str:
    """A line for each distinct failure and warning, the gravest first; nothing for a pass.

    Items with the same source line and the same rule share an annotation. If there are more than
    GitHub shows, the last one counts the rest.
    """
    groups: dict[tuple[str, ...], list[ItemAnnotation]] = {}
    for annotation in account.gravest_first:
        # By file and line, or else by the message.
        key = (
            (annotation.path, str(annotation.line))
            if annotation.path
            else ("", annotation.message or annotation.title)
        )
        groups.setdefault((annotation.level, annotation.rule, *key), []).append(annotation)
    lines = []
    for level in ("error", "warning"):
        sames = [same for key, same in groups.items() if key[0] == level]
        shown, dropped = sames[: MOST_LINES - 1], sames[MOST_LINES - 1 :]
        if len(dropped) == 1:
            shown, dropped = sames, []
        lines += [_github_line(same, account) for same in shown]
        if dropped:
            items = [item_annotation for same in dropped for item_annotation in same]
            named = list_first([item.title for item in items], _MOST_NAMED)
            rest = dataclasses.replace(
                items[0], title=f"{len(items)} more", message=named, path="", outside=""
            )
            lines.append(_github_line([rest], account))
    return "".join(f"{line}\n" for line in lines)


def _github_line(same: list[ItemAnnotation], account: Account) -> str:
    first, *others = same
    file, line = account.source_of(first)
    properties = {"file": file, "line": str(line), "title": f"paritas: {first.title}"}
    message = first.message or first.title
    if others:
        message += f"\nalso: {list_first([annotation.item for annotation in others], _MOST_NAMED)}"
    property_text = ",".join(f"{name}={_escape(value, ':,')}" for name, value in properties.items())
    return f"::{first.level} {property_text}::{_escape(message)}"


def _escape(text: str, more: str = "") -> str:
    return re.sub(f"[%\r\n{more}]", lambda match: f"%{ord(match.group()):02X}", text)


# --- SARIF 2.1.0 ----------------------------------------------------------------------------------

# Only failures and warnings: systems that read SARIF treat every result as a problem.

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
# As many as GitHub shows of a run; it rejects files with more than five times that.
MOST_RESULTS = 5000
_SARIF_ROOT = "SRCROOT"
# The version is for a later paritas that may fingerprint items differently.
_FINGERPRINT = "paritasItem/v1"
# Items that a result names as wrong because of it; the message counts the rest.
_MOST_RELATED = 20


def sarif_document(account: Account) -> str:
    """One run with a result for each failure and warning, the gravest first."""
    gravest_first = account.gravest_first
    shown, left_out = gravest_first[:MOST_RESULTS], len(gravest_first[MOST_RESULTS:])
    rules = sorted({annotation.rule for annotation in shown})
    words = f"{left_out} more results, none graver, are not listed here; see the report."
    notifications = [{"level": "warning", "message": {"text": words}}] if left_out else []
    run = {
        "tool": {
            "driver": {
                "name": "paritas",
                "version": own_version(),
                "rules": [_sarif_rule(rule) for rule in rules],
            }
        },
        "automationDetails": {"id": f"paritas/{account.command}/{account.subject}/"},
        "invocations": [
            {
                # 3 means that something could not be compared.
                "executionSuccessful": account.exit_code in {0, 1},
                "exitCode": account.exit_code,
                "exitCodeDescription": account.headline,
                "toolExecutionNotifications": notifications,
            }
        ],
        "originalUriBaseIds": {
            _SARIF_ROOT: {"description": {"text": "The root of the repository."}},
        },
        "columnKind": "unicodeCodePoints",
        "results": [
            _sarif_result(annotation, account, rules.index(annotation.rule)) for annotation in shown
        ],
    }
    document = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _sarif_rule(rule: str) -> dict[str, Any]:
    status, _, pattern = rule.partition("/")
    meaning = f"The candidate {MEANING[Status(status)]}"
    words = f"{meaning}: {pattern.replace('-', ' ')}." if pattern else f"{meaning}."
    warns = status == Status.UNSTABLE
    return {
        "id": rule,
        "name": "".join(word.capitalize() for word in rule.replace("/", "-").split("-")),
        "shortDescription": {"text": words},
        "defaultConfiguration": {"level": "warning" if warns else "error"},
    }


def _sarif_result(item_annotation: ItemAnnotation, account: Account, rule: int) -> dict[str, Any]:
    text = (
        f"{item_annotation.title}\n{item_annotation.message}"
        if item_annotation.message
        else item_annotation.title
    )
    mark = f"{account.command}\n{account.subject}\n{item_annotation.rule}\n{item_annotation.item}"
    result = {
        "ruleId": item_annotation.rule,
        "ruleIndex": rule,
        "level": item_annotation.level,
        "message": {"text": text},
        "locations": [_sarif_location(item_annotation, account)],
        "partialFingerprints": {_FINGERPRINT: hashlib.sha256(mark.encode()).hexdigest()},
    }
    if item_annotation.results:
        subject = dataclasses.replace(item_annotation, path="", outside="", code="", place="")
        result["relatedLocations"] = [
            {
                **_sarif_location(dataclasses.replace(subject, item=item), account),
                "id": number,
                "message": {"text": f"as a result, also {item}"},
            }
            for number, item in enumerate(item_annotation.results[:_MOST_RELATED], start=1)
        ]
    return result


def _sarif_location(item_annotation: ItemAnnotation, account: Account) -> dict[str, Any]:
    """The location in the source, and in the model.

    SARIF allows results without an artifact, but GitHub rejects the whole file. An item without a
    source line therefore gets the definition or the name of the subject.
    """
    path, line = account.source_of(item_annotation)
    region: dict[str, Any] = {"startLine": line}
    if item_annotation.code and path in {item_annotation.path, item_annotation.outside}:
        region["snippet"] = {"text": item_annotation.code}
    physical = {"artifactLocation": _sarif_artifact(path), "region": region}
    logical = [{"fullyQualifiedName": item_annotation.item, "kind": "value"}]
    if item_annotation.place:
        logical.append({"fullyQualifiedName": item_annotation.place})
    return {"physicalLocation": physical, "logicalLocations": logical}


def _sarif_artifact(path: str) -> dict[str, str]:
    """What is not in the repository is told by its whole address."""
    if "://" in path:
        return {"uri": quote(path, safe=":/?#[]@!$&'()*+,;=%")}
    if Path(path).is_absolute():
        return {"uri": Path(path).as_uri()}
    return {"uri": quote(path), "uriBaseId": _SARIF_ROOT}


# --- JUnit's XML ----------------------------------------------------------------------------------

_JUNIT_ORDER = {"error": 0, "warning": 1, "pass": 2, "note": 3}


def junit_document(account: Account) -> str:
    """One suite with a test case for each item.

    `different` and `degraded` are failures, `unverified` is an error. Items that were not compared
    on purpose are skipped, and so are those that only result from a failure. `unstable` passes with
    its message in the output, unless strict.
    """
    items: dict[str, list[ItemAnnotation]] = {}
    for item in account.items:
        items.setdefault(item.item, []).append(item)
    suite = ET.Element("testsuite", name=f"paritas {account.command} {account.subject}")
    properties = ET.SubElement(suite, "properties")
    ET.SubElement(properties, "property", name="verdict", value=account.headline)
    for name, item_annotations in items.items():
        suite.append(_junit_case(name, item_annotations, account))
    kinds = [case[0].tag if len(case) else "" for case in suite.findall("testcase")]
    counts = {
        "tests": str(len(kinds)),
        "failures": str(kinds.count("failure")),
        "errors": str(kinds.count("error")),
        "skipped": str(kinds.count("skipped")),
    }
    times = [annotation.seconds for annotation in account.items if annotation.seconds is not None]
    if times:
        counts["time"] = f"{sum(times):.3f}"
    suite.attrib.update(counts)
    suites = ET.Element("testsuites", counts)
    suites.append(suite)
    ET.indent(suites)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(suites, encoding="unicode")}\n'


def _junit_case(name: str, items: Sequence[ItemAnnotation], account: Account) -> ET.Element:
    ranked = sorted(
        items, key=lambda item: (_JUNIT_ORDER[item.level], item.status == Status.UNVERIFIED)
    )
    gravest = ranked[0]
    class_name = ".".join(filter(None, ("paritas", account.command, gravest.group)))
    case = ET.Element("testcase", classname=class_name, name=name)
    if gravest.seconds is not None:
        case.set("time", f"{gravest.seconds:.3f}")
    if gravest.level in {"error", "warning"}:
        file, line = account.source_of(gravest)
        case.attrib.update(file=file, line=str(line))
    problems = [annotation for annotation in ranked if annotation.level in {"error", "warning"}]
    text = "\n\n".join(f"{problem.title}\n{problem.message}".strip() for problem in problems)
    match gravest.level:
        case "error":
            kind = "error" if gravest.status == Status.UNVERIFIED else "failure"
            reason = gravest.message.partition("\n")[0]
            message = f"{gravest.title}: {reason}" if reason else gravest.title
            ET.SubElement(case, kind, type=gravest.rule, message=message).text = text
        case "warning":
            ET.SubElement(case, "system-out").text = text
        case "note":
            ET.SubElement(case, "skipped", message=gravest.title)
        case "pass":
            pass
    return case


# --- By name --------------------------------------------------------------------------------------

WRITERS: dict[str, Callable[[Account], str]] = {
    "github": github_lines,
    "sarif": sarif_document,
    "junit": junit_document,
}
