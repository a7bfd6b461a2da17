"""Verdicts in TensorBoard and MLflow, beside the losses of the run that they are about.

Both take the names `paritas/passed`, `paritas/share/<status>`, `paritas/worst/native` and
`paritas/worst/lifted`; the last two are the largest error over what was allowed, so that 1 is the
limit of both. The words of the verdict go along as text, and all of it as JSON.
"""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any, Protocol

from paritas.errors import UsageError
from paritas.results.findings import Status

if TYPE_CHECKING:
    from paritas.results.findings import Score, Verdict

__all__ = ["SummaryWriter", "log_to_mlflow", "log_to_tensorboard", "scalars"]


class SummaryWriter(Protocol):
    """What is needed of `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        """Write one number."""

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        """Write words, in Markdown."""


def scalars(verdict: Verdict, prefix: str = "paritas") -> dict[str, float]:
    """The numbers of a verdict, by name.

    A figure that is NaN stays NaN; one that no finding has is left out.
    """
    found = {
        f"{prefix}/passed": float(verdict.passed),
        f"{prefix}/compared": float(verdict.coverage.compared),
    }
    total = len(verdict.findings)
    for status in Status if total else ():
        share = sum(finding.status is status for finding in verdict.findings) / total
        found[f"{prefix}/share/{status}"] = share
    worst = {
        "native": _worst([finding.native for finding in verdict.findings]),
        "lifted": _worst([finding.lifted for finding in verdict.findings]),
    }
    return found | {f"{prefix}/worst/{name}": z for name, z in worst.items() if z is not None}


def log_to_tensorboard(
    verdict: Verdict, writer: SummaryWriter, step: int | None = None, *, prefix: str = "paritas"
) -> None:
    """Write a verdict's numbers and words.

    Args:
        verdict: of any command or function.
        writer: a `torch.utils.tensorboard.SummaryWriter`, or what else has its two methods.
        step: of the run.
        prefix: before every name.
    """
    for name, value in scalars(verdict, prefix).items():
        writer.add_scalar(name, value, step)
    # Indented by four, Markdown leaves the lines as they are.
    words = "\n".join(f"    {line}" for line in str(verdict).splitlines())
    writer.add_text(f"{prefix}/verdict", words, step)


def log_to_mlflow(verdict: Verdict, step: int | None = None, *, prefix: str = "paritas") -> None:
    """Write a verdict to the MLflow run that is going on: metrics, tag, text and JSON.

    Raises:
        UsageError: MLflow is not installed.
    """
    try:
        mlflow: Any = importlib.import_module("mlflow")
    except ImportError as error:
        raise UsageError(
            f"log_to_mlflow needs mlflow, which cannot be imported ({error}): "
            "pip install 'paritas[tracking]'"
        ) from error
    place = prefix if step is None else f"{prefix}/step_{step}"
    mlflow.log_metrics(scalars(verdict, prefix), step=step)
    mlflow.set_tag(f"{prefix}.status", str(verdict.status))
    mlflow.log_text(str(verdict), f"{place}/verdict.txt")
    mlflow.log_text(verdict.to_json().decode(), f"{place}/verdict.json")


def _worst(scores: list[Score | None]) -> float | None:
    """The largest error over its limit: NaN is worse than any number."""
    found = [score.excess for score in scores if score is not None]
    if not found:
        return None
    return math.nan if any(map(math.isnan, found)) else max(found)
