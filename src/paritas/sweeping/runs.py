"""One run: build a target, make a candidate from it, and compare the two."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas.candidates.names import NAMED
from paritas.errors import UsageError, in_one_line
from paritas.sweeping.plan import INDUCTOR_MODES, is_own_function

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.results.findings import Verdict
    from paritas.results.sweeps import SweepRun

# Modules that take long to import, for each kind of target.
_LIBRARIES = {
    "hf": ("transformers.modeling_utils", "transformers.modeling_outputs"),
    "timm": ("timm",),
    "torchvision": ("torchvision.models",),
}
_OWN = ("paritas.checks.verify", "paritas.candidates.building", "paritas.diagnosis.diagnose")


def preloaded_modules(libraries: tuple[str, ...], *, own: bool = True) -> tuple[str, ...]:
    """The modules that a process imports before it forks runs."""
    found = [name for library in libraries for name in _LIBRARIES.get(library, ())]
    return (*(_OWN if own else ()), *found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RunOptions:
    """The options of a run, in the form for `build_reference` and `build_candidate`."""

    inputs: str | None
    dtype: str | None
    device: str
    train: bool
    candidate: str | None
    backend: str
    mode: str | None
    dynamic: bool | None = None
    fullgraph: bool = False


def _options_of(run: SweepRun) -> _RunOptions:
    named = run.candidate in NAMED or is_own_function(run.candidate)
    mode = run.candidate if run.candidate in INDUCTOR_MODES else None
    return _RunOptions(
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
    from paritas.candidates.building import build_candidate, build_reference
    from paritas.checks.verify import verify
    from paritas.execution.subjects import VerifyConfig

    options = _options_of(run)
    tell(f"building {run.target}")
    is_exported = run.target.endswith(".pt2")
    built = _load_exported(run) if is_exported else build_reference(run.target, options)
    model, inputs = built
    tell(f"making the candidate {run.candidate}")
    candidate = build_candidate(model, inputs, options)
    config = VerifyConfig(
        verify_gradients=False if run.mode.endswith("-forward") else None, raise_on_mismatch=False
    )
    verdict = verify(inputs, model, candidate, config, on_progress=tell)
    return verdict, _device_versions(run.device)


def _load_exported(run: SweepRun) -> tuple[Any, Any]:
    """Load a `.pt2` program with its example inputs."""
    import torch
    from torch.export.passes import move_to_device_pass

    from paritas.candidates.building import move_leaf
    from paritas.execution.subjects import Inputs, usable_device
    from paritas.numerics.contents import map_leaves

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
