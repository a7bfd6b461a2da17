"""Reductions: a dimension that is reduced leaves terms behind where the reduction can be resumed.

A mean of means is the mean only of equal parts; the extrema are exact as long as no two elements
share one (the gradient of a tie depends on who is asked first).
"""

from __future__ import annotations

from paritas.partition.library.claims import (
    AVERAGE,
    MAXIMUM,
    MINIMUM,
    PRODUCT,
    SUM,
    Bound,
    Claim,
    letters,
    named,
    positive_dims,
)
from paritas.partition.library.elementwise import broadcasting
from paritas.partition.library.registry import everywhere, functional, rule


def reduce(
    shape: tuple[int, ...] | None, dim: object, mark: str, *, keepdim: bool, outputs: int = 1
) -> Claim | None:
    """Reduce dimensions of a tensor.

    Args:
        mark: what the reduced dimensions are: terms of a kind, or whole (`^`).
    """
    reduced = positive_dims(dim, shape)
    if shape is None or reduced is None:
        return None
    dims = named(shape, letters(len(shape))).split()
    inside = [d + mark if i in reduced and d != "1" else d for i, d in enumerate(dims)]
    kept = ["1" if i in reduced else d for i, d in enumerate(dims) if keepdim or i not in reduced]
    return Claim({"x": " ".join(inside)}, (" ".join(kept),) * outputs)


def _marked(bound: Bound, mark: str, outputs: int = 1) -> Claim | None:
    keepdim = bool(bound.get("keepdim"))
    return reduce(bound.shape("x"), bound.get("dim"), mark, keepdim=keepdim, outputs=outputs)


@rule("x dim keepdim dtype", everywhere("sum nansum"))
@rule("x dim", everywhere("count_nonzero"))
def _sum(bound: Bound) -> Claim | None:
    return _marked(bound, SUM)


@rule("x dim keepdim dtype", everywhere("mean"))
def _mean(bound: Bound) -> Claim | None:
    return _marked(bound, AVERAGE)


@rule("x dim keepdim", everywhere("amax any"))
def _maximum(bound: Bound) -> Claim | None:
    """Whether any is true is the largest of truths."""
    return _marked(bound, MAXIMUM)


@rule("x dim keepdim", everywhere("amin all"))
def _minimum(bound: Bound) -> Claim | None:
    return _marked(bound, MINIMUM)


@rule("x dim keepdim dtype", everywhere("prod"))
def _product(bound: Bound) -> Claim | None:
    return _marked(bound, PRODUCT)


@rule("x dim keepdim", everywhere("max"))
def _max(bound: Bound) -> Claim | None:
    return _extremum(bound, MAXIMUM)


@rule("x dim keepdim", everywhere("min"))
def _min(bound: Bound) -> Claim | None:
    return _extremum(bound, MINIMUM)


def _extremum(bound: Bound, mark: str) -> Claim | None:
    """Along a dimension they say where it is too; of two tensors they go by element."""
    if bound.has("dim"):
        elements = Bound({"x": bound.get("x"), "other": bound.get("dim")}, ("x", "other"), {})
        claim = broadcasting(elements) if bound.positions == ("x", "dim") else None
        return claim and Claim(
            {"x": claim.inputs["x"], "dim": claim.inputs["other"]}, claim.outputs
        )
    return _marked(bound, mark) if "dim" not in bound.values else _marked(bound, "^", 2)


@rule("x dim keepdim", everywhere("logsumexp argmax argmin"))
def _whole(bound: Bound) -> Claim | None:
    return _marked(bound, "^")


@rule("x dim keepdim", everywhere("median nanmedian"))
def _median(bound: Bound) -> Claim | None:
    """Along a dimension it comes with its place."""
    return _marked(bound, "^", 2 if "dim" in bound.values else 1)


@rule("x dim keepdim", everywhere("mode"))
@rule("x k dim keepdim", everywhere("kthvalue"))
def _ranked(bound: Bound) -> Claim | None:
    """A value and its place; along the last dimension unless another is named."""
    keepdim = bool(bound.get("keepdim"))
    return reduce(bound.shape("x"), bound.get("dim", -1), "^", keepdim=keepdim, outputs=2)


@rule("x dim unbiased keepdim correction", "torch.var torch.Tensor.var torch.std torch.Tensor.std")
def _spread(bound: Bound) -> Claim | None:
    """The spread within parts does not give the spread of the whole."""
    return None if isinstance(bound.get("dim"), bool) else _marked(bound, "^")


@rule("x dim correction keepdim", "aten.var aten.std")
def _spread_of_dims(bound: Bound) -> Claim | None:
    """A number in place of the list would be the correction of another overload."""
    return _marked(bound, "^") if isinstance(bound.get("dim"), list | tuple) else None


@rule("x dim unbiased keepdim correction", "torch.var_mean torch.std_mean")
def _spread_and_mean(bound: Bound) -> Claim | None:
    return None if isinstance(bound.get("dim"), bool) else _marked(bound, "^", 2)


@rule("x dim keepdim", "torch.aminmax torch.Tensor.aminmax aten.aminmax")
def _extrema(bound: Bound) -> Claim | None:
    """The same dimension leaves minima in one result and maxima in the other."""
    claim = _marked(bound, MINIMUM)
    shape = bound.shape("x")
    reduced = positive_dims(bound.get("dim"), shape)
    if claim is None or shape is None or reduced is None:
        return None
    kept = claim.outputs[0] or "1"
    own = [f"{letters(1, i)[0]}{MAXIMUM}" for i in sorted(reduced) if shape[i] != 1]
    return Claim(claim.inputs, (kept, f"{kept} : {' '.join(own)}" if own else kept))


@rule("x ord dim keepdim dtype", "torch.linalg.vector_norm aten.linalg_vector_norm")
@rule("x p dim keepdim dtype", everywhere("norm") + " torch.functional.norm")
def _norm(bound: Bound) -> Claim | None:
    """Norms that are a sum, or an extremum, of what the elements give."""
    order = bound.get("ord", bound.get("p", 2))
    if order == "fro":
        order = 2
    if not isinstance(order, int | float):
        return None
    marks = {0: SUM, 1: SUM, float("inf"): MAXIMUM, float("-inf"): MINIMUM}
    return _marked(bound, marks.get(order, "^"))


@rule("x k dim largest sorted", everywhere("topk"))
@rule("x dim descending stable", everywhere("sort"))
@rule("x dim", everywhere("cummax cummin"))
def _ordered(bound: Bound) -> Claim | None:
    """Places are within the whole dimension; of the result it may have another length."""
    shape = bound.shape("x")
    whole = positive_dims(bound.get("dim", -1), shape)
    if shape is None or whole is None:
        return None
    dims = named(shape, letters(len(shape))).split()
    text = " ".join("_" if i in whole else d for i, d in enumerate(dims))
    return Claim({"x": text}, (text, text))


@rule("x dim descending stable", everywhere("argsort"))
def _order(bound: Bound) -> Claim | None:
    claim = _ordered(bound)
    return None if claim is None else Claim(claim.inputs, claim.outputs[:1])


@rule("tensor num_classes", functional("one_hot"))
def _one_hot(bound: Bound) -> Claim | None:
    """How many classes there are must not be left to the largest index that a rank sees."""
    shape, classes = bound.shape("tensor"), bound.get("num_classes", -1)
    if shape is None or classes < 1:
        return None
    dims = named(shape, letters(len(shape)))
    return Claim({"tensor": dims}, (f"{dims} {classes}".strip(),))
