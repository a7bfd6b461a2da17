"""What operators round: a result once, something inside, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paritas.core.operators.catalogue import operators_of

if TYPE_CHECKING:
    from paritas.core.torch_private.operators import Traits

# Operators that choose, move, count or draw floating values, and never round them.
_EXACT = operators_of(
    "exact", "comparisons", "whole numbers", "choices", "limits", "fills", "new tensors",
    "values passed on", "maximum", "maxima of windows", "joins", "triangles", "writes at indices",
    "random fills", "random numbers", "random integers", "random choices",
)  # fmt: skip
# Operators that only round their result, and correctly. For others the roundings inside are
# unknown; perturbed inputs represent them.
_ROUNDED_ONCE = operators_of(
    "rounded once", "arithmetic", "sum", "mean", "running sum", "indexed sum", "products",
    "products added to a tensor", "products in groups", "convolution", "convolution backward",
    "embedding backward",
)  # fmt: skip

# Indexed reductions with an argument that decides whether they choose (exact) or sum.
_REDUCES_AS_TOLD = frozenset(
    {"scatter_reduce", "index_reduce", "segment_reduce", "_segment_reduce_backward"}
)
_CHOOSING = frozenset({"amax", "amin", "max", "min"})
# Operators that only move values, unless an argument makes them sum duplicates.
_ADDS_IF_TOLD = frozenset({"index_put", "_unsafe_index_put", "scatter"})
_ADDING = frozenset({"add", "multiply"})


def rounds(kind: Traits) -> bool:
    """Whether the floating results of an operator are rounded."""
    return not (kind.view or kind.name in _EXACT)


def rounds_once(kind: Traits) -> bool:
    """Whether that is the only rounding inside."""
    return kind.name in _ROUNDED_ONCE


def call_rounds(kind: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call rounds: for some operators an argument decides that."""
    if kind.name in _REDUCES_AS_TOLD:
        # Code that later finds the maximum by equality would miss a perturbed one.
        return not _is_any_argument_in(_CHOOSING, args, kwargs)
    if kind.name in _ADDS_IF_TOLD:
        accumulates = len(args) > 3 and args[3] is True  # noqa: PLR2004
        return (
            accumulates
            or kwargs.get("accumulate") is True
            or _is_any_argument_in(_ADDING, args, kwargs)
        )
    return rounds(kind)


def _is_any_argument_in(
    words: frozenset[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    return any(isinstance(value, str) and value in words for value in (*args, *kwargs.values()))
