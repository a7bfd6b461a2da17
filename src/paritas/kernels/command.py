"""`paritas kernel`: does a hand-written or generated kernel compute what its reference computes?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paritas.core.commands.options import (
    OutputFormat,
    emit,
    format_options,
    inputs_option,
    json_option,
    options_as,
    progress,
    strict_option,
    subject_source,
    write_json,
)
from paritas.core.time_limit import TimeLimit
from paritas.kernels import PROMISES, KernelOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.kernels.rows import KernelReport


# Of the time limit, if importing torch takes all of it.
_FEWEST_SECONDS = 1.0
# `finite` is said of inputs, not of what stays the same.
_FIXED = tuple(name for name in PROMISES if name != "finite")


def _promise_options(command: Any) -> Any:
    for name in reversed(_FIXED):
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
    callback=lambda _, __, text: tuple(filter(None, (text or "").split(","))),
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
    callback=lambda _, __, caches: caches or "",
    help="After the verdict, time both sides in turn, with warm or cold caches.",
)
@click.option(
    "--script",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a script that shows the smallest failing case to this file.",
)
@strict_option
@json_option("Write every case with its findings to this file.")
@format_options
@click.pass_context
@options_as(KernelOptions)
def kernel(
    ctx: click.Context,
    /,
    reference: str,
    candidate: str,
    inputs: str | None,
    json_path: Path | None,
    form: OutputFormat,
    options: KernelOptions,
    **promises: bool,
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
        from paritas.core.reporting.annotations import verdict_account
        from paritas.kernels.report import kernel_report

        write_json(json_path, report.to_json)
        file, line = subject_source(candidate)
        emit(
            form,
            lambda: verdict_account(
                report.verdict, command="kernel", subject=candidate, file=file, line=line
            ),
            kernel_report(report),
        )

    fixed = {name for name in _FIXED if promises[f"fixed_{name}"]}
    fixed |= {"finite"} if promises["finite"] else set()
    options = dataclasses.replace(options, fixed=frozenset(fixed))
    report = _judge(reference, candidate, inputs, options, show)
    show(report)
    ctx.exit(report.exit_code)


def _judge(
    reference: str,
    candidate: str,
    inputs: str | None,
    options: KernelOptions,
    show: Callable[[KernelReport], None],
) -> KernelReport:
    """Judge it; `show` is called in place of that if the time limit passes without a report."""
    from paritas.kernels.servers import shared_server

    limit = TimeLimit(options.seconds)
    # It imports torch at the same time as this process.
    shared_server()
    with progress() as tell:
        tell("importing torch")
        from paritas.kernels.judge import KernelJudge, unfinished_report
        from paritas.kernels.processes import LastResort

        seconds = max(limit.left, _FEWEST_SECONDS)
        options = dataclasses.replace(options, seconds=seconds)
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
            judge = KernelJudge(reference, options, inputs=inputs, on_progress=note)
            with judge:
                return judge.judge(candidate)
