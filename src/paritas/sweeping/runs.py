"""One run, in its own process: build a target, make a candidate from it, and compare the two.

Importing torch with its compilers takes six seconds. So a server imports them once, and forks a
process for each run on the CPU, if the server has one thread and there is no accelerator.
Otherwise each run has a new interpreter. Nothing here imports torch at the top: only the server
and the runs do.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paritas.core import transformers_library
from paritas.core.candidates.loading import NAMED, CandidateOptions
from paritas.core.errors import ParitasError, UsageError, in_one_line
from paritas.core.results.findings import Verdict
from paritas.core.workers.inside import CannotForkError
from paritas.sweeping.places import RunPlace
from paritas.sweeping.plan import INDUCTOR_MODES, INVARIANTS, RunTask, is_own_function
from paritas.sweeping.rows import RunEnd, trimmed, without_verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paritas.core.workers.channel import Channel
    from paritas.sweeping.rows import KernelSettings, SweepRun

LONGEST_REASON = 600
# Compilers make millions of objects, of which few are garbage, and a run ends soon. Looking for
# garbage as often as Python does takes a second of each run.
_COLLECT_RARELY = (20_000, 20, 20)


class RunMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message from a run: the step that begins, or the result."""

    stage: str = ""
    ended: RunEnd | None = None
    verdict: Verdict | None = None
    counts: dict[str, int] = {}
    versions: dict[str, str] = {}


def prepare_runs(settings: bytes, *, forks: bool) -> Callable[[Channel], None]:
    """Import what runs need; returns what the process of one does.

    Raises:
        CannotForkError: runs must not be forked here.
    """
    run_place = msgspec.json.decode(settings, type=RunPlace)
    if forks:
        _import_for_all(run_place)
    else:
        os.environ["OMP_NUM_THREADS"] = str(run_place.threads)

    def work(channel: Channel) -> None:
        task = channel.receive(RunTask)
        message = _verify(run_place, task, lambda stage: channel.send(RunMessage(stage=str(stage))))
        channel.send(message)

    return work


def _import_for_all(run_place: RunPlace) -> None:
    if sys.platform != "linux":
        raise CannotForkError(f"paritas does not fork on {sys.platform}")
    import torch

    if torch.accelerator.is_available():
        raise CannotForkError("accelerators do not survive a fork")
    for name in preloaded_modules(run_place.libraries):
        with contextlib.suppress(Exception):  # the runs that need it report the error
            importlib.import_module(name)
    torch.set_num_threads(1)
    if "tqdm" in sys.modules:
        # torch.fx creates a progress bar that leaves a lock: a compiler would seem to change the
        # state of a model that can reach it. The first bar would also start a thread.
        sys.modules["tqdm"].tqdm.monitor_interval = 0
        sys.modules["tqdm"].tqdm.get_lock()
    if run_place.compiles:
        with contextlib.suppress(Exception):  # the runs report the error
            _compile_once()
    gc.set_threshold(*_COLLECT_RARELY)


def _compile_once() -> None:
    """Compile a small program, with loops and sums that are vectorized.

    The first compile takes seconds longer: for imports, for the features of the processor, for
    precompiled headers, for the first simplifications of indices.
    """
    import torch
    from torch.nn import functional

    from paritas.core.torch_private.compile_time import quick_compiles

    def program(x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(functional.layer_norm(x, x.shape[1:])).softmax(-1)

    with quick_compiles():
        torch.compile(program)(torch.ones(32, 32, requires_grad=True)).sum().backward()
    torch.compiler.reset()


# --- A run ----------------------------------------------------------------------------------------


def _verify(run_place: RunPlace, task: RunTask, tell: Callable[[str], None]) -> RunMessage:
    try:
        tell("importing torch")
        import torch

        from paritas.core.torch_private.compile_time import quick_compiles

        torch.set_num_threads(run_place.threads)
        with quick_compiles():  # the same code, in less time
            verdict, library_versions = verify_run(task.run, tell)
    except MemoryError as error:
        return _report_raised(RunEnd.OUT_OF_MEMORY, in_one_line(error), "use smaller inputs")
    except ParitasError as error:
        return _report_raised(RunEnd.RAISED, str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001  (it becomes the row's finding)
        import traceback

        traceback.print_exc()
        reason = in_one_line(error, LONGEST_REASON, whole=True)
        is_memory = isinstance(error, torch.OutOfMemoryError)
        ended = RunEnd.OUT_OF_MEMORY if is_memory else RunEnd.RAISED
        return _report_raised(ended, reason, "the end of its log has the traceback")
    small, counts = trimmed(verdict)
    return RunMessage(ended=RunEnd.VERDICT, verdict=small, counts=counts, versions=library_versions)


def _report_raised(ended: RunEnd, reason: str, advice: str = "") -> RunMessage:
    verdict = without_verdict(reason, advice)
    return RunMessage(ended=ended, verdict=verdict, counts=trimmed(verdict)[1])


KERNELS = "kernels"
# Modules that take long to import, for each kind of target.
_LIBRARIES = {
    "hf": ("paritas.core.targets.hugging_face", *transformers_library.SLOW_MODULES),
    "timm": ("timm",),
    "torchvision": ("torchvision.models",),
    KERNELS: ("paritas.kernels.judge", "paritas.kernels.observing", "paritas.kernels.calling"),
}
_OWN = (
    "paritas.verification.verify",
    "paritas.core.candidates.makers",
    "paritas.core.diagnosis.diagnose",
)


def preloaded_modules(libraries: tuple[str, ...], *, own: bool = True) -> tuple[str, ...]:
    """The modules that a process imports before it forks runs."""
    names = [name for library in libraries for name in _LIBRARIES.get(library, ())]
    return (*(_OWN if own else ()), *names)


def _options_of(run: SweepRun) -> CandidateOptions:
    named = run.candidate in NAMED or is_own_function(run.candidate)
    mode = run.candidate if run.candidate in INDUCTOR_MODES else None
    return CandidateOptions(
        inputs=run.inputs or None,
        dtype=run.dtype or None,
        device=run.device,
        train=run.mode.startswith("train"),
        candidate=run.candidate if named else None,
        backend="inductor" if named or mode else run.candidate,
        mode=mode,
    )


def verify_run(run: SweepRun, tell: Callable[[str], None]) -> tuple[Verdict, dict[str, str]]:
    """Compare; returns the verdict, and versions that only this process knows."""
    if run.kernel is not None:
        return _judge_kernel(run, run.kernel, tell), _device_versions(run.device)
    from paritas.core.candidates.makers import build_candidate, build_reference
    from paritas.core.execution.subjects import VerifyConfig
    from paritas.verification.verify import verify

    options = _options_of(run)
    tell(f"building {run.target}")
    is_exported = run.target.endswith(".pt2")
    built = _load_exported(run) if is_exported else build_reference(run.target, options)
    model, inputs = built
    if run.candidate == INVARIANTS:
        from paritas.relations.checking import invariants

        report = invariants(model, inputs, target=run.target, on_progress=tell)
        return report.verdict, _device_versions(run.device)
    tell(f"making the candidate {run.candidate}")
    candidate = build_candidate(model, inputs, options)
    config = VerifyConfig(
        verify_gradients=False if run.mode.endswith("-forward") else None,
        raise_on_mismatch=False,
        locate_seconds=0,  # it would take from the time limit of the run
    )
    verdict = verify(inputs, model, candidate, config, on_progress=tell)
    return verdict, _device_versions(run.device)


def _judge_kernel(run: SweepRun, settings: KernelSettings, tell: Callable[[str], None]) -> Verdict:
    """Judge a kernel; its processes are forked from this one, before the reference is loaded."""
    from paritas.kernels import KernelOptions
    from paritas.kernels.judge import judge_kernel
    from paritas.kernels.servers import fork_server

    if run.device == "cpu":
        fork_server()
    options = KernelOptions(
        cases=settings.cases,
        seed=settings.seed,
        device=run.device,
        fixed=frozenset(settings.fixed),
        forbid=settings.forbid,
        gradients=settings.gradients,
        fresh_outputs=settings.fresh_outputs,
    )
    report = judge_kernel(
        run.target, run.candidate, options, inputs=run.inputs or None, on_progress=tell
    )
    return report.verdict


def _load_exported(run: SweepRun) -> tuple[Any, Any]:
    """Load a `.pt2` program with its example inputs."""
    import torch
    from torch.export.passes import move_to_device_pass

    from paritas.core.candidates.makers import move_leaf
    from paritas.core.execution.subjects import Inputs, usable_device
    from paritas.core.numerics.contents import map_leaves

    try:
        program = torch.export.load(Path(run.target))
    except Exception as error:
        raise UsageError(f"{run.target!r} cannot be read: {in_one_line(error)}") from error
    if program.example_inputs is None:
        raise UsageError(
            f"{run.target!r} has no example inputs: export it with them, or name a factory that "
            "returns (model, inputs)"
        )
    device = usable_device(run.device)
    program = move_to_device_pass(program, device)
    args, kwargs = map_leaves(program.example_inputs, lambda leaf: move_leaf(leaf, device, None))
    return program.module(), Inputs(args, kwargs)


def _device_versions(device: str) -> dict[str, str]:
    import torch

    if not device.startswith("cuda"):
        return {}
    return {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}


def libraries_of(runs: Iterable[SweepRun]) -> tuple[str, ...]:
    """What is imported before runs are forked: `hf`, `timm`, `kernels` ..."""
    library_names = {
        KERNELS if run.kernel is not None else run.target.partition(":")[0] for run in runs
    }
    return tuple(sorted(name for name in library_names if preloaded_modules((name,), own=False)))
