"""The commands that check a model, an engine that serves it, or a kernel.

They are `paritas verify`, `power`, `sweep`, `invariants`, `engine` and `kernel`.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paritas.app.cli.options import (
    DTYPES,
    INTERRUPTED,
    OutputFormat,
    backend_option,
    blocks_option,
    by_option,
    device_option,
    dtype_option,
    emit,
    emit_model_report,
    emit_verdict,
    format_options,
    html_option,
    inputs_option,
    json_option,
    print_report,
    progress,
    refuse,
    setup_option,
    strict_option,
    subject_source,
    train_option,
    with_shrink_command,
    write_json,
)
from paritas.core.candidates.loading import BuildOptions, CandidateOptions, import_modules
from paritas.core.settings import LOCATE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.results.findings import Verdict
    from paritas.core.results.model_reports import EngineReport, InvariantsReport, KernelReport
    from paritas.core.results.power_reports import PowerReport
    from paritas.core.results.sweeps import SweepReport


# --- verify: compare a model with its compiled form -----------------------------------------------

# Options of `torch.compile`, which --candidate replaces.
_COMPILES = ("backend", "mode", "dynamic", "fullgraph")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyOptions(CandidateOptions):
    """The options of the command, by their names."""

    strict: bool
    no_gradients: bool
    no_lift: bool
    by: str | None
    blocks: tuple[str, ...]
    locate_seconds: float
    setup: tuple[str, ...]


@click.command(short_help="Compare a model with its compiled form.")
@click.argument("factory", metavar="package.module:factory")
@inputs_option
@backend_option
@setup_option("Import this module first, for example to register a backend.")
@click.option("--mode", help="The mode of torch.compile, for example max-autotune.")
@click.option("--dynamic/--no-dynamic", default=None, help="torch.compile with dynamic shapes.")
@click.option("--fullgraph", is_flag=True, help="torch.compile without graph breaks.")
@click.option(
    "--candidate",
    metavar="NAME|MODULE:FUNCTION",
    help="Instead of torch.compile: onnxruntime, aot_inductor, export or export-decomposed; or a "
    "function that takes a copy of the model and returns the candidate.",
)
@dtype_option
@device_option
@train_option
@strict_option
@click.option("--no-gradients", is_flag=True, help="Do not compare gradients.")
@by_option
@blocks_option
@click.option("--no-lift", is_flag=True, help="Skip the float64 comparison: faster, but weaker.")
@click.option(
    "--locate-seconds",
    type=click.FloatRange(min=0),
    default=LOCATE_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="On a failure, look for where it starts for at most this time; 0 turns it off.",
)
@json_option()
@format_options
@click.pass_context
def verify(
    ctx: click.Context, /, factory: str, json_path: Path | None, form: OutputFormat, **given: Any
) -> None:
    """Compare a model with its compiled form.

    The factory takes no arguments and returns (model, inputs), where inputs is a list of
    positional inputs, a paritas.Inputs(args, kwargs), or a list of these; with --inputs it may
    return the model alone. Random seeds are set to 0 before it is called. hf:LlamaForCausalLM (any
    class of transformers), timm:resnet18 and torchvision:resnet18 stand for small models of that
    name with random weights.

    Exit codes: 0 pass, 1 different or degraded, 2 wrong usage or bad input, 3 unverified.
    """
    options = VerifyOptions(**given)
    if options.candidate is not None:
        replaced = f"--candidate {options.candidate!r}, which replaces torch.compile"
        refuse(ctx, _COMPILES, f"cannot be combined with {replaced}")
    _check_forms(factory, options)
    verdict = _run_verify(factory, options)
    verdict = with_shrink_command(verdict, _shrink_arguments(factory, options))
    write_json(json_path, verdict.to_json)
    own_backend = options.backend if ":" in options.backend else None
    emit_verdict(verdict, form, "verify", factory, written=options.candidate or own_backend)
    ctx.exit(verdict.exit_code)


def _check_forms(factory: str, options: VerifyOptions) -> None:
    """Report a typo before torch is imported."""
    from paritas.core.candidates.loading import check_forms, check_name, is_named

    named = {"FACTORY": factory, "--inputs": options.inputs, "--candidate": options.candidate}
    if options.candidate is not None and is_named(options.candidate):
        check_name(named.pop("--candidate") or "")
    check_forms(named)


def _shrink_arguments(factory: str, options: VerifyOptions) -> list[str]:
    """The arguments of `paritas shrink` for the same programs; none if it cannot build them."""
    if options.candidate is not None or options.device is not None:
        return []
    given = {
        "--inputs": options.inputs,
        "--backend": None if options.backend == "inductor" else options.backend,
        "--mode": options.mode,
        "--dtype": options.dtype,
    }
    arguments = [part for name, value in given.items() if value for part in (name, value)]
    if options.dynamic is not None:
        arguments.append("--dynamic" if options.dynamic else "--no-dynamic")
    return [factory, *arguments, *(["--train"] if options.train else [])]


def _run_verify(factory: str, options: VerifyOptions) -> Verdict:
    with progress() as tell:
        tell("importing torch")
        from paritas.core.candidates.makers import build_candidate, build_reference
        from paritas.core.execution import subjects
        from paritas.verification import verify as verifying

        import_modules(options.setup)
        tell(f"building {factory}")
        model, inputs = build_reference(factory, options)
        candidate = build_candidate(model, inputs, options)
        asked = subjects.VerifyConfig(
            verify_gradients=False if options.no_gradients else None,
            lift=not options.no_lift,
            strict=options.strict,
            raise_on_mismatch=False,
            locate_seconds=options.locate_seconds,
        )
        by: Any = options.by
        return verifying.verify(
            inputs,
            model,
            candidate,
            asked,
            by=by,
            blocks=options.blocks or None,
            on_progress=tell,
        )


# --- power: which planted faults would the check catch in your model? -----------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerOptions(BuildOptions):
    """The options of the command, by their names."""

    autocast: str | None
    no_gradients: bool
    by: str | None
    blocks: tuple[str, ...]
    faults: int
    seconds: float
    seed: int


@click.command(short_help="Plant faults in a model, and count those that are caught.")
@click.argument("factory", metavar="package.module:factory")
@inputs_option
@dtype_option
@click.option(
    "--autocast",
    type=click.Choice(DTYPES[2:]),
    help="Run the forward pass under torch.autocast with this dtype.",
)
@device_option
@train_option
@click.option("--no-gradients", is_flag=True, help="Skip the backward pass.")
@by_option
@blocks_option
@click.option(
    "--faults",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    metavar="N",
    help="The maximum number of faults.",
)
@click.option(
    "--time",
    "seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="The time limit; after it, the results so far are reported.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the faults.")
@click.option(
    "--at-least",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Exit with 1 if a smaller share of the faults above 8 times the noise is caught, for "
    "example 0.99.",
)
@json_option("Write every fault and its result to this file.")
@click.pass_context
def power(
    ctx: click.Context,
    /,
    factory: str,
    at_least: float | None,
    json_path: Path | None,
    **given: Any,
) -> None:
    """Plant faults in a model, one at a time, and count those that paritas verify catches.

    The factory takes no arguments and returns (model, inputs), or only the model with --inputs, as
    for paritas verify. Ctrl-C stops the search and reports the results so far.

    Exit codes: 0 there is a report, 1 a smaller share than --at-least is caught, 2 wrong usage or
    bad input, 3 no fault could be planted and judged, 130 interrupted.
    """
    from paritas.core.candidates.loading import check_forms

    options = PowerOptions(**given)
    check_forms({"FACTORY": factory, "--inputs": options.inputs})
    report = _run_power(factory, options)
    from paritas.core.reporting.terminal import power_report

    write_json(json_path, report.to_json)
    print_report(power_report(report))
    ctx.exit(INTERRUPTED if report.stopped == "interrupt" else report.exit_code(at_least))


def _run_power(factory: str, options: PowerOptions) -> PowerReport:
    with progress() as tell:
        tell("importing torch")
        import torch

        from paritas.core.candidates.makers import build_reference
        from paritas.mutants import power as searching

        tell(f"building {factory}")
        model, inputs = build_reference(factory, options)
        by: Any = options.by
        return searching.power(
            inputs,
            model,
            faults=options.faults,
            seconds=options.seconds,
            gradients=not options.no_gradients,
            autocast=None if options.autocast is None else getattr(torch, options.autocast),
            by=by,
            blocks=options.blocks or None,
            seed=options.seed,
            on_progress=tell,
        )


# --- sweep: many models at once, and what changed since last time ---------------------------------


@click.command(short_help="Verify many models under many settings; what changed since last time?")
@click.argument("targets", metavar="targets.toml", type=click.Path(path_type=Path))
@click.option(
    "--output",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder for the journal and the reports; a sweep that was cut short goes on from there.",
)
@click.option(
    "--against",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The --output of an earlier sweep: report what is newly different, fixed or slow.",
)
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="How many runs at a time.")
@click.option(
    "--executor",
    default="processes",
    show_default=True,
    metavar="processes|dask://HOST:PORT",
    help="Who does the work.",
)
@click.option(
    "--time",
    "seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Time limit of each run, in place of that of [defaults]; otherwise 900.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    help="Memory limit of each run, such as 8GB, in place of that of [defaults]; otherwise its "
    "share of the machine's.",
)
@strict_option
@click.option("--restart", is_flag=True, help="Delete the rows that --output holds.")
@json_option("Write every row with its findings to this file.")
@format_options
@click.pass_context
def sweep(
    ctx: click.Context,
    /,
    targets: Path,
    output: Path,
    json_path: Path | None,
    form: OutputFormat,
    **asked: Any,
) -> None:
    """Verify many models under many settings, each run in a process of its own.

    targets.toml has a row [[target]] for each model: its name (package.module:factory, hf:Class,
    timm:name, torchvision:name or a .pt2 file), dtypes, devices, modes and candidates, of which
    every combination is a run. A row [[kernel]] judges kernels against their references. A run
    that crashes, takes too long or too much memory is a row of the report, never a pass. Called
    again, a sweep that was cut short goes on where it stopped.

    Written to --output are sweep.json, junit.xml and report.html.

    Exit codes: 0 all pass, 1 different or degraded, 2 wrong usage or bad input, 3 unverified, 130
    interrupted; with --against by what is newly wrong alone.
    """
    report = _sweep(targets, output, **asked)
    write_json(json_path, report.to_json)
    from paritas.core.reporting.model_reports import sweep_account, sweep_report

    remark = f"written to {output}: report.html, sweep.json, junit.xml"
    emit(form, lambda: sweep_account(report, subject=str(targets)), sweep_report(report, remark))
    ctx.exit(INTERRUPTED if report.stopped == "interrupt" else report.exit_code)


def _sweep(targets: Path, output: Path, **asked: Any) -> SweepReport:
    with progress() as tell:
        from paritas.sweeping import sweep as sweeping

        return sweeping.sweep(targets, output=output, on_progress=tell, **asked)


# --- invariants: do the ways of running one model that must agree, agree? -------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class InvariantsOptions(CandidateOptions):
    """The options of the command, by their names."""

    only: tuple[str, ...]
    strict: bool


def _list_relations(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001
    if not value or ctx.resilient_parsing:
        return
    from paritas.relations.relation import all_relations

    for one in all_relations().values():
        asked = " (only with --only)" if one.on_request else ""
        click.echo(f"{one.name:20} {one.family.value:9} {one.about}{asked}")
    ctx.exit()


@click.command(short_help="Check that the ways of running one model agree with each other.")
@click.argument("target", metavar="TARGET")
@inputs_option
@click.option(
    "--only",
    multiple=True,
    metavar="RELATION",
    help="Check only this relation, or serving, training or own; may be repeated.",
)
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_relations,
    help="List the relations and exit.",
)
@click.option(
    "--candidate",
    metavar="NAME|MODULE:FUNCTION",
    help="Run the other ways by this candidate: compile for torch.compile, a name as for paritas "
    "verify, or a function that takes a copy of the model and returns the candidate.",
)
@dtype_option
@device_option
@train_option
@strict_option
@html_option
@json_option("Write every relation with its findings to this file.")
@format_options
@click.pass_context
def invariants(
    ctx: click.Context,
    /,
    target: str,
    html_path: Path | None,
    json_path: Path | None,
    form: OutputFormat,
    **given: Any,
) -> None:
    """Check that the ways of running one model agree with each other.

    TARGET is package.module:factory as for paritas verify, or a model by name, such as
    hf:LlamaForCausalLM. Every relation that applies is tried: decoding with a cache against one
    plain call, a padded batch against single rows, accumulated gradients against one batch. A
    relation that the model does not promise has a row with the reason, and is not a failure.

    Exit codes: 0 all hold, 1 different or degraded, 2 wrong usage or bad input, 3 unverified.
    """
    options = InvariantsOptions(**given)
    report = _run_invariants(target, options)
    emit_model_report(report, "invariants", target, form, json_path=json_path, html_path=html_path)
    ctx.exit(report.exit_code)


def _run_invariants(target: str, options: InvariantsOptions) -> InvariantsReport:
    from paritas.core.candidates.loading import check_forms, is_named

    compiles = options.candidate == "compile"
    named = {"TARGET": target, "--inputs": options.inputs}
    if options.candidate is not None and not compiles and not is_named(options.candidate):
        named["--candidate"] = options.candidate
    check_forms(named)
    with progress() as tell:
        tell("importing torch")
        from paritas.core.candidates.makers import build_candidate, build_reference
        from paritas.relations import checking

        tell(f"building {target}")
        model, inputs = build_reference(target, options)
        candidate = None
        if options.candidate is not None:
            asked = dataclasses.replace(options, candidate=None if compiles else options.candidate)
            candidate = build_candidate(model, inputs, asked)
        return checking.invariants(
            model,
            inputs,
            only=options.only or None,
            candidate=candidate,
            strict=options.strict,
            target=target,
            on_progress=tell,
            on_result=_tell_result,
        )


def _tell_result(line: str) -> None:
    """Print a result at once: a run that is killed later has said what it knew."""
    click.echo(line, err=True)


# --- engine: did a serving engine return what the reference model computes? -----------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions(BuildOptions):
    """The options of the command, by their names."""

    older: tuple[str, ...]
    explain: bool
    seconds: float
    strict: bool
    inputs: str | None = None
    train: bool = False


@click.command(short_help="Check the log probabilities of a serving engine against the model.")
@click.argument("target", metavar="TARGET")
@click.argument("records", metavar="RECORDS", type=click.Path(path_type=Path))
@click.option(
    "--older",
    multiple=True,
    metavar="MODULE:FUNCTION",
    help="Function that returns the model with earlier weights, which the engine may still run; "
    "may be repeated.",
)
@click.option(
    "--explain/--no-explain",
    default=True,
    show_default=True,
    help="Look for the cause if a request fails.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="The time limit. After it, no further request is compared and no further cause is tried; "
    "what is known is reported.",
)
@dtype_option
@device_option
@strict_option
@html_option
@json_option("Write every request with its findings, and the causes, to this file.")
@format_options
@click.pass_context
def engine(
    ctx: click.Context,
    /,
    target: str,
    records: Path,
    html_path: Path | None,
    json_path: Path | None,
    form: OutputFormat,
    **given: Any,
) -> None:
    """Check the log probabilities of a serving engine against the model that it should serve.

    TARGET is package.module:factory as for paritas verify, but its inputs are not needed. RECORDS
    is a file with one JSON object for each request: prompt, output (token ids), logprobs, and, if
    there are any, prompt_logprobs, top_logprobs, sampling and logprobs_mode; or the JSON that
    vLLM's server got and returned, {"request": ..., "response": ...}. If a request differs by more
    than rounding, the model is run with one thing changed after the other, until a run gives what
    the engine returned.

    Exit codes: 0 rounding only, 1 different or degraded, 2 wrong usage or bad input, 3 unverified.
    """
    options = EngineOptions(**given)
    report = _run_engine(target, records, options)
    emit_model_report(report, "engine", target, form, json_path=json_path, html_path=html_path)
    ctx.exit(report.exit_code)


def _run_engine(target: str, records: Path, options: EngineOptions) -> EngineReport:
    from paritas.core.candidates.loading import check_forms

    check_forms({"TARGET": target, **{f"--older {one}": one for one in options.older}})
    with progress() as tell:
        tell("importing torch")
        from paritas.core.candidates.makers import build_reference
        from paritas.engines.check import check_engine

        tell(f"building {target}")
        model, _ = build_reference(target, options, model_alone=True)
        older = {one: build_reference(one, options, model_alone=True)[0] for one in options.older}
        return check_engine(
            model,
            records,
            older=older,
            explain=options.explain,
            strict=options.strict,
            seconds=options.seconds,
            target=target,
            on_progress=tell,
            on_result=_tell_result,
        )


# --- kernel: does a hand-written or generated kernel compute what its reference computes? ---------

# Of the time limit, if importing torch takes all of it.
_FEWEST_SECONDS = 1.0
_PROMISES = ("shapes", "layouts", "dtypes", "weights", "aliases", "arguments", "callers")


def _promise_options(command: Any) -> Any:
    for name in reversed(_PROMISES):
        command = click.option(
            f"--fixed-{name}",
            is_flag=True,
            help=f"The task promises that {name} do not change: report such cases as limits.",
        )(command)
    return click.option(
        "--finite",
        is_flag=True,
        help="The task promises that no input is NaN or infinite: report such cases as limits.",
    )(command)


@click.command(short_help="Judge a kernel that may cheat against its reference, on many cases.")
@click.argument("reference", metavar="REFERENCE")
@click.argument("candidate", metavar="CANDIDATE")
@inputs_option
@click.option(
    "--cases", type=click.IntRange(1), default=40, show_default=True, help="The number of cases."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="Time limit of all. The report says what was judged by then.",
)
@click.option(
    "--call-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=20.0,
    show_default=True,
    help="Time limit of one call of the candidate.",
)
@click.option(
    "--device", default="cpu", show_default=True, metavar="DEVICE", help="Where they run."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the cases.")
@_promise_options
@click.option(
    "--forbid",
    metavar="OPERATORS",
    help="Operators that the candidate must not call, separated by commas: torch.matmul.",
)
@click.option("--gradients", is_flag=True, help="Compare gradients of inputs and parameters too.")
@click.option(
    "--compiled", is_flag=True, help="Call it from code that torch.compile compiles, too."
)
@click.option(
    "--fresh-outputs",
    is_flag=True,
    help="A result in memory that a later call uses again is a failure, not a limit.",
)
@click.option("--rate-task", is_flag=True, help="Plant faults in the reference: what is it worth?")
@click.option(
    "--time",
    "timing",
    type=click.Choice(["warm", "cold"]),
    help="After the verdict, time both sides in turn, with warm or cold caches.",
)
@click.option(
    "--script",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write a script that shows the smallest failing case to this file.",
)
@strict_option
@json_option("Write every case with its findings to this file.")
@format_options
@click.pass_context
def kernel(
    ctx: click.Context,
    /,
    reference: str,
    candidate: str,
    json_path: Path | None,
    form: OutputFormat,
    **given: Any,
) -> None:
    """Judge a kernel that may cheat against its reference, on many cases.

    REFERENCE and CANDIDATE are file.py (with a class Model and ModelNew, as in KernelBench),
    file.py:name, package.module:name or, for the reference, an operator such as aten.softmax.int.
    The inputs come from get_inputs() beside the reference, from --inputs, or from torch's samples.

    The candidate runs in a process of its own, which never holds the reference's outputs.

    Exit codes: 0 pass, 1 different or degraded, 2 wrong usage or bad input, 3 unverified: for
    example if the task accepts zeros.
    """

    def show(report: KernelReport) -> None:
        from paritas.core.reporting.model_reports import kernel_account, kernel_report

        write_json(json_path, report.to_json)
        file, line = subject_source(candidate)
        emit(
            form,
            lambda: kernel_account(report, subject=candidate, file=file, line=line),
            kernel_report(report),
        )

    report = _judge(reference, candidate, given, show)
    show(report)
    ctx.exit(report.exit_code)


def _judge(
    reference: str, candidate: str, given: dict[str, Any], show: Callable[[KernelReport], None]
) -> KernelReport:
    """Judge it; `show` is called in place of that if the time limit passes without a report."""
    from pathlib import Path

    from paritas.kernels.forking import shared_nursery

    began = time.monotonic()
    # It imports torch at the same time as this process.
    shared_nursery()
    with progress() as tell:
        tell("importing torch")
        from paritas.kernels import KernelOptions
        from paritas.kernels.judge import KernelJudge, unfinished_report
        from paritas.kernels.processes import LastResort

        fixed = {name for name in _PROMISES if given[f"fixed_{name}"]}
        options = KernelOptions(
            cases=given["cases"],
            seconds=max(given["seconds"] - (time.monotonic() - began), _FEWEST_SECONDS),
            call_seconds=given["call_seconds"],
            seed=given["seed"],
            device=given["device"],
            fixed=frozenset(fixed | ({"finite"} if given["finite"] else set())),
            forbid=tuple(filter(None, (given["forbid"] or "").split(","))),
            gradients=given["gradients"],
            compiled=given["compiled"],
            fresh_outputs=given["fresh_outputs"],
            strict=given["strict"],
            rate_task=given["rate_task"],
            timing=given["timing"] or "",
            script=None if given["script"] is None else Path(given["script"]),
        )
        judge, doing = None, "starting"

        def note(step: str) -> None:
            nonlocal doing
            doing = step
            tell(step)

        def give_up() -> int:
            report = unfinished_report(reference, candidate, doing, judge)
            show(report)
            return report.exit_code

        with LastResort(options.seconds, give_up):
            judge = KernelJudge(reference, options, inputs=given["inputs"], on_progress=note)
            with judge:
                return judge.judge(candidate)
