"""What a finding is about, as data: the item, the figures of its two values, what a rank holds."""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, cast

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


# --- Items: the text for people is derived from them and never read back --------------------------


class ItemKind(enum.StrEnum):
    """The kind of an item; `NAMED` is anything without a kind of its own."""

    NAMED = "named"
    OUTPUT = "output"
    INPUT = "input"
    STATE = "state"
    INPUT_AFTER_CALL = "input after the call"
    STATE_AFTER_CALL = "state after the call"
    INPUT_AFTER_BACKWARD = "input after backward"
    STATE_AFTER_BACKWARD = "state after backward"
    GRADIENT = "gradient"
    GRADIENT_AGAIN = "gradient of a second backward pass"
    SECOND_GRADIENT = "second gradient"
    UPSTREAM_GRADIENT = "upstream gradient"
    TRAINING_GRADIENT = "gradient in training"
    GRADIENTS = "gradients"
    CHANGED_INPUT = "changed input"
    RANDOM_STATE = "random state"
    SETTING = "setting"
    CALL = "call"
    BACKWARD = "backward"
    LOSS = "loss"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    INITIAL = "initial"
    RECORDED = "recorded value"
    NODE = "node"
    ORIGIN = "origin"
    HARNESS = "harness"

    @property
    def is_afterwards(self) -> bool:
        """Whether it is the value of an input or of state after the call or backward."""
        return self in _AFTERWARDS

    @property
    def is_state(self) -> bool:
        """Whether it is state of the program."""
        return self in _OF_STATE

    @property
    def is_after_backward(self) -> bool:
        """Whether it is a value after the backward pass."""
        return self in _AFTER_CALL

    @property
    def is_of_backward(self) -> bool:
        """Whether it is a value that the backward pass gives or changes."""
        return self.is_gradient or self.is_after_backward

    @property
    def after_call(self) -> ItemKind:
        """The same value after the call, for a value after backward."""
        return _AFTER_CALL.get(self, self)

    @property
    def is_gradient(self) -> bool:
        """Whether the backward pass computes it."""
        return self in _GRADIENTS


_AFTER_CALL = {
    ItemKind.INPUT_AFTER_BACKWARD: ItemKind.INPUT_AFTER_CALL,
    ItemKind.STATE_AFTER_BACKWARD: ItemKind.STATE_AFTER_CALL,
}
_AFTERWARDS = {*_AFTER_CALL, *_AFTER_CALL.values()}
_OF_STATE = {ItemKind.STATE, ItemKind.STATE_AFTER_CALL, ItemKind.STATE_AFTER_BACKWARD}
_GRADIENTS = {
    ItemKind.GRADIENT,
    ItemKind.GRADIENT_AGAIN,
    ItemKind.SECOND_GRADIENT,
    ItemKind.TRAINING_GRADIENT,
    ItemKind.GRADIENTS,
}

# The text before and after an item's name.
_AROUND_THE_NAME = {
    ItemKind.STATE: ("state ", ""),
    ItemKind.INPUT_AFTER_CALL: ("", " after the call"),
    ItemKind.STATE_AFTER_CALL: ("state ", " after the call"),
    ItemKind.INPUT_AFTER_BACKWARD: ("", " after backward"),
    ItemKind.STATE_AFTER_BACKWARD: ("state ", " after backward"),
    ItemKind.GRADIENT: ("gradient of ", ""),
    ItemKind.GRADIENT_AGAIN: ("gradient of ", " (second backward pass over one graph)"),
    ItemKind.SECOND_GRADIENT: ("second gradient of ", ""),
    ItemKind.UPSTREAM_GRADIENT: ("upstream gradient of ", ""),
    ItemKind.CHANGED_INPUT: ("", ", as changed"),
    ItemKind.TRAINING_GRADIENT: ("gradient ", ""),
    ItemKind.PARAMETER: ("parameter ", " after step"),
    ItemKind.BUFFER: ("buffer ", ""),
    ItemKind.INITIAL: ("initial ", ""),
    ItemKind.NODE: ("node ", ""),
}


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What was compared.

    Attributes:
        name: name of the output, the argument, the parameter or the node; the kind in words if
            there is only one of it. Empty for all of a program's state.
        call: which of several calls on the same inputs, from 1; 0 if there is one.
        inputs: which of several sets of inputs, from 1; 0 if there is one.
        step: training step, from 1; 0 if there is none.
        graph: the graph, the operator call or the claim that it belongs to.
        option: the split that was tried, and its ranks.
        rank: the process that reports it.
        part: the rank that holds it, if ranks hold different values.
        draw: which of several cotangents a gradient belongs to, from 1. It is not shown.
    """

    kind: ItemKind = ItemKind.NAMED
    name: str = ""
    call: int = 0
    inputs: int = 0
    step: int = 0
    graph: str = ""
    option: str = ""
    rank: int | None = None
    part: int | None = None
    draw: int = 0

    @property
    def text(self) -> str:
        """The text for people."""
        before, after = _AROUND_THE_NAME.get(self.kind, ("", ""))
        named = f"{before}{self.name}" if self.name else before.rstrip()
        return f"{self._text_in_front()}{named}{after}{self._text_behind()}"

    def _text_in_front(self) -> str:
        words = "" if self.rank is None else f"rank {self.rank}: "
        if self.graph:
            words += f"{self.graph}: "
        if self.option:
            words += f"{self.option}, "
        return f"{words}step {self.step}: " if self.step else words

    def _text_behind(self) -> str:
        words = "" if self.part is None else f" on rank {self.part}"
        if self.call:
            words += f" ({_CALLS[self.call]} call)"
        return f"{words} (inputs {self.inputs})" if self.inputs else words

    def __str__(self) -> str:
        return self.text

    @property
    def place(self) -> str:
        """The graph and the process, in words."""
        return self.graph if self.rank is None else f"rank {self.rank}: {self.graph}"

    @property
    def without_place(self) -> Self:
        """The same item without graph and process."""
        return msgspec.structs.replace(self, graph="", rank=None)

    def is_within(self, name: str) -> bool:
        """Whether it has this name, or is a part of what has it."""
        return self.name == name or self.name.startswith((f"{name}.", f"{name}["))

    def named(self, name: str) -> Self:
        """The same item with another name."""
        return msgspec.structs.replace(self, name=name)

    def of(self, kind: ItemKind) -> Self:
        """The same item with another kind."""
        return msgspec.structs.replace(self, kind=kind)

    def during(self, call: int, inputs: int) -> Self:
        """The same item in one of several calls, on one of several sets of inputs."""
        return msgspec.structs.replace(self, call=call, inputs=inputs)

    def in_graph(self, graph: str) -> Self:
        """The same item in a graph, an operator call or a claim."""
        return msgspec.structs.replace(self, graph=graph)

    def under(self, option: str) -> Self:
        """The same item under an option, put before the one it already has."""
        option = f"{option}, {self.option}" if self.option else option
        return msgspec.structs.replace(self, option=option)


_CALLS = ("", "first", "second")


def output(name: str = "output") -> Item:
    """A returned value, by its path."""
    return Item(ItemKind.OUTPUT, name)


def nth_output(position: int) -> Item:
    """One of the values that a graph returns."""
    return output(f"output[{position}]")


def input_of(name: str) -> Item:
    """An input before the call."""
    return Item(ItemKind.INPUT, name)


def after_call(name: str) -> Item:
    """The value of an input after the call."""
    return Item(ItemKind.INPUT_AFTER_CALL, name)


def gradient(name: str) -> Item:
    """The gradient of an input or a parameter."""
    return Item(ItemKind.GRADIENT, name)


def harness(name: str) -> Item:
    """A part of the check itself, if that is what failed."""
    return Item(ItemKind.HARNESS, name)


def in_order(pairs: Iterable[tuple[Item, Item]]) -> list[tuple[Item, Item]]:
    """Pairs of items, sorted by their text."""
    return sorted(pairs, key=lambda pair: (pair[0].text, pair[1].text))


# Items that exist only once.
CALL = Item(ItemKind.CALL, "call")
BACKWARD = Item(ItemKind.BACKWARD, "backward")
GRADIENTS = Item(ItemKind.GRADIENTS, "gradients")
RANDOM_STATE = Item(ItemKind.RANDOM_STATE, "random state")


# --- Figures: metrics of a pair, and figures of each side -----------------------------------------


class Metrics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a candidate tensor differs from its reference.

    Differences are taken over the positions where both are finite. Positions where both are NaN, or
    both the same infinity, are left out. If only one side is NaN or infinite anywhere, the metrics
    fail closed: every difference is infinite, and `cosine` and `pcc` are NaN.

    A complex value is one element, with its modulus as size. It is NaN or infinite if a component
    is. The sums of `cosine` and `pcc` treat it as two reals.

    Attributes:
        numel: elements in each tensor.
        mismatched: elements with different values; NaN equals NaN and -0.0 equals +0.0.
        max_abs: largest absolute difference.
        max_abs_index: the first position of `max_abs`; None if nothing differs.
        max_abs_reference: the reference there; the modulus if complex.
        max_abs_candidate: the candidate there; the modulus if complex.
        max_rel: largest difference relative to the reference's element; infinite if that is 0.
        mean_abs: mean absolute difference.
        rmse: root mean square difference.
        rel_l2: norm of the difference over the norm of the reference.
        cosine: cosine of the angle between the two; NaN if only one of them is all zero.
        pcc: Pearson correlation coefficient; NaN if one of them is constant.
        max_ulp: largest difference in ulp; None unless both have the same
            real floating-point dtype.
        nan_reference: NaNs in the reference; the next seven fields are counts too.
        nonfinite_mismatches: positions where one is NaN or infinite and the other is not the same.
    """

    numel: int
    mismatched: int
    max_abs: float
    max_abs_index: tuple[int, ...] | None
    max_abs_reference: float | None
    max_abs_candidate: float | None
    max_rel: float
    mean_abs: float
    rmse: float
    rel_l2: float
    cosine: float
    pcc: float
    max_ulp: float | None
    nan_reference: int
    nan_candidate: int
    posinf_reference: int
    posinf_candidate: int
    neginf_reference: int
    neginf_candidate: int
    zero_reference: int
    zero_candidate: int
    nonfinite_mismatches: int


class Extremes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of one side, over its finite values; all None if it has none."""

    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None


class QuickFigures(NamedTuple):
    """The figures of a cheap pass; they are defined, and fail closed, as in `Metrics`.

    Attributes:
        identical: whether all bits are the same (all NaNs count as the same).
        rms_reference: root mean square of the reference's finite values; NaN if it has none.
    """

    identical: bool
    max_abs: float
    rel_l2: float
    rmse: float
    rms_reference: float
    nonfinite_mismatches: int


class PairFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Both sides, and how far the candidate is from the reference.

    Attributes:
        identical: whether all bits are the same (all NaNs count as the same).
        metrics: how they differ; None if they are identical.
        mean_rel: mean of |candidate - reference| / |reference| over all positions that are finite
            on both sides; 0 where both are zero. Infinite if anywhere only the reference is zero,
            or only one side is finite.
        kl_divergence: of softmax(reference) from softmax(candidate), each taken over the whole
            flattened tensor; NaN if a value is not finite.
        quick: figures of a cheap pass, if no others were requested.

    A figure that was not requested is None.
    """

    reference: Extremes = Extremes()
    candidate: Extremes = Extremes()
    identical: bool = False
    metrics: Metrics | None = None
    mean_rel: float | None = None
    kl_divergence: float | None = None
    quick: QuickFigures | None = None

    @property
    def max_abs(self) -> float | None:
        """Largest absolute difference, from `metrics` or `quick`."""
        if self.identical:
            return 0.0
        difference_metrics = self.metrics or self.quick
        return None if difference_metrics is None else difference_metrics.max_abs

    @property
    def rel_l2(self) -> float | None:
        """Norm of the difference over that of the reference, from `metrics` or `quick`."""
        if self.identical:
            return 0.0
        difference_metrics = self.metrics or self.quick
        return None if difference_metrics is None else difference_metrics.rel_l2


# --- Placements: the role of a rank along an axis of ranks, and the words for it ------------------
# Only data: `placement` splits and assembles tensors.

Reduction = Literal["sum", "avg", "max", "min", "product"]
# What 4 elements become over 3 ranks: 2, 1 and 1, or as `torch.chunk` and DTensor do, 2, 2 and 0.
Cut = Literal["balanced", "chunk"]
Order = Literal["natural", "zigzag"]


@dataclasses.dataclass(frozen=True)
class Shard:
    """Each rank has a part along a dimension, in the order of the ranks.

    Attributes:
        unit: parts are multiples of this many elements; for `(h d)` split by h, the size of d.
        halo: number of elements of its neighbours that a rank has before and after its own part.
        pieces: the dimension is first cut into this many pieces, and each of them is split.
        cut: how a size that is not a multiple of the number of ranks is divided.
        order: in zigzag order, rank r of n holds the chunks r and 2n-1-r of 2n.
    """

    dim: int
    unit: int = 1
    halo: tuple[int, int] = (0, 0)
    pieces: int = dataclasses.field(default=1, repr=False)
    cut: Cut = dataclasses.field(default="balanced", repr=False)
    order: Order = dataclasses.field(default="natural", repr=False)


@dataclasses.dataclass(frozen=True)
class Replicate:
    """Each rank has all of it; for a result, the ranks must agree.

    Attributes:
        summed: whether the gradients of the ranks sum up to the whole gradient; otherwise each of
            them must be the whole gradient already.
        own: whether each rank may write different values to it, unrelated to what the whole writes.
    """

    summed: bool = True
    own: bool = False


@dataclasses.dataclass(frozen=True)
class Once:
    """One rank has it, the others have zeros: a bias that must be added once."""


@dataclasses.dataclass(frozen=True)
class Partial:
    """Each rank has a term of the whole (or, for max and min, a bound)."""

    reduction: Reduction = "sum"


Role = Shard | Replicate | Once | Partial


# --- Their words ----------------------------------------------------------------------------------

REPLICATE = "replicate"
_SHARD = re.compile(r"shard\((\d{1,2})\)")
# How versions of torch write a shard of each of several pieces.
_STRIDED = re.compile(r"_S\((\d{1,2}), (\d{1,6})\)|_StridedShard\(dim=(\d{1,2}), sf=(\d{1,6})\)")
_PARTIAL = re.compile(r"partial\((\w+)\)")


def role_word(role: Role) -> str:
    """How a role of a distributed tensor is recorded: `shard(0)`, `replicate`, `partial(sum)`."""
    match role:
        case Shard(dim=dim, pieces=1):
            return f"shard({dim})"
        case Shard(dim=dim, pieces=pieces):
            return f"_S({dim}, {pieces})"
        case Partial(reduction=reduction):
            return f"partial({reduction})"
        case _:
            return REPLICATE


def read_role(word: str) -> Role | None:
    """The role that a word stands for; None if unknown."""
    if word == REPLICATE:
        return Replicate()
    if match := _SHARD.fullmatch(word):
        return Shard(int(match[1]), cut="chunk")
    if match := _STRIDED.fullmatch(word):
        dim, pieces = int(match[1] or match[3]), int(match[2] or match[4])
        return Shard(dim, pieces=max(pieces, 1), cut="chunk")
    if match := _PARTIAL.fullmatch(word):
        # The reduction itself checks whether it exists.
        return Partial(cast("Reduction", match[1]))
    return None


# --- What one rank holds --------------------------------------------------------------------------


class LocalPlacement(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False
):
    """How a local tensor is a part of a distributed one.

    Attributes:
        mesh: extent of the device mesh along each of its dimensions.
        mesh_names: the names of those dimensions, or empty.
        coordinate: position of this rank in the mesh; empty if it is outside.
        placements: per mesh dimension `shard(0)`, `replicate` or `partial(sum)`.
        global_shape: the shape of the whole tensor.
        global_offset: where in the whole the local part begins.
    """

    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    placements: tuple[str, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    mesh_names: tuple[str, ...] = ()

    @property
    def roles(self) -> tuple[Role | None, ...]:
        """The role of each placement; None for an unknown one."""
        return tuple(map(read_role, self.placements))
