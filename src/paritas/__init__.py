"""Does the candidate still compute what the reference computes?

The names below are the public API. Each is imported on first use: importing torch takes seconds,
and ``paritas --help`` does not need it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from paritas.core.importing import import_on_use as _import_on_use

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
    "AllCloseValueChecker": "paritas.core.numerics.checkers",
    "AutomaticValueChecker": "paritas.core.numerics.checkers",
    "Comparison": "paritas.comparison.rows",
    "Coverage": "paritas.core.results.findings",
    "EngineRecord": "paritas.engines.records",
    "EngineReport": "paritas.engines.rows",
    "Finding": "paritas.core.results.findings",
    "FullValueChecker": "paritas.core.numerics.checkers",
    "GraphReport": "paritas.sharding.graphs.rows",
    "Inputs": "paritas.core.execution.subjects",
    "InvariantsReport": "paritas.relations.rows",
    "KernelJudge": "paritas.kernels.judge",
    "KernelOptions": "paritas.kernels",
    "KernelReport": "paritas.kernels.rows",
    "MismatchError": "paritas.core.errors",
    "Origin": "paritas.core.results.findings",
    "ParitasError": "paritas.core.errors",
    "ParityWarning": "paritas.core.errors",
    "PowerReport": "paritas.mutants.rows",
    "Status": "paritas.core.results.findings",
    "SweepReport": "paritas.sweeping.rows",
    "UsageError": "paritas.core.errors",
    "Verdict": "paritas.core.results.findings",
    "VerifyConfig": "paritas.core.execution.subjects",
    "capture": "paritas.recording.capture",
    "check_engine": "paritas.engines.check",
    "compare": "paritas.comparison.compare",
    "guard": "paritas.core.compiled.guard",
    "guard_everywhere": "paritas.core.compiled.guard",
    "invariants": "paritas.relations.checking",
    "judge": "paritas.core.judging.judge",
    "judge_kernel": "paritas.kernels.judge",
    "power": "paritas.mutants.power",
    "record": "paritas.recording.record",
    "relation": "paritas.relations.relation",
    "sweep": "paritas.sweeping.sweep",
    "verify": "paritas.verification.verify",
    "verify_graph": "paritas.sharding.graphs.verify",
    "verify_parallel": "paritas.sharding.plans.verify",
}

if TYPE_CHECKING:
    from paritas.comparison.compare import compare
    from paritas.comparison.rows import Comparison
    from paritas.core.compiled.guard import guard, guard_everywhere
    from paritas.core.errors import MismatchError, ParitasError, ParityWarning, UsageError
    from paritas.core.execution.subjects import Inputs, VerifyConfig
    from paritas.core.judging.judge import judge
    from paritas.core.numerics.checkers import (
        AllCloseValueChecker,
        AutomaticValueChecker,
        FullValueChecker,
    )
    from paritas.core.results.findings import Coverage, Finding, Origin, Status, Verdict
    from paritas.engines.check import check_engine
    from paritas.engines.records import EngineRecord
    from paritas.engines.rows import EngineReport
    from paritas.kernels import KernelOptions
    from paritas.kernels.judge import KernelJudge, judge_kernel
    from paritas.kernels.rows import KernelReport
    from paritas.mutants.power import power
    from paritas.mutants.rows import PowerReport
    from paritas.recording.capture import capture
    from paritas.recording.record import record
    from paritas.relations.checking import invariants
    from paritas.relations.relation import relation
    from paritas.relations.rows import InvariantsReport
    from paritas.sharding.graphs.rows import GraphReport
    from paritas.sharding.graphs.verify import verify_graph
    from paritas.sharding.plans.verify import verify_parallel
    from paritas.sweeping.rows import SweepReport
    from paritas.sweeping.sweep import sweep
    from paritas.verification.verify import verify

    __version__: str
else:
    # Hidden from type checkers, which would otherwise accept any misspelled name.
    _find_name = _import_on_use(globals(), _HOMES)

    def __getattr__(name: str) -> object:
        if name != "__version__":
            return _find_name(name)
        import importlib.metadata

        return importlib.metadata.version("paritas")


if os.environ.get("PARITAS_GUARD"):
    import paritas.core.compiled.guard_settings

    paritas.core.compiled.guard_settings.watch_by_environment()


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
