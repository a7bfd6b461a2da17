"""How a node of a checkpoint can be split, written in the language of `partition.annotations`.

nnScaler has four sources for this: the annotation, rules that a node has besides, functions that
make the nodes of the ranks and work some arguments out again, and functions that write the code of
a rank. All but the first are code. It is not run; what the known pieces of it do is written as
arguments that go with the split (`size[0]=a`, `process_group=ranks(n)`), and a node with any other
has no annotation here: the library, or running the operator, has to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from paritas.dumps.foreign.pickles import Call, Name
from paritas.errors import UsageError
from paritas.graphs.calls import TensorValue
from paritas.graphs.reading.ckp_records import Record, records_of, text_of
from paritas.partition.annotations.annotation import Annotation

__all__ = ["Declared", "declared_annotation"]

# What the code of these modifiers does: it divides the item of the new shape that is split.
_RESHAPE = "_reshape_anno.<locals>.modifier"
_SHAPE_ARGUMENTS = ("size", "shape")
# A node that is made by this function has the bounds of its part of the table as arguments.
_EMBEDDING = "nnscaler.graph.function.function.CubeEmbedding"
# The norms of images, and where instance norm has its running statistics.
_BATCH_NORM = "nnscaler.graph.function.wrapnn.wrap_batchnorm2d_func"
_INSTANCE_NORM = "nnscaler.graph.function.wrapnn.wrap_instancenorm2d_func"
_IMAGES, _STATISTICS = 4, (3, 4)
_FROZEN, _SUMMED = "^", "+"
_MOST = 64  # dimensions of a tensor, factors of a dimension


@dataclasses.dataclass(frozen=True)
class Declared:
    """What a node declares.

    Attributes:
        text: the annotation; None where it cannot be written.
        note: what could not be written, and why.
    """

    text: str | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of an annotation.

    Attributes:
        dims: each the identifiers of its factors.
        whole_gradient: identifiers whose splits leave its gradient whole on each rank.
        own: the identifier whose split leaves each rank with what it wrote there itself.
    """

    dims: tuple[tuple[str, ...], ...]
    whole_gradient: tuple[str, ...]
    own: str = ""

    def spell(self, suffixes: Mapping[str, str]) -> str:
        """As the language has it."""
        if self.dims == (("?",),):
            return "/" if "" in self.whole_gradient else "?"
        text = " ".join(_spell(dim, suffixes) for dim in self.dims) or "1"
        own = {name for dim in self.dims for name in dim}
        words = [f"/{name}" for name in self.whole_gradient if name not in own]
        words += (
            [f"@{self.own}"] if self.own and self.own not in (*own, *self.whole_gradient) else []
        )
        return f"{text} : {' '.join(words)}" if words else text


def declared_annotation(
    node: Record, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs_given: tuple[Any, ...]
) -> Declared:
    """The annotation of an `IRDimops`, laid over its arguments and results as they were read."""
    anno = node.record("_anno", "OpAnno")
    suffixes: dict[str, str] = {}
    inputs = [_tensor(each, suffixes) for each in records_of(anno, "_inputs", "ShapeAnno")]
    outputs = [_tensor(each, suffixes) for each in records_of(anno, "_outputs", "ShapeAnno")]
    if (len(inputs), len(outputs)) != (len(args), len(outputs_given)):
        said, has = f"{len(inputs)} -> {len(outputs)}", f"{len(args)} -> {len(outputs_given)}"
        return Declared(None, f"{node.words}: its annotation is of {said} values, it has {has}")
    inputs = [_without_dims(tensor, value) for tensor, value in zip(inputs, args, strict=True)]
    outputs = [
        _without_dims(tensor, value) for tensor, value in zip(outputs, outputs_given, strict=True)
    ]
    numbers = _embedding_bounds(node, inputs, kwargs)
    numbers += _norm_group(node, inputs, suffixes)
    inputs = _own_statistics(node, inputs, suffixes)
    notes = []
    if node.get("_no_grad_reduce_inputs"):
        notes.append("which inputs' gradients are whole is told of the node: not looked at")
    for rule in records_of(node, "_trans_rules", "TransformRule"):
        modifier = _modifier(rule)
        if modifier == _RESHAPE:
            number = _reshape_number(rule, outputs, kwargs)
            if number is None:
                return Declared(None, f"{node.words}: a rule of it divides an unknown argument")
            numbers.append(number)
        elif modifier:
            code = f"a rule of it is code (`{modifier:.80}`), which is not run"
            return Declared(None, f"{node.words}: {code}: its splits are not read from the file")
        elif not _says_the_same(rule, inputs, outputs, suffixes):
            notes.append("a rule of it splits otherwise than its annotation: not looked at")
    words = (", ".join(tensor.spell(suffixes) for tensor in side) for side in (inputs, outputs))
    text = " -> ".join(words).lstrip() + (f" ; {', '.join(numbers)}" if numbers else "")
    try:
        text = Annotation.parse(text).text
    except UsageError as why:
        return Declared(None, f"{node.words}: {str(why).partition(chr(10))[0]}, in `{text:.200}`")
    return Declared(text, f"{node.words}: {'; '.join(notes)}" if notes else "")


def _tensor(shape: Record, suffixes: dict[str, str]) -> _Tensor:
    dims = []
    if len(shape.items("_dims")) > _MOST:
        raise shape.wrong("_dims", shape["_dims"], f"at most {_MOST} are due")
    for dim in records_of(shape, "_dims", "DimAnno"):
        names, reduces = dim.items("_identifiers"), dim.items("_reduces")
        if not 0 < len(names) == len(reduces) <= _MOST:
            raise dim.wrong("_identifiers", names, "a name for each suffix is due")
        for name, reduce in zip(names, reduces, strict=True):
            suffix = _suffix(dim, reduce)
            # What is frozen at one place is split nowhere; a sum is one wherever it is written.
            if _FROZEN in (suffix, suffixes.get(_identifier(dim, name))):
                suffixes[name] = _FROZEN
            else:
                suffixes[name] = suffix or suffixes.get(name, "")
        # Factors of 1 say nothing.
        dims.append(tuple(name for name in names if name != "1") or ("1",))
    reduced = shape.get("_no_grad_reduce_ids") or ()
    if not isinstance(reduced, (list, tuple)) or not all(isinstance(n, str) for n in reduced):
        raise shape.wrong("_no_grad_reduce_ids", reduced, "names are due")
    return _Tensor(tuple(dims), tuple(reduced))


def _without_dims(tensor: _Tensor, value: Any) -> _Tensor:
    """A tensor that has no dimension is written with one, which cannot be split."""
    if isinstance(value, TensorValue) and value.shape == () and len(tensor.dims) == 1:
        return dataclasses.replace(tensor, dims=(("1",),))
    return tensor


def _identifier(dim: Record, name: Any) -> str:
    text = text_of(name)
    if text is None or not (text.isidentifier() or text.isdecimal() or text in ("*", "?")):
        raise dim.wrong("_identifiers", name, "a name, a number, `*` or `?` is due")
    return text


def _suffix(dim: Record, reduce: Any) -> str:
    match reduce:
        case Call(arguments=("" | "+" | "^" as suffix,)):
            return str(suffix)
    raise dim.wrong("_reduces", reduce, "a kind of reduction is due")


def _spell(dim: tuple[str, ...], suffixes: Mapping[str, str]) -> str:
    factors = [name if name.isdecimal() else name + suffixes.get(name, "") for name in dim]
    return factors[0] if len(factors) == 1 else f"({' '.join(factors)})"


# --- what is code in nnScaler ---------------------------------------------------------------------


def _embedding_bounds(node: Record, inputs: list[_Tensor], kwargs: Mapping[str, Any]) -> list[str]:
    made_by = node.items("_create_fn")
    bounded = made_by == (Name(_EMBEDDING),) and {"start", "stop"} <= set(kwargs)
    if not bounded or len(inputs) != 2 or not inputs[1].dims:  # noqa: PLR2004 - ids and the table
        return []
    return [f"start:stop={inputs[1].dims[0][0]}"]


def _norm_group(node: Record, inputs: list[_Tensor], suffixes: Mapping[str, str]) -> list[str]:
    """The code that is generated for a rank's batch norm has the group of the ranks in it."""
    samples = _samples(node, inputs, suffixes, _BATCH_NORM)
    return [f"process_group=ranks({samples})"] if samples else []


def _own_statistics(
    node: Record, inputs: list[_Tensor], suffixes: Mapping[str, str]
) -> list[_Tensor]:
    """That of instance norm has none: its running statistics are of each rank's own samples."""
    samples = _samples(node, inputs, suffixes, _INSTANCE_NORM)
    return [
        dataclasses.replace(tensor, own=samples) if at in _STATISTICS else tensor
        for at, tensor in enumerate(inputs)
    ]


def _samples(
    node: Record, inputs: list[_Tensor], suffixes: Mapping[str, str], signature: str
) -> str:
    """The dimension of the samples of such a node, if it can be split."""
    if node.text("signature") != signature or not inputs or len(inputs[0].dims) != _IMAGES:
        return ""
    (name, *rest) = inputs[0].dims[0]
    free = name.isidentifier() and suffixes.get(name) != _FROZEN
    return name if free and not rest else ""


def _modifier(rule: Record) -> str:
    """The name of the code of a rule; empty if there is none."""
    match rule.items("_modifier"):
        case (None,):
            return ""
        case (Call(what=Name(path="dill._dill._create_function"), state=(_, dict(told))),):
            return text_of(told.get("__qualname__")) or "a function"
        case (Name(path=path),):
            return "" if path.endswith(".TransformRule.default_modifier") else path
    return "a function"


def _reshape_number(rule: Record, outputs: list[_Tensor], kwargs: Mapping[str, Any]) -> str | None:
    """`size[2]=c`, of a rule that divides an item of the new shape."""
    splits = _splits(rule, "_outputs")
    for argument in _SHAPE_ARGUMENTS:
        sizes = kwargs.get(argument)
        if len(outputs) != 1 or not isinstance(sizes, (list, tuple)):
            continue
        match splits:
            case [int(at)] if len(sizes) == len(outputs[0].dims) and 0 <= at < len(sizes):
                dim = outputs[0].dims[at]
                return f"{argument}[{at}]={_spell(dim, {})}"
    return None


def _splits(rule: Record, side: str) -> list[int | str]:
    """What a rule does to each tensor: the dimension it splits, or what else it does."""
    found: list[int | str] = []
    for split in records_of(rule, side, "DimopSplit"):
        match split["dims"]:
            case (int(at),) | [int(at)]:
                found.append(at)
            case None:
                found.append("value" if split.flag("val") else "whole")
            case _:
                found.append("several")
    return found


def _says_the_same(
    rule: Record, inputs: list[_Tensor], outputs: list[_Tensor], suffixes: Mapping[str, str]
) -> bool:
    """Whether a rule without code only repeats what the annotation says."""
    names: set[str] = set()
    pairs = [
        *zip(inputs, _splits(rule, "_inputs"), strict=False),
        *zip(outputs, _splits(rule, "_outputs"), strict=False),
    ]
    for tensor, at in pairs:
        if isinstance(at, int) and 0 <= at < len(tensor.dims):
            names.add(tensor.dims[at][0])
    if len(names) != 1 or suffixes.get(name := names.pop(), _FROZEN) == _FROZEN:
        return False
    return all(_fits(tensor, at, name, suffixes) for tensor, at in pairs)


def _fits(tensor: _Tensor, at: int | str, name: str, suffixes: Mapping[str, str]) -> bool:
    places = [place for place, dim in enumerate(tensor.dims) if name in dim]
    if places:
        return places == [at]
    return at == "whole" or (at == "value" and suffixes[name] == _SUMMED)
