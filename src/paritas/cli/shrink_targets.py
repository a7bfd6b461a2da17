"""From a target of `paritas shrink` to what is shrunk."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import click

from paritas._torch.dynamo import find_backend
from paritas.checks.failures import FailedGraph, recall_failed
from paritas.checks.guard import GuardEverywhere
from paritas.checks.guard_settings import GuardSettings
from paritas.cli.building import build_reference
from paritas.cli.loading import find_graph, look_here
from paritas.cli.running import run_program
from paritas.cli.verify import VerifyOptions
from paritas.errors import UsageError
from paritas.results.wording import headline
from paritas.shrinking.programs import Candidate, FailingProgram
from paritas.shrinking.shrink import NothingFailsError, ShrinkReport, report_of, shrink
from paritas.shrinking.sources import capture_programs, programs_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paritas.cli.running import ScriptProgram
    from paritas.cli.shrink import ShrinkOptions

__all__ = ["shrink_factory", "shrink_folder", "shrink_script"]


def shrink_factory(
    target: str, options: ShrinkOptions, tell: Callable[[str], None]
) -> ShrinkReport | None:
    """Shrink what `torch.compile` makes of a model of the user's."""
    statements = _set_up(options.setup)
    candidate = Candidate(options.backend, options.mode, dynamic=options.dynamic, setup=statements)
    find_backend(candidate.resolve())  # or else say now that there is none
    tell(f"building {target}")
    model, inputs = build_reference(target, _as_verify(options))
    tell("capturing graphs")
    programs = capture_programs(model, inputs, candidate)
    return _shrunk(programs, candidate, options, tell)


def shrink_script(
    program: ScriptProgram, options: ShrinkOptions, tell: Callable[[str], None]
) -> ShrinkReport | None:
    """Run a script with every `torch.compile` in it guarded; shrink the first graph that fails."""
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


def shrink_folder(
    folder: Path, options: ShrinkOptions, tell: Callable[[str], None]
) -> ShrinkReport | None:
    """Shrink what an output folder of `compare` or `verify-graph` tells of first."""
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
    try:
        if (folder / COMPARISON).is_file():
            return shrink_comparison(
                folder, options.output, seconds=options.seconds, on_progress=tell
            )
        return shrink_graph_results(
            folder,
            options.output,
            graph=None if options.graph is None else find_graph(options.graph),
            seconds=options.seconds,
            on_progress=tell,
        )
    except NothingFailsError as error:
        click.echo(f"nothing to shrink: {error}", err=True)
        return None


def _shrunk(
    programs: list[FailingProgram],
    candidate: Candidate,
    options: ShrinkOptions,
    tell: Callable[[str], None],
) -> ShrinkReport | None:
    try:
        found = shrink(
            programs, candidate, seconds=options.seconds, outdir=options.output, on_progress=tell
        )
    except NothingFailsError as error:
        click.echo(f"nothing to shrink: {error}", err=True)
        return None
    return report_of(found)


def _set_up(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Import modules, and give the statements that do so in a script."""
    look_here()
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise UsageError(
                f"--setup {name!r} cannot be imported: {type(error).__name__}: {error}"
            ) from error
    return tuple(f"import {name}" for name in modules)


def _as_verify(options: ShrinkOptions) -> Any:
    """The options of `paritas verify` that say how a model is built."""
    return VerifyOptions(
        inputs=options.inputs,
        backend=options.backend,
        mode=options.mode,
        dynamic=options.dynamic,
        fullgraph=False,
        candidate=None,
        dtype=options.dtype,
        device=None,
        train=options.train,
        strict=False,
        no_gradients=False,
        no_lift=False,
    )
