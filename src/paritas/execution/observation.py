"""Run one side once and record everything that a caller could observe."""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paritas._torch.global_state import taking_stance
from paritas._torch.kernels import any_attention
from paritas._torch.tensors import copy_hooks, is_out_of_memory, refuse_once_differentiable
from paritas.execution.held_values import MISSING
from paritas.execution.isolation import (
    copy_inputs,
    detached_copy,
    frozen_leaf,
    is_same_leaf,
    unchanged_on_device,
)
from paritas.execution.leftovers import undoing_leftovers
from paritas.execution.saved_state import ProcessState, RandomState
from paritas.numerics.bits import is_inexact
from paritas.numerics.contents import contents, map_leaves, same_leaf
from paritas.numerics.flattening import Flat, as_plain, flattened
from paritas.numerics.metrics import bitwise_equal
from paritas.numerics.sketch import sketch
from paritas.results.items import Item, ItemKind, output
from paritas.results.items import gradient as gradient_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from paritas.execution.subjects import Inputs, Subject
    from paritas.numerics.contents import ContainerKind
    from paritas.precision.lifting import Decision, LiftMode

# Prefixes for the names of outputs and inputs.
OUTPUT, INPUT = "output", "input"


@dataclasses.dataclass
class Observation:
    """The results of one call. Tensors are copies: nothing that runs later can change them.

    Attributes:
        outputs: item -> leaf of the returned value.
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
        gradient_layouts: item -> the original layout of a gradient.
        strides: item -> strides of the returned tensors.
        requires_grad: item -> flag of the returned tensors, and of inputs that were written to.
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
    """

    outputs: dict[Item, Any] = dataclasses.field(default_factory=dict)
    kinds: dict[str, ContainerKind] = dataclasses.field(default_factory=dict)
    cut_off: list[str] = dataclasses.field(default_factory=list)
    after: dict[Item, Any] = dataclasses.field(default_factory=dict)
    state: dict[Item, Any] = dataclasses.field(default_factory=dict)
    process: dict[str, str] = dataclasses.field(default_factory=dict)
    live: dict[Item, Tensor] = dataclasses.field(default_factory=dict)
    gradients: dict[Item, Tensor | None] = dataclasses.field(default_factory=dict)
    further: dict[Item, Tensor | None] = dataclasses.field(default_factory=dict)
    again: dict[Item, Tensor | None] = dataclasses.field(default_factory=dict)
    gradient_layouts: dict[Item, torch.layout] = dataclasses.field(default_factory=dict)
    strides: dict[Item, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    requires_grad: dict[Item, bool] = dataclasses.field(default_factory=dict)
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

    def items(self) -> Iterator[tuple[Item, Any]]:
        """Everything with a value: outputs, changed inputs and state, gradients."""
        yield from self.outputs.items()
        yield from self.after.items()
        yield from self.state.items()
        yield from self.gradients.items()
        yield from self.further.items()

    def value(self, item: Item) -> Any:
        """The value of an item, or None."""
        for table in (self.outputs, self.after, self.state, self.gradients, self.further):
            if item in table:
                return table[item]
        return None


def note_decisions(
    seen: Observation, outputs: Mapping[Item, Any], mode: LiftMode | None, *, floats: bool = False
) -> None:
    """Record what decided the discrete outputs, or with `floats` all, of a run under `mode`."""
    for item, value in outputs.items():
        if mode is None or not isinstance(value, torch.Tensor):
            continue
        decision = mode.decision_for(value) if floats or not is_inexact(value) else None
        if decision is not None:
            seen.decisions[item] = decision


def named_like(seen: Observation, reference: Observation) -> Observation:
    """Give outputs the reference's names, in order.

    Nothing is renamed if their numbers differ.
    """
    if len(seen.outputs) != len(reference.outputs):
        return seen
    names = dict(zip(seen.outputs, reference.outputs, strict=True))

    def renamed(table: dict[Item, Any]) -> dict[Item, Any]:
        return {names.get(item, item): value for item, value in table.items()}

    return dataclasses.replace(
        seen,
        outputs=renamed(seen.outputs),
        kinds=reference.kinds,
        strides=renamed(seen.strides),
        requires_grad=renamed(seen.requires_grad),
        live=renamed(seen.live),
        inference={names.get(item, item) for item in seen.inference},
        aliases=frozenset((names.get(other, other), names[item]) for other, item in seen.aliases),
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


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of one run of a program.

    Attributes:
        wide: use inputs and state in float64; the caller sets the default dtype.
        mode: the dispatch mode of a lifted run.
        watch: entered around the program's own code only, like the mode.
        wanted: the gradients to compute; None for all of them.
        second: compute the gradients of gradients, if the program has any.
        forward_once: one call only, without a backward pass.
        other_draws: unless 0, the seed of other random numbers than in all other runs.
    """

    wide: bool = False
    mode: LiftMode | None = None
    watch: contextlib.AbstractContextManager[Any] | None = None
    wanted: frozenset[Item] | None = None
    second: bool = True
    forward_once: bool = False
    other_draws: int = 0

    def around(self) -> contextlib.AbstractContextManager[None]:
        """The context for each run of the program's own code."""
        return Contexts(self.watch, self.mode)


@dataclasses.dataclass(frozen=True)
class RunConditions:
    """The conditions of all runs of a side.

    Attributes:
        gradients: differentiate, with cotangents from `seed`.
        seed: the seed of the cotangents.
        also: inputs to differentiate although the caller's do not require grad.
        written: inputs that a program writes to, which a leaf that requires grad does not allow.
        second: also differentiate the gradients.
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
        known = self.drawn.get(item)
        if known is None or known.shape != output.shape:
            known = _draw_cotangent(item, output, self.seed, precision)
            if not output.is_cpu:
                self.drawn[item] = known
        return known.to(output.device).to(output.dtype)


@contextlib.contextmanager
def running_subject(
    subject: Subject, rng: RandomState, conditions: RunConditions
) -> Iterator[Callable[[Inputs], Observation]]:
    """Provide a function that calls `subject` and observes it; state carries over between calls.

    An exception of the subject is stored in the observation. At the end its state is restored.
    """
    rng.restore()
    with contextlib.ExitStack() as stack:
        stack.callback(subject.state.restore)
        values = {**subject.state.tensors, **subject.state.lent}
        if conditions.options.wide:
            values = subject.state.widened()
            for name, value in values.items():
                if value.requires_grad:
                    copy_hooks(subject.state.tensors[name], value)
            stack.enter_context(subject.state.swapped(values))
            stack.enter_context(any_attention())
        if conditions.options.mode is not None:
            stack.enter_context(taking_stance("force_eager"))

        def call(inputs: Inputs) -> Observation:
            seen = Observation()
            fresh = _requiring_grad(
                copy_inputs(inputs, widen=conditions.options.wide), inputs, conditions
            )
            _observe_call(subject, fresh, values, conditions, seen)
            if conditions.gradients and seen.state:
                subject.state.detach()
            return seen

        yield call


def _requiring_grad(fresh: Inputs, inputs: Inputs, conditions: RunConditions) -> Inputs:
    """Set the `requires_grad` flags of the copies.

    A leaf that requires grad cannot be written to. So inputs that are not leaves in the caller's
    call, or that the program is known to write to, are made non-leaves by a clone.
    """
    if not conditions.gradients or not torch.is_grad_enabled():
        return fresh
    given = dict(input_tensors(inputs))
    copies = dict(input_tensors(fresh))
    for path in conditions.also:
        copies[path].requires_grad_()
    places = collections.Counter(storage_address(tensor) for tensor in copies.values())
    made = {
        id(tensor)
        for path, tensor in copies.items()
        if tensor.requires_grad
        and (path in conditions.written or not given[path].is_leaf)
        and places[storage_address(tensor)] == 1  # a clone would no longer share memory
    }
    if not made:
        return fresh

    def make(leaf: Any) -> Any:
        return leaf.clone() if id(leaf) in made else leaf

    args = map_leaves(list(fresh.args), make)
    return dataclasses.replace(fresh, args=tuple(args), kwargs=map_leaves(fresh.kwargs, make))


def _observe_call(
    subject: Subject,
    inputs: Inputs,
    values: dict[str, Tensor],
    conditions: RunConditions,
    seen: Observation,
) -> None:
    named_inputs = dict(input_tensors(inputs))
    targets = _gradient_targets(values, named_inputs, conditions)
    # In-place changes are detected by comparison with a copy.
    before = input_contents(inputs)
    seen.rng_before = RandomState.now()
    subject.state.touch()
    process = ProcessState(seen.rng_before)
    try:
        with conditions.options.around(), undoing_leftovers(seen.process):
            result = subject.call(*inputs.args, **inputs.kwargs)
    except Exception as error:
        if is_out_of_memory(error):  # it says nothing about the program
            raise
        seen.error = error
        return
    finally:
        seen.process |= process.put_back()
    seen.rng_after = seen.rng_before.after_call()
    returned = flattened(result, OUTPUT)
    live = {output(path): leaf for path, leaf in returned.leaves.items()}
    seen.kinds, seen.cut_off = returned.kinds, returned.cut_off
    given = {Item(ItemKind.INPUT, path): tensor for path, tensor in named_inputs.items()}
    given |= {Item(ItemKind.STATE, name): tensor for name, tensor in values.items()}
    seen.aliases = find_aliases(live, given)
    del result, returned
    _note_outputs(live, conditions, seen)
    _note_inputs(inputs, before, seen, ItemKind.INPUT_AFTER_CALL)
    changed = subject.state.changed(conditions.changing)
    for name, value in changed.items():
        seen.state |= _values_after(Item(ItemKind.STATE_AFTER_CALL, name), value)
    if conditions.gradients:
        live |= {
            Item(ItemKind.INPUT_AFTER_CALL, path): tensor
            for path, tensor in named_inputs.items()
            if tensor.grad_fn is not None
        }
        subject.state.touch()
        try:
            _differentiate(live, targets, conditions, seen)
        finally:
            seen.process |= process.put_back()
        seen.rng_after_backward = seen.rng_before.after_call()
        _note_inputs(inputs, before, seen, ItemKind.INPUT_AFTER_BACKWARD)
        _note_state_after_backward(subject, changed, conditions, seen)


def _note_inputs(inputs: Inputs, before: dict[str, Any], seen: Observation, kind: ItemKind) -> None:
    """Record the inputs that differ from `before`, and update `before`."""
    now = input_contents(inputs, copy_tensors=False)
    same = unchanged_on_device(before, now)
    for path in [*before, *(path for path in now if path not in before)]:
        value = now.get(path, MISSING)
        if path in same or is_same_leaf(before.get(path, MISSING), value):
            continue
        item = Item(kind, path)
        seen.after |= _values_after(item, value)
        before[path] = value
        if isinstance(value, torch.Tensor):
            before[path] = detached_copy(value)
            seen.requires_grad[item] = value.requires_grad


def _note_state_after_backward(
    subject: Subject, changed: dict[str, Any], conditions: RunConditions, seen: Observation
) -> None:
    """Record the state that the backward pass itself changed."""
    now = subject.state.changed(conditions.changing)
    for name in dict.fromkeys((*changed, *now)):
        first = subject.state.initial(name)
        left, right = changed.get(name, first), now.get(name, first)
        same = is_same_leaf(left, right, widened=conditions.options.wide)
        if not same and not is_same_leaf(right, left, widened=conditions.options.wide):
            seen.state |= _values_after(Item(ItemKind.STATE_AFTER_BACKWARD, name), right)


def _values_after(item: Item, value: Any) -> dict[Item, Any]:
    """A value after the call, or the parts of a tensor that is not dense."""
    if not isinstance(value, torch.Tensor):
        return {item: _keep_leaf(value)}
    leaves = flattened(value.detach(), item.name).leaves
    return {item.named(name): _keep_leaf(leaf) for name, leaf in leaves.items()}


def _note_outputs(live: dict[Item, Any], conditions: RunConditions, seen: Observation) -> None:
    """Copy the returned leaves, and release each one that is not differentiated."""
    for item, leaf in live.items():
        _note_output(item, leaf, conditions, seen)
        if not conditions.gradients:
            live[item] = None


def _note_output(item: Item, leaf: Any, conditions: RunConditions, seen: Observation) -> None:
    mode = conditions.options.mode
    seen.outputs[item] = _keep_leaf(leaf)
    if not isinstance(leaf, torch.Tensor):
        return
    seen.requires_grad[item] = leaf.requires_grad
    if conditions.holds:
        seen.live[item] = leaf.detach()
    if leaf.is_inference():
        seen.inference.add(item)
    if leaf.layout is torch.strided and not leaf.is_nested:
        seen.strides[item] = tuple(leaf.stride())
    if mode is None:
        return
    if leaf.is_floating_point():
        _note_least_noise(item, leaf, mode, seen)
    else:
        note_decisions(seen, {item: leaf}, mode)


def _note_least_noise(item: Item, leaf: Tensor, mode: LiftMode, seen: Observation) -> None:
    least = mode.least_noise_of(leaf)
    if least is not None:
        seen.least_noise[item] = least


def _gradient_targets(
    values: dict[str, Tensor], named_inputs: dict[str, Tensor], conditions: RunConditions
) -> dict[Item, Any]:
    """What to differentiate with respect to, collected before the call.

    Non-leaves are identified by their gradient edge: the program may write to them.
    """
    if not conditions.gradients:
        return {}
    named = {gradient_of(name): t for name, t in values.items() if t.is_leaf}
    named |= {gradient_of(path): t for path, t in named_inputs.items()}
    return {
        item: t if t.is_leaf else torch.autograd.graph.get_gradient_edge(t)
        for item, t in named.items()
        if t.requires_grad
        and (
            conditions.options.wanted is None
            or conditions.second
            or item in conditions.options.wanted
        )
    }


def _differentiate(
    live: dict[Item, Any], targets: dict[Item, Any], conditions: RunConditions, seen: Observation
) -> None:
    outputs = {
        item: leaf
        for item, leaf in live.items()
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }
    also = {gradient_of(path) for path in conditions.also}
    if not outputs:  # no gradient flows back to them
        seen.further |= {item: None for item in targets if item in also}
    if not outputs or not targets:
        return
    cotangents = _cotangents(outputs, conditions)
    outputs = {item: outputs[item] for item in cotangents}
    if not outputs:
        seen.gradients |= dict.fromkeys(targets)
        return
    try:
        with (
            _no_autocast(outputs.values()),
            conditions.options.around(),
            undoing_leftovers(seen.process),
        ):
            gradients = _first_gradients(outputs, targets, cotangents, conditions)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        seen.gradient_error = error
        return
    for item, gradient in gradients.items():
        table = seen.further if item in also else seen.gradients
        table[item] = keep_gradient(gradient) if conditions.sketches else _keep_leaf(gradient)
        if gradient is not None:
            seen.gradient_layouts[item] = gradient.layout
        if gradient is not None and conditions.options.mode is not None:
            _note_least_noise(item, gradient, conditions.options.mode, seen)
    if conditions.second:
        try:
            with (
                _no_autocast(outputs.values()),
                conditions.options.around(),
                undoing_leftovers(seen.process),
            ):
                firsts, seconds = _second_gradients(outputs, targets, cotangents, conditions)
            seen.further |= seconds
            seen.again = {
                item: first
                for item, first in firsts.items()
                if not same_value(first, seen.value(item))
            }
        except Exception as error:  # noqa: BLE001
            seen.second_error = error


def _cotangents(outputs: dict[Item, Tensor], conditions: RunConditions) -> dict[Item, Tensor]:
    """The upstream gradients: the known ones, or random ones for all outputs."""
    names = _names_of_first_run(outputs, conditions)
    pairs = zip(names, outputs.items(), strict=True)
    if conditions.upstream is not None:
        known = conditions.upstream
        return {
            item: known[name].to(leaf.device, leaf.dtype)
            for name, (item, leaf) in pairs
            if name in known and known[name].shape == leaf.shape
        }
    return {item: conditions.cotangent(name, leaf) for name, (item, leaf) in pairs}


def _first_gradients(
    outputs: dict[Item, Tensor],
    targets: dict[Item, Any],
    cotangents: dict[Item, Tensor],
    conditions: RunConditions,
) -> dict[Item, Tensor | None]:
    """The gradients from `torch.autograd.grad`, or accumulated into `.grad`."""
    if not conditions.accumulates:
        found = torch.autograd.grad(
            list(outputs.values()),
            list(targets.values()),
            list(cotangents.values()),
            retain_graph=conditions.second,
            allow_unused=True,
        )
        return dict(zip(targets, found, strict=True))
    leaves_of = {item: t for item, t in targets.items() if isinstance(t, torch.Tensor)}
    kept = {item: leaf.grad for item, leaf in leaves_of.items()}
    try:
        for leaf in leaves_of.values():
            leaf.grad = None
        torch.autograd.backward(
            list(outputs.values()),
            list(cotangents.values()),
            retain_graph=conditions.second,
            inputs=list(leaves_of.values()),
        )
        return {item: leaf.grad for item, leaf in leaves_of.items()}
    finally:
        for item, leaf in leaves_of.items():
            leaf.grad = kept[item]


def _second_gradients(
    outputs: dict[Item, Tensor],
    targets: dict[Item, Any],
    cotangents: dict[Item, Tensor],
    conditions: RunConditions,
) -> tuple[dict[Item, Tensor | None], dict[Item, Tensor | None]]:
    """The gradients once more, and the gradients of their products with random cotangents.

    The first cotangents are variables, too: most programs that differentiate twice need the
    derivative of a gradient with respect to them.
    """
    for value in cotangents.values():
        value.requires_grad_()
    firsts = torch.autograd.grad(
        list(outputs.values()),
        list(targets.values()),
        list(cotangents.values()),
        create_graph=True,
        allow_unused=True,
    )
    known = {
        item: first
        for item, first in zip(targets, firsts, strict=True)
        if first is not None and first.requires_grad
    }
    if not known:
        raise RuntimeError("none of the gradients requires grad, even with create_graph=True")
    refuse_once_differentiable(known.values())
    variables = {item.name: target for item, target in targets.items()}
    variables |= {f"the cotangent of {item}": value for item, value in cotangents.items()}
    drawn = [conditions.cotangent(item, first) for item, first in known.items()]
    seconds = torch.autograd.grad(
        list(known.values()), list(variables.values()), drawn, allow_unused=True
    )
    return dict(zip(targets, map(_keep_leaf, firsts), strict=True)), {
        Item(ItemKind.SECOND_GRADIENT, name): _keep_leaf(second)
        for name, second in zip(variables, seconds, strict=True)
    }


def _names_of_first_run(outputs: Iterable[Item], conditions: RunConditions) -> list[Item]:
    """The names of the outputs in the first run, in order."""
    names = list(outputs)
    first = [item for item in conditions.precisions if item.kind is not ItemKind.GRADIENT]
    return first if len(first) == len(names) and set(first) != set(names) else names


def cotangent(item: Item, output: Tensor, seed: int, precision: torch.dtype) -> Tensor:
    """A random upstream gradient: the same numbers for both sides and in every run.

    They are representable in the reference's own dtype, so they are exact in every run and their
    sums round as in any program.
    """
    drawn = _draw_cotangent(item, output, seed, precision)
    return drawn.to(output.device).to(output.dtype)


def _draw_cotangent(item: Item, output: Tensor, seed: int, precision: torch.dtype) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed + _stable_hash(item.text))
    shape = (*output.shape, 2) if output.is_complex() else tuple(output.shape)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    drawn = drawn.to(precision.to_real() if precision.is_complex else precision)
    return torch.view_as_complex(drawn.double()) if output.is_complex() else drawn


def input_tensors(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments, each with its path as a caller would write it."""
    for given in (list(inputs.args), inputs.kwargs):
        for path, leaf in contents(given, INPUT):
            if isinstance(leaf, torch.Tensor):
                yield path, leaf


def input_contents(inputs: Inputs, *, copy_tensors: bool = True) -> dict[str, Any]:
    """The contents of the arguments by path, including the gradients of their tensors."""
    found: dict[str, Any] = {}
    for given in (list(inputs.args), inputs.kwargs):
        for path, leaf in contents(given, INPUT):
            if not isinstance(leaf, torch.Tensor):
                found[path] = frozen_leaf(leaf)
                continue
            found[path] = detached_copy(leaf) if copy_tensors else leaf
            if leaf.is_leaf and leaf.grad is not None:
                found[f"{path}.grad"] = leaf.grad.clone() if copy_tensors else leaf.grad
    return found


# Of the outputs that share one memory, such as the rows that `unbind` returns, each is paired with
# this many: with all others, ten thousand rows would be fifty million pairs.
_MOST_SHARING = 64


def find_aliases(outputs: dict[Item, Any], given: dict[Item, Any]) -> frozenset[tuple[Item, Item]]:
    """Which outputs share memory with inputs or state, or with each other."""
    known: dict[int, list[Item]] = {}
    for item, value in given.items():
        key = storage_address(value)
        if key:
            known.setdefault(key, []).append(item)
    pairs: set[tuple[Item, Item]] = set()
    for item, leaf in outputs.items():
        key = storage_address(leaf)
        if key:
            pairs |= {(other, item) for other in known.get(key, [])[:_MOST_SHARING]}
            known.setdefault(key, []).append(item)
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


def _keep_leaf(leaf: Any) -> Any:
    """A copy that later runs cannot change."""
    plain = as_plain(leaf)
    if isinstance(plain, torch.Tensor):
        return plain.clone()
    return copy.copy(plain) if isinstance(plain, _WRITABLE) else plain


# A gradient of at most this many numbers is kept as it is where larger ones are sketched.
MOST_KEPT = 1 << 14


def keep_gradient(gradient: Any) -> Any:
    """A copy of a small gradient, the sketch of a large one: its random sums, in float64."""
    kept = as_plain(gradient)
    if not isinstance(kept, torch.Tensor) or kept.numel() <= MOST_KEPT:
        return _keep_leaf(gradient)
    sums = sketch(kept, keeps_nonfinite=True).double()
    if bool(torch.isfinite(sums).all()):
        return sums
    # Either a value is not finite, or its sum is beyond float64.
    is_finite = bool(torch.isfinite(kept).all())
    return sketch(kept).double() if is_finite else torch.full_like(sums, math.nan)


# Mutable leaves that are not tensors and do not become tensors.
_WRITABLE = (bytearray, array.array, np.ndarray)


def _stable_hash(text: str) -> int:
    return sum((position + 1) * ord(letter) for position, letter in enumerate(text)) % 1_000_003


@contextlib.contextmanager
def _no_autocast(outputs: Any) -> Iterator[None]:
    """Switch autocast off for a backward pass, as torch's documentation requires."""
    with contextlib.ExitStack() as stack:
        for device in {output.device.type for output in outputs}:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
