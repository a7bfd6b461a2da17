"""Run one side once and write down everything a caller could see of it."""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paritas._torch.global_state import taking_stance
from paritas._torch.kernels import any_attention
from paritas._torch.tensors import copy_hooks, refuse_once_differentiable
from paritas.execution.isolation import (
    MISSING,
    copy_inputs,
    detached_copy,
    frozen_leaf,
    is_same_leaf,
)
from paritas.execution.saved_state import ProcessState, RandomState
from paritas.numerics.bits import is_inexact
from paritas.numerics.contents import contents, map_leaves, same_leaf
from paritas.numerics.flattening import Flat, as_plain, flattened
from paritas.numerics.metrics import bitwise_equal
from paritas.results.items import Item, ItemKind, output
from paritas.results.items import gradient as gradient_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from paritas.execution.subjects import Inputs, Subject
    from paritas.numerics.contents import ContainerKind
    from paritas.precision.lifting import Decision, LiftMode

# The names of what is returned and given begin with these.
OUTPUT, INPUT = "output", "input"


@dataclasses.dataclass
class Observation:
    """What one call did. Tensors are copies: nothing that runs later can change them.

    Attributes:
        outputs: item -> leaf of what was returned.
        kinds: path -> what the leaves were taken out of: containers, objects, sparse tensors ...
        cut_off: the paths of returned tensors whose gradients cannot be asked for.
        after: item -> what an input holds after the call and after backward, where that changed.
        state: item -> what the program keeps (parameters, buffers, `.grad`, attributes, variables)
            after the call and after backward, where that changed.
        process: name -> what became of a setting or function of the process.
        live: item -> returned tensor itself, to see who writes to it later; not differentiable.
        gradients: item -> gradient of an input or parameter that requires grad, dense.
        further: item -> gradient that the caller's own call does not make: of an input that does
            not require grad, or of gradients.
        again: item -> gradient as a second backward pass over one graph gives it, if otherwise.
        gradient_layouts: item -> the layout a gradient came in.
        strides: item -> strides of the returned tensors.
        requires_grad: item -> flag of the returned tensors, and of inputs that were written to.
        inference: the returned tensors that were made under `torch.inference_mode()`.
        aliases: pairs of items that share memory, an output being one of each.
        decisions: item -> what decided a discrete output (lifted runs only).
        least_noise: item -> what its last sum must have rounded, per element (the arbiter only).
        rng_before: the random state it started from.
        rng_after: the random state that the call left.
        rng_after_backward: the random state that the backward pass left, if there was one.
        error: what the call raised.
        gradient_error: what the backward pass raised.
        second_error: why there are no gradients of gradients, where they were asked for.
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
        """Whether the backward pass does anything but give gradients."""
        items = (*self.after, *self.state)
        return self.backward_drew or any(item.kind.is_after_backward for item in items)

    @property
    def changed_state(self) -> list[str]:
        """The names of what changed of the program's state."""
        return [item.name for item in self.state]

    @property
    def written_later(self) -> list[Item]:
        """The returned tensors that somebody has written to since."""
        return [
            item
            for item, tensor in self.live.items()
            if not is_same_leaf(self.outputs[item], as_plain(tensor))
        ]

    @property
    def is_stateless(self) -> bool:
        """Whether a second call with the same inputs must give the same."""
        return not (self.state or self.drew_random_numbers)

    @property
    def returned(self) -> Flat:
        """What was returned, to be matched."""
        return Flat({item.name: leaf for item, leaf in self.outputs.items()}, self.kinds)

    def items(self) -> Iterator[tuple[Item, Any]]:
        """Everything with a value: outputs, changed inputs and state, gradients."""
        yield from self.outputs.items()
        yield from self.after.items()
        yield from self.state.items()
        yield from self.gradients.items()
        yield from self.further.items()

    def value(self, item: Item) -> Any:
        """What an item is, or None."""
        for table in (self.outputs, self.after, self.state, self.gradients, self.further):
            if item in table:
                return table[item]
        return None


def note_decisions(
    seen: Observation, outputs: Mapping[Item, Any], mode: LiftMode | None, *, floats: bool = False
) -> None:
    """Write down what decided discrete outputs of a run under `mode`; with `floats`, of all."""
    for item, value in outputs.items():
        if mode is None or not isinstance(value, torch.Tensor):
            continue
        decision = mode.decision_for(value) if floats or not is_inexact(value) else None
        if decision is not None:
            seen.decisions[item] = decision


def named_like(seen: Observation, reference: Observation) -> Observation:
    """The same observation with the reference's names for its outputs, taken in order.

    As it is if there are more or fewer of them.
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


class _Around(contextlib.AbstractContextManager[None]):
    """Several managers as one that can be entered again; a missing one is left out."""

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
    """How a program is run this time.

    Attributes:
        wide: on inputs and state in float64; the default dtype is the caller's affair.
        mode: a lifted run's dispatch mode.
        watch: entered around the program's own code only, like the mode.
        wanted: the gradients to make; None for all of them.
        second: make the gradients of gradients, where the program has any.
        forward_once: one call only, and no backward pass.
        other_draws: unless 0, begin with the random numbers of this seed, not with those of every
            other run.
    """

    wide: bool = False
    mode: LiftMode | None = None
    watch: contextlib.AbstractContextManager[Any] | None = None
    wanted: frozenset[Item] | None = None
    second: bool = True
    forward_once: bool = False
    other_draws: int = 0

    def around(self) -> contextlib.AbstractContextManager[None]:
        """What is entered around the program's own code, each time that it runs."""
        return _Around(self.watch, self.mode)


@dataclasses.dataclass(frozen=True)
class RunConditions:
    """Under which a side is run.

    Attributes:
        gradients: differentiate, with cotangents from `seed`.
        seed: see above.
        also: inputs to differentiate although the caller's do not require grad.
        written: inputs that a program writes to, which a leaf that requires grad forbids.
        second: differentiate the gradients too.
        accumulates: by way of `.grad`, so that what hangs on its accumulation runs.
        changing: the names of the state to look at after the call; None for all of it.
        holds: keep the returned tensors themselves as well.
        options: what is particular to one run.
        precisions: item -> dtype that its cotangent is drawn in, set by the first run.
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


@contextlib.contextmanager
def running_subject(
    subject: Subject, rng: RandomState, conditions: RunConditions
) -> Iterator[Callable[[Inputs], Observation]]:
    """Give a function that calls `subject` and observes it; state goes on from call to call.

    Whatever the subject raises is an observation, not an error of ours. At the end its state is
    what it was.
    """
    rng.restore()
    with contextlib.ExitStack() as stack:
        stack.callback(subject.state.restore)
        values = subject.state.tensors
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
    """The copies, with the flags that the run asks for.

    A leaf that requires grad cannot be written to. So what the caller made by an operator is made
    by one here, and so is what a program is known to write to.
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
        and places[storage_address(tensor)] == 1  # a copy of its own would no longer share memory
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
    # Only a copy of what came in can tell whether it was changed in place.
    before = input_contents(inputs)
    seen.rng_before = RandomState.now()
    subject.state.touch()
    process = ProcessState()
    try:
        with conditions.options.around():
            result = subject.call(*inputs.args, **inputs.kwargs)
    except Exception as error:  # noqa: BLE001  (any failure of theirs is what we report)
        seen.error = error
        return
    finally:
        seen.process = process.put_back()
    seen.rng_after = RandomState.now()
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
        seen.rng_after_backward = RandomState.now()
        _note_inputs(inputs, before, seen, ItemKind.INPUT_AFTER_BACKWARD)
        _note_state_after_backward(subject, changed, conditions, seen)


def _note_inputs(inputs: Inputs, before: dict[str, Any], seen: Observation, kind: ItemKind) -> None:
    """Write down what an input holds where it is not what it was before, and is from now on."""
    now = input_contents(inputs, copy_tensors=False)
    for path in [*before, *(path for path in now if path not in before)]:
        value = now.get(path, MISSING)
        if is_same_leaf(before.get(path, MISSING), value):
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
    """Write down what the backward pass itself changed: it has no business with most of it."""
    now = subject.state.changed(conditions.changing)
    for name in dict.fromkeys((*changed, *now)):
        first = subject.state.initial(name)
        left, right = changed.get(name, first), now.get(name, first)
        same = is_same_leaf(left, right, widened=conditions.options.wide)
        if not same and not is_same_leaf(right, left, widened=conditions.options.wide):
            seen.state |= _values_after(Item(ItemKind.STATE_AFTER_BACKWARD, name), right)


def _values_after(item: Item, value: Any) -> dict[Item, Any]:
    """A value afterwards, or the parts of a tensor that is not dense."""
    if not isinstance(value, torch.Tensor):
        return {item: _keep_leaf(value)}
    leaves = flattened(value.detach(), item.name).leaves
    return {item.named(name): _keep_leaf(leaf) for name, leaf in leaves.items()}


def _note_outputs(live: dict[Item, Any], conditions: RunConditions, seen: Observation) -> None:
    """Copy what was returned, and let go of each that nobody differentiates."""
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
    """What gradients are asked of, as it is before the call.

    What an operator made is known by its place in the graph: the program may write to it.
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
    if not outputs:  # then nothing flows back to them either
        seen.further |= {item: None for item in targets if item in also}
    if not outputs or not targets:
        return
    names = _names_of_first_run(outputs, conditions)
    cotangents = {
        item: cotangent(
            name, leaf, conditions.seed, conditions.precisions.setdefault(name, leaf.dtype)
        )
        for name, (item, leaf) in zip(names, outputs.items(), strict=True)
    }
    try:
        with _no_autocast(outputs.values()), conditions.options.around():
            gradients = _first_gradients(outputs, targets, cotangents, conditions)
    except Exception as error:  # noqa: BLE001
        seen.gradient_error = error
        return
    for item, gradient in gradients.items():
        table = seen.further if item in also else seen.gradients
        table[item] = _keep_leaf(gradient)
        if gradient is not None:
            seen.gradient_layouts[item] = gradient.layout
        if gradient is not None and conditions.options.mode is not None:
            _note_least_noise(item, gradient, conditions.options.mode, seen)
    if conditions.second:
        try:
            with _no_autocast(outputs.values()), conditions.options.around():
                firsts, seconds = _second_gradients(outputs, targets, cotangents, conditions)
            seen.further |= seconds
            seen.again = {
                item: first
                for item, first in firsts.items()
                if not same_value(first, seen.value(item))
            }
        except Exception as error:  # noqa: BLE001
            seen.second_error = error


def _first_gradients(
    outputs: dict[Item, Tensor],
    targets: dict[Item, Any],
    cotangents: dict[Item, Tensor],
    conditions: RunConditions,
) -> dict[Item, Tensor | None]:
    """The gradients, as `torch.autograd.grad` gives them or as `.grad` gets them."""
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
    """The gradients once more, and the gradients of them, each dotted with a random cotangent.

    The first cotangents are variables too: how a gradient depends on them is what most programs
    that differentiate twice ask of the operators inside.
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
        message = "none of the gradients requires grad, even with create_graph=True"
        raise RuntimeError(message)
    refuse_once_differentiable(known.values())
    variables = {item.name: target for item, target in targets.items()}
    variables |= {f"the cotangent of {item}": value for item, value in cotangents.items()}
    drawn = [
        cotangent(item, first, conditions.seed, conditions.precisions.setdefault(item, first.dtype))
        for item, first in known.items()
    ]
    seconds = torch.autograd.grad(
        list(known.values()), list(variables.values()), drawn, allow_unused=True
    )
    return dict(zip(targets, map(_keep_leaf, firsts), strict=True)), {
        Item(ItemKind.SECOND_GRADIENT, name): _keep_leaf(second)
        for name, second in zip(variables, seconds, strict=True)
    }


def _names_of_first_run(outputs: Iterable[Item], conditions: RunConditions) -> list[Item]:
    """The outputs, or those of the first run, in order, if it had others."""
    names = list(outputs)
    first = [item for item in conditions.precisions if item.kind is not ItemKind.GRADIENT]
    return first if len(first) == len(names) and set(first) != set(names) else names


def cotangent(item: Item, output: Tensor, seed: int, precision: torch.dtype) -> Tensor:
    """A random upstream gradient: the same numbers for every side and in every run.

    They have the bits of the reference's own dtype, so that they are exact in every run and their
    sums round as in any program.
    """
    generator = torch.Generator("cpu").manual_seed(seed + _stable_hash(item.text))
    shape = (*output.shape, 2) if output.is_complex() else tuple(output.shape)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    real = precision.to_real() if precision.is_complex else precision
    drawn = drawn.to(real).to(torch.float64)
    if output.is_complex():
        drawn = torch.view_as_complex(drawn)
    return drawn.to(output.device, output.dtype)


def input_tensors(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments, each with the path a caller would write."""
    for given in (list(inputs.args), inputs.kwargs):
        for path, leaf in contents(given, INPUT):
            if isinstance(leaf, torch.Tensor):
                yield path, leaf


def input_contents(inputs: Inputs, *, copy_tensors: bool = True) -> dict[str, Any]:
    """All that the arguments hold, by path, and the gradients that their tensors carry."""
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


def find_aliases(outputs: dict[Item, Any], given: dict[Item, Any]) -> frozenset[tuple[Item, Item]]:
    """Which outputs share memory: with what was given, and with each other."""
    known: dict[int, list[Item]] = {}
    for item, value in given.items():
        key = storage_address(value)
        if key:
            known.setdefault(key, []).append(item)
    pairs: set[tuple[Item, Item]] = set()
    for item, leaf in outputs.items():
        key = storage_address(leaf)
        if key:
            pairs |= {(other, item) for other in known.get(key, [])}
            known.setdefault(key, []).append(item)
    return frozenset(pairs)


def storage_address(value: Any) -> int:
    """The address of a tensor's storage; 0 if it has none of its own, or is no tensor."""
    if not isinstance(value, torch.Tensor):
        return 0
    try:
        return int(value.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # sparse, nested and wrapper tensors
        return 0


def same_value(left: Any, right: Any) -> bool:
    """Whether two kept values are the same to the bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bitwise_equal(left, right)
    return left is right or same_leaf(left, right) is True


def _keep_leaf(leaf: Any) -> Any:
    """A copy that nothing which runs later can change."""
    plain = as_plain(leaf)
    if isinstance(plain, torch.Tensor):
        return plain.clone()
    return copy.copy(plain) if isinstance(plain, _WRITABLE) else plain


# The leaves that are no tensors, nor become one, and can be written to.
_WRITABLE = (bytearray, array.array, np.ndarray)


def _stable_hash(text: str) -> int:
    return sum((position + 1) * ord(letter) for position, letter in enumerate(text)) % 1_000_003


@contextlib.contextmanager
def _no_autocast(outputs: Any) -> Iterator[None]:
    """Backward passes run outside autocast, as torch's documentation asks of everyone."""
    with contextlib.ExitStack() as stack:
        for device in {output.device.type for output in outputs}:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
