"""`paritas doctor`: does paritas work on this machine, with this torch?"""

from __future__ import annotations

import dataclasses
import itertools
import json
import textwrap
from typing import TYPE_CHECKING

import click

from paritas.cli.options import STDOUT, json_option, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from paritas.doctor.examination import Check

WIDTH = 80
_COLOURS = {"ok": "green", "failed": "red", "not available": "yellow"}
_STATE, _NAME = 13, 17
# A group of many checks: those that are ok share one line.
_FOLDED = "hooks into torch"


@click.command(short_help="Check whether paritas works on this machine, with this torch.")
@click.option("--quick", is_flag=True, help="Compile nothing.")
@json_option("Write all checks to this file; - is stdout, instead of the text.", or_stdout=True)
@click.pass_context
def doctor(ctx: click.Context, *, quick: bool, json_path: Path | None) -> None:
    """Check versions, compiler, devices, folders and hooks into torch, and run a self-test.

    The self-test runs verify, guard, capture, compare and partition on small cases with known
    results. A check that is not available is not a failure: paritas works without it.

    Exit codes: 0 everything works, 1 something failed, 3 the self-test did not finish.
    """
    from paritas.doctor.examination import examine, exit_code

    shown = json_path != STDOUT
    checks: list[Check] = []
    for group, found in itertools.groupby(examine(quick=quick), lambda check: check.group):
        same = list(found)
        checks += same
        if shown:
            click.secho(f"\n{group}", bold=True)
            for check in _fold_checks(same) if group == _FOLDED else same:
                click.echo("\n".join(_lines(check)))
    code = exit_code(checks)
    if shown:
        click.echo()
        click.secho(_verdict(checks, code), fg="green" if code == 0 else "red")
    whole = {"exit_code": code, "checks": [dataclasses.asdict(check) for check in checks]}
    write_json(json_path, json.dumps(whole, indent=2).encode)
    ctx.exit(code)


def _fold_checks(group: Sequence[Check]) -> Iterator[Check]:
    """One check that counts those that are ok, and one for each distinct failure."""
    well = [check for check in group if check.state == "ok"]
    if well:
        words = f"{len(well)} of {len(group)} behave as expected"
        yield dataclasses.replace(well[0], name="private APIs", found=words)
    same: dict[tuple[str, str], list[Check]] = {}
    for check in group:
        if check.state != "ok":
            same.setdefault((check.found, check.advice), []).append(check)
    for first, *others in same.values():
        names = f"; also {', '.join(check.name for check in others)}" if others else ""
        yield dataclasses.replace(first, found=f"{first.found}{names}")


def _lines(check: Check) -> Iterator[str]:
    """What was found, and below it what to do, within 80 columns."""
    state = click.style(f"{check.state:<{_STATE}}", fg=_COLOURS.get(check.state))
    indent = " " * (2 + _STATE + 1 + _NAME + 1)
    width = WIDTH - len(indent)
    first, *more = textwrap.wrap(check.found, width) or [""]
    if check.advice:
        more += textwrap.wrap(f"-> {check.advice}", width, subsequent_indent="   ")
    yield f"  {state} {check.name:<{_NAME}} {first}".rstrip()
    for line in more:
        yield f"{indent}{line}"


def _verdict(checks: Sequence[Check], code: int) -> str:
    failed = [check.name for check in checks if check.state == "failed"]
    missing = sum(check.state == "not available" for check in checks)
    if code == 0:
        rest = f", {missing} not available" if missing else ""
        return f"everything works: {len(checks) - missing} of {len(checks)} checks ok{rest}"
    names = textwrap.shorten(", ".join(failed), 48, placeholder=" ...")
    if code == 1:
        return f"{len(failed)} of {len(checks)} checks failed: {names}"
    return f"the self-test did not finish; failed: {names}"
