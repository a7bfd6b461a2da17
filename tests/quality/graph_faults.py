"""Annotations of the operators of a transformer and of a CNN: wrong ones, and their right twins.

Each is wrong in a way that somebody has written, or would. Of most, the shapes are right, and
of many the sum of the results too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from paritas.sharding.graphs.calls import GraphCall, TensorValue

INDEX = torch.int64
MASK = torch.bool


@dataclasses.dataclass(frozen=True)
class Planted:
    """An operator, a wrong annotation of it, and a right one.

    Attributes:
        args: a shape is a tensor; a shape with a dtype is one of that dtype; else a plain value.
        right: None where no annotation of this call would be right.
        told: what the report of the wrong one has to say.
    """

    kind: str
    operator: str
    args: tuple[Any, ...]
    wrong: str
    right: str | None
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    told: str = ""


def shape(*sizes: int, dtype: torch.dtype | None = None, grad: bool = True) -> TensorValue:
    """A tensor of the run's dtype, or of its own."""
    return TensorValue("", sizes, dtype or torch.float32, requires_grad=grad)


def call_of(
    planted: Planted, annotation: str | None, dtype: torch.dtype, line: int = 1
) -> GraphCall:
    """The call with an annotation, as a reader of graphs would give it."""
    count = iter(range(99))

    def named(value: Any) -> Any:
        if isinstance(value, TensorValue):
            own = dtype if value.dtype == torch.float32 else value.dtype
            return dataclasses.replace(value, name=f"t{next(count)}", dtype=own)
        return [named(item) for item in value] if isinstance(value, list) else value

    return GraphCall(
        position=line,
        name=f"{planted.operator.rpartition('.')[2]}_{line}",
        operator=planted.operator,
        args=tuple(map(named, planted.args)),
        kwargs={key: named(value) for key, value in planted.kwargs.items()},
        annotation=annotation,
        source=f"block.py:{line}",
        code=f"y = {planted.kind}",
    )


_F = "torch.nn.functional."
_X = shape(4, 8)
_SQUARE = shape(8, 8)
_IMAGE = shape(4, 8, 6, 6)
_VECTOR = shape(8)
_HEADS = shape(2, 4, 8, 16)
_STATISTIC = shape(8, grad=False)

ATTENTION = f"{_F}scaled_dot_product_attention"

TRANSFORMER = [
    Planted("flip over the split", "torch.flip", (_X,), "a b -> a b", "a _ -> a _", {"dims": (1,)}),
    Planted(
        "roll over the split",
        "torch.roll",
        (_X,),
        "a b -> a b",
        "a b^ -> a b^",
        {"shifts": 1, "dims": 1},
    ),
    Planted(
        "sort over the split",
        "torch.sort",
        (_X,),
        "a b -> a b, a b",
        "a b^ -> a b^, a b^",
        {"dim": 1},
    ),
    Planted("running sum", "torch.cumsum", (_X,), "a b -> a b", "a b^ -> a b^", {"dim": 1}),
    Planted("softmax over it", "torch.softmax", (_X,), "a b -> a b", "a b^ -> a b^", {"dim": -1}),
    Planted(
        "layer norm over what it normalises",
        f"{_F}layer_norm",
        (_X,),
        "a b, weight=b, bias=b -> a b ; normalized_shape[0]=b",
        "a b^, weight=b^, bias=b^ -> a b^",
        {"normalized_shape": (8,), "weight": _VECTOR, "bias": _VECTOR},
    ),
    Planted(
        "rms norm over what it normalises",
        f"{_F}rms_norm",
        (_X,),
        "a b, weight=b -> a b ; normalized_shape[0]=b",
        "a b^, weight=b^ -> a b^",
        {"normalized_shape": (8,), "weight": _VECTOR},
    ),
    Planted(
        "a bias on each rank",
        f"{_F}linear",
        (_X, _SQUARE, _VECTOR),
        "a k+, n k+, n -> a n",
        "a k+, n k+, n : !k -> a n",
    ),
    Planted(
        "no sum over a contraction",
        "torch.mm",
        (_X, _SQUARE),
        "m k, k n -> m n",
        "m k+, k+ n -> m n",
    ),
    Planted(
        "a sum of what is there once",
        "torch.select",
        (_X, 1, 0),
        "a b+, ?, ? -> a",
        "a b^, ?, ? -> a",
    ),
    Planted("mean as sum", "torch.mean", (_X,), "a b+ -> a", "a b+avg -> a", {"dim": 1}),
    Planted("sum as mean", "torch.sum", (_X,), "a b+avg -> a", "a b+ -> a", {"dim": 1}),
    Planted("maximum as sum", "torch.amax", (_X,), "a b+ -> a", "a b+max -> a", {"dim": 1}),
    Planted("minimum as maximum", "torch.amin", (_X,), "a b+max -> a", "a b+min -> a", {"dim": 1}),
    Planted("logsumexp as sum", "torch.logsumexp", (_X,), "a b+ -> a", "a b^ -> a", {"dim": 1}),
    Planted("variance as mean", "torch.var", (_X,), "a b+avg -> a", "a b^ -> a", {"dim": 1}),
    Planted(
        "norm as sum",
        "torch.linalg.vector_norm",
        (_X,),
        "a b+ -> a",
        "a b^ -> a",
        {"dim": 1},
    ),
    Planted("position of the maximum", "torch.argmax", (_X,), "a b -> a", "a b^ -> a", {"dim": 1}),
    Planted(
        "outputs not transposed",
        "torch.transpose",
        (_SQUARE, 0, 1),
        "a b, ?, ? -> a b",
        "a b, ?, ? -> b a",
    ),
    Planted(
        "parts joined along the wrong dimension",
        "torch.matmul",
        (_SQUARE, _SQUARE),
        "m k+, k+ n -> n m",
        "m k+, k+ n -> m n",
    ),
    Planted(
        "brackets in the wrong order",
        "torch.Tensor.view",
        (shape(4, 16),),
        "a (c b) -> a b c ; size[0]=a, size[1]=b, size[2]=c",
        "a (b c) -> a b c ; size[0]=a, size[1]=b, size[2]=c",
        {"size": (4, 2, 8)},
    ),
    Planted(
        "a size that does not shrink",
        "torch.reshape",
        (shape(4, 2, 8),),
        "a b c^ -> a (b c^) ; shape[0]=a",
        "a b c^ -> a (b c^) ; shape[0]=a, shape[1]=(b c^)",
        {"shape": (4, 16)},
    ),
    Planted(
        "vocabulary without offsets",
        f"{_F}embedding",
        (shape(4, 8, dtype=INDEX), shape(32, 6)),
        "a b, n+ e -> a b e",
        "a b, n^ e -> a b e",
    ),
    Planted(
        "vocabulary without its bounds",
        "nnscaler.runtime.function.embedding",
        (shape(4, 8, dtype=INDEX), shape(32, 6)),
        "a b, n+ e -> a b e",
        "a b, n+ e -> a b e ; start:stop=n",
        {"padding_idx": None, "start": 0, "stop": 32},
    ),
    Planted(
        "gather along its dimension",
        "torch.gather",
        (_X, 1, shape(4, 8, dtype=INDEX)),
        "a b, ?, a b -> a b",
        "a b^, ?, a c -> a c",
    ),
    Planted(
        "a mask along the wrong dimension",
        "torch.where",
        (shape(8, dtype=MASK), _SQUARE, _SQUARE),
        "a, a b, a b -> a b",
        "b, a b, a b -> a b",
    ),
    Planted(
        "attention to a part of the keys",
        ATTENTION,
        (_HEADS, _HEADS, _HEADS),
        "b h s d^, b h s d^, b h s d^ -> b h s d^",
        "b h s d^, b h t^ d^, b h t^ d^ -> b h s d^",
    ),
    Planted(
        "causal attention by queries",
        ATTENTION,
        (_HEADS, _HEADS, _HEADS),
        "b h s d^, b h t^ d^, b h t^ d^ -> b h s d^",
        "b h s^ d^, b h s^ d^, b h s^ d^ -> b h s^ d^",
        {"is_causal": True},
    ),
    Planted(
        "attention over the width of a head",
        ATTENTION,
        (_HEADS, _HEADS, _HEADS),
        "b h s^ d, b h t^ d, b h t^ d -> b h s^ d",
        "b h s^ d^, b h t^ d^, b h t^ d^ -> b h s^ d^",
    ),
    Planted(
        "dropout, transposed",
        f"{_F}dropout",
        (_SQUARE,),
        "a b -> b a",
        "a b -> a b",
        {"p": 0.5, "training": True},
    ),
    Planted(
        "a gradient that is not reduced",
        f"{_F}linear",
        (_X, _SQUARE),
        "a k^, n k^ : /a -> a n",
        "a k^, n k^ -> a n",
        told="gradient of args[1]",
    ),
    Planted(
        "a scale's gradient that is not reduced",
        "torch.mul",
        (_X, _VECTOR),
        "a b, b : / -> a b",
        "a b, b -> a b",
        told="gradient of args[1]",
    ),
    Planted(
        "a mean loss as a sum",
        f"{_F}cross_entropy",
        (_X, shape(4, dtype=INDEX)),
        "n+ c^, n+ -> 1",
        "n+avg c^, n+avg -> 1",
    ),
    Planted(
        "a loss over a part of the classes",
        f"{_F}log_softmax",
        (_X,),
        "n c -> n c",
        "n c^ -> n c^",
        {"dim": -1},
    ),
    Planted(
        "a triangle by rows",
        "torch.triu",
        (shape(2, 8, 8),),
        "n a b -> n a b",
        "n a^ b^ -> n a^ b^",
    ),
    Planted(
        "rotary halves",
        "torch.chunk",
        (_X, 2),
        "a b, ? -> a b, a b",
        "a _, ? -> a _, a _",
        {"dim": -1},
    ),
    Planted("lists joined", "torch.cat", ([_X, _X],), "a b -> a b", "a _ -> a _", {"dim": 1}),
    Planted("tiles", "torch.Tensor.repeat", (_X, 1, 2), "a b, ?, ? -> a b", "a _, ?, ? -> a _"),
]

CNN = [
    Planted(
        "groups that stay",
        f"{_F}conv2d",
        (_IMAGE, shape(8, 1, 3, 3)),
        "n c _ _, c 1 _ _ -> n c _ _",
        "n g _ _, g 1 _ _ -> n g _ _ ; groups=g",
        {"groups": 8},
    ),
    Planted(
        "rows without their neighbours",
        f"{_F}conv2d",
        (_IMAGE, shape(4, 8, 3, 3)),
        "n c^ h w^, o c^ _ _ -> n o h w^",
        "n c^ h^ w^, o c^ _ _ -> n o h^ w^",
        {"padding": 1},
    ),
    Planted(
        "input channels without a sum",
        f"{_F}conv2d",
        (_IMAGE, shape(4, 8, 3, 3)),
        "n c _ _, o c _ _ -> n o _ _",
        "n c+ _ _, o c+ _ _ -> n o _ _",
    ),
    Planted(
        "a convolution's bias on each rank",
        f"{_F}conv2d",
        (_IMAGE, shape(4, 8, 3, 3), shape(4)),
        "n c+ _ _, o c+ _ _, o -> n o _ _",
        "n c+ _ _, o c+ _ _, o : !c -> n o _ _",
    ),
    Planted(
        "statistics of a part of the batch",
        f"{_F}batch_norm",
        (_IMAGE, _STATISTIC, _STATISTIC, _VECTOR, _VECTOR),
        "n c h^ w^, c, c, c, c -> n c h^ w^",
        "n^ c h^ w^, c, c, c, c -> n^ c h^ w^",
        {"training": True},
    ),
    Planted(
        "groups of channels cut through",
        f"{_F}group_norm",
        (_IMAGE, 2),
        "n c h^ w^, ?, weight=c, bias=c -> n c h^ w^",
        "n c^ h^ w^, ?, weight=c^, bias=c^ -> n c^ h^ w^",
        {"weight": _VECTOR, "bias": _VECTOR},
    ),
    Planted(
        "pooling over rows",
        f"{_F}max_pool2d",
        (_IMAGE, 3, 1, 1),
        "n c h w^, ?, ?, ? -> n c h w^",
        "n c h^ w^, ?, ?, ? -> n c h^ w^",
    ),
    Planted(
        "a mean over the image as a sum",
        f"{_F}adaptive_avg_pool2d",
        (_IMAGE, 1),
        "n c h+ w^, ? -> n c 1 1",
        "n c h+avg w^, ? -> n c 1 1",
    ),
    Planted(
        "channels flattened in the wrong order",
        "torch.flatten",
        (shape(4, 2, 6), 1),
        "n c h, ? -> n (h c)",
        "n c h^, ? -> n (c h^)",
    ),
]

# Wrong before anything is run.
MISFITS = [
    Planted("a rank too many", f"{_F}linear", (_X, _SQUARE), "a b k+, n k+ -> a b n", None),
    Planted("unequal lengths", f"{_F}linear", (_X, shape(16, 8)), "a k, k n -> a n", None),
    Planted("no annotation", "torch.relu", (_X,), "a b -> (a b", None),
    Planted("a result too few", "torch.sort", (_X,), "a b^ -> a b^", None, {"dim": 1}),
    Planted("an argument too many", "torch.relu", (_X,), "a b, a b -> a b", None),
]
