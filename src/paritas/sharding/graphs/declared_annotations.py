"""How a node of an nnScaler checkpoint can be split, as an annotation."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from paritas.core.errors import UsageError, first_line
from paritas.formats.files.torch_files import Call, Name
from paritas.sharding.graphs.calls import TensorValue
from paritas.sharding.graphs.checkpoint_records import CheckpointRecord, records_of, text_of
from paritas.sharding.operators.annotation import Annotation

if TYPE_CHECKING:
    from collections.abc import Mapping


# --- How a node can be split, as an annotation ----------------------------------------------------

# In nnScaler, four things say how: the annotation, additional rules of a node, functions that make
# the nodes of the ranks and recompute some arguments, and functions that write the code of a rank.
# All but the first are code, which is not run. What the known functions do is written as arguments
# that change with the split (`size[0]=a`, `process_group=ranks(n)`). A node with any other function
# gets no annotation here: the library, or running the operator, must provide one.

# This modifier divides the item of the new shape that is split.
_RESHAPE = "_reshape_anno.<locals>.modifier"
_SHAPE_ARGUMENTS = ("size", "shape")
# A node made by this function has the bounds of its part of the table as arguments.
_EMBEDDING = "nnscaler.graph.function.function.CubeEmbedding"
# Image norms, and the positions of the running statistics of instance norm.
_BATCH_NORM = "nnscaler.graph.function.wrapnn.wrap_batchnorm2d_func"
_INSTANCE_NORM = "nnscaler.graph.function.wrapnn.wrap_instancenorm2d_func"
_IMAGES, _STATISTICS = 4, (3, 4)
_FROZEN, _SUMMED = "^", "+"
_MOST = 64  # dimensions of a tensor, factors of a dimension


@dataclasses.dataclass(frozen=True)
class Declared:
    """The split annotation of a node; None, with a note, if it could not be derived."""

    text: str | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class _DeclaredTensor:
    """A tensor of an annotation.

    Attributes:
        dims: for each dimension, the identifiers of its factors.
        whole_gradient: identifiers for which a split leaves the full gradient on each rank.
        own: the identifier for which a split leaves each rank with its own values in this tensor.
    """

    dims: tuple[tuple[str, ...], ...]
    whole_gradient: tuple[str, ...]
    own: str = ""

    def spell(self, suffixes: Mapping[str, str]) -> str:
        """The tensor in the annotation language."""
        if self.dims == (("?",),):
            return "/" if "" in self.whole_gradient else "?"
        text = " ".join(_spell_dim(dim, suffixes) for dim in self.dims) or "1"
        names = {name for dim in self.dims for name in dim}
        words = [f"/{name}" for name in self.whole_gradient if name not in names]
        words += (
            [f"@{self.own}"] if self.own and self.own not in (*names, *self.whole_gradient) else []
        )
        return f"{text} : {' '.join(words)}" if words else text


def declared_annotation(
    node: CheckpointRecord,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs_given: tuple[Any, ...],
) -> Declared:
    """The annotation of an `IRDimops`, matched with its arguments and results."""
    anno = node.record("_anno", "OpAnno")
    suffixes: dict[str, str] = {}
    inputs = [_declare_tensor(each, suffixes) for each in records_of(anno, "_inputs", "ShapeAnno")]
    outputs = [
        _declare_tensor(each, suffixes) for each in records_of(anno, "_outputs", "ShapeAnno")
    ]
    if (len(inputs), len(outputs)) != (len(args), len(outputs_given)):
        declared_counts, has = (
            f"{len(inputs)} -> {len(outputs)}",
            f"{len(args)} -> {len(outputs_given)}",
        )
        return Declared(
            None,
            f"{node.words}: its annotation has {declared_counts} values, but the node has {has}",
        )
    inputs = [_without_dims(tensor, value) for tensor, value in zip(inputs, args, strict=True)]
    outputs = [
        _without_dims(tensor, value) for tensor, value in zip(outputs, outputs_given, strict=True)
    ]
    numbers = _embedding_bounds(node, inputs, kwargs)
    # The code that nnScaler generates for batch norm contains the group of the ranks.
    samples = _batch_dimension(node, inputs, suffixes, _BATCH_NORM)
    numbers += [f"process_group=ranks({samples})"] if samples else []
    # Instance norm has no group: its running statistics cover each rank's own samples.
    samples = _batch_dimension(node, inputs, suffixes, _INSTANCE_NORM)
    inputs = [
        dataclasses.replace(tensor, own=samples) if at in _STATISTICS else tensor
        for at, tensor in enumerate(inputs)
    ]
    notes = []
    if node.get("_no_grad_reduce_inputs"):
        notes.append("the node lists inputs with full gradients: ignored")
    for rule in records_of(node, "_trans_rules", "TransformRule"):
        modifier = _modifier(rule)
        if modifier == _RESHAPE:
            number = _reshape_number(rule, outputs, kwargs)
            if number is None:
                return Declared(None, f"{node.words}: one of its rules divides an unknown argument")
            numbers.append(number)
        elif modifier:
            code = f"one of its rules is code (`{modifier:.80}`), which is not run"
            return Declared(None, f"{node.words}: {code}; its splits are not read from the file")
        elif not _repeats_annotation(rule, inputs, outputs, suffixes):
            notes.append("one of its rules differs from its annotation: ignored")
    words = (", ".join(tensor.spell(suffixes) for tensor in side) for side in (inputs, outputs))
    text = " -> ".join(words).lstrip() + (f" ; {', '.join(numbers)}" if numbers else "")
    try:
        text = Annotation.parse(text).text
    except UsageError as why:
        return Declared(None, f"{node.words}: {first_line(why)}, in `{text:.200}`")
    return Declared(text, f"{node.words}: {'; '.join(notes)}" if notes else "")


def _declare_tensor(shape: CheckpointRecord, suffixes: dict[str, str]) -> _DeclaredTensor:
    dims = []
    if len(shape.items("_dims")) > _MOST:
        raise shape.wrong("_dims", shape["_dims"], f"at most {_MOST} dimensions")
    for dim in records_of(shape, "_dims", "DimAnno"):
        names, reduces = dim.items("_identifiers"), dim.items("_reduces")
        if not 0 < len(names) == len(reduces) <= _MOST:
            raise dim.wrong("_identifiers", names, "one name for each suffix")
        for name, reduce in zip(names, reduces, strict=True):
            suffix = _suffix(dim, reduce)
            # A dimension frozen in one tensor is frozen in all of them; the same holds for sums.
            if _FROZEN in (suffix, suffixes.get(_identifier(dim, name))):
                suffixes[name] = _FROZEN
            else:
                suffixes[name] = suffix or suffixes.get(name, "")
        # Factors of 1 carry no information.
        dims.append(tuple(name for name in names if name != "1") or ("1",))
    reduced = shape.get("_no_grad_reduce_ids") or ()
    if not isinstance(reduced, (list, tuple)) or not all(isinstance(n, str) for n in reduced):
        raise shape.wrong("_no_grad_reduce_ids", reduced, "names")
    return _DeclaredTensor(tuple(dims), tuple(reduced))


def _without_dims(tensor: _DeclaredTensor, value: Any) -> _DeclaredTensor:
    """A 0-d tensor is written with one dimension, which cannot be split."""
    if isinstance(value, TensorValue) and value.shape == () and len(tensor.dims) == 1:
        return dataclasses.replace(tensor, dims=(("1",),))
    return tensor


def _identifier(dim: CheckpointRecord, name: Any) -> str:
    text = text_of(name)
    if text is None or not (text.isidentifier() or text.isdecimal() or text in ("*", "?")):
        raise dim.wrong("_identifiers", name, "a name, a number, `*` or `?`")
    return text


def _suffix(dim: CheckpointRecord, reduce: Any) -> str:
    match reduce:
        case Call(arguments=("" | "+" | "^" as suffix,)):
            return str(suffix)
    raise dim.wrong("_reduces", reduce, "a reduction")


def _spell_dim(dim: tuple[str, ...], suffixes: Mapping[str, str]) -> str:
    factors = [name if name.isdecimal() else name + suffixes.get(name, "") for name in dim]
    return factors[0] if len(factors) == 1 else f"({' '.join(factors)})"


# --- known functions of nnScaler ------------------------------------------------------------------


def _embedding_bounds(
    node: CheckpointRecord, inputs: list[_DeclaredTensor], kwargs: Mapping[str, Any]
) -> list[str]:
    made_by = node.items("_create_fn")
    bounded = made_by == (Name(_EMBEDDING),) and {"start", "stop"} <= set(kwargs)
    if not bounded or len(inputs) != 2 or not inputs[1].dims:  # noqa: PLR2004 - ids and the table
        return []
    return [f"start:stop={inputs[1].dims[0][0]}"]


def _batch_dimension(
    node: CheckpointRecord,
    inputs: list[_DeclaredTensor],
    suffixes: Mapping[str, str],
    signature: str,
) -> str:
    """The batch dimension of this kind of node, if it can be split."""
    if node.text("signature") != signature or not inputs or len(inputs[0].dims) != _IMAGES:
        return ""
    (name, *rest) = inputs[0].dims[0]
    free = name.isidentifier() and suffixes.get(name) != _FROZEN
    return name if free and not rest else ""


def _modifier(rule: CheckpointRecord) -> str:
    """The name of the function of a rule; empty if it has none."""
    match rule.items("_modifier"):
        case (None,):
            return ""
        case (Call(what=Name(path="dill._dill._create_function"), state=(_, dict(fields))),):
            return text_of(fields.get("__qualname__")) or "a function"
        case (Name(path=path),):
            return "" if path.endswith(".TransformRule.default_modifier") else path
    return "a function"


def _reshape_number(
    rule: CheckpointRecord, outputs: list[_DeclaredTensor], kwargs: Mapping[str, Any]
) -> str | None:
    """`size[2]=c`, for a rule that divides an item of the new shape."""
    splits = _splits_by_tensor(rule, "_outputs")
    for argument in _SHAPE_ARGUMENTS:
        sizes = kwargs.get(argument)
        if len(outputs) != 1 or not isinstance(sizes, (list, tuple)):
            continue
        match splits:
            case [int(at)] if len(sizes) == len(outputs[0].dims) and 0 <= at < len(sizes):
                dim = outputs[0].dims[at]
                return f"{argument}[{at}]={_spell_dim(dim, {})}"
    return None


def _splits_by_tensor(rule: CheckpointRecord, side: str) -> list[int | str]:
    """For each tensor, the dimension that a rule splits, or what else it does."""
    split_dims: list[int | str] = []
    for split in records_of(rule, side, "DimopSplit"):
        match split["dims"]:
            case (int(at),) | [int(at)]:
                split_dims.append(at)
            case None:
                split_dims.append("value" if split.flag("val") else "whole")
            case _:
                split_dims.append("several")
    return split_dims


def _repeats_annotation(
    rule: CheckpointRecord,
    inputs: list[_DeclaredTensor],
    outputs: list[_DeclaredTensor],
    suffixes: Mapping[str, str],
) -> bool:
    """Whether a rule without a function only repeats the annotation."""
    names: set[str] = set()
    pairs = [
        *zip(inputs, _splits_by_tensor(rule, "_inputs"), strict=False),
        *zip(outputs, _splits_by_tensor(rule, "_outputs"), strict=False),
    ]
    for tensor, at in pairs:
        if isinstance(at, int) and 0 <= at < len(tensor.dims):
            names.add(tensor.dims[at][0])
    if len(names) != 1 or suffixes.get(name := names.pop(), _FROZEN) == _FROZEN:
        return False
    return all(_split_fits(tensor, at, name, suffixes) for tensor, at in pairs)


def _split_fits(
    tensor: _DeclaredTensor, at: int | str, name: str, suffixes: Mapping[str, str]
) -> bool:
    places = [dim_index for dim_index, dim in enumerate(tensor.dims) if name in dim]
    if places:
        return places == [at]
    return at == "whole" or (at == "value" and suffixes[name] == _SUMMED)
