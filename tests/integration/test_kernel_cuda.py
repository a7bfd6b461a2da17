"""`paritas kernel` with Triton kernels on a CUDA device; skipped where there is none.

With PARITAS_TRITON_ON_CPU=1 and Triton's interpreter (TRITON_INTERPRET=1), all but the kernels
that need streams run on the CPU.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path

import pytest
import torch

import quality
from paritas.core.results.findings import Status
from paritas.kernels import KernelOptions
from paritas.kernels.judge import KernelJudge
from paritas.kernels.rows import CaseFamily, KernelReport

INTERPRETED = os.environ.get("PARITAS_TRITON_ON_CPU") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]
KERNELS = Path(quality.__path__[0]) / "kernel_triton.py"
WITH_STREAMS = Path(quality.__path__[0]) / "kernel_cuda.py"
needs_streams = pytest.mark.skipif(INTERPRETED, reason="needs streams")
RIGHT = [
    ("softmax", "softmax_right"),
    ("matmul", "matmul_right"),
    ("Norm", "NormRight"),
    ("scaled", "scaled_right"),
    pytest.param("scaled", "scaled_on_a_stream", marks=needs_streams),
]
WRONG = [
    ("softmax", "softmax_filled_with_zeros"),
    ("softmax", "softmax_of_one_block"),
    ("softmax", "softmax_unshifted"),
    ("softmax", "softmax_of_contiguous"),
    pytest.param("matmul", "matmul_in_tf32", marks=needs_streams),
    ("matmul", "matmul_past_the_end"),
    ("matmul", "matmul_with_narrow_sums"),
    ("Norm", "NormUncentred"),
    ("Norm", "NormOfFirstWeights"),
    pytest.param("scaled", "scaled_without_waiting_for_the_inputs", marks=needs_streams),
    pytest.param("scaled", "scaled_without_waiting_for_the_result", marks=needs_streams),
    pytest.param("scaled", "scaled_on_the_default_stream", marks=needs_streams),
    ("scaled", "scaled_in_part"),
    ("scaled", "scaled_by_address"),
]
RIGHT_WITH_STREAMS = [
    ("scaled", "on_streams_in_turn"),
    ("scaled", "by_the_host"),
    ("scaled", "by_a_thread"),
    ("scaled", "by_a_graph"),
    ("scaled", "tuned"),
    ("scaled", "compiled_inside"),
    ("scaled", "registered"),
    ("scaled", "with_a_table"),
    ("scaled", "with_a_workspace"),
    ("row_sum", "row_sum_right"),
    ("row_sum", "row_sum_in_parts"),
]
WRONG_WITH_STREAMS = [
    ("scaled", "wrong_on_other_streams"),
    ("scaled", "keeps_its_stream"),
    pytest.param(
        "scaled",
        "waits_for_one_stream_of_two",
        marks=pytest.mark.xfail(strict=False, reason="both streams end at the same time"),
    ),
    ("scaled", "by_the_host_too_early"),
    ("scaled", "by_a_thread_that_goes_on"),
    ("scaled", "by_a_graph_of_the_first_inputs"),
    ("scaled", "in_the_memory_of_a_graph"),
    ("scaled", "without_synchronisation"),
    ("scaled", "with_another_clock"),
    ("scaled", "tuned_on_its_result"),
    ("row_sum", "row_sum_without_barriers"),
    ("row_sum", "row_sum_in_parts_of_old_memory"),
    ("matmul", "matmul_allows_tf32"),
    ("matmul", "matmul_in_float16"),
]


@functools.cache
def judge_of(reference: str, kernels: Path = KERNELS) -> KernelJudge:
    options = KernelOptions(
        device=DEVICE,
        call_seconds=600,
        seconds=600,
        fresh_outputs=True,
        # The interpreter does not compute in bfloat16.
        families=frozenset(CaseFamily) - {CaseFamily.DTYPES} if INTERPRETED else None,
        # Importing Triton takes as long as judging a small kernel.
        preload=("triton", "triton.language"),
    )
    inputs = f"{kernels}:{reference.lower()}_inputs"
    return KernelJudge(f"{kernels}:{reference}", options, inputs=inputs)


def judged(reference: str, kernel: str, kernels: Path = KERNELS) -> KernelReport:
    return judge_of(reference, kernels).judge(f"{kernels}:{kernel}")


def reasons(report: KernelReport) -> str:
    return "\n".join(
        f"{row.case}: {finding.path}: {finding.reason}"
        for row in report.rows
        for finding in row.verdict.findings
        if not finding.status.passes()
    )


@pytest.mark.parametrize(("reference", "kernel"), RIGHT)
def test_a_right_kernel_passes(reference: str, kernel: str) -> None:
    report = judged(reference, kernel)
    assert report.passed, reasons(report)
    assert any("the candidate runs code outside torch (triton)" in one for one in notes(report))


def notes(report: KernelReport) -> list[str]:
    return [note for row in report.rows for note in row.verdict.notes]


@pytest.mark.parametrize(("reference", "kernel"), WRONG)
def test_a_wrong_kernel_is_caught(reference: str, kernel: str) -> None:
    report = judged(reference, kernel)
    assert report.status in {Status.DIFFERENT, Status.DEGRADED}, report


@needs_streams
@pytest.mark.parametrize(("reference", "kernel"), RIGHT_WITH_STREAMS)
def test_a_right_kernel_with_streams_graphs_or_threads_passes(reference: str, kernel: str) -> None:
    report = judged(reference, kernel, WITH_STREAMS)
    assert report.passed, reasons(report)
    assert [row for row in report.rows if row.case == "as given, on another stream"]


@needs_streams
@pytest.mark.parametrize(("reference", "kernel"), WRONG_WITH_STREAMS)
def test_a_wrong_kernel_with_streams_graphs_or_threads_is_caught(
    reference: str, kernel: str
) -> None:
    report = judged(reference, kernel, WITH_STREAMS)
    assert report.status in {Status.DIFFERENT, Status.DEGRADED}, report


@needs_streams
def test_a_result_that_is_still_computed_changes_after_the_call() -> None:
    report = judged("scaled", "scaled_without_waiting_for_the_result")
    assert "changes after the call has returned" in reasons(report)


def test_a_kernel_is_timed_on_the_device() -> None:
    options = KernelOptions(device=DEVICE, cases=4, timing="warm", call_seconds=600)
    inputs = f"{KERNELS}:softmax_inputs"
    with KernelJudge(f"{KERNELS}:softmax", options, inputs=inputs) as judge:
        report = judge.judge(f"{KERNELS}:softmax_right")
    assert report.timing is not None, report.notes
    assert report.timing.candidate > 0


def test_a_failing_kernel_has_a_script_for_its_device(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    options = KernelOptions(device=DEVICE, cases=12, script=script, call_seconds=600)
    inputs = f"{KERNELS}:softmax_inputs"
    with KernelJudge(f"{KERNELS}:softmax", options, inputs=inputs) as judge:
        report = judge.judge(f"{KERNELS}:softmax_filled_with_zeros")
    assert report.script == str(script), report.notes
    assert not [one for one in report.notes if "does not show it" in one], report.notes
