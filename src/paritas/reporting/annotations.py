"""What a command found, as systems that run it want to hear of it: one record for each item.

GitHub's annotations, SARIF and JUnit are written from these records alone, so that the three can
not tell different stories.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from paritas.numerics.findings import Aspect, Status
from paritas.numerics.graph_reports import Outcome
from paritas.numerics.wording import finding_lines, headline
from paritas.reporting import graph_words
from paritas.reporting.terminal import with_near_paths

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paritas.numerics.comparisons import Comparison
    from paritas.numerics.findings import Finding, Verdict
    from paritas.numerics.graph_reports import GraphReport, OperatorResult

__all__ = [
    "Account",
    "Annotation",
    "Level",
    "in_repository",
    "of_comparison",
    "of_graph",
    "of_verdict",
    "plain",
]

# Fails; passes with a warning; was left out on purpose; passes.
Level = Literal["error", "warning", "note", "pass"]
_SOURCE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?:, in .*)?", re.DOTALL)
# What XML cannot hold, JSON should not and a terminal would obey.
_UNPRINTABLE = re.compile(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LONGEST_REASON = 160


@dataclasses.dataclass(frozen=True, kw_only=True)
class Annotation:
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
    items: tuple[Annotation, ...]
    file: str = ""

    def __post_init__(self) -> None:
        for name in ("subject", "headline", "file"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        # Fail closed: a failure that no item speaks of must not look like a success.
        if self.exit_code and not any(one.level == "error" for one in self.items):
            silent = Annotation(
                level="error",
                rule=Status.UNVERIFIED.value,
                item=self.subject,
                title=self.headline,
            )
            object.__setattr__(self, "items", (*self.items, silent))

    @property
    def gravest_first(self) -> list[Annotation]:
        """Errors and warnings, the gravest first, otherwise in the order of the program."""
        told = [one for one in self.items if one.level in {"error", "warning"}]
        order = {status.value: -status.gravity for status in Status}
        return sorted(told, key=lambda one: (one.level != "error", order.get(one.status, 0)))


def of_verdict(verdict: Verdict, *, command: str, subject: str, file: str = "") -> Account:
    """What `verify`, `run`, `partition` and `verify-parallel` give."""
    items = [_of_finding(finding, strict=verdict.strict) for finding in verdict.findings]
    items += _left_out(verdict.coverage.skipped, "skipped")
    items += _left_out(verdict.coverage.not_selected, "not selected")
    items += _left_out(verdict.coverage.unmatched, "unmatched")
    return Account(
        command=command,
        subject=subject,
        headline=headline(verdict),
        exit_code=verdict.exit_code,
        items=tuple(items),
        file=file,
    )


def of_comparison(comparison: Comparison, *, subject: str) -> Account:
    """What `compare` gives; rows that were wrong before they were computed come last."""
    mine = comparison.my.path
    file = "" if Path(mine).is_absolute() else mine
    account = of_verdict(comparison.verdict, command="compare", subject=subject, file=file)
    rows = len(comparison.rows)
    pairs = list(zip(comparison.rows, account.items[:rows], strict=True))
    ordered = [one for row, one in pairs if row.made != "before"]
    ordered += [one for row, one in pairs if row.made == "before"]
    return dataclasses.replace(account, items=(*ordered, *account.items[rows:]))


def of_graph(report: GraphReport, *, subject: str, file: str = "") -> Account:
    """What `verify-graph` gives: an item for each split of each distinct operator."""
    words = f"{graph_words.verdict_word(report)}: {graph_words.verdict_words(report)}"
    return Account(
        command="verify-graph",
        subject=subject,
        headline=words,
        exit_code=report.exit_code,
        items=tuple(one for op in report.operators for one in _of_operator(op, report)),
        file=file,
    )


def plain(text: str) -> str:
    """The same text without characters that would break a document; they are spelled out."""
    return _UNPRINTABLE.sub(lambda found: f"\\x{ord(found.group()):02x}", text.replace("\r", ""))


def _of_finding(finding: Finding, *, strict: bool) -> Annotation:
    status, diagnosis = finding.status, finding.diagnosis
    level = _level(status, strict=strict)
    if level == "pass":  # of these there may be a hundred thousand, and nobody reads more of them
        title = f"{finding.path}: {status.value}"
        return Annotation(
            level=level, rule=status.value, item=plain(finding.path), title=plain(title)
        )
    pattern = diagnosis.best.kind if diagnosis is not None and diagnosis.best is not None else ""
    origin = finding.origin
    source = finding.source or (origin.source if origin is not None else "")
    path, line = _place(source)
    item = finding.path
    if finding.aspect is not Aspect.VALUE:
        item = f"{item} ({finding.aspect.value})"
    lines = [words.strip() for words in finding_lines(with_near_paths(finding))[1:]]
    return Annotation(
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


def _left_out(items: Sequence[str], why: str) -> Iterator[Annotation]:
    for text in map(plain, items):
        yield Annotation(level="note", rule=why, item=text, title=f"{why}: {text}")


def _of_operator(one: OperatorResult, report: GraphReport) -> Iterator[Annotation]:
    site = one.sites[0]
    path, line = _place(site.source)
    calls = len(one.sites)
    where = f"{site.node}: {one.operator}"
    likewise = f"{calls} calls of the graph are like this one" if calls > 1 else ""

    def annotation(level: Level, status: str, item: str, *words: str) -> Annotation:
        text = [words for words in (*words, one.signature, likewise) if words]
        return Annotation(
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
        item = f"{where}, {graph_words.option_words(option)}, {option.ranks} ranks"
        level = _level(option.status, strict=report.strict)
        script = f"shown by {one.script}" if one.script and level == "error" else ""
        rule = f"rule ({option.origin}): {option.rule}"
        yield annotation(level, option.status.value, item, option.reason, rule, script)
    spoken = {_level(option.status, strict=report.strict) for option in one.options}
    if one.outcome is Outcome.NOTHING:
        yield annotation("note", "skipped", where, one.reason)
    elif one.outcome is Outcome.VERIFIED and not one.options:
        yield annotation("pass", Status.EQUIVALENT.value, where, one.reason)
    elif one.outcome is not Outcome.VERIFIED and "error" not in spoken:
        yield annotation("error", Status.UNVERIFIED.value, where, one.reason[:_LONGEST_REASON])


# --- where ----------------------------------------------------------------------------------------


def _place(source: str) -> tuple[str, int]:
    """File and line of a source, the file relative to the root; nothing if it is not in there."""
    found = _SOURCE.fullmatch(source)
    if found is None:
        return "", 0
    path = in_repository(found["file"])
    return (path, max(1, int(found["line"]))) if path else ("", 0)


def in_repository(file: str | os.PathLike[str]) -> str:
    """A file as the repository knows it; empty if it is not in there."""
    return _located(os.fspath(file), Path.cwd(), os.environ.get("GITHUB_WORKSPACE") or "")


@functools.lru_cache(maxsize=4096)  # many findings start on few lines
def _located(file: str, here: Path, workspace: str) -> str:
    root, path = _root(here, workspace), Path(file)
    for place in (here / path, root / path, *_imported(path)):
        try:
            if place.is_file() and place.is_relative_to(root):
                return place.relative_to(root).as_posix()
        except (OSError, ValueError):
            continue
    return ""


def _root(here: Path, workspace: str) -> Path:
    """The repository's folder, to which a system that shows its files resolves their paths."""
    if workspace and here.is_relative_to(workspace):
        return Path(workspace)
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)


def _imported(path: Path) -> Iterator[Path]:
    """Modules whose files end so: an exported graph knows of a file its folder and its name."""
    if len(path.parts) > 1 and not path.is_absolute():
        files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        yield from (Path(file) for file in files if file and Path(file).match(str(path)))
