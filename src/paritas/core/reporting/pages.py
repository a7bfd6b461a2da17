"""The parts of every HTML page: assets, columns, sentences; and the page of a verdict.

A page is one self-contained file: it loads nothing and runs only its own scripts.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import hashlib
import math
import re
from collections import Counter
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec

from paritas.core.reporting.explanations import Fact, cause_facts
from paritas.core.reporting.pictures import SvgPicture, svg_picture
from paritas.core.reporting.tables import SIGNS, page_table
from paritas.core.reporting.terminal import FINDING_COLUMNS, FINDING_LEGEND
from paritas.core.results.causes import Cause, group_causes
from paritas.core.results.findings import Status
from paritas.core.results.wording import MEANING, cause_lines, results_words
from paritas.core.results.wording import headline as verdict_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paritas.core.results.findings import Finding, Verdict


# --- Templates, styles and scripts ----------------------------------------------------------------

# For the rest of a list, the page refers to the JSON.
MOST_LISTED = 200


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """The assets of a page; its own scripts are joined into one that defines no global names."""

    template: str
    styles: tuple[str, ...]
    vendored: tuple[str, ...]
    own: tuple[str, ...]


def render_page(
    layout: PageLayout, filters: Mapping[str, Callable[..., str]], **values: Any
) -> str:
    """Render a page with these filters and values for its template; all values are escaped."""
    scripts = _scripts(layout)
    environment = _environment().overlay()
    environment.filters = {**environment.filters, **filters}
    return environment.get_template(layout.template).render(
        most_listed=MOST_LISTED,
        rest_of_list=": they are in the JSON",
        styles=[*map(_without_map, layout.styles)],
        scripts=scripts,
        allowed=" ".join(f"'sha256-{_digest(script)}'" for script in scripts),
        **values,
    )


def render_fragment(template: str, styles: tuple[str, ...], scope: str, **values: Any) -> str:
    """Render a fragment for another page: it loads and runs nothing, and styles only itself.

    Args:
        template: its file.
        styles: nested below the scope; `&` is the scope itself.
        scope: a CSS selector of the outermost element, which the template writes.
        values: for the template; all are escaped.
    """
    rules = "\n".join(map(_asset, styles))
    style = f"{scope} {{\n{rules}}}"
    return _environment().get_template(template).render(style=style, rest_of_list="", **values)


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(_asset),
    )


@functools.cache
def _scripts(layout: PageLayout) -> tuple[str, ...]:
    own_code = "\n".join(_asset(name) for name in layout.own)
    return (
        *map(_prepend_licence, layout.vendored),
        f'"use strict";\n(() => {{\n{own_code}\n}})();\n',
    )


def _prepend_licence(name: str) -> str:
    """A vendored script with its licence, which has to be part of every copy."""
    work = name.partition(".")[0]
    return f"/*\n{_asset(f'{work}.LICENSE')}*/\n{_without_map(name)}"


def _without_map(name: str) -> str:
    """An asset without the link to its source map, which developer tools would try to load."""
    return re.sub(r"//# sourceMappingURL=\S+|/\*# sourceMappingURL=\S+ \*/", "", _asset(name))


@functools.cache
def _asset(name: str) -> str:
    return resources.files("paritas.core.reporting").joinpath("assets", name).read_text("utf-8")


def _digest(script: str) -> str:
    """The hash of a script for the content security policy: the browser runs nothing else."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


# --- Compact columns of a table -------------------------------------------------------------------

# Digits that a page shows; the JSON and the CSV have all.
DIGITS = 4
_NOTHING = "null"
# JSON has no such numbers: they are written as strings.
_NO_NUMBERS = {"nan", "inf", "-inf"}


def text_column(values: Iterable[str | None]) -> dict[str, Any]:
    """Each distinct text once, and its number for each row; no numbers if all rows are equal."""
    column = [value or "" for value in values]
    places = {text: number for number, text in enumerate(dict.fromkeys(column))}
    rows = list(map(places.__getitem__, column)) if len(places) > 1 else None
    return {"texts": list(places), "rows": rows}


def number_column(values: Iterable[float | None], digits: int = DIGITS) -> msgspec.Raw | None:
    """Numbers as JSON with this many digits; None if no row has one."""
    column = list(values)
    if column.count(None) == len(column):
        return None
    texts = [_NOTHING if value is None else _number(value, digits) for value in column]
    return msgspec.Raw(f"[{','.join(texts)}]".encode())


def _number(value: float, digits: int) -> str:
    if isinstance(value, int):
        return str(value)  # a count keeps all digits
    text = f"{value:.{digits}g}"
    return f'"{text}"' if text in _NO_NUMBERS else text


def pack_payload(payload: Any) -> str:
    """Compressed JSON as base64.

    It is a tenth of the size, and no name in it can end the script element.
    """
    return base64.b64encode(gzip.compress(msgspec.json.encode(payload), 6, mtime=0)).decode()


# --- A story: what happened, in sentences and facts -----------------------------------------------


@dataclasses.dataclass(frozen=True)
class Story:
    """Where two dumps begin to differ, in sentences."""

    title: str
    sentence: str
    facts: tuple[Fact, ...]
    place: int
    status: Status


def figure(value: float) -> str:
    """Four digits."""
    return "NaN" if math.isnan(value) else f"{value:.4g}"


# --- The page of a verdict, and the index of pages ------------------------------------------------

# Failures described in full; the others have a row in the table.
MOST_TOLD = 50
MOST_ROWS = 2000
_VERDICT_LAYOUT = PageLayout(
    template="verdict_page.html.jinja",
    styles=("basics.css", "report.css", "picture.css"),
    vendored=(),
    own=(),
)


@dataclasses.dataclass(frozen=True)
class PageLink:
    """One line of the index: a check of a test, its status, its gravest finding, its page."""

    test: str
    what: str
    status: str
    worst: str
    href: str


def verdict_page(
    verdict: Verdict, title: str, what: str, data: str, steps: Sequence[str] = ()
) -> str:
    """A verdict as one self-contained HTML file.

    Args:
        title: what was checked.
        what: the name of the check.
        data: the JSON file beside it with every finding.
        steps: what to do next, a line each.
    """
    counts = Counter(finding.status for finding in verdict.findings)
    ordered = sorted(verdict.findings, key=lambda finding: -finding.status.gravity)
    causes = group_causes(verdict.failures)
    return _render_verdicts(
        title=title,
        what=what,
        status=verdict.status if verdict.enabled else Status.UNVERIFIED,
        words=verdict_line(verdict),
        verdict=verdict,
        data=data,
        statuses=[(status, SIGNS[status], MEANING[status], counts[status]) for status in Status],
        stories=[_explained_story(cause) for cause in causes[:MOST_TOLD]],
        more_stories=sum(len(cause.findings) for cause in causes[MOST_TOLD:]),
        steps=steps,
        table=page_table(FINDING_COLUMNS, ordered, MOST_ROWS),
        links=None,
    )


def index_page(links: Sequence[PageLink], *, verdicts: int) -> str:
    """The index of pages, gravest first; `verdicts` is the number of all verdicts."""
    ordered = sorted(links, key=lambda link: -Status(link.status).gravity)
    status = Status(ordered[0].status) if ordered else Status.IDENTICAL
    return _render_verdicts(
        title="failed checks",
        what="",
        status=status,
        words=f"{len(links)} of {verdicts} verdicts do not pass.",
        verdict=None,
        data="",
        statuses=[],
        stories=[],
        more_stories=0,
        steps=(),
        table=None,
        links=[(link, Status(link.status)) for link in ordered],
    )


def _render_verdicts(**values: object) -> str:
    return render_page(
        _VERDICT_LAYOUT,
        {},
        signs=SIGNS,
        legend=". ".join(FINDING_LEGEND.split("\n")),
        **values,
    )


@dataclasses.dataclass(frozen=True)
class ExplainedStory:
    """A cause on its own page.

    Attributes:
        facts: what is known about it, if it is known where it starts; else `lines` are shown.
        results: what results from it, in one line.
    """

    finding: Finding
    lines: str
    facts: tuple[Fact, ...] = ()
    picture: SvgPicture | None = None
    results: str = ""


def _explained_story(cause: Cause) -> ExplainedStory:
    finding = cause.start
    return ExplainedStory(
        finding=finding,
        lines=cause_story(Cause(finding))[1],
        facts=tuple(cause_facts(cause)) if cause.is_located else (),
        picture=None if finding.picture is None else svg_picture(finding.picture),
        results=results_words(cause),
    )


def cause_story(cause: Cause) -> tuple[Finding, str]:
    """Where a cause starts, and its lines, without the first, which repeats item and status."""
    return cause.start, "\n".join(line[4:] for line in cause_lines(cause)[1:])
