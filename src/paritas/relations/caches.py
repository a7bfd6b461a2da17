"""Relations of caches: what is done to a cache between two calls, against one plain call."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from paritas.core import transformers_library
from paritas.core.errors import in_one_line
from paritas.core.execution.token_models import (
    KEYS_AND_VALUES,
    TokenModel,
    spans,
    static_cache,
)
from paritas.core.execution.ways import (
    DoesNotApply,
    NotPromised,
    computing,
    computing_nothing,
)
from paritas.core.torch_private.dynamo import original_of
from paritas.relations.relation import (
    Case,
    CheckedModel,
    Relation,
    RelationFamily,
    make_relations,
)
from paritas.relations.serving import in_chunks, plain_case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.execution.subjects import Inputs
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
        output = tokens.call(
            model,
            inputs,
            others,
            use_cache=True,
            **{tokens.cache: cache},
            **tokens.places_in_cache(start, start + GUESSED, cache=cache),
        )
    output_cache = tokens.cache_of(output)
    return cache if output_cache is None else output_cache


def _finish(
    tokens: TokenModel, model: Any, inputs: Inputs, values: list[Tensor], cache: Any, start: int
) -> dict[str, Tensor]:
    """Run the rest of the sequence, first a token, then the others at once."""
    for first, last in spans([1, tokens.size[1]], tokens.size[1] - start):
        value, cache = tokens.continue_with(model, inputs, (start + first, start + last), cache)
        values.append(value)
        if _is_recording(cache):  # it waits for this after each call
            cache.crop(0)
    return {tokens.value: torch.cat(values, dim=1)}


def _is_recording(cache: Any) -> bool:
    layers = getattr(cache, "layers", None)
    return isinstance(layers, list) and any(
        getattr(layer, "record_past", False) for layer in layers
    )


def _halves(tokens: TokenModel) -> int:
    tokens.require_cache()
    half = tokens.size[1] // 2
    if half + GUESSED > tokens.size[1]:
        raise DoesNotApply(f"{tokens.size[1]} tokens are too few: pass at least {2 * GUESSED}")
    return half


# --- Taking tokens back, and using a prefix again -------------------------------------------------


def _record(cache: Any) -> None:
    """Ask a cache that drops what it no longer needs to keep it until it is cropped."""
    ask = getattr(cache, "activate_past_recording", None)
    if callable(ask):
        ask()


def _crop_cache(tokens: TokenModel, half: int) -> Way:
    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        value, cache = tokens.continue_with(model, inputs, (0, half), None)
        _record(cache)
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
    if getattr(cache, "is_croppable", True) is False:
        raise NotPromised("its cache says that tokens cannot be taken back (is_croppable)")
    _record(cache)
    with torch.no_grad():  # what it raises is a crash, not a refusal to take tokens back
        cache = _run_others(tokens, tokens.model, tokens.inputs, half, cache)
    try:
        cache.crop(-GUESSED)
    except Exception as error:
        reason = in_one_line(error, _LONGEST_REASON)
        raise NotPromised(f"its cache cannot be cropped: {reason}") from error
    if getattr(original_of(tokens.model), "_is_stateful", False):
        raise NotPromised("its class says that its state cannot be taken back (_is_stateful)")
    yield plain_case(tokens, _crop_cache(tokens, half))


def _prefix_reused(tokens: TokenModel, half: int) -> Way:
    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        value, cache = tokens.continue_with(model, inputs, (0, half), None)
        cache_copy = copy.deepcopy(cache)
        _run_others(tokens, model, inputs, half, cache)
        return _finish(tokens, model, inputs, [value], cache_copy, half)

    return way


def _prefix_cases(checked: CheckedModel) -> Iterator[Case]:
    tokens = checked.tokens
    half = _halves(tokens)
    yield plain_case(tokens, _prefix_reused(tokens, half))


# --- Other rows of the batch ----------------------------------------------------------------------


def _reorder_rows(
    tokens: TokenModel, half: int, make_cache: Callable[[], Any] = lambda: None
) -> Way:
    """Swap the rows of the cache, as beam search does, and go on with the swapped rows.

    Token by token, as beam search does too: tokens at once are another relation.
    """

    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        value, cache = tokens.continue_with(model, inputs, (0, half), make_cache())
        ids, token_values = tokens.ids(inputs), [value]
        order = torch.arange(tokens.size[0], device=ids.device).flip(0)
        cache = _reorder(original_of(model), cache, order)
        for position in range(half, ids.shape[1]):
            with computing(rows=order, tokens=slice(position, position + 1)):
                output = tokens.call(
                    model,
                    inputs,
                    ids[order, position : position + 1],
                    rows=order,
                    use_cache=True,
                    **{tokens.cache: cache},
                    **tokens.places_in_cache(position, position + 1, cache=cache),
                )
            token_values.append(tokens.value_of(output)[order])
            output_cache = tokens.cache_of(output)
            cache = cache if output_cache is None else output_cache
        return {tokens.value: torch.cat(token_values, dim=1)}

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
    yield plain_case(tokens, _reorder_rows(tokens, half))


# --- Other kinds of caches ------------------------------------------------------------------------


def _in_static_cache(tokens: TokenModel, sizes: list[int], room: int, **more: Any) -> Way:
    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        preallocated = static_cache(tokens, model, tokens.size[1] + room, **more)
        return dict(in_chunks(tokens, sizes, lambda: preallocated)(model, inputs))

    return way


def static_caches_refused(tokens: TokenModel) -> DoesNotApply | NotPromised | None:
    """Why a static cache is not promised, or None."""
    model = original_of(tokens.model)
    if not transformers_library.is_pretrained_model(model) or tokens.cache != KEYS_AND_VALUES:
        return DoesNotApply("not a model of transformers with keys and values in its cache")
    if tokens.has_encoder:
        return DoesNotApply("a static cache for an encoder and a decoder has no documented form")
    if flag := transformers_library.refuses_static_cache(model):
        return NotPromised(f"its class does not support static caches ({flag})")
    return None


# How many of the last tokens a quantised cache keeps as they are.
_UNQUANTISED = 3


def _no_offloading(tokens: TokenModel) -> str:
    """Why layers cannot wait in the memory of the CPU; empty if they can."""
    if not transformers_library.has_offloading():
        return "an offloaded cache needs transformers 4.56 or newer"
    if tokens.ids(tokens.inputs).device.type == "cpu":
        return "an offloaded cache needs a model on an accelerator"
    return ""


def _quantised_cases(tokens: TokenModel, half: int) -> Iterator[Case]:
    own_cache = tokens.first_cache()
    make = transformers_library.lossless_quantised_cache(own_cache, _UNQUANTISED)
    if make is None:
        return
    yield plain_case(tokens, in_chunks(tokens, [half, 1], make), "quantised, nothing lost")
    if tokens.size[0] > 1:
        swapped = _reorder_rows(tokens, half, make)
        yield plain_case(tokens, swapped, "quantised, nothing lost, reordered")


def _offloaded_cases(tokens: TokenModel, half: int, *, static: bool) -> Iterator[Case]:
    """Layers that wait in the memory of the CPU until they are needed."""

    def make() -> Any:
        return transformers_library.offloaded_cache(tokens.config)

    yield plain_case(tokens, in_chunks(tokens, [half, 1], make), "offloaded")
    if tokens.size[0] > 1:
        yield plain_case(tokens, _reorder_rows(tokens, half, make), "offloaded, reordered")
    if static:
        way = _in_static_cache(tokens, [half, 1], 2, offloading=True)
        yield plain_case(tokens, way, "static, offloaded")


def _kind_cases(checked: CheckedModel) -> Iterator[Case]:
    tokens = checked.tokens
    tokens.require_cache()
    is_pretrained = transformers_library.is_pretrained_model(original_of(tokens.model))
    if not is_pretrained or tokens.cache != KEYS_AND_VALUES:
        raise DoesNotApply("not a model of transformers with keys and values in its cache")
    half = tokens.size[1] // 2
    refused = static_caches_refused(tokens)
    if refused is None:
        yield plain_case(tokens, _in_static_cache(tokens, [half, 1], 0), "static, exactly as long")
        yield plain_case(tokens, _in_static_cache(tokens, [half, 3], 5), "static, longer")
    no_offloading = _no_offloading(tokens)
    if not tokens.has_encoder:
        yield from _quantised_cases(tokens, half)
        if not no_offloading:
            yield from _offloaded_cases(tokens, half, static=refused is None)
    if refused is not None:
        raise refused
    if no_offloading:
        raise DoesNotApply(no_offloading)


CACHES: tuple[Relation, ...] = make_relations(
    RelationFamily.SERVING,
    ("cache-crop", "tokens taken back from a cache = tokens never run", _crop_cases),
    ("cache-reorder", "reordered rows of a cache = a reordered batch", _reorder_cases),
    ("prefix-reuse", "a copied cache of a prefix = the prefix run again", _prefix_cases),
    ("cache-kinds", "other kinds of caches = the model's own cache", _kind_cases),
)
