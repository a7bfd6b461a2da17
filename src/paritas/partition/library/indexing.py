"""Look-ups by index: where an index points must be whole, the indices themselves can be split."""

from __future__ import annotations

from paritas.partition.library.claims import (
    AVERAGE,
    SUM,
    Bound,
    Claim,
    letters,
    named,
    once,
    positive_dims,
)
from paritas.partition.library.registry import everywhere, functional, rule


def _rows(bound: Bound, index: str, *, counted: bool) -> Claim | None:
    """Rows of a table; gradients that are divided by how often an index occurs bind the indices."""
    ids, table = bound.shape(index), bound.shape("weight")
    if ids is None or table is None or len(table) != 2:  # noqa: PLR2004 - a table
        return None
    dims = [
        d if d == "1" or not counted else f"{d}^" for d in named(ids, letters(len(ids))).split()
    ]
    width = "1" if table[1] == 1 else "w"
    inputs = {index: " ".join(dims), "weight": f"v^ {width}"}
    return Claim(inputs, (" ".join([*dims, width]),))


@rule("x weight padding_idx max_norm norm_type scale_grad_by_freq sparse", functional("embedding"))
def _embedding(bound: Bound) -> Claim | None:
    """The table is rewritten under a bound of its norms, so nothing is claimed then."""
    if bound.get("max_norm") is not None or bound.get("sparse"):
        return None
    return _rows(bound, "x", counted=bool(bound.get("scale_grad_by_freq")))


@rule("weight indices padding_idx scale_grad_by_freq sparse", "aten.embedding torch.embedding")
def _table_first(bound: Bound) -> Claim | None:
    if bound.get("sparse"):
        return None
    return _rows(bound, "indices", counted=bool(bound.get("scale_grad_by_freq")))


_BAG = (
    "x weight offsets max_norm norm_type scale_grad_by_freq mode sparse per_sample_weights "
    "include_last_offset padding_idx"
)


@rule(_BAG, functional("embedding_bag"))
def _bags(bound: Bound) -> Claim | None:
    """Bags of equal size; the items of a bag are terms of it, unless some do not count."""
    ids, table = bound.shape("x"), bound.shape("weight")
    refused = ("max_norm", "sparse", "scale_grad_by_freq", "offsets", "include_last_offset")
    plain = all(bound.get(name) is None or bound.get(name) is False for name in refused)
    if ids is None or table is None or len(ids) != 2 or not plain:  # noqa: PLR2004 - bags of ids
        return None
    mode = bound.get("mode", "mean")
    mark = {"sum": SUM, "mean": AVERAGE}.get(mode, "^")
    if bound.get("padding_idx") is not None and mode != "sum":
        mark = "^"
    width = "1" if table[1] == 1 else "w"
    bag = "1" if ids[0] == 1 else "b"
    item = "1" if ids[1] == 1 else f"i{mark}"
    inputs = {"x": f"{bag} {item}", "weight": f"v^ {width}"}
    if bound.has("per_sample_weights"):
        inputs["per_sample_weights"] = inputs["x"]
    return Claim(inputs, (f"{bag} {width}",))


def _beside(
    shape: tuple[int, ...], index: tuple[int, ...], at: int, along: tuple[str, str]
) -> tuple[list[str], list[str]]:
    """A tensor and an index into it along one dimension: others are split where equally long."""
    names = letters(len(shape))
    table, ids = [], []
    for i, (size, count) in enumerate(zip(shape, index, strict=True)):
        if i == at:
            table.append(along[0])
            ids.append("1" if count == 1 else along[1])
        else:
            dim = "1" if size == count == 1 else names[i] if size == count else "_"
            table.append(dim)
            ids.append(dim)
    return table, ids


@rule("x dim index sparse_grad", everywhere("gather"))
def _gather(bound: Bound) -> Claim | None:
    shape, index = bound.shape("x"), bound.shape("index")
    at = positive_dims(bound.get("dim"), shape)
    if shape is None or index is None or at is None or len(index) != len(shape):
        return None
    table, ids = _beside(shape, index, at[0], ("_", "i"))
    return Claim({"x": " ".join(table), "index": " ".join(ids)}, (" ".join(ids),))


@rule("x indices dim", everywhere("take_along_dim"))
def _take_along(bound: Bound) -> Claim | None:
    """Like gather; shapes that broadcast are left alone."""
    shape, index = bound.shape("x"), bound.shape("indices")
    at = positive_dims(bound.get("dim"), shape)
    if shape is None or index is None or at is None or not isinstance(bound.get("dim"), int):
        return None
    if len(index) != len(shape) or any(
        size != count
        for i, (size, count) in enumerate(zip(shape, index, strict=True))
        if i != at[0]
    ):
        return None
    table, ids = _beside(shape, index, at[0], ("_", "i"))
    return Claim({"x": " ".join(table), "indices": " ".join(ids)}, (" ".join(ids),))


@rule("x dim index src reduce", everywhere("scatter"))
def _scatter(bound: Bound) -> Claim | None:
    """Where two indices are the same, the last one wins: they stay together."""
    if bound.get("reduce") is not None:
        return None
    return _scattered(bound, "i^")


@rule("x dim index src", everywhere("scatter_add"))
def _scatter_add(bound: Bound) -> Claim | None:
    """What is added are terms; what it is added to is one of them."""
    return _scattered(bound, f"i{SUM}")


def _scattered(bound: Bound, mark: str) -> Claim | None:
    shape, index = bound.shape("x"), bound.shape("index")
    source = bound.shape("src")
    at = positive_dims(bound.get("dim"), shape)
    if shape is None or index is None or source != index or at is None or len(index) != len(shape):
        return None
    table, ids = _beside(shape, index, at[0], ("_", mark))
    text = " ".join(ids)
    inputs = {"x": once(" ".join(table), ids[at[0]]), "index": text, "src": text}
    return Claim(inputs, (" ".join(table),))


@rule("x dim index", everywhere("index_select"))
def index_select(bound: Bound) -> Claim | None:
    """Rows, in the order of the index, which can be split with the result."""
    shape, index = bound.shape("x"), bound.shape("index")
    at = positive_dims(bound.get("dim"), shape)
    if shape is None or index is None or at is None or len(index) != 1:
        return None
    dims = named(shape, letters(len(shape))).split()
    ids = "1" if index[0] == 1 else "i"
    inside = ["_" if i in at else d for i, d in enumerate(dims)]
    outside = [ids if i in at else d for i, d in enumerate(dims)]
    return Claim({"x": " ".join(inside), "index": ids}, (" ".join(outside),))


@rule("x dim index source alpha", everywhere("index_add"))
def _index_add(bound: Bound) -> Claim | None:
    return _indexed(bound, f"i{SUM}", "source")


@rule("x dim index source", everywhere("index_copy"))
@rule("x dim index value", everywhere("index_fill"))
def _index_copy(bound: Bound) -> Claim | None:
    return _indexed(bound, "i^", "source")


def _indexed(bound: Bound, mark: str, source: str) -> Claim | None:
    """Rows that are written to where an index says."""
    shape, index = bound.shape("x"), bound.shape("index")
    at = positive_dims(bound.get("dim"), shape)
    if shape is None or index is None or at is None or len(index) != 1:
        return None
    dims = named(shape, letters(len(shape))).split()
    ids = "1" if index[0] == 1 else mark
    table = ["_" if i in at else d for i, d in enumerate(dims)]
    rows = [ids if i in at else d for i, d in enumerate(dims)]
    inputs = {"x": once(" ".join(table), ids), "index": ids}
    if bound.has(source):
        inputs[source] = " ".join(rows)
    return Claim(inputs, (" ".join(table),))


@rule("x index", everywhere("take"))
@rule("x boundaries out_int32 right", "torch.bucketize aten.bucketize")
@rule("elements test_elements assume_unique invert", "torch.isin")
def _looked_up(bound: Bound) -> Claim | None:
    """One tensor is asked as a whole for every element of the other."""
    asked = {"index": "x", "boundaries": "boundaries", "test_elements": "test_elements"}
    name = next((name for name in asked if bound.has(name)), "")
    table = asked.get(name, "")
    elements = name if name == "index" else next(iter(bound.values))
    shape, whole = bound.shape(elements), bound.shape(table)
    if shape is None or whole is None:
        return None
    dims = named(shape, letters(len(shape)))
    return Claim({elements: dims, table: " ".join(["_"] * len(whole))}, (dims,))


@rule("sorted_sequence x out_int32 right", "torch.searchsorted aten.searchsorted")
def _search(bound: Bound) -> Claim | None:
    """One sequence for all, or one for each row."""
    sequence, shape = bound.shape("sorted_sequence"), bound.shape("x")
    if not sequence or not shape:
        return None
    dims = named(shape, letters(len(shape))).split()
    rows = dims[:-1] if len(sequence) > 1 else []
    inputs = {"sorted_sequence": " ".join([*rows, "_"]), "x": " ".join(dims)}
    return Claim(inputs, (" ".join(dims),))
