"""What a training of a few steps did, on one device or as one rank of several: plain data.

A rank's trace is made where the rank runs and sent to where it is judged, so it holds tensors on
the host and nothing else of torch's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["INPUT", "OUTPUT", "ModuleCall", "Piece", "Place", "StepTrace", "Trace"]

INPUT, OUTPUT = "input", "output"


@dataclasses.dataclass(frozen=True)
class Piece:
    """A value as one rank has it.

    Attributes:
        local: what the rank holds, on the host, a copy.
        placements: of a distributed tensor, one for each axis of its mesh: `shard(0)`, `replicate`,
            `partial(sum)`; None for a plain tensor, which claims nothing about the other ranks.
        mesh: extent of that mesh along each axis.
        mesh_names: the names of those axes, or empty.
        coordinate: where on that mesh the rank is.
        global_shape: shape of the whole; that of `local` for a plain tensor.
        global_offset: where in the whole the local part begins.
    """

    local: Tensor
    placements: tuple[str, ...] | None = None
    mesh: tuple[int, ...] = ()
    mesh_names: tuple[str, ...] = ()
    coordinate: tuple[int, ...] = ()
    global_shape: tuple[int, ...] = ()
    global_offset: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        name: its path in the model, the wrappers of a plan left out (`module.` of DDP).
        kind: its class, for people.
        outputs: path -> what it gave.
        gradients: path of an output -> the gradient that arrived at it; missing if none did.
        input_gradients: path of an input -> the gradient that this call sends back to it; what
            other readers of the same value send back is not in it.
    """

    name: str
    kind: str
    outputs: dict[str, Piece]
    gradients: dict[str, Piece] = dataclasses.field(default_factory=dict)
    input_gradients: dict[str, Piece] = dataclasses.field(default_factory=dict)

    def back(self, side: str) -> dict[str, Piece]:
        """The gradients at one side."""
        return self.input_gradients if side == INPUT else self.gradients


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """A value that a module was given, or gave.

    Attributes:
        call: position of the call in `StepTrace.modules`.
        side: `input` or `output`.
        path: of the tensor in what was given.
    """

    call: int
    side: str
    path: str


@dataclasses.dataclass
class StepTrace:
    """One step: forward, loss, backward, optimizer.

    Attributes:
        loss: a scalar.
        outputs: path -> what the model returned.
        gradients: parameter -> gradient; None where none arrived.
        parameters: parameter -> value after the optimizer's step.
        buffers: buffer -> value after the step.
        modules: calls in the order in which they ended, innermost first.
        backward: places in the order in which gradients arrived there.
        sources: place -> those that its gradient comes from; known of the reference only.
    """

    loss: Piece | None = None
    outputs: dict[str, Piece] = dataclasses.field(default_factory=dict)
    gradients: dict[str, Piece | None] = dataclasses.field(default_factory=dict)
    parameters: dict[str, Piece] = dataclasses.field(default_factory=dict)
    buffers: dict[str, Piece] = dataclasses.field(default_factory=dict)
    modules: list[ModuleCall] = dataclasses.field(default_factory=list)
    backward: list[Place] = dataclasses.field(default_factory=list)
    sources: dict[Place, tuple[Place, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Trace:
    """All steps of one rank, or of the reference (rank 0 of 1).

    Attributes:
        samples: of the whole batch, begin and end of the rows that this rank was given; None where
            it was given all.
        data_rank: which of the parts of the batch that is, and `data_ranks` how many there are.
        initial: parameter or buffer -> value before the first step.
        error: what was raised, in words; the steps before it are there.
        error_at: path of the module in which it was raised, if that is known.
        collectives: what was sent around, in order, `all_reduce sum [4, 8]`, as far as it was seen.
        random: whether random numbers were drawn in a step (dropout): ranks then draw others than
            one device does, however right the plan is.
    """

    rank: int = 0
    ranks: int = 1
    samples: tuple[int, int] | None = None
    data_rank: int = 0
    data_ranks: int = 1
    initial: dict[str, Piece] = dataclasses.field(default_factory=dict)
    steps: list[StepTrace] = dataclasses.field(default_factory=list)
    error: str | None = None
    error_at: str = ""
    collectives: list[str] = dataclasses.field(default_factory=list)
    random: bool = False
