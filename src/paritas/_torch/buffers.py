"""Every tensor that Inductor's fused code materialises, heard of as the code runs.

A graph is compiled once more, with the fusion it has, and its generated Python calls a listener
before each kernel with what it reads, and after it with what it wrote.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch

from paritas._torch.buffer_nodes import Lineage, Naming
from paritas._torch.inductor import compile_again
from paritas._torch.passes import telling
from paritas._torch.wrapper_lines import Lines, written_into
from paritas.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paritas._torch.inductor import LoweredGraph

Side = Literal["input", "output"]

# One Python function with the graph's kernels in it, which no cache knows.
_PLAINLY = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "cpp_wrapper": False,
    "graph_partition": False,
    "memory_planning": False,
}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A tensor in the memory of the compiled code.

    Attributes:
        name: Inductor's name for it, for example `buf3`; an input of the graph has its own.
        kernel: what writes it; "" for an input or a constant.
        nodes: the nodes of the graph that it stands for, in their order: what is computed inside
            of its kernel on the way to it.
        exact: the node whose very value it holds, None where that is not known.
        reads: names of the buffers that its kernel reads.
    """

    name: str
    kernel: str = ""
    nodes: tuple[str, ...] = ()
    exact: str | None = None
    reads: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A call of the compiled code.

    Attributes:
        name: of the kernel or operator.
        nodes: the nodes of the graph that are computed inside of it.
        reads: what it reads, as it was before.
        writes: what there is once it has run.
        unseen: names of buffers that it wrote and then overwrote itself.
    """

    name: str
    nodes: tuple[str, ...]
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    unseen: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Seen:
    """A tensor at the moment it is read or was written; only valid during the call.

    Attributes:
        position: which one of what the kernel reads or writes.
    """

    kernel: Kernel
    buffer: Buffer
    side: Side
    position: int
    tensor: Tensor


@dataclasses.dataclass(frozen=True)
class ListeningCode:
    """A compiled graph that tells of its buffers; call it like any compiled graph.

    Attributes:
        code: the compiled graph.
        kernels: what it runs, in order.
        missed: names of buffers that are used, but by code that could not be looked into.
        ear: what hears for it.
    """

    code: Callable[[list[Any]], Sequence[Any]]
    kernels: tuple[Kernel, ...]
    missed: tuple[str, ...]
    ear: _Ear

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run it, with arguments in a list that it empties."""
        return self.code(args)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All that the kernels write, in the order of that."""
        return tuple(buffer for kernel in self.kernels for buffer in kernel.writes)


class _Ear:
    """Held by the compiled callable alone: generated modules live as long as the process."""

    def __init__(self, listener: Callable[[Seen], None]) -> None:
        self.listener = listener
        self.kernels: tuple[Kernel, ...] = ()

    def hear(self, index: int, side: Side, tensors: tuple[Any, ...]) -> None:
        kernel = self.kernels[index]
        buffers = kernel.reads if side == "input" else kernel.writes
        for position, (buffer, tensor) in enumerate(zip(buffers, tensors, strict=True)):
            if isinstance(tensor, torch.Tensor):
                self.listener(Seen(kernel, buffer, side, position, tensor))


_ears: weakref.WeakValueDictionary[str, _Ear] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def hook(key: str) -> Callable[[int, Side, tuple[Any, ...]], None]:
    """What generated code calls; found by the key that is written into it."""
    return functools.partial(_tell, key)


def _tell(key: str, index: int, side: Side, tensors: tuple[Any, ...]) -> None:
    ear = _ears.get(key)
    if ear is not None:
        ear.hear(index, side, tensors)


def compile_listening(
    lowered: LoweredGraph,
    listener: Callable[[Seen], None],
    options: dict[str, Any] | None = None,
) -> ListeningCode:
    """Compile a graph once more, so that it tells of every buffer it reads and writes.

    For use while the program runs, as `compile_again`. Fusion and the reuse of memory are those of
    the graph's own code.
    """
    key = f"graph {next(_numbers)}"
    ear = _Ear(listener)
    _ears[key] = ear
    lines = Lines(key)
    lineage = Lineage(lowered.module)
    with telling(lineage), written_into(lines):
        code = compile_again(lowered, {**(options or {}), **_PLAINLY})
    if lines.wrappers == 0 or lineage.rewritten is None:
        message = (
            f"torch {torch.__version__} compiled a graph without its code being seen; the buffers "
            "of fused code cannot be recorded with it, but source='fx' can"
        )
        raise UnsupportedTorchError(message)
    ear.kernels = _kernels(lines, lineage)
    return ListeningCode(code, ear.kernels, tuple(lines.missed), ear)


def _kernels(lines: Lines, lineage: Lineage) -> tuple[Kernel, ...]:
    naming = Naming(lineage, lines)
    known = {name: Buffer(name, "", (node,), node) for name, node in lineage.given().items()}
    result = []
    for unit in lines.units:
        reads = tuple(known.get(held.name) or Buffer(held.name) for held in unit.reads)
        names = tuple(buffer.name for buffer in reads)
        whole = naming.of_kernel(unit)
        writes = tuple(
            Buffer(held.name, unit.kernel, standing.nodes, standing.exact, names)
            for held, standing in zip(unit.writes, naming.name(unit), strict=True)
        )
        known |= {buffer.name: buffer for buffer in writes}
        unseen = tuple(held.name for held in unit.unseen)
        result.append(Kernel(unit.kernel, whole, reads, writes, unseen))
    return tuple(result)
