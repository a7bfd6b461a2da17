"""Goldens: values that a test had once, in a dump of their own, and what became of them."""

from __future__ import annotations

import ast
import dataclasses
import datetime as dt
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.dumps.dtypes import as_stored
from paritas.dumps.locks import LOCK
from paritas.dumps.reading import Dump
from paritas.dumps.records import Header, Site, TensorFacts
from paritas.dumps.writing import DumpWriter, Entry, run_identity
from paritas.errors import UsageError
from paritas.numerics.checkers import AutomaticValueChecker, ValueChecker
from paritas.numerics.contents import Opaque
from paritas.numerics.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.numerics.flattening import flattened
from paritas.numerics.pairing import Checks, check_pair
from paritas.settings.versions import own_version

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Golden", "golden_of", "judge_golden", "missing_golden", "read_golden", "write_golden"]

_ROOT = "value"
_CONTAINERS = "containers"
_AS_TEXT = (bool, int, str, bytes, type(None))
_MOST_NAMED = 5
_NO_GOLDEN = (
    KeyError,
    MemoryError,
    RecursionError,
    SyntaxError,
    ValueError,
    msgspec.MsgspecError,
)


@dataclasses.dataclass(frozen=True)
class Golden:
    """A tree of values, flat.

    Attributes:
        values: by their path: tensors on the CPU, and what Python writes as a literal.
        containers: the class of each container, by its path.
    """

    values: dict[str, Any]
    containers: dict[str, str]


def golden_of(tree: Any) -> Golden:
    """What is kept of a tree.

    Raises:
        UsageError: a value is neither a tensor nor a number, a string or None.
    """
    values: dict[str, Any] = {}
    flat = flattened(tree, _ROOT)
    for path, leaf in flat.leaves.items():
        if isinstance(leaf, torch.Tensor):
            values[path] = leaf.detach().resolve_conj().resolve_neg().cpu()
        elif type(leaf) in _AS_TEXT:
            values[path] = leaf
        else:
            raise UsageError(
                f"a golden cannot hold {path}, a {_class_name(leaf)}: give tensors, numbers, "
                "strings and None, in lists, tuples, dicts or dataclasses"
            )
    if not values:
        raise UsageError(f"a golden of {tree!r:.80} would hold no value; give it at least one")
    return Golden(values, {path: kind.name for path, kind in flat.kinds.items()})


def write_golden(path: Path, golden: Golden, test: str) -> None:
    """Write it as a dump, in place of one that is there."""
    header = Header(
        run=run_identity(0, 1),
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        torch=str(torch.__version__),
        paritas=own_version(),
        program=test,
        sources=("file",),
        selection={_CONTAINERS: msgspec.json.encode(golden.containers).decode()},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = DumpWriter(path, header, overwrite=True)
    for sequence, (name, value) in enumerate(golden.values.items()):
        site = Site(source="file", level="tensor", name=name)
        if isinstance(value, torch.Tensor):
            stored = as_stored(value)
            entry = Entry(sequence=sequence, step=0, site=site, tensor=_facts(value), stored=stored)
        else:
            entry = Entry(sequence=sequence, step=0, site=site, value=repr(value))
        writer.add(entry)
    writer.close(header)
    (writer.folder / LOCK).unlink(missing_ok=True)  # a golden goes into a repository


def read_golden(path: Path) -> Golden:
    """Read it back; nothing in it is trusted, and none of it is run.

    Raises:
        UsageError: it is damaged, or was not written to its end.
    """
    dump = Dump.open(path)
    header = dump.header(0)
    if dump.problems or not header.closed:
        why = "; ".join(dump.problems) or "it was not written to its end"
        raise UsageError(f"{path} cannot be used: {why}")
    values: dict[str, Any] = {}
    try:
        classes = msgspec.json.decode(header.selection[_CONTAINERS], type=dict[str, str])
        for record in dump.records():
            is_tensor = record.tensor is not None
            values[record.site.name] = (
                dump.read(record) if is_tensor else ast.literal_eval(record.value or "")
            )
    except _NO_GOLDEN as error:
        raise UsageError(f"{path} is no golden: {type(error).__name__}: {error}") from error
    return Golden(values, classes)


def judge_golden(
    golden: Golden,
    present: Golden,
    checkers: Sequence[ValueChecker] = (AutomaticValueChecker(),),
    *,
    strict: bool = False,
) -> Verdict:
    """Compare what a test has now with what it had: names, containers, dtypes, shapes, values.

    There is no program to measure noise with, so that floats are judged by their dtype alone.
    """
    findings: list[Finding] = []
    notes: list[str] = []
    gone = [path for path in golden.values if path not in present.values]
    new = [path for path in present.values if path not in golden.values]
    if gone or new:
        told = [f"{len(gone)} gone ({_named(gone)})"] if gone else []
        told += [f"{len(new)} new ({_named(new)})"] if new else []
        findings.append(_structure(f"the values have other names: {', '.join(told)}"))
    for path in dict.fromkeys((*golden.containers, *present.containers)):
        if path in golden.values and path not in golden.containers:
            continue  # what a number was, older goldens do not say
        before, now = (side.containers.get(path, "a value") for side in (golden, present))
        if before != now:
            findings.append(_structure(f"{path} is {now} instead of {before}"))
    checks = Checks(checkers=tuple(checkers))
    both = [path for path in golden.values if path in present.values]
    for path in both:
        found, noted = check_pair(path, golden.values[path], present.values[path], checks)
        findings += found
        notes += noted
    unmatched = [f"{path} (golden only)" for path in gone]
    unmatched += [f"{path} (not in the golden)" for path in new]
    return Verdict(
        findings=tuple(findings),
        coverage=Coverage(compared=len(both), unmatched=tuple(unmatched)),
        notes=tuple(notes),
        strict=strict,
    )


def missing_golden(name: str, reason: str) -> Verdict:
    """Nothing to compare with is no pass."""
    found = Finding(
        path=f"golden {name!r}",
        aspect=Aspect.HARNESS,
        status=Status.UNVERIFIED,
        reason=reason,
        advice="run pytest with --paritas-update to write it, look at what it holds (paritas "
        "inspect), and commit it",
    )
    return Verdict(findings=(found,))


def _facts(tensor: torch.Tensor) -> TensorFacts:
    return TensorFacts(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
    )


def _class_name(leaf: Any) -> str:
    return type(leaf.value if isinstance(leaf, Opaque) else leaf).__name__


def _structure(reason: str) -> Finding:
    return Finding(path=_ROOT, aspect=Aspect.STRUCTURE, status=Status.DIFFERENT, reason=reason)


def _named(paths: list[str]) -> str:
    more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
    return f"{', '.join(paths[:_MOST_NAMED])}{more}"
