"""Products of matrices: what is summed over gives terms, all else is split as it is."""

from __future__ import annotations

from collections import Counter

from paritas.partition.library.claims import SUM, Bound, Claim, broadcast, named, once
from paritas.partition.library.registry import everywhere, functional, rule


def _matrices(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[str, str, str] | None:
    """The dimensions of a product with torch's own rules for vectors and stacks of matrices."""
    if not first or not second:
        return None
    stacks = broadcast((first[:-2], second[:-2]))
    if stacks is None:
        return None
    (left, right), stack, _ = stacks
    k = "1" if first[-1] == 1 else f"k{SUM}"
    rows = [] if len(first) == 1 else ["1" if first[-2] == 1 else "m"]
    columns = [] if len(second) == 1 else ["1" if second[-1] == 1 else "n"]
    return (
        " ".join([*left.split(), *rows, k]),
        " ".join([*right.split(), k, *columns]),
        " ".join([*stack, *rows, *columns]),
    )


@rule("x other", everywhere("matmul"), "torch.linalg.matmul torch.Tensor.__matmul__")
@rule("x mat2", everywhere("mm bmm"))
@rule("x vec", everywhere("mv"))
@rule("x tensor", "torch.dot aten.dot torch.vdot")
@rule("x other", "torch.Tensor.dot")
def _matmul(bound: Bound) -> Claim | None:
    second = next((n for n in ("other", "mat2", "vec", "tensor") if bound.has(n)), None)
    first, other = bound.shape("x"), bound.shape(second or "")
    dims = _matrices(first, other) if first and other else None
    if dims is None or second is None:
        return None
    return Claim({"x": dims[0], second: dims[1]}, (dims[2],))


@rule("x mat1 mat2 beta alpha", everywhere("addmm"))
@rule("x batch1 batch2 beta alpha", everywhere("baddbmm"))
@rule("x mat vec beta alpha", everywhere("addmv"))
def _add_product(bound: Bound) -> Claim | None:
    """What is added to the product is added once, however many terms the product has."""
    names = [n for n in bound.values if n in ("mat1", "mat2", "batch1", "batch2", "mat", "vec")]
    added = bound.shape("x")
    shapes = [bound.shape(name) for name in sorted(names)]
    if len(names) != 2 or added is None or not all(shapes):  # noqa: PLR2004 - two factors
        return None
    dims = _matrices(shapes[0] or (), shapes[1] or ())
    if dims is None:
        return None
    first, second = sorted(names)
    outside = dims[2].split()
    inputs = {
        "x": once(_right(added, outside), dims[0].split()[-1]),
        first: dims[0],
        second: dims[1],
    }
    return Claim(inputs, (dims[2],))


@rule("x batch1 batch2 beta alpha", everywhere("addbmm"))
def _add_sum_of_products(bound: Bound) -> Claim | None:
    """The matrices of a stack are terms as well."""
    added, first, second = bound.shape("x"), bound.shape("batch1"), bound.shape("batch2")
    if added is None or first is None or second is None:
        return None
    names = {"b": first[0], "m": first[1], "k": first[2], "n": second[2]}
    b, m, k, n = ("1" if size == 1 else name for name, size in names.items())
    b, k = (name if name == "1" else name + SUM for name in (b, k))
    inputs = {
        "x": once(_right(added, [m, n]), b, k),
        "batch1": f"{b} {m} {k}",
        "batch2": f"{b} {k} {n}",
    }
    return Claim(inputs, (f"{m} {n}",))


def _right(shape: tuple[int, ...], names: list[str]) -> str:
    return named(shape, names[len(names) - len(shape) :])


@rule("x vec2", "torch.outer torch.Tensor.outer aten.outer torch.ger torch.Tensor.ger")
def _outer(bound: Bound) -> Claim | None:
    first, second = bound.shape("x"), bound.shape("vec2")
    if first is None or second is None:
        return None
    m, n = named(first, ["m"]), named(second, ["n"])
    return Claim({"x": m, "vec2": n}, (f"{m} {n}",))


@rule("x vec1 vec2 beta alpha", everywhere("addr"))
def _add_outer(bound: Bound) -> Claim | None:
    added, first, second = bound.shape("x"), bound.shape("vec1"), bound.shape("vec2")
    if added is None or first is None or second is None:
        return None
    m, n = named(first, ["m"]), named(second, ["n"])
    inputs = {"x": _right(added, [m, n]), "vec1": m, "vec2": n}
    return Claim(inputs, (f"{m} {n}",))


@rule("x other", "torch.inner torch.Tensor.inner")
def _inner(bound: Bound) -> Claim | None:
    """All but the last dimension of both, one after the other."""
    first, second = bound.shape("x"), bound.shape("other")
    if not first or not second:
        return None
    rows = named(first[:-1], [f"m{i}" for i in range(len(first) - 1)]).split()
    columns = named(second[:-1], [f"n{i}" for i in range(len(second) - 1)]).split()
    k = "1" if first[-1] == 1 else f"k{SUM}"
    inputs = {"x": " ".join([*rows, k]), "other": " ".join([*columns, k])}
    return Claim(inputs, (" ".join([*rows, *columns]),))


@rule("x weight bias", functional("linear"), "aten.linear")
def _linear(bound: Bound) -> Claim | None:
    """Split by what is summed over, the bias is counted once."""
    shape, weight = bound.shape("x"), bound.shape("weight")
    if not shape or weight is None or len(weight) != 2:  # noqa: PLR2004 - a matrix
        return None
    rows = named(shape[:-1], [f"m{i}" for i in range(len(shape) - 1)]).split()
    k = "1" if weight[1] == 1 else f"k{SUM}"
    n = "1" if weight[0] == 1 else "n"
    inputs = {"x": " ".join([*rows, k]), "weight": f"{n} {k}"}
    if bound.has("bias"):
        inputs["bias"] = once(n, k)
    return Claim(inputs, (" ".join([*rows, n]),))


@rule("input1 input2 weight bias", functional("bilinear"), "torch.bilinear aten.bilinear")
def _bilinear(bound: Bound) -> Claim | None:
    first, weight = bound.shape("input1"), bound.shape("weight")
    if not first or weight is None or not bound.has("input2"):
        return None
    rows = named(first[:-1], [f"m{i}" for i in range(len(first) - 1)]).split()
    n, i, j = ("1" if size == 1 else name for name, size in zip("nij", weight, strict=True))
    i, j = (name if name == "1" else name + SUM for name in (i, j))
    inputs = {
        "input1": " ".join([*rows, i]),
        "input2": " ".join([*rows, j]),
        "weight": f"{n} {i} {j}",
    }
    if bound.has("bias"):
        inputs["bias"] = once(n, i, j)
    return Claim(inputs, (" ".join([*rows, n]),))


@rule("equation *operands", "torch.einsum torch.functional.einsum")
def _einsum(bound: Bound) -> Claim | None:
    """The equation says it all: a letter that is not in the result is summed over."""
    equation, operands = bound.get("equation"), bound.get("operands", ())
    if not isinstance(equation, str) or "." in equation or "operands" in bound.keywords.values():
        return None
    if not bound.spread("operands"):
        return None  # they came as one list, of which the items have no place of their own
    inside, arrow, outside = equation.replace(" ", "").partition("->")
    terms = inside.split(",")
    if not arrow:
        counts = Counter(inside.replace(",", ""))
        outside = "".join(sorted(letter for letter, count in counts.items() if count == 1))
    if len(terms) != len(operands) or any(len(set(term)) != len(term) for term in terms):
        return None
    lengths: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        for letter, size in zip(term, operand.shape, strict=True):
            lengths[letter] = max(lengths.get(letter, 1), size)

    def dims(term: str, shape: tuple[int, ...]) -> str:
        marks = (letter if letter in outside else letter + SUM for letter in term)
        return " ".join("1" if size == 1 else mark for mark, size in zip(marks, shape, strict=True))

    texts = [
        dims(term, tuple(operand.shape)) for term, operand in zip(terms, operands, strict=True)
    ]
    result = dims(outside, tuple(lengths[letter] for letter in outside))
    return Claim({f"operands[{i}]": text for i, text in enumerate(texts)}, (result,))


@rule("x1 x2 p compute_mode", "torch.cdist aten.cdist")
def _distances(bound: Bound) -> Claim | None:
    """Every row of one with every row of the other; only a sum of distances is a sum of terms."""
    first, second = bound.shape("x1"), bound.shape("x2")
    if first is None or second is None:
        return None
    dims = _matrices(first, (*second[:-2], second[-1], second[-2]))
    if dims is None:
        return None
    k = f"k{SUM}" if bound.get("p", 2.0) == 1 else "k^"
    left = [k if dim.startswith("k") else dim for dim in dims[0].split()]
    right = [k if dim.startswith("k") else dim for dim in dims[1].split()]
    right[-1], right[-2] = right[-2], right[-1]
    return Claim({"x1": " ".join(left), "x2": " ".join(right)}, (dims[2],))


@rule("a b dims", "torch.tensordot torch.functional.tensordot")
def _tensordot(bound: Bound) -> Claim | None:
    """Pairs of dimensions are summed over; the others follow each other."""
    first, second, dims = bound.shape("a"), bound.shape("b"), bound.get("dims", 2)
    if first is None or second is None:
        return None
    if isinstance(dims, int):
        dims = (list(range(len(first) - dims, len(first))), list(range(dims)))
    if not isinstance(dims, list | tuple) or len(dims) != 2:  # noqa: PLR2004 - a pair of lists
        return None
    left = [dim % len(first) for dim in dims[0]]
    right = [dim % len(second) for dim in dims[1]]
    if any(first[i] != second[j] for i, j in zip(left, right, strict=True)):
        return None
    inside = ["1" if size == 1 else f"m{i}" for i, size in enumerate(first)]
    outside = ["1" if size == 1 else f"n{i}" for i, size in enumerate(second)]
    rows = [dim for i, dim in enumerate(inside) if i not in left]
    columns = [dim for i, dim in enumerate(outside) if i not in right]
    for count, (i, j) in enumerate(zip(left, right, strict=True)):
        inside[i] = outside[j] = "1" if first[i] == 1 else f"k{count}{SUM}"
    return Claim({"a": " ".join(inside), "b": " ".join(outside)}, (" ".join([*rows, *columns]),))
