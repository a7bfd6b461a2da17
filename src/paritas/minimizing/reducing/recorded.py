"""The values that a program has inside when its reference runs, as each operator was given them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Interpreter, Node

if TYPE_CHECKING:
    from paritas.minimizing.programs import Program

__all__ = ["Recorded", "record"]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What an eager run of a program saw.

    Attributes:
        given: node -> the nodes it reads, each with its value at that time; an operator that
            writes to its input makes it another one for those after it.
        made: node -> its value.
    """

    given: dict[Node, dict[Node, Any]]
    made: dict[Node, Any]


def record(program: Program) -> Recorded:
    """Run the reference operator by operator and keep every value.

    Raises what the program raises.
    """
    recorder = _Recorder(program.graph)
    inputs = [recorder.copy(value) for value in program.inputs]
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(program.gradients):
        torch.manual_seed(program.seed)
        recorder.run(*inputs)
    return Recorded(recorder.given, recorder.made)


class _Recorder(Interpreter):
    """Keeps one copy of each version of each tensor."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.given: dict[Node, dict[Node, Any]] = {}
        self.made: dict[Node, Any] = {}
        # The tensor itself is held too: its id would be given to another one otherwise.
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def run_node(self, n: Node) -> Any:
        """Note what goes in, run, note what comes out."""
        self.given[n] = {node: self._snapshot(self.env[node]) for node in n.all_input_nodes}
        result = super().run_node(n)
        if n.op != "output":
            self.made[n] = self._snapshot(result)
        return result

    @staticmethod
    def copy(value: Any) -> Any:
        """A copy that the run may write to, as code does to what is no leaf."""
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)

    def _snapshot(self, value: Any) -> Any:
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            return tuple(self._snapshot(item) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        version = 0 if value.is_inference() else value._version  # noqa: SLF001  (no other counter)
        key = (id(value), version)
        if key not in self._copies:
            copied = value.detach().clone()
            if value.requires_grad and copied.is_floating_point() | copied.is_complex():
                copied.requires_grad_()
            self._copies[key] = (value, copied)
        return self._copies[key][1]
