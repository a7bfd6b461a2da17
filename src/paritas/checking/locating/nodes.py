"""The first node whose own result is wrong although its inputs are right.

The graph is compiled once more with every value as an output. Each node is then judged alone: its
operator, run on the values that the compiled code itself had for the inputs, natively and in
float64, against the value that the compiled code had for the result.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from paritas._torch.graphs import (
    as_traced,
    is_undefined,
    node_draws,
    node_traits,
    placeholders,
)
from paritas._torch.random_twins import draws_by_inductor
from paritas._torch.selecting import ONLY_MARKED, with_compiled
from paritas._torch.tapping import tapped
from paritas.checking.evidence import ItemEvidence
from paritas.checking.explaining import Explainer, call_context
from paritas.checking.guarding.graph_runs import copy_argument
from paritas.checking.locating.variants import Variant, run_variant, shows_it
from paritas.checking.noise import is_inexact
from paritas.checking.origins import node_origin
from paritas.checking.value_runs import VALUE, ValueRuns
from paritas.numerics.metrics import bitwise_equal
from paritas.numerics.pairing import Checks, check_pair
from paritas.recording.isolation import Copier

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.checking.guarding.lowered import Suspect
    from paritas.numerics.findings import Finding

_CHECKS = Checks()


@dataclasses.dataclass(frozen=True)
class Tapping:
    """What tapping a graph showed.

    Attributes:
        findings: about nodes whose own result is wrong, in the order of the graph.
        shows: whether the tapped program still differs.
        changed: whether tapping changed the bits of any output.
        error: why it could not be tapped, or "".
    """

    findings: list[Finding]
    shows: bool
    changed: bool
    error: str = ""


def tap(suspect: Suspect) -> Tapping:
    """Compile with every value as an output and look for wrong nodes."""
    module, names = tapped(suspect.lowered.module)
    variant = run_variant(suspect, module)
    if variant.error is not None:
        text = str(variant.error).strip().splitlines()
        error = f"{type(variant.error).__name__}: {text[0]:.100}" if text else "it raised"
        return Tapping([], shows=False, changed=False, error=error)
    values = dict(zip(names, variant.extra, strict=True))
    findings = list(_wrong_nodes(suspect, values, variant))
    return Tapping(findings, shows_it(suspect, variant), _changed(suspect, variant))


def is_wrong_alone(suspect: Suspect, name: str) -> bool:
    """Whether a node is wrong even if nothing but it is compiled; so it is taken if that fails."""
    module, names = tapped(with_compiled(suspect.lowered.module, {name}))
    variant = run_variant(suspect, module, ONLY_MARKED)
    if variant.error is not None:
        return True
    values = dict(zip(names, variant.extra, strict=True))
    found = _wrong_nodes(suspect, values, variant)
    return any(finding.origin is not None and finding.origin.name == name for finding in found)


def _changed(suspect: Suspect, variant: Variant) -> bool:
    for name, value in suspect.candidate.outputs.items():
        other = variant.seen.outputs.get(name)
        if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
            continue
        if value.shape != other.shape or not bitwise_equal(value.detach(), other.detach()):
            return True
    return False


def _wrong_nodes(suspect: Suspect, values: dict[str, Any], variant: Variant) -> list[Finding]:
    module = suspect.runs.reference.module
    traced = {node.name: node for node in suspect.lowered.module.graph.nodes}
    table: dict[Node, Any] = dict(zip(placeholders(module), suspect.runs.kept, strict=True))
    findings = []
    for node in module.graph.nodes:
        if node.op == "get_attr":
            table[node] = _attribute(module, node.target)
        elif node.op == "call_function" and _is_write(node):
            findings += _named(traced[node.name], _check_write(suspect, node, table, variant))
        elif node.op == "call_function":
            own = values.get(node.name)
            table[node] = own if node.name in values else _evaluated(node, table)
            if not isinstance(own, torch.Tensor) or is_undefined(traced[node.name]):
                continue
            if not _draws(node):
                path, seed = f"{suspect.label}: node {node.name}", suspect.runs.seed
                found = judge_node(node, table, own, path=path, seed=seed)
                findings += _named(traced[node.name], found)
    return findings


def judge_node(
    node: Node, table: dict[Node, Any], own: torch.Tensor, *, path: str, seed: int
) -> list[Finding]:
    """Judge the value that other code had for a node, by the node run alone.

    Args:
        node: of the reference.
        table: what the other code had for every node that this one reads.
        own: what it had for this one.
        path: what the findings are called by.
        seed: of the perturbations.

    Returns:
        What was found, with a diagnosis where it is wrong; nothing if it cannot be run alone.
    """
    runs = NodeRuns(node, table, seed)
    reference = runs.native[0].outputs.get(VALUE)
    if not isinstance(reference, torch.Tensor):
        return []
    evidence = ItemEvidence(runs, VALUE)
    found, _ = check_pair(path, reference.detach(), own.detach(), _CHECKS, evidence)
    if all(finding.status.passes() for finding in found):
        return found
    context = call_context(runs.parent.target, runs.args, runs.kwargs)
    return Explainer().explain(found, reference.detach(), own.detach(), evidence, context)


def _check_write(
    suspect: Suspect, node: Node, table: dict[Node, Any], variant: Variant
) -> list[Finding]:
    """An input written to at the end has to hold the value that was computed for it."""
    target, source = node.args[0], node.args[1] if len(node.args) > 1 else None
    inputs = placeholders(suspect.runs.reference.module)
    table[node] = table.get(source) if isinstance(source, Node) else None
    value = table[node]
    plain = str(node.target) == "aten.copy_.default" and isinstance(target, Node)
    if not plain or target not in inputs or not isinstance(value, torch.Tensor):
        return []
    after = variant.given[inputs.index(target)]  # type: ignore[arg-type]
    wanted = value.to(after.dtype).expand(after.shape)
    if bitwise_equal(after.detach(), wanted.detach().contiguous()):
        return []
    found, _ = check_pair(
        f"{suspect.label}: node {node.name}", wanted.detach(), after.detach(), _CHECKS
    )
    return found


def _named(node: Node, found: list[Finding]) -> list[Finding]:
    """The findings that do not pass, with where their node comes from."""
    bad = [finding for finding in found if not finding.status.passes()]
    if not bad:
        return []
    worst = max(bad, key=lambda finding: finding.status.gravity)
    where = node_origin(node)
    told = f"starts here: {where.operator} gives a wrong result for right inputs; {worst.reason}"
    return [msgspec.structs.replace(worst, reason=told, source=where.source or None, origin=where)]


class NodeRuns(ValueRuns):
    """The runs of a single operator on given inputs."""

    def __init__(self, node: Node, table: dict[Node, Any], seed: int) -> None:
        """`table` holds the value of every node before this one."""
        self.node = node
        parent, self.item = node, None
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            parent, self.item = node.args[0], node.args[1]
        self.parent = parent
        self.args = map_arg(parent.args, table.__getitem__)
        self.kwargs = map_arg(parent.kwargs, table.__getitem__)
        super().__init__([], self._dtypes(), seed)
        # What a compiler fuses it need not round between two operators.
        self.shake_inputs = True
        self.native = self.run_reference()

    def prepare(self, *, wide: bool) -> Callable[[], Any]:
        """Run the operator once more."""
        copier = Copier(widen=wide)
        copies = wide or _is_write(self.parent)
        args = _copied(copier, self.args) if copies else self.args
        kwargs = _copied(copier, self.kwargs) if copies else self.kwargs

        def run() -> Any:
            result = self.parent.target(*args, **kwargs)  # type: ignore[operator]
            return result if self.item is None else result[self.item]

        return run

    def _dtypes(self) -> dict[torch.dtype, int]:
        counts: dict[torch.dtype, int] = {}
        values = [self.args, self.kwargs, self.node.meta.get("val")]
        for tensor in _tensors(values):
            if is_inexact(tensor):
                counts[tensor.dtype] = counts.get(tensor.dtype, 0) + 1
        return counts


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _copied(copier: Copier, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(copier, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(copier, item) for item in value)
    return copy_argument(copier, value)


def _evaluated(node: Node, table: dict[Node, Any]) -> Any:
    """A value that was not tapped: sizes, tuples."""
    try:
        with as_traced():
            args = map_arg(node.args, table.__getitem__)
            kwargs = map_arg(node.kwargs, table.__getitem__)
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # noqa: BLE001  (nodes that need it cannot be judged)
        return None


def _attribute(module: torch.nn.Module, target: Any) -> Any:
    value: Any = module
    for part in str(target).split("."):
        value = getattr(value, part)
    return value


def _is_write(node: Node) -> bool:
    kind = node_traits(node)
    return kind is not None and bool(kind.mutates)


def _draws(node: Node) -> bool:
    """Seeds and draws from torch's own generators cannot be drawn again alone."""
    target: Any = node.target
    if draws_by_inductor(target):
        return "seeds" in getattr(target, "__name__", str(target))
    return node_draws(node)
