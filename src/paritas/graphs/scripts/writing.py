"""A script is tried before it is handed over: one that does not show the failure says so."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from paritas.graphs.scripts.storing import is_storable
from paritas.graphs.scripts.text import Facts, script_text
from paritas.graphs.scripts.values import NoScriptError, stored_tensors
from paritas.partition.running.placing import name_of, tensors_in
from paritas.reporting.json_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

__all__ = ["FOLDER", "Handed", "stem_of", "write_script"]

FOLDER = "repro"
SHOWN = "the fault is there"
_PATIENCE = 120.0  # seconds
_MOST_BYTES = 64 << 20  # of arguments in a file beside the script


@dataclasses.dataclass(frozen=True)
class Handed:
    """What came of a script.

    Attributes:
        path: relative to the folder of the results; empty if there is none.
        note: what a reader should know of it.
    """

    path: str = ""
    note: str = ""


def stem_of(number: int, operator: str) -> str:
    """A file's name: `03_linear`, whatever the operator is called."""
    parts = operator.split(".")
    # Of `aten.mm.default` the overload says nothing.
    short = parts[1] if parts[0] in {"aten", "prims"} and len(parts) > 1 else parts[-1]
    return f"{number:02}_{re.sub(r'[^A-Za-z0-9_]+', '_', short)[:60] or 'operator'}"


def write_script(
    folder: Path, stem: str, facts: Facts, *, recorded: bool = False, degraded: bool = False
) -> Handed:
    """Write a script that shows a failure, and run it once.

    Values are drawn in the script, if that shows the failure; otherwise the very ones of the check
    lie in a file beside it.

    Args:
        folder: of the results; the script goes below it.
        stem: the file's name, without its ending.
        facts: the failure.
        recorded: the values are those of a run, and no others will do.
        degraded: it is only in the dtype of the call that anything is wrong.
    """
    below = folder / FOLDER
    below.mkdir(exist_ok=True)
    script, values = below / f"{stem}.py", below / f"{stem}.safetensors"
    told = ""
    for stored, native in _ways(facts, recorded=recorded, degraded=degraded):
        name = values.name if stored else ""
        try:
            text = script_text(dataclasses.replace(facts, native=native, stored=name))
        except NoScriptError as error:
            return Handed(note=f"no script shows it by itself: {error}")
        if stored:
            _store(values, _tensors(facts))
        write_whole(script, text.removesuffix("\n").encode())
        told = _tried(script)
        if not told:
            if not stored:
                values.unlink(missing_ok=True)
            return Handed(f"{FOLDER}/{script.name}")
    note = f"{FOLDER}/{script.name} does not show the failure by itself: {told}"
    return Handed(f"{FOLDER}/{script.name}", note)


def _ways(facts: Facts, *, recorded: bool, degraded: bool) -> Iterator[tuple[bool, bool]]:
    """Whether values are stored and whether it runs natively, the simplest way first."""
    tensors = [one for value in facts.values.values() for one in tensors_in(value)]
    size = sum(one.numel() * one.element_size() for one in tensors)
    can_store = size <= _MOST_BYTES and all(is_storable(one.dtype) for one in tensors)
    if not (recorded and can_store):
        yield False, degraded
    if can_store:
        yield True, degraded
        yield True, not degraded


def _tensors(facts: Facts) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for place, value in facts.values.items():
        found |= stored_tensors(value, name_of(place))
    return found


def _store(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save

    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_bytes(save(tensors))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _tried(script: Path) -> str:
    """Run it; empty if it shows the failure, otherwise what it does instead."""
    environment = dict(os.environ)
    # A module of the user's is found as this process finds it.
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)  # noqa: PTH109
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        done = subprocess.run(
            [sys.executable, str(script.absolute())],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {_PATIENCE:.0f} s"
    except OSError as error:
        return f"it cannot be run: {error}"
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode == 1 and SHOWN in done.stdout.splitlines():
        return ""
    return f"it exits with {done.returncode}: {lines[-1] if lines else 'it prints nothing'}"
