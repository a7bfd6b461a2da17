"""Models that give a value for each token: how they are called, and what they promise.

Everything is read from the signature of `forward`, the configuration and one call. The names are
those of transformers; a model of your own that uses them is checked in the same way.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from paritas.core import transformers_library
from paritas.core.errors import in_one_line
from paritas.core.execution.saved_state import RandomState
from paritas.core.execution.subjects import Inputs
from paritas.core.execution.ways import (
    DoesNotApply,
    NotPromised,
    OtherShape,
    computing,
)
from paritas.core.numerics.contents import map_leaves
from paritas.core.torch_private.dynamo import original_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

_TOKENS = ("decoder_input_ids", "input_ids")
KEYS_AND_VALUES = "past_key_values"
_CACHES = (KEYS_AND_VALUES, "cache_params", "state", "cache")
_KEEPS = ("logits_to_keep", "num_logits_to_keep")
_VALUES = ("logits", "prediction_logits", "last_hidden_state", "hidden_states")
# Arguments that paritas sets itself, so that the caller's own are not needed.
_OURS = ("use_cache", "labels", "return_dict", "output_attentions", "output_hidden_states")
_PLACES = "cache_position"
_LONGEST_REASON = 160
MATRIX = 2


class TokenModel:
    """How one model is called on tokens.

    Attributes:
        model: the model; the ways of a relation get it, or a candidate, as an argument.
        takes: the parameters of its `forward`.
        config: its configuration, or None.
        tokens: the name of the argument with the tokens: the decoder's, if there is one.
        mask: the name of their mask, or "".
        positions: the name of their positions, or "".
        cache: the name of the cache, or "".
        keep: the name of the argument that limits the positions of the result, or "".
        context: the other arguments, which every call gets.
        value: the name of the result that has a value for each token.
        axes: how many axes it has.
        dtype: the dtype that it has natively.
        needs_mask: it cannot be called without a mask.
        is_pooled: the result has a value for each row instead, as a classifier has.
        size: batch and number of tokens.
    """

    def __init__(self, model: Any, inputs: Inputs) -> None:
        """Inspect the model, and call it once or a few times.

        Raises:
            DoesNotApply: it does not map tokens to values.
            Exception: it raises on the caller's own inputs.
        """
        self.model = model
        self._given = inputs
        original = original_of(model)
        self.config: Any = getattr(original, "config", None)
        self.takes = _all_parameters(original)
        by_name = _by_name(self.takes, inputs)
        self.tokens = self._find_tokens(by_name)
        decodes = self.tokens.startswith("decoder_")
        prefix = "decoder_" if decodes else ""
        self.mask = (
            "" if _warns_of_mask(original) else self._name_if_taken(f"{prefix}attention_mask")
        )
        self.positions = self._name_if_taken(f"{prefix}position_ids")
        self.cache = next((name for name in _CACHES if name in self.takes), "")
        self.keep = next((name for name in _KEEPS if name in self.takes), "")
        self.needs_mask = False
        ids = self._without_padding(by_name, by_name[self.tokens])
        self.size: tuple[int, int] = (ids.shape[0], ids.shape[1])
        self.context, ids = self._find_context(by_name, ids)
        self.inputs = Inputs(kwargs={**self.context, self.tokens: ids})
        self.is_pooled = False
        self.value, value_tensor = self._find_value()
        self.axes, self.dtype = value_tensor.dim(), value_tensor.dtype

    # --- Reading the signature and the inputs ---

    def _name_if_taken(self, name: str) -> str:
        return name if name in self.takes else ""

    def _find_tokens(self, arguments: dict[str, Any]) -> str:
        for name in _TOKENS:
            if name in arguments and _is_ids(arguments[name]):
                return name
        # A model of one's own may use any name.
        ids = [name for name, value in arguments.items() if _is_ids(value)]
        token_names = [name for name in ids if "mask" not in name and "position" not in name]
        if self.config is None and len(token_names) == 1:
            return token_names[0]
        raise DoesNotApply("no argument of shape [batch, tokens] with token ids")

    def _without_padding(self, arguments: dict[str, Any], ids: Tensor) -> Tensor:
        """The tokens, with others in place of masked ones: padding is a relation of its own."""
        mask = arguments.get(self.mask)
        if not isinstance(mask, torch.Tensor) or bool((mask != 0).all()):
            return ids
        is_unmasked = mask != 0
        if mask.shape != ids.shape or not bool(is_unmasked.any()):
            raise DoesNotApply(f"{self.mask} masks some tokens: pass inputs without padding")
        others = ids[is_unmasked].repeat(1 + ids.numel() // int(is_unmasked.sum()))
        return torch.where(is_unmasked, ids, others[: ids.numel()].view(ids.shape))

    @property
    def has_encoder(self) -> bool:
        """Whether the tokens are a decoder's, beside an encoder's inputs."""
        return self.tokens.startswith("decoder_")

    def _find_context(
        self, arguments: dict[str, Any], ids: Tensor
    ) -> tuple[dict[str, Any], Tensor]:
        """The arguments beside the tokens; of a model for text and images, the text alone."""
        ours = {*_OURS, *_KEEPS, self.tokens, self.mask, self.positions, self.cache}
        rest = {name: value for name, value in arguments.items() if name not in ours}
        if not rest or self.has_encoder:
            return rest, ids
        plain = self._without_placeholders(ids)
        needed = {n for n, p in self.takes.items() if p.default is p.empty and n in rest}
        alone = {name: rest[name] for name in needed}
        try:
            self._try(alone, plain)
        except Exception as error:
            self._require_callable()
            reason = in_one_line(error, _LONGEST_REASON)
            raise DoesNotApply(
                f"it needs {', '.join(sorted(rest))} beside its tokens: without them, {reason}"
            ) from error
        return alone, plain

    def _without_placeholders(self, ids: Tensor) -> Tensor:
        """The tokens without those that stand for images or sound."""
        special = set(special_tokens(self.config))
        usual = [token for token in ids.unique().tolist() if token not in special]
        if not usual:
            return ids
        flat = [
            token if token not in special else usual[position % len(usual)]
            for position, token in enumerate(ids.flatten().tolist())
        ]
        return torch.tensor(flat, dtype=ids.dtype, device=ids.device).view(ids.shape)

    def _try(self, context: Mapping[str, Any], ids: Tensor, **more: Any) -> Any:
        state = RandomState.now()
        try:
            keywords = {**self._mask_of_ones(ids, more), **more}
            with torch.no_grad():
                return self.model(**_copy_context(context), **{self.tokens: ids}, **keywords)
        finally:
            state.restore()

    def _require_callable(self) -> None:
        """Raise what the model raises on the caller's own inputs: then it fails by itself."""
        state = RandomState.now()
        try:
            with torch.no_grad():
                inputs = self._given.map_leaves(_copy_leaf)
                self.model(*inputs.args, **inputs.kwargs)
        finally:
            state.restore()

    def _find_value(self) -> tuple[str, Tensor]:
        """The result with a value for each token, and its name."""
        ids = self.ids(self.inputs)
        try:
            outputs_by_name = as_named(self._try(self.context, ids, **self._disable_cache()))
        except Exception as error:  # noqa: BLE001  (raised again below)
            reason = in_one_line(error, _LONGEST_REASON)
            self.needs_mask = bool(self.mask)
            try:
                outputs_by_name = as_named(self._try(self.context, ids, **self._disable_cache()))
            except Exception:  # noqa: BLE001  (it is not for want of a mask)
                self._require_callable()
                raise DoesNotApply(f"it cannot be called on its tokens alone: {reason}") from error
        fitting = [
            name
            for name, value in outputs_by_name.items()
            if isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.shape[:MATRIX] == self.size
        ]
        for name in (*_VALUES, *fitting):
            if name in fitting:
                return name, outputs_by_name[name]
        rows = outputs_by_name.get("logits")
        if isinstance(rows, torch.Tensor) and rows.dim() == MATRIX and len(rows) == self.size[0]:
            self.is_pooled = True
            return "logits", rows
        raise DoesNotApply("it returns no value for each token")

    def configs(self) -> list[Any]:
        """Its configuration and those inside it."""
        return list(config_parts(self.config))

    # --- Calling it ---

    def ids(self, inputs: Inputs) -> Tensor:
        """The tokens among the arguments."""
        tokens: Tensor = inputs.kwargs[self.tokens]
        return tokens

    def _disable_cache(self) -> dict[str, Any]:
        return {"use_cache": False} if "use_cache" in self.takes else {}

    def call(
        self,
        model: Any,
        inputs: Inputs,
        ids: Tensor,
        *,
        rows: Any = slice(None),
        **more: Any,
    ) -> Any:
        """Call a model on some tokens, without a cache unless `more` asks for one."""
        context = {name: inputs.kwargs[name] for name in self.context}
        context = self._of_rows(context, rows)
        keywords = {**self._disable_cache(), **self._mask_of_ones(ids, more), **more}
        return model(**context, **{self.tokens: ids}, **keywords)

    def _mask_of_ones(self, ids: Tensor, more: Mapping[str, Any]) -> dict[str, Tensor]:
        """A mask of all tokens, in the cache and here, for a model that cannot do without."""
        if not self.needs_mask:
            return {}
        length = getattr(more.get(self.cache), "get_seq_length", None)
        past = 0 if length is None else int(length())
        return {self.mask: ids.new_ones(ids.shape[0], past + ids.shape[1])}

    def _of_rows(self, context: dict[str, Any], rows: Any) -> dict[str, Any]:
        if isinstance(rows, slice) and rows == slice(None):
            return context

        def select(leaf: Any) -> Any:
            is_batched = isinstance(leaf, torch.Tensor) and leaf.dim() > 0
            return leaf[rows] if is_batched and leaf.shape[0] == self.size[0] else leaf

        rows_of_context: dict[str, Any] = map_leaves(context, select)
        return rows_of_context

    def value_of(self, output: Any) -> Tensor:
        """The value for each token.

        Raises:
            OtherShape: it has another number of axes than in the plain call.
        """
        value: Tensor = as_named(output)[self.value]
        if value.dim() != self.axes:
            shape = list(value.shape)
            raise OtherShape(
                f"a call gave {self.value} of shape {shape}, which has {value.dim()} axes; the "
                f"plain call gives {self.axes}"
            )
        return value

    def whole(self, model: Any, inputs: Inputs) -> dict[str, Tensor]:
        """The plain way: all tokens in one call, without a cache."""
        return {self.value: self.value_of(self.call(model, inputs, self.ids(inputs)))}

    def counts_from_zero(self) -> bool:
        """Whether positions can be given, and the first token's is 0 unless they are.

        Some models count from another number, or have more than one position for each token.
        """
        if not self.positions:
            return False
        ids = self.ids(self.inputs)
        places = torch.arange(self.size[1], device=ids.device)[None]
        position_keywords = {**self._disable_cache(), **self.positions_of(places, self.size[0])}
        try:
            plain, explicit = (
                self.value_of(self._try(self.context, ids, **more))
                for more in (self._disable_cache(), position_keywords)
            )
        except Exception:  # noqa: BLE001  (positions of another form; nothing is claimed)
            return False
        return torch.equal(plain, explicit)

    # --- The cache ---

    def require_cache(self) -> None:
        """Raise `DoesNotApply` or `NotPromised` unless it continues from a cache."""
        if not self.cache or "use_cache" not in self.takes:
            raise DoesNotApply("no cache in its signature")
        self.require_causal()
        if self.first_cache() is None:
            reason = "it returns no cache, though use_cache=True"
            if self._has_place_for_cache():
                raise RuntimeError(reason)
            raise DoesNotApply(reason)

    def _has_place_for_cache(self) -> bool:
        """Whether the class of its result has a place for keys and values, and it can generate."""
        can = getattr(original_of(self.model), "can_generate", None)
        if self.cache != KEYS_AND_VALUES or not callable(can) or not can():
            return False
        ids = self.ids(self.inputs)[:, :1]
        return hasattr(self._try(self.context, ids, use_cache=True), self.cache)

    def first_cache(self) -> Any:
        """A new cache with the first token in it; None if the model returns none."""
        empty_cache = self.new_cache()
        cache_keywords = {} if empty_cache is None else {self.cache: empty_cache}
        ids = self.ids(self.inputs)[:, :1]
        return self.cache_of(self._try(self.context, ids, use_cache=True, **cache_keywords))

    def new_cache(self) -> Any:
        """What the first call gets as its cache; None if the model makes it itself."""
        return self._make_cache() if self._make_cache is not None else None

    @functools.cached_property
    def _make_cache(self) -> Callable[[], Any] | None:
        """What makes a cache if a call without one returns none, or one of an old form.

        Before transformers 5, some models return tuples unless they get an object, and hybrid ones
        return nothing unless they get the object that `generate` prepares.
        """
        if "use_cache" not in self.takes:
            return None
        original = original_of(self.model)
        has_static_kind = bool(transformers_library.own_static_kind(self.config))
        if has_static_kind and getattr(original, "_supports_static_cache", False):
            # The model's own would have no room for more tokens than those of the first call.
            return lambda: static_cache(self, self.model, 2 * self.size[1])
        ids = self.ids(self.inputs)[:, :1]
        returned_cache = self.cache_of(self._try(self.context, ids, use_cache=True))
        growing = transformers_library.loaded_dynamic_cache()
        if isinstance(returned_cache, tuple) and growing is not None and not self.has_encoder:
            return growing if getattr(original, "_supports_cache_class", False) else None
        prepare = getattr(original, "prepare_inputs_for_generation", None)
        if returned_cache is not None or prepare is None or self.has_encoder:
            return None

        def prepare_inputs() -> Any:
            places = torch.arange(ids.shape[1], device=ids.device)
            return prepare(ids, use_cache=True, cache_position=places).get(self.cache)

        try:
            return prepare_inputs if prepare_inputs() is not None else None
        except Exception:  # noqa: BLE001  (it prepares none: the relation says that there is none)
            return None

    def places_in_cache(self, start: int, stop: int, *, cache: Any) -> dict[str, Tensor]:
        """The argument with the places of these tokens in a cache; empty if it needs none.

        A model that derives them from its keys and values needs none; before transformers 5.3, one
        with a state cannot.
        """
        keeps_state = self.cache != KEYS_AND_VALUES or self._is_prepared
        if cache is None or not keeps_state or _PLACES not in self.takes:
            return {}
        device = self.ids(self.inputs).device
        return {_PLACES: torch.arange(start, stop, device=device)}

    @property
    def _is_prepared(self) -> bool:
        return self._make_cache is not None and not isinstance(self._make_cache, type)

    def cache_of(self, output: Any) -> Any:
        """The cache in an output, or None."""
        return as_named(output).get(self.cache)

    def require_causal(self) -> None:
        """Raise `NotPromised` unless a token's value may depend on earlier tokens only."""
        flag = non_causal_flag(self.config, self.model)
        if flag:
            raise NotPromised(f"its tokens see later ones: {flag}")

    def positions_of(self, places: Tensor, rows: int) -> dict[str, Tensor]:
        """The argument with these positions for all rows; empty if it takes none."""
        return {self.positions: places.expand(rows, -1)} if self.positions else {}

    def continue_with(
        self, model: Any, inputs: Inputs, span: tuple[int, int], cache: Any, **more: Any
    ) -> tuple[Tensor, Any]:
        """Run the tokens of a span after those in the cache; its values, and the new cache."""
        start, stop = span
        cache = self.new_cache() if cache is None else cache
        cache_keywords = {} if cache is None else {self.cache: cache}
        with computing(tokens=slice(start, stop)):
            output = self.call(
                model,
                inputs,
                self.ids(inputs)[:, start:stop],
                use_cache=True,
                **cache_keywords,
                **self.places_in_cache(start, stop, cache=cache),
                **more,
            )
        returned_cache = self.cache_of(output)
        return self.value_of(output), cache if returned_cache is None else returned_cache


# --- Reading what others wrote --------------------------------------------------------------------


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    function = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise DoesNotApply(f"its signature cannot be read: {error}") from error


def _all_parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of `forward`, and those that it hands on to the model inside by **kwargs."""
    parameters = _parameters(model)
    # A model for text and images hands them on to its language model.
    inner = (getattr(model, name, None) for name in ("base_model", "language_model"))
    inside = next(
        (
            inner_model
            for inner_model in inner
            if inner_model is not None and inner_model is not model
        ),
        None,
    )
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not hands_on or inside is None:
        return parameters
    known_names = ("use_cache", *_CACHES, "attention_mask", "position_ids")
    more = {
        name: inner_parameter
        for name, inner_parameter in _all_parameters(inside).items()
        if name in known_names
    }
    return {**more, **parameters}


def _by_name(takes: Mapping[str, inspect.Parameter], inputs: Inputs) -> dict[str, Any]:
    if not inputs.args:
        return dict(inputs.kwargs)
    places = [
        name
        for name, parameter in takes.items()
        if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
    ]
    if len(places) < len(inputs.args):
        raise DoesNotApply("its positional inputs have no names in its signature")
    return {**dict(zip(places, inputs.args, strict=False)), **inputs.kwargs}


def _is_ids(value: Any) -> bool:
    is_matrix = isinstance(value, torch.Tensor) and value.dim() == MATRIX
    return is_matrix and value.dtype in {torch.int64, torch.int32} and value.shape[1] > 1


def _copy_context(context: Mapping[str, Any]) -> dict[str, Any]:
    copies: dict[str, Any] = map_leaves(dict(context), _copy_leaf)
    return copies


def _copy_leaf(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def as_named(output: Any) -> dict[str, Any]:
    """The parts of a result by name."""
    if isinstance(output, torch.Tensor):
        return {"output": output}
    if isinstance(output, Mapping):
        return {str(name): value for name, value in output.items()}
    if hasattr(output, "_asdict"):
        return dict(output._asdict())
    if isinstance(output, list | tuple):
        return {f"output[{position}]": value for position, value in enumerate(output)}
    return dict(vars(output)) if hasattr(output, "__dict__") else {}


def special_tokens(config: Any) -> Iterator[int]:
    """The token ids that a configuration gives a meaning."""
    for part in config_parts(config):
        for name, value in vars(part).items():
            if not name.endswith(("token_id", "token_index", "token_ids")):
                continue
            for token in value if isinstance(value, list | tuple) else [value]:
                if isinstance(token, int) and not isinstance(token, bool):
                    yield token


def config_parts(config: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    if config is None or not hasattr(config, "__dict__"):
        return
    yield config
    for name, value in vars(config).items():
        is_config = name.endswith("_config") or hasattr(value, "model_type")
        if is_config and hasattr(value, "__dict__") and not isinstance(value, type):
            yield from config_parts(value)


def non_causal_flag(config: Any, model: Any) -> str:
    """The setting that says that tokens see later tokens; empty if there is none."""
    if config is None:
        return ""
    config_values = vars(config)
    text = getattr(config, "text_config", None)
    layers = [config_values, *([vars(text)] if hasattr(text, "__dict__") else [])]
    for settings in layers:
        if settings.get("use_bidirectional_attention"):
            return f"use_bidirectional_attention={settings['use_bidirectional_attention']!r}"
        for name in ("is_causal", "causal"):
            if settings.get(name) is False:
                return f"{name}=False"
    is_pair = bool(config_values.get("is_encoder_decoder"))
    if not is_pair and config_values.get("is_decoder") is False and _reads_is_decoder(model):
        return "is_decoder=False"
    can_generate = getattr(original_of(model), "can_generate", None)
    if callable(can_generate) and not can_generate() and not _is_base_of_decoder(model):
        return "its class cannot generate"
    return ""


# A warning of the model that it does not use its mask.
_UNUSED_MASK = re.compile(
    r"warn\w*\(\s*f?[\"'][^\"'\n]*attention_mask[^\"'\n]*\b(unused|not used)\b"
)


def _warns_of_mask(model: Any) -> bool:
    """Whether a model takes a mask only to say that it does not use it."""
    return bool(_UNUSED_MASK.search(_source_of(model) or ""))


def _reads_is_decoder(model: Any) -> bool:
    """Whether the setting has a meaning: before transformers 5, every configuration has it."""
    source = _source_of(original_of(model))
    return source is None or "config.is_decoder" in source


def _source_of(model: Any) -> str | None:
    """The source of the module that defines the class of a model; None if there is none."""
    module = sys.modules.get(type(model).__module__)
    try:
        return None if module is None else inspect.getsource(module)
    except (OSError, TypeError):
        return None


def _is_base_of_decoder(model: Any) -> bool:
    """Whether a model without a head has a cache, as the base of a decoder has."""
    takes = _all_parameters(original_of(model))
    return any(name in takes for name in _CACHES) and "use_cache" in takes


def spans(sizes: Sequence[int], total: int) -> list[tuple[int, int]]:
    """The first and last token of chunks of these sizes; the last size repeats."""
    bounds, start, size_index = [], 0, 0
    while start < total:
        size = sizes[min(size_index, len(sizes) - 1)]
        bounds.append((start, min(start + size, total)))
        start, size_index = start + size, size_index + 1
    return bounds


def has_cache(tokens: TokenModel) -> bool:
    """Whether a model promises to continue from a cache."""
    try:
        tokens.require_cache()
    except Exception:  # noqa: BLE001  (what a cache raises is reported by cached-decoding)
        return False
    return True


def pad_token(config: Any) -> int:
    """The token for padding; 0 if the configuration has none."""
    for part in config_parts(config):
        token_id = getattr(part, "pad_token_id", None)
        if isinstance(token_id, int) and token_id >= 0:
            return token_id
    return 0


def static_cache(tokens: TokenModel, model: Any, length: int, **how: Any) -> Any:
    """A static cache for the rows of the inputs, of this many tokens each."""
    weight = next(
        parameter for parameter in original_of(model).parameters() if parameter.is_floating_point()
    )
    return transformers_library.static_cache(tokens.config, weight, (tokens.size[0], length), **how)
