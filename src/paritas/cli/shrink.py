"""`paritas shrink`: the smallest program that shows a failure, as one script."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paritas.cli.options import (
    UNVERIFIED,
    BuildOptions,
    dtype_option,
    inputs_option,
    json_option,
    progress,
    refuse,
    train_option,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.cli.running import ScriptProgram
    from paritas.shrinking.programs import Candidate, FailingProgram
    from paritas.shrinking.shrink import ShrinkReport

# How a model is built and compiled, which is settled already in a script and in what was recorded.
_BUILDING = ("inputs", "backend", "mode", "dynamic", "dtype", "train")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShrinkOptions(BuildOptions):
    """The options of the command, by their names."""

    output: Path
    seconds: float
    backend: str
    mode: str | None
    dynamic: bool | None
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
@inputs_option
@click.option(
    "--backend",
    default="inductor",
    show_default=True,
    metavar="NAME|MODULE:FUNCTION",
    help="Of torch.compile.",
)
@click.option("--mode", help="Of torch.compile, for example max-autotune.")
@click.option("--dynamic/--no-dynamic", default=None, help="Of torch.compile: dynamic shapes.")
@dtype_option
@train_option
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
@json_option("Write what was done to this file.")
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
    options = ShrinkOptions(**given)
    make = _maker(ctx, target, args, options)
    with progress() as tell:
        report = make(tell)
    if report is None:
        ctx.exit(UNVERIFIED)
    write_json(json_path, report.to_json)
    for line in report_lines(report):
        click.echo(line)
    ctx.exit(report.exit_code)


def _maker(
    ctx: click.Context, target: str, args: tuple[str, ...], options: ShrinkOptions
) -> Callable[[Callable[[str], None]], ShrinkReport | None]:
    """What to do, by what the target is; a slip of the pen is told before torch is imported."""
    path = Path(target)
    if args and not path.is_file():
        ctx.fail(f"{' '.join(args)!r}: arguments are for a script, and {target!r} is none")
    if path.is_dir():
        refuse(ctx, _BUILDING, f"says nothing about the folder {target!r}")
        return lambda tell: _shrink_folder(path, options, tell)
    refuse(ctx, ("graph",), f"is for a folder of verify-graph, which {target!r} is not")
    if path.is_file() or path.suffix == ".py":
        refuse(ctx, _BUILDING, f"says nothing about a script: {target!r} compiles as it does")
        from paritas.cli.running import ScriptProgram, check_program

        program = ScriptProgram(target, is_module=False, args=args)
        check_program(program)
        return lambda tell: _shrink_script(program, options, tell)
    from paritas.cli.loading import check_forms

    check_forms({"TARGET": target, "--inputs": options.inputs})
    return lambda tell: _shrink_factory(target, options, tell)


def _shrink_factory(
    target: str, options: ShrinkOptions, tell: Callable[[str], None]
) -> ShrinkReport | None:
    """Shrink what `torch.compile` makes of a model of the user's."""
    tell("importing torch")
    from paritas._torch.dynamo import find_backend
    from paritas.cli.building import build_reference
    from paritas.shrinking.programs import Candidate
    from paritas.shrinking.sources import capture_programs

    statements = _set_up(options.setup)
    candidate = Candidate(options.backend, options.mode, dynamic=options.dynamic, setup=statements)
    find_backend(candidate.resolve())  # or else say now that there is none
    tell(f"building {target}")
    model, inputs = build_reference(target, options)
    tell("capturing graphs")
    programs = capture_programs(model, inputs, candidate)
    return _shrunk(programs, candidate, options, tell)


def _shrink_script(
    program: ScriptProgram, options: ShrinkOptions, tell: Callable[[str], None]
) -> ShrinkReport | None:
    """Run a script with every `torch.compile` in it guarded; shrink the first graph that fails."""
    tell("importing torch")
    from paritas.checks.failures import FailedGraph, recall_failed
    from paritas.checks.guard import GuardEverywhere
    from paritas.checks.guard_settings import GuardSettings
    from paritas.cli.running import run_program
    from paritas.results.wording import headline
    from paritas.shrinking.sources import programs_of

    statements = _set_up(options.setup)
    tell(f"running {program.target}")
    settings = GuardSettings(on_mismatch="record", locate=False)
    with GuardEverywhere(settings) as guards:
        ending = run_program(program)
    verdict = guards.verdict()
    failed = [one for one in recall_failed(verdict) if isinstance(one, FailedGraph)]
    if not failed:
        how = f"the script {ending.words}; " if ending.words else ""
        click.echo(f"nothing to shrink: {how}{headline(verdict)}", err=True)
        return None
    programs, candidate = programs_of(failed[0], statements)
    return _shrunk(programs, candidate, options, tell)


def _shrink_folder(
    folder: Path, options: ShrinkOptions, tell: Callable[[str], None]
) -> ShrinkReport | None:
    """Shrink what an output folder of `compare` or `verify-graph` tells of first."""
    tell("importing torch")
    from paritas.cli.loading import find_graph
    from paritas.errors import UsageError
    from paritas.graphs.results_folder import JSON as RESULTS
    from paritas.reports.files import COMPARISON_JSON as COMPARISON
    from paritas.shrinking.comparisons import shrink_comparison
    from paritas.shrinking.partitions import shrink_graph_results

    _set_up(options.setup)
    if not any((folder / name).is_file() for name in (COMPARISON, RESULTS)):
        raise UsageError(
            f"{str(folder)!r} holds neither {COMPARISON} of paritas compare nor {RESULTS} of "
            "paritas verify-graph; name the folder that was their --output or --outdir"
        )
    asked: dict[str, Any] = {"seconds": options.seconds, "on_progress": tell}
    if (folder / COMPARISON).is_file():
        return _unless_nothing_fails(lambda: shrink_comparison(folder, options.output, **asked))
    graph = None if options.graph is None else find_graph(options.graph)
    return _unless_nothing_fails(
        lambda: shrink_graph_results(folder, options.output, graph=graph, **asked)
    )


def _shrunk(
    programs: list[FailingProgram],
    candidate: Candidate,
    options: ShrinkOptions,
    tell: Callable[[str], None],
) -> ShrinkReport | None:
    from paritas.shrinking.shrink import shrink

    asked: dict[str, Any] = {"seconds": options.seconds, "on_progress": tell}
    return _unless_nothing_fails(
        lambda: shrink(programs, candidate, outdir=options.output, **asked).report
    )


def _unless_nothing_fails(make: Callable[[], ShrinkReport]) -> ShrinkReport | None:
    from paritas.shrinking.shrink import NothingFailsError

    try:
        return make()
    except NothingFailsError as error:
        click.echo(f"nothing to shrink: {error}", err=True)
        return None


def _set_up(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Import modules, and give the statements that do so in a script."""
    from paritas.cli.loading import look_here
    from paritas.errors import UsageError

    look_here()
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise UsageError(
                f"--setup {name!r} cannot be imported: {type(error).__name__}: {error}"
            ) from error
    return tuple(f"import {name}" for name in modules)


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
    from paritas.results.wording import counted

    tried = f"{counted(report.queries, 'program')} tried"
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
