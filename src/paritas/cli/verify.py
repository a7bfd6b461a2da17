"""`paritas verify`: compare a model with its compiled form."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from paritas.cli.options import (
    BuildOptions,
    OutputFormat,
    blocks_option,
    by_option,
    device_option,
    dtype_option,
    emit_verdict,
    format_options,
    inputs_option,
    json_option,
    progress,
    refuse,
    strict_option,
    train_option,
    write_json,
)

if TYPE_CHECKING:
    from pathlib import Path

    from paritas.results.findings import Verdict

# Options of `torch.compile`, which --candidate replaces.
_COMPILES = ("backend", "mode", "dynamic", "fullgraph")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyOptions(BuildOptions):
    """The options of the command, by their names."""

    backend: str
    mode: str | None
    dynamic: bool | None
    fullgraph: bool
    candidate: str | None
    strict: bool
    no_gradients: bool
    no_lift: bool
    by: str | None
    blocks: tuple[str, ...]


@click.command(short_help="Compare a model with its compiled form.")
@click.argument("factory", metavar="package.module:factory")
@inputs_option
@click.option(
    "--backend", default="inductor", show_default=True, help="The backend of torch.compile."
)
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
    verdict = _run(factory, options)
    write_json(json_path, verdict.to_json)
    emit_verdict(verdict, form, "verify", factory)
    ctx.exit(verdict.exit_code)


def _check_forms(factory: str, options: VerifyOptions) -> None:
    """Report a typo before torch is imported."""
    from paritas.candidates.loading import check_forms
    from paritas.candidates.names import check_name, is_named

    named = {"FACTORY": factory, "--inputs": options.inputs, "--candidate": options.candidate}
    if options.candidate is not None and is_named(options.candidate):
        check_name(named.pop("--candidate") or "")
    check_forms(named)


def _run(factory: str, options: VerifyOptions) -> Verdict:
    with progress() as tell:
        tell("importing torch")
        from paritas.candidates.building import build_candidate, build_reference
        from paritas.checks import verify as verifying
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
