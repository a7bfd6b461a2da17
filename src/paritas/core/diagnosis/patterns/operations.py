"""The operator on other operands: swapped, transposed, masked differently, one index off.

An operator and its variants are computed again in float64 by a plain formula. Names only choose
among the formulas here, so nothing from a file is executed. A formula is trusted only if it gives
the right values without a variation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import Step, step_names
from paritas.core.diagnosis.case import first_supported, near, roundoff, supported_pattern, widen
from paritas.core.diagnosis.patterns.attention import attends
from paritas.core.results.findings import Pattern, PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.case import Case, Context

# The largest share of right values that the plain formula may miss.
_MOST_UNLIKE = 0.02


@dataclasses.dataclass(frozen=True)
class Operation:
    """The operator of a tensor: its bare name, its inputs in float64, its context."""

    name: str
    inputs: tuple[Tensor, ...]
    context: Context

    def argument(self, name: str, position: int, default: Any = None) -> Any:
        """An argument by its name or its position."""
        arguments = self.context.arguments
        for key in (name, str(position)):
            if key in arguments:
                return arguments[key]
        return default

    @functools.cached_property
    def dims(self) -> tuple[int, ...]:
        """The dimensions that it reduces or works along; all of them by default."""
        rank = self.inputs[0].dim()
        candidate = self.argument("dim", 1, self.context.arguments.get("axis"))
        if isinstance(candidate, int) and not isinstance(candidate, bool):
            candidate = [candidate]
        if not isinstance(candidate, list | tuple) or not candidate:
            return tuple(range(rank))
        if not all(isinstance(dim, int) and -rank <= dim < rank for dim in candidate):
            return ()
        return tuple(sorted(dim % rank for dim in candidate))

    def shape_result(self, value: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        """A result in the required shape, with or without kept dimensions."""
        return value.reshape(shape) if value.numel() == math.prod(shape) else None


def operation_of(case: Case, inputs: int = 1) -> Operation | None:
    """The operator of a case, if it is known with at least this many inputs."""
    context = case.context
    if not context.operator or len(context.inputs) < inputs or case.given.is_complex():
        return None
    if any(tensor.is_complex() for tensor in context.inputs):
        return None
    # Masks stay boolean.
    wide = (
        tensor.cpu() if tensor.dtype == torch.bool else widen(tensor) for tensor in context.inputs
    )
    return Operation(context.operator_name, tuple(wide), context)


def trusted_formula(case: Case, compute: Callable[[], Tensor | None]) -> Tensor | None:
    """The result of a plain formula if it is right; only then its variants may be tried."""
    value = attempt(compute, case.shape)
    if value is None:
        return None
    value = value.double()
    fits = near(value, case.right, case.allowed)
    return value if float((~fits).double().mean()) <= _MOST_UNLIKE else None


def first_variant(
    case: Case,
    operation: Operation,
    kind: PatternKind,
    plain: Callable[[], Tensor] | None,
    variants: Sequence[tuple[str, Callable[[], Tensor]]],
) -> list[Pattern]:
    """The pattern of the first variant of a formula that gives the candidate."""
    if plain is None or trusted_formula(case, plain) is None:
        return []
    cost = math.log2(1 + len(variants))
    evidence = {"operator": operation.context.operator}
    values = ((sentence, attempt(compute, case.shape)) for sentence, compute in variants)
    return first_supported(
        supported_pattern(case, value.double(), kind, sentence, cost=cost, evidence=evidence)
        for sentence, value in values
        if value is not None
    )


def attempt(
    compute: Callable[[], Tensor | None], shape: tuple[int, ...] | None = None
) -> Tensor | None:
    """A variant's value; None if it does not work for these inputs and arguments.

    Args:
        shape: the required shape.
    """
    try:
        value = compute()
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    fits = value is not None and shape in {None, tuple(value.shape)}
    return value if fits else None


# --- Formulas by name -----------------------------------------------------------------------------

_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {
    3: torch.nn.functional.conv1d,
    4: torch.nn.functional.conv2d,
    5: torch.nn.functional.conv3d,
}


@dataclasses.dataclass(frozen=True)
class Product:
    """left @ right + added."""

    left: Tensor
    right: Tensor
    added: Tensor | None

    def value(self) -> Tensor:
        """The product."""
        value = torch.matmul(self.left, self.right)
        return value if self.added is None else value + self.added


def product_of(operation: Operation) -> Product | None:
    """An operator as a matrix product, if it is one."""
    name, inputs = operation.name, operation.inputs
    two, three = len(inputs) >= 2, len(inputs) >= 3  # noqa: PLR2004
    if name in ("addmm", "baddbmm") and three:
        return Product(inputs[1], inputs[2], inputs[0])
    if name == "linear" and two:
        return Product(inputs[0], inputs[1].mT, inputs[2] if three else None)
    if name in ("mm", "bmm", "matmul", "dot") and two:
        return Product(inputs[0], inputs[1], None)
    return None


def convolution_of(operation: Operation) -> Callable[..., Tensor] | None:
    """A function of input, weight and bias, if the operator is a convolution."""
    if not operation.name.startswith("conv") or len(operation.inputs) < 2:  # noqa: PLR2004
        return None
    arguments = operation.context.arguments
    way = _CONVOLUTIONS.get(operation.inputs[1].dim())
    if way is None or arguments.get("transposed", False):
        return None
    options = ("stride", "padding", "dilation", "groups")
    return functools.partial(
        way, **{name: arguments[name] for name in options if name in arguments}
    )


# --- Operands swapped or transposed ---------------------------------------------------------------

_INFIX = {
    "sub": "-",
    "div": "/",
    "true_divide": "/",
    "floor_divide": "//",
    "remainder": "%",
    "pow": "**",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
}
_PAIRS: dict[str, str] = {
    **{name: f"b {sign} a instead of a {sign} b" for name, sign in _INFIX.items()},
    **{name: f"{name}(b, a) instead of {name}(a, b)" for name in ("fmod", "atan2")},
}
_JOINED = step_names("joins") | {"concat", "concatenate"}


def propose_operands(case: Case) -> list[Pattern]:
    """`swapped operands`, or `transpose`: an operand transposed."""
    operation = operation_of(case, inputs=2)
    if operation is None or not case.is_beyond_noise:
        return []
    plain, variants = _operand_variants(operation)
    swapped = [variant for variant in variants if "transposed" not in variant[0]]
    transposed = [variant for variant in variants if variant not in swapped]
    return [
        *first_variant(case, operation, PatternKind.SWAPPED_OPERANDS, plain, swapped),
        *first_variant(case, operation, PatternKind.TRANSPOSE, plain, transposed),
    ]


Variants = tuple["Callable[[], Tensor] | None", "list[tuple[str, Callable[[], Tensor]]]"]


def _operand_variants(operation: Operation) -> Variants:
    name, inputs = operation.name, operation.inputs
    if name in _PAIRS and len(inputs) == 2:  # noqa: PLR2004
        compute, (a, b) = getattr(torch, name), inputs
        sentence = f"the operands are swapped: {_PAIRS[name]}"
        return lambda: compute(a, b), [(sentence, lambda: compute(b, a))]
    if name == "where" and len(inputs) == 3:  # noqa: PLR2004
        test, a, b = inputs
        sentence = "the branches of where() are swapped, or its condition is negated"
        return lambda: torch.where(test.bool(), a, b), [
            (sentence, lambda: torch.where(test.bool(), b, a))
        ]
    product = product_of(operation)
    if product is not None:
        return product.value, [
            (text, Product(*pair, product.added).value)
            for text, pair in _other_products(product.left, product.right)
        ]
    if name in _JOINED:
        join: Any = torch.stack if name == "stack" else torch.cat
        dim = operation.argument("dim", 1, 0)
        sentence = "the tensors are joined in the reverse order"
        return lambda: join(list(inputs), dim=dim), [
            (sentence, lambda: join(list(inputs)[::-1], dim=dim))
        ]
    return None, []


def _other_products(a: Tensor, b: Tensor) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    if min(a.dim(), b.dim()) < 2:  # noqa: PLR2004
        return
    yield "the second factor is transposed: a @ b.T instead of a @ b", (a, b.mT)
    yield "the first factor is transposed: a.T @ b instead of a @ b", (a.mT, b)
    yield "the factors are swapped: b @ a instead of a @ b", (b, a)
    yield "both factors are transposed: a.T @ b.T instead of a @ b", (a.mT, b.mT)
    yield "the product is transposed: b.T @ a.T instead of a @ b", (b.mT, a.mT)


# --- Masks missing, negated or off by one ---------------------------------------------------------

# The fused kernels, and the forms that torch takes apart.
_ATTENTIONS = step_names("attention") | {
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_math",
}


def propose_masks(case: Case) -> list[Pattern]:
    """`mask`: the mask is missing, negated or off by one."""
    operation = operation_of(case)
    if operation is None or not case.is_beyond_noise:
        return []
    return first_variant(case, operation, PatternKind.MASK, *_mask_variants(operation))


def _mask_variants(operation: Operation) -> Variants:
    name, inputs = operation.name, operation.inputs
    if name in _ATTENTIONS and len(inputs) >= 3:  # noqa: PLR2004
        return _attention_variants(operation)
    if name in step_names("triangles"):
        x = inputs[0]
        cut: Callable[[Tensor, int], Tensor] = torch.tril if name == "tril" else torch.triu
        offset = operation.argument("diagonal", 1, 0)
        if not isinstance(offset, int):
            return None, []
        return lambda: cut(x, offset), [
            ("the mask is not applied", lambda: x),
            *_off_by_one(lambda less: cut(x, offset + less)),
        ]
    if name == "masked_fill" and len(inputs) >= 2:  # noqa: PLR2004
        x, mask = inputs[0], inputs[1].bool()
        value = operation.argument("value", 2, None)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None, []
        return lambda: x.masked_fill(mask, value), [
            ("the mask is not applied", lambda: x),
            ("the mask is negated", lambda: x.masked_fill(~mask, value)),
            *_off_by_one(lambda less: x.masked_fill(mask.roll(less, -1), value)),
        ]
    return None, []


def _off_by_one(
    compute: Callable[[int], Tensor],
) -> list[tuple[str, Callable[[], Tensor]]]:
    return [
        ("the mask is off by one: it begins one position too late", lambda: compute(1)),
        ("the mask is off by one: it begins one position too early", lambda: compute(-1)),
    ]


def _attention_variants(operation: Operation) -> Variants:
    query, key, value = operation.inputs[:3]
    mask = operation.inputs[3] if len(operation.inputs) > 3 else None  # noqa: PLR2004
    causal = operation.argument("is_causal", 5, False) is True
    scale = operation.argument("scale", 6, None)
    arguments = {"attn_mask": mask, "is_causal": causal, "scale": scale}
    # The formula works on heads.
    heads = [tensor if tensor.dim() > 2 else tensor.unsqueeze(0) for tensor in (query, key, value)]  # noqa: PLR2004
    tensors = dict(zip(("query", "key", "value"), heads, strict=True))
    step = Step(torch.ops.aten.scaled_dot_product_attention.default, {**tensors, **arguments})

    def attend(**mistakes: Any) -> Callable[[], Tensor]:
        change = attends(**mistakes)
        return lambda: change(step).reshape(*query.shape[:-1], value.shape[-1])

    variants: list[tuple[str, Callable[[], Tensor]]] = []
    if causal:
        variants += [
            ("the causal mask is not applied", attend(diagonal=None)),
            ("the causal mask is off by one: each token sees the next", attend(diagonal=1)),
            ("the causal mask is off by one: no token sees itself", attend(diagonal=-1)),
        ]
    if mask is not None:
        variants.append(("the mask is not applied", attend(alter=lambda _: None)))
        if mask.dtype == torch.bool:
            variants.append(("the mask is negated", attend(alter=torch.logical_not)))
        variants += _off_by_one(lambda less: attend(alter=lambda mask: mask.roll(less, -1))())
    if mask is None and not causal:
        words = "a causal mask is applied although none was requested"
        variants.append((words, attend(diagonal=0)))
    return attend(), variants


# --- A piece taken one index too early or too late ------------------------------------------------

# How many indices on either side are tried.
_FARTHEST = 2


def propose_selections(case: Case) -> list[Pattern]:
    """`shift`: the result of `select` or `slice` at another index."""
    operation = operation_of(case)
    if operation is None or operation.name not in ("select", "slice"):
        return []
    return first_supported(_taken_elsewhere(case, operation))


def _taken_elsewhere(case: Case, operation: Operation) -> Iterator[Pattern | None]:
    ways = [way for step in range(1, _FARTHEST + 1) for way in (step, -step)]
    for way in ways:
        value = attempt(functools.partial(_take_farther_on, operation, way), case.shape)
        if value is None:
            continue
        where = "too late" if way > 0 else "too early"
        count = "one index" if abs(way) == 1 else f"{abs(way)} indices"
        yield supported_pattern(
            case,
            value.double(),
            PatternKind.SHIFT,
            f"taken from {count} {where}",
            cost=math.log2(1 + len(ways)),
            evidence={"operator": operation.context.operator, "by": float(way)},
        )


def _take_farther_on(operation: Operation, way: int) -> Tensor | None:
    """The piece this many indices farther on."""
    x = operation.inputs[0]
    dim = operation.argument("dim", 1, 0)
    size = x.shape[dim]
    if operation.name == "select":
        index = operation.argument("index", 2) % size + way
        return x.select(dim, index) if 0 <= index < size else None
    start = operation.argument("start", 2, 0) or 0
    end = operation.argument("end", 3, size)
    step = operation.argument("step", 4, 1)
    start, end = ((min(at, size) if at >= 0 else at + size) + way for at in (start, end or size))
    if start < 0 or end > size or step < 1:
        return None
    return x.index_select(dim, torch.arange(start, end, step))


# --- Another of several equally good elements -----------------------------------------------------

_ALONG = step_names("orders") | {"kthvalue", "median", "mode"}
_ONE = frozenset({"argmax", "argmin", "max", "min", "cummax", "cummin"})
# Scores that differ by fewer roundings than this are a tie.
_ROUNDINGS = 4.0


def propose_ties(case: Case) -> list[Pattern]:
    """`tie-breaking`: every differing index is another choice among ties."""
    operation = operation_of(case)
    if operation is None or not case.is_exact or not case.is_beyond_noise:
        return []
    if operation.name not in _ALONG | _ONE or case.is_boolean:
        return []
    scores = operation.inputs[0]
    scores_of_both = _scores_of(case, operation, scores)
    if scores_of_both is None:
        return []
    actual, expected, distinct = scores_of_both
    wrong = case.wrong
    apart = (actual - expected)[wrong].abs()
    unit = roundoff(case.context.inputs[0])
    scale = torch.maximum(actual.abs(), expected.abs())[wrong]
    if not distinct or not bool((apart <= _ROUNDINGS * unit * scale).all()):
        return []
    equal = float((apart == 0).double().mean())
    what = "equal" if equal == 1 else "equal but for a rounding"
    count = int(wrong.sum())
    return [
        Pattern(
            kind=PatternKind.TIE_BREAKING,
            confidence=0.95,
            sentence=(
                f"another choice among ties: the scores at the {count} differing "
                f"ind{'ices' if count > 1 else 'ex'} are {what}"
            ),
            evidence={"differing": count, "exactly equal": equal},
        )
    ]


def _scores_of(
    case: Case, operation: Operation, scores: Tensor
) -> tuple[Tensor, Tensor, bool] | None:
    """The scores at the candidate's and at the right indices, and whether the former are valid."""
    actual, expected = case.candidate.detach().cpu().long(), case.reference.detach().cpu().long()
    candidate = operation.argument("dim", 1, None)
    if operation.name in ("topk", "kthvalue"):
        candidate = operation.argument("dim", 2, -1)
    elif operation.name in _ALONG and not isinstance(candidate, int):
        candidate = -1
    if isinstance(candidate, bool) or not isinstance(candidate, int):
        scores, dim = scores.flatten(), 0
        actual, expected = actual.flatten(), expected.flatten()
    else:
        dim = candidate % scores.dim() if scores.dim() else 0
        if actual.dim() == scores.dim() - 1:
            actual, expected = actual.unsqueeze(dim), expected.unsqueeze(dim)
    size = scores.shape[dim] if scores.dim() else 0
    fits = actual.dim() == scores.dim() and all(
        actual.shape[number] <= scores.shape[number] for number in range(scores.dim())
    )
    valid = fits and all(
        bool(((picks >= 0) & (picks < size)).all()) for picks in (actual, expected)
    )
    if not valid:
        return None
    distinct = True
    if operation.name in step_names("orders"):
        ordered = actual.sort(dim=dim).values
        distinct = not bool((ordered.diff(dim=dim) == 0).any())
    picked = [scores.gather(dim, picks).reshape(case.shape) for picks in (actual, expected)]
    return picked[0], picked[1], distinct
