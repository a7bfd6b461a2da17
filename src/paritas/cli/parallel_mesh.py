"""How the ranks of a parallel model are arranged, as one writes it on a command line."""

from __future__ import annotations

import re
from typing import Any

import click

__all__ = ["Mesh"]


class Mesh(click.ParamType[int | dict[str, int]]):
    """A number of ranks (`4`), or the axes of a mesh by name (`dp=2,tp=2`)."""

    name = "N|AXIS=N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | dict[str, int]:
        """Read it."""
        text = str(value).strip()
        if text.isascii() and text.isdigit():
            return int(text)
        axes: dict[str, int] = {}
        for part in text.split(","):
            form = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([0-9]+)\s*", part)
            if form is None:
                self.fail(
                    f"{text!r} is neither a number of ranks (4) nor axes with theirs (dp=2,tp=2)",
                    param,
                    ctx,
                )
            if form[1] in axes:
                self.fail(f"{text!r} names the axis {form[1]!r} twice", param, ctx)
            axes[form[1]] = int(form[2])
        return axes
