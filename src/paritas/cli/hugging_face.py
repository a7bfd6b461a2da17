"""Models of Hugging Face's transformers by class: small, with random weights, nothing downloaded.

`hf:LlamaForCausalLM`, or `hf:BertModel?num_hidden_layers=3&hidden_size=96`. A class is asked for
its configuration, whose sizes are made small; what the model takes is read off its signature.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qsl

import torch

from paritas.checking.config import Inputs
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = ["build_model", "is_hugging_face"]

PREFIX = "hf:"
_BATCH, _TOKENS, _SAMPLES = 2, 16, 4000
# What configurations call their sizes. Of one name, all models have one size, so that heads, widths
# and groups of a model fit each other.
_SIZES = {
    2: """num_hidden_layers n_layer n_layers num_layers num_decoder_layers encoder_layers
        decoder_layers num_experts_per_tok num_key_value_heads""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads
        decoder_attention_heads num_local_experts num_experts""",
    8: "patch_size",
    16: """head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim q_lora_rank kv_lora_rank
        num_mel_bins num_conv_pos_embeddings max_source_positions""",
    32: "image_size max_target_positions",
    64: "hidden_size n_embd d_model dim embedding_size projection_dim",
    128: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner hidden_dim
        moe_intermediate_size""",
    256: "vocab_size",
    512: "max_position_embeddings n_positions",
}
_SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}


def is_hugging_face(factory: str) -> bool:
    """Whether a factory is named by a class of transformers."""
    return factory.startswith(PREFIX)


def build_model(factory: str) -> tuple[torch.nn.Module, Inputs | None]:
    """Make a small model of a class, and inputs for it.

    Returns:
        The model, and its inputs; None where it is not known how to make them.

    Raises:
        UsageError: transformers is missing, or there is no such class or setting.
    """
    library = _library()
    name, _, query = factory.removeprefix(PREFIX).partition("?")
    cls = _model_class(library, name.removeprefix("transformers."), factory)
    try:
        asked = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise UsageError(f"{factory!r}: settings are written ?name=value&name=value") from error
    config = _small_config(cls.config_class, dict(asked), factory)
    try:
        model: torch.nn.Module = cls(config)
    except Exception as error:
        raise UsageError(
            f"{factory!r}: {name} does not take this small configuration: "
            f"{type(error).__name__}: {error!s:.200}; give other sizes as ?name=value"
        ) from error
    return model, _inputs(model)


def _library() -> ModuleType:
    # Before it is imported, which is when it reads them: nothing here goes to the network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(
            f"models named hf:... need transformers, which cannot be imported ({error}): "
            "pip install 'paritas[transformers]'"
        ) from error


def _model_class(library: ModuleType, name: str, factory: str) -> Any:
    found = getattr(library, name, None)
    if found is None:
        near = difflib.get_close_matches(name, dir(library), n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise UsageError(f"{factory!r}: transformers has no {name!r}{hint}")
    is_module = isinstance(found, type) and issubclass(found, torch.nn.Module)
    if not is_module or getattr(found, "config_class", None) is None:
        raise UsageError(
            f"{factory!r}: {name} is no model class with a configuration of its own; name one "
            "such as LlamaForCausalLM"
        )
    return found


def _small_config(cls: Any, asked: dict[str, str], factory: str = "") -> Any:
    """A configuration with small sizes wherever it has one of a known name."""
    usual = cls()
    known = {*inspect.signature(cls.__init__).parameters, *vars(usual)}
    given: dict[str, Any] = {name: size for name, size in _SMALL.items() if name in known}
    heads = getattr(usual, "num_attention_heads", None)
    if "num_key_value_heads" in given and usual.num_key_value_heads == heads is not None:
        given["num_key_value_heads"] = _SMALL["num_attention_heads"]  # not shared between heads
    for name, part in (getattr(cls, "sub_configs", None) or {}).items():
        if name in known and hasattr(part, "model_type"):
            given[name] = _small_config(part, {})
    vocabulary = given.get("vocab_size", 0)
    for name, value in vars(usual).items():
        if name.endswith("_token_id") and isinstance(value, int) and value >= vocabulary > 0:
            given[name] = vocabulary - 1
    for name, text in asked.items():
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"{factory!r}: {cls.__name__} has no setting {name!r}{hint}")
        given[name] = _value(text)
    if "use_cache" in known:
        given.setdefault("use_cache", False)  # a cache is an object, whose inside is not compared
    return cls(**given)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _inputs(model: torch.nn.Module) -> Inputs | None:
    """What its signature asks for, drawn at random; None where that is not known."""
    config: Any = model.config
    main = str(getattr(model, "main_input_name", "input_ids"))
    takes = inspect.signature(cast("Any", model).forward).parameters
    names = {main}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        names.add("decoder_input_ids")
    if hasattr(config, "vision_config") and "pixel_values" in takes:
        names.add("pixel_values")
    makers = {name: _MAKERS[name] for name in sorted(names) if name in _MAKERS and name in takes}
    if names != set(makers):
        return None
    return Inputs(kwargs={name: make(config) for name, make in makers.items()})


def _tokens(config: Any) -> torch.Tensor:
    text = getattr(config, "text_config", config)
    return torch.randint(0, int(text.vocab_size), (_BATCH, _TOKENS))


def _pixels(config: Any) -> torch.Tensor:
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", _SMALL["image_size"])
    height, width = side if isinstance(side, list | tuple) else (side, side)
    return torch.randn(_BATCH, int(getattr(vision, "num_channels", 3)), height, width)


def _features(config: Any) -> torch.Tensor:
    # Two frames of a spectrogram become one position.
    return torch.randn(_BATCH, int(config.num_mel_bins), 2 * int(config.max_source_positions))


_MAKERS: dict[str, Callable[[Any], torch.Tensor]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "pixel_values": _pixels,
    "input_features": _features,
    "input_values": lambda _: torch.randn(_BATCH, _SAMPLES),
}
