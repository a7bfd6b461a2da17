"""Traces: what the steps of a training computed, on one device or on one rank, and the hooks.

A rank's trace is made where the rank runs and sent to where it is judged, so it holds tensors on
the host and no other torch objects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from paritas.core.execution.module_hooks import ModuleHooks
from paritas.core.numerics.contents import leaves, map_arguments
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.placement.rank_pieces import RankPiece
from paritas.core.results.items import Shard
from paritas.core.torch_private.tensors import local_part
from paritas.core.torch_private.watching import in_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.autograd.graph import Node

    from paritas.core.execution.block_runs import BlockCall
    from paritas.core.torch_private.ranks import Message


# --- Plain data -----------------------------------------------------------------------------------

INPUT_SIDE, OUTPUT_SIDE = "input", "output"


@dataclasses.dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        name: its path in the model, without the wrappers of a plan (`module.` of DDP).
        kind: the name of its class.
        outputs: path -> output.
        gradients: path of an output -> the gradient that arrived at it; missing if none did.
        input_gradients: path of an input -> the gradient that this call alone sends back to it,
            without that of other readers of the same value.
    """

    name: str
    kind: str
    outputs: dict[str, RankPiece]
    gradients: dict[str, RankPiece] = dataclasses.field(default_factory=dict)
    input_gradients: dict[str, RankPiece] = dataclasses.field(default_factory=dict)

    def back(self, side: str) -> dict[str, RankPiece]:
        """The gradients on one side."""
        return self.input_gradients if side == INPUT_SIDE else self.gradients


@dataclasses.dataclass(frozen=True, order=True)
class ValuePlace:
    """An input or output of a module.

    Attributes:
        call: position of the call in `StepTrace.modules`.
        side: `input` or `output`.
        path: of the tensor within the inputs or outputs.
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
        modules: calls in the order in which they returned, innermost first.
        backward: places in the order in which their gradients arrived.
        sources: place -> the places its gradient comes from; known for the reference only.
        returned: of a piece of a model: path of an input -> the gradient that it sends back to it.
        blocks: block -> its recorded calls, if they were recorded.
    """

    loss: RankPiece | None = None
    outputs: dict[str, RankPiece] = dataclasses.field(default_factory=dict)
    gradients: dict[str, RankPiece | None] = dataclasses.field(default_factory=dict)
    parameters: dict[str, RankPiece] = dataclasses.field(default_factory=dict)
    buffers: dict[str, RankPiece] = dataclasses.field(default_factory=dict)
    modules: list[ModuleCall] = dataclasses.field(default_factory=list)
    backward: list[ValuePlace] = dataclasses.field(default_factory=list)
    sources: dict[ValuePlace, tuple[ValuePlace, ...]] = dataclasses.field(default_factory=dict)
    returned: dict[str, RankPiece] = dataclasses.field(default_factory=dict)
    blocks: dict[str, list[BlockCall]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Trace:
    """All steps of one rank, or of the reference (rank 0 of 1).

    Attributes:
        samples: begin and end of this rank's rows of the batch; None if it has all of them.
        data_rank: which part of the batch that is, out of `data_ranks`.
        initial: parameter or buffer -> value before the first step.
        tied: names of one parameter, of those that have several.
        error: what was raised, in words; the steps before it are there.
        error_at: path of the module in which it was raised, if that is known.
        waited: whether it failed only because it waited for another rank.
        unsupported: whether it ended because such a plan cannot be checked.
        whole_only: whether that is because it cannot be checked by blocks.
        random: whether a step drew random numbers (dropout). Ranks then draw other numbers than
            one device does, even if the plan is right.
        equal: shares values with the other ranks of this process; None if there are none.
        abridge: makes of a parameter, a buffer or a gradient what is kept of it; None keeps it.
        abridge_from: the first step of which less is kept; 0 is before the first.
        uncut: block -> why the model cannot be cut there, if calls of blocks were recorded.
        notes: what is to be said about the plan itself.
        is_fsdp: whether a module of the model is under FSDP, which averages gradients.
        messages: what the rank gave to collectives, if it was asked to listen.
    """

    rank: int = 0
    ranks: int = 1
    samples: tuple[int, int] | None = None
    data_rank: int = 0
    data_ranks: int = 1
    initial: dict[str, RankPiece] = dataclasses.field(default_factory=dict)
    tied: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    steps: list[StepTrace] = dataclasses.field(default_factory=list)
    error: str | None = None
    error_at: str = ""
    waited: bool = False
    unsupported: bool = False
    whole_only: bool = False
    random: bool = False
    equal: EqualPieces | None = None
    abridge: Callable[[str, int, RankPiece], RankPiece] | None = None
    abridge_from: int = 0
    uncut: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    is_fsdp: bool = False
    messages: list[Message] = dataclasses.field(default_factory=list)

    @property
    def is_abridged(self) -> bool:
        """Whether less than everything is kept of the current step."""
        return self.abridge is not None and len(self.steps) >= self.abridge_from

    def keep(self, kind: str, name: str, tensor: Tensor) -> RankPiece:
        """A copy of what the rank holds: before the first step, or after the current one."""
        piece = piece_of(tensor)
        if self.abridge is not None and self.is_abridged:
            piece = self.abridge(name, self.rank, piece)
        return (
            piece
            if self.equal is None
            else self.equal.share_piece((len(self.steps), kind, name), piece)
        )

    def fail(self, error: str, *, waited: bool = False, unsupported: bool = False) -> None:
        """Record why it ended early."""
        self.error = error
        self.waited = waited
        self.unsupported = unsupported


class EqualPieces:
    """Keeps one copy of a value that several ranks of this process hold, such as a replica.

    The values of all ranks, before and after each step, natively and in float64, are many times the
    size of the model.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], list[Tensor]] = {}

    def share_piece(self, key: tuple[Any, ...], piece: RankPiece) -> RankPiece:
        """The piece, with the tensor of another rank if that has the same bits at this place."""
        known_tensors = self._known.setdefault(key, [])
        for tensor in known_tensors:
            if bitwise_equal(tensor, piece.local):
                return dataclasses.replace(piece, local=tensor)
        known_tensors.append(piece.local)
        return piece


# --- The paths of gradients between the inputs and outputs of modules -----------------------------

# The order in which gradients arrive does not show them: of three projections that read one value,
# any may come first, and a fault in one of them does not affect the others.


class Flows:
    """Marks values of a forward pass, and finds which others their gradients come from."""

    def __init__(self) -> None:
        self._marks: dict[tuple[Node, int], list[tuple[list[int], str, str]]] = {}

    def mark(self, tensor: Tensor, call: list[int], side: str, path: str) -> None:
        """Mark a value of a call; `call` holds the number of the call once it has returned."""
        if tensor.grad_fn is not None:
            key = (tensor.grad_fn, tensor.output_nr)
            self._marks.setdefault(key, []).append((call, side, path))

    def clear(self) -> None:
        """Release the graph."""
        self._marks.clear()

    def sources(self) -> dict[ValuePlace, tuple[ValuePlace, ...]]:
        """Place -> the places its gradient comes from; call this before the graph is released.

        Several modules may return the same tensor, a child and the module around it. The gradient
        then reaches the inner one through the outer one.
        """
        source_lists: dict[ValuePlace, list[ValuePlace]] = {}
        chains = {key: self._chain(key) for key in self._marks}
        for key, chain in chains.items():
            for inner, outer in itertools.pairwise(chain):
                source_lists.setdefault(inner, []).append(outer)
            for target in self._next(key):
                if chain and chains[target]:
                    source_lists.setdefault(chains[target][-1], []).append(chain[0])
        return {
            value_place: tuple(dict.fromkeys(places))
            for value_place, places in source_lists.items()
        }

    def _chain(self, key: tuple[Node, int]) -> list[ValuePlace]:
        """The places of one tensor, innermost first; a call that never returned has none."""
        return [ValuePlace(call[0], side, path) for call, side, path in self._marks[key] if call]

    def _next(self, key: tuple[Node, int]) -> list[tuple[Node, int]]:
        """The marked values that a gradient reaches next."""
        next_marked: dict[tuple[Node, int], None] = {}
        met = {key[0]}
        stack = [*key[0].next_functions]
        while stack:
            node, number = stack.pop()
            if node is None:
                continue
            if (node, number) in self._marks:
                next_marked[(node, number)] = None
            elif node not in met:
                met.add(node)
                stack += node.next_functions
        return list(next_marked)


# --- Watching a model while it trains: values as a rank holds them, and calls of modules ----------

# The names under which wrappers keep the module they wrap.
_INNER = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def piece_of(tensor: Tensor) -> RankPiece:
    """A copy on the host of what this rank holds; starts no collective."""
    part = local_part(tensor)
    if part is None:
        return RankPiece(_on_host(tensor))
    return RankPiece(_on_host(part.local), part.placement)


def _on_host(tensor: Tensor) -> Tensor:
    # The copy also waits for a collective that still runs.
    with torch.no_grad():
        return tensor.detach().clone().cpu()


def named_pieces(tree: Any) -> dict[str, RankPiece]:
    """Every tensor of an output by its path."""
    return {path: piece_of(leaf) for path, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)}


@dataclasses.dataclass(frozen=True)
class ModelNames:
    """Names of modules, parameters and buffers, without the wrappers around the user's model.

    Attributes:
        model: the model that runs.
        prefix: the plain name of the user's own model in it.
    """

    model: nn.Module
    prefix: str = ""

    @classmethod
    def within(cls, model: nn.Module, original: nn.Module) -> ModelNames:
        """The names in a model that is, or contains, the user's model."""
        places = (path for path, module in model.named_modules() if module is original)
        return cls(model, plain_name(model, next(places, "")))

    def of(self, path: str) -> str:
        """The plain name of a path of the model."""
        name = plain_name(self.model, path)
        return "" if name == self.prefix else name.removeprefix(f"{self.prefix}.")


def plain_name(model: nn.Module, path: str) -> str:
    """A path in a model without the wrappers of a plan, a compiler or checkpointing."""
    plain_parts: list[str] = []
    module: Any = model
    for part in path.split(".") if path else ():
        wraps = part in _INNER or (part == "module" and isinstance(module, _PARALLEL))
        if not wraps:
            plain_parts.append(part)
        module = getattr(module, part, None)
    return ".".join(plain_parts)


def watched_modules(names: ModelNames) -> dict[str, tuple[nn.Module, str]]:
    """Name -> the outermost module of that name, and the class of the innermost.

    Modules inside a compiled module are left out, since their hooks would be compiled.
    """
    modules_by_name: dict[str, tuple[nn.Module, str]] = {}
    compiled: list[str] = []
    for path, module in names.model.named_modules():
        inside = any(path.startswith(prefix) for prefix in compiled)
        if "_orig_mod" in dict(module.named_children()):
            compiled.append(f"{path}." if path else "")
        name = names.of(path)
        if name in modules_by_name:
            modules_by_name[name] = (modules_by_name[name][0], _kind(module))
        elif not inside and not isinstance(module, torch.jit.ScriptModule):
            modules_by_name[name] = (module, _kind(module))
    return modules_by_name


def _kind(module: nn.Module) -> str:
    """The name of the user's class; FSDP derives its own class from it."""
    module_class = type(module)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # no model uses what was never imported
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        return next(
            (base.__name__ for base in module_class.__bases__ if base is not fsdp.FSDPModule), ""
        )
    return module_class.__name__


def is_fsdp(model: nn.Module) -> bool:
    """Whether a module of the model is under FSDP, of either kind."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    return any(isinstance(module, kinds) for module in model.modules())


class ModuleWatch(ModuleHooks):
    """Hooks on all modules of a model that record which one runs and, if asked, its values.

    They are registered after the plan's own hooks, so they see the final outputs. `error_at` of the
    trace always names the running module, since a rank that never ends cannot report it later.
    """

    def __init__(self, names: ModelNames, trace: Trace, *, keep: int | None = None) -> None:
        """In step `keep`, record outputs and gradients on both sides.

        Only in one step, since all these values together are several times the size of the model.
        """
        watched = watched_modules(names)
        super().__init__({name: module for name, (module, _) in watched.items()})
        self._kinds = {name: kind for name, (_, kind) in watched.items()}
        self._trace = trace
        self._keep = keep
        self._backward = False
        self._flows = Flows()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """During backward, a call of a module is a recomputation, and not recorded."""
        self.forget_calls()
        self._trace.error_at = ""
        self._backward = True
        if self._keeps and self._trace.ranks == 1:
            self._trace.steps[-1].sources = self._flows.sources()
        self._flows.clear()
        try:
            yield
        finally:
            self._backward = False
        self._trace.error_at = ""

    def end_step(self) -> None:
        """Release what belongs to a step that ran its own backward passes."""
        self.forget_calls()
        self._flows.clear()
        self._trace.error_at = ""

    @property
    def _keeps(self) -> bool:
        return self._keep == len(self._trace.steps)

    def enter_call(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_EnteredCall | None, tuple[Any, ...], dict[str, Any]]:
        """Name the running module; in the recorded step, watch for the gradients of its inputs."""
        if self._backward or in_backward():
            return None, args, kwargs
        entered = _EnteredCall(name)
        self._trace.error_at = name
        if not self._keeps:
            return entered, args, kwargs
        input_marker = _Given(self, self._trace.steps[-1], entered)
        return entered, *map_arguments(args, kwargs, input_marker.view_input)

    def leave_call(
        self, name: str, entered: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Name the module that runs on, and record the outputs."""
        if entered is None:
            return
        running = [call.name for call in self.open_calls() if call is not None]
        self._trace.error_at = running[-1] if running else ""
        if self._trace.steps:
            self._note(self._trace.steps[-1], entered, self._kinds[name], result)

    def _note(self, step: StepTrace, entered: _EnteredCall, kind: str, output: Any) -> None:
        if self._keeps:
            entered.position.append(len(step.modules))
            call = ModuleCall(
                entered.name,
                kind,
                named_pieces(output),
                entered.gradients[OUTPUT_SIDE],
                entered.gradients[INPUT_SIDE],
            )
            step.modules.append(call)
        for path, leaf in leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                self.follow(step, entered, OUTPUT_SIDE, path, leaf)

    def follow(
        self, step: StepTrace, entered: _EnteredCall, side: str, path: str, tensor: Tensor
    ) -> None:
        """Record the gradient of a tensor when it arrives."""
        keeps = self._keeps

        def note_arrival(gradient: Tensor) -> None:
            self._trace.error_at = entered.name
            if keeps and entered.position:
                value_place = ValuePlace(entered.position[0], side, path)
                if path not in entered.gradients[side]:
                    step.backward.append(value_place)
                entered.gradients[side][path] = piece_of(gradient)

        tensor.register_hook(note_arrival)
        if keeps and self._trace.ranks == 1:  # the paths are the same on the ranks
            self._flows.mark(tensor, entered.position, side, path)


@dataclasses.dataclass
class _EnteredCall:
    """A call of a module that has not returned yet.

    Attributes:
        position: its number among all calls once it has returned; empty until then.
        gradients: side -> path -> gradient.
    """

    name: str
    position: list[int] = dataclasses.field(default_factory=list)
    gradients: dict[str, dict[str, RankPiece]] = dataclasses.field(
        default_factory=lambda: {INPUT_SIDE: {}, OUTPUT_SIDE: {}}
    )


@dataclasses.dataclass
class _Given:
    """The inputs of a call, with each tensor replaced by a view.

    The gradient of such a view is what this call alone sends back. A tensor that is passed twice
    stays one tensor; containers that the module may write to are kept.
    """

    watch: ModuleWatch
    step: StepTrace
    entered: _EnteredCall
    views: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    def view_input(self, path: str, argument: Tensor) -> Tensor:
        """A view of an input that requires a gradient; any other input as it is."""
        if not (argument.requires_grad and torch.is_grad_enabled()):
            return argument
        if id(argument) not in self.views:
            try:
                view = argument.view_as(argument)
            except (RuntimeError, NotImplementedError):  # this layout has no views
                return argument
            self.views[id(argument)] = view
            self.watch.follow(self.step, self.entered, INPUT_SIDE, path, view)
        return self.views[id(argument)]


# --- Calls of a module for each micro-batch -------------------------------------------------------


def merge_calls(step: StepTrace, microbatches: int | None = None) -> None:
    """Replace the calls of each module, one for each micro-batch, by one on the whole batch.

    A module that was called another number of times is left out.

    Args:
        microbatches: of a pipeline, whose schedule divides gradients by it in the end, and which
            calls each stage once more before the first step, to learn the shapes. None for a step
            of the user's own, which calls the model once for each micro-batch.
    """
    calls: dict[str, list[ModuleCall]] = {}
    for call in step.modules:
        calls.setdefault(call.name, []).append(call)
    count = microbatches or len(calls.get("", ()))
    allowed = (count,) if microbatches is None else (count, count + 1)
    names = [call.name for call in step.modules]
    step.modules[:] = [
        ModuleCall(
            name,
            same_name[0].kind,
            _join_pieces([module_call.outputs for module_call in same_name[-count:]]),
            _join_pieces(
                [module_call.gradients for module_call in same_name[-count:]], microbatches
            ),
            _join_pieces(
                [module_call.input_gradients for module_call in same_name[-count:]], microbatches
            ),
        )
        for name, same_name in calls.items()
        if len(same_name) in allowed
    ]
    numbers = {call.name: number for number, call in enumerate(step.modules)}
    places = [
        (names[value_place.call], value_place)
        for value_place in step.backward
        if names[value_place.call] in numbers
    ]
    merged_places = [
        dataclasses.replace(value_place, call=numbers[name]) for name, value_place in places
    ]
    step.backward[:] = [
        value_place
        for value_place in dict.fromkeys(merged_places)
        if value_place.path in step.modules[value_place.call].back(value_place.side)
    ]


def _join_pieces(
    parts: list[dict[str, RankPiece]], divisor: int | None = None
) -> dict[str, RankPiece]:
    """The tensors of several calls that all of them have, one after the other."""
    joined_pieces: dict[str, RankPiece] = {}
    for path in parts[0]:
        pieces = [part[path] for part in parts if path in part]
        if len(pieces) < len(parts) or not _are_rows(pieces):
            continue
        joined_value = torch.cat([piece.local for piece in pieces])
        joined_value = joined_value if divisor is None else joined_value / divisor
        placement = pieces[0].placement
        if placement is not None and len(pieces) > 1:
            rows = sum(piece.whole_shape[0] for piece in pieces)
            shape = (rows, *placement.global_shape[1:])
            placement = msgspec.structs.replace(placement, global_shape=shape)
        joined_pieces[path] = RankPiece(joined_value, placement)
    return joined_pieces


def _are_rows(pieces: list[RankPiece]) -> bool:
    """Whether tensors are rows of one tensor: they differ in the first dimension at most."""
    if len(pieces) == 1:
        return True
    split = [role for piece in pieces if piece.placement for role in piece.placement.roles]
    if any(isinstance(role, Shard) and role.dim == 0 for role in split):
        return False
    kinds = {
        (piece.whole_shape[1:], piece.local.dtype, piece.placement is None) for piece in pieces
    }
    return len(kinds) == 1 and all(piece.local.dim() > 0 for piece in pieces)
