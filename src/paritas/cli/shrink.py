"""`paritas shrink`: the smallest program that shows a failure, as one script."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.shrinking.shrink import ShrinkReport

DTYPES = ("float64", "float32", "bfloat16", "float16")
UNVERIFIED = 3
# How a model is built and compiled, which is settled already in a script and in what was recorded.
_BUILDING = ("inputs", "backend", "mode", "dynamic", "dtype", "train")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShrinkOptions:
    """The options of the command, by their names."""

    output: Path
    seconds: float
    inputs: str | None
    backend: str
    mode: str | None
    dynamic: bool | None
    dtype: str | None
    train: bool
    setup: tuple[str, ...]
    graph: str | None


@click.command(short_help="Make the smallest script that shows a failure.")
@click.argument("target")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--output",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    default="shrunk",
    show_default=True,
    help="Where the script goes.",
)
@click.option(
    "--time",
    "seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="For all of it; then the best so far is written.",
)
@click.option("--inputs", metavar="MODULE:FUNCTION", help="Function that returns the inputs.")
@click.option(
    "--backend",
    default="inductor",
    show_default=True,
    metavar="NAME|MODULE:FUNCTION",
    help="Of torch.compile.",
)
@click.option("--mode", help="Of torch.compile, for example max-autotune.")
@click.option("--dynamic/--no-dynamic", default=None, help="Of torch.compile: dynamic shapes.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Run model and floating inputs in this.")
@click.option("--train", is_flag=True, help="Training mode; otherwise model.eval() is called.")
@click.option(
    "--setup",
    multiple=True,
    metavar="MODULE",
    help="Import it first, here and in the script: it registers a backend, say.",
)
@click.option(
    "--graph",
    metavar="FILE|module:factory",
    help="Of a folder of verify-graph, whose graph is no file: what it was given.",
)
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write what was done to this file.",
)
@click.pass_context
def shrink(
    ctx: click.Context,
    /,
    target: str,
    args: tuple[str, ...],
    json_path: Path | None,
    **given: Any,
) -> None:
    """Make the smallest script that shows a failure.

    TARGET is one of

    \b
      package.module:factory   as paritas verify takes it: a model and its inputs
      script.py [-- ARGS]      run as paritas run does; the first graph that fails
      a folder of compare      the operator that the first divergence starts at
      a folder of verify-graph the first operator whose split is wrong

    Out comes one Python file that imports torch and nothing of paritas, with the inputs in it or
    beside it. It is run before it is handed over. Ctrl-C ends the search, and the best so far is
    written.

    Exit codes: 1 a fault was found and the script shows it, 2 wrong usage or bad input, 3 nothing
    fails, or the script does not show it by itself, 130 interrupted.
    """  # noqa: D301  (click's mark for lines that stay as they are)
    from paritas.cli.options import progress

    options = ShrinkOptions(**given)
    make = _maker(ctx, target, args, options)
    if json_path is not None:
        from paritas.reports.files import check_writable

        check_writable(json_path)
    with progress() as tell:
        report = make(tell)
    if report is None:
        ctx.exit(UNVERIFIED)
    _show(report, json_path)
    ctx.exit(report.exit_code)


def _maker(
    ctx: click.Context, target: str, args: tuple[str, ...], options: ShrinkOptions
) -> Callable[[Callable[[str], None]], ShrinkReport | None]:
    """What to do, by what the target is; a slip of the pen is told before torch is imported."""
    path = Path(target)
    if args and not path.is_file():
        ctx.fail(f"{' '.join(args)!r}: arguments are for a script, and {target!r} is none")
    if path.is_dir():
        _refuse(ctx, _BUILDING, f"says nothing about the folder {target!r}")
        return lambda tell: _of_folder(path, options, tell)
    _refuse(ctx, ("graph",), f"is for a folder of verify-graph, which {target!r} is not")
    if path.is_file() or path.suffix == ".py":
        _refuse(ctx, _BUILDING, f"says nothing about a script: {target!r} compiles as it does")
        from paritas.cli.running import ScriptProgram, check_program

        program = ScriptProgram(target, is_module=False, args=args)
        check_program(program)
        return lambda tell: _of_script(program, options, tell)
    from paritas.cli.loading import check_form

    for parameter, spec in (("TARGET", target), ("--inputs", options.inputs)):
        if spec is not None:
            check_form(spec, parameter)
    return lambda tell: _of_factory(target, options, tell)


def _refuse(ctx: click.Context, names: tuple[str, ...], why: str) -> None:
    """An option that would be passed over is worse than one that is refused."""
    given = [
        f"--{name}"
        for name in names
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        ctx.fail(f"{', '.join(given)} {why}")


def _of_factory(
    target: str, options: ShrinkOptions, tell: Callable[[str], None]
) -> ShrinkReport | None:
    tell("importing torch")
    from paritas.cli.shrink_targets import shrink_factory

    return shrink_factory(target, options, tell)


def _of_script(
    program: Any, options: ShrinkOptions, tell: Callable[[str], None]
) -> ShrinkReport | None:
    tell("importing torch")
    from paritas.cli.shrink_targets import shrink_script

    return shrink_script(program, options, tell)


def _of_folder(
    folder: Path, options: ShrinkOptions, tell: Callable[[str], None]
) -> ShrinkReport | None:
    tell("importing torch")
    from paritas.cli.shrink_targets import shrink_folder

    return shrink_folder(folder, options, tell)


def _show(report: ShrinkReport, json_path: Path | None) -> None:
    import msgspec

    if json_path is not None:
        from paritas.reports.files import write_whole
        from paritas.results.findings import spell_nonfinite

        write_whole(json_path, msgspec.json.encode(spell_nonfinite(msgspec.to_builtins(report))))
    for line in report_lines(report):
        click.echo(line)


def report_lines(report: ShrinkReport) -> list[str]:
    """What was done, for a terminal; the script is the last of it."""
    smaller = f"{report.before} -> {report.after}" if report.before else report.after
    lines = [f"{report.what}: {smaller}" if smaller else report.what]
    if report.diagnosis is not None and report.diagnosis.sentence:
        lines.append(f"  {report.diagnosis.sentence}")
    lines += [f"  {step}" for step in report.steps]
    lines += [f"  it goes away with {remedy}" for remedy in report.remedies]
    how = "interrupted" if report.interrupted else "stopped"
    stopped = "" if report.ended else f", {how} before it could get no smaller"
    tried = f"{report.queries} program{'' if report.queries == 1 else 's'} tried"
    lines.append(f"  {tried} in {report.seconds:.0f} s{stopped}")
    beside = f", with its values in {report.data}" if report.data else ""
    if report.shows:
        lines.append(f"script: {report.script}{beside}; run by itself it fails: {report.said}")
    elif report.interrupted and not report.said:
        lines.append(f"script: {report.script}{beside}; interrupted before it was run by itself")
    else:
        lines.append(
            f"script: {report.script}{beside}; run by itself it does NOT show the failure: "
            f"{report.said}"
        )
    return lines
