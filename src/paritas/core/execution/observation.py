"""What a caller can observe of one call, as data, and the conditions of a run."""

from __future__ import annotations

import array
import contextlib
import copy
import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from paritas.core.execution.cotangents import draw_on_host
from paritas.core.execution.isolation import (
    detached_copy,
    frozen_leaf,
    is_same_leaf,
)
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.contents import contents, given_to_tensor, same_leaf
from paritas.core.numerics.flattening import Flat, as_plain
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.numerics.sketch import sketch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from paritas.core.execution.saved_state import RandomState
    from paritas.core.execution.subjects import Inputs
    from paritas.core.numerics.contents import ContainerKind
    from paritas.core.precision.lifting import Decision, LiftMode
    from paritas.core.results.items import Item

# Prefixes for the names of outputs and inputs.
OUTPUT, INPUT = "output", "input"


@dataclasses.dataclass
class Observation:
    """The results of one call. Tensors are copies: nothing that runs later can change them.

    Attributes:
        outputs: item -> leaf of the returned value.
        attributes: item -> part of a Python attribute of a returned tensor.
        kinds: path -> what held the leaves: containers, objects, sparse tensors ...
        cut_off: the paths of returned tensors that cannot be differentiated.
        after: item -> changed input after the call and after backward.
        state: item -> changed state (parameters, buffers, `.grad`, attributes, variables) after
            the call and after backward.
        process: name -> how a setting or function of the process changed.
        live: item -> the returned tensor itself, detached, to detect later writes to it.
        gradients: item -> gradient of an input or parameter that requires grad, dense.
        further: item -> gradient that the caller's own call does not compute: of an input that
            does not require grad, or of gradients.
        again: item -> gradient from a second backward pass over the same graph, if it differs.
        own_backward: backward functions that are not torch's took part, and no compiled code.
        gradient_layouts: item -> the original layout of a gradient.
        gradient_forms: item -> a tensor of the shape, dtype and device of a gradient of which a
            sketch is kept; it takes no memory.
        strides: item -> strides of the returned tensors.
        requires_grad: item -> flag of the returned tensors, and of inputs that were written to.
        flags: item -> `requires_grad` of an input, a parameter or a buffer, if it was set.
        inference: the returned tensors that are inference tensors.
        aliases: pairs of items that share memory; the second one is an output.
        decisions: item -> what decided a discrete output (lifted runs only).
        least_noise: item -> the least rounding of its last sum, per element (the arbiter only).
        rng_before: the random state before the call.
        rng_after: the random state after the call.
        rng_after_backward: the random state after the backward pass, if there was one.
        error: what the call raised.
        gradient_error: what the backward pass raised.
        second_error: what computing the gradients of gradients raised.
        again_error: what the second backward pass over the same graph raised.
    """

    outputs: dict[Item, Any] = dataclasses.field(default_factory=dict)
    attributes: dict[Item, Any] = dataclasses.field(default_factory=dict)
    kinds: dict[str, ContainerKind] = dataclasses.field(default_factory=dict)
    cut_off: list[str] = dataclasses.field(default_factory=list)
    after: dict[Item, Any] = dataclasses.field(default_factory=dict)
    state: dict[Item, Any] = dataclasses.field(default_factory=dict)
    process: dict[str, str] = dataclasses.field(default_factory=dict)
    live: dict[Item, Tensor] = dataclasses.field(default_factory=dict)
    gradients: dict[Item, Tensor | None] = dataclasses.field(default_factory=dict)
    further: dict[Item, Tensor | None] = dataclasses.field(default_factory=dict)
    again: dict[Item, Tensor | None] = dataclasses.field(default_factory=dict)
    own_backward: bool = False
    gradient_layouts: dict[Item, torch.layout] = dataclasses.field(default_factory=dict)
    gradient_forms: dict[Item, Tensor] = dataclasses.field(default_factory=dict)
    strides: dict[Item, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    requires_grad: dict[Item, bool] = dataclasses.field(default_factory=dict)
    flags: dict[Item, bool] = dataclasses.field(default_factory=dict)
    inference: set[Item] = dataclasses.field(default_factory=set)
    aliases: frozenset[tuple[Item, Item]] = frozenset()
    decisions: dict[Item, Decision] = dataclasses.field(default_factory=dict)
    least_noise: dict[Item, Tensor] = dataclasses.field(default_factory=dict)
    rng_before: RandomState | None = None
    rng_after: RandomState | None = None
    rng_after_backward: RandomState | None = None
    error: Exception | None = None
    gradient_error: Exception | None = None
    second_error: Exception | None = None
    again_error: Exception | None = None

    @property
    def drew_random_numbers(self) -> bool:
        """Whether torch's generators moved, in the call or in its backward pass."""
        end = self.rng_after_backward or self.rng_after
        if self.rng_before is None or end is None:
            return False
        return not self.rng_before.same_torch(end)

    @property
    def backward_drew(self) -> bool:
        """Whether torch's generators moved in the backward pass."""
        if self.rng_after is None or self.rng_after_backward is None:
            return False
        return not self.rng_after.same_torch(self.rng_after_backward)

    @property
    def backward_changes_things(self) -> bool:
        """Whether the backward pass has side effects."""
        items = (*self.after, *self.state)
        return self.backward_drew or any(item.kind.is_after_backward for item in items)

    @property
    def changed_state(self) -> list[str]:
        """The names of the changed state."""
        return [item.name for item in self.state]

    @property
    def written_later(self) -> list[Item]:
        """The returned tensors that were written to since."""
        return [
            item
            for item, tensor in self.live.items()
            if not is_same_leaf(self.outputs[item], as_plain(tensor))
        ]

    @property
    def is_stateless(self) -> bool:
        """Whether a second call with the same inputs must give the same results."""
        return not (self.state or self.drew_random_numbers)

    @property
    def returned(self) -> Flat:
        """The returned value, in the form for matching."""
        return Flat({item.name: leaf for item, leaf in self.outputs.items()}, self.kinds)

    @property
    def gradient_bytes(self) -> int:
        """The size of all gradients of the caller's own call, also of those that are sketched."""
        gradients = (self.gradient_forms.get(item, g) for item, g in self.gradients.items())
        return sum(gradient.nbytes for gradient in gradients if gradient is not None)

    def items(self) -> Iterator[tuple[Item, Any]]:
        """Everything with a value: outputs, changed inputs and state, gradients."""
        for table in self._tables:
            yield from table.items()

    def value(self, item: Item) -> Any:
        """The value of an item, or None."""
        return next((table[item] for table in self._tables if item in table), None)

    @property
    def _tables(self) -> tuple[dict[Item, Any], ...]:
        return self.outputs, self.attributes, self.after, self.state, self.gradients, self.further


def note_decisions(
    observation: Observation,
    outputs: Mapping[Item, Any],
    mode: LiftMode | None,
    *,
    floats: bool = False,
) -> None:
    """Record what decided the discrete outputs, or with `floats` all, of a run under `mode`."""
    for item, value in outputs.items():
        if mode is None or not isinstance(value, torch.Tensor):
            continue
        decision = mode.decision_for(value) if floats or not is_inexact(value) else None
        if decision is not None:
            observation.decisions[item] = decision


def named_like(observation: Observation, reference: Observation) -> Observation:
    """Give outputs the reference's names, in order.

    Nothing is renamed if their numbers differ.
    """
    if len(observation.outputs) != len(reference.outputs):
        return observation
    names = dict(zip(observation.outputs, reference.outputs, strict=True))

    def rename_items(table: dict[Item, Any]) -> dict[Item, Any]:
        return {names.get(item, item): value for item, value in table.items()}

    return dataclasses.replace(
        observation,
        outputs=rename_items(observation.outputs),
        kinds=reference.kinds,
        strides=rename_items(observation.strides),
        requires_grad=rename_items(observation.requires_grad),
        live=rename_items(observation.live),
        inference={names.get(item, item) for item in observation.inference},
        aliases=frozenset(
            (names.get(other, other), names[item]) for other, item in observation.aliases
        ),
    )


class Contexts(contextlib.AbstractContextManager[None]):
    """Several context managers as one that can be entered repeatedly; None is skipped."""

    def __init__(self, *managers: contextlib.AbstractContextManager[Any] | None) -> None:
        self._managers = [manager for manager in managers if manager is not None]

    def __enter__(self) -> None:
        for manager in self._managers:
            manager.__enter__()

    def __exit__(self, *error: object) -> None:
        for manager in reversed(self._managers):
            manager.__exit__(*error)


class RunListener(contextlib.AbstractContextManager[Any], Protocol):
    """What follows a run of a program."""

    def note_result(self, result: Any) -> None:
        """What the program returns."""


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of one run of a program.

    Attributes:
        wide: use inputs and state in float64; the caller sets the default dtype.
        mode: the dispatch mode of a lifted run.
        watch: entered around the program's own code only, like the mode.
        listener: entered after the mode: a dispatch mode gets the operators as the program calls
            them, before the mode changes them.
        wanted: the gradients to compute; None for all of them.
        second: compute the gradients of gradients, if the program has any.
        forward_once: one call only, without a backward pass.
        other_draws: unless 0, the seed of other random numbers than in all other runs.
    """

    wide: bool = False
    mode: LiftMode | None = None
    watch: contextlib.AbstractContextManager[Any] | None = None
    listener: RunListener | None = None
    wanted: frozenset[Item] | None = None
    second: bool = True
    forward_once: bool = False
    other_draws: int = 0

    def around(self) -> contextlib.AbstractContextManager[None]:
        """The context for each run of the program's own code."""
        return Contexts(self.watch, self.mode, self.listener)

    def note_result(self, result: Any) -> None:
        """Tell those who follow the operators what the program returns."""
        if self.mode is not None:
            self.mode.note_result(result)
        if self.listener is not None:
            self.listener.note_result(result)


@dataclasses.dataclass(frozen=True)
class RunConditions:
    """The conditions of all runs of a side.

    Attributes:
        gradients: differentiate, with cotangents from `seed`.
        seed: the seed of the cotangents.
        also: inputs to differentiate although the caller's do not require grad.
        written: inputs that a program writes to, which a leaf that requires grad does not allow.
        second: also differentiate the gradients.
        repeats: also make a second backward pass over the same graph.
        accumulates: accumulate into `.grad`, to run the hooks on its accumulation.
        changing: the names of the state to compare after the call; None for all of it.
        holds: also keep the returned tensors themselves.
        options: the options of one run.
        precisions: item -> dtype of its cotangent, set by the first run.
        drawn: item -> its cotangent on the host, if it is used on a device: drawing it again for
            every run would take longer than the run.
        upstream: item -> its upstream gradient, if it is known; no gradient flows back to others.
        sketches: keep large gradients as their sketch only.
    """

    gradients: bool
    seed: int
    also: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    second: bool = False
    repeats: bool = False
    accumulates: bool = False
    changing: frozenset[str] | None = None
    holds: bool = False
    options: RunOptions = RunOptions()
    precisions: dict[Item, torch.dtype] = dataclasses.field(default_factory=dict)
    drawn: dict[Item, Tensor] = dataclasses.field(default_factory=dict)
    upstream: Mapping[Item, Tensor] | None = None
    sketches: bool = False

    def cotangent(self, item: Item, output: Tensor) -> Tensor:
        """The random upstream gradient of an item, the same in every run."""
        precision = self.precisions.setdefault(item, output.dtype)
        drawn_cotangent = self.drawn.get(item)
        if drawn_cotangent is None or drawn_cotangent.shape != output.shape:
            drawn_cotangent = draw_on_host(item, output, self.seed, precision)
            if not output.is_cpu:
                self.drawn[item] = drawn_cotangent
        return drawn_cotangent.to(output.device).to(output.dtype)


def input_tensors(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments, each with its path as a caller would write it."""
    for arguments in (list(inputs.args), inputs.kwargs):
        for path, leaf in contents(arguments, INPUT):
            if isinstance(leaf, torch.Tensor):
                yield path, leaf


def input_contents(inputs: Inputs, *, copy_tensors: bool = True) -> dict[str, Any]:
    """The contents of the arguments by path, including the gradients of their tensors."""
    contents_by_path: dict[str, Any] = {}
    for arguments in (list(inputs.args), inputs.kwargs):
        for path, leaf in contents(arguments, INPUT):
            if not isinstance(leaf, torch.Tensor):
                contents_by_path[path] = frozen_leaf(leaf)
                continue
            contents_by_path[path] = detached_copy(leaf) if copy_tensors else leaf
            if leaf.is_leaf and leaf.grad is not None:
                contents_by_path[f"{path}.grad"] = leaf.grad.clone() if copy_tensors else leaf.grad
            for name, value in given_to_tensor(leaf).items():
                for part_path, part in contents(value, f"{path}.{name}"):
                    is_tensor = isinstance(part, torch.Tensor)
                    kept_part = part if is_tensor else frozen_leaf(part)
                    contents_by_path[part_path] = (
                        detached_copy(part) if is_tensor and copy_tensors else kept_part
                    )
    return contents_by_path


# Of the outputs that share one memory, such as the rows that `unbind` returns, each is paired with
# this many: with all others, ten thousand rows would be fifty million pairs.
_MOST_SHARING = 64


def find_aliases(
    outputs: dict[Item, Any], inputs_by_item: dict[Item, Any]
) -> frozenset[tuple[Item, Item]]:
    """Which outputs share memory with inputs or state, or with each other."""
    items_by_storage: dict[int, list[Item]] = {}
    for item, value in inputs_by_item.items():
        key = storage_address(value)
        if key:
            items_by_storage.setdefault(key, []).append(item)
    pairs: set[tuple[Item, Item]] = set()
    for item, leaf in outputs.items():
        key = storage_address(leaf)
        if key:
            pairs |= {(other, item) for other in items_by_storage.get(key, [])[:_MOST_SHARING]}
            items_by_storage.setdefault(key, []).append(item)
    return frozenset(pairs)


def storage_address(value: Any) -> int:
    """The address of a tensor's storage; 0 if it has none, or for other values."""
    if not isinstance(value, torch.Tensor):
        return 0
    try:
        return int(value.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # sparse, nested and wrapper tensors
        return 0


def same_value(left: Any, right: Any) -> bool:
    """Whether two recorded values have the same bits."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bitwise_equal(left, right)
    return left is right or same_leaf(left, right) is True


def keep_leaf(leaf: Any) -> Any:
    """A copy that later runs cannot change."""
    plain = as_plain(leaf)
    if isinstance(plain, torch.Tensor):
        return plain.clone()
    return copy.copy(plain) if isinstance(plain, _WRITABLE) else plain


# If the gradients of all parameters take more than this, large ones are sketched: those of all
# runs, in float64, would take twenty times as much. In float64 a fault in one element is far above
# all rounding in its sum as well; natively, a loss of accuracy in few elements is not.
MOST_WHOLE_GRADIENTS = 64 << 20
# A gradient of at most this many numbers is kept as it is where larger ones are sketched.
MOST_KEPT = 1 << 14


def is_sketched(gradient: Any) -> bool:
    """Whether only a sketch of a gradient is kept where large ones are sketched."""
    return isinstance(gradient, torch.Tensor) and gradient.numel() > MOST_KEPT


def keep_gradient(gradient: Any) -> Any:
    """A copy of a small gradient, the sketch of a large one: its random sums, in float64."""
    plain_gradient = as_plain(gradient)
    if not is_sketched(plain_gradient):
        return keep_leaf(gradient)
    sums = sketch(plain_gradient, keeps_nonfinite=True).double()
    if bool(torch.isfinite(sums).all()):
        return sums
    # Either a value is not finite, and neither are the sums that it is in, or a sum overflows.
    is_finite = bool(torch.isfinite(plain_gradient).all())
    return sketch(plain_gradient).double() if is_finite else sums


# Mutable leaves that are not tensors and do not become tensors.
_WRITABLE = (bytearray, array.array, np.ndarray)
