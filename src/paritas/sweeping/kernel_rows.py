"""Rows `[[kernel]]` of a sweep: kernels and their references. This module does not import torch.

A row names one reference and its candidates, or a folder of tasks and a folder of candidates, or a
folder of overrides of torch's operators (BackendBench's convention).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas.errors import UsageError, did_you_mean
from paritas.kernels.options import PROMISES
from paritas.results.sweeps import KernelSettings, SweepRun

if TYPE_CHECKING:
    from collections.abc import Iterator

KEYS = (
    "reference",
    "candidates",
    "operators",
    "inputs",
    "devices",
    "cases",
    "seed",
    "fixed",
    "forbid",
    "gradients",
)
LIMITS = ("seconds", "memory")
# What tells a row of kernels from one of models in a list of rows.
_OWN_KEYS = ("reference", "operators")


def is_kernel_row(row: Any) -> bool:
    """Whether a row of a Python list is one of kernels."""
    return isinstance(row, Mapping) and any(key in row for key in _OWN_KEYS)


def kernel_runs(where: str, asked: Mapping[str, Any]) -> Iterator[SweepRun]:
    """The runs of one row.

    Raises:
        UsageError: a value is not valid, or a file is missing.
    """
    known = (*KEYS, *LIMITS)
    for name in asked:
        if name not in known:
            raise UsageError(f"{where}: unknown key {name!r}; {did_you_mean(name, known)}")
    settings = _settings(where, asked)
    devices = _strings(where, asked, "devices") or ("cpu",)
    inputs = asked.get("inputs", "")
    if not isinstance(inputs, str):
        raise UsageError(f"{where}: inputs = {inputs!r:.80} is not of the form file.py:function")
    for reference, candidate in _pairs(where, asked):
        for device in devices:
            yield SweepRun(
                target=reference,
                device=device,
                candidate=candidate,
                inputs=inputs,
                kernel=settings,
            )


def _settings(where: str, asked: Mapping[str, Any]) -> KernelSettings:
    fixed = _strings(where, asked, "fixed")
    for name in fixed:
        if name not in PROMISES:
            hint = did_you_mean(name, PROMISES)
            raise UsageError(f"{where}: fixed = {name!r} is not a promise; {hint}")
    numbers = {"cases": 40, "seed": 0}
    for name, usual in numbers.items():
        value = asked.get(name, usual)
        if isinstance(value, bool) or not isinstance(value, int) or value < min(usual, 1):
            raise UsageError(f"{where}: {name} = {value!r:.80} is not a number")
        numbers[name] = value
    gradients = asked.get("gradients", False)
    if not isinstance(gradients, bool):
        raise UsageError(f"{where}: gradients = {gradients!r:.80}: write true or false")
    return KernelSettings(
        **numbers,
        fixed=tuple(sorted(fixed)),
        forbid=_strings(where, asked, "forbid"),
        gradients=gradients,
    )


def _strings(where: str, asked: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = asked.get(name, [])
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(one, str) for one in listed):
        raise UsageError(f'{where}: {name} = {value!r:.80}: write a list, ["..."]')
    return tuple(dict.fromkeys(listed))


# --- Which candidate belongs to which reference ---------------------------------------------------


def _pairs(where: str, asked: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "operators" in asked:
        if "reference" in asked or "candidates" in asked:
            raise UsageError(f"{where}: operators is a folder of candidates with their references")
        yield from _overrides(where, asked["operators"])
        return
    reference = asked.get("reference")
    candidates = _strings(where, asked, "candidates")
    if not isinstance(reference, str) or not candidates:
        raise UsageError(
            f'{where}: write reference = "task.py" and candidates = ["kernel.py"], or operators = '
            "and the folder of their overrides"
        )
    if Path(reference).is_dir():
        for candidate in candidates:
            yield from _by_name(where, Path(reference), Path(candidate))
        return
    _check_side(where, "reference", reference)
    for candidate in candidates:
        if Path(candidate).is_dir():
            for file in _python_files(where, Path(candidate)):
                yield reference, str(file)
            continue
        _check_side(where, "candidates", candidate)
        yield reference, candidate


def _check_side(where: str, key: str, name: str) -> None:
    """Refuse a file that does not exist; other names need torch."""
    file = re.sub(r"(\.py):.*", r"\1", name)
    if file.endswith(".py") and not Path(file).is_file():
        raise UsageError(f"{where}: {key} = {name!r}: there is no file {file!r}")


def _python_files(where: str, folder: Path) -> list[Path]:
    found = sorted(one for one in folder.glob("*.py") if not one.name.startswith("_"))
    if not found:
        raise UsageError(f"{where}: there is no file *.py in {str(folder)!r}")
    return found


def _by_name(where: str, tasks: Path, kernels: Path) -> Iterator[tuple[str, str]]:
    """A file, or all files in a folder, with the name of the task; in subfolders too."""
    if not kernels.is_dir():
        raise UsageError(
            f"{where}: reference = {str(tasks)!r} is a folder, so candidates must be folders; "
            f"{str(kernels)!r} is not"
        )
    found, homeless = 0, []
    for kernel in sorted(kernels.rglob("*.py")):
        if kernel.name.startswith("_"):
            continue
        path = kernel.relative_to(kernels)
        same = [tasks / path, tasks / f"{path.parent}.py"]
        task = next((one for one in same if one.is_file()), None)
        if task is None:
            homeless.append(str(path))
            continue
        found += 1
        yield str(task), str(kernel)
    if homeless or not found:
        example = homeless[0] if homeless else "*.py"
        raise UsageError(
            f"{where}: {len(homeless)} of {found + len(homeless)} files in {str(kernels)!r} have "
            f"no task of their name in {str(tasks)!r}, such as {example}: a kernel of softmax.py "
            "is softmax.py or softmax/NAME.py"
        )


def _overrides(where: str, folder: Any) -> Iterator[tuple[str, str]]:
    """`add__Tensor/add__Tensor_implementation*.py` has a function `add__Tensor_kernel_impl`.

    A folder without an overload, `add`, overrides all those that take tensors.
    """
    if not isinstance(folder, str) or not Path(folder).is_dir():
        raise UsageError(f"{where}: operators = {folder!r:.80} is not a folder")
    found = 0
    for place in sorted(Path(folder).iterdir()):
        if not place.is_dir() or place.name.startswith((".", "__pycache__")):
            continue
        for file in sorted(place.glob(f"{place.name}_implementation*.py")):
            found += 1
            yield operator_of(place.name), f"{file}:{place.name}_kernel_impl"
    if not found:
        raise UsageError(
            f"{where}: there is no NAME/NAME_implementation*.py in {folder!r}, as in "
            "add__Tensor/add__Tensor_implementation_v1.py"
        )


def operator_of(folder: str) -> str:
    """The operator of a folder: `add__Tensor` is `aten.add.Tensor`.

    Of more underscores in a row, the last two are the dot: `add___Tensor` is `aten.add_.Tensor`.
    """
    name = re.sub(r"(?<=[^_])(_*)__(?=[^_])", r"\1.", folder)
    return name if name.startswith(("aten.", "torch.ops.")) else f"aten.{name}"
