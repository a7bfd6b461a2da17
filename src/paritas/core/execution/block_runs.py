"""Runs of a whole model that record the calls of its blocks.

While a model runs natively, hooks record what each call of a block gets and returns and, in the
backward pass, the gradients that flow through it. What waits to be checked waits in the memory of
the host.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any, Self

import torch

from paritas.core.execution.module_hooks import ModuleHooks
from paritas.core.execution.observation import INPUT, OUTPUT, Observation
from paritas.core.execution.saved_state import Copier, RandomState, Surroundings
from paritas.core.execution.subjects import Inputs
from paritas.core.numerics.contents import (
    contents,
    leaves,
    map_arguments,
    map_in_tuples,
    map_leaves,
)
from paritas.core.numerics.flattening import flatten_value, is_dense
from paritas.core.results.items import Item, gradient, output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor, nn

    from paritas.core.execution.other_arguments import OtherArguments

# --- Values that wait -----------------------------------------------------------------------------


class Parked:
    """A copy of a tensor that waits on the host until it is needed on its device."""

    __slots__ = ("_device", "_shape", "_value")

    def __init__(self, tensor: Tensor) -> None:
        """Copy it; an expanded tensor is copied once and expanded again."""
        self._device, self._shape = tensor.device, tensor.shape
        plain = tensor.detach()
        if is_dense(plain):
            for axis, (size, stride) in enumerate(zip(plain.shape, plain.stride(), strict=True)):
                plain = plain.narrow(axis, 0, 1) if stride == 0 and size > 1 else plain
        copied = Copier().copy_tensor(plain) if not is_dense(plain) else plain.clone()
        self._value = copied.to("cpu").requires_grad_(tensor.requires_grad)

    def on_host(self) -> Tensor:
        """The copy itself; an expanded axis has one element."""
        return self._value

    def back(self) -> Tensor:
        """The tensor, on its device; it may share memory with this copy."""
        value = self._value.detach().to(self._device)
        value = value.expand(self._shape) if value.shape != self._shape else value
        return value.requires_grad_(self._value.requires_grad)


class ParkedTensors:
    """Parks tensors; a tensor that many blocks get, such as a mask, is parked once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Parked]] = {}

    def park(self, tensor: Tensor) -> Parked:
        """The copy of a tensor as it is now."""
        version = version_of(tensor)
        cached_entry = self._known.get(id(tensor))
        if (
            cached_entry is not None
            and cached_entry[0]() is tensor
            and cached_entry[1] == version >= 0
        ):
            return cached_entry[2]
        parked = Parked(tensor)
        self._known[id(tensor)] = weakref.ref(tensor), version, parked
        return parked


def bring_back(tree: Any) -> Any:
    """Nested values with parked tensors on their devices."""
    return map_leaves(tree, lambda leaf: leaf.back() if isinstance(leaf, Parked) else leaf)


def left_on_host(tree: Any) -> Any:
    """Nested values with parked tensors as they wait, to look at the structure only."""
    return map_leaves(tree, lambda leaf: leaf.on_host() if isinstance(leaf, Parked) else leaf)


def version_of(tensor: Tensor) -> int:
    """The number of in-place writes to a tensor; -1 for an inference tensor, which counts none."""
    return -1 if tensor.is_inference() else int(tensor._version)  # noqa: SLF001


# --- Recording ------------------------------------------------------------------------------------


@dataclasses.dataclass
class BlockCall:
    """One call of a block in the reference's own run.

    Attributes:
        name: the block.
        number: which of its calls, from 0.
        args: its parked positional arguments.
        kwargs: its parked keyword arguments.
        around: the modes of torch around it.
        draws: the state of the random generators before and after.
        buffers: its parked buffers before, if it was called before.
        result: what it returned, parked.
        upstream: output -> its upstream gradient, parked.
        returned: (0 for positional or 1 for keyword, path) -> the gradient that it computes for
            that argument, parked; known once it has run alone.
        others: the arguments that the candidate passes in another form, parked.
    """

    name: str
    number: int
    args: list[Any]
    kwargs: dict[str, Any]
    around: Surroundings
    draws: tuple[RandomState, RandomState]
    buffers: dict[str, Any]
    result: Any = None
    upstream: dict[Item, Parked] = dataclasses.field(default_factory=dict)
    returned: dict[tuple[int, str], Parked] = dataclasses.field(default_factory=dict)
    others: OtherArguments | None = None

    @property
    def is_random(self) -> bool:
        """Whether it drew random numbers."""
        return not self.draws[0].same_torch(self.draws[1])

    def keep_returned(self, native: Observation) -> None:
        """Keep the gradients of its arguments, from a run of the block alone."""
        for tree_index, tree in enumerate((self.args, self.kwargs)):
            for path, _ in leaves(tree):
                value = native.gradients.get(gradient(f"{INPUT}{path}"))
                if value is not None:
                    self.returned[tree_index, path] = Parked(value)

    def upstream_gradients(self) -> dict[Item, Tensor]:
        """Output -> its upstream gradient, on its device."""
        return {item: parked.back() for item, parked in self.upstream.items()}

    def inputs(self) -> Inputs:
        """Its inputs, on their devices, with the other ones of the candidate."""
        others = {} if self.others is None else self.others.as_argument()
        args, kwargs = bring_back([self.args, self.kwargs | others])
        return Inputs(tuple(args), kwargs)


# What is remembered about a block that another one calls.
_INSIDE = object()


class BlockHooks(ModuleHooks):
    """Hooks around the calls of blocks, for one run of the model.

    A block that another one calls is a part of that one: nothing happens around its call.
    """

    def enter_call(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Enter an outermost block."""
        if self.open_calls():
            return _INSIDE, args, kwargs
        return self.enter_block(name, module, args, kwargs)

    def leave_call(
        self, name: str, entered: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """Leave an outermost block."""
        return None if entered is _INSIDE else self.leave_block(name, entered, args, kwargs, result)

    def enter_block(
        self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """What to remember about a call, and the arguments to call the block with."""
        raise NotImplementedError

    def leave_block(
        self, name: str, opened: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """The result to return instead; None for its own."""
        raise NotImplementedError


class Recorder(BlockHooks):
    """Records the calls of blocks in the first run that it is around.

    Tensors are kept by `keep` and `keep_gradient`, which park them on the host.

    Attributes:
        calls: block -> its calls, in order.
        uncut: block -> why the model cannot be cut there.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        """Record these blocks."""
        super().__init__(blocks)
        self.calls: dict[str, list[BlockCall]] = {name: [] for name in blocks}
        self.uncut: dict[str, str] = {}
        self._garage = ParkedTensors()
        self._is_done = False

    def __enter__(self) -> Self:
        # The backward pass may call blocks again, to recompute activations.
        return self if self._is_done else super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._is_done = True
        super().__exit__(*error)

    def cut_calls(self) -> dict[str, list[BlockCall]]:
        """Block -> its calls, for the blocks that were called and at which the model can be cut."""
        return {
            name: calls for name, calls in self.calls.items() if calls and name not in self.uncut
        }

    def enter_block(
        self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Copy the arguments."""
        number = len(self.calls[name])
        now = RandomState.of_torch()
        kept_args, kept_kwargs = self.keep_tree([list(args), kwargs])
        call = BlockCall(
            name=name,
            number=number,
            args=kept_args,
            kwargs=kept_kwargs,
            around=Surroundings.now(),
            draws=(now, now),
            buffers=self.keep_tree(dict(block.named_buffers())) if number else {},
        )
        arguments = args, kwargs
        return (call, arguments, _marks(*arguments)), *arguments

    def leave_block(
        self, name: str, opened: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """Copy the result, and watch for its upstream gradients."""
        call, arguments, marks = opened
        now = _marks(*arguments)
        written = [path for path in {**marks, **now} if marks.get(path) != now.get(path)]
        if written:
            self.uncut[name] = f"it writes to its argument {written[0]}"
        # A tensor that the block uses itself, or that goes through it unchanged, would show the
        # gradients of these uses too.
        handed_on: dict[int, Tensor] = {}

        def hand_on(_: str, leaf: Tensor) -> Tensor:
            if leaf.requires_grad and id(leaf) not in handed_on:
                handed_on[id(leaf)] = _HandedOn.apply(leaf)  # type: ignore[no-untyped-call]
            return handed_on.get(id(leaf), leaf)

        result = map_in_tuples(result, hand_on)
        call.result = self.keep_tree(result)
        call.draws = call.draws[0], RandomState.of_torch()
        watched: set[int] = set()
        for path, leaf in self.results(result):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and id(leaf) not in watched:
                watched.add(id(leaf))
                leaf.register_hook(self._keep_in(call.upstream, output(path)))
        self.calls[name].append(call)
        return result

    def results(self, result: Any) -> Iterable[tuple[str, Any]]:
        """The results whose upstream gradients are kept, by path."""
        return flatten_value(result, OUTPUT).leaves.items()

    def keep(self, tensor: Tensor) -> Any:
        """A copy of a tensor as it is now."""
        return self._garage.park(tensor)

    def keep_gradient(self, value: Tensor) -> Any:
        """A copy of a gradient, which no other block gets."""
        return Parked(value)

    def keep_tree(self, tree: Any) -> Any:
        """A copy of nested values; objects of unknown classes are copied as a whole."""
        copier = Copier()
        return map_leaves(
            tree,
            lambda leaf: (
                self.keep(leaf) if isinstance(leaf, torch.Tensor) else copier.copy_tree(leaf)
            ),
        )

    def _keep_in(self, table: dict[Any, Any], key: Any) -> Callable[[Tensor], None]:
        def keep(value: Tensor) -> None:
            table[key] = self.keep_gradient(value)

        return keep


class _HandedOn(torch.autograd.Function):
    """The same tensor for those that follow; unlike a view, it keeps its hooks when written to."""

    @staticmethod
    def forward(_: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class TrainingRecorder(Recorder):
    """Records also the gradients that each call sends back to its own arguments.

    Each tensor among the arguments is replaced by a view: its gradient is what this call alone
    sends back, without that of other readers of the same tensor.
    """

    def enter_block(
        self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Copy the arguments, and watch for their gradients."""
        (call, _, _), args, kwargs = super().enter_block(name, block, args, kwargs)
        places = {
            id(leaf): (tree_index, path)
            for tree_index, tree in reversed([*enumerate((list(args), kwargs))])
            for path, leaf in reversed([*leaves(tree)])
        }
        views: dict[int, Tensor] = {}

        def other(_: str, leaf: Tensor) -> Tensor:
            if not (leaf.requires_grad and torch.is_grad_enabled()):
                return leaf
            if id(leaf) not in views:
                view = views[id(leaf)] = leaf.view_as(leaf)
                view.register_hook(self._keep_in(call.returned, places[id(leaf)]))
            return views[id(leaf)]

        viewed_arguments = map_arguments(args, kwargs, other)
        return (call, viewed_arguments, _marks(*viewed_arguments)), *viewed_arguments

    def results(self, result: Any) -> Iterable[tuple[str, Any]]:
        """Each tensor as it is, also if it has parts, as a distributed one."""
        return leaves(result, OUTPUT)


def _marks(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What changes if a block writes to its arguments: values, objects and their contents."""
    marks: dict[str, Any] = {}
    for tree in (list(args), kwargs):
        for path, leaf in contents(tree, INPUT):
            marks[path] = (
                (id(leaf), version_of(leaf)) if isinstance(leaf, torch.Tensor) else repr(leaf)[:200]
            )
    return marks
