"""The first commands: `paritas demo`, `doctor` and `config`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import textwrap
from typing import TYPE_CHECKING, Any

import click

from paritas.core.commands.options import (
    STDOUT,
    json_option,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.console import Console, RenderableType

    from paritas.app.doctor.examination import Check
    from paritas.core.results.findings import Finding, Score, Verdict
    from paritas.core.settings import Setting, Settings


# --- demo: a correct and a faulty compilation of a small transformer ------------------------------

INTRODUCTION = (
    "A one-layer transformer in float32, and torch.compile. No parameter requires grad, so only "
    "the forward pass is compiled, in float32 and in float64. Nearly all the time goes into the "
    "C++ compiler."
)
FIRST = "1. Does torch.compile(model) still compute what the model computes?"
SECOND = (
    "2. The same model from a compiler with a planted fault: it shifts the causal mask by one, so "
    "every token sees the next one."
)
CHECKED = "A small transformer in float32, compared with the output of two compilers:"
RIGHT, WRONG = "torch.compile", "a compiler with a planted fault"
DETAILS = "details: paritas demo --verbose"
USUAL_PCC = 0.99
# The most likely reason for a failure on a fresh machine.
ADVICE = "torch.compile needs a C++ compiler (g++ or clang++) and the Python headers"
# One layer contains every kind of kernel: a second one only takes longer to compile.
LAYERS = 1
STEPS = 6


@click.command(short_help="Check a correct and a faulty compilation of a small model.")
@click.option("--verbose", is_flag=True, help="Also compile in float64, and print both reports.")
@click.pass_context
def demo(ctx: click.Context, *, verbose: bool) -> None:
    """Check a correct and a faulty compilation of a small transformer.

    Exit codes: 0 if the correct one passes and the faulty one is caught, else 1.
    """
    from rich.console import Console, Group

    console = Console(highlight=False)
    verdicts = _verdicts(lift=verbose)
    expected = is_as_expected(*verdicts)
    if verbose or not expected:
        _print_reports(console, *verdicts)
    else:
        console.print(Group(*summary(*verdicts)))
    ctx.exit(0 if expected else 1)


def _print_reports(console: Console, *verdicts: Verdict) -> None:
    from paritas.core.reporting.terminal import verdict_report

    console.print(INTRODUCTION, end="\n\n")
    for title, verdict in zip((FIRST, SECOND), verdicts, strict=True):
        console.print(title, style="bold", end="\n\n")
        console.print(verdict_report(verdict), crop=False)
        console.print()
    console.print("What this shows", style="bold")
    for line in lessons(*verdicts):
        console.print(line, markup=False)


def is_as_expected(right: Verdict, wrong: Verdict) -> bool:
    """Whether the correct compilation passed, and the faulty one failed by its values."""
    from paritas.core.results.findings import Status

    caught = wrong.status is Status.DIFFERENT and _result(wrong) is not None
    return right.passed and caught


def summary(right: Verdict, wrong: Verdict) -> Iterator[RenderableType]:
    """One screen: correlation accepts both, paritas does not, and where the fault starts."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from paritas.core.reporting.tables import STYLES

    yield Text(CHECKED, style="bold")
    yield Text()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for name in ("", RIGHT, WRONG):
        table.add_column(name)
    results = [_result(right), _result(wrong)]
    colours = ["green" if _is_accepted(result) else "red" for result in results]
    table.add_row("correlation", *map(Text, map(_correlation, results), colours))
    table.add_row(
        "paritas", *(Text(result.status, STYLES[result.status]) for result in (right, wrong))
    )
    table.add_row("error / noise", *(_noise(result) for result in results))
    yield table
    yield Text()
    yield Text(
        f"Correlation accepts anything above {USUAL_PCC}, the usual threshold, and misses the "
        "fault. paritas measures errors in multiples of the model's own rounding noise."
    )
    yield from _start(wrong)
    yield Text()
    yield Text(DETAILS, style="dim")


def _start(wrong: Verdict) -> Iterator[RenderableType]:
    """Where the fault starts, if that was found."""
    from rich.text import Text

    from paritas.core.reporting.terminal import indent_text
    from paritas.core.results.wording import near_path

    first = next((finding for finding in wrong.findings if finding.origin is not None), None)
    if first is None or first.origin is None:
        return
    origin = first.origin
    yield Text()
    yield Text.assemble("The fault starts in module ", (origin.module, "bold red"), ":")
    yield indent_text(near_path(origin.source))
    yield Text(f"    {origin.code}", style="bold", no_wrap=True, overflow="ellipsis")
    if first.diagnosis is not None and first.diagnosis.best is not None:
        yield indent_text(first.diagnosis.best.sentence)


def lessons(right: Verdict, wrong: Verdict) -> Iterator[str]:
    """What the two verdicts show about correlation as a check."""
    if not is_as_expected(right, wrong):
        yield (
            "Nothing: the correct one should pass, and the faulty one should fail by its values. "
            f"{ADVICE}."
        )
        return
    right_result, wrong_result = _result(right), _result(wrong)
    yield f"Correlation (PCC), where {USUAL_PCC} is the usual threshold:"
    yield f"  the correct one has {_correlation(right_result)}"
    yield f"  the faulty one has {_correlation(wrong_result)}"
    yield "paritas, worst error in multiples of the model's own rounding noise:"
    yield f"  the correct one is off by {_noise(right_result)}: {right.status}"
    yield f"  the faulty one is off by {_noise(wrong_result)}: {wrong.status}"


def _verdicts(*, lift: bool) -> tuple[Verdict, Verdict]:
    """The verdict on the correct compilation, then on the faulty one."""
    from paritas.core.commands.options import progress
    from paritas.core.results.progress import Progress

    with progress() as tell:
        done = 0

        def step(words: str) -> None:
            nonlocal done
            tell(Progress(getattr(words, "stage", words), min(done, STEPS - 1), STEPS))
            done += 1

        step("importing torch")
        import torch

        from paritas.app.cli.demo_model import build, faulty_compiler
        from paritas.core.compiled.guard import guard
        from paritas.core.execution import subjects
        from paritas.verification import verify

        model, inputs = build(LAYERS)
        verify_config = subjects.VerifyConfig(raise_on_mismatch=False, lift=lift)
        right = verify.verify(inputs, model, torch.compile(model), verify_config, on_progress=step)
        step("looking for the planted fault")
        guarded = guard(faulty_compiler, on_mismatch="record")
        with torch.no_grad():
            torch.compile(model, backend=guarded)(*inputs)
        return right, guarded.verdict()


def _result(verdict: Verdict) -> Finding | None:
    """The first finding with metrics of the whole model's output."""
    with_metrics = (
        finding
        for finding in verdict.findings
        if finding.metrics is not None and finding.origin is None
    )
    return next(with_metrics, None)


def _correlation(finding: Finding | None) -> str:
    if finding is None or finding.metrics is None:
        return "1: equal bit for bit"
    return f"{finding.metrics.pcc:.6f}: {'accepted' if _is_accepted(finding) else 'rejected'}"


def _is_accepted(finding: Finding | None) -> bool:
    """Whether correlation accepts it."""
    return finding is None or finding.metrics is None or finding.metrics.pcc >= USUAL_PCC


def _noise(finding: Finding | None) -> str:
    score: Score | None = None if finding is None else finding.native or finding.lifted
    if score is None:
        return "nothing"
    return f"{score.max_z:.2g} ({score.max_limit:g} allowed)"


# --- doctor: does paritas work on this machine, with this torch? ----------------------------------

WIDTH = 80
_COLOURS = {"ok": "green", "failed": "red", "not available": "yellow"}
_STATE, _NAME = 13, 17
# A group of many checks: those that are ok share one line.
_FOLDED = "hooks into torch"


@click.command(short_help="Check whether paritas works on this machine, with this torch.")
@click.option("--quick", is_flag=True, help="Compile nothing.")
@json_option("Write all checks to this file; - is stdout, instead of the text.")
@click.pass_context
def doctor(ctx: click.Context, *, quick: bool, json_path: Path | None) -> None:
    """Check versions, compiler, devices, folders and hooks into torch, and run a self-test.

    The self-test runs verify, guard, capture, compare and partition on small cases with known
    results. A check that is not available is not a failure: paritas works without it.

    Exit codes: 0 everything works, 1 something failed, 3 the self-test did not finish.
    """
    from paritas.app.doctor.examination import examine, exit_code

    shown = json_path != STDOUT
    checks: list[Check] = []
    for group, group_checks in itertools.groupby(examine(quick=quick), lambda check: check.group):
        same = list(group_checks)
        checks += same
        if shown:
            click.secho(f"\n{group}", bold=True)
            for check in _fold_checks(same) if group == _FOLDED else same:
                click.echo("\n".join(_check_lines(check)))
    code = exit_code(checks)
    if shown:
        click.echo()
        click.secho(_verdict(checks, code), fg="green" if code == 0 else "red")
    document = {"exit_code": code, "checks": [dataclasses.asdict(check) for check in checks]}
    write_json(json_path, json.dumps(document, indent=2).encode)
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


def _check_lines(check: Check) -> Iterator[str]:
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


# --- config: the settings in effect, and where each comes from ------------------------------------


@click.command(short_help="Show the settings in effect, and where they come from.")
@click.argument("command", required=False)
@json_option("Write them to this file; - is stdout, instead of the table.")
@click.pass_obj
def config(settings: Settings, command: str | None, json_path: Path | None) -> None:
    """Print every setting of COMMAND, or of all commands: its value, and where it comes from.

    The settings file is the nearest paritas.toml, or pyproject.toml with a table [tool.paritas],
    from the working directory upwards. Keys are the long options of the commands: in the command's
    table, or above the tables for every command that has the option. Environment variables
    (PARITAS_VERIFY_DTYPE, PARITAS_DTYPE) override the file, and the command line overrides both.

    Exit codes: 0 if all settings are valid, else 2.
    """
    shown = [command] if command is not None else list(settings.commands)
    rows = [setting for name in shown for setting in settings.in_force(name)]
    path = None if settings.file is None else settings.file.path
    if json_path is not None:
        _write(json_path, path, rows)
    if json_path != STDOUT:
        none = "none (looked for paritas.toml, and pyproject.toml with [tool.paritas])"
        click.echo(f"settings file: {path or none}")
        for line in _setting_lines(rows):
            click.echo(line)


def _write(target: Path, file: Path | None, settings: Sequence[Setting]) -> None:
    names = {"command": "command", "key": "key", "value": "given"}
    names |= {"source": "source", "origin": "origin"}
    rows = [{name: getattr(it, field) for name, field in names.items()} for it in settings]
    document = {"file": None if file is None else str(file), "settings": rows}
    text = json.dumps(document, indent=2, default=str)
    write_json(target, text.encode)


def _setting_lines(settings: Sequence[Setting]) -> Iterator[str]:
    """A block of lines for each command, with columns aligned over all blocks."""
    texts = [_as_toml(it.given) for it in settings]
    keys = max((len(it.key) for it in settings), default=0)
    values = max((len(text) for text in texts), default=0)
    command = None
    for it, text in zip(settings, texts, strict=True):
        if it.command != command:
            command = it.command
            yield f"\n{command}"
        yield f"  {it.key:<{keys}}  {text:<{values}}  {it.origin}"


def _as_toml(value: Any) -> str:
    """The value as TOML."""
    if value is None:
        return "not set"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_as_toml(item) for item in value)}]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False)
