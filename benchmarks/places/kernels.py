"""The code that Inductor wrote, edited before it is compiled: C++ on a CPU, Triton on a GPU.

An edit changes every kernel that it matches, as a code generator with a mistake would. The place
is the set of nodes whose code it is.
"""

# ruff: noqa: TID251  (the output of Inductor can be reached only inside it)

from __future__ import annotations

import contextlib
import importlib
import os
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.places.calls import operator_of
from benchmarks.places.passes import line_of, module_of
from benchmarks.places.planting import SOURCES, Planted, Subject, Truth, backpropagate, digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.places.calls import Edit

PLAN = "PLACES_KERNEL_EDIT"


class Printer:
    """Stands between Inductor and the file that it writes its code to."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.graphs: list[torch.fx.Graph] = []

    def install(self) -> None:
        """Edit from now on what the environment says."""
        from torch._inductor.codecache import PyCodeCache

        write = PyCodeCache.__dict__["write"].__func__

        def edited(cls: Any, source_code: str, extra: str = "") -> Any:
            self.texts.append(source_code)
            named = os.environ.get(PLAN)
            if named:
                half, _, name = named.partition(" ")
                source_code = kernel_edits_of(half)[name].apply_everywhere(source_code)
            return write(cls, source_code, extra)

        PyCodeCache.write = classmethod(edited)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note the graphs that become code."""
        from torch._inductor import config

        with config.patch(post_grad_custom_post_pass=self.graphs.append):
            yield


_printer: list[Printer] = []


def printer() -> Printer:
    """The one printer of this process."""
    if not _printer:
        _printer.append(Printer())
        _printer[0].install()
    return _printer[0]


def kernel_edits_of(half: str) -> dict[str, Edit]:
    """The edits of kernels of a half."""
    found: dict[str, Edit] = importlib.import_module(f"benchmarks.places.{half}").KERNEL_EDITS
    return found


def by_kernel(subject: Subject) -> Iterator[Planted]:
    """Faults in the kernels of a model."""
    own = printer()
    with own.watching():
        torch.compiler.reset()
        backpropagate(torch.compile(subject.model), subject)
    text = "\n".join(own.texts)
    edits = kernel_edits_of(subject.half)
    for name in sorted(edits, key=lambda name: digest(subject.name, name)):
        if not subject.is_free(name):
            continue
        edit = edits[name]
        nodes = [node for graph in own.graphs for node in graph.nodes if _is_of(node, edit)]
        if edit.apply_everywhere(text) == text or not nodes:
            continue
        captured = [one.name for node in nodes for one in node.meta.get("from_node") or []]
        yield Planted(
            "kernel",
            name,
            Truth(
                tuple(dict.fromkeys([*(node.name for node in nodes), *captured])),
                tuple(sorted(edit.operators)),
                tuple(dict.fromkeys(map(line_of, nodes))),
                tuple(dict.fromkeys(map(module_of, nodes))),
            ),
            None if edit.kinds is None else tuple(sorted(edit.kinds)),
            tuple(sorted(edit.loose)),
            lambda: torch.compile(subject.model),
            "inductor",
            ((PLAN, f"{subject.half} {name}"),),
        )


def _is_of(node: torch.fx.Node, edit: Edit) -> bool:
    if node.op != "call_function" or operator_of(node.target) not in edit.operators:
        return False
    numbers = [one for one in node.args if isinstance(one, float)]
    return edit.constant is None or any(
        abs(one - edit.constant) <= 0.9 * edit.constant for one in numbers
    )


SOURCES["kernel"] = by_kernel
