"""`paritas invariants`: do the ways of running one model that must agree, agree?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from paritas.core.candidates.loading import CandidateOptions
from paritas.core.commands.options import (
    OutputFormat,
    device_option,
    dtype_option,
    emit_model_report,
    format_options,
    html_option,
    inputs_option,
    json_option,
    options_as,
    progress,
    strict_option,
    tell_result,
    train_option,
)

if TYPE_CHECKING:
    from pathlib import Path

    from paritas.relations.rows import InvariantsReport


@dataclasses.dataclass(frozen=True, kw_only=True)
class InvariantsOptions(CandidateOptions):
    """The options of the command, by their names."""

    only: tuple[str, ...]
    strict: bool


def _list_relations(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001
    if not value or ctx.resilient_parsing:
        return
    from paritas.relations.relation import all_relations

    for all_relation in all_relations().values():
        requested = " (only with --only)" if all_relation.on_request else ""
        click.echo(
            f"{all_relation.name:20} {all_relation.family.value:9} {all_relation.about}{requested}"
        )
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
@options_as(InvariantsOptions)
def invariants(
    ctx: click.Context,
    /,
    target: str,
    html_path: Path | None,
    json_path: Path | None,
    form: OutputFormat,
    options: InvariantsOptions,
) -> None:
    """Check that the ways of running one model agree with each other.

    TARGET is package.module:factory as for paritas verify, or a model by name, such as
    hf:LlamaForCausalLM. Every relation that applies is tried: decoding with a cache against one
    plain call, a padded batch against single rows, accumulated gradients against one batch. A
    relation that the model does not promise has a row with the reason, and is not a failure.

    Exit codes: 0 all hold, 1 different or degraded, 2 wrong usage or bad input, 3 unverified.
    """
    report = _run_invariants(target, options)
    from paritas.relations.report import invariants_report

    shown = invariants_report(report)
    emit_model_report(
        report, "invariants", target, form, shown=shown, json_path=json_path, html_path=html_path
    )
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
            requested = dataclasses.replace(
                options, candidate=None if compiles else options.candidate
            )
            candidate = build_candidate(model, inputs, requested)
        return checking.invariants(
            model,
            inputs,
            only=options.only or None,
            candidate=candidate,
            strict=options.strict,
            target=target,
            on_progress=tell,
            on_result=tell_result,
        )
