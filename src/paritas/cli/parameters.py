"""What options take that is more than a word: ranges, and regular expressions with a saying."""

from __future__ import annotations

import re
from typing import Any

import click

__all__ = ["KINDS", "Assignment", "Span", "confirm_option", "device_option"]

# Those of `paritas.dumps.opening`, which would import torch.
KINDS = click.Choice(["paritas", "msprobe", "ge", "fx", "sglang", "files"])

device_option = click.option(
    "--device", metavar="DEVICE", help="Run on this device, for example cuda."
)
# Those of `paritas.partition.confirming`, which would import torch.
confirm_option = click.option(
    "--confirm",
    type=click.Choice(["gloo", "nccl"]),
    help="Check once more, on ranks that are processes; nccl needs --device cuda and a GPU for "
    "each rank.",
)


class Span(click.ParamType[tuple[int, int]]):
    """One number, or a range of them, as its first and last; an empty range is a slip."""

    name = "N|A-B"

    def __init__(self, thing: str) -> None:
        self._thing = thing

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Read it."""
        form = re.fullmatch(r"(\d+)(?:-(\d+))?", str(value))
        first, last = (int(form[1]), int(form[2] or form[1])) if form else (1, 0)
        if first > last:
            one, many = f"a {self._thing} (3)", f"a range of {self._thing}s (2-5)"
            self.fail(f"{value!r} is neither {one} nor {many}", param, ctx)
        return first, last


class Assignment(click.ParamType[tuple[str, str]]):
    """A regular expression for names, and what is said of them.

    Both may hold the separator: the first one counts, or the last one where that is `=`, which an
    expression has in `(?=...)`, and a name seldom.
    """

    def __init__(self, form: str, separator: str, example: str) -> None:
        self.name = form
        self._separator, self._example = separator, example

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """Take it apart."""
        text = str(value)
        cut = text.rpartition if self._separator == "=" else text.partition
        pattern, separator, said = (part.strip() for part in cut(self._separator))
        if not pattern or not separator or not (said or self._separator == "="):
            self.fail(f"{text!r} is not {self.name}, as in {self._example!r}", param, ctx)
        return pattern, said
