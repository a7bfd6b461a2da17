"""Run one side once and record everything that a caller could observe."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.execution.computed_gradients import (
    ComputedGradients,
    sketching_gradients,
    stand_in_for,
)
from paritas.core.execution.held_values import MISSING
from paritas.core.execution.isolation import (
    copy_inputs,
    detached_copy,
    is_same_leaf,
    unchanged_on_device,
)
from paritas.core.execution.leftovers import undoing_leftovers
from paritas.core.execution.observation import (
    OUTPUT,
    Observation,
    find_aliases,
    input_contents,
    input_tensors,
    is_sketched,
    keep_leaf,
    note_decisions,
    same_value,
    storage_address,
)
from paritas.core.execution.saved_state import ProcessState, RandomState
from paritas.core.numerics.contents import given_to_tensor, marks_of_dynamo
from paritas.core.numerics.flattening import flatten_value
from paritas.core.results.items import Item, ItemKind, output
from paritas.core.results.items import gradient as gradient_of
from paritas.core.torch_private.global_state import taking_stance
from paritas.core.torch_private.kernels import any_attention
from paritas.core.torch_private.tensors import (
    copy_hooks,
    has_own_backward,
    is_out_of_memory,
    refuse_once_differentiable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from paritas.core.execution.observation import RunConditions
    from paritas.core.execution.subjects import Inputs, Subject
    from paritas.core.precision.lifting import LiftMode


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
            values = subject.state.widen_state()
            for name, value in values.items():
                if value.requires_grad:
                    copy_hooks(subject.state.tensors[name], value)
            stack.enter_context(subject.state.swap_tensors(values))
            stack.enter_context(any_attention())
        if conditions.options.mode is not None:
            stack.enter_context(taking_stance("force_eager"))

        def call(inputs: Inputs) -> Observation:
            observation = Observation()
            fresh = _requiring_grad(
                copy_inputs(inputs, widen=conditions.options.wide), inputs, conditions
            )
            _observe_call(subject, fresh, values, conditions, observation)
            if conditions.gradients and observation.state:
                subject.state.detach()
            return observation

        yield call


def _requiring_grad(fresh: Inputs, inputs: Inputs, conditions: RunConditions) -> Inputs:
    """Set the `requires_grad` flags of the copies.

    A leaf that requires grad cannot be written to. So inputs that are not leaves in the caller's
    call, or that the program is known to write to, are made non-leaves by a clone.
    """
    if not torch.is_grad_enabled():
        return fresh
    inputs_by_path = dict(input_tensors(inputs))
    copies = dict(input_tensors(fresh))
    for path in conditions.also if conditions.gradients else ():
        copies[path].requires_grad_()
    distinct = {id(tensor): tensor for tensor in copies.values()}
    places = collections.Counter(storage_address(tensor) for tensor in distinct.values())
    non_leaf_ids = {
        id(tensor)
        for path, tensor in copies.items()
        if tensor.requires_grad
        and (path in conditions.written or not inputs_by_path[path].is_leaf)
        and places[storage_address(tensor)] == 1  # a clone would no longer share memory
    }
    if not non_leaf_ids:
        return fresh

    def make(leaf: Any) -> Any:
        if id(leaf) not in non_leaf_ids:
            return leaf
        clone = leaf.clone()
        vars(clone).update(given_to_tensor(leaf) | marks_of_dynamo(leaf))
        return clone

    return fresh.map_leaves(make)


def _observe_call(
    subject: Subject,
    inputs: Inputs,
    values: dict[str, Tensor],
    conditions: RunConditions,
    observation: Observation,
) -> None:
    named_inputs = dict(input_tensors(inputs))
    targets = _gradient_targets(values, named_inputs, conditions)
    # In-place changes are detected by comparison with a copy.
    before = input_contents(inputs)
    flags = {path: tensor.requires_grad for path, tensor in named_inputs.items()}
    observation.rng_before = RandomState.now()
    subject.state.touch()
    process = ProcessState(observation.rng_before)
    try:
        with conditions.options.around(), undoing_leftovers(observation.process):
            result = subject.call(*inputs.args, **inputs.kwargs)
            conditions.options.note_result(result)
    except Exception as error:
        if is_out_of_memory(error):  # it says nothing about the program
            raise
        observation.error = error
        return
    finally:
        observation.process |= process.put_back()
    observation.rng_after = observation.rng_before.after_call()
    returned = flatten_value(result, OUTPUT)
    live = {output(path): leaf for path, leaf in returned.leaves.items()}
    observation.kinds, observation.cut_off = returned.kinds, returned.cut_off
    tensors_by_item = {Item(ItemKind.INPUT, path): tensor for path, tensor in named_inputs.items()}
    tensors_by_item |= {Item(ItemKind.STATE, name): tensor for name, tensor in values.items()}
    observation.aliases = find_aliases(live, tensors_by_item)
    del result, returned
    _note_outputs(live, conditions, observation)
    _note_inputs(inputs, before, observation, ItemKind.INPUT_AFTER_CALL)
    # A tensor that is no leaf any more was written to.
    for path, tensor in named_inputs.items():
        if tensor.is_leaf and tensor.requires_grad is not flags[path]:
            observation.flags[Item(ItemKind.INPUT_AFTER_CALL, path)] = tensor.requires_grad
    for name, flag in subject.state.changed_flags().items():
        observation.flags[Item(ItemKind.STATE_AFTER_CALL, name)] = flag
    changed = subject.state.changed_values(conditions.changing)
    for name, value in changed.items():
        observation.state |= _values_after(Item(ItemKind.STATE_AFTER_CALL, name), value)
    if conditions.gradients:
        live |= {
            Item(ItemKind.INPUT_AFTER_CALL, path): tensor
            for path, tensor in named_inputs.items()
            if tensor.grad_fn is not None
        }
        subject.state.touch()
        try:
            _differentiate(live, targets, conditions, observation)
        finally:
            observation.process |= process.put_back()
        observation.rng_after_backward = observation.rng_before.after_call()
        _note_inputs(inputs, before, observation, ItemKind.INPUT_AFTER_BACKWARD)
        _note_state_after_backward(subject, changed, conditions, observation)


def _note_inputs(
    inputs: Inputs, before: dict[str, Any], observation: Observation, kind: ItemKind
) -> None:
    """Record the inputs that differ from `before`, and update `before`."""
    now = input_contents(inputs, copy_tensors=False)
    same = unchanged_on_device(before, now)
    for path in [*before, *(path for path in now if path not in before)]:
        value = now.get(path, MISSING)
        if path in same or is_same_leaf(before.get(path, MISSING), value):
            continue
        item = Item(kind, path)
        observation.after |= _values_after(item, value)
        before[path] = value
        if isinstance(value, torch.Tensor):
            before[path] = detached_copy(value)
            observation.requires_grad[item] = value.requires_grad


def _note_state_after_backward(
    subject: Subject, changed: dict[str, Any], conditions: RunConditions, observation: Observation
) -> None:
    """Record the state that the backward pass itself changed."""
    now = subject.state.changed_values(conditions.changing)
    for name in dict.fromkeys((*changed, *now)):
        first = subject.state.initial(name)
        left, right = changed.get(name, first), now.get(name, first)
        same = is_same_leaf(left, right, widened=conditions.options.wide)
        if not same and not is_same_leaf(right, left, widened=conditions.options.wide):
            observation.state |= _values_after(Item(ItemKind.STATE_AFTER_BACKWARD, name), right)


def _values_after(item: Item, value: Any) -> dict[Item, Any]:
    """A value after the call, or the parts of a tensor that is not dense."""
    if not isinstance(value, torch.Tensor):
        return {item: keep_leaf(value)}
    leaves = flatten_value(value.detach(), item.name).leaves
    return {item.named(name): keep_leaf(leaf) for name, leaf in leaves.items()}


def _note_outputs(
    live: dict[Item, Any], conditions: RunConditions, observation: Observation
) -> None:
    """Copy the returned leaves, and release each one that is not differentiated."""
    for item, leaf in live.items():
        _note_output(item, leaf, conditions, observation)
        if not conditions.gradients:
            live[item] = None


def _note_output(
    item: Item, leaf: Any, conditions: RunConditions, observation: Observation
) -> None:
    mode = conditions.options.mode
    observation.outputs[item] = keep_leaf(leaf)
    if not isinstance(leaf, torch.Tensor):
        return
    observation.requires_grad[item] = leaf.requires_grad
    for name, value in given_to_tensor(leaf).items():
        parts = flatten_value(value, f"{item.name}.{name}").leaves
        observation.attributes |= {output(path): keep_leaf(part) for path, part in parts.items()}
    if conditions.holds:
        observation.live[item] = leaf.detach()
    if leaf.is_inference():
        observation.inference.add(item)
    if leaf.layout is torch.strided and not leaf.is_nested:
        observation.strides[item] = tuple(leaf.stride())
    if mode is None:
        return
    if leaf.is_floating_point():
        _note_least_noise(item, leaf, mode, observation)
    else:
        note_decisions(observation, {item: leaf}, mode)


def _note_least_noise(item: Item, leaf: Tensor, mode: LiftMode, observation: Observation) -> None:
    least = mode.least_noise_of(leaf)
    if least is not None:
        observation.least_noise[item] = least


def _gradient_targets(
    values: dict[str, Tensor], named_inputs: dict[str, Tensor], conditions: RunConditions
) -> dict[Item, Any]:
    """What to differentiate with respect to, collected before the call.

    Non-leaves are identified by their gradient edge: the program may write to them. A tensor that
    is passed twice has one gradient, under the first of its names.
    """
    if not conditions.gradients:
        return {}
    first_names: dict[int, str] = {}
    for path, tensor in named_inputs.items():
        first_names.setdefault(id(tensor), path)
    named = {gradient_of(name): t for name, t in values.items() if t.is_leaf}
    named |= {gradient_of(path): named_inputs[path] for path in first_names.values()}
    return {
        item: t if t.is_leaf else torch.autograd.graph.get_gradient_edge(t)
        for item, t in named.items()
        if t.requires_grad
        and (
            conditions.options.wanted is None
            or conditions.second
            or conditions.repeats
            or item in conditions.options.wanted
        )
    }


def _differentiate(
    live: dict[Item, Any],
    targets: dict[Item, Any],
    conditions: RunConditions,
    observation: Observation,
) -> None:
    outputs = {
        item: leaf
        for item, leaf in live.items()
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }
    also = {gradient_of(path) for path in conditions.also}
    if not outputs:  # no gradient flows back to them
        observation.further |= {item: None for item in targets if item in also}
    if not outputs or not targets:
        return
    cotangents = _cotangents(outputs, conditions)
    outputs = {item: outputs[item] for item in cotangents}
    if not outputs:
        observation.gradients |= dict.fromkeys(targets)
        return
    if conditions.options.mode is None and not conditions.options.wide:
        observation.own_backward = has_own_backward(outputs.values())
    backward = _BackwardPass(outputs, targets, cotangents, conditions, observation)
    try:
        gradients = backward.first(retains=conditions.repeats)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        observation.gradient_error = error
        return
    _note_gradients(gradients, also, conditions, observation)
    if conditions.repeats:
        try:
            again = backward.first(retains=False)
            observation.again = _differing(again.keep_all(conditions), observation)
        except Exception as error:  # noqa: BLE001  (whoever does this gets it too, no wrong number)
            observation.again_error = error
    if conditions.second:
        try:
            firsts, seconds = backward.second()
            observation.further |= seconds
            observation.again = _differing(firsts, observation) | observation.again
        except Exception as error:  # noqa: BLE001
            observation.second_error = error


def _note_gradients(
    gradients: ComputedGradients,
    also: set[Item],
    conditions: RunConditions,
    observation: Observation,
) -> None:
    for item, gradient in gradients.values.items():
        if gradient is None:
            continue
        observation.gradient_layouts[item] = gradient.layout
        if conditions.sketches and is_sketched(gradient):
            observation.gradient_forms[item] = stand_in_for(gradient)
        elif conditions.options.mode is not None:
            _note_least_noise(item, gradient, conditions.options.mode, observation)
    for item, kept_gradient in gradients.keep_all(conditions).items():
        table = observation.further if item in also else observation.gradients
        table[item] = kept_gradient


def _differing(gradients: dict[Item, Any], observation: Observation) -> dict[Item, Any]:
    """The gradients that have other bits than those of the first backward pass."""
    return {
        item: gradient
        for item, gradient in gradients.items()
        if not same_value(gradient, observation.value(item))
    }


def _cotangents(outputs: dict[Item, Tensor], conditions: RunConditions) -> dict[Item, Tensor]:
    """The upstream gradients: the known ones, or random ones for all outputs."""
    names = _names_of_first_run(outputs, conditions)
    pairs = zip(names, outputs.items(), strict=True)
    if conditions.upstream is not None:
        upstream = conditions.upstream
        return {
            item: upstream[name].to(leaf.device, leaf.dtype)
            for name, (item, leaf) in pairs
            if name in upstream and upstream[name].shape == leaf.shape
        }
    return {item: conditions.cotangent(name, leaf) for name, (item, leaf) in pairs}


@dataclasses.dataclass(frozen=True)
class _BackwardPass:
    """The backward pass of a call, which can be made again over the same graph.

    Attributes:
        targets: what is differentiated with respect to.
        cotangents: of the outputs.
    """

    outputs: dict[Item, Tensor]
    targets: dict[Item, Any]
    cotangents: dict[Item, Tensor]
    conditions: RunConditions
    observation: Observation

    def _around(self) -> contextlib.ExitStack:
        """What is set around it: no autocast, as torch's documentation requires."""
        with contextlib.ExitStack() as stack:
            for device in {leaf.device.type for leaf in self.outputs.values()}:
                stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(self.conditions.options.around())
            stack.enter_context(undoing_leftovers(self.observation.process))
            return stack.pop_all()

    def first(self, *, retains: bool) -> ComputedGradients:
        """The gradients from `torch.autograd.grad`, or accumulated into `.grad`."""
        retains |= self.conditions.second
        outputs, upstream = list(self.outputs.values()), list(self.cotangents.values())
        if not self.conditions.accumulates:
            sketching = sketching_gradients(self.targets if self.conditions.sketches else {})
            with sketching as sketches, self._around():
                target_gradients = torch.autograd.grad(
                    outputs,
                    list(self.targets.values()),
                    upstream,
                    retain_graph=retains,
                    allow_unused=True,
                )
            gradients: dict[Item, Tensor | None] = dict(
                zip(self.targets, target_gradients, strict=True)
            )
            return ComputedGradients(gradients, sketches)
        leaves_of = {item: t for item, t in self.targets.items() if isinstance(t, torch.Tensor)}
        old_gradients = {item: leaf.grad for item, leaf in leaves_of.items()}
        try:
            for leaf in leaves_of.values():
                leaf.grad = None
            with self._around():
                torch.autograd.backward(
                    outputs, upstream, retain_graph=retains, inputs=list(leaves_of.values())
                )
            return ComputedGradients({item: leaf.grad for item, leaf in leaves_of.items()})
        finally:
            for item, leaf in leaves_of.items():
                leaf.grad = old_gradients[item]

    def second(self) -> tuple[dict[Item, Tensor | None], dict[Item, Tensor | None]]:
        """The gradients once more, and the gradients of their products with random cotangents.

        The first cotangents are variables, too: most programs that differentiate twice need the
        derivative of a gradient with respect to them.
        """
        with self._around():
            for value in self.cotangents.values():
                value.requires_grad_()
            firsts = torch.autograd.grad(
                list(self.outputs.values()),
                list(self.targets.values()),
                list(self.cotangents.values()),
                create_graph=True,
                allow_unused=True,
            )
            first_gradients = {
                item: first
                for item, first in zip(self.targets, firsts, strict=True)
                if first is not None and first.requires_grad
            }
            if not first_gradients:
                raise RuntimeError(
                    "none of the gradients requires grad, even with create_graph=True"
                )
            refuse_once_differentiable(first_gradients.values())
            variables = {item.name: target for item, target in self.targets.items()}
            variables |= {f"the cotangent of {item}": v for item, v in self.cotangents.items()}
            drawn = [self.conditions.cotangent(item, g) for item, g in first_gradients.items()]
            seconds = torch.autograd.grad(
                list(first_gradients.values()), list(variables.values()), drawn, allow_unused=True
            )
            gradients: dict[Item, Tensor | None] = dict(zip(self.targets, firsts, strict=True))
            return ComputedGradients(gradients).keep_all(self.conditions), {
                Item(ItemKind.SECOND_GRADIENT, name): keep_leaf(second)
                for name, second in zip(variables, seconds, strict=True)
            }


def _names_of_first_run(outputs: Iterable[Item], conditions: RunConditions) -> list[Item]:
    names = list(outputs)
    first = [item for item in conditions.precisions if item.kind is not ItemKind.GRADIENT]
    return first if len(first) == len(names) and set(first) != set(names) else names
