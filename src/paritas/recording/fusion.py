"""The switch file of torchair, which turns fusion off, taken for Inductor."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas._torch import fusion_options
from paritas.errors import UsageError
from paritas.recording.ascend_passes import PASSES, is_ascend_name, nearest_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["FusionSwitch", "load_switch"]

EXAMPLE = '{"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {"ALL": "off"}}}'
GRAPH, KERNEL = "GraphFusion", "UBFusion"
ALL = "ALL"
_MOST_NEAR = 3


@dataclasses.dataclass(frozen=True)
class FusionSwitch:
    """What is on and off.

    Attributes:
        graph: rewriting of graphs, by the names of passes and settings, or `ALL`.
        kernel: fusion of operations into kernels, likewise.
        notes: what became of names of Ascend's passes.
    """

    graph: dict[str, bool] = dataclasses.field(default_factory=dict)
    kernel: dict[str, bool] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def inductor_options(self) -> dict[str, Any]:
        """The settings of Inductor that do it; what is on is left as it is set."""
        return {
            **fusion_options.graph_options(_off(self.graph, fusion_options.graph_names())),
            **fusion_options.kernel_options(_off(self.kernel, fusion_options.kernel_names())),
        }

    def describe(self) -> str:
        """In words: `GraphFusion: ALL off; UBFusion: ALL off, epilogue_fusion on`."""
        sections = ((GRAPH, self.graph), (KERNEL, self.kernel))
        return "; ".join(
            f"{section}: "
            + ", ".join(f"{name} {'on' if is_on else 'off'}" for name, is_on in entries.items())
            for section, entries in sections
            if entries
        )


def load_switch(path: str | os.PathLike[str]) -> FusionSwitch:
    """Read a switch file; what is in it and not understood is an error.

    Names of Ascend's passes are taken for what does their work here. One that is not known switches
    nothing: a warning says so, with the nearest that is.
    """
    file = Path(path)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"the fusion switch file {file} cannot be read: {error.strerror}"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"the fusion switch file {file} is no JSON: {error}; give, for example, {EXAMPLE}"
        ) from error
    sections = content.get("Switch") if isinstance(content, dict) else None
    if not isinstance(sections, dict) or not sections or len(content) > 1:
        raise UsageError(
            f"the fusion switch file {file} holds {_short(content)}; give, for example, {EXAMPLE}"
        )
    known: dict[str, Callable[[], tuple[str, ...]]] = {
        GRAPH: fusion_options.graph_names,
        KERNEL: fusion_options.kernel_names,
    }
    for section in sections:
        if section not in known:
            raise UsageError(
                f"{file}: unknown section {section!r}; known are {_nearest(section, [*known])}"
            )
    names = {section: ask() for section, ask in known.items()}
    read = {name: _entries(file, name, sections.get(name, {}), names[name]) for name in names}
    notes = tuple(_translate(file, read, names))
    return FusionSwitch(graph=read[GRAPH], kernel=read[KERNEL], notes=notes)


def _translate(
    file: Path, read: dict[str, dict[str, bool]], known: dict[str, tuple[str, ...]]
) -> Iterator[str]:
    """Put in the place of Ascend's names what does their work here; in words, what that is."""
    meant: dict[str, dict[str, bool]] = {section: {} for section in read}
    for section, entries in read.items():
        for name in [name for name in entries if name not in (ALL, *known[section])]:
            is_on = entries.pop(name)
            told = f"{section}: {name} {'on' if is_on else 'off'}"
            found = PASSES.get(name)
            if found is None:
                near = nearest_pass(name)
                note = (
                    f"{told} switches nothing: paritas does not know that pass; the nearest known "
                    f"one is {near} ({PASSES[near].does})"
                )
                warnings.warn(f"{file}: {note}", stacklevel=4)
                yield note
                continue
            places = [(where, one) for one in found.here for where in known if one in known[where]]
            for where, one in places:
                # What two passes of Ascend's do is off as soon as one of them is.
                meant[where][one] = is_on and meant[where].get(one, True)
            here = ", ".join(one for _, one in places) or "nothing"
            yield f"{told} means {here} in Inductor ({found.does})"
    for section, entries in read.items():
        read[section] = {**meant[section], **entries}


def _entries(file: Path, section: str, entries: Any, known: tuple[str, ...]) -> dict[str, bool]:
    if not isinstance(entries, dict):
        raise UsageError(f"{file}: {section} is {_short(entries)}; give names with on or off")
    for name, value in entries.items():
        if name != ALL and name not in known and not is_ascend_name(name):
            names = _nearest(name, [ALL, *known])
            raise UsageError(f"{file}: {section} has no {name!r}; known are {names}")
        if value not in ("on", "off"):
            raise UsageError(f'{file}: {section}, {name}: {_short(value)}; give "on" or "off"')
    return {name: value == "on" for name, value in entries.items()}


def _off(entries: dict[str, bool], known: tuple[str, ...]) -> set[str]:
    """The names that are off; one of its own says more than `ALL`, wherever it stands."""
    everything = entries.get(ALL, True)
    return {name for name in known if not entries.get(name, everything)}


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=_MOST_NEAR, cutoff=0.4)
    return ", ".join([*near, *(other for other in known if other not in near)])


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= len(EXAMPLE) else f"{text[: len(EXAMPLE)]}..."
