"""What was compared, as data. The text for people is derived from it and never read back."""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, Self

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


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


# --- Paths of older versions ----------------------------------------------------------------------

_BEHIND = re.compile(r"(.*?)( on rank (\d+))?( \(second call\))?( \(inputs (\d+)\))?", re.DOTALL)
_IN_FRONT = re.compile(
    r"(?:rank (?P<rank>\d+): )?(?:(?P<graph>graph \d[^:]*): )?(?:step (?P<step>\d+): )?"
    r"(?P<rest>.*)",
    re.DOTALL,
)
_SINGLE_KINDS = {
    "random state": ItemKind.RANDOM_STATE,
    "random numbers": ItemKind.RANDOM_STATE,
    "call": ItemKind.CALL,
    "backward": ItemKind.BACKWARD,
    "gradients": ItemKind.GRADIENTS,
    "loss": ItemKind.LOSS,
}
# The longer words first: `state x after the call` also ends like an input's.
_READING_ORDER = sorted(_AROUND_THE_NAME.items(), key=lambda kind: -len("".join(kind[1])))


def read_old_path(path: str) -> Item:
    """The item of a finding written before findings carried items; nothing else may read a path.

    The item's text is the path. A path that is not understood becomes a `NAMED` item.
    """
    front = _IN_FRONT.fullmatch(path)
    behind = None if front is None else _BEHIND.fullmatch(front["rest"])
    if front is None or behind is None:  # cannot happen: all parts are optional
        return Item(ItemKind.NAMED, path)
    kind, name = _read_kind(behind[1])
    item = Item(
        kind,
        name,
        call=2 if behind[4] else 0,
        inputs=int(behind[6] or 0),
        step=int(front["step"] or 0),
        graph=front["graph"] or "",
        rank=None if front["rank"] is None else int(front["rank"]),
        part=None if behind[3] is None else int(behind[3]),
    )
    return item if item.text == path else Item(ItemKind.NAMED, path)


def _read_kind(words: str) -> tuple[ItemKind, str]:
    if words in _SINGLE_KINDS:
        return _SINGLE_KINDS[words], words
    for kind, (before, after) in _READING_ORDER:
        if words.startswith(before) and words.endswith(after):
            return kind, words[len(before) : len(words) - len(after)]
    is_output = re.match(r"output\b", words) is not None
    return (ItemKind.OUTPUT if is_output else ItemKind.NAMED), words
