"""What msprobe's names say: which call of which module or function, under which module, from where.

::

    Module.layer1.0.conv1.Conv2d.forward.0          a module, its class, the pass, which call
    Functional.conv2d.3.backward                    a function, which call, the pass
    Module.layer1.0.conv1.Conv2d.parameters_grad.0  gradients of a module's parameters
    hidden.0.debug, hidden_grad.0.debug             what the program asked to save, its gradient
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from paritas.dumps.records import Phase

__all__ = [
    "Call",
    "Lines",
    "forward_name",
    "in_order",
    "number_gradients",
    "parents_of",
    "parse_name",
    "plain_paths",
]

Kind = Literal["module", "function", "gradient", "saved", "other"]

_MOST_DIGITS = 9
# What stands for the module that it wraps: names without these are those of the bare model.
_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PARALLEL = "module"
# Frames that lie between the user's line and the one who looked.
_OTHERS = re.compile(
    r"(?:site|dist)-packages[/\\](?:torch|torch_npu|msprobe|mindspore)[/\\]"
    r"|[/\\]torch[/\\]nn[/\\]modules[/\\]|[/\\]msprobe[/\\](?:core|pytorch|mindspore)[/\\]"
    r"|^<frozen "
)
_LONGEST = 1000


class Call(NamedTuple):
    """What a name of `dump.json` stands for.

    Attributes:
        name: path of the module, function, or saved name.
        op: class of the module, or the function.
        number: which call.
    """

    kind: Kind
    name: str
    op: str = ""
    phase: Phase = "forward"
    number: int = 0


def parse_name(text: str) -> Call:
    """Take a name apart; one that is of no known form stands for itself."""
    prefix, *parts = text.split(".")
    match (prefix, *parts):
        case (("Module" | "Cell"), *path, kind, ("forward" | "backward") as phase, number) if (
            path and _is_number(number)
        ):
            return Call("module", ".".join(path), kind, _phase(phase), int(number))
        case (("Module" | "Cell"), *path, kind, "parameters_grad", number) if path and _is_number(
            number
        ):
            return Call("gradient", ".".join(path), kind, "backward", int(number))
        case (("Module" | "Cell"), *path, kind, "parameters_grad") if path:
            return Call("gradient", ".".join(path), kind, "backward")  # older releases
        case (*names, number, ("forward" | "backward") as phase) if names and _is_number(number):
            function = ".".join(names)
            return Call("function", function, function, _phase(phase), int(number))
        case (*names, number, "debug") if names and _is_number(number):
            return Call("saved", ".".join(names), number=int(number))
    return Call("other", text)


def forward_name(backward: str) -> str:
    """The name of the forward call that a backward call belongs to."""
    rest, _, last = backward.rpartition(".")
    if last == "backward":
        return f"{rest}.forward"
    return f"{rest.removesuffix('backward')}forward.{last}"


def _phase(text: str) -> Phase:
    return "backward" if text == "backward" else "forward"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def plain_paths(classes: Mapping[str, str]) -> dict[str, str]:
    """Module paths as a recording of the bare model has them.

    What `torch.compile`, checkpointing and sharding wrap goes by its own name, and so does what
    DistributedDataParallel wraps. Where a wrapper and what it wraps were both seen, the outer one
    has the name.

    Args:
        classes: path of each module, and its class.
    """
    parallel = _PARALLEL in classes and all(
        path == _PARALLEL or path.startswith(f"{_PARALLEL}.") for path in classes
    )
    plain: dict[str, str] = {}
    taken: set[str] = set()
    for path in sorted(classes, key=len):
        parts = path.split(".")
        if parallel:
            parts = parts[1:]
        # A model that was wrapped itself is called by its class, as one that was not would be.
        wanted = ".".join(part for part in parts if part not in _WRAPPED) or classes[path]
        plain[path] = path if wanted in taken else wanted
        taken.add(plain[path])
    return plain


def parents_of(construct: object) -> dict[str, str]:
    """Under which call each name stands, of what `construct.json` holds.

    Of the backward pass it tells who was at work last, which need not be the one: a backward call
    stands where its forward call does.
    """
    if not isinstance(construct, dict):
        return {}
    parents = {}
    for name, above in construct.items():
        # Megatron's micro steps stand beside the parent.
        parent = above[0] if isinstance(above, list) and above else above
        if isinstance(parent, str):
            parents[name] = parent
    for name in construct:
        forward = forward_name(name) if parse_name(name).phase == "backward" else ""
        above = parse_name(parents.get(forward, ""))
        if above.kind == "module":
            rest, _, number = parents[forward].rpartition(".")
            parents[name] = f"{rest.removesuffix('forward')}backward.{number}"
    return parents


def in_order(names: Iterable[str], parents: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Each name twice: when its call begins (True), and when it ends.

    msprobe notes a module when it ends, after all that happened inside it. It began before the
    first of these.
    """
    begun: set[str] = set()
    for name in names:
        above = []
        outer: str | None = name
        while outer is not None and outer not in begun:
            begun.add(outer)
            above.append(outer)
            outer = parents.get(outer)
        yield from ((one, True) for one in reversed(above))
        yield name, False


class Lines:
    """The user's line behind each name, of what `stack.json` holds."""

    def __init__(self, stack: object) -> None:
        self._lines: dict[str, tuple[str, str]] = {}
        if not isinstance(stack, dict):
            return
        for key, value in stack.items():
            if not isinstance(value, list):
                continue
            match value:
                case [list() as names, list() as frames]:
                    pass
                case frames:  # of older releases
                    names = [key]
            line = _user_line(frames)
            self._lines.update((name, line) for name in names if isinstance(name, str))

    def of(self, name: str, call: Call) -> tuple[str, str]:
        """The line and its text; of the backward pass, those of the call it belongs to."""
        if call.phase == "backward" and name not in self._lines:
            name = forward_name(name)
        return self._lines.get(name, ("", ""))


def _user_line(frames: Iterable[object]) -> tuple[str, str]:
    """The innermost frame of the user's: `File a.py, line 3, in f, ` and the line's text."""
    for frame in frames:
        if not isinstance(frame, str) or not frame.startswith("File "):
            continue
        path, _, rest = frame[5:].partition(", line ")
        number, _, rest = rest.partition(", in ")
        function, _, code = rest.partition(",")
        if function and _is_number(number) and not _OTHERS.search(path[:_LONGEST]):
            return f"{path}:{number}, in {function}"[:_LONGEST], code.strip()[:_LONGEST]
    return "", ""


def number_gradients(names: Iterable[str]) -> dict[str, int]:
    """Which gradient of its module in this step each is, from 0: some releases count on."""
    seen: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for name in names:
        call = parse_name(name)
        if call.kind == "gradient":
            seen[call.name].append((call.number, name))
    return {name: place for found in seen.values() for place, (_, name) in enumerate(sorted(found))}
