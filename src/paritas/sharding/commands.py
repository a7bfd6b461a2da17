"""The commands about ranks: `paritas partition`, `verify-graph` and `verify-parallel`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from paritas.core.commands.options import (
    DTYPES,
    INTERRUPTED,
    Mesh,
    OutputFormat,
    blocks_option,
    confirm_option,
    device_option,
    dtype_option,
    emit,
    emit_verdict,
    format_options,
    inputs_option,
    json_option,
    options_as,
    progress,
    strict_option,
    subject_source,
    was_given,
    write_json,
)
from paritas.core.results.rank_backends import GLOO, NCCL
from paritas.sharding.options import PartitionOptions

if TYPE_CHECKING:
    from paritas.core.commands.ranks import Ranks
    from paritas.core.results.findings import Verdict
    from paritas.core.results.progress import Progress
    from paritas.sharding.graphs.rows import GraphReport
    from paritas.sharding.operator_check import CheckedOperator


_prove_option = click.option(
    "--prove",
    is_flag=True,
    help="Also prove each split for all shapes and numbers of ranks, or find a counterexample.",
)
_certificates_option = click.option(
    "--certificates",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the certificate of each proof there; implies --prove.",
)


# --- partition: compare an operator with the same operator split over ranks -----------------------


@click.command(short_help="Check or discover how an operator can be split over ranks.")
@click.argument("operator", metavar="package.module.operator")
@click.option(
    "--arg",
    "args",
    multiple=True,
    metavar="SHAPE|NUMBER|value=...",
    help="A positional argument, see above; repeat it for each, in order.",
)
@click.option(
    "--kwarg",
    "kwargs",
    multiple=True,
    metavar="NAME=...",
    help="A keyword argument; may be repeated.",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
    help="The dtype of floating tensors that do not name another.",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="IDX,DIM",
    help="Check only splits of this dimension of this argument; may be repeated.",
)
@click.option("--annotation", metavar="TEXT", help="The splitting rule: 'm k+, k+ n -> m n'.")
@click.option(
    "--discover", is_flag=True, help="Find splits by running it, even if the library has a rule."
)
@click.option(
    "--ranks", type=click.IntRange(2), default=2, show_default=True, help="The number of ranks."
)
@click.option(
    "--without-gradient",
    type=click.IntRange(0),
    multiple=True,
    metavar="IDX",
    help="An argument without a gradient, such as a running mean; may be repeated.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of random tensors.")
@strict_option
@device_option
@confirm_option
@_prove_option
@_certificates_option
@click.option(
    "--shrink",
    "outdir",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write a script there that shows the first wrong split, with the smallest shapes.",
)
@json_option()
@format_options
@click.pass_context
def partition(
    ctx: click.Context,
    /,
    operator: str,
    outdir: Path | None,
    certificates: Path | None,
    json_path: Path | None,
    form: OutputFormat,
    **raw_options: object,
) -> None:
    """Compare an operator with the same operator split over ranks.

    The operator has its Python name (torch.conv2d, torch.Tensor.view), or a colon after its module
    (my.ops:attend). nnScaler's names (nnscaler.runtime.function.embedding) refer to the same
    functions, even if nnScaler is not installed.

    The splits come from --annotation, else from the library's rule, else from running the operator
    to discover them. Each is checked forward and backward, in float64 and in the given dtype.

    With --prove, each split is also proved over the real numbers, for all shapes and numbers of
    ranks. A split that is neither proved nor refuted is unverified.

    \b
    An argument is one of
      8x32x32           a tensor with values that suit the operator
      16                a vector such as a bias; as a --kwarg, the number
      8x32:int64<100    a tensor of another dtype; here indices below 100
      2.5, value=16     a number
      value=(8, 4)      any Python literal or slice: value=slice(0, 9)

    Exit codes: 0 pass, 1 different or degraded, 2 wrong usage or bad input, 3 unverified.
    """  # noqa: D301  (\b tells click not to wrap the lines)
    raw_options["prove"] = bool(raw_options["prove"]) or certificates is not None
    options = PartitionOptions(**raw_options)  # type: ignore[arg-type]
    from paritas.sharding.operators.resolving import check_name

    check_name(operator, "OPERATOR")
    if options.annotation is not None and options.discover:
        ctx.fail("--annotation and --discover exclude each other: give one of them")
    checked = _run_partition(operator, options)
    if certificates is not None:
        from paritas.core.reporting.files import write_certificates

        write_certificates(certificates, checked.certificates())
    write_json(json_path, checked.verdict.to_json)
    shrunk = [] if outdir is None else _shrink(checked, outdir)
    from paritas.sharding.operator_check import partition_report

    shown = partition_report(checked, shrunk)
    emit_verdict(checked.verdict, form, "partition", operator, shown)
    ctx.exit(checked.verdict.exit_code)


def _run_partition(operator: str, options: PartitionOptions) -> CheckedOperator:
    with progress(forks=True) as tell:
        tell("importing torch")
        from paritas.core.importing import look_here
        from paritas.core.placement.placement import device_of
        from paritas.sharding.operator_check import check, operator_call
        from paritas.sharding.operators.recipe_checks import check_confirm
        from paritas.sharding.operators.resolving import resolve_operator

        look_here()
        function = resolve_operator(operator, parameter="OPERATOR")
        call = operator_call(operator, function, options)
        check_confirm(options.confirm, device_of(call), options.ranks)
        return check(call, options, tell)


def _shrink(checked: CheckedOperator, outdir: Path) -> list[str]:
    """Shrink the first failure and describe the result; a failure to shrink is not an error."""
    from paritas.core.errors import UsageError

    try:
        with progress(forks=True) as tell:
            shrunk = checked.verdict.shrink(outdir=outdir, on_progress=tell)
        return list(shrunk.lines)
    except UsageError as error:
        return [f"no script in {outdir}: {error}"]


# --- verify-graph: compare every operator of a graph with its splits over ranks -------------------

# Copied from `paritas.sharding.graphs.calls`, which imports torch.
SOURCES = ("declared", "library", "discover", "all")


class RankCounts(click.ParamType[tuple[int, ...]]):
    """Numbers of ranks, separated by commas."""

    name = "N[,N...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Parse them."""
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < 2:  # noqa: PLR2004
            self.fail(
                f"the number of ranks must be 2 or more, as in 2 or 2,4; got {value!r}", param, ctx
            )
        return numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """The options of the command that `verify_graph()` does not have by that name and type."""

    outdir: Path
    options: Literal["declared", "library", "discover", "all"] | None
    inputs: str | None
    device: str | None
    certificates: Path | None
    overwrite: bool
    no_html: bool
    quiet: bool
    form: OutputFormat


@click.command("verify-graph", short_help="Check every operator of a graph, split over ranks.")
@click.option(
    "--graph",
    required=True,
    metavar="FILE|module:factory",
    help="A torch.export program (.pt2), an nnScaler checkpoint (.ckp), or a function that "
    "returns (model, inputs), an ExportedProgram or a GraphModule.",
)
@click.option(
    "--outdir",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where the results go. An interrupted run there is resumed; another graph is added to "
    "those in DIR.",
)
@click.option(
    "--options",
    type=click.Choice(SOURCES),
    help="Where splits come from. Default: the graph, else the library.",
)
@click.option("--ranks", type=RankCounts(), default="2", show_default=True, help="Rank counts.")
@click.option(
    "--cap", type=click.IntRange(1), metavar="N", help="Shorten longer dimensions to this length."
)
@click.option(
    "--inputs",
    metavar="FILE|DUMP|module:function",
    help="Inputs of the graph (.safetensors, .pt, a function), or a dump: operators then run on "
    "the values of that run.",
)
@click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE",
    help="Import this module first: it defines your operators or annotations; may be repeated.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of random values.")
@click.option("--strict", is_flag=True, help="Count unstable splits as failures.")
@device_option
@confirm_option
@_prove_option
@click.option(
    "--placements",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A TOML file with placements of inputs and parameters, and the collectives after modules: "
    "prove the graph as a whole, or find numbers that refute it.",
)
@_certificates_option
@click.option(
    "--executor",
    default="processes",
    show_default=True,
    metavar="processes|dask://HOST:PORT",
    help="Where the work runs.",
)
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Number of workers. Default: 1.")
@click.option("--overwrite", is_flag=True, help="Start over and discard earlier results in DIR.")
@click.option("--no-html", is_flag=True, help="Do not write report.html.")
@click.option("--quiet", is_flag=True, help="Print only the verdict line, no progress.")
@format_options
@click.pass_context
@options_as(GraphOptions)
def verify_graph(
    ctx: click.Context, /, *, graph: str, options: GraphOptions, **raw_options: Any
) -> None:
    """Check every operator of a graph: unsplit, and with every split over ranks that it allows.

    Identical calls are checked once and counted. Code in a graph file is not executed: only torch's
    operators and the modules of --import run.

    The command writes results.json, results.csv and report.html to DIR and, for each failure, a
    script that reproduces it (repro/). Results of other graphs in DIR are kept, and operators
    verified for one of them are not verified again.

    With --prove, each split is also proved over the real numbers; one that is neither proved nor
    refuted counts as not checked. With --placements, so is the graph as a whole.

    Exit codes: 0 pass, 1 a split is wrong, 2 wrong usage or bad input, 3 something could not be
    checked, 130 interrupted.
    """
    raw_options["prove"] = bool(raw_options["prove"]) or options.certificates is not None
    last: list[Progress] = []
    try:
        report = _run_verify_graph(graph, options, last, raw_options)
    except KeyboardInterrupt:
        done = f" after {last[-1].done} of {last[-1].total} operators" if last else ""
        click.echo(f"interrupted{done}; run the same command to resume", err=True)
        ctx.exit(INTERRUPTED)
    if options.certificates is not None:
        from paritas.core.reporting.files import write_certificates

        write_certificates(options.certificates, report.certificates())
    names = (*([] if options.no_html else ["report.html"]), "results.csv", "results.json")
    files = None if options.quiet else [str(options.outdir / name) for name in names]
    _show(report, graph, files, options.form)
    ctx.exit(report.exit_code)


def _run_verify_graph(
    graph: str, options: GraphOptions, last: list[Progress], raw_options: dict[str, Any]
) -> GraphReport:
    from paritas.core.candidates.loading import find_graph, find_inputs
    from paritas.core.importing import look_here

    look_here()  # for --import

    with progress(quiet=options.quiet, forks=True) as show:

        def tell(step: Progress) -> None:
            last[:] = [step]
            show(step)

        if options.device is not None:
            from paritas.core.execution.subjects import usable_device

            raw_options["device"] = usable_device(options.device)
        source = find_graph(graph)
        inputs = None if options.inputs is None else find_inputs(options.inputs)
        from paritas.sharding.graphs import verify

        return verify.verify_graph(
            source,
            options.outdir,
            options=options.options,
            inputs=inputs,
            html=not options.no_html,
            resume=not options.overwrite,
            on_progress=tell,
            **raw_options,
        )


def _show(report: GraphReport, graph: str, files: list[str] | None, form: OutputFormat) -> None:
    """Print the report with its files; only the verdict line if `files` is None."""
    from rich.console import Console

    from paritas.sharding.graphs.report import graph_account, graph_report, graph_verdict_line

    emit(
        form,
        lambda: graph_account(report, subject=graph, file=subject_source(graph)[0]),
        graph_verdict_line(report)
        if files is None
        else graph_report(report, Console(stderr=form.takes_stdout).width, files=files),
        soft_wrap=files is None,
    )


# --- verify-parallel: compare a model with itself under a parallel plan ---------------------------

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
    steps: int | None
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
    "--steps",
    type=click.IntRange(1),
    help="Training steps that are compared in full. Default: 2, and 4 more in float64 alone.",
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
    ctx: click.Context,
    /,
    factory: str,
    json_path: Path | None,
    form: OutputFormat,
    **raw_options: Any,
) -> None:
    """Compare a model on one device with the same model under a parallel plan.

    The factory takes no arguments and returns (model, inputs), or only the model with --inputs.
    Losses, outputs, gradients, buffers and the parameters after each step are compared, and
    replicated values are compared between ranks. Under torchrun, its ranks are used.

    Exit codes: 0 pass, 1 different or degraded, 2 wrong usage or bad input, 3 unverified.
    """
    from paritas.core.commands.ranks import Ranks

    options = ParallelOptions(**raw_options)
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

    reports = here is None or here.rank == 0
    with _join_rank_group(here) as note:
        verdict = _run_verify_parallel(factory, options, here)
        if note:
            verdict = msgspec.structs.replace(verdict, notes=(*verdict.notes, note))
        if reports:
            write_json(json_path, verdict.to_json)
            emit_verdict(verdict, form, "verify-parallel", factory)
    ctx.exit(verdict.exit_code)


def _check_forms(factory: str, options: ParallelOptions) -> None:
    """Report a typo before torch is imported."""
    from paritas.core.candidates.loading import check_form, check_forms
    from paritas.core.errors import UsageError

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
        plan_names = ", ".join(NAMED_PLANS)
        raise UsageError(
            f"--plan {options.plan!r} is unknown; give {plan_names} or your own package.module:name"
        )
    check_form(options.plan, "--plan")


def _run_verify_parallel(factory: str, options: ParallelOptions, here: Ranks | None) -> Verdict:
    from paritas.sharding.plans import verify

    with progress(quiet=here is not None and here.rank != 0, forks=True) as tell:
        tell(f"building {factory}")
        arguments = _build_parallel(factory, options, here)
        subjects = [arguments.pop(name) for name in ("model", "plan", "inputs")]
        return verify.verify_parallel(
            *subjects,
            **arguments,
            steps=options.steps,
            split=options.split or None,
            ranks=options.ranks if here is None else "here",
            seed=options.seed,
            strict=options.strict,
            timeout=options.timeout,
            by=options.by,
            blocks=options.blocks or None,
            resume=options.resume,
            on_progress=tell,
        )


def _build_parallel(factory: str, options: ParallelOptions, here: Ranks | None) -> dict[str, Any]:
    """Arguments of the check: find and call what the options name, under their seed."""
    import torch

    from paritas.core.candidates.loading import resolve
    from paritas.core.candidates.makers import call_user, move_target
    from paritas.core.errors import UsageError

    plan = options.plan if options.plan in NAMED_PLANS else _find_plan(options.plan)
    loss = None if options.loss is None else resolve(options.loss, "--loss")
    optimizer = None if options.optimizer is None else resolve(options.optimizer, "--optimizer")
    model, inputs = call_user(factory, options.inputs, options.seed)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"FACTORY {factory!r} returned a model of type {type(model).__name__}; a parallel plan "
            "needs a torch.nn.Module"
        )
    model, inputs = move_target(model, inputs, options.device, options.dtype)
    narrow = None if options.compute_dtype is None else getattr(torch, options.compute_dtype)
    world = 2 if here is None else here.world
    return {
        "model": model,
        "plan": plan,
        "inputs": inputs,
        "mesh": world if options.mesh is None else options.mesh,
        "loss": loss,
        "optimizer": optimizer,
        "step": None if options.step is None else resolve(options.step, "--step"),
        "compute_dtype": narrow,
    }


def _find_plan(spec: str) -> Any:
    from paritas.core.candidates.loading import find
    from paritas.core.errors import UsageError

    plan = find(spec, "--plan")
    if not callable(plan) and not isinstance(plan, Mapping):
        raise UsageError(
            f"--plan {spec!r} is of type {type(plan).__name__}: {plan!r:.80}; name a dict of "
            "parallel styles, or a function of the model and the mesh"
        )
    return plan


@contextlib.contextmanager
def _join_rank_group(here: Ranks | None) -> Iterator[str]:
    """Within it this process is a rank of torchrun's group; nothing where torchrun is not there.

    It yields what is to be said about the devices of the ranks.

    All ranks leave it together: torchrun ends the others as soon as one has ended with a code that
    is not 0, and the first rank must have told the verdict by then.
    """
    if here is None:
        yield ""
        return
    import torch
    from torch import distributed

    gpus, ranks = torch.cuda.device_count(), len(here.here)
    has_gpu = gpus >= ranks  # NCCL has no two ranks on one GPU
    backend = NCCL if has_gpu else GLOO
    note = ""
    if gpus and not has_gpu:
        note = (
            f"run on the CPU with gloo: NCCL needs one GPU per rank, and this machine has {gpus} "
            f"for {ranks} ranks"
        )
    if backend.needs_own_device:
        torch.cuda.set_device(here.rank - here.here.start)
    hook = sys.excepthook
    distributed.init_process_group(backend.group)
    try:
        yield note
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
        sys.excepthook = hook
