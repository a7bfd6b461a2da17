"""The call that computed a tensor, run again with one of its operators changed.

Only calls of the running program are known as such, never those that a file names: nothing from a
file is executed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import operator
import re
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.tapes import Tape, check_alike, copy_arguments, is_within
from paritas.core.execution.saved_state import Copier
from paritas.core.execution.scouting import attempt_apart, can_scout, is_scout
from paritas.core.operators.catalogue import operators_of
from paritas.core.precision.lifting import LiftMode
from paritas.core.torch_private.global_state import quietly
from paritas.core.torch_private.operators import (
    DispatchMode,
    Operator,
    Traits,
    bind_arguments,
    call_bound,
    checks_arguments,
    count_results,
    map_call,
    out_of_place,
    own_default,
    signature_of,
    tensors_in,
    traits,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from paritas.core.operators.definitions import Group

# What an operator raises for arguments that it does not take.
UNUSABLE = (RuntimeError, ValueError, LookupError, TypeError, ArithmeticError, AttributeError)
# Of a call of more operators than this, only the last ones are changed.
MOST_STEPS = 24
# A call of more than this is a program, not an operator.
MOST_OPERATORS = 40
# Kernels that trust what the forward pass saved for them: on anything else they end the process.
_TRUSTING = re.compile("(attention|rnn|lstm|gru|fused|cudnn|mkldnn|miopen).*backward")
# The place of the call itself, if it is the call of an operator.
WHOLE = -1


@functools.cache
def step_names(*groups: Group) -> frozenset[str]:
    """The names that steps have of the operators of any of these groups."""
    return frozenset(name.strip("_") for name in operators_of(*groups))


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One operator of a call.

    Attributes:
        operator: the overload.
        values: all of its arguments by name, in the order of its schema.
    """

    operator: Operator
    values: Mapping[str, Any]

    @functools.cached_property
    def traits(self) -> Traits:
        """What kind of operator it is."""
        return traits(self.operator)

    @property
    def name(self) -> str:
        """Its bare name: `softmax` of `aten._softmax.default`."""
        return self.traits.name.strip("_")

    def run(self, /, **changes: Any) -> Any:
        """The result with other arguments.

        Raises:
            ValueError: nothing checks whether the operator can take them: it might end the process;
                or it would print a warning to stderr, which nothing can hide.
        """
        if changes and not _leaves_freedom({**self.values, **changes}):
            raise ValueError(f"{self.traits.name} has no degrees of freedom left")
        if changes.get("step") == 0:
            raise ValueError("torch divides by a step unseen, which ends the process")
        if not is_scout() and not checks_arguments(self.operator):
            for argument, value in changes.items():
                if not _is_alike(self.values.get(argument), value):
                    raise ValueError(f"{self.traits.name} does not check its {argument}")
        elif not checks_arguments(self.operator):
            # A copy of the process may end, but not for what is certain to read foreign memory.
            for argument, value in changes.items():
                if _is_shorter(value, self.values.get(argument)):
                    raise ValueError(f"{self.traits.name} needs more elements of {argument}")
        values = {**self.values, **changes}
        if self.traits.mutates:
            _, values = copy_arguments((), values)
        return call_bound(self.operator, values)

    def with_first(self, value: Tensor) -> Any:
        """All outputs of the operator, with this value as the first."""
        if count_results(self.operator) == 1:
            return value
        return (value, *self.results[1:])

    @functools.cached_property
    def results(self) -> Any:
        """What it gives as it is."""
        return self.run()


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionStep(Step):
    """A function of several operators, called as one.

    Attributes:
        function: what is called; `values` are its arguments by name.
        bound: its arguments as they are passed.
        is_checking: whether all of its operators check their arguments.
    """

    function: Callable[..., Any]
    bound: inspect.BoundArguments
    is_checking: bool

    @property
    def name(self) -> str:
        """What the function is called."""
        return getattr(self.function, "__name__", "")

    def run(self, /, **changes: Any) -> Any:
        """The result with other arguments.

        Raises:
            ValueError: nothing checks whether the operators can take them.
        """
        for argument, value in changes.items():
            can_take = is_scout() or self.is_checking or _is_alike(self.values[argument], value)
            if not can_take:
                raise ValueError(f"{self.name} does not check its {argument}")
        bound = inspect.BoundArguments(
            self.bound.signature,
            {**self.bound.arguments, **changes},
        )
        return self.function(*bound.args, **bound.kwargs)


@dataclasses.dataclass(frozen=True, eq=False)
class LiveCall:
    """A call of the running program.

    Attributes:
        target: the operator, function or module.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @functools.cached_property
    def items(self) -> list[Tensor]:
        """The tensors among which it picks one, or all that it returns."""
        if self.target is operator.getitem and not isinstance(self.args[0], torch.Tensor):
            return tensors_in(self.args[0])
        return self.results(wide=False)

    @functools.cached_property
    def _recorded(self) -> list[Step | None]:
        """All of its operators; None for one without a schema."""
        recorder = _Recorder()
        self._run(recorder, wide=False)
        return recorder.steps

    @property
    def checks_arguments(self) -> bool:
        """Whether all of its operators do; also if it cannot be run again at all.

        Any exception may come from the program that is called. None is lost: nothing is tried with
        a call whose operators are not known, and whoever asks for them gets the same exception.
        """
        try:
            return all(step is None or checks_arguments(step.operator) for step in self._recorded)
        except Exception:  # noqa: BLE001  (whoever runs it again reports it)
            return True

    @property
    def can_be_scouted(self) -> bool:
        """Whether a fork of this process can run it."""
        state = self.target.state_dict() if isinstance(self.target, torch.nn.Module) else {}
        return can_scout(tensors_in([self.args, list(self.kwargs.values()), list(state.values())]))

    @property
    def is_safe_here(self) -> bool:
        """Whether this process may call it with other values: a scout may, or it is known how."""
        if is_scout():
            return True
        try:
            return bool(self._recorded) and self.checks_arguments and self.may_be_changed
        except Exception:  # noqa: BLE001  (as above: what cannot be run again is not safe)
            return False

    @functools.cached_property
    def may_be_changed(self) -> bool:
        """Whether it is short, draws nothing, and may be called otherwise in this process."""
        recorded = [step for step in self._recorded if step is not None]
        if not is_scout() and any(_TRUSTING.search(step.traits.name) for step in recorded):
            return False
        working = [step for step in recorded if not step.traits.view]
        draws = any(step.traits.random and step.values.get("dropout_p") != 0.0 for step in working)
        return not draws and len(working) <= MOST_OPERATORS

    @functools.cached_property
    def steps(self) -> tuple[tuple[int, Step], ...]:
        """Its operators that compute something: see `steps_towards`."""
        return self.steps_towards(None)

    def steps_towards(self, output: int | None) -> tuple[tuple[int, Step], ...]:
        """Its operators that compute something, each with its place among all operators.

        The call of an operator that consists of others comes first. Of many, only the last ones;
        empty if one draws random numbers, or must not be called otherwise in this process.

        Args:
            output: only those that this one of its tensors depends on, as far as that is known.
        """
        if not self.may_be_changed:
            return ()
        recorded = [
            (position, step) for position, step in enumerate(self._recorded) if step is not None
        ]
        if output is not None and self._tape is not None:
            needed = self._tape.reaching(output)
            recorded = [
                (position, step)
                for position, step in recorded
                if self._wide_place(position) in needed
            ]
        # Views matter only where nothing else is done.
        working = [
            (position, step) for position, step in recorded if not step.traits.view
        ] or recorded
        # Of a long backward pass, what is wrong is in its end: the values before it are right.
        working = working[-MOST_STEPS:]
        is_composite = [step.operator for _, step in working] != [self.target]
        if isinstance(self.target, Operator) and is_composite:
            working.insert(0, (WHOLE, self._whole(self.args, self.kwargs)))
        return tuple(working)

    def operators_alone(self) -> Iterator[LiveCall]:
        """Each of its operators as a call, the last one first: it may be of a value on the way."""
        try:
            steps = self.steps
        except UNUSABLE:
            return
        for _, step in reversed(steps):
            yield LiveCall(step.operator, (), dict(step.values))

    @property
    def floating(self) -> list[Tensor]:
        """The floating-point tensors among its arguments, in their order."""
        tensors = tensors_in([self.args, list(self.kwargs.values())])
        return [tensor for tensor in tensors if tensor.is_floating_point()]

    def with_floating(self, values: Sequence[Tensor]) -> LiveCall:
        """The call with other floating-point tensors.

        Raises:
            ValueError: nothing checks whether its operators can take them.
        """
        if not is_scout() and not self.checks_arguments:
            for value, other in zip(self.floating, values, strict=True):
                if not _is_alike(value, other):
                    raise ValueError(f"{self.target} does not check its arguments")
        residual = iter(values)
        change = lambda tensor: next(residual) if tensor.is_floating_point() else tensor  # noqa: E731
        args, kwargs = map_call(self.args, self.kwargs, change)
        return dataclasses.replace(self, args=args, kwargs=kwargs)

    def with_operands(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> LiveCall:
        """The call with other tensors in the places of those that it has."""
        return LiveCall(self.target, *map_call(self.args, self.kwargs, exchanging(before, after)))

    @functools.cached_property
    def function_step(self) -> FunctionStep | None:
        """The call of a function as one step, at the place `WHOLE`; None if it is none."""
        if not inspect.isroutine(self.target) or not self.may_be_changed:
            return None
        # It may consist of more operators than are looked at one by one.
        working = [step for step in self._recorded if step is not None and not step.traits.view]
        if len(working) < 2:  # noqa: PLR2004
            return None
        try:
            return self._whole(self.args, self.kwargs)  # type: ignore[return-value]
        except (TypeError, ValueError):  # called otherwise than its signature says
            return None

    def with_argument(self, name: str, value: Any) -> LiveCall:
        """The call with another argument.

        Raises:
            ValueError: it has none of this name.
        """
        try:
            values = self._whole(self.args, self.kwargs).values
        except TypeError as error:
            raise ValueError(
                f"{self.target} is called otherwise than its signature says"
            ) from error
        if name not in values:
            raise ValueError(f"{self.target} has no argument {name}")
        return LiveCall(self.target, (), {**values, name: value})

    def _whole(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Step:
        if isinstance(self.target, Operator):
            return Step(self.target, bind_arguments(self.target, args, kwargs))
        bound = signature_of(self.target).bind(*args, **kwargs)
        bound.apply_defaults()
        first = next(step for step in self._recorded if step is not None)
        values = dict(bound.arguments)
        return FunctionStep(first.operator, values, self.target, bound, self.checks_arguments)

    def results(
        self, position: int = WHOLE, change: Callable[[Step], Any] | None = None, *, wide: bool
    ) -> list[Tensor]:
        """The tensors it returns if the operator at this place gives what `change` makes of it.

        Args:
            wide: in float64.
        """
        run: Callable[[], list[Tensor]]
        if wide and position != WHOLE and change is not None and self._tape is not None:
            run = functools.partial(self._replay, position, change)
        elif position == WHOLE and change is not None:
            _ = self._recorded  # a change may ask for it, where a mode is active
            change_result = lambda *args, **kwargs: change(  # noqa: E731
                self._wide_whole
                if wide and "_kept_wide" in vars(self)
                else self._whole(args, kwargs)
            )
            run = functools.partial(
                self._run, contextlib.nullcontext(), wide=wide, target=change_result
            )
        else:
            at = self._wide_place(position) if wide and change is not None else position
            run = functools.partial(self._run, _Changer(at, change), wide=wide)
        return attempt_apart(run, keep=False)

    def _run(
        self,
        mode: contextlib.AbstractContextManager[Any],
        *,
        wide: bool,
        target: Callable[..., Any] | None = None,
    ) -> list[Tensor]:
        args, kwargs, state = self._wide_arguments if wide else self._copies(wide=False)
        target = target or self.target
        if isinstance(target, torch.nn.Module):
            target = functools.partial(torch.func.functional_call, target, state)
            args, kwargs = (args, kwargs), {}
        with torch.no_grad(), quietly():
            if not wide:
                with mode:
                    return tensors_in(target(*args, **kwargs))
            default = own_default()
            with LiftMode(default, default), mode:
                return tensors_in(target(*args, **kwargs))

    @functools.cached_property
    def _tape(self) -> Tape | None:
        return Tape.record(functools.partial(self._run, wide=True))

    def _wide_place(self, position: int) -> int:
        """The place of an operator among those of the run in float64."""
        return self._wide_places.get(position, position)

    @functools.cached_property
    def _wide_places(self) -> dict[int, int]:
        """That run may have further operators, such as casts; empty if it has the same."""
        if self._tape is None:
            return {}
        wide = iter(enumerate(entry.operator for entry in self._tape.entries))
        places: dict[int, int] = {}
        for position, step in enumerate(self._recorded):
            at = next(
                (at for at, wide_step in wide if step is None or wide_step is step.operator), None
            )
            if at is None:
                return {}
            places[position] = at
        return places

    def _replay(self, position: int, change: Callable[[Step], Any]) -> list[Tensor]:
        tape = self._tape
        if tape is None:
            raise ValueError("it was not recorded")

        at = self._wide_place(position)

        def compute(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if traits(operator).mutates:
                return change(Step(operator, bind_arguments(operator, args, kwargs)))
            if at not in self._wide_steps:
                self._wide_steps[at] = Step(operator, bind_arguments(operator, args, kwargs))
            return change(self._wide_steps[at])

        with torch.no_grad():
            return tape.results(
                at, compute, lambda argument: is_scout() or checks_arguments(argument)
            )

    @functools.cached_property
    def _wide_steps(self) -> dict[int, Step]:
        """The operators of the run in float64 that were changed, by their places."""
        return {}

    @property
    def _wide_arguments(self) -> tuple[Any, Any, dict[str, Tensor]]:
        """In float64; made once, unless an operator writes to them.

        A call that is run once, with other values, is not recorded to find that out.
        """
        is_recorded = "_recorded" in vars(self)
        if not is_recorded or any(
            step is not None and step.traits.mutates for step in self._recorded
        ):
            return self._copies(wide=True)
        return self._kept_wide

    @functools.cached_property
    def _kept_wide(self) -> tuple[Any, Any, dict[str, Tensor]]:
        return self._copies(wide=True)

    @functools.cached_property
    def _wide_whole(self) -> Step:
        args, kwargs, _ = self._kept_wide
        return self._whole(args, kwargs)

    def _copies(self, *, wide: bool) -> tuple[Any, Any, dict[str, Tensor]]:
        state = {}
        if isinstance(self.target, torch.nn.Module):
            state = dict(self.target.state_dict(keep_vars=True))
        tree: tuple[Any, Any, dict[str, Tensor]] = Copier(widen=wide).copy_tree(
            (self.args, dict(self.kwargs), state)
        )
        return tree


def call_of(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> LiveCall:
    """A call with the same result that writes to nothing, if there is one.

    Its operators run hundreds of times, on the same arguments.
    """
    if kwargs.get("inplace") is True:
        kwargs = {**kwargs, "inplace": False}
    pure = out_of_place(target)
    name = getattr(target, "__name__", "")
    if pure is target and name.endswith("_") and target is getattr(torch.Tensor, name, None):
        pure = getattr(torch.Tensor, name[:-1], target)
    return LiveCall(pure, tuple(args), kwargs)


def exchanging(before: Sequence[Tensor], after: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """A function that gives the tensor in the place of another one; others stay.

    A tensor is known by its identity, or else by its values. Tensors of the same values, such as a
    weight and a variance of ones, are taken in their order.
    """
    residual = list(range(len(before)))
    exchanged: list[tuple[Tensor, Tensor]] = []

    def exchange(tensor: Tensor) -> Tensor:
        places = [index for index, value in enumerate(before) if value is tensor]
        if not places:
            earlier = next((new for old, new in exchanged if old is tensor), None)
            if earlier is not None:
                return earlier
            places = [index for index, value in enumerate(before) if is_same_tensor(value, tensor)]
        if not places:
            return tensor
        position = next((index for index in places if index in residual), places[0])
        if position in residual:
            residual.remove(position)
        exchanged.append((tensor, after[position]))
        return after[position]

    return exchange


def is_same_tensor(first: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same, or have the same values."""
    return first is other or (
        first.shape == other.shape
        and first.dtype == other.dtype
        and first.device == other.device
        and torch.equal(first, other)
    )


class _Recorder(DispatchMode):
    """Notes every operator; None for one without a schema."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step | None] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_plain = isinstance(func, Operator)
        copied = copy_arguments(args, kwargs) if _writes(func) else (args, kwargs)
        self.steps.append(Step(func, bind_arguments(func, *copied)) if is_plain else None)
        return func(*args, **kwargs)


class _Changer(DispatchMode):
    """Changes the result of one operator."""

    def __init__(self, position: int, change: Callable[[Step], Any] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = position
        self.change = change

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.left -= 1
        if self.left != -1 or self.change is None:
            return func(*args, **kwargs)
        copied = copy_arguments(args, kwargs) if _writes(func) else (args, kwargs)
        changed = self.change(Step(func, bind_arguments(func, *copied)))
        right = func(*args, **kwargs)
        check_alike(tensors_in(right), tensors_in(changed))
        if isinstance(right, torch.Tensor) and any(right is value for value in args):
            return right.copy_(changed)  # what comes next reads what was written to
        return changed


def _writes(func: Any) -> bool:
    return isinstance(func, Operator) and bool(traits(func).mutates)


def _leaves_freedom(values: Mapping[str, Any]) -> bool:
    """Whether a variance is of more elements than its correction; also if it is no variance."""
    tensor, dims = values.get("self"), values.get("dim")
    if not {"correction", "unbiased"} & values.keys() or not isinstance(tensor, torch.Tensor):
        return True
    correction = values.get("correction", values.get("unbiased"))
    dims = [dims] if isinstance(dims, int) else dims or range(tensor.dim())
    number = math.prod(tensor.shape[dim] for dim in dims)
    return number > (1 if correction is None else correction)


def _is_shorter(value: Any, right: Any) -> bool:
    are_tensors = isinstance(value, torch.Tensor) and isinstance(right, torch.Tensor)
    return are_tensors and value.numel() < right.numel()


def _is_alike(value: Any, other: Any) -> bool:
    """Whether a kernel that takes one can take the other."""
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        kinds = ((tensor.shape, tensor.dtype, tensor.device) for tensor in (value, other))
        return len(set(kinds)) == 1 and is_within(value, other)
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    # A flag may change which memory is read: `transposed` of a convolution's gradient.
    is_number = isinstance(other, float) or (isinstance(other, bool) and other == value)
    return is_number or (other is None and isinstance(value, float))
