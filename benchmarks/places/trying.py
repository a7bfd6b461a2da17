"""One fault: planted, verified or guarded or shrunk, and what was said compared with the truth."""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.places import (  # noqa: F401  (each adds its sources)
    kernels,
    texts,
    triton_kernels,
    uncompiled,
)
from benchmarks.places.models import HALVES
from benchmarks.places.planting import SOURCES, Planted, Subject, Truth, backpropagate

import paritas
from paritas.core.errors import UsageError
from paritas.core.execution.compilation import Candidate
from paritas.core.reporting.scripts import SHOWN
from paritas.core.results.findings import Finding, OriginKind, Status
from paritas.core.shrinking import NothingFailsError
from paritas.core.time_limit import TimeLimit
from paritas.shrinking.shrink import shrink
from paritas.shrinking.sources import capture_programs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas.core.results.findings import Origin, Verdict
    from paritas.core.shrinking import ShrinkReport

# Of a share of a tensor's largest value: what is smaller may be rounding.
ROUNDING = 1e-5
# After its limit, `shrink` writes and runs the script.
GRACE = 3.0


def try_unit(
    subject: Subject,
    what: str,
    source: str,
    number: int,
    seconds: float,
    begin: Callable[[str], None] = lambda _: None,
) -> dict:
    """The row of one fault; the faults of a source that may be planted are numbered.

    Args:
        begin: called with the name of the fault before it is tried.
    """
    found = (one for one in SOURCES[source](subject) if subject.take(one.fault))
    planted = next(itertools.islice(found, number, None), None)
    if planted is None:
        return {"outcome": "no fault fits"}
    row = {
        "fault": planted.fault, "planted": planted.source, "truth": planted.truth.__dict__,
        "kinds": planted.kinds, "loose": planted.loose,
    }  # fmt: skip
    begin(planted.fault)
    torch.compiler.reset()
    with planted.active():
        try:
            row |= _TRIES[what](subject, planted, seconds)
        except Exception as error:  # noqa: BLE001  (the candidate's, or one of paritas)
            row |= {"outcome": "error", "reason": f"{type(error).__name__}: {error!s:.300}",
                    "trace": traceback.format_exc()[-1500:]}  # fmt: skip
        if row["outcome"] in {"passes", "error"} or row.pop("raised", False):
            try:
                row["size"] = measure_size(subject, planted)
            except Exception as error:  # noqa: BLE001  (such a fault needs no verifier)
                return row | {"outcome": "raises", "reason": f"{error!s:.300}"}
        if row["outcome"] == "passes":
            row["outcome"] = "missed" if row["size"] > ROUNDING else "changes nothing"
    return row


def measure_size(subject: Subject, planted: Planted) -> float:
    """The largest relative difference that the fault makes, measured without paritas.

    A gradient far smaller than the others may be zero but for rounding, as of a bias of keys.
    """
    torch.compiler.reset()
    rights = backpropagate(subject.model, subject)
    wrongs = backpropagate(planted.candidate(), subject)
    outputs = [_relative(*pair, 0.0) for pair in zip(rights[0], wrongs[0], strict=True)]
    largest = max((_largest(one) for one in rights[1]), default=0.0)
    pairs = zip(rights[1], wrongs[1], strict=False)
    return max([0.0, *outputs, *(_relative(*pair, 1e-3 * largest) for pair in pairs)])


def _largest(value: torch.Tensor) -> float:
    return float(value.double().abs().nan_to_num(0, 0, 0).max()) if value.numel() else 0.0


def _relative(right: torch.Tensor, wrong: torch.Tensor, least: float) -> float:
    """The largest difference, of the largest value or of `least`."""
    if right.shape != wrong.shape or not torch.equal(right.isfinite(), wrong.isfinite()):
        return float("inf")
    return _largest(right.double() - wrong.double()) / max(_largest(right), least, 1e-30)


# --- verify and guard -----------------------------------------------------------------------------


@contextlib.contextmanager
def timing_the_search() -> Iterator[list[float]]:
    """The seconds that looking for the place took, one number for each search."""
    import paritas.core.compiled.locate as guards
    import paritas.core.locating.places as verifies

    took: list[float] = []
    kept = []

    def timed(function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                took.append(time.monotonic() - began)

        return run

    for home, name in ((guards, "locate"), (guards, "locate_captured"),
                       (verifies, "locate_failure")):  # fmt: skip
        if (function := getattr(home, name, None)) is not None:
            kept.append((home, name, function))
            setattr(home, name, timed(function))
    try:
        yield took
    finally:
        for home, name, function in kept:
            setattr(home, name, function)


def try_verify(subject: Subject, planted: Planted, seconds: float) -> dict:
    """`verify` with its defaults."""
    del seconds
    config = paritas.VerifyConfig(raise_on_mismatch=False)
    candidate = planted.candidate()
    began = time.monotonic()
    with timing_the_search() as took:
        verdict = paritas.verify(subject.inputs, subject.model, candidate, config)
    spent = time.monotonic() - began
    return read_verdict(verdict, planted) | {"seconds": spent, "search": took}


def try_guard(subject: Subject, planted: Planted, seconds: float) -> dict:
    """`guard` around the backend, forward and backward."""
    del seconds
    guard = paritas.guard(planted.backend, on_mismatch="record")
    compiled = torch.compile(subject.model, backend=guard)
    began = time.monotonic()
    with timing_the_search() as took:
        backpropagate(compiled, subject)
    spent = time.monotonic() - began
    return read_verdict(guard.verdict(), planted, by_node=True) | {
        "seconds": spent, "search": took,
    }  # fmt: skip


def read_verdict(verdict: Verdict, planted: Planted, *, by_node: bool = False) -> dict:
    """What a verdict says about the place and the kind."""
    failures = [one for one in verdict.failures if one.status is not Status.UNVERIFIED]
    raised = any(one.raised for one in failures)
    if not failures:
        said = [one.reason[:200] for one in verdict.failures][:2]
        return {"outcome": "passes", "status": str(verdict.status), "said": said}
    order = {id(finding): place for place, finding in enumerate(verdict.findings)}
    failures.sort(key=lambda finding: order[id(finding)])
    named = [one for one in failures if one.origin is not None]
    places = [place_of(one.origin, planted.truth, by_node=by_node) for one in named]
    row: dict[str, Any] = {
        "outcome": places[0] if places else "none",
        "status": str(verdict.status),
    }
    row["places"] = [
        {"path": one.path, "place": place, **_told(one.origin), "kind": kind_of(one),
         "confidence": _confidence(one), "reason": one.reason[:200],
         "sentence": "" if one.diagnosis is None else one.diagnosis.sentence[:200]}
        for one, place in zip(named, places, strict=True)
    ]  # fmt: skip
    row["kind"] = kind_of(named[0]) if named else ""
    row["at outputs"] = [
        {"path": one.path, "kind": kind_of(one), "confidence": _confidence(one)}
        for one in failures
        if one.origin is None and kind_of(one)
    ]
    row["failures"], row["raised"] = len(failures), raised
    row["caused"] = sum(bool(one.cause) for one in failures)
    row["notes"] = [note[:200] for note in verdict.notes][:4]
    return row


def kind_of(finding: Finding) -> str:
    """The kind that is stated; empty if none is."""
    best = None if finding.diagnosis is None else finding.diagnosis.best
    return "" if best is None else str(best.kind)


def _confidence(finding: Finding) -> float:
    best = None if finding.diagnosis is None else finding.diagnosis.best
    return 0.0 if best is None else best.confidence


def _told(origin: Origin) -> dict[str, str]:
    names = ("kind", "name", "operator", "module", "source")
    return {f"origin {name}": str(getattr(origin, name)) for name in names}


# Only a candidate with a fault runs code of these files, and only where the fault is.
_CODE_OF_FAULTS = {"calls.py", "changes.py", "parts.py", "kernels_of_a_stranger.py"} | {
    path.name for half in HALVES for path in Path(__file__).parent.glob(f"{half}/*.py")
}


def place_of(origin: Origin, truth: Truth, *, by_node: bool) -> str:
    """`exact`, `near` if it contains the place, `other`, or `none` if it names the whole graph."""
    if origin.kind is OriginKind.GRAPH:
        return "none"
    names = {origin.name, *origin.nodes}
    is_part = bool(names & set(truth.nodes))
    if origin.kind is OriginKind.NODE and origin.name in truth.nodes:
        return "exact"
    if origin.kind is OriginKind.FUSION and is_part:
        return "exact" if set(origin.nodes) <= set(truth.nodes) else "near"
    if by_node:
        return "other"
    same_line = _line(origin.source) in {_line(source) for source in truth.sources if source}
    same_line |= _line(origin.source).partition(":")[0] in _CODE_OF_FAULTS
    module = origin.module or (origin.name if origin.kind is OriginKind.MODULE else "")
    same_operator = not origin.operator or not truth.operators or any(
        one in origin.operator for one in truth.operators
    )  # fmt: skip
    if same_line or (module and module in truth.modules and same_operator):
        return "exact"
    if module and any(path.startswith(f"{module}.") for path in truth.modules):
        return "near"
    return "other"


def _line(source: str) -> str:
    """`file.py:12` of `/path/file.py:12, in forward`."""
    found = re.search(r"([^/\\]+\.py):(\d+)", source)
    return f"{found[1]}:{found[2]}" if found else source or "-"


# --- shrink ---------------------------------------------------------------------------------------


def try_shrink(subject: Subject, planted: Planted, seconds: float) -> dict:
    """`Verdict.shrink` within a limit, after `verify`."""
    config = paritas.VerifyConfig(raise_on_mismatch=False)
    verdict = paritas.verify(subject.inputs, subject.model, planted.candidate(), config)
    if verdict.passed:
        return {"outcome": "passes", "status": str(verdict.status)}
    return _shrink_by(lambda folder: verdict.shrink(seconds=seconds, outdir=folder), seconds)


def try_search(subject: Subject, planted: Planted, seconds: float) -> dict:
    """`paritas shrink` without `--at`: it is not known where the fault is."""
    backend = planted.backend
    if backend is None:
        return {"outcome": "no fault fits"}
    name = backend if isinstance(backend, str) else f"{backend.__module__}:{backend.__name__}"
    candidate = Candidate(name)

    def run(folder: str) -> ShrinkReport:
        limit = TimeLimit(seconds)
        programs = capture_programs(subject.model, [subject.inputs], candidate)
        return shrink(programs, candidate, limit=limit, outdir=folder).report

    return _shrink_by(run, seconds)


def _shrink_by(run: Callable[[str], ShrinkReport], seconds: float) -> dict:
    """What became of a fault; the script is run once more, by itself."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        try:
            report = run(folder)
        except NothingFailsError:
            return {"outcome": "passes", "status": ""}
        except UsageError as error:
            took = time.monotonic() - began
            return {"outcome": "no script", "seconds": took, "reason": str(error)[:300]}
        took = time.monotonic() - began
        text = Path(report.script).read_text() if Path(report.script).exists() else ""
        done = subprocess.run(
            [sys.executable, report.script], capture_output=True, text=True, timeout=120,
            cwd=folder, check=False,
        )  # fmt: skip
    count = re.search(r"(\d+) (?:operator|call|node)", report.after)
    left = int(count[1]) if count else 1 if "operator" in report.after else None
    return {
        "outcome": "shrunk", "before": report.before, "after": report.after, "left": left,
        "seconds": took, "limit": seconds, "kept": took <= seconds + GRACE, "ended": report.ended,
        "written": bool(text), "shows": report.shows, "code": done.returncode,
        "fails": done.returncode == 1 and SHOWN in done.stdout.splitlines(),
        "said": (done.stdout + done.stderr)[-300:], "kind": _best(report.diagnosis),
        "queries": report.queries,
    }  # fmt: skip


def _best(diagnosis: Any) -> str:
    best = None if diagnosis is None else diagnosis.best
    return "" if best is None else str(best.kind)


def try_plant(subject: Subject, planted: Planted, seconds: float) -> dict:
    """Without paritas: what the fault changes."""
    del seconds
    size = measure_size(subject, planted)
    return {"outcome": "planted" if size > ROUNDING else "changes nothing", "size": size}


_TRIES = {
    "plant": try_plant, "verify": try_verify, "guard": try_guard, "shrink": try_shrink,
    "search": try_search,
}  # fmt: skip
