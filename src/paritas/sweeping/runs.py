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
from typing import TYPE_CHECKING, Any

import msgspec

from paritas.core import transformers_library
from paritas.core.candidates.loading import NAMED, CandidateOptions
from paritas.core.errors import ParitasError, in_one_line
from paritas.core.register import find_entry
from paritas.core.results.findings import Verdict
from paritas.core.workers.inside import CannotForkError
from paritas.sweeping.places import RunPlace
from paritas.sweeping.plan import INDUCTOR_MODES, INVARIANTS, RunTask, is_own_function
from paritas.sweeping.rows import RunEnd, trim_verdict, without_verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paritas.core.candidates.target_check import TargetCheck
    from paritas.core.workers.channel import Channel
    from paritas.sweeping.rows import SweepRun

# Their checks in the register.
CANDIDATES, KERNELS = "check a candidate", "check a kernel"
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
    small, counts = trim_verdict(verdict)
    return RunMessage(ended=RunEnd.VERDICT, verdict=small, counts=counts, versions=library_versions)


def _report_raised(ended: RunEnd, reason: str, advice: str = "") -> RunMessage:
    verdict = without_verdict(reason, advice)
    return RunMessage(ended=ended, verdict=verdict, counts=trim_verdict(verdict)[1])


# Modules that take long to import, for each kind of target.
_LIBRARIES = {
    "hf": ("paritas.core.targets.hugging_face", *transformers_library.SLOW_MODULES),
    "timm": ("timm",),
    "torchvision": ("torchvision.models",),
    KERNELS: find_entry(KERNELS).modules,
}


def preloaded_modules(libraries: tuple[str, ...], *, checks: bool = True) -> tuple[str, ...]:
    """The modules that a process imports before it forks runs."""
    names = [name for library in libraries for name in _LIBRARIES.get(library, ())]
    return (*(find_entry(CANDIDATES).modules if checks else ()), *names)


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
    settings: dict[str, Any] = {}
    name = CANDIDATES
    if run.kernel is not None:
        name, settings = KERNELS, msgspec.structs.asdict(run.kernel)
    elif run.candidate == INVARIANTS:
        name = "check invariants"
    elif run.mode.endswith("-forward"):
        settings["gradients"] = False
    check: TargetCheck = find_entry(name)
    verdict = check.run(run.target, _options_of(run), tell, **settings)
    return verdict, _device_versions(run.device)


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
    return tuple(sorted(name for name in library_names if preloaded_modules((name,), checks=False)))
