"""Run a program in float64: every operator it calls, forward and backward, below autograd.

Narrow input tensors are widened, and casts to narrow dtypes become casts to float64. Random numbers
are drawn in the dtype that the program uses, which gives the program's own random stream. A narrow
tensor that the program keeps hidden and writes to keeps its dtype, and rounds the values.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paritas.core.operators.catalogue import operators_of, summation_of
from paritas.core.operators.rounding import rounds
from paritas.core.precision.composites import Inside, ListeningMode
from paritas.core.precision.summing import LastSums
from paritas.core.precision.unwritten import UnwrittenMemory
from paritas.core.torch_private.kernels import float64_kernel
from paritas.core.torch_private.operators import (
    WIDE,
    DispatchMode,
    Operator,
    Traits,
    is_of_default,
    map_tensors,
    state_float64,
    takes_dtype,
    traits,
)

if TYPE_CHECKING:
    from collections.abc import Callable


# --- Discrete results and the numbers that decide them --------------------------------------------

COMPARISONS = operators_of("comparisons")
WHOLE_NUMBERS = operators_of("whole numbers")
CHOICES = operators_of("choices")
# Operators that keep the decision that gave their first argument; `copy_` overwrites that.
_CARRIERS = operators_of("limits", "copies") - {"copy"}
_DIM_POSITION = {"topk": 2, "kthvalue": 2}
_QUANTIZING = {"quantize_per_tensor", "quantize_per_channel"}


@dataclasses.dataclass(frozen=True)
class Decision:
    """One operator's discrete result.

    Attributes:
        kind: the operator's name.
        left: the values that were compared, chosen from or rounded.
        right: the values they were compared with.
        dim: the dimension of a choice; None for all of them.
    """

    kind: str
    left: Tensor
    right: Any = None
    dim: int | None = None

    def margin(self, reference: Tensor, candidate: Tensor) -> Tensor | None:
        """The distance between the two results, in units of the operands.

        None if no rounding of the operands can turn one result into the other.
        """
        if self.kind in COMPARISONS:
            difference: Tensor = self.left - self.right
            return difference.expand(reference.shape)
        if self.kind in CHOICES:
            return self._score_gap(reference, candidate)
        return self._distance_to_the_edge(reference, candidate)

    def _score_gap(self, reference: Tensor, candidate: Tensor) -> Tensor | None:
        scores, dim = self.left, self.dim
        if dim is None:
            scores, dim = scores.reshape(-1), 0
        if bool(((candidate < 0) | (candidate >= scores.shape[dim])).any()):
            return None
        reduced = reference.dim() < scores.dim()
        ours, candidate_index = (i.unsqueeze(dim) if reduced else i for i in (reference, candidate))
        gap = scores.gather(dim, ours) - scores.gather(dim, candidate_index)
        return gap.squeeze(dim) if reduced else gap

    def _distance_to_the_edge(self, reference: Tensor, candidate: Tensor) -> Tensor | None:
        if self.left.shape != reference.shape:
            return None
        ours, candidate_values = reference.double(), candidate.double()
        if bool(((ours - candidate_values).abs() > 1).any()):
            return None
        lower, upper = torch.minimum(ours, candidate_values), torch.maximum(ours, candidate_values)
        if self.kind == "round":
            edge = (lower + upper) / 2
        elif self.kind == "ceil":
            edge = lower
        elif self.kind == "floor":
            edge = upper
        else:  # towards zero
            edge = torch.where(upper > 0, upper, lower)
        return self.left - edge


class Decisions:
    """The decisions of one run, by the memory of their results."""

    def __init__(self) -> None:
        self._table: dict[int, Decision] = {}
        # Results of relu -> its input: where the result is 0, how far from 0 the input was.
        self._clipped: dict[int, Tensor] = {}
        # Keeps the memory of results from being reused for other tensors.
        self._alive: list[Tensor] = []

    def behind(self, result: Tensor) -> Decision | None:
        """The decision that gave a result, if a single operator made it."""
        return self._table.get(result.untyped_storage().data_ptr())

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Remember the decision of one operator, or one inherited from its argument."""
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor):
            return
        chosen = result
        decision: Decision | None = None
        if name == "relu" and isinstance(result, torch.Tensor):
            self._clipped[result.untyped_storage().data_ptr()] = first
            self._alive.append(result)
        elif name in COMPARISONS:
            with_zero = isinstance(args[1], int | float) and args[1] == 0
            clipped = self._clipped.get(first.untyped_storage().data_ptr()) if with_zero else None
            decision = Decision(name, first if clipped is None else clipped, args[1])
        elif name in WHOLE_NUMBERS:
            decision = Decision(name, first)
        elif name in _QUANTIZING:
            decision = Decision("round", _before_rounding(name, *args[:4]))
        elif name in CHOICES:
            position = _DIM_POSITION.get(name, 1)
            last = -1 if name in {"sort", "topk"} else None
            dim = args[position] if len(args) > position else kwargs.get("dim", last)
            if isinstance(dim, bool) or not isinstance(dim, int | None):
                return
            decision = Decision(name, first, dim=dim)
            chosen = result[1] if isinstance(result, list | tuple) else result
        elif name in _CARRIERS:
            decision = self.behind(first)
            truncates = name == "_to_copy" and first.is_floating_point()
            if decision is None and truncates and not result.is_floating_point():
                decision = Decision("trunc", first)
        if decision is not None and isinstance(chosen, torch.Tensor):
            self._table[chosen.untyped_storage().data_ptr()] = decision
            self._alive.append(chosen)


def _before_rounding(name: str, value: Tensor, scale: Any, zero_point: Any, axis: Any) -> Tensor:
    """The values that quantising rounds to integers."""
    if name == "quantize_per_channel":
        shape = [-1 if dim == axis else 1 for dim in range(value.dim())]
        scale, zero_point = scale.view(shape), zero_point.view(shape)
    codes: Tensor = value / scale + zero_point
    return codes


# --- The mode -------------------------------------------------------------------------------------

# The random stream depends on the dtype, so a lifted run must draw in the native one.
_DRAWN_IN_A_DTYPE = operators_of("random fills", "random numbers")


class LiftingError(RuntimeError):
    """The program does something without meaning in float64, such as reading a float's bits."""


class LiftMode(DispatchMode):
    """A dispatch mode that computes everything in float64.

    Attributes:
        casts: the narrow dtypes that the program itself casts to.
        foreign: names of operators outside aten, which may compute in any precision inside.
        asked_default: whether torch's default dtype may have decided something no mode can see.
        narrow: the narrow dtypes of values from outside this run, which were rounded before it.
        unwritten: what shows kernels that torch does not see.
    """

    def __init__(
        self,
        native: torch.dtype,
        default: torch.dtype,
        *,
        lifts: Callable[[torch.dtype], bool] | None = None,
        remember_decisions: bool = False,
        remember_sums: bool = False,
        widen: bool = True,
    ) -> None:
        """Create a mode for a program in `native`, under the default dtype `default`.

        Without `widen`, everything keeps its dtype, for a subclass that only perturbs. `lifts` says
        whether a cast to a narrow dtype is widened (by default all are): a cast narrower than
        anything the reference uses is part of what the candidate computes.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.native = native
        self.default = default
        self.lifts = lifts or (lambda _: True)
        self.widths = WIDE if widen else {}
        self.casts: set[torch.dtype] = set()
        self.foreign: set[str] = set()
        self.narrow: set[torch.dtype] = set()
        self.unwritten = UnwrittenMemory()
        self._kept: set[torch.dtype] = set()
        self.asked_default = False
        self._decisions = Decisions() if remember_decisions else None
        self._sums = LastSums() if remember_sums else None

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operator in float64."""
        if any(map(is_jagged, types)):
            # Its class implements it by operators on dense tensors, which are dispatched here.
            return NotImplemented
        kwargs = kwargs or {}
        kind = traits(func)
        if kind.view:
            if kind.name == "lift_fresh" and is_of_default(args[0], self.default):
                self.asked_default = True
            if self.widths and kind.reads_bits:
                message = "the program reads the bits of a float (view as another dtype)"
                raise LiftingError(message)
            return func(*args, **kwargs)
        if self._sums is not None:
            self._sums.forget_written(kind, args, kwargs)
        if kind.namespace not in {"aten", "prim", "prims", "profiler"}:
            self.foreign.add(f"{kind.namespace}::{kind.name}")
            self.asked_default = True
        if self.widths and kind.random and kind.name in _DRAWN_IN_A_DTYPE:
            return self._draw(func, kind, args, kwargs)
        if self.widths and kind.random and kind.name == "native_dropout":
            return self._dropout(func, *args, **kwargs)
        result = self._run(func, kind, args, kwargs)
        self.unwritten.note(kind, args, kwargs, result)
        return result

    def start_over(self) -> None:
        """Reset the mode for a repetition of the same run."""
        self.asked_default = False
        self.casts.clear()
        self.foreign.clear()
        self.narrow.clear()
        self.unwritten = UnwrittenMemory()
        self._kept.clear()
        if self._decisions is not None:
            self._decisions = Decisions()
        if self._sums is not None:
            self._sums = LastSums()

    def note_result(self, result: Any) -> None:
        """Note what the program returns: that is read as well."""
        self.unwritten.note_result(result)

    def decision_for(self, result: Tensor) -> Decision | None:
        """The decision that gave a discrete result of this run, if one operator made it."""
        return None if self._decisions is None else self._decisions.behind(result)

    def least_noise_of(self, result: Tensor) -> Tensor | None:
        """A lower bound of the noise of summing a result of this run in float32, if known."""
        return None if self._sums is None else self._sums.behind(result)

    def compute(
        self, func: Operator, kind: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the operator on widened arguments; a subclass adds its noise here."""
        return self.kernel(func, kind, args)(*args, **kwargs)

    def kernel(self, func: Operator, kind: Traits, args: tuple[Any, ...]) -> Callable[..., Any]:
        """The function that computes the operator, in float64 in a lifted run."""
        return float64_kernel(func, args) if self.widths and rounds(kind) else func

    def _run(
        self, func: Operator, kind: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        written: list[tuple[Tensor, Tensor]] = []
        has_floats = False

        def widen(value: Any, argument_key: int | str) -> Any:
            nonlocal has_floats
            if isinstance(value, torch.Tensor):
                dtype = value.dtype
                has_floats = has_floats or dtype.is_floating_point or dtype.is_complex
                if dtype not in self.widths:
                    return value
                wide = value.to(self.widths[dtype])
                if argument_key in kind.mutates:
                    written.append((value, wide))
                elif dtype not in self._kept:  # it is not the result of a cast
                    self.narrow.add(dtype)
                return wide
            if isinstance(value, torch.dtype) and value in self.widths:
                return self._cast_to(value)
            if isinstance(value, list | tuple):
                return [widen(item, argument_key) for item in value]
            return value

        wide_args = tuple(widen(value, position) for position, value in enumerate(args))
        wide_kwargs = {name: widen(value, name) for name, value in kwargs.items()}
        if self.widths:
            wide_args = without_half_to_float(kind, wide_args)
            if not (has_floats or kind.random or kind.mutates):
                wide_args, wide_kwargs = state_float64(func, wide_args, wide_kwargs)
        result = self.compute(func, kind, wide_args, wide_kwargs)
        for narrow, wide in written:
            narrow.copy_(wide)
        if written:
            result = _narrow_back(result, written)
        self._note(kind, wide_args, wide_kwargs, result)
        # A cast that is not lifted keeps its narrow result: the next operator widens it again.
        keeps = kind.name in {"_to_copy", "copy"} or written or not self.widths
        return result if keeps else map_tensors(result, _widen_tensor)

    def _cast_to(self, dtype: torch.dtype) -> torch.dtype:
        """What a cast to a narrow dtype becomes."""
        self.casts.add(dtype)
        if self.lifts(dtype):
            return self.widths[dtype]
        self._kept.add(dtype)
        return dtype

    def _note(
        self, kind: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if self._sums is not None:
            self._sums.note(kind, args, kwargs, result)
        if self._decisions is not None:
            self._decisions.note(kind.name, args, kwargs, result)

    def _draw(
        self, func: Operator, kind: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Draw in the program's own dtype, then widen."""
        args = tuple(
            value.to(self._native_of(value.dtype))
            if position and _starts_with_float((value,))
            else value
            for position, value in enumerate(args)
        )
        if kind.mutates:  # uniform_ and the like fill a tensor that may already be wide
            target = args[0]
            narrow = torch.empty_like(target, dtype=self._native_of(target.dtype))
            func(narrow, *args[1:], **kwargs)
            return target.copy_(narrow)
        if kind.name == "bernoulli":
            return _widen_tensor(func(args[0].to(self._native_of(args[0].dtype)), **kwargs))
        requested_dtype = kwargs.get("dtype")
        if requested_dtype is None:
            requested_dtype = (
                self._native_of(args[0].dtype) if _starts_with_float(args[:1]) else self.default
            )
        elif requested_dtype in WIDE:
            self.casts.add(requested_dtype)
        kwargs = {**kwargs, "dtype": requested_dtype} if takes_dtype(func) else kwargs
        return map_tensors(func(*args, **kwargs), _widen_tensor)

    def _dropout(self, func: Operator, x: Tensor, p: float, train: bool | None) -> Any:  # noqa: FBT001
        """Apply the mask of the native dtype's random stream to the wide value."""
        ones = torch.ones_like(x, dtype=self._native_of(x.dtype))
        _, mask = func(ones, p, train)
        if train is False:
            return x.clone(), mask
        return x.to(torch.float64) * mask / (1 - p) if p < 1 else torch.zeros_like(x), mask

    def _native_of(self, dtype: torch.dtype) -> torch.dtype:
        return self.native if dtype is torch.float64 else dtype


def is_jagged(kind: type) -> bool:
    """Whether this is the class of nested tensors in torch's jagged layout."""
    return kind.__name__ == "NestedTensor" and kind.__module__.startswith("torch.nested.")


def is_rounding(dtype: torch.dtype, used: frozenset[torch.dtype]) -> bool:
    """Whether a cast to `dtype` is only rounding, if the reference uses the dtypes `used`.

    It is if the reference itself uses a dtype that is as coarse and has as small a range. A cast
    narrower than anything the reference uses is part of what the candidate computes.
    """
    cast_info = torch.finfo(dtype)
    infos = [torch.finfo(used_dtype) for used_dtype in used]
    return any(info.eps >= cast_info.eps and info.max <= cast_info.max for info in infos)


class DtypeLog(ListeningMode):
    """Records the native floating dtype of each operator call, and of composite functions.

    Which operators are inside of these depends on the dtype, so they are not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[tuple[Any, int], torch.dtype] = {}
        self._counts: dict[Any, int] = {}

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator unchanged and record the dtype of its first floating result."""
        result = func(*args, **(kwargs or {}))
        # Attention is one operator natively and in float64 alike, if it has a kernel for float64.
        summation = summation_of(traits(func).name)
        if self.within is None or summation in {"attention", "attention backward"}:
            self._record(func, result)
        return result

    def call_composite(self, func: Any, floats: dict[str, Tensor], options: dict[str, Any]) -> Any:
        """Run the function unchanged and record the dtype of its result."""
        inside = Inside(0.0, 0.0)
        with self.inside(inside):
            result = func(**floats, **options)
        self.mark_backward(result, [value.grad_fn for value in floats.values()], inside)
        self._record(func, result)
        return result

    def _record(self, func: Any, result: Any) -> None:
        ordinal = self._counts.get(func, 0)
        self._counts[func] = ordinal + 1
        items = result if isinstance(result, list | tuple) else [result]
        for item in items:
            if isinstance(item, torch.Tensor) and (item.is_floating_point() or item.is_complex()):
                self.calls[func, ordinal] = item.dtype
                break


def _widen_tensor(tensor: Tensor) -> Tensor:
    return tensor.to(WIDE[tensor.dtype]) if tensor.dtype in WIDE else tensor


def _narrow_back(result: Any, written: list[tuple[Tensor, Tensor]]) -> Any:
    """Return the program's own narrow tensors, as an in-place operator returns its argument."""
    narrow_by_id = {id(wide): narrow for narrow, wide in written}
    return map_tensors(result, lambda tensor: narrow_by_id.get(id(tensor), tensor))


def without_half_to_float(kind: Traits, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Drop softmax's `half_to_float` flag, which the float64 kernels refuse and do not need."""
    if kind.name in {"_softmax", "_log_softmax"} and len(args) > 2:  # noqa: PLR2004
        return (*args[:2], False)
    return args


def _starts_with_float(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_floating_point()


# --- The mode for programs of ranks ---------------------------------------------------------------

_COLLECTIVE_NAMESPACES = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp"}
)


class RankLiftMode(LiftMode):
    """A dispatch mode that computes everything in float64, except collectives.

    Collectives write to tensors without declaring it in their schemas: given a widened copy, they
    would not change the program's own tensor.
    """

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operator in float64, a collective unchanged."""
        if func.namespace in _COLLECTIVE_NAMESPACES:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)
