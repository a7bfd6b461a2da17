"""`paritas doctor`: does this machine, with this torch, do what paritas needs?"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paritas.cli.options import STDOUT, json_option, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paritas.doctor.examination import Check

WIDTH = 80
_COLOURS = {"ok": "green", "failed": "red", "not available": "yellow"}
_STATE, _NAME = 13, 17
# Of these there are many, and those that are well say nothing that a person wants to read.
_FOLDED = "hooks into torch"


@click.command(short_help="Does this machine, with this torch, do what paritas needs?")
@click.option("--quick", is_flag=True, help="Compile nothing.")
@json_option(
    "Write all that was looked at to this file; to stdout, in place of the text, if it is -.",
    or_stdout=True,
)
@click.pass_context
def doctor(ctx: click.Context, *, quick: bool, json_path: Path | None) -> None:
    """Look at versions, compiler, devices, folders and hooks into torch, and run a self-test.

    The self-test asks small questions whose answers are known, of verify, guard, capture, compare
    and partition. What is not available is no failure: paritas does without it.

    Exit codes: 0 all is well, 1 something failed, 3 the self-test could not be run to its end.
    """
    from paritas.doctor.examination import examine, exit_code

    shown = json_path != STDOUT
    printer = _Printer()
    checks = []
    for check in examine(quick=quick):
        checks.append(check)
        if shown:
            printer.take(check)
    code = exit_code(checks)
    if shown:
        printer.end(checks, code)
    if json_path is not None:
        _write(json_path, checks, code)
    ctx.exit(code)


class _Printer:
    """Prints each group when it is whole, so that the hooks of it can be counted."""

    def __init__(self) -> None:
        self._group: list[Check] = []

    def take(self, check: Check) -> None:
        if self._group and self._group[0].group != check.group:
            self._flush()
        self._group.append(check)

    def end(self, checks: Sequence[Check], code: int) -> None:
        self._flush()
        click.echo()
        click.secho(_verdict(checks, code), fg="green" if code == 0 else "red")

    def _flush(self) -> None:
        if not self._group:
            return
        click.secho(f"\n{self._group[0].group}", bold=True)
        for check in _fold_checks(self._group):
            for line in _lines(check):
                click.echo(line)
        self._group = []


def _fold_checks(group: Sequence[Check]) -> Iterator[Check]:
    """The same checks; of many that are well, one that counts them."""
    if group[0].group != _FOLDED:
        yield from group
        return
    well = [check for check in group if check.state == "ok"]
    if well:
        words = f"{len(well)} of {len(group)} answer as expected"
        yield dataclasses.replace(well[0], name="private parts", found=words)
    same: dict[tuple[str, str], list[Check]] = {}
    for check in group:
        if check.state != "ok":
            same.setdefault((check.found, check.advice), []).append(check)
    for first, *others in same.values():
        names = f"; likewise {', '.join(check.name for check in others)}" if others else ""
        yield dataclasses.replace(first, found=f"{first.found}{names}")


def _lines(check: Check) -> Iterator[str]:
    """What was found, and below it what to do, within 80 columns."""
    state = click.style(f"{check.state:<{_STATE}}", fg=_COLOURS.get(check.state))
    indent = " " * (2 + _STATE + 1 + _NAME + 1)
    text = textwrap.wrap(check.found, WIDTH - len(indent)) or [""]
    name = f"{check.name:<{_NAME}}"
    yield f"  {state} {name} {text[0]}".rstrip()
    for line in text[1:]:
        yield f"{indent}{line}"
    if check.advice:
        for line in textwrap.wrap(
            f"-> {check.advice}", WIDTH - len(indent), subsequent_indent="   "
        ):
            yield f"{indent}{line}"


def _verdict(checks: Sequence[Check], code: int) -> str:
    failed = [check.name for check in checks if check.state == "failed"]
    missing = sum(check.state == "not available" for check in checks)
    if code == 0:
        rest = f", {missing} not available" if missing else ""
        return f"all is well: {len(checks) - missing} of {len(checks)} checks ok{rest}"
    told = textwrap.shorten(", ".join(failed), 48, placeholder=" ...")
    if code == 1:
        return f"{len(failed)} of {len(checks)} checks failed: {told}"
    return f"the self-test could not be run to its end; failed: {told}"


def _write(target: Path, checks: Sequence[Check], code: int) -> None:
    whole = {"exit_code": code, "checks": [dataclasses.asdict(check) for check in checks]}
    text = json.dumps(whole, indent=2)
    write_json(target, text.encode)
