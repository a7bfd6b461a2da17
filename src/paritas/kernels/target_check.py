"""How a sweep judges a kernel: the target is its reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paritas.core.candidates.target_check import TargetCheck
from paritas.kernels import PROMISES, KernelOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.candidates.loading import CandidateOptions
    from paritas.core.results.findings import Verdict


def judge_target(
    target: str,
    options: CandidateOptions,
    on_progress: Callable[[str], None],
    *,
    fixed: tuple[str, ...] = (),
    **settings: Any,
) -> Verdict:
    """Judge a kernel; its processes are forked from this one, before the reference is loaded.

    Args:
        target: the reference.
        options: its candidate is the kernel.
        on_progress: called before each step.
        fixed: what the task promises.
        settings: further fields of `KernelOptions`.
    """
    from paritas.kernels.judge import judge_kernel
    from paritas.kernels.servers import fork_server

    device = options.device or "cpu"
    if device == "cpu":
        fork_server()
    kernel_options = KernelOptions(device=device, fixed=frozenset(fixed), **settings)
    report = judge_kernel(
        target,
        options.candidate_name,
        kernel_options,
        inputs=options.inputs,
        on_progress=on_progress,
    )
    return report.verdict


CHECK = TargetCheck(
    judge_target,
    modules=("paritas.kernels.judge", "paritas.kernels.observing", "paritas.kernels.calling"),
    promises=tuple(PROMISES),
)
