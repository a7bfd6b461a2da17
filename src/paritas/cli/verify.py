"""`paritas verify`: a model of yours against what a compiler makes of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paritas.cli.options import OutputFormat, device_option, format_options, subject_file

if TYPE_CHECKING:
    from paritas.reports.annotations import Account
    from paritas.results.findings import Verdict

DTYPES = ("float64", "float32", "bfloat16", "float16")
# What `torch.compile` is told; it says nothing about a candidate that the user makes.
_COMPILES = ("backend", "mode", "dynamic", "fullgraph")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The options of the command, by their names."""

    inputs: str | None
    backend: str
    mode: str | None
    dynamic: bool | None
    fullgraph: bool
    candidate: str | None
    dtype: str | None
    device: str | None
    train: bool
    strict: bool
    no_gradients: bool
    no_lift: bool


@click.command(short_help="Compare a model with what a compiler makes of it.")
@click.argument("factory", metavar="package.module:factory")
@click.option("--inputs", metavar="MODULE:FUNCTION", help="Function that returns the inputs.")
@click.option("--backend", default="inductor", show_default=True, help="Of torch.compile.")
@click.option("--mode", help="Of torch.compile, for example max-autotune.")
@click.option("--dynamic/--no-dynamic", default=None, help="Of torch.compile: dynamic shapes.")
@click.option("--fullgraph", is_flag=True, help="Of torch.compile: refuse graph breaks.")
@click.option(
    "--candidate",
    metavar="NAME|MODULE:FUNCTION",
    help="In place of torch.compile: onnxruntime, aot_inductor, export or export-decomposed; or a "
    "function that is given a copy of the model and returns what to compare it with.",
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Run model and floating inputs in this.")
@device_option
@click.option("--train", is_flag=True, help="Training mode; otherwise model.eval() is called.")
@click.option("--strict", is_flag=True, help="Count unstable findings as failures.")
@click.option("--no-gradients", is_flag=True, help="Leave gradients out.")
@click.option("--no-lift", is_flag=True, help="Leave the float64 comparison out: faster, weaker.")
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the verdict with all its findings to this file.",
)
@format_options
@click.pass_context
def verify(
    ctx: click.Context, /, factory: str, json_path: Path | None, form: OutputFormat, **given: Any
) -> None:
    """Compare a model with what a compiler makes of it.

    The factory takes no arguments and returns (model, inputs), where inputs is a list of
    positional inputs, a paritas.Inputs(args, kwargs), or a list of these; with --inputs it may
    return the model alone. Random seeds are set to 0 before it is called. hf:LlamaForCausalLM, or
    any class of transformers, stands for a small model of that class with random weights.

    Exit codes: 0 pass, 1 different or degraded, 2 wrong usage or bad input, 3 unverified.
    """
    options = VerifyOptions(**given)
    if options.candidate is not None:
        _refuse_compile_options(ctx, options.candidate)
    _check_forms(factory, options)
    if json_path is not None:
        from paritas.reports.files import check_writable

        check_writable(json_path)
    verdict = _run(factory, options)
    form.write(lambda: _account(verdict, factory))
    _show(verdict, json_path, form)
    ctx.exit(verdict.exit_code)


def _refuse_compile_options(ctx: click.Context, candidate: str) -> None:
    given = [
        f"--{name}"
        for name in _COMPILES
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        replaced = f"--candidate {candidate!r}, which takes the place of torch.compile"
        ctx.fail(f"{', '.join(given)} cannot be combined with {replaced}")


def _check_forms(factory: str, options: VerifyOptions) -> None:
    """A slip of the pen is told at once, before torch is imported."""
    from paritas.candidates.names import check_name, is_named
    from paritas.cli.loading import check_form

    named = {"FACTORY": factory, "--inputs": options.inputs, "--candidate": options.candidate}
    if options.candidate is not None and is_named(options.candidate):
        check_name(named.pop("--candidate") or "")
    for parameter, spec in named.items():
        if spec is not None:
            check_form(spec, parameter)


def _run(factory: str, options: VerifyOptions) -> Verdict:
    from paritas.cli.options import progress

    with progress() as tell:
        tell("importing torch")
        from paritas.checks import verify as verifying
        from paritas.cli.building import build_candidate, build_reference
        from paritas.execution import subjects

        tell(f"building {factory}")
        model, inputs = build_reference(factory, options)
        candidate = build_candidate(model, inputs, options)
        asked = subjects.VerifyConfig(
            verify_gradients=False if options.no_gradients else None,
            lift=not options.no_lift,
            strict=options.strict,
            raise_on_mismatch=False,
        )
        return verifying.verify(inputs, model, candidate, asked, on_progress=tell)


def _account(verdict: Verdict, factory: str) -> Account:
    from paritas.reports.annotations import verdict_account

    return verdict_account(verdict, command="verify", subject=factory, file=subject_file(factory))


def _show(verdict: Verdict, json_path: Path | None, form: OutputFormat) -> None:
    from rich.console import Console

    from paritas.reports.terminal import verdict_report

    if json_path is not None:
        from paritas.reports.files import write_verdict

        write_verdict(json_path, verdict)
    Console(highlight=False, stderr=form.takes_stdout).print(verdict_report(verdict), crop=False)
