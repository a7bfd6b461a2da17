"""Relations of generation: `generate`, with beams, and by continuous batching."""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.dynamo import original_of
from paritas.execution.subjects import Inputs
from paritas.relations.caches import static_caches_refused
from paritas.relations.relation import (
    Case,
    CheckedModel,
    DoesNotApply,
    NotPromised,
    Relation,
    RelationFamily,
    rows_of,
)
from paritas.relations.serving import (
    PADDING,
    left_padding_is_promised,
    pads_encoder,
)
from paritas.relations.token_models import (
    KEYS_AND_VALUES,
    TokenModel,
    config_parts,
    has_cache,
    own_static_kind,
    pad_token,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.relations.relation import Way

NEW_TOKENS = 4
_BEAMS = 3
_CHUNK, _KIND = "prefill_chunk_size", "cache_implementation"
PROMPT = 6


# --- Greedy generation ----------------------------------------------------------------------------


class Generation:
    """Greedy generation of a few tokens after a prompt."""

    def __init__(self, tokens: TokenModel) -> None:
        self.tokens = tokens
        ids = tokens.ids(tokens.inputs)[:, :PROMPT].clone()
        start = self.start_token
        if tokens.has_encoder and start is not None:
            ids[:, 0] = start  # generation would put it in front otherwise
        self.inputs = Inputs(kwargs={**tokens.inputs.kwargs, tokens.tokens: ids})

    @property
    def start_token(self) -> int | None:
        """The token that a decoder starts with, if the configuration has one."""
        for part in config_parts(self.tokens.config):
            for name in ("decoder_start_token_id", "bos_token_id"):
                found = getattr(part, name, None)
                if isinstance(found, int):
                    return found
        return None

    def repeated(self, model: Any, inputs: Inputs) -> dict[str, Tensor]:
        """The plain way: the whole sequence is run again for each token."""
        ids = self.tokens.ids(inputs)
        start, found = ids.shape[1], []
        for _ in range(NEW_TOKENS):
            value = self.tokens.value_of(self.tokens.call(model, inputs, ids))[:, -1]
            found.append(value)
            ids = torch.cat([ids, value.argmax(dim=-1, keepdim=True)], dim=1)
        logits = self._as_computed(torch.stack(found, dim=1))
        return {"logits": logits, "tokens": ids[:, start:]}

    def _as_computed(self, logits: Tensor) -> Tensor:
        """Logits in the model's own dtype, or in float32 if it is wider.

        `generate` returns float32. In a run in float64 of a narrower model, it does not.
        """
        if self.tokens.dtype is torch.float64:
            return logits.float()
        return logits.to(self.tokens.dtype) if logits.dtype is torch.float32 else logits

    def _generate(
        self,
        model: Any,
        inputs: Inputs,
        *,
        left: int = 0,
        encoder: int = 0,
        helper: Any = None,
        **how: Any,
    ) -> Any:
        """Call `generate`, perhaps with padding before the prompt or after the encoder's tokens.

        `helper` is a model that guesses tokens ahead.
        """
        tokens = self.tokens
        ids = tokens.ids(inputs)
        more: dict[str, Any] = {name: inputs.kwargs[name] for name in tokens.context}
        if left:
            pad = ids.new_full((ids.shape[0], left), pad_token(tokens.config))
            more["attention_mask"] = torch.cat([torch.zeros_like(pad), torch.ones_like(ids)], dim=1)
            ids = torch.cat([pad, ids], dim=1)
        elif not tokens.has_encoder and tokens.mask:
            more["attention_mask"] = torch.ones_like(ids)
        if encoder:
            source = more["input_ids"]
            pad = source.new_full((source.shape[0], encoder), pad_token(tokens.config))
            mask = torch.cat([torch.ones_like(source), torch.zeros_like(pad)], dim=1)
            more |= {"input_ids": torch.cat([source, pad], dim=1), "attention_mask": mask}
        if helper is not None:
            more["assistant_model"] = helper
        whole = original_of(model)
        with _plain_defaults(whole):
            return whole.generate(
                **{tokens.tokens: ids}, **more, generation_config=self._settings(**how)
            )

    def generated(self, **how: Any) -> Way:
        """Call `generate` greedily."""

        def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
            output = self._generate(model, inputs, **how)
            return {
                "logits": self._as_computed(torch.stack(output.logits, dim=1)),
                "tokens": output.sequences[:, -NEW_TOKENS:],
            }

        return way

    def assisted(self) -> Way:
        """Call `generate` row by row, with the model itself as the one that guesses tokens."""

        def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
            whole, rows = original_of(model), self.tokens.size[0]
            kwargs = [rows_of(inputs, slice(row, row + 1)) for row in range(rows)]
            found = [self._generate(model, one, helper=whole, use_cache=True) for one in kwargs]
            # A step may have logits for several tokens, of two or of three axes.
            steps = [[one.flatten(0, -2) for one in output.logits] for output in found]
            logits = torch.stack([torch.cat(one)[:NEW_TOKENS] for one in steps])
            return {
                "logits": self._as_computed(logits),
                "tokens": torch.cat([one.sequences[:, -NEW_TOKENS:] for one in found]),
            }

        return way

    @property
    def gets_cache(self) -> bool:
        """Whether `generate` makes the cache, which chunks and guesses need."""
        makes = getattr(original_of(self.tokens.model), "_supports_default_dynamic_cache", None)
        return self.tokens.cache == KEYS_AND_VALUES and (makes is None or bool(makes()))

    def can_be_assisted(self) -> bool:
        """Whether tokens that were guessed can be taken back."""
        model = original_of(self.tokens.model)
        if not self.gets_cache or getattr(model, "_is_stateful", False):
            return False
        try:
            with torch.no_grad():
                self.assisted()(self.tokens.model, self.inputs)
        except ValueError:  # transformers refuses by it, and its caches do
            return False
        except Exception:  # noqa: BLE001  (the case reports it)
            return True
        return True

    def searched(self, **how: Any) -> Way:
        """Call `generate` with beams."""

        def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
            output = self._generate(model, inputs, num_beams=_BEAMS, **how)
            return {
                "scores": output.sequences_scores,
                "tokens": output.sequences[:, -NEW_TOKENS:],
            }

        return way

    @property
    def _own_kind(self) -> str | None:
        """The kind of cache that the model generates with unless it is told otherwise."""
        found = getattr(original_of(self.tokens.model), "generation_config", None)
        return getattr(found, _KIND, None) or own_static_kind(self.tokens.config) or None

    @staticmethod
    def has_setting(name: str) -> bool:
        """Whether this release of transformers knows a setting."""
        return hasattr(importlib.import_module("transformers").GenerationConfig(), name)

    def _settings(self, **how: Any) -> Any:
        library = importlib.import_module("transformers")
        start = self.start_token
        plain = {"num_beams": 1, "output_logits": True}
        beams = {"output_scores": True}
        made = library.GenerationConfig(
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=pad_token(self.tokens.config),
            bos_token_id=start,
            decoder_start_token_id=start,
            return_dict_in_generate=True,
            **(beams if "num_beams" in how else plain),
        )
        how = {_KIND: self._own_kind, **how} if how.get("use_cache") else how
        for name, value in how.items():  # not every release builds every setting
            setattr(made, name, value)
        return made


@contextlib.contextmanager
def _plain_defaults(model: Any) -> Iterator[None]:
    """Set aside the model's own defaults, which force or forbid tokens."""
    before = model.generation_config
    model.generation_config = type(before)()
    try:
        yield
    finally:
        model.generation_config = before


def generation_of(checked: CheckedModel) -> Generation:
    """Generation with this model; raises unless it promises it."""
    tokens = checked.tokens
    model = original_of(tokens.model)
    can = getattr(model, "can_generate", None)
    if not callable(can) or not hasattr(model, "generate"):
        raise DoesNotApply("it has no generate()")
    if not can():
        raise DoesNotApply("its class cannot generate")
    for name in ("generate", "_sample"):  # which greedy generation calls
        own = getattr(type(model), name, None)
        if own is not None and own.__module__ != "transformers.generation.utils":
            raise NotPromised(f"its class has a {name}() of its own")
    tokens.require_causal()
    if tokens.value != "logits":
        raise DoesNotApply("it returns no logits for each token")
    run = Generation(tokens)
    if tokens.has_encoder and run.start_token is None:
        raise DoesNotApply("its configuration has no token that a decoder starts with")
    return run


def _generate_cases(checked: CheckedModel) -> Iterator[Case]:
    run = generation_of(checked)
    tokens = run.tokens

    def case(label: str, **how: Any) -> Case:
        return Case(run.repeated, run.generated(**how), label, run.inputs)

    yield case("with a cache", use_cache=True)
    yield case("without a cache", use_cache=False)
    pads_left = not tokens.has_encoder and tokens.mask and left_padding_is_promised(tokens)
    if pads_left:
        yield case("left padded", left=PADDING, use_cache=True)
        if run.gets_cache and has_cache(tokens) and run.has_setting(_CHUNK):
            yield case("left padded, prompt in chunks", left=PADDING, use_cache=True, **{_CHUNK: 2})
    if pads_encoder(tokens):
        yield case("the encoder right padded", encoder=PADDING, use_cache=True)
    if run.can_be_assisted():
        yield Case(run.repeated, run.assisted(), "assisted by itself", run.inputs)
    if static_caches_refused(tokens):
        return
    static = {"use_cache": True, _KIND: own_static_kind(tokens.config) or "static"}
    yield case("static cache", **static)
    if pads_left:
        yield case("static cache, left padded", left=PADDING, **static)


def _beam_cases(checked: CheckedModel) -> Iterator[Case]:
    run = generation_of(checked)
    run.tokens.require_cache()
    without, cached = run.searched(use_cache=False), run.searched(use_cache=True)
    yield Case(without, cached, inputs=run.inputs)


GENERATION: tuple[Relation, ...] = tuple(
    Relation(name=name, about=about, family=RelationFamily.SERVING, cases=cases)
    for name, about, cases in (
        ("greedy-generation", "generate() = the best token of repeated calls", _generate_cases),
        ("beam-search", "beam search with a cache = without a cache", _beam_cases),
    )
)
