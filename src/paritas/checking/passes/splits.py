"""A joint graph split in two: the forward graph, then the backward graph on what it saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.draw_keys import draws_of, following_keys
from paritas._torch.frozen import SYMBOLS, FrozenGraph, UnplayableError, may_write
from paritas._torch.replaying import Stream, replay
from paritas.checking.passes.runs import Program, tensors_in
from paritas.numerics.trees import leaves

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.checking.passes.inputs import Inputs
    from paritas.checking.passes.runs import GraphProgram

# The generators that torch hands to both graphs, each to draw what the other draws.
FORWARD_STREAM, BACKWARD_STREAM = "fwd_rng_state", "bwd_rng_state"


class SplitProgram(Program):
    """The two graphs, run as autograd runs them.

    Attributes:
        outputs: how many results of the forward graph are the program's own.
        forward: the forward graph.
        backward: the backward graph.
        drawn_again: nodes of the backward graph that draw what the forward graph drew already:
            they get other numbers.
    """

    def __init__(
        self, joint: GraphProgram, outputs: int, forward: FrozenGraph, backward: FrozenGraph
    ) -> None:
        """`joint` is what was split."""
        super().__init__()
        self.outputs = outputs
        self.forward = forward
        self.backward = backward
        self._keys = following_keys(joint.graph, joint.keys, forward)
        self._backward_keys, self.drawn_again = self._keys_of_backward(joint)
        self._saved = self._saved_positions()

    @property
    def graphs(self) -> tuple[FrozenGraph, ...]:
        """The forward graph, then the backward graph."""
        return (self.forward, self.backward)

    @property
    def returned(self) -> list[Any]:
        """What is returned to the user, then the gradients."""
        forward, backward = ([leaf for _, leaf in leaves(graph.returned)] for graph in self.graphs)
        return [*forward[: self.outputs], *backward]

    def play(self, inputs: Inputs, *, wide: bool) -> tuple[list[Any], dict[str, Tensor]]:
        """Run the forward graph and then the backward graph."""
        streams = [node for node in self.forward.placeholders if FORWARD_STREAM in node.name]
        inputs = inputs.with_values({node.name: Stream(node.name) for node in streams})
        writes = any(map(may_write, self.graphs))
        args = inputs.of(self.forward, wide=wide, copied=writes)
        results = list(replay(self.forward, args, self._keys, wide=wide))
        given = [results[position] for position in self._saved]
        for node in self.backward.placeholders[len(given) :]:
            if BACKWARD_STREAM in node.name:
                given.append(Stream(node.name))
            else:
                given.append(inputs.copy(node.name, wide=wide))
        gradients = replay(self.backward, given, self._backward_keys, wide=wide)
        given_tensors = tensors_in(self.forward, args) if writes else {}
        return [*results[: self.outputs], *gradients], given_tensors

    def _keys_of_backward(self, joint: GraphProgram) -> tuple[dict[str, str], list[str]]:
        drawn = {draw.key for draw in draws_of(self.forward, self._keys)}
        keys = following_keys(joint.graph, joint.keys, self.backward)
        again: list[str] = []
        for draw in draws_of(self.backward, keys):
            if BACKWARD_STREAM in draw.source:
                twin = draw.source.replace(BACKWARD_STREAM, FORWARD_STREAM)
                keys[draw.source] = self._keys.get(twin, twin)
            elif draw.key in drawn:
                keys[draw.source] = f"{draw.key}, drawn again"
                again.append(draw.path)
        return keys, again

    def _saved_positions(self) -> list[int]:
        """Which results of the forward graph the backward graph is given, in its order.

        Autograd keeps numbers apart from tensors and hands them over first.
        """
        returned = [leaf for _, leaf in leaves(self.forward.returned)]
        numbers: list[int] = []
        tensors: list[int] = []
        for position in range(self.outputs, len(returned)):
            value = getattr(returned[position], "meta", {}).get("val")
            kept = numbers if isinstance(value, SYMBOLS) else tensors
            if kept is tensors and not isinstance(value, torch.Tensor):
                message = f"the forward graph saves {returned[position]}, a {type(value).__name__}"
                raise UnplayableError(message)
            kept.append(position)
        saved = [*numbers, *tensors]
        if len(saved) > len(self.backward.placeholders):
            message = "the forward graph saves more than the backward graph takes"
            raise UnplayableError(message)
        return saved
