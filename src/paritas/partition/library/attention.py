"""Attention: stacks of heads by themselves, queries by themselves unless their places count."""

from __future__ import annotations

from paritas.partition.library.claims import Bound, Claim, broadcast, letters, named
from paritas.partition.library.registry import functional, rule


@rule(
    "query key value attn_mask dropout_p is_causal scale enable_gqa",
    functional("scaled_dot_product_attention"),
    "aten.scaled_dot_product_attention",
)
def _attention(bound: Bound) -> Claim | None:
    """Keys are weighed against each other and stay whole.

    A causal mask counts queries from the first, so they stay together under one.
    """
    query, key, value = (bound.shape(name) for name in ("query", "key", "value"))
    if query is None or key is None or value is None or bound.get("dropout_p", 0.0) != 0:
        return None
    stacks = _stacks(query[:-2], key[:-2], value[:-2], shared=bool(bound.get("enable_gqa")))
    if stacks is None or min(map(len, (query, key, value))) < 2:  # noqa: PLR2004 - a matrix
        return None
    left, middle, right, stack = stacks
    rows = "1" if query[-2] == 1 else "q^" if bound.get("is_causal") else "q"
    keys = "1" if key[-2] == 1 else "s^"
    inner = "1" if query[-1] == 1 else "e^"
    width = "1" if value[-1] == 1 else "v"
    inputs = {
        "query": f"{left} {rows} {inner}".strip(),
        "key": f"{middle} {keys} {inner}".strip(),
        "value": f"{right} {keys} {width}".strip(),
    }
    mask = bound.shape("attn_mask")
    if mask is not None:
        if len(mask) > len(stack) + 2:
            return None
        inputs["attn_mask"] = named(mask, [*stack, rows, keys])
    return Claim(inputs, (" ".join([*stack, rows, width]),))


def _stacks(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *, shared: bool
) -> tuple[str, str, str, list[str]] | None:
    """The dimensions before the matrices: of queries, keys, values and of the result.

    Args:
        shared: neighbouring heads of queries share a head of keys, with which they go.
    """
    if not shared:
        found = broadcast((query, key, value))
        return None if found is None else (*found[0], found[1])  # type: ignore[return-value]
    if not query or not key or key != value or query[:-1] != key[:-1] or query[-1] % key[-1]:
        return None
    front = named(query[:-1], letters(len(query) - 1)).split()
    share = query[-1] // key[-1]
    heads = "h" if share == 1 or key[-1] == 1 else f"(h {share})"
    inside = " ".join([*front, "1" if key[-1] == 1 else "h"])
    outside = [*front, "1" if query[-1] == 1 else heads]
    return " ".join(outside), inside, inside, outside
