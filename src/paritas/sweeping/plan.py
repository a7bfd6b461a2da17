"""From `targets.toml`, or a Python list, to the runs of a sweep. This module does not import torch.

Every mistake is found before the first run; its message shows the value, the row and what to write
instead.
"""

from __future__ import annotations

import itertools
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paritas.core.candidates.loading import NAMED
from paritas.core.errors import UsageError, did_you_mean
from paritas.core.register import find_entry
from paritas.sweeping.rows import KernelSettings, SweepRun

if TYPE_CHECKING:
    from collections.abc import Iterator

OWN_DTYPE = "own"
DTYPES = (OWN_DTYPE, "float64", "float32", "bfloat16", "float16")
MODES = ("eval", "train", "eval-forward", "train-forward")
# Modes of Inductor that can be used as a candidate's name.
INDUCTOR_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# In place of a candidate: the ways of running the target itself are compared.
INVARIANTS = "invariants"
# Backends that are known without importing torch.
_USUAL_BACKENDS = ("inductor", "eager", "aot_eager", "aot_eager_decomp_partition", "cudagraphs")
_LIBRARIES = ("hf", "timm", "torchvision")
_DEVICE = re.compile(r"[a-z]+(:\d+)?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)", re.IGNORECASE)
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

# The lists in a row, with their default values.
_LISTS: dict[str, tuple[str, ...]] = {
    "dtypes": (OWN_DTYPE,),
    "devices": ("cpu",),
    "modes": ("eval",),
    "candidates": ("inductor",),
}
_TABLES = ("target", "kernel", "defaults")
_NAMES = ("name", "names")
_OTHERS = ("inputs", "seconds", "memory")
USUAL_SECONDS = 900.0


class RunTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run and the limits of its process.

    Attributes:
        seconds: the time limit.
        memory: the memory limit in bytes; None for its share of the machine's memory.
    """

    run: SweepRun
    seconds: float = USUAL_SECONDS
    memory: int | None = None


def plan_tasks(
    targets: str | os.PathLike[str] | Sequence[str | Mapping[str, Any]],
    *,
    seconds: float | None = None,
    memory: int | str | None = None,
) -> tuple[RunTask, ...]:
    """The requested runs: the product of the settings of each row.

    Args:
        targets: the path of a TOML file, or a list of its rows: dicts or names.
        seconds: the time limit of each run; it overrides `[defaults]`.
        memory: the memory limit of each run, in bytes or as `"8 GB"`.

    Raises:
        UsageError: a value is not valid.
    """
    if isinstance(targets, str | os.PathLike):
        path = Path(targets)
        where, rows, kernels, defaults = str(path), *_read_toml(path)
    else:
        where, defaults = "targets", {}
        kernels = [row for row in targets if is_kernel_row(row)]
        rows = [row for row in targets if not is_kernel_row(row)]
    given_limits = {"seconds": seconds, "memory": memory}
    defaults = {
        **defaults,
        **{name: value for name, value in given_limits.items() if value is not None},
    }
    _Row(f"{where}, [defaults]", {"name": "module:factory", **defaults}, {})  # only validates
    named = [
        (f"target {number}", _Row(f"{where}, target {number}", target_row, defaults).tasks())
        for number, target_row in enumerate(
            ({"name": row} if isinstance(row, str) else row for row in rows), start=1
        )
    ]
    named += [
        (f"kernel {number}", _kernel_tasks(f"{where}, kernel {number}", row, defaults))
        for number, row in enumerate(kernels, start=1)
    ]
    tasks = _unlike(named, where)
    if not tasks:
        raise UsageError(
            f'{where} names no target: add a row, [[target]] with name = "package.module:factory", '
            'or [[kernel]] with reference = "task.py"'
        )
    _check_backends({task.run.candidate for task in tasks if task.run.kernel is None}, where)
    return tasks


def _unlike(named: list[tuple[str, Iterator[RunTask]]], where: str) -> tuple[RunTask, ...]:
    """All tasks of all rows; none of them twice."""
    tasks: dict[SweepRun, RunTask] = {}
    first: dict[SweepRun, str] = {}
    for row, row_tasks in named:
        for task in row_tasks:
            if task.run in tasks:
                raise UsageError(
                    f"{where}, {row} repeats the run {str(task.run)!r} of {first[task.run]}: "
                    "remove one of the two"
                )
            tasks[task.run], first[task.run] = task, row
    return tuple(tasks.values())


def _kernel_tasks(where: str, kernel_row: Any, defaults: Mapping[str, Any]) -> Iterator[RunTask]:
    """The runs of a row [[kernel]], with their limits."""
    if not isinstance(kernel_row, Mapping):
        raise UsageError(
            f"{where} is {kernel_row!r:.80}: use a table with a reference and candidates"
        )
    usual = {name: value for name, value in defaults.items() if name in (*LIMITS, "devices")}
    both = {**usual, **kernel_row}
    limits = _Row(where, {"name": "module:factory", **_of(both, *LIMITS, "devices")}, {})
    for run in kernel_runs(where, both):
        yield RunTask(run=run, seconds=limits.seconds, memory=limits.memory)


def _of(table: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: table[name] for name in names if name in table}


def parse_size(value: Any, where: str) -> int:
    """Parse a number of bytes: `8_000_000_000`, or `"8 GB"`."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    form = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if form is None or not float(form[1]):
        raise UsageError(f'{where} = {value!r} is not a size: write "8 GB", or a number of bytes')
    return int(float(form[1]) * _UNITS[form[2].lower()])


def _read_toml(path: Path) -> tuple[list[Any], list[Any], dict[str, Any]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    for name in content:
        if name not in _TABLES:
            raise UsageError(
                f"{path}: unknown table [{name}]; {did_you_mean(name, _TABLES)} "
                "A sweep has rows [[target]] and [[kernel]], and one table [defaults]"
            )
    rows, kernels = content.get("target", []), content.get("kernel", [])
    defaults = content.get("defaults", {})
    for name, table in (("target", rows), ("kernel", kernels)):
        if not isinstance(table, list):
            raise UsageError(f"{path}: write [[{name}]] with two brackets, once for each row")
    if not isinstance(defaults, dict):
        raise UsageError(f"{path}: defaults = {defaults!r:.80} is not a table; write [defaults]")
    for name in _NAMES:
        if name in defaults:
            raise UsageError(f"{path}, [defaults]: {name} belongs to a row, [[target]]")
    return rows, kernels, defaults


class _Row:
    """One validated row, with the defaults."""

    def __init__(self, where: str, target_row: Any, defaults: Mapping[str, Any]) -> None:
        if not isinstance(target_row, Mapping):
            raise UsageError(
                f"{where} is {target_row!r:.80}: use a target's name, or a table with a name"
            )
        known_keys = (*_NAMES, *_LISTS, *_OTHERS)
        for name in target_row:
            if name not in known_keys:
                raise UsageError(f"{where}: unknown key {name!r}; {did_you_mean(name, known_keys)}")
        self.where = where
        self.asked = {**defaults, **target_row}
        self.names = self._names()
        self.lists = {
            name: _strings(where, self.asked, name, usual) for name, usual in _LISTS.items()
        }
        self._check_values()
        self.inputs = self._inputs()
        self.seconds = self._seconds()
        memory = self.asked.get("memory")
        self.memory = None if memory is None else parse_size(memory, f"{where}: memory")

    def tasks(self) -> Iterator[RunTask]:
        """Yield the product of the settings."""
        for name, dtype, device, mode, candidate in itertools.product(
            self.names, *self.lists.values()
        ):
            run = SweepRun(
                target=name,
                dtype="" if dtype == OWN_DTYPE else dtype,
                device=device,
                mode=mode,
                candidate=candidate,
                inputs=self.inputs,
            )
            yield RunTask(run=run, seconds=self.seconds, memory=self.memory)

    def _names(self) -> tuple[str, ...]:
        name_keys = [name for name in _NAMES if name in self.asked]
        if len(name_keys) != 1:
            both = "has both name and names" if name_keys else "has no name"
            raise UsageError(
                f'{self.where} {both}: write name = "package.module:factory", or names = [...]'
            )
        names = _strings(self.where, self.asked, name_keys[0], ())
        for name in names:
            self._check_target(name, name_keys[0])
        return names

    def _check_target(self, name: str, key: str) -> None:
        shown = f"{self.where}: {key} = {name!r}"
        if name.endswith(".pt2"):
            if not Path(name).is_file():
                raise UsageError(f"{shown}: there is no such file")
            return
        before, colon, after = name.partition(":")
        if before and colon and after and "/" not in before:
            return
        libraries = ", ".join(f"{library}:Name" for library in _LIBRARIES)
        raise UsageError(
            f"{shown} is not a target: write package.module:factory, {libraries}, or a .pt2 file"
        )

    def _check_values(self) -> None:
        for name, allowed_values in (("dtypes", DTYPES), ("modes", MODES)):
            for value in self.lists[name]:
                if value not in allowed_values:
                    hint = did_you_mean(value, allowed_values)
                    raise UsageError(f"{self.where}: unknown {name[:-1]} {value!r}; {hint}")
        for value in self.lists["devices"]:
            if _DEVICE.fullmatch(value) is None:
                raise UsageError(
                    f'{self.where}: unknown device {value!r}; write "cpu", "cuda" or "cuda:1"'
                )
        for value in self.lists["candidates"]:
            module, colon, function = value.partition(":")
            if not module or (colon and not function):
                raise UsageError(
                    f"{self.where}: candidate {value!r} is not the name of a backend, a mode of "
                    "Inductor, or package.module:function"
                )
        for name in self.names:
            if name.endswith(".pt2"):
                self._check_exported(name)

    def _check_exported(self, name: str) -> None:
        """Refuse settings that were fixed when the program was exported."""
        dtypes, modes = self.lists["dtypes"], self.lists["modes"]
        if dtypes != (OWN_DTYPE,):
            raise UsageError(
                f"{self.where}: dtypes = {list(dtypes)!r}, but {name!r} was exported in a fixed "
                f'dtype: remove dtypes, or write ["{OWN_DTYPE}"]'
            )
        if any(mode.startswith("train") for mode in modes):
            raise UsageError(
                f"{self.where}: modes = {list(modes)!r}, but {name!r} was exported in a fixed "
                'mode: write ["eval"], or ["eval-forward"] for no gradients'
            )

    def _inputs(self) -> str:
        value = self.asked.get("inputs", "")
        if not isinstance(value, str) or (value and not re.fullmatch(r"[^:/]+:[^:]+", value)):
            raise UsageError(
                f"{self.where}: inputs = {value!r:.80} is not of the form package.module:function"
            )
        return value

    def _seconds(self) -> float:
        value = self.asked.get("seconds", USUAL_SECONDS)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise UsageError(
                f"{self.where}: seconds = {value!r:.80}: write the time limit of a run, as in 900"
            )
        return float(value)


def is_own_function(candidate: str) -> bool:
    """Whether a candidate is a function of the user."""
    return ":" in candidate


def _check_backends(candidates: set[str], where: str) -> None:
    """Refuse a misspelt backend; torch is imported only for unusual names."""
    known_backends = (*_USUAL_BACKENDS, *INDUCTOR_MODES, *NAMED, INVARIANTS)
    unknown = [
        candidate
        for candidate in sorted(candidates)
        if candidate not in known_backends and not is_own_function(candidate)
    ]
    if not unknown:
        return
    import torch

    backends = torch.compiler.list_backends(exclude_tags=())
    for name in unknown:
        if name not in backends:
            hint = did_you_mean(name, dict.fromkeys((*known_backends, *backends)))
            raise UsageError(
                f"{where}: unknown candidate {name!r}; {hint}; for your own function, write "
                "package.module:function"
            )


# --- Rows `[[kernel]]`: kernels and their references ----------------------------------------------

# A row names one reference and its candidates, or a folder of tasks and a folder of candidates, or
# a folder of overrides of torch's operators (BackendBench's convention).

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
    "fresh_outputs",
)
LIMITS = ("seconds", "memory")
# What tells a row of kernels from one of models in a list of rows.
_OWN_KEYS = ("reference", "operators")


def is_kernel_row(row: Any) -> bool:
    """Whether a row of a Python list is one of kernels."""
    return isinstance(row, Mapping) and any(key in row for key in _OWN_KEYS)


def kernel_runs(where: str, kernel_row: Mapping[str, Any]) -> Iterator[SweepRun]:
    """The runs of one row.

    Raises:
        UsageError: a value is not valid, or a file is missing.
    """
    known_keys = (*KEYS, *LIMITS)
    for name in kernel_row:
        if name not in known_keys:
            raise UsageError(f"{where}: unknown key {name!r}; {did_you_mean(name, known_keys)}")
    settings = _settings(where, kernel_row)
    devices = _strings(where, kernel_row, "devices") or ("cpu",)
    inputs = kernel_row.get("inputs", "")
    if not isinstance(inputs, str):
        raise UsageError(f"{where}: inputs = {inputs!r:.80} is not of the form file.py:function")
    for reference, candidate in _pairs(where, kernel_row):
        for device in devices:
            yield SweepRun(
                target=reference,
                device=device,
                candidate=candidate,
                inputs=inputs,
                kernel=settings,
            )


def _settings(where: str, kernel_row: Mapping[str, Any]) -> KernelSettings:
    fixed = _strings(where, kernel_row, "fixed")
    promises = find_entry("check a kernel").promises
    for name in fixed:
        if name not in promises:
            hint = did_you_mean(name, promises)
            raise UsageError(f"{where}: fixed = {name!r} is not a promise; {hint}")
    numbers = {"cases": 40, "seed": 0}
    for name, usual in numbers.items():
        value = kernel_row.get(name, usual)
        if isinstance(value, bool) or not isinstance(value, int) or value < min(usual, 1):
            raise UsageError(f"{where}: {name} = {value!r:.80} is not a number")
        numbers[name] = value
    switches = {name: kernel_row.get(name, False) for name in ("gradients", "fresh_outputs")}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise UsageError(f"{where}: {name} = {value!r:.80}: write true or false")
    return KernelSettings(
        **numbers,
        fixed=tuple(sorted(fixed)),
        forbid=_strings(where, kernel_row, "forbid"),
        gradients=switches["gradients"],
        fresh_outputs=switches["fresh_outputs"],
    )


def _strings(
    where: str, row: Mapping[str, Any], name: str, usual: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """A list of strings; a single one needs no brackets. It may be empty if nothing is usual."""
    value = row.get(name, list(usual or ()))
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(entry, str) for entry in listed):
        raise UsageError(f'{where}: {name} = {value!r:.80}: write a list, ["..."]')
    if not listed and usual is not None:
        raise UsageError(f"{where}: {name} = []: add at least one, or remove {name}")
    return tuple(dict.fromkeys(listed))


# --- Which candidate belongs to which reference ---------------------------------------------------


def _pairs(where: str, kernel_row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "operators" in kernel_row:
        if "reference" in kernel_row or "candidates" in kernel_row:
            raise UsageError(f"{where}: operators is a folder of candidates with their references")
        yield from _overrides(where, kernel_row["operators"])
        return
    reference = kernel_row.get("reference")
    candidates = _strings(where, kernel_row, "candidates")
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
    python_files = sorted(file for file in folder.glob("*.py") if not file.name.startswith("_"))
    if not python_files:
        raise UsageError(f"{where}: there is no file *.py in {str(folder)!r}")
    return python_files


def _by_name(where: str, tasks: Path, kernels: Path) -> Iterator[tuple[str, str]]:
    """A file, or all files in a folder, with the name of the task; in subfolders too."""
    if not kernels.is_dir():
        raise UsageError(
            f"{where}: reference = {str(tasks)!r} is a folder, so candidates must be folders; "
            f"{str(kernels)!r} is not"
        )
    matched_count, homeless = 0, []
    for kernel in sorted(kernels.rglob("*.py")):
        if kernel.name.startswith("_"):
            continue
        path = kernel.relative_to(kernels)
        same = [tasks / path, tasks / f"{path.parent}.py"]
        task = next((task_path for task_path in same if task_path.is_file()), None)
        if task is None:
            homeless.append(str(path))
            continue
        matched_count += 1
        yield str(task), str(kernel)
    if homeless or not matched_count:
        example = homeless[0] if homeless else "*.py"
        raise UsageError(
            f"{where}: {len(homeless)} of {matched_count + len(homeless)} files in "
            f"{str(kernels)!r} have "
            f"no task of their name in {str(tasks)!r}, such as {example}: a kernel of softmax.py "
            "is softmax.py or softmax/NAME.py"
        )


def _overrides(where: str, folder: Any) -> Iterator[tuple[str, str]]:
    """`add__Tensor/add__Tensor_implementation*.py` has a function `add__Tensor_kernel_impl`.

    A folder without an overload, `add`, overrides all those that take tensors.
    """
    if not isinstance(folder, str) or not Path(folder).is_dir():
        raise UsageError(f"{where}: operators = {folder!r:.80} is not a folder")
    override_count = 0
    for operator_folder in sorted(Path(folder).iterdir()):
        if not operator_folder.is_dir() or operator_folder.name.startswith((".", "__pycache__")):
            continue
        for file in sorted(operator_folder.glob(f"{operator_folder.name}_implementation*.py")):
            override_count += 1
            yield operator_of(operator_folder.name), f"{file}:{operator_folder.name}_kernel_impl"
    if not override_count:
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
