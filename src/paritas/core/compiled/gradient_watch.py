"""Watching the gradients of one call of compiled code that autograd records.

Nothing that the program sees is changed: neither its outputs, nor what its hooks get.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

from paritas.core.execution.graph_runs import Cotangent
from paritas.core.execution.saved_state import RandomState
from paritas.core.execution.threads import ThreadTimes
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.results.findings import Aspect
from paritas.core.results.items import RANDOM_STATE, Item, ItemKind, after_call, gradient, input_of
from paritas.core.torch_private.watching import backward_pass

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.autograd.graph import Node

    from paritas.core.compiled.guarded_graphs import GuardedCapture
    from paritas.core.execution.graph_runs import CapturedProgram
    from paritas.core.execution.observation import Observation

    # A tensor in autograd's graph: the node that computes its gradient further, and which of the
    # node's outputs it is.
    Edge = tuple[Node, int]

CHANGED = "an output was changed in place after the call"
TWICE = "gradients of gradients may be part of them"
ELSEWHERE = "they reach the inputs by another way than through the outputs"
# Passes that end before the inputs leave what they have noted; so many are kept.
MOST_PASSES = 4


@dataclasses.dataclass
class BackwardPass:
    """What one backward pass has brought so far.

    Attributes:
        totals: position of an output -> its gradient, as the node that computed it gets it.
        inside: position of an output -> the parts of its gradient that come from the code itself.
        untouched: the inputs that nothing has written to since the call, now and before the call.
        rng: the random generators when the first gradient arrived.
        threads: the other threads at that time.
        is_later: whether an earlier pass was itself recorded, so that gradients of that may come.
    """

    untouched: dict[str, tuple[Tensor, Tensor]]
    is_later: bool
    totals: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    inside: dict[int, list[Tensor]] = dataclasses.field(default_factory=dict)
    rng: RandomState = dataclasses.field(default_factory=RandomState.of_torch)
    threads: ThreadTimes = dataclasses.field(default_factory=ThreadTimes.now)

    def cotangents(self) -> dict[int, Cotangent]:
        """The gradients of the outputs."""
        return {
            position: Cotangent(total, tuple(self.inside.get(position, ())))
            for position, total in self.totals.items()
        }

    def besides(self) -> dict[Item, tuple[Aspect, str]]:
        """The side effects of the backward pass, as far as no other thread may have had them."""
        changes = {
            Item(ItemKind.INPUT_AFTER_BACKWARD, name): (
                Aspect.VALUE,
                "the backward pass writes to this input",
            )
            for name, (value, before) in self.untouched.items()
            if not bitwise_equal(value.detach(), before.detach())
        }
        if not self.rng.same_torch(RandomState.of_torch()) and not self.threads.others_ran():
            changes[RANDOM_STATE] = (Aspect.RNG, "the backward pass draws random numbers")
        return changes


class GradientWatch:
    """Watches the gradients of a call's outputs, and those that its code computes for the inputs.

    Inputs that require grad go through an identity function, and its backward gets all their
    gradients at once. The nodes behind the outputs get hooks, which see a gradient after the hooks
    of the program. It is the sum of what the program and the code itself contribute, if that uses
    the output too; the latter comes from nodes of the code, which get hooks as well.

    Inputs that the graph writes to or returns are left out.
    """

    def __init__(self, code: GuardedCapture, program: CapturedProgram) -> None:
        """Watch one call; `program` is its reference."""
        self.code = code
        self.program = program
        self.items: list[Item] = []
        self._given: list[Any] = []
        self._passes: dict[int, BackwardPass] = {}
        # Views among the outputs, detached, with their versions. If one is written to, its gradient
        # takes another way.
        self._views: list[tuple[Tensor, int]] = []
        # Whether a pass was recorded: later gradients may come from its nodes, by any way.
        self._is_recorded = False
        self._unchecked = ""
        self._rng_after: RandomState | None = None

    # --- The forward call ---

    def entering(self, args: list[Any], reference: Observation) -> list[Any]:
        """Return the arguments for the compiled code."""
        if not torch.is_grad_enabled() or reference.error is not None:
            return args
        handed_out = {item for pair in reference.aliases for item in pair}
        positions = []
        names = self.code.reference.inputs
        named_inputs = enumerate(zip(names, (*args, *self.code.reference.held), strict=False))
        for position, (name, value) in named_inputs:
            if not _is_recorded(value):
                continue
            if input_of(name) in handed_out or after_call(name) in reference.after:
                self._leave_out(name, "the graph writes to it or returns it")
            elif position >= len(args):
                self._leave_out(name, "the graph holds it itself, and does not get it as an input")
            else:
                positions.append(position)
        if not positions:
            return args
        self._given = list(args)
        self.items = [gradient(names[position]) for position in positions]
        entering = [args[position] for position in positions]
        replaced = _WatchedIdentity.apply(self, *entering)  # type: ignore[no-untyped-call]
        args = list(args)
        for position, value in zip(positions, replaced, strict=True):
            args[position] = value
        return args

    def _leave_out(self, name: str, why: str) -> None:
        note = f"{self.code.entry.label}: the gradient of {name} is not checked, because {why}"
        self.code.journal.add((), [note])

    def give_up(self, reason: str) -> None:
        """Do not check the gradients of this call."""
        self._unchecked = reason

    def leaving(self, results: Any, entered: list[Any], observation: Observation) -> None:
        """Watch the outputs of a call; `entered` are the arguments of the compiled code."""
        if not self.items:
            return
        self._rng_after = observation.rng_after
        # Autograd's graph is left at the inputs: what is behind them belongs to the program.
        stops = {_edge(value) for value in (*self._given, *entered) if _is_recorded(value)}
        input_edges = {_edge(value) for value in self._given if _is_recorded(value)}
        ends: dict[Edge, int] = {}
        for position, value in enumerate(results):
            if _is_recorded(value) and (edge := _edge(value)) not in input_edges:
                ends.setdefault(edge, position)
                if value._is_view():  # noqa: SLF001  (there is no other way to ask)
                    self._views.append((value.detach(), value._version))  # noqa: SLF001
        # The hooks must not keep nodes alive: these keep the hooks alive.
        for node in {node for node, _ in ends}:
            places = {number: at for (other, number), at in ends.items() if other is node}
            node.register_prehook(functools.partial(self._arrive, places))
        for node, places in _inner_uses(ends, {node for node, _ in stops}).items():
            node.register_hook(functools.partial(self._arrive_inside, places))

    # --- A backward pass ---

    def _current_pass(self) -> BackwardPass:
        """What the current backward pass has brought; the first gradient marks its start."""
        number = backward_pass()
        if number not in self._passes:
            while len(self._passes) >= MOST_PASSES:
                del self._passes[next(iter(self._passes))]
            named = zip(self.code.reference.inputs, self._given, self.program.kept, strict=False)
            untouched = {
                name: (value, before)
                for name, value, before in named
                if isinstance(value, torch.Tensor)
                and bitwise_equal(value.detach(), before.detach())
            }
            self._passes[number] = BackwardPass(untouched, self._is_recorded)
            self._is_recorded |= torch.is_grad_enabled()
        return self._passes[number]

    def _arrive(self, places: dict[int, int], gradients: Iterable[Tensor | None]) -> None:
        """Note the gradients of outputs, by their numbers among the outputs of a node."""
        for number, total in enumerate(gradients):
            if number in places and total is not None:
                self._current_pass().totals[places[number]] = total.detach().clone()

    def _arrive_inside(
        self,
        places: dict[int, int],
        gradients: Iterable[Tensor | None],
        _arrived: Iterable[Tensor | None],
    ) -> None:
        """Note what a node of the code contributes to the gradients of outputs."""
        for number, part in enumerate(gradients):
            if number in places and part is not None:
                inside = self._current_pass().inside
                inside.setdefault(places[number], []).append(part.detach().clone())

    def check(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Compare the gradients of the inputs once all are known."""
        brought = self._passes.pop(backward_pass(), None)
        if all(value is None for value in gradients):
            return gradients
        reason = self._why_unchecked(brought)
        if brought is None or reason:
            backward = self.code.backward
            backward.journal.count_call(backward.entry)
            backward.skip(reason)
            return gradients
        item_gradients = dict(zip(self.items, gradients, strict=True))
        program = dataclasses.replace(self.program, cotangents=brought.cotangents())
        result = self.code.judge_gradients(
            program, item_gradients, brought.besides(), self._rng_after
        )
        return tuple(result.values())

    def _why_unchecked(self, brought: BackwardPass | None) -> str:
        if self._unchecked:
            return self._unchecked
        if brought.is_later if brought is not None else self._is_recorded:
            return TWICE
        if any(view._version != version for view, version in self._views):  # noqa: SLF001
            return CHANGED
        return "" if brought is not None and brought.totals else ELSEWHERE


def _is_recorded(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _edge(tensor: Tensor) -> Edge:
    gradient_edge = get_gradient_edge(tensor)
    return gradient_edge.node, gradient_edge.output_nr


def _inner_uses(ends: dict[Edge, int], stops: set[Node]) -> dict[Node, dict[int, int]]:
    """The nodes behind `ends` that use an end themselves.

    For each, the number among its inputs -> the position of the end.
    """
    uses: dict[Node, dict[int, int]] = {}
    nodes: set[Node] = set(stops)
    waiting = [node for node, _ in ends]
    while waiting:
        node = waiting.pop()
        if node in nodes:
            continue
        nodes.add(node)
        for number, (source, output) in enumerate(node.next_functions):
            if source is None:
                continue
            if (source, output) in ends:
                uses.setdefault(node, {})[number] = ends[source, output]
            waiting.append(source)
    return uses


class _WatchedIdentity(torch.autograd.Function):
    """The identity; its backward passes the gradients to a watch."""

    @staticmethod
    def forward(ctx: Any, watch: GradientWatch, *values: Tensor) -> tuple[Tensor, ...]:
        """Return views."""
        ctx.watch = watch
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the checked gradients."""
        return (None, *ctx.watch.check(gradients))
