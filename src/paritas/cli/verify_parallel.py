"""`paritas verify-parallel`: compare a model with itself under a parallel plan."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, Literal

import click

from paritas.cli.options import (
    Mesh,
    OutputFormat,
    blocks_option,
    device_option,
    dtype_option,
    emit_verdict,
    format_options,
    inputs_option,
    json_option,
    progress,
    strict_option,
    was_given,
    write_json,
)

if TYPE_CHECKING:
    from pathlib import Path

    from paritas.cli.running import Ranks
    from paritas.results.findings import Verdict

NAMED_PLANS = ("ddp", "fsdp", "hf", "hf-ep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """The options of the command, by their names."""

    plan: str
    inputs: str | None
    loss: str | None
    optimizer: str | None
    step: str | None
    mesh: int | dict[str, int] | None
    split: tuple[str, ...]
    steps: int
    ranks: Literal["simulated", "gloo"]
    device: str | None
    dtype: str | None
    compute_dtype: str | None
    seed: int
    timeout: float
    resume: int | dict[str, int] | None
    by: Literal["whole", "blocks"] | None
    blocks: tuple[str, ...]
    strict: bool


@click.command("verify-parallel", short_help="Compare a model with itself under a parallel plan.")
@click.argument("factory", metavar="package.module:factory")
@click.option(
    "--plan",
    required=True,
    metavar="ddp|fsdp|hf|hf-ep|MODULE:NAME",
    help="hf: the tensor-parallel plan that a model of transformers ships; hf-ep: with experts on "
    "different ranks. MODULE:NAME: a dict of parallel styles, or a function that takes the model "
    "and the mesh and returns the parallel model or a pipeline schedule (None if it changed the "
    "model in place).",
)
@inputs_option
@click.option(
    "--loss",
    metavar="MODULE:FUNCTION",
    help="Function of the output and the inputs. Default: the output if it is a scalar, else a "
    "weighted mean of it.",
)
@click.option(
    "--optimizer",
    metavar="MODULE:FUNCTION",
    help="Function of the parameters, such as torch.optim:AdamW. Default: SGD with momentum.",
)
@click.option(
    "--step",
    metavar="MODULE:FUNCTION",
    help="Function of the model and the inputs that runs forward and backward itself, in "
    "micro-batches or with clipping of gradients, and returns the loss.",
)
@click.option(
    "--mesh",
    type=Mesh(),
    help="Number of ranks, or the axes of a mesh. Default: 2; under torchrun, all ranks.",
)
@click.option(
    "--split",
    metavar="AXIS",
    multiple=True,
    help="Mesh axis whose ranks get different samples of a batch; may be repeated. Default: all "
    "axes for ddp and fsdp, otherwise none.",
)
@click.option(
    "--steps", type=click.IntRange(1), default=2, show_default=True, help="Training steps."
)
@click.option(
    "--ranks",
    type=click.Choice(("simulated", "gloo")),
    default="simulated",
    show_default=True,
    help="simulated: threads of this process; gloo: one process per rank.",
)
@device_option
@dtype_option
@click.option(
    "--compute-dtype",
    type=click.Choice(("bfloat16", "float16")),
    help="The dtype in which the plan computes on purpose (mixed precision): its rounding passes.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=120.0,
    show_default=True,
    help="Time limit for one run of the ranks, in seconds.",
)
@click.option(
    "--resume",
    type=Mesh(),
    help="Another mesh: after the steps, a checkpoint is saved (torch.distributed.checkpoint) and "
    "loaded on it, and as many steps follow.",
)
@click.option(
    "--by",
    type=click.Choice(["whole", "blocks"]),
    help="Check the whole model in float64, or its blocks (layers) one by one: only one of them is "
    "in float64 on the ranks at a time. Default: the whole.",
)
@blocks_option
@strict_option
@json_option(first_rank_only=True)
@format_options
@click.pass_context
def verify_parallel(
    ctx: click.Context, /, factory: str, json_path: Path | None, form: OutputFormat, **given: Any
) -> None:
    """Compare a model on one device with the same model under a parallel plan.

    The factory takes no arguments and returns (model, inputs), or only the model with --inputs.
    Losses, outputs, gradients, buffers and the parameters after each step are compared, and
    replicated values are compared between ranks. Under torchrun, its ranks are used.

    Exit codes: 0 pass, 1 different or degraded, 2 wrong usage or bad input, 3 unverified.
    """
    from paritas.cli.running import Ranks

    options = ParallelOptions(**given)
    here = Ranks.from_environment(os.environ, alone=True)
    if here is not None and was_given(ctx, "ranks"):
        ctx.fail(
            f"torchrun already starts the ranks (RANK={here.rank} is set): drop "
            f"--ranks {options.ranks}, or run without torchrun"
        )
    if options.device is not None and (here is not None or options.ranks != "simulated"):
        ctx.fail("--device is for simulated ranks: torchrun gives each rank its own, gloo the CPU")
    _check_forms(factory, options)
    import msgspec

    from paritas.cli.parallel_building import joined

    reports = here is None or here.rank == 0
    with joined(here) as note:
        verdict = _run(factory, options, here)
        if note:
            verdict = msgspec.structs.replace(verdict, notes=(*verdict.notes, note))
        if reports:
            write_json(json_path, verdict.to_json)
            emit_verdict(verdict, form, "verify-parallel", factory)
    ctx.exit(verdict.exit_code)


def _check_forms(factory: str, options: ParallelOptions) -> None:
    """Report a typo before torch is imported."""
    from paritas.candidates.loading import check_form, check_forms
    from paritas.errors import UsageError

    named = {
        "--inputs": options.inputs,
        "--loss": options.loss,
        "--optimizer": options.optimizer,
        "--step": options.step,
    }
    check_forms({"FACTORY": factory, **named})
    if options.plan in NAMED_PLANS:
        return
    if ":" not in options.plan:
        known = ", ".join(NAMED_PLANS)
        raise UsageError(
            f"--plan {options.plan!r} is unknown; give {known} or your own package.module:name"
        )
    check_form(options.plan, "--plan")


def _run(factory: str, options: ParallelOptions, here: Ranks | None) -> Verdict:
    from paritas.cli.parallel_building import build_parallel
    from paritas.parallel import verify

    with progress(quiet=here is not None and here.rank != 0) as tell:
        tell(f"building {factory}")
        built = build_parallel(factory, options, here)
        return verify.verify_parallel(
            built.model,
            built.plan,
            built.inputs,
            built.mesh,
            loss=built.loss,
            optimizer=built.optimizer,
            step=built.step,
            steps=options.steps,
            split=options.split or None,
            ranks=options.ranks if here is None else "here",
            seed=options.seed,
            compute_dtype=built.compute_dtype,
            strict=options.strict,
            timeout=options.timeout,
            by=options.by,
            blocks=options.blocks or None,
            resume=options.resume,
            on_progress=tell,
        )
