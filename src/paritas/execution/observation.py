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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from paritas.execution.subjects import Inputs, Subject
    from paritas.numerics.contents import ContainerKind
    from paritas.precision.lifting import Decision, LiftMode

OUTPUT, INPUT, STATE, GRADIENT = "output", "input", "state", "gradient"
SECOND_GRADIENT = f"second {GRADIENT}"
AFTER, AFTER_BACKWARD = " after the call", " after backward"


def place_of(path: str) -> str:
    """The input, parameter or buffer whose value afterwards a path names."""
    return path.removesuffix(AFTER).removesuffix(AFTER_BACKWARD)


def is_afterwards(path: str) -> bool:
    """Whether a path names what an input, parameter or buffer is afterwards."""
    return path.endswith((AFTER, AFTER_BACKWARD))


@dataclasses.dataclass
class Observation:
    """What one call did. Tensors are copies: nothing that runs later can change them.

    Attributes:
        outputs: path -> leaf of what was returned.
        kinds: path -> what the leaves were taken out of: containers, objects, sparse tensors ...
        cut_off: the paths of returned tensors whose gradients cannot be asked for.
        after: path -> what an input holds after the call and after backward, where that changed.
        state: path -> what the program keeps (parameters, buffers, `.grad`, attributes, variables)
            after the call and after backward, where that changed.
        process: name -> what became of a setting or function of the process.
        live: path -> returned tensor itself, to see who writes to it later; not differentiable.
        gradients: path -> gradient of an input or parameter that requires grad, dense.
        further: path -> gradient that the caller's own call does not make: of an input that does
            not require grad, or of gradients.
        again: path -> gradient as a second backward pass over one graph gives it, if otherwise.
        gradient_layouts: path -> the layout a gradient came in.
        strides: path -> strides of the returned tensors.
        requires_grad: path -> flag of the returned tensors, and of inputs that were written to.
        inference: paths of the returned tensors that were made under `torch.inference_mode()`.
        aliases: pairs of paths that share memory, an output being one of each.
        decisions: path -> what decided a discrete output (lifted runs only).
        least_noise: path -> what its last sum must have rounded, per element (the arbiter only).
        rng_before: the random state it started from.
        rng_after: the random state that the call left.
        rng_after_backward: the random state that the backward pass left, if there was one.
        error: what the call raised.
        gradient_error: what the backward pass raised.
        second_error: why there are no gradients of gradients, where they were asked for.
    """

    outputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    kinds: dict[str, ContainerKind] = dataclasses.field(default_factory=dict)
    cut_off: list[str] = dataclasses.field(default_factory=list)
    after: dict[str, Any] = dataclasses.field(default_factory=dict)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    process: dict[str, str] = dataclasses.field(default_factory=dict)
    live: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    gradients: dict[str, Tensor | None] = dataclasses.field(default_factory=dict)
    further: dict[str, Tensor | None] = dataclasses.field(default_factory=dict)
    again: dict[str, Tensor | None] = dataclasses.field(default_factory=dict)
    gradient_layouts: dict[str, torch.layout] = dataclasses.field(default_factory=dict)
    strides: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    requires_grad: dict[str, bool] = dataclasses.field(default_factory=dict)
    inference: set[str] = dataclasses.field(default_factory=set)
    aliases: frozenset[tuple[str, str]] = frozenset()
    decisions: dict[str, Decision] = dataclasses.field(default_factory=dict)
    least_noise: dict[str, Tensor] = dataclasses.field(default_factory=dict)
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
        paths = (*self.after, *self.state)
        return self.backward_drew or any(path.endswith(AFTER_BACKWARD) for path in paths)

    @property
    def changed_state(self) -> list[str]:
        """The names of what changed of the program's state."""
        return [place_of(path).removeprefix(f"{STATE} ") for path in self.state]

    @property
    def written_later(self) -> list[str]:
        """The paths of the returned tensors that somebody has written to since."""
        return [
            path
            for path, tensor in self.live.items()
            if not is_same_leaf(self.outputs[path], as_plain(tensor))
        ]

    @property
    def is_stateless(self) -> bool:
        """Whether a second call with the same inputs must give the same."""
        return not (self.state or self.drew_random_numbers)

    @property
    def returned(self) -> Flat:
        """What was returned, to be matched."""
        return Flat(self.outputs, self.kinds)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Everything with a value: outputs, changed inputs and state, gradients."""
        yield from self.outputs.items()
        yield from self.after.items()
        yield from self.state.items()
        yield from self.gradients.items()
        yield from self.further.items()

    def value(self, path: str) -> Any:
        """One item by its path, or None."""
        for table in (self.outputs, self.after, self.state, self.gradients, self.further):
            if path in table:
                return table[path]
        return None


def note_decisions(
    seen: Observation, outputs: Mapping[str, Any], mode: LiftMode | None, *, floats: bool = False
) -> None:
    """Write down what decided discrete outputs of a run under `mode`; with `floats`, of all."""
    for path, value in outputs.items():
        if mode is None or not isinstance(value, torch.Tensor):
            continue
        decision = mode.decision_for(value) if floats or not is_inexact(value) else None
        if decision is not None:
            seen.decisions[path] = decision


def named_like(seen: Observation, reference: Observation) -> Observation:
    """The same observation with the reference's names for its outputs, taken in order.

    As it is if there are more or fewer of them.
    """
    if len(seen.outputs) != len(reference.outputs):
        return seen
    names = dict(zip(seen.outputs, reference.outputs, strict=True))

    def renamed(table: dict[str, Any]) -> dict[str, Any]:
        return {names.get(path, path): value for path, value in table.items()}

    return dataclasses.replace(
        seen,
        outputs=renamed(seen.outputs),
        kinds=reference.kinds,
        strides=renamed(seen.strides),
        requires_grad=renamed(seen.requires_grad),
        live=renamed(seen.live),
        inference={names.get(path, path) for path in seen.inference},
        aliases=frozenset((names.get(other, other), names[path]) for other, path in seen.aliases),
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
        wanted: the paths of the gradients to make; None for all of them.
        second: make the gradients of gradients, where the program has any.
        forward_once: one call only, and no backward pass.
    """

    wide: bool = False
    mode: LiftMode | None = None
    watch: contextlib.AbstractContextManager[Any] | None = None
    wanted: frozenset[str] | None = None
    second: bool = True
    forward_once: bool = False

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
        precisions: output path -> dtype that its cotangent is drawn in, set by the first run.
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
    precisions: dict[str, torch.dtype] = dataclasses.field(default_factory=dict)


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
    live, seen.kinds, seen.cut_off = returned.leaves, returned.kinds, returned.cut_off
    state = {f"{STATE} {path}": tensor for path, tensor in values.items()}
    seen.aliases = find_aliases(live, {**named_inputs, **state})
    del result, returned
    _note_outputs(live, conditions, seen)
    _note_inputs(inputs, before, seen, AFTER)
    changed = subject.state.changed(conditions.changing)
    for name, value in changed.items():
        seen.state |= _values_after(f"{STATE} {name}", value, AFTER)
    if conditions.gradients:
        live |= {f"{path}{AFTER}": t for path, t in named_inputs.items() if t.grad_fn is not None}
        subject.state.touch()
        try:
            _differentiate(live, targets, conditions, seen)
        finally:
            seen.process |= process.put_back()
        seen.rng_after_backward = RandomState.now()
        _note_inputs(inputs, before, seen, AFTER_BACKWARD)
        _note_state_after_backward(subject, changed, conditions, seen)


def _note_inputs(inputs: Inputs, before: dict[str, Any], seen: Observation, when: str) -> None:
    """Write down what an input holds where it is not what it was before, and is from now on."""
    now = input_contents(inputs, copy_tensors=False)
    for path in [*before, *(path for path in now if path not in before)]:
        value = now.get(path, MISSING)
        if is_same_leaf(before.get(path, MISSING), value):
            continue
        seen.after |= _values_after(path, value, when)
        before[path] = value
        if isinstance(value, torch.Tensor):
            before[path] = detached_copy(value)
            seen.requires_grad[f"{path}{when}"] = value.requires_grad


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
            seen.state |= _values_after(f"{STATE} {name}", right, AFTER_BACKWARD)


def _values_after(path: str, value: Any, when: str) -> dict[str, Any]:
    """A value after the call, or the parts of a tensor that is not dense."""
    if not isinstance(value, torch.Tensor):
        return {f"{path}{when}": _keep_leaf(value)}
    leaves = flattened(value.detach(), path).leaves
    return {f"{where}{when}": _keep_leaf(leaf) for where, leaf in leaves.items()}


def _note_outputs(live: dict[str, Any], conditions: RunConditions, seen: Observation) -> None:
    """Copy what was returned, and let go of each that nobody differentiates."""
    for path, leaf in live.items():
        _note_output(path, leaf, conditions, seen)
        if not conditions.gradients:
            live[path] = None


def _note_output(path: str, leaf: Any, conditions: RunConditions, seen: Observation) -> None:
    mode = conditions.options.mode
    seen.outputs[path] = _keep_leaf(leaf)
    if not isinstance(leaf, torch.Tensor):
        return
    seen.requires_grad[path] = leaf.requires_grad
    if conditions.holds:
        seen.live[path] = leaf.detach()
    if leaf.is_inference():
        seen.inference.add(path)
    if leaf.layout is torch.strided and not leaf.is_nested:
        seen.strides[path] = tuple(leaf.stride())
    if mode is None:
        return
    if leaf.is_floating_point():
        _note_least_noise(path, leaf, mode, seen)
    else:
        note_decisions(seen, {path: leaf}, mode)


def _note_least_noise(path: str, leaf: Tensor, mode: LiftMode, seen: Observation) -> None:
    least = mode.least_noise_of(leaf)
    if least is not None:
        seen.least_noise[path] = least


def _gradient_targets(
    values: dict[str, Tensor], named_inputs: dict[str, Tensor], conditions: RunConditions
) -> dict[str, Any]:
    """What gradients are asked of, by path, as it is before the call.

    What an operator made is known by its place in the graph: the program may write to it.
    """
    if not conditions.gradients:
        return {}
    named = {f"{GRADIENT} of {name}": t for name, t in values.items() if t.is_leaf}
    named |= {f"{GRADIENT} of {path}": t for path, t in named_inputs.items()}
    return {
        path: t if t.is_leaf else torch.autograd.graph.get_gradient_edge(t)
        for path, t in named.items()
        if t.requires_grad
        and (
            conditions.options.wanted is None
            or conditions.second
            or path in conditions.options.wanted
        )
    }


def _differentiate(
    live: dict[str, Any], targets: dict[str, Any], conditions: RunConditions, seen: Observation
) -> None:
    outputs = {
        path: leaf
        for path, leaf in live.items()
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }
    also = {f"{GRADIENT} of {path}" for path in conditions.also}
    if not outputs:  # then nothing flows back to them either
        seen.further |= {path: None for path in targets if path in also}
    if not outputs or not targets:
        return
    names = _names_of_first_run(outputs, conditions)
    cotangents = {
        path: cotangent(
            name, leaf, conditions.seed, conditions.precisions.setdefault(name, leaf.dtype)
        )
        for name, (path, leaf) in zip(names, outputs.items(), strict=True)
    }
    try:
        with _no_autocast(outputs.values()), conditions.options.around():
            gradients = _first_gradients(outputs, targets, cotangents, conditions)
    except Exception as error:  # noqa: BLE001
        seen.gradient_error = error
        return
    for path, gradient in gradients.items():
        table = seen.further if path in also else seen.gradients
        table[path] = _keep_leaf(gradient)
        if gradient is not None:
            seen.gradient_layouts[path] = gradient.layout
        if gradient is not None and conditions.options.mode is not None:
            _note_least_noise(path, gradient, conditions.options.mode, seen)
    if conditions.second:
        try:
            with _no_autocast(outputs.values()), conditions.options.around():
                firsts, seconds = _second_gradients(outputs, targets, cotangents, conditions)
            seen.further |= seconds
            seen.again = {
                path: first
                for path, first in firsts.items()
                if not same_value(first, seen.value(path))
            }
        except Exception as error:  # noqa: BLE001
            seen.second_error = error


def _first_gradients(
    outputs: dict[str, Tensor],
    targets: dict[str, Any],
    cotangents: dict[str, Tensor],
    conditions: RunConditions,
) -> dict[str, Tensor | None]:
    """The gradients by path, as `torch.autograd.grad` gives them or as `.grad` gets them."""
    if not conditions.accumulates:
        found = torch.autograd.grad(
            list(outputs.values()),
            list(targets.values()),
            list(cotangents.values()),
            retain_graph=conditions.second,
            allow_unused=True,
        )
        return dict(zip(targets, found, strict=True))
    leaves_of = {path: t for path, t in targets.items() if isinstance(t, torch.Tensor)}
    kept = {path: leaf.grad for path, leaf in leaves_of.items()}
    try:
        for leaf in leaves_of.values():
            leaf.grad = None
        torch.autograd.backward(
            list(outputs.values()),
            list(cotangents.values()),
            retain_graph=conditions.second,
            inputs=list(leaves_of.values()),
        )
        return {path: leaf.grad for path, leaf in leaves_of.items()}
    finally:
        for path, leaf in leaves_of.items():
            leaf.grad = kept[path]


def _second_gradients(
    outputs: dict[str, Tensor],
    targets: dict[str, Any],
    cotangents: dict[str, Tensor],
    conditions: RunConditions,
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
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
        path: first
        for path, first in zip(targets, firsts, strict=True)
        if first is not None and first.requires_grad
    }
    if not known:
        message = "none of the gradients requires grad, even with create_graph=True"
        raise RuntimeError(message)
    refuse_once_differentiable(known.values())
    variables = {path.removeprefix(f"{GRADIENT} of "): target for path, target in targets.items()}
    variables |= {f"the cotangent of {path}": value for path, value in cotangents.items()}
    drawn = [
        cotangent(path, first, conditions.seed, conditions.precisions.setdefault(path, first.dtype))
        for path, first in known.items()
    ]
    seconds = torch.autograd.grad(
        list(known.values()), list(variables.values()), drawn, allow_unused=True
    )
    return dict(zip(targets, map(_keep_leaf, firsts), strict=True)), {
        f"{SECOND_GRADIENT} of {name}": _keep_leaf(second)
        for name, second in zip(variables, seconds, strict=True)
    }


def _names_of_first_run(outputs: Iterable[str], conditions: RunConditions) -> list[str]:
    """The paths of outputs, or those of the first run, in order, if it had others."""
    names = list(outputs)
    first = [path for path in conditions.precisions if not path.startswith(GRADIENT)]
    return first if len(first) == len(names) and set(first) != set(names) else names


def cotangent(path: str, output: Tensor, seed: int, precision: torch.dtype) -> Tensor:
    """A random upstream gradient: the same numbers for every side and in every run.

    They have the bits of the reference's own dtype, so that they are exact in every run and their
    sums round as in any program.
    """
    generator = torch.Generator("cpu").manual_seed(seed + _stable_hash(path))
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


def find_aliases(outputs: dict[str, Any], given: dict[str, Any]) -> frozenset[tuple[str, str]]:
    """Which outputs share memory: with what was given, and with each other."""
    known: dict[int, list[str]] = {}
    for path, value in given.items():
        key = storage_address(value)
        if key:
            known.setdefault(key, []).append(path)
    pairs: set[tuple[str, str]] = set()
    for path, leaf in outputs.items():
        key = storage_address(leaf)
        if key:
            pairs |= {(other, path) for other in known.get(key, [])}
            known.setdefault(key, []).append(path)
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
