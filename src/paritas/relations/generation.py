"""Relations of generation: `generate`, attention implementations and packed sequences."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.dynamo import original_of
from paritas.errors import in_one_line
from paritas.execution.subjects import Inputs
from paritas.relations.relation import (
    Case,
    CheckedModel,
    DoesNotApply,
    NotPromised,
    Relation,
    RelationFamily,
    computing_nothing,
)
from paritas.relations.serving import PADDING, left_padding_is_promised, padded, plain_case
from paritas.relations.token_models import TokenModel, config_parts, pad_token

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.relations.relation import Way

NEW_TOKENS = 4
_PROMPT = 6
_LONGEST_REASON = 160


# --- Greedy generation ----------------------------------------------------------------------------


class _Generation:
    """Greedy generation of a few tokens after a prompt."""

    def __init__(self, tokens: TokenModel) -> None:
        self.tokens = tokens
        ids = tokens.ids(tokens.inputs)[:, :_PROMPT].clone()
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
        return {"logits": torch.stack(found, dim=1), "tokens": ids[:, start:]}

    def generated(self, *, left: int = 0, **how: Any) -> Way:
        """Call `generate`, on a prompt with padding if `left` is positive."""

        def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
            tokens = self.tokens
            ids = tokens.ids(inputs)
            more: dict[str, Any] = {name: inputs.kwargs[name] for name in tokens.context}
            if left:
                pad = ids.new_full((ids.shape[0], left), pad_token(tokens.config))
                more["attention_mask"] = torch.cat(
                    [torch.zeros_like(pad), torch.ones_like(ids)], dim=1
                )
                ids = torch.cat([pad, ids], dim=1)
            elif not tokens.has_encoder and tokens.mask:
                more["attention_mask"] = torch.ones_like(ids)
            whole = original_of(model)
            with _plain_defaults(whole):
                output = whole.generate(
                    **{tokens.tokens: ids}, **more, generation_config=self._settings(**how)
                )
            return {
                "logits": torch.stack(output.logits, dim=1),
                "tokens": output.sequences[:, -NEW_TOKENS:],
            }

        return way

    def _settings(self, **how: Any) -> Any:
        library = importlib.import_module("transformers")
        start = self.start_token
        return library.GenerationConfig(
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            num_beams=1,
            pad_token_id=pad_token(self.tokens.config),
            bos_token_id=start,
            decoder_start_token_id=start,
            return_dict_in_generate=True,
            output_logits=True,
            **how,
        )


@contextlib.contextmanager
def _plain_defaults(model: Any) -> Iterator[None]:
    """Set aside the model's own defaults, which force or forbid tokens."""
    before = model.generation_config
    model.generation_config = type(before)()
    try:
        yield
    finally:
        model.generation_config = before


def _generate_cases(checked: CheckedModel) -> Iterator[Case]:
    tokens = checked.tokens
    model = original_of(tokens.model)
    can = getattr(model, "can_generate", None)
    if not callable(can) or not hasattr(model, "generate"):
        raise DoesNotApply("it has no generate()")
    if not can():
        raise DoesNotApply("its class cannot generate")
    if type(model).generate.__module__ != "transformers.generation.utils":
        raise NotPromised("its class has a generate() of its own")
    tokens.require_causal()
    if tokens.value != "logits":
        raise DoesNotApply("it returns no logits for each token")
    run = _Generation(tokens)
    if tokens.has_encoder and run.start_token is None:
        raise DoesNotApply("its configuration has no token that a decoder starts with")

    def case(label: str, **how: Any) -> Case:
        return Case(run.repeated, run.generated(**how), label, run.inputs)

    yield case("with a cache", use_cache=True)
    yield case("without a cache", use_cache=False)
    if not tokens.has_encoder and tokens.mask and left_padding_is_promised(tokens):
        yield case("left padded", left=PADDING, use_cache=True)


# --- Attention implementations --------------------------------------------------------------------


@contextlib.contextmanager
def _implementation(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation  # noqa: SLF001  (transformers has no other name)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _with_implementation(name: str, inner: Way) -> Way:
    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        with _implementation(original_of(model), name):
            return dict(inner(model, inputs))

    return way


def _attention_cases(checked: CheckedModel) -> Iterator[Case]:
    tokens = checked.tokens
    model = original_of(tokens.model)
    own = getattr(tokens.config, "_attn_implementation", None)
    if not hasattr(model, "set_attn_implementation") or own is None:
        raise DoesNotApply("it has no set_attn_implementation()")
    names = ["eager"]
    names += ["sdpa"] if getattr(model, "_supports_sdpa", False) else []
    others = [name for name in names if name != own]
    if not others:
        raise DoesNotApply(f"{own} is its only attention implementation here")
    for name in others:
        try:
            with _implementation(model, name):
                pass
        except (ValueError, ImportError) as error:  # transformers refuses by these
            raise NotPromised(in_one_line(error, _LONGEST_REASON)) from error
        yield plain_case(tokens, _with_implementation(name, tokens.whole), name)
        if tokens.mask:
            way = padded(tokens, 0, PADDING)
            yield plain_case(tokens, _with_implementation(name, way), f"{name}, right padded")


# --- Packed sequences -----------------------------------------------------------------------------


def _packed(tokens: TokenModel) -> Way:
    """All rows one after the other in one row, told apart by positions that start again."""

    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        ids = tokens.ids(inputs)
        rows, total = ids.shape
        places = torch.arange(total, device=ids.device).repeat(rows)[None]
        with computing_nothing():  # rows are in the axis of the tokens
            output = tokens.call(model, inputs, ids.reshape(1, -1), **{tokens.positions: places})
        value = tokens.value_of(output)
        return {tokens.value: value.reshape(rows, total, *value.shape[2:])}

    return way


def _packing_cases(checked: CheckedModel) -> Iterator[Case]:
    tokens = checked.tokens
    model = original_of(tokens.model)
    if tokens.size[0] == 1:
        raise DoesNotApply("the inputs have one row: pass at least 2")
    if not tokens.positions:
        raise DoesNotApply("no position_ids in its signature")
    if tokens.context:
        raise DoesNotApply(f"{', '.join(tokens.context)} cannot be packed")
    if not tokens.counts_from_zero():
        raise NotPromised("the positions of its tokens do not count from 0")
    tokens.require_causal()
    reason = _no_packing(model, tokens)
    if reason:
        raise NotPromised(reason)
    yield plain_case(tokens, _packed(tokens))


_RECURRENT = ("mamba", "linear", "conv", "recurrent", "ssm", "rwkv")


def _no_packing(model: Any, tokens: TokenModel) -> str:
    """Why positions that start again do not separate sequences; empty if they should."""
    if tokens.config is None:
        return "whether positions that start again separate sequences is not documented"
    if getattr(model, "_is_stateful", False):
        return "it has a state, which positions do not separate (_is_stateful)"
    for part in config_parts(tokens.config):
        kinds = {str(one) for one in getattr(part, "layer_types", None) or ()}
        found = sorted(kind for kind in kinds if any(word in kind for word in _RECURRENT))
        if found:
            return f"layers of the kind {found[0]} have a state, which positions do not separate"
    return _no_separation(model, tokens)


def _no_separation(model: Any, tokens: TokenModel) -> str:
    """Why the mask does not separate sequences; empty if it gets the positions that do."""
    module = sys.modules.get(type(model).__module__)
    build = getattr(module, "create_causal_mask", None)
    if build is None:
        return "it does not build its mask with create_causal_mask, which separates sequences"
    given: list[Any] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        given.append(kwargs.get("position_ids"))
        return build(*args, **kwargs)

    setattr(module, build.__name__, watched)
    try:
        with torch.no_grad():
            _packed(tokens)(model, tokens.inputs)
    except Exception as error:  # noqa: BLE001  (positions of another form)
        return f"it does not take packed positions: {in_one_line(error, _LONGEST_REASON)}"
    finally:
        setattr(module, build.__name__, build)
    if any(isinstance(one, torch.Tensor) and one.shape[-1] > tokens.size[1] for one in given):
        return ""
    return "it does not hand its positions on to create_causal_mask, which separates sequences"


GENERATION: tuple[Relation, ...] = tuple(
    Relation(name=name, about=about, family=RelationFamily.SERVING, cases=cases)
    for name, about, cases in (
        ("greedy-generation", "generate() = the best token of repeated calls", _generate_cases),
        ("attention", "all attention implementations agree", _attention_cases),
        ("packing", "sequences packed into one row = separate rows", _packing_cases),
    )
)
