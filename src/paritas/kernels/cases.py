"""Make the cases on which a kernel is judged, from the inputs that the task gives.

What the reference itself refuses is not asked of the candidate; the judge filters that. Other
values of the same kind come from `core/execution/similar_inputs.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.execution.computable import as_computable, is_number, stored_as
from paritas.core.execution.observation import input_tensors
from paritas.core.execution.similar_inputs import SimilarInputs
from paritas.core.execution.subjects import Inputs
from paritas.core.numerics.bits import dtype_name
from paritas.kernels.rows import CaseFamily

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

# Sizes around tiles and vectors, odd, prime and degenerate ones; the nearest to the given size of
# each kind comes first.
_TILES = (4, 8, 16, 32, 64, 128, 256)
_PRIMES = (3, 7, 13, 31, 61, 127, 251, 509, 1021)
# Made inputs have at most this many times the elements of the given ones, or this many elements.
_MOST_GROWTH, _MOST_ELEMENTS = 2, 1 << 16
# How a case uses the memory of the call before.
SAME_TENSORS, NEW_TENSORS = "same tensors", "new tensors"


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One call of both sides.

    Attributes:
        name: what is special about it, in words.
        family: why it was made.
        inputs: the arguments.
        weights: unless 0, the seed of other parameters and buffers, set after construction.
        construction: which construction of the two modules it uses: each has its own seed.
        is_moved: the candidate is converted and converted back after its construction, as by a move
            to a device: parameters that were views of others are no longer.
        train: training or evaluation mode; None for that of the construction.
        dtype: the dtype to convert modules to; empty for their own.
        reuse: other contents in the memory of the call before: in the same tensors, or in new ones.
        is_given: the inputs are exactly the given ones.
        is_uniform: all values of an input are equal: roundings of a sum are alike, and add up.
    """

    name: str
    family: CaseFamily
    inputs: Inputs
    weights: int = 0
    construction: int = 0
    is_moved: bool = False
    train: bool | None = None
    dtype: str = ""
    reuse: str = ""
    is_given: bool = False
    is_uniform: bool = False

    @property
    def shapes(self) -> str:
        """The shapes and dtypes of its inputs, for people."""
        return ", ".join(
            f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
            for _, tensor in input_tensors(self.inputs)
        )


class CaseMaker(SimilarInputs):
    """Makes cases from the inputs of a task.

    Attributes:
        given: the given inputs.
        again: makes the given inputs under another seed; None if there is one set only.
        drawn: the seed of one case, which a judge draws so that nobody knows it before.
        is_module: the sides are modules with parameters or modes.
    """

    def __init__(
        self,
        inputs: Inputs,
        again: Callable[[int], Inputs] | None,
        *,
        has_weights: bool,
        has_modes: bool,
        seed: int,
        label: str = "",
        accepts: Callable[[KernelCase], bool] = lambda _: True,
    ) -> None:
        """Make cases from one set of inputs.

        Args:
            label: put before the names of cases, if there are several sets of inputs.
            accepts: whether the reference accepts a case.
        """
        self.accepts = accepts
        super().__init__(inputs, seed, again)
        self.label = label
        self.has_weights, self.has_modes = has_weights, has_modes
        self.drawn = 2

    def all_families(self) -> dict[CaseFamily, Iterator[KernelCase]]:
        """The cases of each family, the most telling first."""
        families = {
            CaseFamily.GIVEN: self._make_given_cases(),
            CaseFamily.MEMORY: self._memory(),
            CaseFamily.SIZES: self._sizes(),
            CaseFamily.VALUES: self._values(),
            CaseFamily.LAYOUTS: self._layouts(),
            CaseFamily.WEIGHTS: self._weights(),
            CaseFamily.DTYPES: self._dtypes(),
            CaseFamily.MODES: self._modes(),
            CaseFamily.NONFINITE: self._nonfinite(),
            CaseFamily.ALIASES: self._aliases(),
            CaseFamily.ARGUMENTS: self._arguments(),
        }
        return {family: self._label_cases(cases) for family, cases in families.items()}

    def _label_cases(self, cases: Iterator[KernelCase]) -> Iterator[KernelCase]:
        for case in cases:
            yield dataclasses.replace(case, name=f"{self.label}{case.name}")

    # --- The families -----------------------------------------------------------------------------

    def _make_given_cases(self) -> Iterator[KernelCase]:
        yield KernelCase("as given", CaseFamily.GIVEN, self.given, is_given=True)
        for number in (self.drawn, 1):
            other = self.other(number)
            if other is not None:
                yield KernelCase(f"other values, seed {number}", CaseFamily.GIVEN, other)

    def _memory(self) -> Iterator[KernelCase]:
        """Each is called right after a case with the same shapes; see `in_calling_order`."""
        for number, reuse in ((11, SAME_TENSORS), (12, NEW_TENSORS)):
            other = self.other(number)
            if other is not None:
                name = f"other values in the same memory, {reuse}"
                yield KernelCase(name, CaseFamily.MEMORY, other, reuse=reuse)
        yield KernelCase("as given, at the end", CaseFamily.MEMORY, self.given)

    def _values(self) -> Iterator[KernelCase]:
        for case in self.values():
            yield KernelCase(case.name, CaseFamily.VALUES, case.inputs, is_uniform=case.is_uniform)

    def _nonfinite(self) -> Iterator[KernelCase]:
        for name, value in (("NaN", math.nan), ("Inf", math.inf), ("-Inf", -math.inf)):

            def place_value(t: Tensor, value: float = value) -> Tensor:
                new = t.clone(memory_format=torch.contiguous_format)
                new.view(-1)[t.numel() // 3] = value
                return new

            inputs = self._free(place_value)
            if inputs is not None:
                yield KernelCase(f"{name} in one place", CaseFamily.NONFINITE, inputs)

    def _sizes(self) -> Iterator[KernelCase]:
        """One group of equal dimensions at a time gets another size."""
        makers = [self._resize_group(group) for group in self._accepted_groups()]
        for cases in itertools.zip_longest(*makers):
            yield from (case for case in cases if case is not None)

    def _accepted_groups(self) -> list[tuple[str, int, frozenset[tuple[str, int]]]]:
        """The largest groups of dimensions that the reference accepts with other sizes.

        Parts of them are left out. Dimensions of one size may have to stay equal, and torch does
        not always say so: attention reads past the end of a value that is shorter than the key.
        """
        chosen: list[tuple[str, int, frozenset[tuple[str, int]]]] = []
        groups = dimension_groups(self._tensors)
        for group in sorted(groups, key=lambda dimension_group: -len(dimension_group[2])):
            if any(group[2] < larger[2] for larger in chosen):
                continue
            if any(map(self.accepts, itertools.islice(self._resize_group(group), 3))):
                chosen.append(group)
        return [group for group in groups if group in chosen]

    def _resize_group(
        self, group: tuple[str, int, frozenset[tuple[str, int]]]
    ) -> Iterator[KernelCase]:
        name, size, places = group
        for new in other_sizes(size):
            shapes = {
                path: tuple(
                    new if (path, dim) in places else old for dim, old in enumerate(t.shape)
                )
                for path, t in self._tensors.items()
            }
            total = sum(math.prod(shape) for shape in shapes.values())
            now = sum(t.numel() for t in self._tensors.values())
            if total > max(_MOST_GROWTH * now, _MOST_ELEMENTS):
                continue
            inputs = self.change_tensors(
                lambda path, t, shapes=shapes: (  # type: ignore[misc]
                    self._draw_tensor(path, t, shapes[path])
                    if shapes[path] != tuple(t.shape)
                    else None
                )
            )
            if inputs is not None:
                yield KernelCase(f"size {new} for {name} ({size})", CaseFamily.SIZES, inputs)

    def _layouts(self) -> Iterator[KernelCase]:
        for name, change in _LAYOUTS.items():
            inputs = self.change_tensors(
                lambda path, t, change=change: (  # type: ignore[misc]
                    change(t)
                    if t.numel() > 1
                    and (change is not _expand_first_row or self._characters[path].keep is None)
                    else None
                )
            )
            if inputs is not None:
                yield KernelCase(f"{name} inputs", CaseFamily.LAYOUTS, inputs)

    def _dtypes(self) -> Iterator[KernelCase]:
        dtypes = {t.dtype for t in self._tensors.values() if is_number(t.dtype)}
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
            if dtypes == {dtype} or not dtypes:
                continue
            inputs = self.change_tensors(
                lambda _, t, dtype=dtype: (  # type: ignore[misc]
                    t.detach().to(dtype) if is_number(t.dtype) else None
                )
            )
            name = dtype_name(dtype)
            if inputs is not None:
                yield KernelCase(f"{name} inputs", CaseFamily.DTYPES, inputs, dtype=name)

    def _weights(self) -> Iterator[KernelCase]:
        if not self.has_weights:
            return
        for number in (1, 2):
            inputs = self.other(20 + number)
            is_moved = number > 1
            yield KernelCase(
                f"other parameters{' after a move' if is_moved else ''}, seed {number}",
                CaseFamily.WEIGHTS,
                self.given if inputs is None else inputs,
                weights=number,
                is_moved=is_moved,
            )
        yield KernelCase("constructed again", CaseFamily.GIVEN, self.given, construction=1)

    def _modes(self) -> Iterator[KernelCase]:
        if self.has_modes:
            for train in (False, True):
                name = "training mode" if train else "evaluation mode"
                inputs = self.other(31) or self.given
                yield KernelCase(name, CaseFamily.MODES, inputs, train=train)
                yield KernelCase(
                    f"{name}, other parameters", CaseFamily.MODES, inputs, train=train, weights=3
                )

    def _arguments(self) -> Iterator[KernelCase]:
        """One argument that is a number at a time gets another value."""
        numbers = list(_numbers(self.given))
        makers = [[(path, value, new) for new in _other_numbers(value)] for path, value in numbers]
        for changes in itertools.zip_longest(*makers):
            for path, value, new in (change for change in changes if change is not None):
                inputs = self.change_tensors(lambda _, t: t.detach().clone()) or self.given
                name = f"{new!r} for {path} ({value!r})"
                yield KernelCase(name, CaseFamily.ARGUMENTS, _with_number(inputs, path, new))

    def _aliases(self) -> Iterator[KernelCase]:
        pairs = [
            (left, right)
            for (left, a), (right, b) in itertools.combinations(self._tensors.items(), 2)
            if a.shape == b.shape
            and a.dtype is b.dtype
            and all(self._characters[p] == self._characters[left] for p in (left, right))
        ]
        for left, right in pairs[:2]:
            shared = self._tensors[left].detach().clone()
            inputs = self.change_tensors(
                lambda path, _, left=left, right=right, shared=shared: (  # type: ignore[misc]
                    shared if path in {left, right} else None
                )
            )
            if inputs is not None:
                name = f"{left} and {right} are one tensor"
                yield KernelCase(name, CaseFamily.ALIASES, inputs)


def _numbers(inputs: Inputs) -> Iterator[tuple[str, Any]]:
    """The arguments that are numbers or switches, not those inside of lists."""
    named = [(f"input[{n}]", value) for n, value in enumerate(inputs.args)]
    named += [(name, value) for name, value in inputs.kwargs.items()]
    yield from ((path, value) for path, value in named if type(value) in {bool, int, float})


def _other_numbers(value: Any) -> list[Any]:
    """Other values of an argument; the reference refuses those that mean nothing to it."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1]
    return [value * 0.625 + 0.125, value * 1.5] if math.isfinite(value) else []


def _with_number(inputs: Inputs, path: str, new: Any) -> Inputs:
    args = [new if path == f"input[{n}]" else argument for n, argument in enumerate(inputs.args)]
    kwargs = {name: new if path == name else argument for name, argument in inputs.kwargs.items()}
    return Inputs(tuple(args), kwargs)


def dimension_groups(
    tensors: Mapping[str, Tensor],
) -> list[tuple[str, int, frozenset[tuple[str, int]]]]:
    """Dimensions that are likely to change together: name, size, (input, dimension)."""
    places = [
        (path, dim, size)
        for path, tensor in tensors.items()
        for dim, size in enumerate(tensor.shape)
    ]
    named_groups: dict[frozenset[tuple[str, int]], tuple[str, int]] = {}
    for key in (
        lambda _path, _dim, size: (size,),
        lambda _path, dim, size: (size, dim),
        lambda path, dim, size: (size, dim - tensors[path].dim()),
        lambda path, dim, size: (size, path, dim),
    ):
        together: dict[Any, list[tuple[str, int, int]]] = {}
        for position in places:
            together.setdefault(key(*position), []).append(position)
        for members in together.values():
            group = frozenset((path, dim) for path, dim, _ in members)
            path, dim, size = members[0]
            named_groups.setdefault(group, (f"dimension {dim} of {path}", size))
    ordered = [(name, size, group) for group, (name, size) in named_groups.items()]
    # Those that are equal everywhere first, then the first dimensions: batches.
    return sorted(ordered, key=lambda dimension_group: min(dim for _, dim in dimension_group[2]))


def other_sizes(size: int) -> list[int]:
    """Other sizes of a dimension: degenerate, odd, prime, around tiles."""
    below = max((tile for tile in _TILES if tile <= max(size, 4)), default=4)
    prime = min(
        _PRIMES,
        key=lambda candidate_prime: (
            abs(candidate_prime - size) if candidate_prime != size else 10**9
        ),
    )
    # A block of fixed size is usually the next power of two.
    beyond = (1 << size.bit_length()) + 1
    ordered = [size + 1, beyond, 1, prime, size - 1, 0, below, below + 1, below - 1, 2 * size]
    ordered += [5, 33, 129]
    return [
        other_size
        for other_size in dict.fromkeys(ordered)
        if other_size >= 0 and other_size != size
    ]


# --- Layouts: the same values, elsewhere in memory ------------------------------------------------

# What lies between the values is NaN, or a large integer, so that reading it shows.


def _make_filled_tensor(shape: tuple[int, ...], like: Tensor) -> Tensor:
    if not is_number(like.dtype):
        ones = torch.ones(shape, dtype=as_computable(like).dtype, device=like.device)
        return stored_as(ones, like.dtype)
    return torch.full(shape, math.nan, dtype=like.dtype, device=like.device)


def _transpose_layout(t: Tensor) -> Tensor | None:
    if t.dim() < 2:  # noqa: PLR2004
        return None
    return t.detach().transpose(-1, -2).contiguous().transpose(-1, -2)


def _stride_last_axis(t: Tensor) -> Tensor | None:
    if not t.dim():
        return None
    wide = _make_filled_tensor((*t.shape[:-1], 2 * t.shape[-1]), t)
    wide[..., ::2] = t.detach()
    return wide[..., ::2]


def _pad_last_axis(t: Tensor) -> Tensor | None:
    if t.dim() < 2:  # noqa: PLR2004
        return None
    wide = _make_filled_tensor((*t.shape[:-1], t.shape[-1] + 3), t)
    wide[..., : t.shape[-1]] = t.detach()
    return wide[..., : t.shape[-1]]


def _offset(t: Tensor) -> Tensor:
    flat = _make_filled_tensor((t.numel() + 5,), t)
    view = flat[3 : 3 + t.numel()].view(t.shape)
    view.copy_(t.detach())
    return view


def _expand_first_row(t: Tensor) -> Tensor | None:
    if t.dim() < 2 or t.shape[0] < 2 or not t.is_floating_point():  # noqa: PLR2004
        return None
    return t.detach()[:1].clone().expand(t.shape)


def _channels_last(t: Tensor) -> Tensor | None:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if t.dim() not in formats:
        return None
    return t.detach().contiguous(memory_format=formats[t.dim()])


def _swap_batch_axis(t: Tensor) -> Tensor | None:
    if t.dim() < 3:  # noqa: PLR2004
        return None
    return t.detach().transpose(0, 1).contiguous().transpose(0, 1)


_LAYOUTS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "transposed": _transpose_layout,
    "strided": _stride_last_axis,
    "channels-last": _channels_last,
    "offset": _offset,
    "expanded": _expand_first_row,
    "padded": _pad_last_axis,
    "batch-second": _swap_batch_axis,
}


def in_calling_order(cases: list[KernelCase], seed: int) -> list[KernelCase]:
    """Mix the cases, so that their order gives no hint.

    Cases in the memory of the call before follow one with the same shapes, and the given inputs
    come last once more.
    """
    import random

    chance = random.Random(seed)
    first = [case for case in cases if case.family is not CaseFamily.MEMORY]
    reusing = [case for case in cases if case.reuse]
    last = [case for case in cases if case.family is CaseFamily.MEMORY and not case.reuse]
    chance.shuffle(first)
    # One construction after the other: a module is not constructed again for each call.
    first.sort(key=lambda case: (case.construction, case.dtype, case.is_moved))
    ordered: list[KernelCase] = []
    for case in first:
        ordered.append(case)
        if case.is_given:
            ordered += [
                reusing_case for reusing_case in reusing if reusing_case.shapes == case.shapes
            ]
            reusing = [
                reusing_case for reusing_case in reusing if reusing_case.shapes != case.shapes
            ]
    return [*ordered, *reusing, *last]
