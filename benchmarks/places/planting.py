"""What can be planted in a model, source by source, in an order that a hash decides."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.places import models, passes
from benchmarks.places.passes import PLAN, Plan, Survey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.places.calls import Fault
    from benchmarks.places.claims import Claims
    from benchmarks.places.passes import Seen

DEVICE = "PLACES_DEVICE"


@dataclasses.dataclass(frozen=True)
class Truth:
    """Where a fault is.

    Attributes:
        nodes: the nodes that are wrong; one unless a pass plants in several.
        operators: what they call.
        sources: their lines, `file:line`.
        modules: the paths of their modules.
        backward: whether it is in the backward pass.
    """

    nodes: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    backward: bool = False


@dataclasses.dataclass(frozen=True)
class Planted:
    """A fault in a model.

    Attributes:
        source: how it was planted.
        fault: its name.
        truth: where it is.
        kinds: the kinds that name it; None if that is not asked.
        loose: kinds that are true and say less.
        candidate: makes what is verified; a compiled model, or another one.
        backend: what compiled it, if something did.
        setting: variables of the environment.
    """

    source: str
    fault: str
    truth: Truth
    kinds: tuple[str, ...] | None
    loose: tuple[str, ...]
    candidate: Callable[[], Any]
    backend: Callable[..., Any] | str | None = None
    setting: tuple[tuple[str, str], ...] = ()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """With its settings in the environment."""
        before = {name: os.environ.get(name) for name, _ in self.setting}
        os.environ.update(self.setting)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def digest(*words: Any) -> int:
    """A number that depends on the words only."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, words)).encode()).digest()[:6], "big")


class Subject:
    """A model that faults are planted in; with claims, only those that are free."""

    def __init__(self, name: str, half: str, claims: Claims | None = None) -> None:
        self.name, self.half, self.claims = name, half, claims
        self.model, self.inputs = models.build(name, os.environ.get(DEVICE, "cpu"))

    @property
    def faults(self) -> dict[str, Fault]:
        """Those of its half."""
        return passes.faults_of(self.half)

    def is_free(self, fault: str) -> bool:
        """Whether a fault may be planted here."""
        return self.claims is None or self.claims.is_free(fault)

    def take(self, fault: str) -> bool:
        """Plant it, unless another process was faster."""
        return self.claims is None or self.claims.take(fault)

    @functools.cache  # noqa: B019  (as long as the process)
    def survey(self, level: str) -> Survey:
        """All calls of the model, forward and backward."""
        torch.compiler.reset()
        survey = Survey(level)
        backpropagate(torch.compile(self.model, backend=survey), self)
        self.model.zero_grad(set_to_none=True)
        torch.compiler.reset()
        return survey

    @functools.cache  # noqa: B019
    def fitting(self, level: str, fault: str) -> list[Seen]:
        """The calls that a fault fits."""
        return passes.fitting(self.survey(level).seen, self.faults[fault])


def backpropagate(
    program: Callable[..., Any], subject: Subject
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Call a program and go back through it; its results, and the gradients of the model.

    A candidate with parameters of its own leaves the gradients of the model as they are: none.
    """
    args, kwargs = subject.inputs.args, subject.inputs.kwargs
    subject.model.zero_grad(set_to_none=True)
    found = program(*args, **kwargs)
    outputs = [
        value for value in torch.utils._pytree.tree_leaves(found)  # noqa: SLF001, TID251
        if isinstance(value, torch.Tensor)
    ]  # fmt: skip
    floats = [value for value in outputs if value.is_floating_point() and value.requires_grad]
    draw = torch.Generator().manual_seed(1)
    total = sum(
        (value * torch.randn(value.shape, generator=draw, dtype=value.dtype).to(value.device)).sum()
        for value in floats
    )
    if floats:
        total.backward()
    gradients = [p.grad for p in subject.model.parameters() if p.grad is not None]
    return [value.detach().clone() for value in outputs], [one.clone() for one in gradients]


def in_turn(
    subject: Subject, groups: dict[str, list[Any]], seed: str, fits: Callable[[str, Any], bool]
) -> Iterator[tuple[str, Any]]:
    """One of each group in turn, groups and members in the order of a hash.

    A member is a key and a value; whether a value fits is asked when its turn comes.
    """

    def queue(name: str) -> Iterator[Any]:
        order = sorted(groups[name], key=lambda one: digest(seed, name, one[0]))
        return (value for _, value in order if subject.is_free(name) and fits(name, value))

    queues = {name: queue(name) for name in sorted(groups, key=lambda name: digest(seed, name))}
    while queues:
        for name in list(queues):
            value = next(queues[name], None)
            if value is None:
                del queues[name]
            else:
                yield name, value


# --- A compiler pass ------------------------------------------------------------------------------


def by_pass(subject: Subject, level: str, way: str) -> Iterator[Planted]:
    """Faults of a backend that edits the graph of a level."""
    calls = subject.survey(level).seen
    groups: dict[str, list[Any]] = {}
    for name, fault in subject.faults.items():
        groups[name] = [
            (number, one)
            for number, one in enumerate(calls)
            if one.node.operator in fault.operators
        ]

    def fits(name: str, one: Seen) -> bool:
        return bool(passes.fitting([one], subject.faults[name]))

    seed = f"{subject.name} {level} {way}"
    if way == "place":
        choices = ((name, [one]) for name, one in in_turn(subject, groups, seed, fits))
    else:
        once = {name: [(0, name)] for name, group in groups.items() if group}
        names = in_turn(subject, once, seed, lambda *_: True)
        choices = ((name, _everywhere(subject, level, way, name)) for name, _ in names)
    for name, seen in choices:
        if not seen:
            continue
        fault = subject.faults[name]
        plan = Plan(subject.half, name, level, way, seen[0].node)
        truth = Truth(
            tuple(dict.fromkeys(one.node.captured for one in seen)),
            tuple(dict.fromkeys(one.node.operator for one in seen)),
            tuple(dict.fromkeys(one.source for one in seen)),
            tuple(dict.fromkeys(one.module for one in seen)),
            all(one.node.backward for one in seen),
        )
        yield Planted(
            f"pass, {level}, {way}",
            name,
            truth,
            tuple(sorted(fault.kinds)),
            tuple(sorted(fault.loose)),
            lambda: torch.compile(subject.model, backend=passes.faulty),
            passes.faulty,
            ((PLAN, plan.to_text()),),
        )


def _everywhere(subject: Subject, level: str, way: str, fault: str) -> list[Seen]:
    """The calls that a pass without a place plants in."""
    seen = subject.fitting(level, fault)
    if way == "every" or (seen and seen[0].node.backward):
        # In a backward pass: alone, each of them is the first, and this compiler gets it wrong.
        return seen
    return list({one.graph: one for one in reversed(seen)}.values())[::-1]


SOURCES: dict[str, Callable[[Subject], Iterator[Planted]]] = {
    f"pass {level} {way}": functools.partial(by_pass, level=level, way=way)
    for level in ("captured", "lowered")
    for way in ("place", "first", "every")
}
