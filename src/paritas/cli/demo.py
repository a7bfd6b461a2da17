"""`paritas demo`: a correct and a faulty compilation of a small transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, RenderableType

    from paritas.results.findings import Finding, Score, Verdict

INTRODUCTION = (
    "A one-layer transformer in float32, and torch.compile. No parameter requires grad, so only "
    "the forward pass is compiled, in float32 and in float64. Nearly all the time goes into the "
    "C++ compiler."
)
FIRST = "1. Does torch.compile(model) still compute what the model computes?"
SECOND = (
    "2. The same model from a compiler with a planted fault: it shifts the causal mask by one, so "
    "every token sees the next one."
)
CHECKED = "A small transformer in float32, compared with the output of two compilers:"
RIGHT, WRONG = "torch.compile", "a compiler with a planted fault"
DETAILS = "details: paritas demo --verbose"
USUAL_PCC = 0.99
# The most likely reason for a failure on a fresh machine.
ADVICE = "torch.compile needs a C++ compiler (g++ or clang++) and the Python headers"
# One layer contains every kind of kernel: a second one only takes longer to compile.
LAYERS = 1
STEPS = 6


@click.command(short_help="Check a correct and a faulty compilation of a small model.")
@click.option("--verbose", is_flag=True, help="Also compile in float64, and print both reports.")
@click.pass_context
def demo(ctx: click.Context, *, verbose: bool) -> None:
    """Check a correct and a faulty compilation of a small transformer.

    Exit codes: 0 if the correct one passes and the faulty one is caught, else 1.
    """
    from rich.console import Console, Group

    console = Console(highlight=False)
    verdicts = _verdicts(lift=verbose)
    expected = is_as_expected(*verdicts)
    if verbose or not expected:
        _print_reports(console, *verdicts)
    else:
        console.print(Group(*summary(*verdicts)))
    ctx.exit(0 if expected else 1)


def _print_reports(console: Console, *verdicts: Verdict) -> None:
    from paritas.reports.terminal import verdict_report

    console.print(INTRODUCTION, end="\n\n")
    for title, verdict in zip((FIRST, SECOND), verdicts, strict=True):
        console.print(title, style="bold", end="\n\n")
        console.print(verdict_report(verdict), crop=False)
        console.print()
    console.print("What this shows", style="bold")
    for line in lessons(*verdicts):
        console.print(line, markup=False)


def is_as_expected(right: Verdict, wrong: Verdict) -> bool:
    """Whether the correct compilation passed, and the faulty one failed by its values."""
    from paritas.results.findings import Status

    caught = wrong.status is Status.DIFFERENT and _result(wrong) is not None
    return right.passed and caught


def summary(right: Verdict, wrong: Verdict) -> Iterator[RenderableType]:
    """One screen: correlation accepts both, paritas does not, and where the fault starts."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from paritas.reports.terminal import STYLES

    yield Text(CHECKED, style="bold")
    yield Text()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for name in ("", RIGHT, WRONG):
        table.add_column(name)
    results = [_result(right), _result(wrong)]
    colours = ["green" if _is_accepted(one) else "red" for one in results]
    table.add_row("correlation", *map(Text, map(_correlation, results), colours))
    table.add_row("paritas", *(Text(one.status, STYLES[one.status]) for one in (right, wrong)))
    table.add_row("error / noise", *(_noise(one) for one in results))
    yield table
    yield Text()
    yield Text(
        f"Correlation accepts anything above {USUAL_PCC}, the usual threshold, and misses the "
        "fault. paritas measures errors in multiples of the model's own rounding noise."
    )
    yield from _start(wrong)
    yield Text()
    yield Text(DETAILS, style="dim")


def _start(wrong: Verdict) -> Iterator[RenderableType]:
    """Where the fault starts, if that was found."""
    from rich.text import Text

    from paritas.reports.terminal import indented, near_path

    first = next((one for one in wrong.findings if one.origin is not None), None)
    if first is None or first.origin is None:
        return
    origin = first.origin
    yield Text()
    yield Text.assemble("The fault starts in module ", (origin.module, "bold red"), ":")
    yield indented(near_path(origin.source))
    yield Text(f"    {origin.code}", style="bold", no_wrap=True, overflow="ellipsis")
    if first.diagnosis is not None and first.diagnosis.best is not None:
        yield indented(first.diagnosis.best.sentence)


def lessons(right: Verdict, wrong: Verdict) -> Iterator[str]:
    """What the two verdicts show about correlation as a check."""
    if not is_as_expected(right, wrong):
        yield (
            "Nothing: the correct one should pass, and the faulty one should fail by its values. "
            f"{ADVICE}."
        )
        return
    mine, theirs = _result(right), _result(wrong)
    yield f"Correlation (PCC), where {USUAL_PCC} is the usual threshold:"
    yield f"  the correct one has {_correlation(mine)}"
    yield f"  the faulty one has {_correlation(theirs)}"
    yield "paritas, worst error in multiples of the model's own rounding noise:"
    yield f"  the correct one is off by {_noise(mine)}: {right.status}"
    yield f"  the faulty one is off by {_noise(theirs)}: {wrong.status}"


def _verdicts(*, lift: bool) -> tuple[Verdict, Verdict]:
    """The verdict on the correct compilation, then on the faulty one."""
    from paritas.cli.options import progress
    from paritas.results.progress import Progress

    with progress() as tell:
        done = 0

        def step(words: str) -> None:
            nonlocal done
            tell(Progress(getattr(words, "stage", words), min(done, STEPS - 1), STEPS))
            done += 1

        step("importing torch")
        import torch

        from paritas.checks import verify
        from paritas.checks.guard import guard
        from paritas.cli.demo_model import build, faulty_compiler
        from paritas.execution import subjects

        model, inputs = build(LAYERS)
        asked = subjects.VerifyConfig(raise_on_mismatch=False, lift=lift)
        right = verify.verify(inputs, model, torch.compile(model), asked, on_progress=step)
        step("looking for the planted fault")
        guarded = guard(faulty_compiler, on_mismatch="record")
        with torch.no_grad():
            torch.compile(model, backend=guarded)(*inputs)
        return right, guarded.verdict()


def _result(verdict: Verdict) -> Finding | None:
    """The first finding with metrics of the whole model's output."""
    found = (one for one in verdict.findings if one.metrics is not None and one.origin is None)
    return next(found, None)


def _correlation(finding: Finding | None) -> str:
    if finding is None or finding.metrics is None:
        return "1: equal bit for bit"
    return f"{finding.metrics.pcc:.6f}: {'accepted' if _is_accepted(finding) else 'rejected'}"


def _is_accepted(finding: Finding | None) -> bool:
    """Whether correlation accepts it."""
    return finding is None or finding.metrics is None or finding.metrics.pcc >= USUAL_PCC


def _noise(finding: Finding | None) -> str:
    score: Score | None = None if finding is None else finding.native or finding.lifted
    if score is None:
        return "nothing"
    return f"{score.max_z:.2g} ({score.max_limit:g} allowed)"
