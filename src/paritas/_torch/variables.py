"""The variables of Inductor's generated Python: which tensor each holds, line by line."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch._inductor.virtualized import V

from paritas.errors import UnsupportedTorchError


@dataclasses.dataclass(frozen=True)
class Held:
    """A tensor that a kernel reads or writes.

    Attributes:
        name: Inductor's name; where a kernel writes into another's memory, a name of its own.
        variable: the buffer in whose memory it lies.
        ir: Inductor's description of what wrote it, or None where it is read.
        place: Inductor's description of the memory, where that is another's.
    """

    name: str
    variable: str
    ir: Any = None
    place: Any = None


class Names:
    """The variables of a generated function, followed from line to line.

    Attributes:
        given: inputs and constants.
        made: all that were assigned so far.
        gone: those that were deleted, to what has their memory now.
    """

    def __init__(self, wrapper: Any) -> None:
        """`wrapper` is the function, whose graph is the one in force."""
        self.wrapper = wrapper
        self.given = {*V.graph.graph_inputs, *V.graph.constants}
        self.made: set[str] = set(self.given)
        self.gone: dict[str, str | None] = {}

    def follow(self, line: Any) -> None:
        """Take note of what a line makes and frees."""
        kinds = line_kinds()
        if isinstance(line, kinds.allocate):
            self._make(line.node)
        elif isinstance(line, kinds.reuse):
            self._make(line.reused_as)
            if line.delete_old:
                self.gone[line.node.get_name()] = line.reused_as.get_name()
        elif isinstance(line, kinds.reinterpret):
            self._make(line.reused_as)
        elif isinstance(line, kinds.free) or (
            isinstance(line, kinds.free_unless_reused) and not line.is_reused
        ):
            self.gone[line.node.get_name()] = None

    def _make(self, buffer: Any) -> None:
        self.made.add(buffer.get_name())
        self.gone.pop(buffer.get_name(), None)

    def expression(self, held: Held) -> str | None:
        """Python for the tensor, or None if its memory is another's by now."""
        name = held.variable
        if name in V.graph.removed_buffers or name not in self.made:
            return None
        if name not in self.gone:
            return name
        # Its memory was given to what the coming kernel writes, which has not run yet.
        heir = self.gone[name]
        while heir is not None and heir in self.gone:
            heir = self.gone[heir]
        buffer = find_buffer(name)
        if heir is None or buffer is None or held.ir is not None:
            return None
        size, stride = (
            self.wrapper.codegen_shape_tuple(tuple(extent))
            for extent in (buffer.get_size(), buffer.get_stride())
        )
        return f"reinterpret_tensor({heir}, {size}, {stride}, 0)"


def never_stored() -> set[str]:
    """Buffers that live and die inside a kernel, though memory may have been set aside for them."""
    return {*V.graph.removed_buffers, *V.graph.inplaced_to_remove}


def find_buffer(name: str) -> Any:
    """Inductor's description of a buffer, an input or a constant."""
    buffer: Any = V.graph.try_get_buffer(name)
    while hasattr(buffer, "data") and not hasattr(buffer, "layout"):
        buffer = buffer.data
    return buffer


def is_tensor(buffer: Any) -> bool:
    from torch._inductor import ir

    if buffer is None or isinstance(buffer, torch.Tensor):
        return buffer is not None
    layout = getattr(buffer, "layout", None)
    return isinstance(layout, ir.Layout) and not isinstance(
        layout, ir.NoneLayout | ir.MultiOutputLayout
    )


@dataclasses.dataclass(frozen=True)
class LineKinds:
    """The classes of lines."""

    call: Any
    allocate: Any
    reuse: Any
    reinterpret: Any
    free: Any
    free_unless_reused: Any
    silent: tuple[type, ...]


@functools.cache
def line_kinds() -> LineKinds:
    from torch._inductor.codegen import wrapper
    from torch._inductor.utils import LineContext

    try:
        return LineKinds(
            call=wrapper.KernelCallLine,
            allocate=wrapper.AllocateLine,
            reuse=wrapper.ReuseLine,
            reinterpret=wrapper.ReinterpretLine,
            free=wrapper.FreeLine,
            free_unless_reused=wrapper.FreeIfNotReusedLine,
            silent=(
                wrapper.MemoryPlanningLine,
                wrapper.FreeLine,
                wrapper.CommentLine,
                wrapper.KernelDefinitionLine,
                wrapper.EnterDeviceContextManagerLine,
                wrapper.ExitDeviceContextManagerLine,
                LineContext,
            ),
        )
    except AttributeError as error:
        message = f"torch {torch.__version__} writes other lines than paritas knows: {error}"
        raise UnsupportedTorchError(message) from error
