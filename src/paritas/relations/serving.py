"""Relations of serving: the ways in which a server runs a model, against one plain call."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.execution.token_models import (
    KEYS_AND_VALUES,
    config_parts,
    has_cache,
    pad_token,
    spans,
)
from paritas.core.execution.ways import (
    DoesNotApply,
    NotPromised,
    computing,
    computing_nothing,
)
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.contents import leaves
from paritas.relations.relation import (
    Case,
    CheckedModel,
    Relation,
    RelationFamily,
    batch_of,
    make_relations,
    rows_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from paritas.core.execution.subjects import Inputs
    from paritas.core.execution.token_models import TokenModel
    from paritas.relations.relation import Way

PADDING = 3


def plain_case(tokens: TokenModel, actual: Way, label: str = "") -> Case:
    """A case against one plain call."""
    return Case(tokens.whole, actual, label, tokens.inputs, tokens.size)


# --- Decoding with a cache ------------------------------------------------------------------------


def in_chunks(
    tokens: TokenModel, sizes: list[int], make_cache: Callable[[], Any] = lambda: None
) -> Way:
    """Run the sequence in chunks, each after the cache of those before; the first is made."""

    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        cache, values = make_cache(), []
        for span in spans(sizes, tokens.size[1]):
            value, cache = tokens.continue_with(model, inputs, span, cache)
            values.append(value)
        return {tokens.value: torch.cat(values, dim=1)}

    return way


def _cached_decoding(checked: CheckedModel) -> Iterator[Case]:
    tokens = checked.tokens
    tokens.require_cache()
    yield plain_case(tokens, in_chunks(tokens, [1]), "token by token")
    half = tokens.size[1] // 2
    yield plain_case(tokens, in_chunks(tokens, [half, 1]), "after a prompt")


def _chunked_prefill(checked: CheckedModel) -> Iterator[Case]:
    tokens = checked.tokens
    tokens.require_cache()
    total = tokens.size[1]
    if total < 4:  # noqa: PLR2004
        raise DoesNotApply(f"{total} tokens cannot be cut into different chunks: pass at least 4")
    plans = {
        "chunks of 3": [3],
        "chunks of 7": [7],
        "uneven chunks": [2, 5, 1, 4],
        "a last chunk of 1": [total - 1, 1],
    }
    for label, sizes in plans.items():
        if len(spans(sizes, total)) > 1:
            yield plain_case(tokens, in_chunks(tokens, sizes), label)


# --- Padding --------------------------------------------------------------------------------------


def pad_rows(
    tokens: TokenModel, left: int, right: int, *, with_words: bool = False, alone: bool = False
) -> Way:
    """Add padding to all rows, masked, with the positions that the tokens have without it.

    Args:
        tokens: the model.
        left: how much before the tokens.
        right: how much behind them.
        with_words: pad with usual tokens. The embedding of the token for padding is often zero,
            which hides where padding is not masked.
        alone: run each row alone: some models ignore the mask of a single row.
    """
    columns = slice(left, left + tokens.size[1])

    def some(model: Any, inputs: Inputs, rows: slice) -> Tensor:
        ids = tokens.ids(inputs)[rows]
        count, total = ids.shape
        pads = ids.new_full((count, left + right), pad_token(tokens.config))
        if with_words:
            pads = ids.flip(1)[:, torch.arange(left + right, device=ids.device) % total]
        longer = torch.cat([pads[:, :left], ids, pads[:, left:]], dim=1)
        places = torch.arange(-left, total + right, device=ids.device).clamp(min=0)
        mask = torch.zeros_like(longer)
        mask[:, columns] = 1
        # Padding on the right moves no token.
        moved = tokens.positions_of(places[None], count) if left else {}
        with computing(rows=rows, own=columns):
            output = tokens.call(model, inputs, longer, rows=rows, **{tokens.mask: mask}, **moved)
        value = tokens.value_of(output)
        return value if tokens.is_pooled else value[:, columns]

    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        batch = tokens.size[0]
        groups = [slice(row, row + 1) for row in range(batch)] if alone else [slice(None)]
        return {tokens.value: torch.cat([some(model, inputs, rows) for rows in groups])}

    return way


def _padded_and_continued(tokens: TokenModel, sizes: list[int]) -> Way:
    """Run a padded prompt in chunks, each after the cache of those before.

    The first chunk has `sizes[0]` columns, padding included, and so on.
    """

    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        ids = tokens.ids(inputs)
        rows, total = ids.shape
        pad = ids.new_full((rows, PADDING), pad_token(tokens.config))
        longer = torch.cat([pad, ids], dim=1)
        mask = torch.ones_like(longer)
        mask[:, :PADDING] = 0
        places = torch.arange(-PADDING, total, device=ids.device).clamp(min=0)[None]
        cache, values = tokens.new_cache(), []
        for first, last in spans(sizes, PADDING + total):
            start, stop = max(first - PADDING, 0), max(last - PADDING, 0)
            columns = slice(max(PADDING - first, 0), None)
            call_options = {} if cache is None else {tokens.cache: cache}
            # A state has no places to mask: its mask is about the tokens of the call alone.
            if tokens.cache == KEYS_AND_VALUES:
                call_options[tokens.mask] = mask[:, :last]
            elif last - first > 1 or first == 0:
                call_options[tokens.mask] = mask[:, first:last]
            call_options |= tokens.places_in_cache(first, last, cache=cache)
            with computing(tokens=slice(start, stop), own=columns):
                output = tokens.call(
                    model,
                    inputs,
                    longer[:, first:last],
                    use_cache=True,
                    **call_options,
                    **tokens.positions_of(places[:, first:last], rows),
                )
            values.append(tokens.value_of(output)[:, columns])
            new_cache = tokens.cache_of(output)
            cache = cache if new_cache is None else new_cache
        return {tokens.value: torch.cat(values, dim=1)}

    return way


def _of_unequal_lengths(tokens: TokenModel) -> Way:
    """Rows of different lengths in one batch, padded on the left as for batched generation."""

    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        ids = tokens.ids(inputs)
        rows, total = ids.shape
        lengths = [max(1, total - PADDING * (row % 2) - row // 2) for row in range(rows)]
        longer = torch.full_like(ids, pad_token(tokens.config))
        mask, places = torch.zeros_like(ids), torch.zeros_like(ids)
        for row, length in enumerate(lengths):
            longer[row, total - length :] = ids[row, :length]
            mask[row, total - length :] = 1
            places[row, total - length :] = torch.arange(length, device=ids.device)
        moved = {tokens.positions: places} if tokens.positions else {}
        shortest = min(lengths)
        starts = torch.tensor([total - length for length in lengths])
        columns = starts[:, None] + torch.arange(shortest)
        with computing(tokens=slice(0, shortest), own=columns):
            output = tokens.call(model, inputs, longer, **{tokens.mask: mask}, **moved)
        value = tokens.value_of(output)
        # A shorter row has no values for its last tokens.
        with computing_nothing():
            padded_values = tokens.whole(model, inputs)[tokens.value].clone()
        for row, length in enumerate(lengths):
            padded_values[row, :length] = value[row, total - length :]
        return {tokens.value: padded_values}

    return way


def _padded_encoder(tokens: TokenModel) -> Way:
    """Add masked padding after the encoder's tokens."""

    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        ids = inputs.kwargs["input_ids"]
        pad = ids.new_full((ids.shape[0], PADDING), pad_token(tokens.config))
        mask = torch.cat([torch.ones_like(ids), torch.zeros_like(pad)], dim=1)
        longer = {**inputs.kwargs, "input_ids": torch.cat([ids, pad], dim=1)}
        longer.pop("attention_mask", None)
        changed = type(inputs)(kwargs=longer)
        more = {"attention_mask": mask}
        output = tokens.call(model, changed, tokens.ids(inputs), **more)
        return {tokens.value: tokens.value_of(output)}

    return way


def _pooled_padding(tokens: TokenModel) -> Iterator[Case]:
    """A value for each row must not depend on its padding either."""
    if not tokens.mask or tokens.has_encoder:
        raise DoesNotApply("it takes no attention_mask, or does not use it")
    if not any(
        isinstance(getattr(config, "pad_token_id", None), int) for config in tokens.configs()
    ):
        raise NotPromised("its configuration has no pad_token_id")
    ways = {"right": pad_rows(tokens, 0, PADDING)}
    if left_padding_is_promised(tokens):
        ways["left"] = pad_rows(tokens, PADDING, 0)
        ways["both sides"] = pad_rows(tokens, PADDING, PADDING)
    for label, way in ways.items():
        yield Case(tokens.whole, way, label, tokens.inputs)


def _padding(checked: CheckedModel) -> Iterator[Case]:
    tokens = checked.any_tokens
    if tokens.is_pooled:
        yield from _pooled_padding(tokens)
        return
    if not tokens.mask and not pads_encoder(tokens):
        raise DoesNotApply("it takes no attention_mask, or does not use it")
    if tokens.mask:
        yield plain_case(tokens, pad_rows(tokens, 0, PADDING), "right")
        pads_left = left_padding_is_promised(tokens)
        remaining = PADDING if pads_left else 0
        yield plain_case(
            tokens, pad_rows(tokens, remaining, PADDING, with_words=True), "masked words"
        )
        if tokens.size[0] > 1 and not _rows_belong_together(tokens):
            alone = pad_rows(tokens, remaining, PADDING, with_words=True, alone=True)
            yield plain_case(tokens, alone, "masked words, each row alone")
        if pads_left:
            yield plain_case(tokens, pad_rows(tokens, PADDING, 0), "left")
            if has_cache(tokens):
                prompt = PADDING + tokens.size[1] // 2
                decoded = _padded_and_continued(tokens, [prompt, 1])
                yield plain_case(tokens, decoded, "left, then decoded")
                chunks = _padded_and_continued(tokens, [PADDING - 1, 4])
                yield plain_case(tokens, chunks, "left, in chunks")
                unequal = _of_unequal_lengths(tokens)
                yield plain_case(tokens, unequal, "left, rows of unequal length")
    if pads_encoder(tokens):
        yield plain_case(tokens, _padded_encoder(tokens), "of the encoder, right")


def pads_encoder(tokens: TokenModel) -> bool:
    """Whether the encoder has token ids that can be padded."""
    encoder = tokens.context.get("input_ids")
    return (
        tokens.has_encoder
        and isinstance(encoder, torch.Tensor)
        and encoder.dim() == 2  # noqa: PLR2004
        and "attention_mask" in tokens.takes
        and "attention_mask" not in tokens.context
        # Sound, images or embeddings would be encoded instead, and the mask would be theirs.
        and not any(map(is_inexact, tokens.context.values()))
    )


def left_padding_is_promised(tokens: TokenModel) -> bool:
    """Whether positions can be given, or there are none: padding on the left moves tokens."""
    if tokens.positions:
        return tokens.counts_from_zero()
    parts = list(config_parts(tokens.config))
    settings = {name for part in parts for name, value in vars(part).items() if value is not None}
    return bool(parts) and not any("position" in name or "rope" in name for name in settings)


# --- Rows -----------------------------------------------------------------------------------------


def _rows_alone(tokens: TokenModel) -> Way:
    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        values = []
        for row in range(tokens.size[0]):
            rows = slice(row, row + 1)
            with computing(rows=rows):
                output = tokens.call(model, inputs, tokens.ids(inputs)[rows], rows=rows)
            values.append(tokens.value_of(output))
        return {tokens.value: torch.cat(values)}

    return way


def _rows_in_order(tokens: TokenModel, order: Callable[[int], list[int]]) -> Way:
    """Run the rows in another order, some of them perhaps several times."""

    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        rows = torch.tensor(order(tokens.size[0]))
        with computing(rows=rows):
            output = tokens.call(model, inputs, tokens.ids(inputs)[rows], rows=rows)
        value = tokens.value_of(output)
        back = value.new_empty((tokens.size[0], *value.shape[1:]))
        back[rows] = value
        return {tokens.value: back}

    return way


def _with_other_rows(tokens: TokenModel) -> Way:
    """Run each row beside other rows than its own neighbours."""

    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        ids = tokens.ids(inputs)
        values = []
        for row in range(tokens.size[0]):
            others = ids.roll(1, dims=1)
            others[row] = ids[row]
            with computing_nothing():  # the other rows are not those of the whole
                value = tokens.value_of(tokens.call(model, inputs, others))
            values.append(value[row : row + 1])
        return {tokens.value: torch.cat(values)}

    return way


def _reverse_rows(rows: int) -> list[int]:
    return list(range(rows))[::-1]


def _any_row_cases(checked: CheckedModel) -> Iterator[Case]:
    """The same for a model on anything else than tokens: all outputs that have rows."""
    total = batch_of(checked.inputs)
    if total == 1:
        raise DoesNotApply("the inputs have one row: pass at least 2")

    def outputs(model: Any, inputs: Inputs, rows: int) -> dict[str, Tensor]:
        output_leaves = {
            path or "output": leaf
            for path, leaf in leaves(model(*inputs.args, **inputs.kwargs))
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim()
        }
        return {path: leaf for path, leaf in output_leaves.items() if leaf.shape[0] == rows}

    def whole(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        return outputs(model, inputs, total)

    def alone(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        rows = [outputs(model, rows_of(inputs, slice(row, row + 1)), 1) for row in range(total)]
        shapes = {path: leaf.shape[1:] for path, leaf in whole(model, inputs).items()}
        return {
            path: torch.cat([row[path] for row in rows])
            for path, shape in shapes.items()
            if all(path in row and row[path].shape[1:] == shape for row in rows)
        }

    def backwards(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        order = torch.arange(total).flip(0)
        reordered = outputs(model, rows_of(inputs, order), total)
        return {path: leaf[order] for path, leaf in reordered.items()}

    yield Case(whole, alone, "each row alone")
    yield Case(whole, backwards, "rows in reverse order")


def _row_cases(checked: CheckedModel) -> Iterator[Case]:
    try:
        tokens = checked.tokens
    except DoesNotApply:
        if _has_tokens(checked):
            raise
        yield from _any_row_cases(checked)
        return
    if tokens.size[0] == 1:
        raise DoesNotApply("the inputs have one row: pass at least 2")
    if reason := _rows_belong_together(tokens):
        raise NotPromised(reason)
    yield plain_case(tokens, _rows_alone(tokens), "each row alone")
    yield plain_case(tokens, _rows_in_order(tokens, _reverse_rows), "rows in reverse order")
    yield plain_case(tokens, _with_other_rows(tokens), "beside other rows")


def _deterministic(inner: Way) -> Way:
    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            return dict(inner(model, inputs))
        finally:
            torch.use_deterministic_algorithms(before)

    return way


def _invariant_cases(checked: CheckedModel) -> Iterator[Case]:
    """The cases of independent rows, under torch's deterministic settings."""
    expected: dict[Way, Way] = {}
    for case in _row_cases(checked):
        plain = expected.setdefault(case.expected, _deterministic(case.expected))
        yield dataclasses.replace(case, expected=plain, actual=_deterministic(case.actual))


def _has_tokens(checked: CheckedModel) -> bool:
    """Whether there are token ids among the inputs, which rows of other inputs may belong to."""
    input_values = [*checked.inputs.args, *checked.inputs.kwargs.values()]
    return any(
        isinstance(leaf, torch.Tensor) and leaf.dtype is torch.int64 for leaf in input_values
    )


def _rows_belong_together(tokens: TokenModel) -> str:
    """Why a row's result may depend on the other rows; empty if it may not."""
    for part in config_parts(tokens.config):
        books = getattr(part, "num_codebooks", None)
        if isinstance(books, int) and books > 1:
            return f"rows are the codebooks of one sequence (num_codebooks={books})"
        for name in ("expert_capacity", "moe_capacity", "capacity_factor"):
            if getattr(part, name, None) is not None:
                return f"rows compete for the experts' capacity ({name})"
    return ""


# --- A part of the result -------------------------------------------------------------------------


def _keep_last_positions(tokens: TokenModel) -> Way:
    """The last position alone, then the last few, then all."""

    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        ids, total = tokens.ids(inputs), tokens.size[1]
        counts = [total, min(3, total), 1]
        values: list[Tensor] = []
        for count, fewer in zip(counts, [*counts[1:], 0], strict=True):
            value = tokens.value_of(tokens.call(model, inputs, ids, **{tokens.keep: count}))
            if value.shape[1] != count:
                raise AssertionError(
                    f"{tokens.keep}={count} gives {value.shape[1]} positions of {total}"
                )
            values.append(value[:, : count - fewer])
        return {tokens.value: torch.cat(values, dim=1)}

    return way


def _logits_to_keep(checked: CheckedModel) -> Iterator[Case]:
    tokens = checked.tokens
    if not tokens.keep:
        raise DoesNotApply("no logits_to_keep in its signature")
    yield plain_case(tokens, _keep_last_positions(tokens))


# --- Later tokens ---------------------------------------------------------------------------------


def _with_other_ends(tokens: TokenModel) -> Way:
    """Each part of the sequence, computed with other tokens behind it."""

    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        ids, total = tokens.ids(inputs), tokens.size[1]
        cuts = sorted({1, total // 2, total - 1, total})
        values, start = [], 0
        for cut in cuts:
            changed = ids.clone()
            changed[:, cut:] = ids.flip(1).roll(1, dims=0)[:, cut:]
            with computing(tokens=slice(start, cut), own=slice(start, cut)):
                output = tokens.call(model, inputs, changed)
            values.append(tokens.value_of(output)[:, start:cut])
            start = cut
        return {tokens.value: torch.cat(values, dim=1)}

    return way


def _causality(checked: CheckedModel) -> Iterator[Case]:
    tokens = checked.tokens
    if not tokens.cache:
        raise NotPromised("no cache in its signature, so it need not be causal")
    tokens.require_causal()
    yield plain_case(tokens, _with_other_ends(tokens))


# --- Earlier calls --------------------------------------------------------------------------------


def _after(earlier: Callable[[Any, Inputs], Any], now: Way) -> Way:
    """A way, after another call."""

    def way(model: Any, inputs: Inputs) -> Mapping[str, Any]:
        with computing_nothing():
            earlier(model, inputs)
        return now(model, inputs)

    return way


def _history(checked: CheckedModel) -> Iterator[Case]:
    tokens = checked.tokens

    def longer(model: Any, inputs: Inputs) -> Any:
        ids = tokens.ids(inputs)
        return tokens.call(model, inputs, torch.cat([ids, ids.flip(1)], dim=1))

    def shorter(model: Any, inputs: Inputs) -> Any:
        return tokens.call(model, inputs, tokens.ids(inputs)[:, :2])

    cases: list[tuple[str, Callable[[Any, Inputs], Any], Way]] = [
        ("after a longer call", longer, tokens.whole),
        ("after a shorter call", shorter, tokens.whole),
    ]
    if has_cache(tokens):
        decoding = in_chunks(tokens, [tokens.size[1] // 2, 1])
        cases.append(("after decoding", decoding, tokens.whole))
        cases.append(("decoding after decoding", decoding, decoding))
    for label, earlier, now in cases:
        try:
            with torch.no_grad():
                earlier(tokens.model, tokens.inputs)
        except Exception:  # noqa: BLE001, S112  (it has a longest sequence; others report a cache)
            continue
        yield Case(now, _after(earlier, now), label, tokens.inputs, tokens.size)


SERVING: tuple[Relation, ...] = (
    *make_relations(
        RelationFamily.SERVING,
        ("cached-decoding", "decoding with a cache = one call without a cache", _cached_decoding),
        ("chunked-prefill", "a prompt run in chunks = one call without a cache", _chunked_prefill),
        ("padding", "padded and masked rows = the rows without padding", _padding),
        ("row-independence", "a row's result does not depend on the other rows", _row_cases),
        ("logits-to-keep", "the last positions alone = those of all", _logits_to_keep),
        ("causality", "later tokens do not change the values of earlier ones", _causality),
        ("call-history", "a call after other calls = the first call", _history),
    ),
    *make_relations(
        RelationFamily.SERVING,
        (
            "batch-invariant",
            "equal bits, whatever other rows are in the batch (deterministic settings)",
            _invariant_cases,
        ),
        on_request=True,
        bitwise=True,
    ),
)
