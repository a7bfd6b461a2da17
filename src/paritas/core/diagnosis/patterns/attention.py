"""Attention written out, forward and backward, with a mistake that no argument can express."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paritas.core.diagnosis.formats import format_with_digits
from paritas.core.diagnosis.patterns.arrangements import describe_places
from paritas.core.diagnosis.patterns.steps import (
    take_slices,
    with_all_altered,
    with_altered,
)
from paritas.core.diagnosis.patterns.sums import left_out, tails, words_of, zero_ends
from paritas.core.diagnosis.patterns.variations import NOT_HIDING, Variation, mask_changes
from paritas.core.results.findings import PatternKind
from paritas.core.results.wording import list_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step


def is_attention(step: Step) -> bool:
    """Whether the operator is a fused attention, or its gradient."""
    names = ("query", "key", "value")
    return all(isinstance(step.values.get(name), torch.Tensor) for name in names)


def attention_variations(step: Step) -> Iterator[Variation]:
    """The mistakes that are known of attention."""
    yield from _mask_variations(step)
    yield from _factor_variations(step)
    yield from _key_variations(step)
    yield from _feature_variations(step)
    yield from _softmax_variations(step)
    if "grad_out" in step.values:
        yield from _gradient_variations(step)


# --- The formula ----------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """Queries, keys and values of each head, the weights of the values, and the factor."""

    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor
    factor: float


def _softmax(scores: Tensor, dim: int = -1) -> Tensor:
    # A row that sees nothing gives zeros in torch's own kernels.
    return scores.softmax(dim=dim).nan_to_num(0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Form:
    """How the parts of attention are computed; each default is right, each other value a mistake.

    Attributes:
        diagonal: of the causal mask; None if there is none.
        future: the mask hides what comes before, not after.
        factor: another scale of the scores.
        window: how many keys a query sees at most.
        keys: the only keys that are seen.
        after: the mask is applied after the softmax.
        bend: done to the scores.
        normalise: in place of the softmax.
        alter: done to the mask.
        counts: how often each key counts.
        heads: operands that read other heads, and which.
        fill: what a hidden score is set to.
    """

    diagonal: int | None
    future: bool = False
    factor: float | None = None
    window: int | None = None
    keys: slice | None = None
    after: bool = False
    bend: Callable[[Tensor], Tensor] = lambda scores: scores
    normalise: Callable[[Tensor], Tensor] = _softmax
    alter: Callable[[Tensor], Tensor | None] = lambda mask: mask
    counts: Tensor | None = None
    heads: tuple[tuple[str, ...], Tensor] | None = None
    fill: float = -math.inf


def _parts_of(step: Step, form: _Form) -> _Parts:
    query, key, value = (step.values[name] for name in ("query", "key", "value"))
    groups = query.shape[-3] // key.shape[-3]
    order = torch.arange(key.shape[-3], device=key.device).repeat_interleave(groups)
    orders = {"key": order, "value": order}
    if form.heads is not None:
        names, source = form.heads[0], form.heads[1].to(key.device)
        if "query" in names:
            query = query.index_select(-3, source)
            source = order[source]
        orders |= {name: source for name in names if name != "query"}
    key, value = key.index_select(-3, orders["key"]), value.index_select(-3, orders["value"])
    factor = factor_of(step) if form.factor is None else form.factor
    scores = form.bend((query @ key.mT) * factor)
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    if form.diagonal is not None:
        visible = visible.triu(form.diagonal) if form.future else visible.tril(form.diagonal)
    if form.window is not None:
        visible = visible.triu(1 - form.window)
    if form.keys is not None:
        hidden = torch.ones(visible.shape[-1], dtype=torch.bool, device=visible.device)
        hidden[form.keys] = False
        visible = visible & ~hidden
    mask = mask_of(step)
    mask = None if mask is None or form.counts is not None else form.alter(mask)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None and form.after:
        visible = visible & (mask > -1)
    elif mask is not None:
        scores = scores + mask
    if form.counts is not None:
        scores = scores + bias_of(step) + form.counts.to(scores).log()
    elif not form.after:
        scores = scores.masked_fill(~visible, form.fill)
    weights = form.normalise(scores)
    return _Parts(query, key, value, weights * visible if form.after else weights, factor)


def _attend(step: Step, **mistakes: Any) -> Any:
    """The result of the operator with mistakes; the gradients if it computes these."""
    causal = step.values.get("is_causal") is True
    parts = _parts_of(step, _Form(**{"diagonal": 0 if causal else None, **mistakes}))
    if "grad_out" in step.values:
        return _gradients(step, parts)
    return step.with_first(parts.weights @ parts.value)


def _gradients(step: Step, parts: _Parts, *, subtracted: bool = True, factor: Any = None) -> Any:
    """The gradients of queries, keys and values, in the form that the operator gives them."""
    grad, weights = step.values["grad_out"], parts.weights
    inner = grad @ parts.value.mT
    if subtracted:
        inner = inner - (inner * weights).sum(-1, keepdim=True)
    scores = weights * inner * (parts.factor if factor is None else factor)
    gradients = (scores @ parts.key, scores.mT @ parts.query, weights.mT @ grad)
    sizes = [step.values[name].shape for name in ("query", "key", "value")]
    # Heads that share their keys add up their gradients.
    shaped = (
        gradient.unflatten(-3, (size[-3], -1)).sum(-3)
        for gradient, size in zip(gradients, sizes, strict=True)
    )
    return tuple(shaped)


def weights_and_values(step: Step) -> tuple[Tensor, Tensor]:
    """What softmax gives, and the values of each head: their product is the result."""
    causal = step.values.get("is_causal") is True
    parts = _parts_of(step, _Form(diagonal=0 if causal else None))
    return parts.weights, parts.value


def scores_of(step: Step) -> Tensor:
    """What softmax is taken of, where nothing is hidden."""
    parts = _parts_of(step, _Form(diagonal=None, alter=lambda _: None))
    return parts.query @ parts.key.mT * parts.factor + bias_of(step)


def mask_of(step: Step) -> Tensor | None:
    """The mask that the operator was given."""
    mask = step.values.get("attn_mask", step.values.get("attn_bias"))
    return mask if isinstance(mask, torch.Tensor) else None


_HIDDEN = -1e4


def bias_of(step: Step) -> Tensor | float:
    """What the mask adds to scores that it does not hide."""
    mask = mask_of(step)
    if mask is None or mask.dtype == torch.bool:
        return 0.0
    return torch.where(mask <= _HIDDEN, 0.0, mask)


def factor_of(step: Step) -> float:
    """The factor on the scores."""
    candidate = step.values.get("scale")
    size = step.values["query"].shape[-1]
    return float(candidate) if isinstance(candidate, float) else 1 / math.sqrt(size)


def attends(**mistakes: Any) -> Callable[[Step], Any]:
    """The operator with mistakes."""
    return partial(_attend, **mistakes)


# --- Masks ----------------------------------------------------------------------------------------


def _mask_variations(step: Step) -> Iterator[Variation]:
    query, key = step.values["query"], step.values["key"]
    mask = mask_of(step)
    causal = step.values.get("is_causal") is True
    late = key.shape[-2] - query.shape[-2]

    def take(text: str, **mistakes: Any) -> Variation:
        return Variation(PatternKind.MASK, text, attends(**mistakes))

    if causal:
        yield take("the causal mask is not applied", diagonal=None)
        yield take("the causal mask is off by one: each token sees the next", diagonal=1)
        yield take("the causal mask is off by one: no token sees itself", diagonal=-1)
        if late:
            yield take(
                "the causal mask is aligned to the last key, not to the first", diagonal=late
            )
    else:
        for diagonal in dict.fromkeys((0, late)):
            sentence = "a causal mask is applied although none was requested"
            yield take(sentence, diagonal=diagonal)
    for width in tails(key.shape[-2]):
        sentence = f"keys {width} or more places before the query are hidden"
        yield take(sentence, window=width)
    yield take("the causal mask hides the past instead of the future", diagonal=0, future=True)
    if mask is not None:
        yield take("the mask is not applied", alter=lambda _: None)
        if mask.dtype == torch.bool:
            sentence = "the mask is added to the scores as a number: it hides nothing"
            yield take(sentence, alter=lambda value: value.to(query.dtype))
        for sentence, alter in mask_changes(mask):
            yield take(sentence, alter=alter)
    if mask is not None or causal:
        sentence = "the mask is applied after the softmax, whose rows no longer add up to 1"
        yield take(sentence, after=True)
    if causal or (mask is not None and mask.dtype == torch.bool):
        for fill in NOT_HIDING:
            yield take(f"what the mask hides has a score of {fill:g}, not of -inf", fill=fill)


# --- Factors, keys, softmax -----------------------------------------------------------------------


def _factor_variations(step: Step) -> Iterator[Variation]:
    query, key = step.values["query"], step.values["key"]
    size, heads = query.shape[-1], query.shape[-3]
    right = factor_of(step)
    for factor, words in (
        (1.0, "left out"),
        (right * right, "applied twice"),
        (math.sqrt(right), "its own square root"),
        (1 / size, f"1 / {size} instead of 1 / sqrt({size})"),
        (math.sqrt(size), f"sqrt({size}) instead of 1 / sqrt({size})"),
        (1 / math.sqrt(key.shape[-2]), f"1 / sqrt({key.shape[-2]}), of the number of keys"),
        (1 / math.sqrt(heads * size), f"1 / sqrt({heads * size}), of all heads"),
        (right * math.log2(math.e), "multiplied by log2 e once too often"),
        (2 * right, "twice the right one"),
        (right / 2, "half the right one"),
    ):
        sentence = f"the factor on the scores is {words}"
        yield Variation(PatternKind.FACTOR, sentence, attends(factor=factor))
    for names in (("query", "key"), ("query",), ("key",)):
        what = " and ".join({"query": "queries"}.get(name, "keys") for name in names)
        for words, normalise in _NORMALISED.items():
            sentence = f"the {what} are divided by {words}"
            change = with_all_altered(names, normalise)
            yield Variation(PatternKind.OTHER_FUNCTION, sentence, change)
    sentence = "exp2 is taken instead of exp"
    yield Variation(PatternKind.OTHER_FUNCTION, sentence, attends(factor=right * math.log(2)))
    sentence = "the factor is applied to the weights after the softmax, not to the scores"
    late = lambda scores: right * _softmax(scores)  # noqa: E731
    yield Variation(PatternKind.FACTOR, sentence, attends(factor=1.0, normalise=late))


_NORMALISED: dict[str, Callable[[Tensor], Tensor]] = {
    "their lengths": lambda x: x / x.norm(dim=-1, keepdim=True),
    "the roots of their mean squares": lambda x: x / x.square().mean(-1, keepdim=True).sqrt(),
}


def _key_variations(step: Step) -> Iterator[Variation]:
    count = step.values["key"].shape[-2]
    for first, last in left_out(count):
        verb = "is" if first + last == 1 else "are"
        sentence = f"{words_of(first, last)} of the {count} keys {verb} left out"
        change = attends(keys=slice(first, count - last))
        yield Variation(PatternKind.PARTIAL_SUM, sentence, change)


def _feature_variations(step: Step) -> Iterator[Variation]:
    """Scores of fewer features; the factor stays."""
    size = step.values["query"].shape[-1]
    cuts = dict.fromkeys([*left_out(size), (0, size // 4), (0, size // 2), (size // 2, 0)])
    for first, last in cuts:
        if first + last < size:
            verb = "is" if first + last == 1 else "are"
            some = f"{words_of(first, last)} of the {size} features"
            change = with_altered("query", zero_ends(-1, first, last))
            sentence = f"{some} {verb} left out of the scores"
            yield Variation(PatternKind.PARTIAL_SUM, sentence, change)


_CAPS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 50.0)


def _softmax_variations(step: Step) -> Iterator[Variation]:
    for dim, words in ((-2, "queries"), (-3, "heads")):
        sentence = f"the softmax is taken over the {words} instead of the keys"
        across = partial(_softmax, dim=dim)
        yield Variation(PatternKind.WRONG_AXIS, sentence, attends(normalise=across))
    for cap in _CAPS:
        yield capped_scores(cap)
    sentence = "the weights are not divided by their sum"
    change = attends(normalise=_exponentiate_scores)
    yield Variation(PatternKind.MISSING_REDUCTION, sentence, change)
    for digits, dtype in ((8, "bfloat16"), (11, "float16")):
        rounded = format_with_digits(digits).round_to_nearest
        sentence = f"the scores are rounded to {dtype}"
        yield Variation(PatternKind.PRECISION, sentence, attends(bend=rounded))
        sentence = f"what multiplies the values is rounded to {dtype}"
        change = attends(normalise=partial(_rounded_softmax, digits=digits))
        yield Variation(PatternKind.PRECISION, sentence, change)
    sentence = "the sum that softmax divides by has 1 added"
    change = attends(normalise=partial(with_zeros, number=1.0))
    yield Variation(PatternKind.OTHER_FUNCTION, sentence, change)
    for words, normalise in _OTHER_WEIGHTS.items():
        sentence = f"the weights are {words} instead of the softmax"
        yield Variation(PatternKind.OTHER_FUNCTION, sentence, attends(normalise=normalise))
    for words, normalise in _sums_of_parts(step.values["key"].shape[-2]):
        yield Variation(PatternKind.STATISTICS, words, attends(normalise=normalise))
    count = step.values["key"].shape[-2]
    for block in dict.fromkeys((count // 2, *tails(count))):
        if 0 < block < count:
            some = f"the sum over the first {block} keys"
            sentence = f"{some} is not rescaled to the maximum of all keys"
            change = attends(normalise=partial(_not_rescaled, block=block))
            yield Variation(PatternKind.STATISTICS, sentence, change)


def _relu_weights(scores: Tensor) -> Tensor:
    return (scores.relu() / scores.relu().sum(-1, keepdim=True)).nan_to_num(0.0)


def _largest_only(scores: Tensor) -> Tensor:
    return (scores == scores.amax(-1, keepdim=True)).to(scores)


def _project_to_sparsemax(scores: Tensor) -> Tensor:
    """Onto the weights that add up to 1: sparsemax."""
    ordered = scores.sort(-1, descending=True).values
    counts = torch.arange(1, scores.shape[-1] + 1, device=scores.device).to(scores)
    sums = ordered.masked_fill(ordered.isinf(), 0.0).cumsum(-1)
    size = (1 + counts * ordered > sums).sum(-1, keepdim=True).clamp(min=1)
    least = (sums.gather(-1, size - 1) - 1) / size
    return (scores - least).clamp(min=0)


_OTHER_WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "the sigmoid of the scores": torch.sigmoid,
    "the sigmoid of the scores over its sum": lambda scores: (
        scores.sigmoid() / scores.sigmoid().sum(-1, keepdim=True)
    ),
    "the positive scores over their sum": _relu_weights,
    "1 for the largest score and 0 for all others": _largest_only,
    "the nearest weights that add up to 1 (sparsemax)": _project_to_sparsemax,
    "the scores themselves": lambda scores: scores.masked_fill(scores.isinf(), 0.0),
    "the same for all keys that are seen": lambda scores: (
        (~scores.isinf()).to(scores) / (~scores.isinf()).sum(-1, keepdim=True)
    ),
}


def softmax_variations(step: Step) -> Iterator[Variation]:
    """Softmax by itself, replaced by other weights."""
    x, dim = step.values["self"], step.values["dim"]
    if not x.dim() or x.shape[dim] < 2:  # noqa: PLR2004
        return
    for words, normalise in _OTHER_WEIGHTS.items() if step.name == "softmax" else ():
        sentence = f"{words} instead of the softmax".replace("scores", "values")
        change = partial(softmax_with, normalise)
        yield Variation(PatternKind.OTHER_FUNCTION, sentence, change)
    for words, normalise in _sums_of_parts(x.shape[dim]):
        yield Variation(PatternKind.STATISTICS, words, partial(softmax_with, normalise))


# So many parts of a row are tried.
_PARTS = (2, 3, 4, 8, 16)


def _sums_of_parts(count: int) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Softmax whose sums are those of parts of the row."""
    if count < 2:  # noqa: PLR2004
        return
    divisions = [(-(-count // parts),) * (count // -(-count // parts)) for parts in _PARTS]
    for sizes in dict.fromkeys([*divisions, (count // 2,)]):
        rest = count - sum(sizes)
        parts = (*sizes, rest) if rest else sizes
        if not 1 < len(parts) < count:
            continue
        is_even = len({*parts}) == 1
        listed = list_first([*map(str, parts)], 4)
        words = f"{len(parts)} parts" if is_even else f"the parts of {listed}"
        sentence = f"each of {words} of the row is divided by its own sum"
        yield sentence, partial(_normalised_parts, parts=parts, shared=False)
        sentence = f"{sentence}, and the parts count the same"
        yield sentence, partial(_normalised_parts, parts=parts, shared=True)
    yield "each element is divided by the sum up to it, not by that of the row", _running
    yield "each element is divided by the sum of the others", _of_others


def _normalised_parts(scores: Tensor, parts: tuple[int, ...], *, shared: bool) -> Tensor:
    pieces = scores.split(parts, -1)
    weights = torch.cat([_softmax(piece) for piece in pieces], -1)
    if not shared:
        return weights
    visited = sum((piece > -math.inf).any(-1, keepdim=True).to(scores) for piece in pieces)
    return weights / torch.as_tensor(visited).clamp(min=1)


def _running(scores: Tensor) -> Tensor:
    return (scores - scores.logcumsumexp(-1)).exp().nan_to_num(0.0)


def _of_others(scores: Tensor) -> Tensor:
    powers = _exponentiate_scores(scores)
    return powers / (powers.sum(-1, keepdim=True) - powers)


def smoothed_weights(share: float) -> Callable[[Tensor], Tensor]:
    """A softmax of which a share is the same for all."""

    def normalise(scores: Tensor) -> Tensor:
        return (1 - share) * _softmax(scores) + share / scores.shape[-1]

    return normalise


def softmax_with(normalise: Callable[[Tensor], Tensor], step: Step) -> Any:
    """Softmax, or an attention, with other weights."""
    if is_attention(step):
        return attends(normalise=normalise)(step)
    dim = step.values["dim"]
    weights = normalise(step.values["self"].movedim(dim, -1)).movedim(-1, dim)
    return weights.log() if step.name == "log_softmax" else weights


def capped_scores(number: float) -> Variation:
    """The scores capped at a number by tanh."""
    sentence = f"the scores are capped at {number:.4g} by tanh"
    change = attends(bend=partial(cap_scores, cap=number))
    return Variation(PatternKind.OTHER_FUNCTION, sentence, change)


def limited_scores(number: float) -> Variation:
    """The scores limited to a number and its negative."""
    sentence = f"the scores are limited to {-number:.4g} and {number:.4g}"
    change = attends(bend=partial(torch.clamp, min=-number, max=number))
    return Variation(PatternKind.CLIPPED, sentence, change)


def cap_scores(scores: Tensor, cap: float) -> Tensor:
    """Scores that come near to a number, and not beyond it."""
    return cap * torch.tanh(scores / cap)


def _rounded_softmax(scores: Tensor, digits: int) -> Tensor:
    # Casts are lifted to float64 here.
    return format_with_digits(digits).round_to_nearest(_softmax(scores))


def _exponentiate_scores(scores: Tensor) -> Tensor:
    return (scores - scores.amax(-1, keepdim=True)).exp().nan_to_num(0.0)


def with_zeros(scores: Tensor, number: float) -> Tensor:
    """Softmax with so many further scores of 0."""
    more = torch.full_like(scores[..., :1], math.log(number))
    return _softmax(torch.cat([scores, more], -1))[..., :-1]


def _not_rescaled(scores: Tensor, block: int) -> Tensor:
    first, rest = scores[..., :block], scores[..., block:]
    before = first.amax(-1, keepdim=True)
    top = torch.maximum(before, rest.amax(-1, keepdim=True))
    both = torch.cat([(first - before).exp(), (rest - top).exp()], -1).nan_to_num(0.0)
    return both / both.sum(-1, keepdim=True)


# --- Gradients ------------------------------------------------------------------------------------


def _gradient_variations(step: Step) -> Iterator[Variation]:
    causal = step.values.get("is_causal") is True
    plain = partial(_parts_of, form=_Form(diagonal=0 if causal else None))

    def without_sum(step: Step) -> Any:
        return _gradients(step, plain(step), subtracted=False)

    def without_factor(step: Step) -> Any:
        return _gradients(step, plain(step), factor=1.0)

    def swap_key_and_value(step: Step) -> Any:
        query, key, value = _gradients(step, plain(step))
        return query, value, key

    sentence = "the sum over the row is left out of the gradient of the scores"
    yield Variation(PatternKind.MISSING_OPERAND, sentence, without_sum)
    sentence = "the factor on the scores is left out of the gradient"
    yield Variation(PatternKind.FACTOR, sentence, without_factor)
    if step.values["key"].shape == step.values["value"].shape:
        sentence = "the gradients of keys and values are exchanged"
        yield Variation(PatternKind.SWAPPED_OPERANDS, sentence, swap_key_and_value)
    count = step.values["query"].shape[-2]
    for first, last in (*left_out(count), (count // 2, 0), (0, count // 2)):
        sentence = f"{words_of(first, last)} of the {count} queries are left out of the gradients"
        change = partial(_of_some_queries, kept=slice(first, count - last), plain=plain)
        yield Variation(PatternKind.PARTIAL_SUM, sentence, change)


def _of_some_queries(step: Step, kept: slice, plain: Callable[[Step], _Parts]) -> Any:
    parts = plain(step)
    weights = torch.zeros_like(parts.weights)
    weights[..., kept, :] = parts.weights[..., kept, :]
    return _gradients(step, parts._replace(weights=weights))


# --- What the result shows ------------------------------------------------------------------------

# The most numbers that are looked at to find the keys that each query saw.
_MOST_NUMBERS = 1 << 24
_NEAR_WHOLE = 0.02
_MOST_HEADS = 64


def deduced_attention(
    step: Step, predict: Callable[[Variation], Tensor | None], candidate: Tensor
) -> Iterator[Variation]:
    """The keys that each query saw, and the heads that it read, by the result."""
    if "grad_out" in step.values:
        return
    for shared in ((0, 1), (1,), ()):
        visited: list[Tensor] = []

        def look(
            step: Step, shared: tuple[int, ...] = shared, observed: list[Tensor] = visited
        ) -> Any:
            observed.append(_keys_seen(step, candidate, shared))
            return step.run()

        predict(Variation(PatternKind.MASK, "", look))
        if visited:
            yield from _seen_variations(step, visited[0])
            break
    yield from _head_variations(step, predict, candidate)
    yield from _slot_variations(step)


def _keys_seen(step: Step, candidate: Tensor, shared: tuple[int, ...]) -> Tensor:
    """How often each query saw each key: the weights of the values that give the result.

    With p the exponentials of all scores and c the result, the counts u of a query solve
    sum_j u_j p_j (v_j - c) = 0.

    Args:
        shared: the axes (batch, heads) along which the mask is the same.

    Raises:
        ValueError: there are no such counts, or too many numbers.
    """
    parts = _parts_of(step, _Form(diagonal=None, alter=lambda _: None))
    query, key, value = parts.query, parts.key, parts.value
    if query.dim() != 4 or query.numel() * key.shape[-2] > _MOST_NUMBERS:  # noqa: PLR2004
        raise ValueError("too many keys")
    candidate = candidate.to(value).reshape(*query.shape[:-1], value.shape[-1])
    scores = query @ key.mT * parts.factor + bias_of(step)
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    columns = p.unsqueeze(-1) * (value.unsqueeze(-3) - candidate.unsqueeze(-2))
    gram = columns @ columns.mT
    if shared:
        gram = gram.sum(shared, keepdim=True)
    size = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    size = torch.where(size > 0, size, 1.0)
    _, vectors = torch.linalg.eigh(gram / size.unsqueeze(-1) / size.unsqueeze(-2))
    counts: Tensor = vectors[..., 0] / size
    counts = counts / counts.gather(-1, counts.abs().argmax(-1, keepdim=True))
    # Most keys are seen once.
    usual = torch.where(counts > _NEAR_WHOLE, counts, math.nan).nanmedian(-1, keepdim=True).values
    counts = counts / usual
    rounded = counts.round()
    if not bool(((counts - rounded).abs() <= _NEAR_WHOLE).all()) or bool((rounded < 0).any()):
        raise ValueError("no keys that were seen give the result")
    nothing = (candidate == 0).all(-1)
    for axis in shared:
        nothing = nothing.all(axis, keepdim=True)
    return rounded.masked_fill(nothing.unsqueeze(-1), 0.0)


def _seen_variations(step: Step, counts: Tensor) -> Iterator[Variation]:
    change = attends(counts=counts)
    size = counts.shape[-1]
    # The right mask may differ from sample to sample where that of the candidate does not.
    counts, allowed = torch.broadcast_tensors(counts, seen_rightly(step))
    hidden, often = (counts == 0).reshape(-1, size), (counts > 1).reshape(-1, size)
    right = (allowed == 0).reshape(-1, size)
    # Keys that no query sees any more; everything else is as it should be.
    missing = hidden.all(0) & ~right.all(0)
    if bool(often.any()):
        first = int(often.any(0).nonzero()[0])
        sentence = f"some keys count more than once, the first of them is key {first} of {size}"
        yield Variation(PatternKind.DOUBLED_REDUCTION, sentence, change)
    elif bool(missing.any()) and torch.equal(hidden, right | missing):
        places = missing.nonzero().reshape(-1).tolist()
        some = f"key {places[0]} is"
        if len(places) > 1:
            some = f"{len(places)} of the {size} keys are"
        yield Variation(PatternKind.PARTIAL_SUM, f"{some} left out", change)
    elif not torch.equal(hidden, right):
        order = _order_seen(hidden, right)
        if order is not None:
            kind, words = describe_places(order)
            sentence = f"keys and values are read from other places: {words}"
            take = partial(take_slices, axis=-2, order=order)
            yield Variation(kind, sentence, with_all_altered(("key", "value"), take))
        sentence = "the queries see other keys than the mask allows"
        if not bool((right & ~hidden).any()):
            sentence = "the queries do not see all keys that the mask allows"
        elif not bool((hidden & ~right).any()):
            sentence = "the queries see keys that the mask hides"
        chosen = int((hidden != right).sum())
        yield Variation(PatternKind.MASK, sentence, change, chosen=chosen)


def _order_seen(hidden: Tensor, right: Tensor) -> Tensor | None:
    """The order of keys with which the right mask hides what is hidden; None if there is none.

    A causal mask hides the later keys from more queries, which says where each key was.
    """
    if len(torch.unique(right.sum(0))) < right.shape[1]:
        return None
    order = hidden.sum(0).argsort(stable=True)[right.sum(0).argsort(stable=True).argsort()]
    return order if torch.equal(hidden[:, order], right) else None


def seen_rightly(step: Step) -> Tensor:
    """Which keys each query should see."""
    query, key, mask = step.values["query"], step.values["key"], mask_of(step)
    visible = torch.ones(1, 1, query.shape[-2], key.shape[-2], dtype=torch.bool, device=key.device)
    if step.values.get("is_causal") is True:
        visible = visible.tril()
    if mask is not None:
        visible = visible & (mask if mask.dtype == torch.bool else mask > _HIDDEN)
    visited: Tensor = visible.to(query.dtype)
    return visited


def _head_variations(
    step: Step, predict: Callable[[Variation], Tensor | None], candidate: Tensor
) -> Iterator[Variation]:
    """Each head with the keys or values of the head that gives its result."""
    heads, sources = step.values["query"].shape[-3], step.values["key"].shape[-3]
    if candidate.dim() < 3 or candidate.shape[-3] != heads or not 1 < sources <= _MOST_HEADS:  # noqa: PLR2004
        return
    groups = heads // sources
    shared = torch.arange(sources).repeat_interleave(groups)
    for names in (("key", "value"), ("key",), ("value",), ("query",), ("query", "key")):
        errors = []
        is_query = "query" in names
        right = torch.arange(heads) if is_query else shared
        for source in range(heads if is_query else sources):
            order = torch.full((heads,), source)
            value = predict(Variation(PatternKind.WRONG_INDEX, "", attends(heads=(names, order))))
            if value is None:
                return
            left = (value.reshape(candidate.shape) - candidate).nan_to_num(0.0).square()
            errors.append(left.movedim(-3, 0).reshape(heads, -1).sum(1))
        order = torch.stack(errors).argmin(0)
        if not torch.equal(order, right):
            what = " and ".join({"query": "queries"}.get(name, f"{name}s") for name in names)
            sentence = f"heads read the {what} of other heads"
            if names == ("query", "key"):
                sentence = "heads use the weights of other heads for their values"
            yield Variation(PatternKind.WRONG_INDEX, sentence, attends(heads=(names, order)))


# --- Places of a cache ----------------------------------------------------------------------------

_MOST_PLACES = 64
_PAGES = (1, 2, 4, 8, 16)


def _slot_variations(step: Step) -> Iterator[Variation]:
    """Places of keys and values that were not written, or that are those of another page."""
    count = step.values["key"].shape[-2]
    for size in _PAGES if count <= _MOST_PLACES else ():
        for start in range(0, count - size + 1, size) if size < count else ():
            some = f"{start}" if size == 1 else f"{start} to {start + size - 1}"
            for names in (("key", "value"), ("key",)):
                what = " and ".join(f"{name}s" for name in names)
                sentence = f"the {what} at place {some} of {count} are zeros: they were not written"
                write = partial(_write_page, start=start, size=size, source=None)
                yield Variation(PatternKind.ZEROS, sentence, with_all_altered(names, write))
            for source in dict.fromkeys((start - size, 0)):
                for names in (("key", "value"), ("key",)) if 0 <= source != start else ():
                    what = " and ".join(f"{name}s" for name in names)
                    sentence = f"the {what} at place {some} of {count} are those from {source} on"
                    write = partial(_write_page, start=start, size=size, source=source)
                    # Keys of another tile than the values: the tile was not read again.
                    is_stale = names == ("key",)
                    kind = PatternKind.STALE if is_stale else PatternKind.WRONG_INDEX
                    yield Variation(kind, sentence, with_all_altered(names, write))


def _write_page(value: Tensor, start: int, size: int, source: int | None) -> Tensor:
    written = value.clone()
    page = value[..., source : source + size, :] if source is not None else 0.0
    written[..., start : start + size, :] = page
    return written
