"""What msprobe writes about one call: its name, its values, and the shard of a rank."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from msgspec.structs import replace

from paritas.core.errors import UsageError
from paritas.core.numerics.statistics import Statistics
from paritas.core.results.items import REPLICATE, LocalPlacement, Partial, Shard, role_word
from paritas.formats.files.records import TensorFacts
from paritas.formats.files.tensor_bytes import contiguous_stride

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from paritas.core.file_trees import Problems
    from paritas.core.results.items import Reduction
    from paritas.formats.files.records import Phase, Record


# --- Names ----------------------------------------------------------------------------------------

# ::
#
#     Module.layer1.0.conv1.Conv2d.forward.0          a module, its class, the pass, which call
#     Functional.conv2d.3.backward                    a function, which call, the pass
#     Module.layer1.0.conv1.Conv2d.parameters_grad.0  gradients of a module's parameters
#     hidden.0.debug, hidden_grad.0.debug             what the program saved, and its gradient

CallKind = Literal["module", "function", "gradient", "saved", "other"]

_MOST_DIGITS = 9
# Names of wrapped modules: paths without these are those of the bare model.
_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PARALLEL = "module"
# Frames between the user's line and msprobe.
_OTHERS = re.compile(
    r"(?:site|dist)-packages[/\\](?:torch|torch_npu|msprobe|mindspore)[/\\]"
    r"|[/\\]torch[/\\]nn[/\\]modules[/\\]|[/\\]msprobe[/\\](?:core|pytorch|mindspore)[/\\]"
    r"|^<frozen "
)
_LONGEST = 1000


class MsprobeCall(NamedTuple):
    """A parsed name of `dump.json`.

    Attributes:
        name: path of the module, function, or saved name.
        op: class of the module, or the function.
        number: which call.
    """

    kind: CallKind
    name: str
    op: str = ""
    phase: Phase = "forward"
    number: int = 0


def parse_name(text: str) -> MsprobeCall:
    """Parse a name; one of unknown form is kept as it is."""
    prefix, *parts = text.split(".")
    match (prefix, *parts):
        case (("Module" | "Cell"), *path, kind, ("forward" | "backward") as phase, number) if (
            path and _is_number(number)
        ):
            return MsprobeCall("module", ".".join(path), kind, _parse_phase(phase), int(number))
        case (("Module" | "Cell"), *path, kind, "parameters_grad", number) if path and _is_number(
            number
        ):
            return MsprobeCall("gradient", ".".join(path), kind, "backward", int(number))
        case (("Module" | "Cell"), *path, kind, "parameters_grad") if path:
            return MsprobeCall("gradient", ".".join(path), kind, "backward")  # older releases
        case (*names, number, ("forward" | "backward") as phase) if names and _is_number(number):
            function = ".".join(names)
            return MsprobeCall("function", function, function, _parse_phase(phase), int(number))
        case (*names, number, "debug") if names and _is_number(number):
            return MsprobeCall("saved", ".".join(names), number=int(number))
    return MsprobeCall("other", text)


def forward_name(backward: str) -> str:
    """The name of the forward call of a backward call."""
    rest, _, last = backward.rpartition(".")
    if last == "backward":
        return f"{rest}.forward"
    return f"{rest.removesuffix('backward')}forward.{last}"


def _parse_phase(text: str) -> Phase:
    return "backward" if text == "backward" else "forward"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def plain_paths(classes: Mapping[str, str]) -> dict[str, str]:
    """Module paths as in the bare model.

    The wrappers of `torch.compile`, checkpointing, sharding and DistributedDataParallel are removed
    from paths. If a wrapper and its module were both recorded, the wrapper gets the plain path.

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
        # A wrapped top-level model is named after its class, like one that is not wrapped.
        expected = ".".join(part for part in parts if part not in _WRAPPED) or classes[path]
        plain[path] = path if expected in taken else expected
        taken.add(plain[path])
    return plain


def parents_of(construct: object) -> dict[str, str]:
    """The enclosing call of each name, from the contents of `construct.json`.

    For the backward pass, msprobe records whichever module ran last, which may be wrong: a backward
    call gets the parent of its forward call.
    """
    if not isinstance(construct, dict):
        return {}
    parents = {}
    for name, above in construct.items():
        # Megatron's micro steps are listed next to the parent.
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

    msprobe lists a module when it ends, after everything inside it. It began before the first of
    these.
    """
    begun: set[str] = set()
    for name in names:
        above = []
        outer: str | None = name
        while outer is not None and outer not in begun:
            begun.add(outer)
            above.append(outer)
            outer = parents.get(outer)
        yield from ((frame, True) for frame in reversed(above))
        yield name, False


class StackLines:
    """The user's line of each name, from the contents of `stack.json`."""

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

    def of(self, name: str, call: MsprobeCall) -> tuple[str, str]:
        """The line and its text; in the backward pass, those of the forward call."""
        if call.phase == "backward" and name not in self._lines:
            name = forward_name(name)
        return self._lines.get(name, ("", ""))


def _user_line(frames: Iterable[object]) -> tuple[str, str]:
    """The innermost frame of the user: `File a.py, line 3, in f, ` and the line's text."""
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
    """The index of each gradient of its module in this step, from 0: some releases count on."""
    visited: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for name in names:
        call = parse_name(name)
        if call.kind == "gradient":
            visited[call.name].append((call.number, name))
    return {
        name: position
        for numbers_of_call in visited.values()
        for position, (_, name) in enumerate(sorted(numbers_of_call))
    }


# --- Values ---------------------------------------------------------------------------------------

_LARGEST_JSON = 1 << 30
_DEEPEST = 100
_MOST_TENSOR_DIMENSIONS = 64
_MOST_ELEMENTS = 2**58  # so that the number of bytes also fits
_LONGEST_VALUE = 1000
_LONGEST_DTYPE = 100
_LONGEST_CHECKSUM = 32
# Numbers that JSON cannot express, as tools spell them.
_SPELLED = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_SPELLED |= {"infinity": math.inf, "-infinity": -math.inf}


def load_json(path: Path) -> Any:
    """Read a JSON file, which may contain Python's NaN and Infinity."""
    size = path.stat().st_size
    if size > _LARGEST_JSON:
        raise UsageError(
            f"{path.name} has {size} bytes, the limit is {_LARGEST_JSON}: dump fewer steps or "
            f"layers"
        )
    with path.open("rb") as file:
        content = file.read(size)
    try:
        return json.loads(content)
    except RecursionError as error:
        raise UsageError(f"{path.name} is nested too deeply") from error
    except ValueError as error:  # also bytes that are not text, and numbers of thousands of digits
        raise UsageError(
            f"{path.name} is damaged: {error}; msprobe completes it when its debugger is stopped"
        ) from error


def leaves(tree: Any, position: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every value in msprobe's description of arguments or results, with its position."""
    if depth > _DEEPEST:
        raise UsageError(f"{position[:80]!r} is nested deeper than {_DEEPEST} containers")
    below: Iterator[tuple[Any, Any]]
    if isinstance(tree, list):
        below = iter(enumerate(tree))
    elif isinstance(tree, dict) and tree.get("type") == "torch.Size":
        sizes = tree.get("value")
        below = iter(enumerate(sizes if isinstance(sizes, list) else []))
    elif isinstance(tree, dict) and not isinstance(tree.get("type"), str):
        below = iter(tree.items())
    else:
        yield position or "0", tree
        return
    for key, value in below:
        yield from leaves(value, f"{position}.{key}" if position else str(key), depth + 1)


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf is a tensor or an array of numbers."""
    return (
        isinstance(leaf, dict)
        and "shape" in leaf
        and _read_dtype(leaf)[:1] not in ("", "<", ">", "|")
    )


def facts_of(leaf: dict[str, Any]) -> TensorFacts:
    """The properties of a tensor."""
    shape = leaf["shape"]
    if (
        not isinstance(shape, list)
        or len(shape) > _MOST_TENSOR_DIMENSIONS
        or not all(type(extent) is int and extent >= 0 for extent in shape)
    ):
        raise UsageError(f"its shape {str(shape)[:80]} is not valid")
    if math.prod(max(extent, 1) for extent in shape) > _MOST_ELEMENTS:
        raise UsageError(f"its shape {str(shape)[:80]} is larger than any memory")
    extents = tuple(shape)
    return TensorFacts(
        dtype=_read_dtype(leaf),
        shape=extents,
        stride=contiguous_stride(extents),
        requires_grad=leaf.get("requires_grad") is True,
    )


def _read_dtype(leaf: dict[str, Any]) -> str:
    """The name in torch: numpy's are the same, and MindSpore's are capitalised."""
    name = leaf.get("dtype")
    if not isinstance(name, str) or len(name) > _LONGEST_DTYPE:
        return ""
    return name.rpartition(".")[2].lower()


def statistics_of(leaf: dict[str, Any], shape: tuple[int, ...]) -> Statistics | None:
    """The statistics that msprobe computed for a tensor, or None.

    Minimum, maximum, mean and norm include non-finite values, so they are used only if all values
    are finite. The counts of NaN and Inf are lower bounds.
    """
    count = math.prod(shape)
    if not count:
        return Statistics(count=0)
    high, low = _read_figure(leaf, "Max"), _read_figure(leaf, "Min")
    if high is None or low is None:
        return None
    if math.isnan(high) or math.isnan(low):
        return Statistics(count=count, nans=1)
    if not low <= high:
        raise UsageError(f"its minimum {low} is greater than its maximum {high}")
    if math.isinf(high) or math.isinf(low):
        alike = count if high == low else 1
        return Statistics(
            count=count,
            minimum=low if math.isfinite(low) else None,
            maximum=high if math.isfinite(high) else None,
            positive_infinities=alike if high == math.inf else 0,
            negative_infinities=alike if low == -math.inf else 0,
        )
    norm = _read_finite(leaf, "Norm")
    return Statistics(
        count=count,
        minimum=low,
        maximum=high,
        mean=_read_finite(leaf, "Mean"),
        # msprobe writes the value of a scalar as its norm, with its sign.
        l2=None if norm is None else abs(norm),
        zeros=count if low == high == 0 else 0,
    )


def _read_figure(leaf: dict[str, Any], name: str) -> float | None:
    value = leaf.get(name)
    if isinstance(value, str):
        return _SPELLED.get(value.strip().lower())
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            return None
    return None


def _read_finite(leaf: dict[str, Any], name: str) -> float | None:
    """The figure, or None if it overflowed."""
    figure = _read_figure(leaf, name)
    return figure if figure is not None and math.isfinite(figure) else None


def checksum_of(leaf: dict[str, Any]) -> str:
    """The checksum that msprobe can store instead of statistics, with its kind."""
    text = leaf.get("md5")
    if not isinstance(text, str) or not 0 < len(text) <= _LONGEST_CHECKSUM or not text.isalnum():
        return ""
    # Named md5 in the file, but it is a CRC32, or the exclusive or of 64-bit words.
    return f"xor:{text[2:]}" if text.startswith("0x") else f"crc32:{text}"


def text_of(leaf: Any) -> str:
    """A plain value as text, in Python's notation where possible."""
    text = _write_leaf(leaf)
    if len(text) > _LONGEST_VALUE:
        text = text[: _LONGEST_VALUE - 3] + "..."
    return text.encode(errors="replace").decode()


def _write_leaf(leaf: Any) -> str:
    if not isinstance(leaf, dict):
        return repr(leaf)
    match leaf:
        case {"shape": shape}:
            text = f"{leaf.get('type')} of {leaf.get('dtype')}, shape {shape}"
        case {"type": "slice", "value": [_, _, _] as bounds}:
            text = f"slice({', '.join(map(repr, bounds))})"
        case {"type": "ellipsis"}:
            text = "Ellipsis"
        case {"type": "torch.dtype", "value": str(name)}:
            text = name
        case {"type": "torch.device", "value": str(name)}:
            device, _, index = name.partition(":")
            text = f"device(type={device!r}" + (f", index={index})" if index.isdigit() else ")")
        case {"type": "torch.memory_format", "format": str(name)}:
            text = f"torch.{name}"
        case {"value": value}:
            text = repr(value)
        case _:
            text = repr(leaf)
    return text


# --- Shards ---------------------------------------------------------------------------------------

# msprobe records the mesh, the placements and the local shape. The global shape follows from the
# shapes that the other ranks recorded at the same place.

_MOST_MESH_DIMENSIONS = 8
_MOST_RANKS = 1 << 20
_LONGEST_AXIS_NAME = 32


class Sharding(NamedTuple):
    """How a tensor is distributed.

    Attributes:
        extents: of the mesh.
        ranks: of the mesh, in row-major order.
        placements: one per mesh dimension, as in `LocalPlacement`.
        dimensions: the tensor dimension that each of these shards, or None.
    """

    extents: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[str, ...]
    dimensions: tuple[int | None, ...]


def sharding_of(leaf: dict[str, Any]) -> Sharding | None:
    """How a tensor is distributed, or None."""
    if "device_mesh" not in leaf and "placements" not in leaf:
        return None
    extents, ranks = _read_mesh(leaf.get("device_mesh"))
    placed = leaf.get("placements")
    if not isinstance(placed, list) or len(placed) != len(extents):
        raise UsageError(f"its placements on a mesh of {extents} are not valid: {str(placed)[:80]}")
    placements = [_read_placement(placement, len(leaf["shape"])) for placement in placed]
    names, dimensions = zip(*placements, strict=True)
    return Sharding(extents, ranks, names, dimensions)


def _read_mesh(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    extents: list[int] = []
    level: list[Any] = [mesh]
    while level and all(isinstance(level_item, list) for level_item in level):
        lengths = {len(level_item) for level_item in level}
        level = list(itertools.chain.from_iterable(level))
        if len(lengths) != 1 or len(extents) >= _MOST_MESH_DIMENSIONS or len(level) > _MOST_RANKS:
            break
        extents.append(lengths.pop())
    ranks = tuple(level_item for level_item in level if type(level_item) is int)
    if not ranks or len(ranks) != len(level) or math.prod(extents) != len(ranks):
        raise UsageError(f"its mesh {str(mesh)[:80]} is not valid")
    return tuple(extents), ranks


def _read_placement(placement: Any, rank: int) -> tuple[str, int | None]:
    match placement:
        case {"Shard": {"dim": int(dimension)}} if -rank <= dimension < rank:
            return role_word(Shard(dimension % rank)), dimension % rank
        case {"Replicate": _}:
            return REPLICATE, None
        case {"Partial": {"reduce_op": str(how)}} if how.isidentifier():
            return role_word(Partial(cast("Reduction", how[:_LONGEST_AXIS_NAME]))), None
    raise UsageError(f"its placement {str(placement)[:80]} is not valid")


def place_shards(
    records: Mapping[int, list[Record]],
    shardings: Mapping[int, Mapping[int, Sharding]],
    problems: Problems,
) -> None:
    """Set the part of the whole that each distributed tensor is.

    Args:
        records: by rank; updated in place.
        shardings: by rank and index in that rank's list.
    """
    shapes: defaultdict[tuple[int, str], dict[int, tuple[int, ...]]] = defaultdict(dict)
    for rank, rank_shards in shardings.items():
        for at in rank_shards:
            record = records[rank][at]
            if record.tensor is not None:
                shapes[record.step, record.id][rank] = record.tensor.shape
    for rank, rank_shards in shardings.items():
        for at, sharding in rank_shards.items():
            record = records[rank][at]
            try:
                placement = _place_shard(rank, sharding, shapes[record.step, record.id])
            except UsageError as error:
                where = f"{record.id} of step {record.step}, rank {rank}"
                problems.add(f"{where}: {error}", is_loss=False)
                continue
            records[rank][at] = replace(record, placement=placement)


def _place_shard(
    rank: int, sharding: Sharding, shapes: Mapping[int, tuple[int, ...]]
) -> LocalPlacement:
    extents = sharding.extents
    if rank not in sharding.ranks:
        raise UsageError(f"its mesh has only the ranks {str(list(sharding.ranks))[:80]}")
    own_number = sharding.ranks.index(rank)
    steps = [math.prod(extents[position + 1 :]) for position in range(len(extents))]
    coordinate = tuple(
        own_number // step % extent for step, extent in zip(steps, extents, strict=True)
    )
    full_shape, offset = list(shapes[rank]), [0] * len(shapes[rank])
    cut = [dimension for dimension in sharding.dimensions if dimension is not None]
    if len(set(cut)) != len(cut):
        raise UsageError("one dimension is sharded over several mesh dimensions: not supported")
    for mesh, dimension in enumerate(sharding.dimensions):
        if dimension is None:
            continue
        first = own_number - coordinate[mesh] * steps[mesh]
        along = [
            sharding.ranks[first + position * steps[mesh]] for position in range(extents[mesh])
        ]
        missing = [other for other in along if len(shapes.get(other, ())) != len(full_shape)]
        if missing:
            raise UsageError(f"rank {missing[0]} did not record its part of the tensor")
        parts = [shapes[other][dimension] for other in along]
        full_shape[dimension] = sum(parts)
        offset[dimension] = sum(parts[: coordinate[mesh]])
    if math.prod(max(extent, 1) for extent in full_shape) > _MOST_ELEMENTS:
        raise UsageError(f"its global shape {tuple(full_shape)} is larger than any memory")
    return LocalPlacement(
        mesh=extents,
        coordinate=coordinate,
        placements=sharding.placements,
        global_shape=tuple(full_shape),
        global_offset=tuple(offset),
    )
