"""Graphs of one operator of torch's sample database, and a backend that gets one node wrong.

A graph is `before -> operator -> after`, where `before` and `after` are functions of this module.
The backend makes one of the three wrong, and the question is which node guard() names.

    python -m benchmarks.places.neighbours OUT.jsonl --jobs 16

asks that for all operators, each in a process of its own with a limit, and adds the answers to OUT.
Operators that OUT has already are not tried again, so a run can be continued. What kind of wrong it
is, is not asked. It ends with 1 if a wrong node was named or an operator could not be tried.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import multiprocessing
import operator
import os
import sys
import time
import unittest.mock
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

import paritas
from paritas.core.judging.failures import Explainer
from paritas.core.results.findings import OriginKind
from paritas.core.torch_private.global_state import quietly
from paritas.core.torch_private.named_operators import operator_database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BEFORE, OPERATOR, AFTER = "before", "operator", "after"
# Memory that nothing was written to, views of given memory, and what has no value to be wrong.
_LEFT_OUT = ("empty", "new_empty", "as_strided", "resize", "item", "equal", "allclose", "jiterator")


def before(value: Tensor) -> Tensor:
    return value.clone()


def after(value: Tensor) -> Tensor:
    return ~value if value.dtype is torch.bool else value * 2


def spoil(value: Any) -> Any:
    """Change the first tensor of a value everywhere."""
    if isinstance(value, list | tuple):
        return (spoil(value[0]), *value[1:])
    if value.dtype is torch.bool:
        return ~value
    return value * 2 + 1


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator on a sample, and what is wrong: `before`, `operator` or `after`."""

    name: str
    function: Callable[..., Any]
    sample: Any
    wrong: str

    def __str__(self) -> str:
        return f"{self.name}: {self.wrong}"


def entries(wanted: Callable[[str], bool] = lambda _: True) -> list[Any]:
    """The entries of the database that can be part of a graph."""
    return [
        entry
        for entry in operator_database()
        if torch.float32 in entry.dtypes
        and not any(part in entry.name for part in _LEFT_OUT)
        and wanted(entry.name)
    ]


def cases(entry: Any, most: int = 1) -> Iterator[Case]:
    """Some samples of an entry, each with one of the three nodes wrong."""
    name = title(entry)
    forms = {name: entry.op}
    if entry.inplace_variant is not None and not entry.variant_test_name:
        forms[f"{name}_"] = entry.inplace_variant
    for form, function in forms.items():
        torch.manual_seed(0)
        samples = entry.sample_inputs("cpu", torch.float32, requires_grad=False)
        usable = (one for one in samples if isinstance(one.input, Tensor) and one.input.numel() > 1)
        for _, sample in zip(range(most), usable, strict=False):
            yield from (Case(form, function, sample, wrong) for wrong in (BEFORE, OPERATOR, AFTER))


class _NoGraphError(Exception):
    """An argument cannot be part of a graph."""


def make_graph(case: Case) -> tuple[fx.GraphModule, list[Tensor]] | None:
    """The graph of a case and its inputs; None if the operator returns no tensor."""
    graph = fx.Graph()
    inputs: list[Tensor] = []

    def give(value: Any) -> Any:
        if isinstance(value, Tensor):
            inputs.append(value.detach())
            return graph.placeholder(f"x{len(inputs) - 1}")
        if isinstance(value, torch.nn.Module) or dataclasses.is_dataclass(value):
            raise _NoGraphError
        return value

    first = give(case.sample.input)
    args = fx.node.map_aggregate(case.sample.args, give)
    kwargs = fx.node.map_aggregate(case.sample.kwargs, give)
    start = graph.create_node("call_function", before, (first,), name=BEFORE)
    function = _Called(case.function)
    called = graph.create_node("call_function", function, (start, *args), kwargs, OPERATOR)
    try:
        result = case.function(case.sample.input.clone(), *case.sample.args, **case.sample.kwargs)
    except RuntimeError as error:  # in place, a result may have a dtype that does not fit
        raise _NoGraphError from error
    ends = []
    if isinstance(result, Tensor):
        ends.append(graph.create_node("call_function", after, (called,), name=AFTER))
    elif isinstance(result, list | tuple):
        items = [number for number, one in enumerate(result) if isinstance(one, Tensor)]
        taken = [graph.call_function(operator.getitem, (called, number)) for number in items]
        if not taken:
            return None
        ends.append(graph.create_node("call_function", after, (taken[0],), name=AFTER))
        ends += taken[1:]
    if not ends:
        return None
    graph.output(tuple(ends))
    return fx.GraphModule({}, graph), inputs


def backend_with(wrong: str) -> Callable[..., Any]:
    """A backend that gets the node of this name wrong, whatever else is in the graph."""

    def compile_graph(graph: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if node.name == wrong:
                node.target = _Spoiled(node.target)
        graph.recompile()
        return graph.forward

    return compile_graph


class _Called:
    """A function with a name of its own: some of the database are lambdas, which FX refuses."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = "called"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class _Spoiled(_Called):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return spoil(self.function(*args, **kwargs))


def named_node(case: Case) -> str | None:
    """The node that guard() names, "" if none; None if the fault changes no result, or no graph."""
    try:
        made = make_graph(case)
    except _NoGraphError:
        return None
    if made is None:
        return None
    graph, inputs = made
    guarded = paritas.guard(backend_with(case.wrong), on_mismatch="record")
    try:
        guarded(graph, inputs)(*inputs)
    except RuntimeError:  # a wrong value is no probability, no index
        return None
    failures = [f for f in guarded.verdict().failures if f.status is not paritas.Status.UNVERIFIED]
    if not failures:
        return None
    origins = [one.origin for one in failures if one.origin is not None]
    return next((one.name for one in origins if one.kind is OriginKind.NODE), "")


# --- All of them, in parallel ---------------------------------------------------------------------

RIGHT, WRONG, NOT_VISIBLE, FAILED = "right", "wrong", "not visible", "not tried"


def answers(entry: Any) -> Iterator[tuple[str, str]]:
    """What guard() says about each case of an entry, and the case in words."""
    for case in cases(entry):
        with quietly():
            node = named_node(case)
        if node is None:
            yield NOT_VISIBLE, str(case)
        elif node == case.wrong:
            yield RIGHT, str(case)
        else:
            yield WRONG, f"{case}; named: {node or 'none'}"


def _send_answers(entry: Any, to: Connection) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    torch.set_num_threads(1)
    try:
        with unittest.mock.patch.object(
            Explainer, "_explain_finding", lambda _, finding, *__: finding
        ):
            to.send(list(answers(entry)))
    except Exception as error:  # noqa: BLE001  (it becomes a line)
        to.send([(FAILED, f"{entry.name}: {type(error).__name__}: {error!s:.200}")])


def answers_in_parallel(
    chosen: list[Any], jobs: int, seconds: float
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The answers about each entry, from a forked process; a process that dies is one of them."""
    context = multiprocessing.get_context("fork")
    todo = collections.deque(chosen)
    running: dict[Connection, tuple[Any, Any, float]] = {}
    while todo or running:
        while todo and len(running) < jobs:
            entry = todo.popleft()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_send_answers, args=(entry, theirs), daemon=True)
            process.start()
            theirs.close()
            running[ours] = entry, process, time.monotonic() + seconds
        ready = wait(list(running), timeout=0.5)
        late = [one for one, (*_, end) in running.items() if time.monotonic() > end]
        for one in {*ready, *late}:
            entry, process, _ = running.pop(one)  # type: ignore[index]
            found = [(FAILED, f"{entry.name}: it died or took more than {seconds:g} s")]
            if one in ready:
                with contextlib.suppress(EOFError):
                    found = one.recv()  # type: ignore[union-attr]
            process.kill()
            process.join()
            yield title(entry), found


def title(entry: Any) -> str:
    """The name of an entry, with its variant."""
    return entry.name + ("." + entry.variant_test_name if entry.variant_test_name else "")


def main() -> int:
    """Print what is not right, and how many are."""
    parser = argparse.ArgumentParser(prog="benchmarks.places.neighbours", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600.0, help="limit of all")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of one operator")
    asked = parser.parse_args()
    lines = asked.out.read_text().splitlines() if asked.out.exists() else []
    rows: dict[str, list[tuple[str, str]]] = dict(map(json.loads, lines))
    end = time.monotonic() + 60 * asked.minutes
    left = [entry for entry in entries() if title(entry) not in rows]
    print(f"{len(rows)} operators tried, {len(left)} left", flush=True)
    with asked.out.open("a", buffering=1) as out:
        for start in range(0, len(left), asked.jobs):
            if time.monotonic() > end:
                break
            part = left[start : start + asked.jobs]
            for name, found in answers_in_parallel(part, asked.jobs, asked.seconds):
                rows[name] = found
                out.write(json.dumps([name, found]) + "\n")
    told = [answer for found in rows.values() for answer in found]
    for answer, words in told:
        if answer in {WRONG, FAILED}:
            print(f"{answer}: {words}")
    counts = collections.Counter(answer for answer, _ in told)
    print(", ".join(f"{counts[one]} {one}" for one in (RIGHT, WRONG, NOT_VISIBLE, FAILED)))
    return 1 if counts[WRONG] or counts[FAILED] else 0


if __name__ == "__main__":
    sys.exit(main())
