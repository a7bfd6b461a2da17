"""What a command found, for the systems that run it: GitHub, SARIF and JUnit.

All three are written from the same records, one for each item, so that they cannot disagree.
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

from paritas.reports import graphs
from paritas.reports.terminal import with_near_paths
from paritas.results.findings import Aspect, Status
from paritas.results.graph_reports import CallOutcome
from paritas.results.wording import MEANING, enumerated, finding_lines, headline
from paritas.settings.versions import own_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paritas.results.comparisons import Comparison
    from paritas.results.findings import Finding, Verdict
    from paritas.results.graph_reports import GraphReport, OperatorResult

# Fails; passes with a warning; was left out on purpose; passes.
Level = Literal["error", "warning", "note", "pass"]
_SOURCE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?:, in .*)?", re.DOTALL)
# What XML cannot hold, JSON should not and a terminal would obey.
_UNPRINTABLE = re.compile(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LONGEST_REASON = 160


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemAnnotation:
    """One compared item.

    Attributes:
        level: how grave it is.
        rule: its status, and the pattern of the error if one was recognised: `different/scale`.
        item: what was compared; several annotations may be about one item.
        title: the item and what is wrong with it, in a line.
        message: everything else that is known, over several lines.
        path: the source file, relative to the root of the repository; empty if there is none in it.
        line: the line of that file.
        code: the text of that line.
        place: the node, module or pass where the difference starts.
    """

    level: Level
    rule: str
    item: str
    title: str
    message: str = ""
    path: str = ""
    line: int = 0
    code: str = ""
    place: str = ""

    @property
    def status(self) -> str:
        """The rule without its pattern."""
        return self.rule.partition("/")[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
    """All that a command found.

    Attributes:
        command: which, without `paritas`.
        subject: what it was asked about, as it was given.
        headline: the verdict in a line.
        exit_code: what the command exits with; an annotation of level `error` stands behind each
            that is not 0.
        items: in the order of the program.
        file: where the subject itself is, relative to the root; empty if it is no file in there.
    """

    command: str
    subject: str
    headline: str
    exit_code: int
    items: tuple[ItemAnnotation, ...]
    file: str = ""

    def __post_init__(self) -> None:
        for name in ("subject", "headline", "file"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        # Fail closed: a failure that no item speaks of must not look like a success.
        if self.exit_code and not any(one.level == "error" for one in self.items):
            silent = ItemAnnotation(
                level="error",
                rule=Status.UNVERIFIED.value,
                item=self.subject,
                title=self.headline,
            )
            object.__setattr__(self, "items", (*self.items, silent))

    @property
    def gravest_first(self) -> list[ItemAnnotation]:
        """Errors and warnings, the gravest first, otherwise in the order of the program."""
        told = [one for one in self.items if one.level in {"error", "warning"}]
        order = {status.value: -status.gravity for status in Status}
        return sorted(told, key=lambda one: (one.level != "error", order.get(one.status, 0)))


def verdict_account(verdict: Verdict, *, command: str, subject: str, file: str = "") -> Account:
    """What `verify`, `run`, `partition` and `verify-parallel` give."""
    items = [_annotate_finding(finding, strict=verdict.strict) for finding in verdict.findings]
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
    )


def comparison_account(comparison: Comparison, *, subject: str) -> Account:
    """What `compare` gives; rows that were wrong before they were computed come last."""
    mine = comparison.my.path
    file = "" if Path(mine).is_absolute() else mine
    account = verdict_account(comparison.verdict, command="compare", subject=subject, file=file)
    rows = len(comparison.rows)
    pairs = list(zip(comparison.rows, account.items[:rows], strict=True))
    ordered = [one for row, one in pairs if row.made != "before"]
    ordered += [one for row, one in pairs if row.made == "before"]
    return dataclasses.replace(account, items=(*ordered, *account.items[rows:]))


def graph_account(report: GraphReport, *, subject: str, file: str = "") -> Account:
    """What `verify-graph` gives: an item for each split of each distinct operator."""
    words = f"{graphs.verdict_word(report)}: {graphs.verdict_words(report)}"
    return Account(
        command="verify-graph",
        subject=subject,
        headline=words,
        exit_code=report.exit_code,
        items=tuple(one for op in report.operators for one in _annotate_operator(op, report)),
        file=file,
    )


def plain(text: str) -> str:
    """The same text without characters that would break a document; they are spelled out."""
    return _UNPRINTABLE.sub(lambda found: f"\\x{ord(found.group()):02x}", text.replace("\r", ""))


def _annotate_finding(finding: Finding, *, strict: bool) -> ItemAnnotation:
    status, diagnosis = finding.status, finding.diagnosis
    level = _level(status, strict=strict)
    if level == "pass":  # of these there may be a hundred thousand, and nobody reads more of them
        title = f"{finding.path}: {status.value}"
        return ItemAnnotation(
            level=level, rule=status.value, item=plain(finding.path), title=plain(title)
        )
    pattern = diagnosis.best.kind if diagnosis is not None and diagnosis.best is not None else ""
    origin = finding.origin
    source = finding.source or (origin.source if origin is not None else "")
    path, line = _locate_source(source)
    item = finding.path
    if finding.aspect is not Aspect.VALUE:
        item = f"{item} ({finding.aspect.value})"
    lines = [words.strip() for words in finding_lines(with_near_paths(finding))[1:]]
    return ItemAnnotation(
        level=level,
        rule=f"{status.value}/{pattern.replace(' ', '-')}" if pattern else status.value,
        item=plain(finding.path),
        title=plain(f"{item}: {status.value}"),
        message=plain("\n".join(lines)),
        path=plain(path),
        line=line,
        code=plain(origin.code) if origin is not None else "",
        place=plain(origin.module or origin.name) if origin is not None else "",
    )


def _level(status: Status, *, strict: bool) -> Level:
    if not status.passes(strict=strict):
        return "error"
    return "warning" if status is Status.UNSTABLE else "pass"


def _annotate_left_out(items: Sequence[str], why: str) -> Iterator[ItemAnnotation]:
    for text in map(plain, items):
        yield ItemAnnotation(level="note", rule=why, item=text, title=f"{why}: {text}")


def _annotate_operator(one: OperatorResult, report: GraphReport) -> Iterator[ItemAnnotation]:
    site = one.sites[0]
    path, line = _locate_source(site.source)
    calls = len(one.sites)
    where = f"{site.node}: {one.operator}"
    likewise = f"{calls} calls of the graph are like this one" if calls > 1 else ""

    def annotation(level: Level, status: str, item: str, *words: str) -> ItemAnnotation:
        text = [words for words in (*words, one.signature, likewise) if words]
        return ItemAnnotation(
            level=level,
            rule=status,
            item=plain(item),
            title=plain(f"{item}: {status}"),
            message=plain("\n".join(text)),
            path=plain(path),
            line=line,
            code=plain(site.code),
            place=plain(site.module),
        )

    for option in one.options:
        item = f"{where}, {graphs.option_words(option)}, {option.ranks} ranks"
        level = _level(option.status, strict=report.strict)
        script = f"shown by {one.script}" if one.script and level == "error" else ""
        rule = f"rule ({option.origin}): {option.rule}"
        yield annotation(level, option.status.value, item, option.reason, rule, script)
    spoken = {_level(option.status, strict=report.strict) for option in one.options}
    if one.outcome is CallOutcome.NOTHING:
        yield annotation("note", "skipped", where, one.reason)
    elif one.outcome is CallOutcome.VERIFIED and not one.options:
        yield annotation("pass", Status.EQUIVALENT.value, where, one.reason)
    elif one.outcome is not CallOutcome.VERIFIED and "error" not in spoken:
        yield annotation("error", Status.UNVERIFIED.value, where, one.reason[:_LONGEST_REASON])


# --- where ----------------------------------------------------------------------------------------


def _locate_source(source: str) -> tuple[str, int]:
    """File and line of a source, the file relative to the root; nothing if it is not in there."""
    found = _SOURCE.fullmatch(source)
    if found is None:
        return "", 0
    path = in_repository(found["file"])
    return (path, max(1, int(found["line"]))) if path else ("", 0)


def in_repository(file: str | os.PathLike[str]) -> str:
    """A file as the repository knows it; empty if it is not in there."""
    return _locate_file(os.fspath(file), Path.cwd(), os.environ.get("GITHUB_WORKSPACE") or "")


@functools.lru_cache(maxsize=4096)  # many findings start on few lines
def _locate_file(file: str, here: Path, workspace: str) -> str:
    root, path = _repository_root(here, workspace), Path(file)
    for place in (here / path, root / path, *_imported_files(path)):
        try:
            if place.is_file() and place.is_relative_to(root):
                return place.relative_to(root).as_posix()
        except (OSError, ValueError):
            continue
    return ""


def _repository_root(here: Path, workspace: str) -> Path:
    """The repository's folder, to which a system that shows its files resolves their paths."""
    if workspace and here.is_relative_to(workspace):
        return Path(workspace)
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)


def _imported_files(path: Path) -> Iterator[Path]:
    """Modules whose files end so: an exported graph knows of a file its folder and its name."""
    if len(path.parts) > 1 and not path.is_absolute():
        files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        yield from (Path(file) for file in files if file and Path(file).match(str(path)))


# --- GitHub: `::error file=...::message` in the output of a step ----------------------------------

# Of one step, GitHub shows this many of each level and drops the rest without a word.
MOST_LINES = 10
_MOST_NAMED = 8


def github_lines(account: Account) -> str:
    """A line for each distinct failure and warning, the gravest first; nothing for a pass.

    Items of one source line that are wrong in the same way share an annotation, and where there
    are more than GitHub shows, the last one counts the rest.
    """
    groups: dict[tuple[str, ...], list[ItemAnnotation]] = {}
    for one in account.gravest_first:
        # By file and line; without one, by the words, of which the title has the item's name.
        key = (one.path, str(one.line)) if one.path else ("", one.message or one.title)
        groups.setdefault((one.level, one.rule, *key), []).append(one)
    lines = []
    for level in ("error", "warning"):
        found = [same for key, same in groups.items() if key[0] == level]
        shown, dropped = found[: MOST_LINES - 1], found[MOST_LINES - 1 :]
        if len(dropped) == 1:
            shown, dropped = found, []
        lines += [_github_line(same) for same in shown]
        if dropped:
            items = [one for same in dropped for one in same]
            named = enumerated([one.title for one in items], _MOST_NAMED)
            rest = dataclasses.replace(
                items[0], title=f"{len(items)} more", message=named, path="", line=0
            )
            lines.append(_github_line([rest]))
    return "".join(f"{line}\n" for line in lines)


def _github_line(same: list[ItemAnnotation]) -> str:
    first, *others = same
    properties = {"file": first.path, "line": str(first.line)} if first.path else {}
    properties["title"] = f"paritas: {first.title}"
    message = first.message or first.title
    if others:
        message += f"\nlikewise: {enumerated([one.item for one in others], _MOST_NAMED)}"
    given = ",".join(f"{name}={_escape_property(value)}" for name, value in properties.items())
    return f"::{first.level} {given}::{_escape_message(message)}"


def _escape_message(text: str) -> str:
    """A message, escaped: the percent sign first, which the others are escaped with."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_message(text).replace(":", "%3A").replace(",", "%2C")


# --- SARIF 2.1.0 ----------------------------------------------------------------------------------

# Written are failures and warnings: such a system takes every result for something to look at.

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
# As many as GitHub shows of a run; of more than five times that it refuses the file.
MOST_RESULTS = 5000
_SARIF_ROOT = "SRCROOT"
# A later version of paritas may tell two items apart by other means.
_FINGERPRINT = "paritasItem/v1"


def sarif_document(account: Account) -> str:
    """One run with a result for each failure and warning, the gravest first."""
    told, left_out = account.gravest_first[:MOST_RESULTS], account.gravest_first[MOST_RESULTS:]
    rules = sorted({one.rule for one in told})
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
                # It came to an answer; 3 says that something could not be compared.
                "executionSuccessful": account.exit_code in {0, 1},
                "exitCode": account.exit_code,
                "exitCodeDescription": account.headline,
                "toolExecutionNotifications": _counted(len(left_out)),
            }
        ],
        "originalUriBaseIds": {
            _SARIF_ROOT: {"description": {"text": "The root of the repository."}},
        },
        "columnKind": "unicodeCodePoints",
        "results": [_sarif_result(one, account, rules.index(one.rule)) for one in told],
    }
    document = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _counted(left_out: int) -> list[dict[str, Any]]:
    if not left_out:
        return []
    words = f"{left_out} more results, none graver, are left out; the report has them."
    return [{"level": "warning", "message": {"text": words}}]


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


def _sarif_result(one: ItemAnnotation, account: Account, rule: int) -> dict[str, Any]:
    text = f"{one.title}\n{one.message}" if one.message else one.title
    mark = f"{account.command}\n{account.subject}\n{one.rule}\n{one.item}"
    return {
        "ruleId": one.rule,
        "ruleIndex": rule,
        "level": one.level,
        "message": {"text": text},
        "locations": [_sarif_location(one, account)],
        "partialFingerprints": {_FINGERPRINT: hashlib.sha256(mark.encode()).hexdigest()},
    }


def _sarif_location(one: ItemAnnotation, account: Account) -> dict[str, Any]:
    """Where it is in the source, and in the model.

    A result without an artifact is allowed, but GitHub refuses the whole file for it. What has no
    line of its own is therefore put down to the file of the subject, or to its name.
    """
    path = one.path or account.file or account.subject
    physical: dict[str, Any] = {"artifactLocation": {"uri": quote(path), "uriBaseId": _SARIF_ROOT}}
    if one.path:
        physical["region"] = {"startLine": one.line}
        if one.code:
            physical["region"]["snippet"] = {"text": one.code}
    logical = [{"fullyQualifiedName": one.item, "kind": "value"}]
    if one.place:
        logical.append({"fullyQualifiedName": one.place})
    return {"physicalLocation": physical, "logicalLocations": logical}


# --- JUnit's XML ----------------------------------------------------------------------------------

_JUNIT_ORDER = {"error": 0, "warning": 1, "pass": 2, "note": 3}


def junit_document(account: Account) -> str:
    """One suite, a case for each compared item, whatever of it was compared.

    `different` and `degraded` are failures, `unverified` is an error, what was left out is skipped.
    `unstable` passes with its words in the output, unless it was asked to count as a failure.
    """
    items: dict[str, list[ItemAnnotation]] = {}
    for one in account.items:
        items.setdefault(one.item, []).append(one)
    suite = ET.Element("testsuite", name=f"paritas {account.command} {account.subject}")
    properties = ET.SubElement(suite, "properties")
    ET.SubElement(properties, "property", name="verdict", value=account.headline)
    for name, found in items.items():
        suite.append(_junit_case(name, found, account))
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


def _junit_case(name: str, found: Sequence[ItemAnnotation], account: Account) -> ET.Element:
    ranked = sorted(
        found, key=lambda one: (_JUNIT_ORDER[one.level], one.status == Status.UNVERIFIED)
    )
    gravest = ranked[0]
    case = ET.Element("testcase", classname=f"paritas.{account.command}", name=name)
    if gravest.path:
        case.attrib.update(file=gravest.path, line=str(gravest.line))
    told = [one for one in ranked if one.level in {"error", "warning"}]
    text = "\n\n".join(f"{one.title}\n{one.message}".strip() for one in told)
    match gravest.level:
        case "error":
            kind = "error" if gravest.status == Status.UNVERIFIED else "failure"
            ET.SubElement(
                case, kind, type=gravest.rule, message=_junit_message(gravest)
            ).text = text
        case "warning":
            ET.SubElement(case, "system-out").text = text
        case "note":
            ET.SubElement(case, "skipped", message=gravest.title)
        case "pass":
            pass
    return case


def _junit_message(one: ItemAnnotation) -> str:
    first = one.message.partition("\n")[0]
    return f"{one.title}: {first}" if first else one.title


# --- By name --------------------------------------------------------------------------------------

WRITERS: dict[str, Callable[[Account], str]] = {
    "github": github_lines,
    "sarif": sarif_document,
    "junit": junit_document,
}
