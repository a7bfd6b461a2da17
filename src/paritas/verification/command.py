"""`paritas verify`: compare a model with its compiled form."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from paritas.core.candidates.loading import CandidateOptions, import_modules
from paritas.core.commands.options import (
    OutputFormat,
    backend_option,
    blocks_option,
    by_option,
    device_option,
    dtype_option,
    emit_verdict,
    format_options,
    inputs_option,
    json_option,
    json_takes_stdout,
    progress,
    refuse,
    setup_option,
    strict_option,
    train_option,
    was_given,
    with_shrink_command,
    write_json,
)
from paritas.core.settings import LOCATE_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

    from paritas.core.execution.subjects import VerifyConfig
    from paritas.core.results.findings import Verdict


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


_PLAN = "paritas.verify.plan"


def _ask_for_plan(ctx: click.Context, _: click.Parameter, value: object) -> None:
    """Note `--plan`, which is not a setting: a forgotten one would turn off every check."""
    ctx.meta[_PLAN] = bool(value)


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
@click.option(
    "--plan",
    is_flag=True,
    expose_value=False,
    callback=_ask_for_plan,
    help="Run only the reference, print what the check would run, compile and need in memory, with "
    "the estimated time, and exit with 0. Nothing is compared.",
)
@json_option("Write the verdict with all its findings, or the plan, to this file.")
@format_options
@click.pass_context
def verify(
    ctx: click.Context,
    /,
    factory: str,
    json_path: Path | None,
    form: OutputFormat,
    **option_values: Any,
) -> None:
    """Compare a model with its compiled form.

    The factory takes no arguments and returns (model, inputs), where inputs is a list of
    positional inputs, a paritas.Inputs(args, kwargs), or a list of these; with --inputs it may
    return the model alone. Random seeds are set to 0 before it is called. hf:LlamaForCausalLM (any
    class of transformers), timm:resnet18 and torchvision:resnet18 stand for small models of that
    name with random weights.

    Exit codes: 0 pass, 1 different or degraded, 2 wrong usage or bad input, 3 unverified.
    """
    options = VerifyOptions(**option_values)
    if options.candidate is not None:
        replaced = f"--candidate {options.candidate!r}, which replaces torch.compile"
        refuse(ctx, _COMPILES, f"cannot be combined with {replaced}")
    _check_forms(factory, options)
    if ctx.meta[_PLAN]:
        _show_plan(ctx, factory, options, json_path)
        return
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
    flag_values = {
        "--inputs": options.inputs,
        "--backend": None if options.backend == "inductor" else options.backend,
        "--mode": options.mode,
        "--dtype": options.dtype,
    }
    arguments = [part for name, value in flag_values.items() if value for part in (name, value)]
    if options.dynamic is not None:
        arguments.append("--dynamic" if options.dynamic else "--no-dynamic")
    return [factory, *arguments, *(["--train"] if options.train else [])]


def _run_verify(factory: str, options: VerifyOptions) -> Verdict:
    with progress() as tell:
        tell("importing torch")
        from paritas.core.candidates.makers import build_candidate, build_reference
        from paritas.verification import verify as verifying

        import_modules(options.setup)
        tell(f"building {factory}")
        model, inputs = build_reference(factory, options)
        candidate = build_candidate(model, inputs, options)
        by: Any = options.by
        return verifying.verify(
            inputs,
            model,
            candidate,
            _make_config(options),
            by=by,
            blocks=options.blocks or None,
            on_progress=tell,
        )


def _make_config(options: VerifyOptions) -> VerifyConfig:
    from paritas.core.execution.subjects import VerifyConfig

    return VerifyConfig(
        verify_gradients=False if options.no_gradients else None,
        lift=not options.no_lift,
        strict=options.strict,
        raise_on_mismatch=False,
        locate_seconds=options.locate_seconds,
    )


def _show_plan(
    ctx: click.Context, factory: str, options: VerifyOptions, json_path: Path | None
) -> None:
    """Print what a check would cost; a candidate that is not made by torch.compile is not made."""
    if was_given(ctx, "format_name"):
        ctx.fail("--format cannot be combined with --plan, which has no findings")
    with progress() as tell:
        tell("importing torch")
        from paritas.core.candidates.makers import build_candidate, build_reference
        from paritas.verification.plan import PlannedTarget, plan_check, plan_text

        import_modules(options.setup)
        tell(f"building {factory}")
        model, inputs = build_reference(factory, options)
        is_made = options.candidate is None  # torch.compile compiles nothing until it is called
        target = PlannedTarget(
            name=factory,
            model=model,
            inputs=inputs,
            candidate=build_candidate(model, inputs, options) if is_made else None,
            candidate_name=options.candidate or f"torch.compile ({options.backend})",
        )
        by: Any = options.by
        plan = plan_check(
            target, _make_config(options), by=by, blocks=options.blocks or None, tell=tell
        )
    write_json(json_path, plan.to_json)
    click.echo(plan_text(plan), err=json_takes_stdout())
