"""Run one side once and write down everything a caller could see of it."""

from __future__ import annotations

import array
import contextlib
import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paritas._torch.attention import any_attention
from paritas._torch.stances import taking_stance
from paritas.checking.isolation import copied
from paritas.numerics.flattening import Flat, as_plain, flattened, is_dense
from paritas.numerics.metrics import bitwise_equal
from paritas.numerics.trees import leaves
from paritas.recording.isolation import Copier, RandomState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from paritas._torch.decisions import Decision
    from paritas._torch.lifting import LiftMode
    from paritas.checking.config import Inputs
    from paritas.checking.subjects import Subject
    from paritas.numerics.contents import Kind

OUTPUT, INPUT, STATE, GRADIENT = "output", "input", "state", "gradient"
AFTER = " after the call"


@dataclasses.dataclass
class Observation:
    """What one call did. Tensors are copies: nothing that runs later can change them.

    Attributes:
        outputs: path -> leaf of what was returned.
        kinds: path -> what the leaves were taken out of: containers, objects, sparse tensors ...
        cut_off: the paths of returned tensors whose gradients cannot be asked for.
        after: path -> input after the call, where its bits changed.
        state: name -> parameter or buffer after the call, where its bits changed.
        gradients: path -> gradient of an input or parameter, dense.
        gradient_layouts: path -> the layout it came in.
        strides: path -> strides of the returned tensors.
        requires_grad: path -> flag of the returned tensors.
        aliases: pairs of paths that share memory, an output being one of each.
        decisions: path -> what decided a discrete output (lifted runs only).
        least_noise: path -> what its last sum must have rounded, per element (the arbiter only).
        rng_before: the random state it started from.
        rng_after: the random state it left.
        error: what the call raised.
        gradient_error: what the backward pass raised.
    """

    outputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    kinds: dict[str, Kind] = dataclasses.field(default_factory=dict)
    cut_off: list[str] = dataclasses.field(default_factory=list)
    after: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    state: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    gradients: dict[str, Tensor | None] = dataclasses.field(default_factory=dict)
    gradient_layouts: dict[str, torch.layout] = dataclasses.field(default_factory=dict)
    strides: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    requires_grad: dict[str, bool] = dataclasses.field(default_factory=dict)
    aliases: frozenset[tuple[str, str]] = frozenset()
    decisions: dict[str, Decision] = dataclasses.field(default_factory=dict)
    least_noise: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    rng_before: RandomState | None = None
    rng_after: RandomState | None = None
    error: Exception | None = None
    gradient_error: Exception | None = None

    @property
    def drew_random_numbers(self) -> bool:
        """Whether torch's generators moved."""
        if self.rng_before is None or self.rng_after is None:
            return False
        return not self.rng_before.same_torch(self.rng_after)

    @property
    def changed_state(self) -> list[str]:
        """The names of the parameters and buffers that changed."""
        return [path.removeprefix(f"{STATE} ").removesuffix(AFTER) for path in self.state]

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

    def value(self, path: str) -> Any:
        """One item by its path, or None."""
        for table in (self.outputs, self.after, self.state, self.gradients):
            if path in table:
                return table[path]
        return None


def named_like(seen: Observation, reference: Observation) -> Observation:
    """The same observation with the reference's names for its outputs, taken in order.

    As it is if there are more or fewer of them.
    """
    if len(seen.outputs) != len(reference.outputs):
        return seen
    names = dict(zip(seen.outputs, reference.outputs, strict=True))

    def renamed(table: dict[str, Any]) -> dict[str, Any]:
        return {names[path]: value for path, value in table.items()}

    return dataclasses.replace(
        seen,
        outputs=renamed(seen.outputs),
        kinds=reference.kinds,
        strides=renamed(seen.strides),
        requires_grad=renamed(seen.requires_grad),
        aliases=frozenset((names.get(other, other), names[path]) for other, path in seen.aliases),
    )


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Under which a side is run.

    Attributes:
        gradients: differentiate, with cotangents from `seed`.
        wanted: the paths of the gradients to make; None for all of them.
        seed: see above.
        wide: inputs and state in float64; the default dtype is the caller's affair.
        mode: a lifted run's dispatch mode.
        watch: entered around the program's own code only, like the mode.
        changing: the parameters and buffers to look at after the call; None for all of them.
        precisions: output path -> dtype that its cotangent is drawn in, set by the first run.
    """

    gradients: bool
    seed: int
    wanted: frozenset[str] | None = None
    wide: bool = False
    mode: LiftMode | None = None
    watch: contextlib.AbstractContextManager[Any] | None = None
    changing: frozenset[str] | None = None
    precisions: dict[str, torch.dtype] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def around_the_program(self) -> Iterator[None]:
        """Enter the mode and the watch."""
        with self.watch or contextlib.nullcontext(), self.mode or contextlib.nullcontext():
            yield


@contextlib.contextmanager
def running(
    subject: Subject, rng: RandomState, conditions: Conditions
) -> Iterator[Callable[[Inputs], Observation]]:
    """Give a function that calls `subject` and observes it; state goes on from call to call.

    Whatever the subject raises is an observation, not an error of ours. At the end its state is
    what it was.
    """
    rng.restore()
    with contextlib.ExitStack() as stack:
        stack.callback(subject.state.restore)
        values = subject.state.tensors
        if conditions.wide:
            values = subject.state.widened()
            stack.enter_context(subject.state.swapped(values))
            stack.enter_context(any_attention())
        if conditions.mode is not None:
            stack.enter_context(taking_stance("force_eager"))

        def call(inputs: Inputs) -> Observation:
            seen = Observation()
            fresh = copied(inputs, widen=conditions.wide)
            _observe_call(subject, fresh, values, conditions, seen)
            return seen

        yield call


def _observe_call(
    subject: Subject,
    inputs: Inputs,
    values: dict[str, Tensor],
    conditions: Conditions,
    seen: Observation,
) -> None:
    named_inputs = dict(input_tensors(inputs))
    # Only a copy of what came in can tell whether it was changed in place.
    before = {path: _copy_of(tensor) for path, tensor in named_inputs.items()}
    seen.rng_before = RandomState.now()
    subject.state.touch()
    try:
        with conditions.around_the_program():
            result = subject.call(*inputs.args, **inputs.kwargs)
    except Exception as error:  # noqa: BLE001  (any failure of theirs is what we report)
        seen.error = error
        return
    seen.rng_after = RandomState.now()
    returned = flattened(result, OUTPUT)
    live, seen.kinds, seen.cut_off = returned.leaves, returned.kinds, returned.cut_off
    state = {f"{STATE} {path}": tensor for path, tensor in values.items()}
    seen.aliases = aliases(live, {**named_inputs, **state})
    del result, returned
    _note_outputs(live, conditions, seen)
    for path, tensor in named_inputs.items():
        if not bitwise_equal(tensor.detach(), before[path]):
            seen.after |= _after(path, tensor)
    for name, tensor in subject.state.changed(conditions.changing).items():
        seen.state |= _after(f"{STATE} {name}", tensor)
    if conditions.gradients:
        _differentiate(subject, live, named_inputs, values, conditions, seen)


def _copy_of(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.clone() if is_dense(tensor) else Copier().copy_tensor(tensor)


def _after(path: str, tensor: Tensor) -> dict[str, Any]:
    """A tensor after the call, or the parts of one that is not dense."""
    leaves = flattened(tensor.detach(), path).leaves
    return {f"{where}{AFTER}": _kept(leaf) for where, leaf in leaves.items()}


def _note_outputs(live: dict[str, Any], conditions: Conditions, seen: Observation) -> None:
    """Copy what was returned, and let go of each that nobody differentiates."""
    for path, leaf in live.items():
        _note_output(path, leaf, conditions.mode, seen)
        if not conditions.gradients:
            live[path] = None


def _note_output(path: str, leaf: Any, mode: LiftMode | None, seen: Observation) -> None:
    seen.outputs[path] = _kept(leaf)
    if not isinstance(leaf, torch.Tensor):
        return
    seen.requires_grad[path] = leaf.requires_grad
    if leaf.layout is torch.strided and not leaf.is_nested:
        seen.strides[path] = tuple(leaf.stride())
    if mode is None:
        return
    if leaf.is_floating_point():
        _note_least_noise(path, leaf, mode, seen)
    elif not leaf.is_complex():
        decision = mode.decision_for(leaf)
        if decision is not None:
            seen.decisions[path] = decision


def _note_least_noise(path: str, leaf: Tensor, mode: LiftMode, seen: Observation) -> None:
    least = mode.least_noise_of(leaf)
    if least is not None:
        seen.least_noise[path] = least


def _differentiate(
    subject: Subject,
    live: dict[str, Any],
    named_inputs: dict[str, Tensor],
    values: dict[str, Tensor],
    conditions: Conditions,
    seen: Observation,
) -> None:
    outputs = {
        path: leaf
        for path, leaf in live.items()
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }
    named_values = {f"{GRADIENT} of {name}": tensor for name, tensor in values.items()}
    named_values |= {f"{GRADIENT} of {path}": tensor for path, tensor in named_inputs.items()}
    targets = {
        name: t
        for name, t in named_values.items()
        if t.requires_grad
        and t.is_leaf
        and (conditions.wanted is None or name in conditions.wanted)
    }
    if not outputs or not targets:
        return
    names = _known_names(outputs, conditions)
    cotangents = [
        cotangent(name, leaf, conditions.seed, conditions.precisions.setdefault(name, leaf.dtype))
        for name, leaf in zip(names, outputs.values(), strict=True)
    ]
    subject.state.touch()
    try:
        with _no_autocast(outputs.values()), conditions.around_the_program():
            gradients = torch.autograd.grad(
                list(outputs.values()), list(targets.values()), cotangents, allow_unused=True
            )
    except Exception as error:  # noqa: BLE001
        seen.gradient_error = error
        return
    for path, gradient in zip(targets, gradients, strict=True):
        seen.gradients[path] = None if gradient is None else _kept(gradient)
        if gradient is not None:
            seen.gradient_layouts[path] = gradient.layout
        if gradient is not None and conditions.mode is not None:
            _note_least_noise(path, gradient, conditions.mode, seen)


def _known_names(outputs: Iterable[str], conditions: Conditions) -> list[str]:
    """The paths of outputs, or those of the first run, in order, if it had others."""
    names, first = list(outputs), list(conditions.precisions)
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
    for path, leaf in leaves(list(inputs.args)):
        if isinstance(leaf, torch.Tensor):
            yield f"{INPUT}{path}", leaf
    for path, leaf in leaves(inputs.kwargs):
        if isinstance(leaf, torch.Tensor):
            yield f"{INPUT}{path}", leaf


def aliases(outputs: dict[str, Any], given: dict[str, Any]) -> frozenset[tuple[str, str]]:
    """Which outputs share memory: with what was given, and with each other."""
    known: dict[int, list[str]] = {}
    for path, value in given.items():
        key = memory(value)
        if key:
            known.setdefault(key, []).append(path)
    pairs: set[tuple[str, str]] = set()
    for path, leaf in outputs.items():
        key = memory(leaf)
        if key:
            pairs |= {(other, path) for other in known.get(key, [])}
            known.setdefault(key, []).append(path)
    return frozenset(pairs)


def memory(value: Any) -> int:
    """The address of a tensor's storage; 0 if it has none of its own, or is no tensor."""
    if not isinstance(value, torch.Tensor):
        return 0
    try:
        return int(value.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # sparse, nested and wrapper tensors
        return 0


def _kept(leaf: Any) -> Any:
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
