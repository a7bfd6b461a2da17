"""Relations of caches: what is done to a cache between two calls, against one plain call."""

from __future__ import annotations

import copy
import importlib
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.dynamo import original_of
from paritas.errors import in_one_line
from paritas.relations.relation import (
    Case,
    CheckedModel,
    DoesNotApply,
    NotPromised,
    Relation,
    RelationFamily,
    computing,
    computing_nothing,
)
from paritas.relations.serving import in_chunks, plain_case
from paritas.relations.token_models import KEYS_AND_VALUES, TokenModel, spans

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.execution.subjects import Inputs
    from paritas.relations.relation import Way

# Tokens that are run and then taken back.
GUESSED = 3
_LONGEST_REASON = 160


def _other_tokens(ids: Tensor, start: int, stop: int) -> Tensor:
    """Tokens of the same vocabulary in other places."""
    return ids.flip(1).roll(1, dims=0)[:, start:stop]


def _run_others(tokens: TokenModel, model: Any, inputs: Inputs, start: int, cache: Any) -> Any:
    """Run tokens after a cache that are not those of the sequence; the cache afterwards."""
    others = _other_tokens(tokens.ids(inputs), start, start + GUESSED)
    with computing_nothing():
        output = tokens.call(model, inputs, others, use_cache=True, **{tokens.cache: cache})
    found = tokens.cache_of(output)
    return cache if found is None else found


def _finish(
    tokens: TokenModel, model: Any, inputs: Inputs, found: list[Tensor], cache: Any, start: int
) -> dict[str, Tensor]:
    """Run the rest of the sequence, first a token, then the others at once."""
    for first, last in spans([1, tokens.size[1]], tokens.size[1] - start):
        value, cache = tokens.continue_with(model, inputs, (start + first, start + last), cache)
        found.append(value)
    return {tokens.value: torch.cat(found, dim=1)}


def _halves(tokens: TokenModel) -> int:
    tokens.require_cache()
    half = tokens.size[1] // 2
    if half + GUESSED > tokens.size[1]:
        raise DoesNotApply(f"{tokens.size[1]} tokens are too few: pass at least {2 * GUESSED}")
    return half


# --- Taking tokens back, and using a prefix again -------------------------------------------------


def _cropped(tokens: TokenModel, half: int) -> Way:
    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        value, cache = tokens.continue_with(model, inputs, (0, half), None)
        cache = _run_others(tokens, model, inputs, half, cache)
        cache.crop(-GUESSED)
        return _finish(tokens, model, inputs, [value], cache, half)

    return way


def _crop_cases(checked: CheckedModel) -> Iterator[Case]:
    tokens = checked.tokens
    half = _halves(tokens)
    cache = tokens.first_cache()
    if not hasattr(cache, "crop"):
        raise DoesNotApply("its cache has no crop()")
    try:
        with torch.no_grad():
            cache = _run_others(tokens, tokens.model, tokens.inputs, half, cache)
        cache.crop(-GUESSED)
    except Exception as error:
        reason = in_one_line(error, _LONGEST_REASON)
        raise NotPromised(f"its cache cannot be cropped: {reason}") from error
    if getattr(original_of(tokens.model), "_is_stateful", False):
        raise NotPromised("its class says that its state cannot be taken back (_is_stateful)")
    yield plain_case(tokens, _cropped(tokens, half))


def _prefix_reused(tokens: TokenModel, half: int) -> Way:
    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        value, cache = tokens.continue_with(model, inputs, (0, half), None)
        kept = copy.deepcopy(cache)
        _run_others(tokens, model, inputs, half, cache)
        return _finish(tokens, model, inputs, [value], kept, half)

    return way


def _prefix_cases(checked: CheckedModel) -> Iterator[Case]:
    tokens = checked.tokens
    half = _halves(tokens)
    yield plain_case(tokens, _prefix_reused(tokens, half))


# --- Other rows of the batch ----------------------------------------------------------------------


def _reordered(tokens: TokenModel, half: int) -> Way:
    """Swap the rows of the cache, as beam search does, and go on with the swapped rows."""

    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        value, cache = tokens.continue_with(model, inputs, (0, half), None)
        ids = tokens.ids(inputs)
        order = torch.arange(tokens.size[0], device=ids.device).flip(0)
        cache = _reorder(original_of(model), cache, order)
        with computing(rows=order, tokens=slice(half, None)):
            output = tokens.call(
                model,
                inputs,
                ids[order, half:],
                rows=order,
                use_cache=True,
                **{tokens.cache: cache},
            )
        rest = tokens.value_of(output)[order]
        return {tokens.value: torch.cat([value, rest], dim=1)}

    return way


def _reorder(model: Any, cache: Any, order: Tensor) -> Any:
    if hasattr(cache, "reorder_cache"):
        cache.reorder_cache(order)
        return cache
    return model._reorder_cache(cache, order)  # noqa: SLF001  (the name that generation calls)


def _reorder_cases(checked: CheckedModel) -> Iterator[Case]:
    tokens = checked.tokens
    half = _halves(tokens)
    if tokens.size[0] == 1:
        raise DoesNotApply("the inputs have one row: pass at least 2")
    cache = tokens.first_cache()
    if not hasattr(cache, "reorder_cache") and not hasattr(tokens.model, "_reorder_cache"):
        raise DoesNotApply("its cache has no reorder_cache()")
    yield plain_case(tokens, _reordered(tokens, half))


# --- Other kinds of caches ------------------------------------------------------------------------


def _in_static_cache(tokens: TokenModel, sizes: list[int], room: int) -> Way:
    def make_cache() -> Any:
        library = importlib.import_module("transformers")
        config = tokens.config.get_text_config(decoder=True)
        return library.StaticCache(config=config, max_cache_len=tokens.size[1] + room)

    return in_chunks(tokens, sizes, make_cache)


def _static_cases(checked: CheckedModel) -> Iterator[Case]:
    tokens = checked.tokens
    tokens.require_cache()
    model = original_of(tokens.model)
    if not hasattr(tokens.config, "get_text_config") or tokens.cache != KEYS_AND_VALUES:
        raise DoesNotApply("not a model of transformers with keys and values in its cache")
    if tokens.has_encoder:
        raise DoesNotApply("a static cache for an encoder and a decoder has no documented form")
    if not getattr(model, "_can_compile_fullgraph", False):
        raise NotPromised("its class does not support static caches (_can_compile_fullgraph)")
    half = tokens.size[1] // 2
    yield plain_case(tokens, _in_static_cache(tokens, [half, 1], 0), "static, exactly as long")
    yield plain_case(tokens, _in_static_cache(tokens, [half, 3], 5), "static, longer")


CACHES: tuple[Relation, ...] = tuple(
    Relation(name=name, about=about, family=RelationFamily.SERVING, cases=cases)
    for name, about, cases in (
        ("cache-crop", "tokens taken back from a cache = tokens never run", _crop_cases),
        ("cache-reorder", "reordered rows of a cache = a reordered batch", _reorder_cases),
        ("prefix-reuse", "a copied cache of a prefix = the prefix run again", _prefix_cases),
        ("cache-kinds", "a static cache = the model's own cache", _static_cases),
    )
)
