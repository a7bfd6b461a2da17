"""Make other inputs of the same kind as those that are given.

Shapes, dtypes and devices stay; integers and masks stay in their range. Properties of the given
inputs that a program may rely on are kept in all of them: triangular and symmetric matrices, rows
that sum to one, labels from a few values, sorted integers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.execution.computable import as_computable, is_number, stored_as
from paritas.core.execution.observation import input_tensors
from paritas.core.execution.saved_state import Copier
from paritas.core.numerics.metrics import bitwise_equal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Generator, Tensor

    from paritas.core.execution.subjects import Inputs

_FEW_VALUES, _ENOUGH_ELEMENTS = 4, 12
_SUM_ERROR = 1e-3
# Powers of ten by which inputs are scaled, up and down.
_MOST_POWERS = 8
_OTHER_DRAWS = 8
# Where functions have their thresholds, saturate or overflow.
_CENTERS = (1e-3, 0.01, 0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 40.0, 88.0, 103.0, 1e3)
_LENGTHS = (1.0, 8.0, 88.0, 1e3)


# --- Other inputs ---------------------------------------------------------------------------------


class SimilarInputs:
    """Makes other inputs of the same kind.

    Attributes:
        given: the given inputs.
        again: makes the given inputs under another seed; None if there is one set only.
        seed: the seed of all draws.
    """

    def __init__(
        self,
        inputs: Inputs,
        seed: int,
        again: Callable[[int], Inputs] | None = None,
        *,
        keeps_signs: bool = False,
        keeps_ranges: bool = False,
    ) -> None:
        """Make inputs like the given ones.

        Args:
            inputs: these.
            seed: of all draws.
            again: makes the given inputs under another seed.
            keeps_signs: none is negative if none was.
            keeps_ranges: no integer is beyond the given ones: the program does not check indices.
        """
        self.given, self.again, self.seed = inputs, again, seed
        self._keeps_signs, self._keeps_ranges = keeps_signs, keeps_ranges
        self._generator = torch.Generator().manual_seed(seed + 1)
        self._tensors = dict(input_tensors(inputs))
        self._characters = {path: character_of(t) for path, t in self._tensors.items()}

    def change_tensors(self, change: Callable[[str, Tensor], Tensor | None]) -> Inputs | None:
        """The given inputs with some tensors replaced; None if nothing changed."""
        copies = Copier()
        new: dict[int, Tensor] = {}
        for path, tensor in self._tensors.items():
            new_tensor = None if id(tensor) in new else change(path, tensor)
            if new_tensor is not None:
                new[id(tensor)] = as_leaf(new_tensor, requires_grad=tensor.requires_grad)
        if not new:
            return None

        def replace(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return new[id(leaf)] if id(leaf) in new else copies.copy_tensor(leaf)

        return self.given.map_leaves(replace)

    def other(self, seed: int) -> Inputs | None:
        """The given inputs under another seed; drawn here if `again` makes the same ones."""
        if self.again is not None:
            other_inputs = self.again(seed)
            if not _are_same(other_inputs, self.given):
                return other_inputs
        self._generator.manual_seed(self.seed + 7919 * seed)
        return self.change_tensors(
            lambda path, t: self._draw_tensor(path, t, tuple(t.shape)) if t.numel() else None
        )

    def _draw_tensor(self, path: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        return drawn_like(tensor, shape, self._characters[path], self._generator)

    def _free(self, change: Callable[[Tensor], Tensor]) -> Inputs | None:
        """Change every input that may be any float."""
        return self.change_tensors(
            lambda path, t: (
                stored_as(self._restore_sign(path, change(as_computable(t))), t.dtype)
                if self._characters[path].is_free and t.numel()
                else None
            )
        )

    def values(self) -> Iterator[SimilarCase]:
        """Values that programs often get wrong, the most telling first."""
        generator = self._generator

        def shuffle_values(t: Tensor, values: Tensor) -> Tensor:
            order = torch.randperm(t.numel(), generator=generator)
            return values[order].reshape(t.shape).to(t.device, t.dtype)

        def one_hot(t: Tensor) -> Tensor:
            flat = torch.zeros(t.numel(), dtype=t.dtype, device=t.device)
            flat[t.numel() // 2] = 1
            return flat.reshape(t.shape)

        yield from self._free_cases(
            ("both signs, normal", lambda t: _normal(t, generator)),
            ("large values", lambda t: _normal(t, generator) * 512),
        )
        # Sums of this number are exact: what remains of it is not rounding.
        equal = self._free(lambda t: torch.full_like(t, 0.75))
        yield from _some("all equal", equal, is_uniform=True)
        yield from self._free_cases(
            ("far from zero, close together", lambda t: _normal(t, generator) / 64 + 40),
            ("tiny values", lambda t: _normal(t, generator) * 2.0**-20),
            ("zeros", torch.zeros_like),
            ("negative", lambda t: -_normal(t, generator).abs()),
            ("one-hot", one_hot),
            ("one large value", lambda t: _normal(t, generator) + 30 * one_hot(t)),
        )
        for last in self._possible_indices():
            ends = self._integers(functools.partial(_ends, last=last))
            yield from _some("indices at their ends", ends)
        if not self._keeps_ranges:
            yield from _some("large integers", self._integers(_large_integers))
        repeated = self._integers(lambda t: t.reshape(-1)[0].expand_as(t))
        yield from _some("repeated indices", repeated)
        yield from _some("all masked", self._booleans(value=True))
        yield from _some("nothing masked", self._booleans(value=False))
        yield from self._free_cases(
            ("negative zeros", lambda t: -torch.zeros_like(t)),
            ("sorted", lambda t: _normal(t, generator).reshape(-1).sort().values.reshape(t.shape)),
            (
                "repeated values",
                lambda t: shuffle_values(t, (torch.arange(t.numel()) % 3 - 1).double()),
            ),
            ("denormal values", lambda t: _denormal(t, generator)),
        )

    def _free_cases(
        self, *changes: tuple[str, Callable[[Tensor], Tensor]]
    ) -> Iterator[SimilarCase]:
        for name, change in changes:
            yield from _some(name, self._free(change))

    # --- Over the whole range of the dtype ---

    def _restore_sign(self, path: str, values: Tensor) -> Tensor:
        """With the sign that all given values of this input have, if they have one."""
        input_values = as_computable(self._tensors[path])
        if (
            not self._keeps_signs
            or input_values.numel() < _ENOUGH_ELEMENTS
            or input_values.is_complex()
        ):
            return values
        if bool((input_values >= 0).all()):
            return values.abs()
        return -values.abs() if bool((input_values <= 0).all()) else values

    @property
    def free_paths(self) -> list[str]:
        """The inputs that may be any floats."""
        return [
            path
            for path, tensor in self._tensors.items()
            if self._characters[path].is_free and tensor.numel()
        ]

    def over_whole_range(self) -> Iterator[SimilarCase]:
        """Scales, other draws, offsets, mixtures of sizes; the simplest first."""
        yield from self._scaled_cases()
        for number in range(_OTHER_DRAWS):
            yield from _some(f"other values, seed {number + 1}", self.other(40 + number))
        yield from self._labels()
        yield from self.values()
        yield from self._mixed_cases()
        yield from self._around_centers()
        if len(self.free_paths) > 1:
            for path in self.free_paths:
                yield from self._scaled_alone(path)

    def _scaled_cases(self) -> Iterator[SimilarCase]:
        for power in range(1, _MOST_POWERS + 1):
            for signed in (-power, power):
                inputs = self._free(lambda t, by=10.0**signed: _times(t, by))  # type: ignore[misc]
                yield from _some(f"scaled by 1e{signed}", inputs)

    def _scaled_alone(self, path: str) -> Iterator[SimilarCase]:
        for power in (-2, 2, -4, 4, -8, 8):
            inputs = self.vary(
                self.given,
                lambda where, t, by=10.0**power: _times(t, by if where == path else 1.0),  # type: ignore[misc]
            )
            yield from _some(f"{path} scaled by 1e{power}", inputs)
        zeros = self.vary(self.given, lambda where, t: t * 0 if where == path else t)
        yield from _some(f"{path} zero", zeros)

    def _labels(self) -> Iterator[SimilarCase]:
        """All labels equal, each in turn, with the other inputs as given, small and large."""
        for path, tensor in self._tensors.items():
            if self._characters[path].kind != "labels":
                continue
            for label in as_computable(tensor).unique().tolist():
                for by, words in (
                    (1.0, ""),
                    (1e-3, ", others scaled by 1e-3"),
                    (10.0, ", others scaled by 10"),
                ):

                    def change(
                        where: str,
                        t: Tensor,
                        by: float = by,
                        label: float = label,
                        path: str = path,
                    ) -> Tensor | None:
                        if where == path:
                            return stored_as(torch.full_like(as_computable(t), label), t.dtype)
                        free = self._characters[where].is_free and t.numel()
                        return stored_as(_times(as_computable(t), by), t.dtype) if free else None

                    yield from _some(f"{path} all {label:g}{words}", self.change_tensors(change))

    def _around_centers(self) -> Iterator[SimilarCase]:
        for center in _CENTERS:
            for signed in (center, -center):
                inputs = self._free(
                    lambda t, at=signed: _normal(t, self._generator) * (at / 64) + at  # type: ignore[misc]
                )
                yield from _some(f"close to {signed:g}", inputs)

    def _mixed_cases(self) -> Iterator[SimilarCase]:
        generator = self._generator
        for length in _LENGTHS:
            evenly = self._free(lambda t, most=length: _evenly(t, most, generator))  # type: ignore[misc]
            yield from _some(f"evenly between -{length:g} and {length:g}", evenly)
        positive = self._free(lambda t: _log_uniform(t, generator, 8))
        yield from _some("positive, of sizes from 1e-8 to 1e8", positive)
        signed = self._free(lambda t: _log_uniform(t, generator, 8) * _signs(t, generator))
        yield from _some("both signs, of sizes from 1e-8 to 1e8", signed)
        whole_numbers = self._free(lambda t: (_normal(t, generator) * 4).round())
        yield from _some("small whole numbers", whole_numbers)
        powers = self._free(lambda t: torch.exp2((_normal(t, generator) * 4).round()))
        yield from _some("powers of two", powers)
        for size in (3.0, 8.0, 16.0):
            enlarged_inputs = self._free(
                lambda t, size=size: _one_in_each_row(_normal(t, generator) / 16, size)  # type: ignore[misc]
            )
            yield from _some(f"one value in each row larger by {size:g}", enlarged_inputs)
        for power in (4, 8):
            rows = self._free(
                lambda t, power=power: t * _log_uniform(_rows(t), generator, power)  # type: ignore[misc]
            )
            yield from _some(f"rows of sizes from 1e-{power} to 1e{power}", rows)
        for share in (1e-2, 1e-3, 1e-4, 1e-6):
            near = self._free(
                lambda t, share=share: (  # type: ignore[misc]
                    _normal(_rows(t), generator) + share * _normal(t, generator)
                )
            )
            yield from _some(f"rows that vary by {share:g} of their size", near)
        yield from _some(
            "constant rows", self._free(lambda t: _normal(_rows(t), generator).expand_as(t))
        )

    def vary(self, base: Inputs, change: Callable[[str, Tensor], Tensor]) -> Inputs | None:
        """Change the free inputs of others of the same kind; None if none is free."""
        values = dict(input_tensors(base))

        def vary_tensor(path: str, tensor: Tensor) -> Tensor:
            value = values[path].detach()
            if path not in self.free_paths:
                return value.clone()
            return stored_as(
                self._restore_sign(path, change(path, as_computable(value))), tensor.dtype
            )

        return self.change_tensors(vary_tensor) if self.free_paths else None

    def step_from(self, base: Inputs, index: tuple[int, ...] | None) -> SimilarCase | None:
        """Other inputs near these, for a search; `index` is the place of the most wrong result."""
        kind, power = self._random(), 3 * self._random() - 1.5
        if kind < 0.35:  # noqa: PLR2004
            paths = self.free_paths
            if self._random() < 0.5:  # noqa: PLR2004
                paths = paths[int(self._random() * len(paths)) :][:1]
            name = "scaled further"
            inputs = self.vary(base, lambda path, t: _times(t, 10.0**power) if path in paths else t)
        elif kind < 0.75:  # noqa: PLR2004
            width = 10.0 ** (-3 * self._random())
            name = "close to the values of the largest difference"
            inputs = self.vary(base, lambda _, t: self._close_to_element(t, index, width))
        else:
            name = "rows moved"
            inputs = self.vary(base, lambda _, t: self._with_moved_rows(t, 10.0 ** (power - 1)))
        return next(_some(name, inputs), None)

    def _random(self) -> float:
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def _close_to_element(
        self, tensor: Tensor, index: tuple[int, ...] | None, width: float
    ) -> Tensor:
        at = _element(tensor, index, self._random())
        return at.add(width / 3 * at * _normal(tensor, self._generator))

    def _with_moved_rows(self, tensor: Tensor, share: float) -> Tensor:
        size = share * tensor.abs().amax()
        return tensor.add(size * _normal(_rows(tensor), self._generator))

    def _possible_indices(self) -> list[int]:
        """The largest index of a dimension of another input: those out of range are refused.

        On other devices than the CPU, an index out of range ends the process: none is tried there.
        """
        integers = [
            t for path, t in self._tensors.items() if self._characters[path].kind == "integers"
        ]
        if not integers:
            return []
        largest = max(int(as_computable(t).max()) for t in integers)
        others = [t for path, t in self._tensors.items() if t.is_floating_point()]
        if self._keeps_ranges or any(t.device.type != "cpu" for t in integers):
            return [largest]
        sizes = {size - 1 for t in others for size in t.shape if size - 1 > largest}
        return [*sorted(sizes, reverse=True), largest]

    def _integers(self, change: Callable[[Tensor], Tensor]) -> Inputs | None:
        return self.change_tensors(
            lambda path, t: (
                stored_as(change(as_computable(t)), t.dtype).contiguous().clone()
                if self._characters[path].kind == "integers" and self._characters[path].keep is None
                else None
            )
        )

    def _booleans(self, *, value: bool) -> Inputs | None:
        return self.change_tensors(
            lambda path, t: (
                torch.full_like(t, value) if self._characters[path].kind == "booleans" else None
            )
        )


@dataclasses.dataclass(frozen=True)
class SimilarCase:
    """Inputs of the same kind.

    Attributes:
        name: what is special about them, in words.
        inputs: the arguments.
        is_uniform: all values of an input are equal: roundings of a sum are alike, and add up.
    """

    name: str
    inputs: Inputs
    is_uniform: bool = False


def _are_same(left: Inputs, right: Inputs) -> bool:
    ours, right_tensors = (dict(input_tensors(side)) for side in (left, right))
    return ours.keys() == right_tensors.keys() and all(
        bitwise_equal(ours[path], right_tensors[path]) for path in ours
    )


# --- Values ---------------------------------------------------------------------------------------


def _normal(like: Tensor, generator: Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator).to(like.dtype).to(like.device)


def _times(tensor: Tensor, by: float) -> Tensor:
    """Scaled, unless that leaves the range of the dtype."""
    scaled = tensor * by
    return scaled if bool(torch.isfinite(scaled).all()) else tensor


def _rows(tensor: Tensor) -> Tensor:
    """One number for each row, with the dimensions of the tensor."""
    return tensor[..., :1] if tensor.dim() else tensor


def _one_in_each_row(tensor: Tensor, larger: float) -> Tensor:
    moved = tensor.clone()
    moved.narrow(-1, 0, 1).add_(larger) if moved.dim() else moved.add_(larger)
    return moved


def _signs(like: Tensor, generator: Generator) -> Tensor:
    return torch.where(_normal(like, generator) < 0, -1.0, 1.0).to(like.dtype)


def _log_uniform(like: Tensor, generator: Generator, power: int) -> Tensor:
    drawn = torch.rand(like.shape, generator=generator, dtype=torch.float64)
    top = math.log10(torch.finfo(like.dtype).max)
    drawn = 10.0 ** (min(power, top / 2) * (2 * drawn - 1))
    return drawn.to(like.dtype).to(like.device)


def _evenly(like: Tensor, most: float, generator: Generator) -> Tensor:
    steps = torch.linspace(-most, most, max(like.numel(), 2), dtype=torch.float64)[: like.numel()]
    order = torch.randperm(like.numel(), generator=generator)
    return steps[order].reshape(like.shape).to(like.dtype).to(like.device)


def _element(tensor: Tensor, index: tuple[int, ...] | None, share: float) -> Tensor:
    """One element: at `index` if it has one there, else any."""
    if index is not None and len(index) == tensor.dim():
        sizes = tensor.shape
        return tensor[tuple(min(at, size - 1) for at, size in zip(index, sizes, strict=True))]
    return tensor.reshape(-1)[int(share * tensor.numel())]


def _some(name: str, inputs: Inputs | None, *, is_uniform: bool = False) -> Iterator[SimilarCase]:
    if inputs is not None:
        yield SimilarCase(name, inputs, is_uniform)


def _denormal(like: Tensor, generator: Generator) -> Tensor:
    scale = torch.finfo(like.dtype).tiny / 4
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64) * scale
    return drawn.to(like.dtype).to(like.device)


def _ends(tensor: Tensor, last: int) -> Tensor:
    flat = tensor.reshape(-1)
    last = min(last, torch.iinfo(tensor.dtype).max)
    ends = torch.stack([torch.full_like(flat[0], last), flat.min()])
    picks = torch.arange(flat.numel(), device=tensor.device) % 2
    return ends[picks].reshape(tensor.shape)


# Integers that the next narrower kind of number cannot hold. An index as large as this is refused,
# and so is a size: no memory would hold it.
_LARGE = {torch.int64: 2**53, torch.int32: 2**24}


def _large_integers(tensor: Tensor) -> Tensor:
    if tensor.dtype not in _LARGE or tensor.device.type != "cpu":
        return tensor
    steps = torch.arange(tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape) % 7
    large = _LARGE[tensor.dtype] + 1 + 2 * steps
    return large if int(tensor.min()) >= 0 else torch.where(steps % 2 == 0, large, -large)


# --- Drawing --------------------------------------------------------------------------------------

# More values than this are drawn once and repeated: a prime, so that rows of the usual lengths
# differ.
_MOST_DRAWN = 1048573


def drawn_like(
    example: Tensor, shape: tuple[int, ...], character: Character, generator: Generator
) -> Tensor:
    """Other values of the same range and kind; floats lie between two of the given ones."""
    pool = as_computable(example.detach()).reshape(-1)
    total = math.prod(shape)
    count = min(total, _MOST_DRAWN)
    if pool.numel() == 0:
        drawn = torch.zeros(shape, dtype=example.dtype)
        if is_number(example.dtype):
            drawn = stored_as(torch.randn(shape, generator=generator), example.dtype)
        return drawn.to(example.device)

    def pick_values() -> Tensor:
        places = torch.randint(pool.numel(), (count,), generator=generator)
        return pool[places.to(pool.device)].cpu()

    first = pick_values()
    if character.kind == "free":
        second = pick_values()
        share = torch.rand(count, generator=generator, dtype=torch.float64)
        wide = first.double() + share * (second.double() - first.double())
        # What a mask adds stays infinite: between two infinities is no number.
        wide = torch.where(first.isfinite() & second.isfinite(), wide, first.double())
        if pool.numel() == 1:
            wide = wide * (1 + torch.randn(count, generator=generator, dtype=torch.float64) / 4)
        first = wide.to(pool.dtype)
    first = first.to(example.device)
    if total > count:
        first = first.repeat(-(-total // count))[:total]
    drawn = first.reshape(shape)
    return stored_as(drawn if character.keep is None else character.keep(drawn), example.dtype)


def as_leaf(tensor: Tensor, *, requires_grad: bool) -> Tensor:
    """A tensor without a history: the sides differentiate from their outputs to their inputs only.

    What is computed from a leaf that requires grad, by a clone or a slice, is no leaf.
    """
    return (tensor if tensor.is_leaf else tensor.detach()).requires_grad_(requires_grad)


# --- What the given inputs are like ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Character:
    """What a program may rely on in one input.

    Attributes:
        kind: `free` floats, floats with `labels`, `integers`, `booleans`, `other`.
        keep: restores a property of the given input; None if there is none.
    """

    kind: str
    keep: Callable[[Tensor], Tensor] | None = None

    @property
    def is_free(self) -> bool:
        """Whether any float may stand there."""
        return self.kind == "free" and self.keep is None


def character_of(tensor: Tensor) -> Character:
    """What one of the given inputs is like."""
    if tensor.dtype is torch.bool:
        return Character("booleans")
    if tensor.is_floating_point() and not is_number(tensor.dtype):
        return Character("other")
    tensor = as_computable(tensor)
    if not tensor.is_floating_point():
        is_integer = not tensor.is_complex() and tensor.numel() > 0
        return Character("integers" if is_integer else "other", _sorting(tensor))
    if tensor.numel() >= _ENOUGH_ELEMENTS:
        if len(tensor.unique()) <= _FEW_VALUES:
            return Character("labels")
        structure = _structure(tensor)
        if structure is not None:
            return Character("free", structure)
    return Character("free")


def _sorting(tensor: Tensor) -> Callable[[Tensor], Tensor] | None:
    is_row = not tensor.is_complex() and tensor.dim() == 1 and tensor.numel() > 2  # noqa: PLR2004
    if is_row and bool((tensor[1:] >= tensor[:-1]).all()) and bool((tensor[1:] > tensor[0]).any()):
        return lambda new: new.sort().values
    return None


def _structure(tensor: Tensor) -> Callable[[Tensor], Tensor] | None:
    if tensor.dim() >= 2:  # noqa: PLR2004
        rows, columns = tensor.shape[-2:]
        if rows > 1 and columns > 1:
            for keep in (torch.triu, torch.tril):
                if torch.equal(keep(tensor), tensor):
                    return keep
        if rows == columns > 1 and torch.equal(tensor, tensor.mT):
            return lambda new: (new + new.mT) / 2 if new.shape[-1] == new.shape[-2] else new
    sums = tensor.double().sum(-1)
    is_share = bool((tensor >= 0).all()) and bool(((sums - 1).abs() < _SUM_ERROR).all())
    if tensor.shape[-1:] and tensor.shape[-1] > 1 and is_share:
        return lambda new: new.abs() / new.abs().sum(-1, keepdim=True).clamp(min=1e-6)
    return None
