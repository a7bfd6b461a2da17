"""Log verdicts to TensorBoard and MLflow, next to the losses of the run.

Both use the names `paritas/passed`, `paritas/share/<status>`, `paritas/worst/native` and
`paritas/worst/lifted`. The last two are the largest ratio of error to limit, so both fail above 1.
The verdict is also logged as text, and to MLflow as JSON.
"""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any, Protocol

from paritas.core.errors import UsageError
from paritas.core.results.findings import Status

if TYPE_CHECKING:
    from paritas.core.results.findings import Score, Verdict

__all__ = ["SummaryWriter", "log_to_mlflow", "log_to_tensorboard", "scalars"]


class SummaryWriter(Protocol):
    """The methods of `torch.utils.tensorboard.SummaryWriter` that are used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        """Write one number."""

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        """Write Markdown text."""


def scalars(verdict: Verdict, prefix: str = "paritas") -> dict[str, float]:
    """The numbers of a verdict, by name.

    NaN stays NaN; a number that no finding has is omitted.
    """
    metrics = {
        f"{prefix}/passed": float(verdict.passed),
        f"{prefix}/compared": float(verdict.coverage.compared),
    }
    total = len(verdict.findings)
    for status in Status if total else ():
        share = sum(finding.status is status for finding in verdict.findings) / total
        metrics[f"{prefix}/share/{status}"] = share
    worst = {
        "native": _worst([finding.native for finding in verdict.findings]),
        "lifted": _worst([finding.lifted for finding in verdict.findings]),
    }
    return metrics | {f"{prefix}/worst/{name}": z for name, z in worst.items() if z is not None}


def log_to_tensorboard(
    verdict: Verdict, writer: SummaryWriter, step: int | None = None, *, prefix: str = "paritas"
) -> None:
    """Log the numbers and the text of a verdict.

    Args:
        verdict: from any command or function.
        writer: a `torch.utils.tensorboard.SummaryWriter`, or any object with its two methods.
        step: the step of the run.
        prefix: the prefix of every name.
    """
    for name, value in scalars(verdict, prefix).items():
        writer.add_scalar(name, value, step)
    # Markdown keeps lines that are indented by four spaces.
    words = "\n".join(f"    {line}" for line in str(verdict).splitlines())
    writer.add_text(f"{prefix}/verdict", words, step)


def log_to_mlflow(verdict: Verdict, step: int | None = None, *, prefix: str = "paritas") -> None:
    """Log a verdict to the active MLflow run: metrics, tag, text and JSON.

    Raises:
        UsageError: MLflow is not installed.
    """
    try:
        mlflow: Any = importlib.import_module("mlflow")
    except ImportError as error:
        raise UsageError(
            f"log_to_mlflow cannot import mlflow ({error}): pip install 'paritas[tracking]'"
        ) from error
    artifact_folder = prefix if step is None else f"{prefix}/step_{step}"
    mlflow.log_metrics(scalars(verdict, prefix), step=step)
    mlflow.set_tag(f"{prefix}.status", str(verdict.status))
    mlflow.log_text(str(verdict), f"{artifact_folder}/verdict.txt")
    mlflow.log_text(verdict.to_json().decode(), f"{artifact_folder}/verdict.json")


def _worst(scores: list[Score | None]) -> float | None:
    """The largest ratio of error to limit; NaN is worse than any number."""
    excesses = [score.excess for score in scores if score is not None]
    if not excesses:
        return None
    return math.nan if any(map(math.isnan, excesses)) else max(excesses)
