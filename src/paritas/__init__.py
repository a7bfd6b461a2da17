"""Does the candidate still compute what the reference computes?

The names below are the public surface. Each is fetched from its home on first use, because torch
takes seconds to import and ``paritas --help`` should not.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from paritas import notebooks

__all__ = [
    "AllCloseValueChecker",
    "AutomaticValueChecker",
    "Comparison",
    "Coverage",
    "Finding",
    "FullValueChecker",
    "GraphReport",
    "Inputs",
    "MismatchError",
    "Origin",
    "ParitasError",
    "ParityWarning",
    "PowerReport",
    "Status",
    "UsageError",
    "Verdict",
    "VerifyConfig",
    "capture",
    "compare",
    "guard",
    "guard_everywhere",
    "judge",
    "power",
    "record",
    "verify",
    "verify_graph",
    "verify_parallel",
]

_HOMES = {
    "AllCloseValueChecker": "paritas.numerics.checkers",
    "AutomaticValueChecker": "paritas.numerics.checkers",
    "Comparison": "paritas.numerics.comparisons",
    "Coverage": "paritas.numerics.findings",
    "Finding": "paritas.numerics.findings",
    "FullValueChecker": "paritas.numerics.checkers",
    "GraphReport": "paritas.numerics.graph_reports",
    "Inputs": "paritas.checking.config",
    "MismatchError": "paritas.errors",
    "Origin": "paritas.numerics.findings",
    "ParitasError": "paritas.errors",
    "ParityWarning": "paritas.errors",
    "PowerReport": "paritas.numerics.power_reports",
    "Status": "paritas.numerics.findings",
    "UsageError": "paritas.errors",
    "Verdict": "paritas.numerics.findings",
    "VerifyConfig": "paritas.checking.config",
    "capture": "paritas.recording.eager",
    "compare": "paritas.comparison.comparing",
    "guard": "paritas.checking.guarding.backend",
    "guard_everywhere": "paritas.checking.guarding.everywhere",
    "judge": "paritas.numerics.pairing",
    "power": "paritas.mutants.power",
    "record": "paritas.recording.backend",
    "verify": "paritas.checking.verifying",
    "verify_graph": "paritas.graphs.verifying",
    "verify_parallel": "paritas.partition.plans.verifying",
}

if TYPE_CHECKING:
    from paritas.checking.config import Inputs, VerifyConfig
    from paritas.checking.guarding.backend import guard
    from paritas.checking.guarding.everywhere import guard_everywhere
    from paritas.checking.verifying import verify
    from paritas.comparison.comparing import compare
    from paritas.errors import MismatchError, ParitasError, ParityWarning, UsageError
    from paritas.graphs.verifying import verify_graph
    from paritas.mutants.power import power
    from paritas.numerics.checkers import (
        AllCloseValueChecker,
        AutomaticValueChecker,
        FullValueChecker,
    )
    from paritas.numerics.comparisons import Comparison
    from paritas.numerics.findings import Coverage, Finding, Origin, Status, Verdict
    from paritas.numerics.graph_reports import GraphReport
    from paritas.numerics.pairing import judge
    from paritas.numerics.power_reports import PowerReport
    from paritas.partition.plans.verifying import verify_parallel
    from paritas.recording.backend import record
    from paritas.recording.eager import capture

    __version__: str
else:
    # Out of a type checker's sight, or it would take any misspelt name for an attribute.
    def __getattr__(name: str) -> object:
        import importlib
        import importlib.metadata

        if name == "__version__":
            value = importlib.metadata.version("paritas")
        elif name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def _html_of(result: object) -> str:
    import paritas.reporting.html.notebook

    return paritas.reporting.html.notebook.notebook_html(result)


# Results lie below what makes HTML of them; this package is above both.
notebooks.show_by(_html_of)


def _guard_as_the_environment_says() -> None:
    if os.environ.get("PARITAS_GUARD"):
        import paritas.checking.guarding.watching

        paritas.checking.guarding.watching.watch_by_environment()


_guard_as_the_environment_says()


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
