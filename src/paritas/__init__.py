"""Does the candidate still compute what the reference computes?

The names below are the public API. Each is imported on first use: importing torch takes seconds,
and ``paritas --help`` does not need it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from paritas import results as _results

__all__ = [
    "AllCloseValueChecker",
    "AutomaticValueChecker",
    "Comparison",
    "Coverage",
    "EngineRecord",
    "EngineReport",
    "Finding",
    "FullValueChecker",
    "GraphReport",
    "Inputs",
    "InvariantsReport",
    "KernelJudge",
    "KernelOptions",
    "KernelReport",
    "MismatchError",
    "Origin",
    "ParitasError",
    "ParityWarning",
    "PowerReport",
    "Status",
    "SweepReport",
    "UsageError",
    "Verdict",
    "VerifyConfig",
    "capture",
    "check_engine",
    "compare",
    "guard",
    "guard_everywhere",
    "invariants",
    "judge",
    "judge_kernel",
    "power",
    "record",
    "relation",
    "sweep",
    "verify",
    "verify_graph",
    "verify_parallel",
]

_HOMES = {
    "AllCloseValueChecker": "paritas.numerics.checkers",
    "AutomaticValueChecker": "paritas.numerics.checkers",
    "Comparison": "paritas.results.comparisons",
    "Coverage": "paritas.results.findings",
    "EngineRecord": "paritas.engines.records",
    "EngineReport": "paritas.results.model_reports",
    "Finding": "paritas.results.findings",
    "FullValueChecker": "paritas.numerics.checkers",
    "GraphReport": "paritas.results.graph_reports",
    "Inputs": "paritas.execution.subjects",
    "InvariantsReport": "paritas.results.model_reports",
    "KernelJudge": "paritas.kernels.judge",
    "KernelOptions": "paritas.kernels",
    "KernelReport": "paritas.results.model_reports",
    "MismatchError": "paritas.errors",
    "Origin": "paritas.results.findings",
    "ParitasError": "paritas.errors",
    "ParityWarning": "paritas.errors",
    "PowerReport": "paritas.results.power_reports",
    "Status": "paritas.results.findings",
    "SweepReport": "paritas.results.sweeps",
    "UsageError": "paritas.errors",
    "Verdict": "paritas.results.findings",
    "VerifyConfig": "paritas.execution.subjects",
    "capture": "paritas.recording.capture",
    "check_engine": "paritas.engines.check",
    "compare": "paritas.comparison.compare",
    "guard": "paritas.checks.guard",
    "guard_everywhere": "paritas.checks.guard",
    "invariants": "paritas.relations.checking",
    "judge": "paritas.numerics.judge",
    "judge_kernel": "paritas.kernels.judge",
    "power": "paritas.mutants.power",
    "record": "paritas.recording.record",
    "relation": "paritas.relations.relation",
    "sweep": "paritas.sweeping.sweep",
    "verify": "paritas.checks.verify",
    "verify_graph": "paritas.graphs.verify",
    "verify_parallel": "paritas.parallel.verify",
}

if TYPE_CHECKING:
    from typing import Any

    from paritas.checks.guard import guard, guard_everywhere
    from paritas.checks.verify import verify
    from paritas.comparison.compare import compare
    from paritas.engines.check import check_engine
    from paritas.engines.records import EngineRecord
    from paritas.errors import MismatchError, ParitasError, ParityWarning, UsageError
    from paritas.execution.subjects import Inputs, VerifyConfig
    from paritas.graphs.verify import verify_graph
    from paritas.kernels import KernelOptions
    from paritas.kernels.judge import KernelJudge, judge_kernel
    from paritas.mutants.power import power
    from paritas.numerics.checkers import (
        AllCloseValueChecker,
        AutomaticValueChecker,
        FullValueChecker,
    )
    from paritas.numerics.judge import judge
    from paritas.parallel.verify import verify_parallel
    from paritas.recording.capture import capture
    from paritas.recording.record import record
    from paritas.relations.checking import invariants
    from paritas.relations.relation import relation
    from paritas.results.comparisons import Comparison
    from paritas.results.findings import Coverage, Finding, Origin, Status, Verdict
    from paritas.results.graph_reports import GraphReport
    from paritas.results.model_reports import EngineReport, InvariantsReport, KernelReport
    from paritas.results.power_reports import PowerReport
    from paritas.results.sweeps import SweepReport
    from paritas.sweeping.sweep import sweep

    __version__: str
else:
    # Hidden from type checkers, which would otherwise accept any misspelled name.
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
    import paritas.reports.notebook

    return paritas.reports.notebook.notebook_html(result)


def _shrink(verdict: Verdict, **options: Any) -> object:
    import paritas.shrinking.sources

    return paritas.shrinking.sources.shrink_verdict(verdict, **options)


# `results` may not import the upper layers that render and shrink, so they are registered here.
_results.show_by(_html_of)
_results.shrink_by(_shrink)

if os.environ.get("PARITAS_GUARD"):
    import paritas.checks.guard_settings

    paritas.checks.guard_settings.watch_by_environment()


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
