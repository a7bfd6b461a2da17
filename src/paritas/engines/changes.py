"""Changed runs of the reference: each is a hypothesis about what the engine does differently.

Here are the changes of what is run: the prompt, positions, caches and choices of experts. Those of
the model itself are in `changed_models`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.execution.subjects import Inputs
from paritas.core.execution.token_models import TokenModel, config_parts, special_tokens
from paritas.core.torch_private.dynamo import original_of
from paritas.engines.looks import Reach

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from paritas.engines.records import Request

# Takes the model and a request; row t of the result predicts token t + 1. None if the change does
# not concern the request.
LogitsOf = Callable[[Any, "Request"], "Tensor | None"]
_NO_INPUTS = Inputs()
# Engines keep caches in blocks of so many tokens.
BLOCKS = (16, 8, 32, 4, 64, 128)
_MOST_BLOCKS = 8
_MOST_OTHERS = 8
_LONGEST_TRIED = 65
_MOST_TOKENS = 512
_TOKENS_TOGETHER = 64


@dataclasses.dataclass(frozen=True)
class Change:
    """One changed run.

    Attributes:
        kind: the kind of the cause.
        text: the cause in words.
        logits: how a request is run; None for plainly.
        make_model: makes the changed model from the reference; None for the reference itself.
        only_rounds: the same function, with less precision.
        reach: which numbers it can make wrong.
    """

    kind: str
    text: str
    logits: LogitsOf | None = None
    make_model: Callable[[Any], Any] | None = None
    only_rounds: bool = False
    reach: Reach = Reach.ALL


@dataclasses.dataclass(frozen=True)
class Family:
    """Changed runs with a number that is to be found.

    Attributes:
        make: the changed run with some number.
        own: the reference's number.
        grid: numbers to begin with, beside one next to the reference's own.
        whole: only whole numbers have a meaning.
        reach: which numbers of a record it can make wrong.
    """

    make: Callable[[float], Change]
    own: float
    grid: tuple[float, ...] = ()
    whole: bool = False
    reach: Reach = Reach.ALL


class Runner:
    """Runs requests through a model with the names of its arguments."""

    def __init__(self, tokens: TokenModel) -> None:
        """`tokens` knows the model's arguments."""
        self.tokens = tokens

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self.tokens.ids(self.tokens.inputs).device)

    def rows(self, model: Any, ids: Sequence[int], **more: Any) -> Tensor:
        """The logits after each token."""
        output = self.tokens.call(model, _NO_INPUTS, self._ids(ids), **more)
        return self.tokens.value_of(output)[0]

    def plain(self, model: Any, request: Request) -> Tensor:
        """One call on all tokens, without a cache."""
        return self.rows(model, request.ids)[:-1]

    def together(self, model: Any, requests: Sequence[Request]) -> list[Tensor]:
        """The same for several requests in one call, filled up on the right.

        A causal model gives no token another value for what comes after it.
        """
        longest = max(len(request.ids) for request in requests)
        rows = [[*request.ids, *[0] * (longest - len(request.ids))] for request in requests]
        ids = torch.tensor(rows, device=self.tokens.ids(self.tokens.inputs).device)
        values = self.tokens.value_of(self.tokens.call(model, _NO_INPUTS, ids))
        return [row[: len(request.ids) - 1] for row, request in zip(values, requests, strict=True)]

    def with_prompt(
        self, model: Any, request: Request, prompt: Sequence[int], **how: Any
    ) -> Tensor:
        """The same output tokens after another prompt; rows that it lacks are NaN.

        Rows of tokens before the first difference stay where they are; the others move with the end
        of the prompt.
        """
        logit_rows = self.rows(model, [*prompt, *request.record.output], **how)[:-1]
        return move_rows(logit_rows, request.record.prompt, prompt)

    def positions(self, places: Sequence[int]) -> dict[str, Tensor]:
        """The arguments for one call on tokens with these positions.

        Without a mask, transformers takes positions that jump for several packed sequences.
        """
        call_arguments = {self.tokens.positions: self._ids(places)}
        if self.tokens.mask:
            call_arguments[self.tokens.mask] = torch.ones_like(
                call_arguments[self.tokens.positions]
            )
        return call_arguments

    # --- With a cache ---

    def prefill(self, model: Any, ids: Sequence[int]) -> tuple[Tensor, Any]:
        """The logits of a prompt, and its cache."""
        output = self.tokens.call(model, _NO_INPUTS, self._ids(ids), use_cache=True)
        return self.tokens.value_of(output)[0], self.tokens.cache_of(output)

    def decode(self, model: Any, ids: Sequence[int], cache: Any, **more: Any) -> tuple[Tensor, Any]:
        """The logits of tokens after a cache, and the cache with them."""
        call_arguments = {self.tokens.cache: cache, **more}
        output = self.tokens.call(
            model, _NO_INPUTS, self._ids(ids), use_cache=True, **call_arguments
        )
        updated_cache = self.tokens.cache_of(output)
        return self.tokens.value_of(output)[0], cache if updated_cache is None else updated_cache


def move_rows(rows: Tensor, own_prompt: Sequence[int], other: Sequence[int]) -> Tensor:
    """The rows of a run on another prompt, at the places of the request's own tokens."""
    lacking = len(own_prompt) - len(other)
    if not lacking:
        return rows
    pairs = enumerate(zip(own_prompt, other, strict=False))
    same = next(
        (position for position, (a, b) in pairs if a != b), min(len(own_prompt), len(other))
    )
    shared_count = max(same - 1, 0)  # the last row in common predicts the first token that differs
    if lacking > 0:
        missing = rows.new_full((lacking, rows.shape[1]), torch.nan)
        return torch.cat([rows[:shared_count], missing, rows[shared_count:]])
    return torch.cat([rows[:shared_count], rows[shared_count - lacking :]])


# --- The prompt -----------------------------------------------------------------------------------


def prompt_changes(runner: Runner, requests: Iterable[Request]) -> Iterator[Change]:
    """Tokens that a tokenizer or a template adds or leaves out, and truncation."""
    config = runner.tokens.config
    names = _named_tokens(config)

    def change(
        text: str, make: Callable[[Request], Sequence[int] | None], reach: Reach = Reach.ALL
    ) -> Change:
        def logits(model: Any, request: Request) -> Tensor | None:
            prompt = make(request)
            if not prompt or tuple(prompt) == request.record.prompt:
                return None
            return runner.with_prompt(model, request, prompt)

        return Change("prompt", text, logits, reach=reach)

    def with_front(token: int) -> Callable[[Request], Sequence[int]]:
        return lambda request: [token, *request.record.prompt]

    def with_first(token: int) -> Callable[[Request], Sequence[int]]:
        return lambda request: [token, *request.record.prompt[1:]]

    def with_end(token: int) -> Callable[[Request], Sequence[int]]:
        return lambda request: [*request.record.prompt, token]

    def without_first(token: int) -> Callable[[Request], Sequence[int] | None]:
        return lambda r: r.record.prompt[1:] if r.record.prompt[0] == token else None

    def keeping_end(count: int) -> Callable[[Request], Sequence[int]]:
        return lambda request: request.record.prompt[-count:]

    for token, name in names.items():
        words = f"the {name} token ({token})"
        yield change(f"{words} is missing in front of the prompt", without_first(token))
        yield change(f"{words} is added in front of the prompt", with_front(token))
        yield change(f"{words} takes the place of the prompt's first", with_first(token))
        at_end = f"{words} is added to the end of the prompt"
        yield change(at_end, with_end(token), Reach.OUTPUT)
    longest = max(request.start for request in requests)
    missing = "the prompt's last token is missing"
    yield change(missing, lambda r: r.record.prompt[:-1], Reach.OUTPUT)
    yield change("the prompt's first token is missing", lambda r: r.record.prompt[1:])
    for count in range(1, min(longest, _LONGEST_TRIED)):
        words = f"last {count} tokens" if count > 1 else "last token"
        yield change(f"only the prompt's {words} are seen", keeping_end(count))
    yield change(
        "the prompt's last token is run twice",
        lambda r: [*r.record.prompt, r.record.prompt[-1]],
        Reach.OUTPUT,
    )


def _named_tokens(config: Any) -> dict[int, str]:
    """Special tokens by id, BOS first."""
    name_by_token: dict[int, str] = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value >= 0:
            name_by_token.setdefault(value, name.removesuffix("_token_id").upper())
    for token in special_tokens(config):
        if token >= 0:
            name_by_token.setdefault(token, "special")
    return name_by_token


@dataclasses.dataclass(frozen=True)
class AddedToken:
    """A token that may be any, added at one place of a request's prompt.

    Attributes:
        runner: runs the model.
        request: the request on which tokens are tried.
        place: where it is added: 0 for the front, 1 for after the first token, -1 for the end.
        tokens: those to try.
    """

    runner: Runner
    request: Request
    place: int
    tokens: tuple[int, ...]

    @property
    def reach(self) -> Reach:
        """What is added to the end changes the output's numbers only."""
        return Reach.OUTPUT if self.place < 0 else Reach.ALL

    def batches(self) -> Iterator[tuple[int, ...]]:
        """The tokens in parts that are run together."""
        for start in range(0, len(self.tokens), _TOKENS_TOGETHER):
            yield self.tokens[start : start + _TOKENS_TOGETHER]

    def _with(self, request: Request, token: int) -> list[int]:
        prompt = request.record.prompt
        at = len(prompt) if self.place < 0 else self.place
        return [*prompt[:at], token, *prompt[at:]]

    def run(self, model: Any, tokens: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """The logits of the request with each of the tokens, at the places of its own tokens."""
        runner, request = self.runner, self.request
        longer = [self._with(request, token) for token in tokens]
        output = list(request.record.output)
        ids = torch.tensor([[*prompt, *output] for prompt in longer])
        ids = ids.to(runner.tokens.ids(runner.tokens.inputs).device)
        with torch.no_grad():
            rows = runner.tokens.value_of(runner.tokens.call(model, _NO_INPUTS, ids))
        for token, prompt, row in zip(tokens, longer, rows, strict=True):
            yield token, move_rows(row[:-1], request.record.prompt, prompt)

    def change(self, token: int) -> Change:
        """The changed run with one of the tokens, for any request."""
        where = {0: "in front of", 1: "after the first token of", -1: "to the end of"}[self.place]

        def logits(model: Any, request: Request) -> Tensor:
            return self.runner.with_prompt(model, request, self._with(request, token))

        text = f"token {token} is added {where} the prompt"
        return Change("prompt", text, logits, reach=self.reach)


def added_tokens(runner: Runner, request: Request) -> Iterator[AddedToken]:
    """Any token of a small vocabulary; of a large one, those that the request has, and others."""
    size = vocabulary(original_of(runner.tokens.model))
    tokens = tuple(dict.fromkeys([*request.ids, *range(size)]))[:_MOST_TOKENS]
    for insert_position in (-1, 1, 0):
        yield AddedToken(runner, request, insert_position, tokens)


def vocabulary(model: Any) -> int:
    """The number of its tokens; 0 if it does not say."""
    inner = getattr(model, "get_input_embeddings", None)
    if not callable(inner):
        return 0
    weight = getattr(inner(), "weight", None)
    return int(weight.shape[0]) if isinstance(weight, torch.Tensor) else 0


# --- Positions ------------------------------------------------------------------------------------


def position_changes(runner: Runner) -> Iterator[Change]:
    """Other positions of the prompt's or the output's tokens."""
    if not runner.tokens.positions:
        return
    plans: dict[str, Callable[[int, int], list[int]]] = {
        "positions of the output are one too far": lambda p, n: [
            *range(p),
            *range(p + 1, p + n + 1),
        ],
        "positions of the output are one too low": lambda p, n: [
            *range(p),
            *range(p - 1, p + n - 1),
        ],
        "positions of the output start again at 0": lambda p, n: [*range(p), *range(n)],
        "positions of the output do not advance": lambda p, n: [*range(p), *[p] * n],
        "all positions are 0": lambda p, n: [0] * (p + n),
        "all positions are one too far": lambda p, n: [*range(1, p + n + 1)],
        "all positions are two too far": lambda p, n: [*range(2, p + n + 2)],
        "the first position is counted twice": lambda p, n: [0, *range(p + n - 1)],
    }
    for text, plan in plans.items():

        def logits(model: Any, request: Request, plan: Any = plan) -> Tensor:
            places = plan(request.start, len(request.record.output))
            return runner.rows(model, request.ids, **runner.positions(places))[:-1]

        # Where positions are embedded, the first token's changes too.
        reach = Reach.ALL if "too far" in text else Reach.LATER
        reach = Reach.OUTPUT if "of the output" in text else reach
        yield Change("positions", text, logits, reach=reach)
    for block in BLOCKS:

        def run_in_chunks(model: Any, request: Request, block: int = block) -> Tensor | None:
            if request.start <= block:
                return None
            places = [position % block for position in range(request.start)]
            places += range(request.start, len(request.ids))
            return runner.rows(model, request.ids, **runner.positions(places))[:-1]

        yield Change(
            "positions",
            f"positions start again in each chunk of {block} tokens",
            run_in_chunks,
            reach=Reach.LATER,
        )


# --- The cache ------------------------------------------------------------------------------------


def _after_own_prompt(plain: Tensor, request: Request, rest: Tensor) -> Tensor:
    """The rows of the prompt as they should be, and those of the output from elsewhere."""
    return torch.cat([plain[: request.start], rest[len(rest) - (len(plain) - request.start) :]])


def cache_changes(runner: Runner, requests: Sequence[Request]) -> Iterator[Change]:
    """A cache that is lost, incomplete, or another request's."""
    yield from (dataclasses.replace(change, reach=Reach.OUTPUT) for change in _lost(runner))
    yield from _of_others(runner, requests)
    if runner.tokens.mask:
        longest = max(request.start for request in requests)
        for block in BLOCKS:
            for first in range(0, min(longest - 1, block * _MOST_BLOCKS), block):
                yield from _without_block(runner, first, first + block)
    yield from _quantise_cache(runner)


def _lost(runner: Runner) -> Iterator[Change]:
    takes = bool(runner.tokens.positions)

    def alone(model: Any, request: Request, *, again: bool) -> Tensor | None:
        output = request.record.output
        if len(output) < 2:  # noqa: PLR2004
            return None
        first = 0 if again else request.start
        how = runner.positions(range(first, first + len(output))) if takes else {}
        rest = runner.rows(model, output, **how)[:-1]
        return _after_own_prompt(runner.plain(model, request), request, rest)

    lost_words = "the cache of the prompt is lost when decoding starts"
    yield Change("cache", lost_words, functools.partial(alone, again=False))
    if takes:
        again = functools.partial(alone, again=True)
        yield Change("cache", f"{lost_words}, and positions start again at 0", again)

    def shorter(model: Any, request: Request) -> Tensor | None:
        if request.start < 2 or len(request.record.output) < 2:  # noqa: PLR2004
            return None
        keeps = [*range(request.start - 1), *range(request.start, len(request.ids))]
        how = runner.positions(keeps) if takes else {}
        rest = runner.with_prompt(model, request, request.record.prompt[:-1], **how)
        return _after_own_prompt(runner.plain(model, request), request, rest)

    yield Change("cache", "the prompt's last token is missing in the cache", shorter)

    def twice(model: Any, request: Request) -> Tensor:
        longer = [*request.record.prompt, request.record.output[0]]
        rest = runner.with_prompt(model, request, longer)
        return _after_own_prompt(runner.plain(model, request), request, rest)

    yield Change("cache", "the first output token is in the cache twice", twice)


def _of_others(runner: Runner, requests: Sequence[Request]) -> Iterator[Change]:
    for other in requests[:_MOST_OTHERS]:
        other_prompt, name = other.record.prompt, other.record.name

        def whole(
            model: Any, request: Request, foreign_prompt: Any = other_prompt
        ) -> Tensor | None:
            if request.record.prompt == foreign_prompt:
                return None
            return runner.with_prompt(model, request, foreign_prompt)

        def in_decoding(
            model: Any, request: Request, foreign_prompt: Any = other_prompt, *, own: bool
        ) -> Tensor | None:
            if request.record.prompt == foreign_prompt:
                return None
            places = [*range(len(foreign_prompt)), *range(request.start, len(request.ids))]
            how = runner.positions(places) if own else {}
            rest = runner.with_prompt(model, request, foreign_prompt, **how)
            return _after_own_prompt(runner.plain(model, request), request, rest)

        yield Change("cache", f"the prompt is that of {name}", whole)
        words = f"decoding uses the cache of {name}"
        foreign = functools.partial(in_decoding, own=False)
        yield Change("cache", words, foreign, reach=Reach.OUTPUT)
        if runner.tokens.positions:
            words += ", with the request's own positions"
            moved = functools.partial(in_decoding, own=True)
            yield Change("cache", words, moved, reach=Reach.OUTPUT)
        for block in BLOCKS:

            def prefix(
                model: Any, request: Request, foreign_prompt: Any = other_prompt, block: int = block
            ) -> Tensor | None:
                mixed = (*foreign_prompt[:block], *request.record.prompt[block:])
                if len(foreign_prompt) < block or len(mixed) != request.start:
                    return None
                if mixed == request.record.prompt:
                    return None
                return runner.with_prompt(model, request, mixed)

            text = f"the cache of the first {block} tokens is that of {name}"
            yield Change("cache", text, prefix)
        yield _fed_by(runner, other)


def _fed_by(runner: Runner, other: Request) -> Change:
    """Another request's tokens are fed back in place of the request's own."""

    def logits(model: Any, request: Request) -> Tensor | None:
        count = len(request.record.output) - 1
        same = other.record.output[:count]
        if request is other or len(same) < count:
            return None
        return runner.rows(model, [*request.record.prompt, *same])

    words = f"the output tokens of {other.record.name} are fed back"
    return Change("cache", words, logits, reach=Reach.OUTPUT)


def _without_block(runner: Runner, first: int, last: int) -> Iterator[Change]:
    tokens = runner.tokens
    takes = bool(tokens.positions)

    def mask(request: Request) -> dict[str, Any] | None:
        if last >= request.start:
            return None
        attention_mask = torch.ones((1, len(request.ids)), dtype=torch.int64)
        attention_mask[:, first:last] = 0
        attention_mask = attention_mask.to(tokens.ids(tokens.inputs).device)
        how = runner.positions(range(len(request.ids))) if takes else {}
        return {**how, tokens.mask: attention_mask}

    def never(model: Any, request: Request) -> Tensor | None:
        how = mask(request)
        return None if how is None else runner.rows(model, request.ids, **how)[:-1]

    def in_decoding(model: Any, request: Request) -> Tensor | None:
        how = mask(request)
        if how is None or not tokens.cache:
            return None
        attention_mask = how[tokens.mask][:, :-1]
        start = request.start
        prompt_logits, cache = runner.prefill(model, request.record.prompt)
        places = runner.positions(range(start, len(request.ids) - 1)) if takes else {}
        output = request.record.output[:-1]
        if not output:
            return None
        rest, _ = runner.decode(model, output, cache, **{**places, tokens.mask: attention_mask})
        return torch.cat([prompt_logits, rest])

    where = f"tokens {first} to {last - 1} of the prompt"
    words = f"{where} are missing in the cache"
    yield Change("cache", words, in_decoding, reach=Reach.OUTPUT)
    reach = Reach.LATER if first else Reach.ALL
    yield Change("cache", f"{where} are not seen", never, reach=reach)


def _quantise_cache(runner: Runner) -> Iterator[Change]:
    if not runner.tokens.cache:
        return
    for text, round_to in CACHE_ROUNDINGS.items():

        def logits(model: Any, request: Request, round_to: Any = round_to) -> Tensor | None:
            prompt_logits, cache = runner.prefill(model, request.record.prompt)
            rows = [prompt_logits]
            done = 0
            for token in request.record.output[:-1]:
                done = _round_cache(cache, round_to, done)
                row, cache = runner.decode(model, [token], cache)
                rows.append(row)
            return torch.cat(rows)

        def at_once(model: Any, request: Request, round_to: Any = round_to) -> Tensor:
            _, cache = runner.prefill(model, request.ids[:1])
            with _rounded_when_stored({type(layer) for layer in cache.layers}, round_to):
                return runner.prefill(model, request.ids[:-1])[0]

        words = f"the cache is stored in {text}"
        yield Change("quantised cache", words, logits, reach=Reach.OUTPUT)
        words += ", and attention to the prompt reads it too"
        yield Change("quantised cache", words, at_once)


@contextlib.contextmanager
def _rounded_when_stored(kinds: set[type], round_to: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Layers of a cache round what they are given, before anything reads it."""
    update_by_kind: dict[Any, Any] = {kind: kind.update for kind in kinds}  # type: ignore[attr-defined]

    def rounding(update: Any) -> Any:
        def update_rounded(
            self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            keys, values = (round_to(tensor).to(tensor.dtype) for tensor in (keys, values))
            return update(self, keys, values, *args, **kwargs)

        return update_rounded

    try:
        for kind, update in update_by_kind.items():
            kind.update = rounding(update)
        yield
    finally:
        for kind, update in update_by_kind.items():
            kind.update = update


def _round_cache(cache: Any, round_to: Callable[[Tensor], Tensor], done: int) -> int:
    """Round the entries after the first `done`; returns the number of entries.

    Raises:
        AttributeError: the cache has no layers with keys and values.
    """
    total = 0
    for layer in cache.layers:
        total = layer.keys.shape[-2]
        for part in (layer.keys, layer.values):
            part[..., done:, :] = round_to(part[..., done:, :]).to(part.dtype)
    return total


def _to_float8(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    largest = torch.finfo(dtype).max

    def round_value(x: Tensor) -> Tensor:
        return x.clamp(-largest, largest).float().to(dtype).to(x.dtype)

    return round_value


def _cut_to_float8(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Towards 0, as kernels do that drop the last bits."""
    largest = torch.finfo(dtype).max

    def cut(x: Tensor) -> Tensor:
        size = x.abs().clamp(max=largest).float()
        nearest = size.to(dtype)
        code = nearest.view(torch.uint8) - (nearest.float() > size).to(torch.uint8)
        return code.view(dtype).to(x.dtype) * x.sign()

    return cut


def _to_int8(x: Tensor) -> Tensor:
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
    return (x / scale).round().clamp(-127, 127) * scale


CACHE_ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "float8 (e4m3)": _to_float8(torch.float8_e4m3fn),
    "float8 (e5m2)": _to_float8(torch.float8_e5m2),
    "float8 (e4m3), cut off in place of rounded": _cut_to_float8(torch.float8_e4m3fn),
    "float8 (e5m2), cut off in place of rounded": _cut_to_float8(torch.float8_e5m2),
    "int8, scaled by token and head": _to_int8,
}


# --- Experts that the engine chose otherwise ------------------------------------------------------

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MOST_FLIPS = 6
_MOST_TRIED = 24
# A flip is kept if it leaves at most this share of what was unexplained.
_KEPT = 0.7


def number_of_experts(config: Any) -> int:
    """The number of experts of each layer; 0 for a dense model."""
    for part in config_parts(config):
        for name in _COUNTS:
            expert_count = getattr(part, name, None)
            if isinstance(expert_count, int) and expert_count > 1:
                return expert_count
    return 0


@dataclasses.dataclass(frozen=True)
class Flip:
    """A token's last chosen expert in one call of a router, replaced by the next best.

    Attributes:
        call: the number of the router's call.
        token: the token.
        margin: how far the two are apart, relative to the spread of all.
    """

    call: int
    token: int
    margin: float


class _Routers(torch.overrides.TorchFunctionMode):
    """Sees all choices among experts, and turns some of them."""

    def __init__(self, experts: int, flips: list[Flip]) -> None:
        super().__init__()
        self.experts, self.flips = experts, flips
        self.calls = 0
        self.seen: list[Flip] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return output
        scores = args[0]
        count = output[1].shape[-1]
        if scores.shape[-1] != self.experts or count >= self.experts:
            return output
        call, self.calls = self.calls, self.calls + 1
        more = torch.Tensor.topk(scores, count + 1, dim=-1)
        values, indices = (topk_tensor.reshape(-1, count + 1) for topk_tensor in more)
        gaps = (values[:, count - 1] - values[:, count]) / scores.double().std().clamp(min=1e-30)
        self.seen += [Flip(call, token, float(gap)) for token, gap in enumerate(gaps)]
        tokens = [flip.token for flip in self.flips if flip.call == call]
        if not tokens:
            return output
        chosen = [output_tensor.reshape(-1, count).clone() for output_tensor in output]
        for token in tokens:
            chosen[0][token, -1] = values[token, count]
            chosen[1][token, -1] = indices[token, count]
        shape = output[1].shape
        return type(output)([chosen_tensor.reshape(shape) for chosen_tensor in chosen])


def search_flips(
    runner: Runner,
    experts: int,
    request: Request,
    rest_of: Callable[[Callable[[Any, Request], Tensor]], float],
) -> Change | None:
    """Turn decisions of routers one by one, as long as they explain more of the record.

    `rest_of` runs the reference in this way, and returns how much of the record it leaves
    unexplained.
    """
    flips: list[Flip] = []
    possible_flips: list[Flip] = []

    def way(turned: list[Flip]) -> Callable[[Any, Request], Tensor]:
        def logits(model: Any, current_request: Request) -> Tensor:
            routers = _Routers(experts, turned if current_request is request else [])
            with routers:
                logit_rows = runner.plain(model, current_request)
            possible_flips[:] = routers.seen
            return logit_rows

        return logits

    rest = rest_of(way([]))
    first_left = rest
    while len(flips) < _MOST_FLIPS and rest > 0:
        flipped_tokens = {(earlier_flip.call, earlier_flip.token) for earlier_flip in flips}
        tried = sorted(possible_flips, key=lambda possible_flip: possible_flip.margin)
        tried = [
            possible_flip
            for possible_flip in tried
            if (possible_flip.call, possible_flip.token) not in flipped_tokens
        ][:_MOST_TRIED]
        results = [
            (rest_of(way([*flips, possible_flip])), possible_flip) for possible_flip in tried
        ]
        best, flip = min(results, key=lambda pair: pair[0], default=(rest, None))
        if flip is None or best > _KEPT * rest:
            break
        rest = best
        flips.append(flip)
        with contextlib.suppress(Exception):
            rest_of(way(flips))  # later choices are seen anew
    if not flips or rest > _KEPT * first_left:
        return None
    places = ", ".join(
        f"token {chosen_flip.token} in router {chosen_flip.call}" for chosen_flip in flips
    )
    widest = max(chosen_flip.margin for chosen_flip in flips)
    text = (
        f"{request.record.name}: other experts are chosen for {places}, where the next best is "
        f"behind by {widest:.2g} of the scores' spread"
    )

    def only_this(model: Any, current_request: Request) -> Tensor | None:
        return way(flips)(model, current_request) if current_request is request else None

    return Change("routing", text, only_this)
