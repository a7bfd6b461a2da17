"""`paritas demo`: a right and a wrong compilation of a small transformer, told apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.numerics.findings import Finding, Score, Verdict

INTRODUCTION = (
    "A transformer of two layers, in float32, and torch.compile. No parameter requires grad, so "
    "only the forward pass is compiled, in float32 and in float64. The first run takes about a "
    "minute, nearly all of it spent in the C++ compiler."
)
FIRST = "1. Does torch.compile(model) still compute what the model computes?"
SECOND = (
    "2. The same model from a compiler with a planted fault: it moves the causal mask by one, so "
    "that every token sees the next one."
)
USUAL_PCC = 0.99
# Nothing compiled: the likeliest reason on a fresh machine.
ADVICE = "torch.compile needs a C++ compiler (g++ or clang++) and the headers of Python"


@click.command(short_help="See a right and a wrong compilation told apart.")
@click.pass_context
def demo(ctx: click.Context) -> None:
    """See a right and a wrong compilation of a small transformer told apart.

    Exit codes: 0 if the right one passes and the wrong one is caught, else 1.
    """
    from rich.console import Console

    from paritas.reporting.terminal import report

    console = Console(highlight=False)
    console.print(INTRODUCTION, end="\n\n")
    verdicts = []
    for title, planted in ((FIRST, False), (SECOND, True)):
        console.print(title, style="bold", end="\n\n")
        verdicts.append(_verify(planted=planted))
        console.print(report(verdicts[-1]), crop=False)
        console.print()
    console.print("What this shows", style="bold")
    for line in lessons(*verdicts):
        console.print(line, markup=False)
    ctx.exit(0 if is_as_expected(*verdicts) else 1)


def is_as_expected(right: Verdict, wrong: Verdict) -> bool:
    """Whether the right compilation passed, and the wrong one was caught for what it computes."""
    from paritas.numerics.findings import Status

    caught = wrong.status is Status.DIFFERENT and _compared(wrong) is not None
    return right.passed and caught


def lessons(right: Verdict, wrong: Verdict) -> Iterator[str]:
    """What the two verdicts say about correlation as a check, in a few lines."""
    if not is_as_expected(right, wrong):
        yield f"Nothing: the right one should pass, and the wrong one fail by its values. {ADVICE}."
        return
    mine, theirs = _compared(right), _compared(wrong)
    yield f"By correlation (PCC), where {USUAL_PCC} is the usual threshold:"
    yield f"  the right one has {_correlation(mine)}"
    yield f"  the wrong one has {_correlation(theirs)}"
    yield "By paritas, in multiples of the model's own rounding noise:"
    yield f"  the right one is off by {_noise(mine)}: {right.status}"
    yield f"  the wrong one is off by {_noise(theirs)}: {wrong.status}"


def _verify(*, planted: bool) -> Verdict:
    from paritas.cli.progress import progress

    with progress() as tell:
        tell("building the model")
        import torch

        from paritas.checking import config, verifying
        from paritas.cli.demo_model import build, faulty_inductor

        model, inputs = build()
        compiled = torch.compile(model, backend=faulty_inductor if planted else "inductor")
        asked = config.VerifyConfig(raise_on_mismatch=False)
        return verifying.verify(inputs, model, compiled, asked, on_progress=tell)


def _compared(verdict: Verdict) -> Finding | None:
    """The first finding about values that differ."""
    return next((finding for finding in verdict.findings if finding.metrics is not None), None)


def _correlation(finding: Finding | None) -> str:
    if finding is None or finding.metrics is None:
        return "1: it is equal bit for bit"
    pcc = finding.metrics.pcc
    return f"{pcc:.6f}: {'accepted' if pcc >= USUAL_PCC else 'refused'}"


def _noise(finding: Finding | None) -> str:
    score: Score | None = None if finding is None else finding.native or finding.lifted
    if score is None:
        return "nothing"
    return f"{score.max_z:.2g} at worst, where {score.max_limit:g} is allowed"
