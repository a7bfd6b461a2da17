"""`paritas shrink`: reduce a failure to the smallest script that reproduces it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paritas.core.candidates.loading import BuildOptions, import_modules
from paritas.core.commands.options import (
    UNVERIFIED,
    backend_option,
    dtype_option,
    inputs_option,
    json_option,
    json_takes_stdout,
    options_as,
    progress,
    refuse,
    setup_option,
    train_option,
    write_json,
)
from paritas.core.errors import plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.commands.scripts import ScriptProgram
    from paritas.core.execution.compilation import Candidate
    from paritas.core.shrinking import FolderShrinker, ShrinkReport
    from paritas.core.time_limit import TimeLimit
    from paritas.shrinking.programs import FailingProgram


# Options that apply to a factory only: scripts and recorded results already fix all this.
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
    at: tuple[str, ...]

    @property
    def statements(self) -> tuple[str, ...]:
        """The imports of `--setup`, for the script."""
        return tuple(f"import {name}" for name in self.setup)


@click.command(short_help="Reduce a failure to the smallest script that reproduces it.")
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
    help="The time limit; after it, the smallest script so far is written.",
)
@inputs_option
@backend_option
@click.option("--mode", help="The mode of torch.compile, for example max-autotune.")
@click.option("--dynamic/--no-dynamic", default=None, help="torch.compile with dynamic shapes.")
@dtype_option
@train_option
@setup_option(
    "Import this module first, here and in the script, for example to register a backend."
)
@click.option(
    "--graph",
    metavar="FILE|module:factory",
    help="The --graph of verify-graph, if TARGET is its folder and the graph is not a file.",
)
@click.option(
    "--at",
    metavar="NODE",
    multiple=True,
    help="Try this node of the graph first, where verify or run has seen it start; if it does not "
    "fail there, all others are tried. Repeat it for several.",
)
@json_option("Write the result to this file.")
@click.pass_context
@options_as(ShrinkOptions)
def shrink(
    ctx: click.Context,
    /,
    target: str,
    args: tuple[str, ...],
    json_path: Path | None,
    options: ShrinkOptions,
) -> None:
    """Reduce a failure to the smallest script that reproduces it.

    TARGET is one of

    \b
      package.module:factory   a model and its inputs, as for paritas verify
      script.py [-- ARGS]      run as by paritas run; the first graph that fails
      a folder of compare      the operator where the first divergence starts
      a folder of verify-graph the first operator with a wrong split

    The result is one Python file that imports torch but not paritas, with the inputs in it or
    beside it. The script is run once to check that it reproduces the failure. Ctrl-C stops the
    search and writes the smallest script so far.

    Exit codes: 1 a fault was found and the script shows it, 2 wrong usage or bad input, 3 nothing
    fails, or the script does not show it by itself, 130 interrupted.
    """  # noqa: D301  (\b tells click not to wrap the lines)
    make = _choose_shrinker(ctx, target, args, options)
    with progress() as tell:
        tell("importing torch")
        from paritas.core.shrinking import NothingFailsError

        import_modules(options.setup)
        try:
            report = make(tell)
        except NothingFailsError as error:
            click.echo(f"nothing to shrink: {error}", err=True)
            ctx.exit(UNVERIFIED)
    write_json(json_path, report.to_json)
    for line in report.lines:
        click.echo(plain(line), err=json_takes_stdout())
    ctx.exit(report.exit_code)


def _choose_shrinker(
    ctx: click.Context, target: str, args: tuple[str, ...], options: ShrinkOptions
) -> Callable[[Callable[[str], None]], ShrinkReport]:
    """The function for this kind of target; wrong usage is reported before torch is imported."""
    path = Path(target)
    if args and not path.is_file():
        ctx.fail(f"{' '.join(args)!r}: only a script takes arguments, and {target!r} is not one")
    if path.is_dir():
        refuse(ctx, (*_BUILDING, "at"), f"has no effect on the folder {target!r}: drop it")
        return lambda tell: _shrink_folder(path, options, tell)
    refuse(ctx, ("graph",), f"needs a folder of verify-graph, and {target!r} is not one")
    if path.is_file() or path.suffix == ".py":
        refuse(ctx, _BUILDING, f"has no effect on the script {target!r}: drop it")
        from paritas.core.commands.scripts import ScriptProgram, check_program

        program = ScriptProgram(target, is_module=False, args=args)
        check_program(program)
        return lambda tell: _shrink_script(program, options, tell)
    from paritas.core.candidates.loading import check_forms

    check_forms({"TARGET": target, "--inputs": options.inputs})
    return lambda tell: _shrink_factory(target, options, tell)


def _shrink_factory(
    target: str, options: ShrinkOptions, tell: Callable[[str], None]
) -> ShrinkReport:
    """Shrink the compiled form of the user's model."""
    from paritas.core.candidates.makers import build_reference
    from paritas.core.execution.compilation import Candidate
    from paritas.core.time_limit import TimeLimit
    from paritas.core.torch_private.dynamo import find_backend
    from paritas.shrinking.sources import capture_programs

    candidate = Candidate(
        options.backend, options.mode, dynamic=options.dynamic, setup=options.statements
    )
    find_backend(candidate.resolve())  # fail now if it does not exist
    tell(f"building {target}")
    model, inputs = build_reference(target, options)
    limit = TimeLimit(options.seconds)
    tell("capturing graphs")
    programs = capture_programs(model, inputs, candidate)
    return _shrink_at_places(programs, candidate, options, limit, tell)


def _shrink_script(
    program: ScriptProgram, options: ShrinkOptions, tell: Callable[[str], None]
) -> ShrinkReport:
    """Run a script with every `torch.compile` guarded, and shrink the first graph that fails."""
    from paritas.core.commands.scripts import run_program
    from paritas.core.compiled.guard import GuardEverywhere
    from paritas.core.compiled.guard_settings import GuardSettings
    from paritas.core.judging.failures import FailedGraph, recall_failed
    from paritas.core.results.wording import headline
    from paritas.core.shrinking import NothingFailsError
    from paritas.core.time_limit import TimeLimit
    from paritas.shrinking.sources import programs_of

    tell(f"running {program.target}")
    settings = GuardSettings(on_mismatch="record", locate=False)
    with GuardEverywhere(settings) as guards:
        ending = run_program(program)
    verdict = guards.verdict()
    failed = [
        failed_graph
        for failed_graph in recall_failed(verdict)
        if isinstance(failed_graph, FailedGraph)
    ]
    if not failed:
        how = f"the script {ending.words}; " if ending.words else ""
        raise NothingFailsError(f"{how}{headline(verdict)}")
    limit = TimeLimit(options.seconds)
    programs, candidate = programs_of(failed[0], options.statements)
    return _shrink_at_places(programs, candidate, options, limit, tell)


def _shrink_at_places(
    programs: list[FailingProgram],
    candidate: Candidate,
    options: ShrinkOptions,
    limit: TimeLimit,
    tell: Callable[[str], None],
) -> ShrinkReport:
    from paritas.shrinking.shrink import shrink

    return shrink(
        programs,
        candidate,
        places=dict.fromkeys(options.at),
        limit=limit,
        outdir=options.output,
        on_progress=tell,
    ).report


def _shrink_folder(
    folder: Path, options: ShrinkOptions, tell: Callable[[str], None]
) -> ShrinkReport:
    """Shrink the first failure in an output folder of `compare` or `verify-graph`."""
    from paritas.core.errors import UsageError
    from paritas.core.register import find_entry

    shrinkers: list[FolderShrinker] = [
        find_entry(name) for name in ("shrink a comparison", "shrink graph results")
    ]
    for shrinker in shrinkers:
        if (folder / shrinker.file).is_file():
            return shrinker.run(
                folder,
                options.output,
                graph=options.graph,
                seconds=options.seconds,
                on_progress=tell,
            )
    comparison, graph = (shrinker.file for shrinker in shrinkers)
    raise UsageError(
        f"{str(folder)!r} contains neither {comparison} of paritas compare nor {graph} of "
        "paritas verify-graph; give the folder of their --output or --outdir"
    )
