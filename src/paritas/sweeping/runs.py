"""One run: a target is built, a candidate made of it, and the two are compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas.candidates.names import NAMED
from paritas.errors import UsageError, in_one_line
from paritas.sweeping.plan import INDUCTOR_MODES, is_own_function

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.results.findings import Verdict
    from paritas.results.sweeps import SweepRun

# What takes long to import, for each kind of target.
_LIBRARIES = {
    "hf": ("transformers.modeling_utils", "transformers.modeling_outputs"),
    "timm": ("timm",),
    "torchvision": ("torchvision.models",),
}
_OWN = ("paritas.checks.verify", "paritas.cli.building", "paritas.diagnosis.diagnose")


def preloaded_modules(libraries: tuple[str, ...], *, own: bool = True) -> tuple[str, ...]:
    """What a process that forks runs has imported before."""
    found = [name for library in libraries for name in _LIBRARIES.get(library, ())]
    return (*(_OWN if own else ()), *found)


def verify_run(run: SweepRun, tell: Callable[[str], None]) -> tuple[Verdict, dict[str, str]]:
    """Compare; gives the verdict, and versions that only this process can see."""
    from paritas.checks.verify import verify
    from paritas.execution.subjects import VerifyConfig

    tell(f"building {run.target}")
    model, inputs = _build_target(run)
    tell(f"making the candidate {run.candidate}")
    candidate = _build_candidate(run, model, inputs)
    config = VerifyConfig(
        verify_gradients=False if run.mode.endswith("-forward") else None, raise_on_mismatch=False
    )
    verdict = verify(inputs, model, candidate, config, on_progress=tell)
    return verdict, _device_versions(run.device)


def _build_target(run: SweepRun) -> tuple[Any, Any]:
    if run.target.endswith(".pt2"):
        return _load_exported(run)
    from paritas.cli.building import build_reference
    from paritas.cli.options import BuildOptions

    options = BuildOptions(
        inputs=run.inputs or None,
        dtype=run.dtype or None,
        train=run.mode.startswith("train"),
        device=run.device,
    )
    return build_reference(run.target, options)


def _build_candidate(run: SweepRun, model: Any, inputs: Any) -> Callable[..., Any]:
    from paritas.cli.building import build_candidate
    from paritas.cli.verify import VerifyOptions

    named = run.candidate in NAMED or is_own_function(run.candidate)
    mode = run.candidate if run.candidate in INDUCTOR_MODES else None
    options = VerifyOptions(
        inputs=None,
        dtype=None,
        train=False,
        backend="inductor" if named or mode else run.candidate,
        mode=mode,
        dynamic=None,
        fullgraph=False,
        candidate=run.candidate if named else None,
        strict=False,
        no_gradients=False,
        no_lift=False,
    )
    return build_candidate(model, inputs, options)


def _load_exported(run: SweepRun) -> tuple[Any, Any]:
    """The program of a `.pt2`, with the inputs that it was exported with."""
    import torch

    from paritas.execution.subjects import Inputs

    try:
        program = torch.export.load(Path(run.target))
    except Exception as error:
        raise UsageError(f"{run.target!r} cannot be read: {in_one_line(error)}") from error
    if program.example_inputs is None:
        raise UsageError(
            f"{run.target!r} has no example inputs: export it with them, or name a factory that "
            "returns (model, inputs)"
        )
    args, kwargs = program.example_inputs
    return program.module(), Inputs(args, kwargs)


def _device_versions(device: str) -> dict[str, str]:
    import torch

    if not device.startswith("cuda"):
        return {}
    return {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
