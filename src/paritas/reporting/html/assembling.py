"""A page made of one file: template, styles and scripts put together, and nothing else may run."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["MOST_LISTED", "Layout", "render_fragment", "render_page"]

# The rest of a list is said to be in the JSON.
MOST_LISTED = 200


@dataclasses.dataclass(frozen=True)
class Layout:
    """The assets of a page, each in the order in which it is read.

    Attributes:
        template: of the page's text.
        styles: of others and our own.
        vendored: scripts of others, each by itself.
        own: our scripts, which become one that leaves no name behind.
    """

    template: str
    styles: tuple[str, ...]
    vendored: tuple[str, ...]
    own: tuple[str, ...]


def render_page(layout: Layout, filters: Mapping[str, Callable[..., str]], **values: Any) -> str:
    """The page as one text that loads nothing from anywhere and runs no script but its own.

    Args:
        layout: what it is made of.
        filters: for the template, by name.
        values: for the template, all of them escaped.
    """
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
    """A piece of somebody else's page: it loads and runs nothing, and styles nothing but itself.

    Args:
        template: of its text.
        styles: put below the scope, where `&` is the scope itself.
        scope: a selector of the piece's outermost element, which the template has to write.
        values: for the template, all of them escaped.
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
def _scripts(layout: Layout) -> tuple[str, ...]:
    own = "\n".join(_asset(name) for name in layout.own)
    return (*map(_licensed, layout.vendored), f'"use strict";\n(() => {{\n{own}\n}})();\n')


def _licensed(name: str) -> str:
    """A script of others below its licence, which asks to be in every copy: a page is one."""
    work = name.partition(".")[0]
    return f"/*\n{_asset(f'{work}.LICENSE')}*/\n{_without_map(name)}"


def _without_map(name: str) -> str:
    """An asset, less the link to its source map: developer tools would look for that file."""
    return re.sub(r"//# sourceMappingURL=\S+|/\*# sourceMappingURL=\S+ \*/", "", _asset(name))


@functools.cache
def _asset(name: str) -> str:
    return resources.files("paritas.reporting").joinpath("assets", name).read_text("utf-8")


def _digest(script: str) -> str:
    """What the browser is told to run, and nothing else: a name that breaks out stays text."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
