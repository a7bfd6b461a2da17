"""From names to models: the user's factory, a class of transformers, a candidate."""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import json
import os
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import parse_qsl

import torch

from paritas.candidates.loading import call, model_and_inputs, resolve
from paritas.candidates.names import is_named, make
from paritas.errors import UsageError
from paritas.execution.subjects import Inputs, usable_device
from paritas.numerics.contents import map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


# --- Models of Hugging Face's transformers by class -----------------------------------------------

# `hf:LlamaForCausalLM`, or `hf:BertModel?num_hidden_layers=3&hidden_size=96`. A class is asked for
# its configuration, whose sizes are made small; what the model takes is read off its signature.

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
    library = _import_transformers()
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
    return model, _draw_inputs(model)


def _import_transformers() -> ModuleType:
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
        given[name] = _parse_value(text)
    if "use_cache" in known:
        given.setdefault("use_cache", False)  # a cache is an object, whose inside is not compared
    return cls(**given)


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _draw_inputs(model: torch.nn.Module) -> Inputs | None:
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


def _draw_tokens(config: Any) -> torch.Tensor:
    text = getattr(config, "text_config", config)
    return torch.randint(0, int(text.vocab_size), (_BATCH, _TOKENS))


def _draw_pixels(config: Any) -> torch.Tensor:
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", _SMALL["image_size"])
    height, width = side if isinstance(side, list | tuple) else (side, side)
    return torch.randn(_BATCH, int(getattr(vision, "num_channels", 3)), height, width)


def _draw_features(config: Any) -> torch.Tensor:
    # Two frames of a spectrogram become one position.
    return torch.randn(_BATCH, int(config.num_mel_bins), 2 * int(config.max_source_positions))


_MAKERS: dict[str, Callable[[Any], torch.Tensor]] = {
    "input_ids": _draw_tokens,
    "decoder_input_ids": _draw_tokens,
    "pixel_values": _draw_pixels,
    "input_features": _draw_features,
    "input_values": lambda _: torch.randn(_BATCH, _SAMPLES),
}


# --- A reference, its inputs and a candidate ------------------------------------------------------

SEED = 0


class BuildOptions(Protocol):
    """How a reference is built: those of several commands, by their names."""

    @property
    def inputs(self) -> str | None:
        """The function that makes the inputs."""

    @property
    def dtype(self) -> str | None:
        """Of parameters and inputs; None leaves them as they are built."""

    @property
    def train(self) -> bool:
        """Training mode."""

    @property
    def device(self) -> str | None:
        """Where it runs; None leaves it where it is built."""


class CandidateOptions(Protocol):
    """What a candidate is made by: a name or a function, or else `torch.compile`."""

    @property
    def candidate(self) -> str | None:
        """A name of `paritas.candidates`, or `package.module:function`."""

    @property
    def backend(self) -> str:
        """Of `torch.compile`, as the others are."""

    @property
    def mode(self) -> str | None:
        """See there."""

    @property
    def dynamic(self) -> bool | None:
        """See there."""

    @property
    def fullgraph(self) -> bool:
        """See there."""


def build_reference(factory: str, options: BuildOptions) -> tuple[Any, Any]:
    """The model and its inputs, moved to where and in what they are to run."""
    device = None if options.device is None else usable_device(options.device)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    model, inputs = call_user(factory, options.inputs, SEED)
    if isinstance(model, torch.nn.Module):
        model = model.train(options.train).to(device=device, dtype=dtype)
    return model, map_leaves(inputs, lambda leaf: move_leaf(leaf, device, dtype))


def call_user(factory: str, inputs_spec: str | None, seed: int) -> tuple[Any, Any]:
    """The model and its inputs as the user's functions make them, under a seed."""
    make_inputs = None if inputs_spec is None else resolve(inputs_spec, "--inputs")
    torch.manual_seed(seed)
    model, inputs = _call_factory(factory, model_alone=make_inputs is not None)
    if make_inputs is not None and inputs_spec is not None:
        inputs = call(make_inputs, inputs_spec, "--inputs")
    return model, inputs


def _call_factory(factory: str, *, model_alone: bool) -> tuple[Any, Any]:
    if not is_hugging_face(factory):
        made = call(resolve(factory, "FACTORY"), factory, "FACTORY")
        return model_and_inputs(made, factory, model_alone=model_alone)
    model, inputs = build_model(factory)
    if inputs is None and not model_alone:
        raise UsageError(
            f"FACTORY {factory!r}: what {type(model).__name__} takes is not known here; name a "
            "function that makes it with --inputs module:function"
        )
    return model, inputs


def build_candidate(model: Any, inputs: Any, options: CandidateOptions) -> Callable[..., Any]:
    """The candidate of that name, what the user's function makes, or else `torch.compile`."""
    if options.candidate is not None and is_named(options.candidate):
        return make(options.candidate, model, inputs)
    if options.candidate is not None:
        return _from_function(model, options.candidate)
    _check_backend(options.backend)
    asked = {name: getattr(options, name) for name in ("backend", "mode", "dynamic", "fullgraph")}
    try:
        return torch.compile(model, **asked)
    except Exception as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        raise UsageError(f"torch.compile({shown}) refuses: {error}") from error


def _check_backend(name: str) -> None:
    known = torch.compiler.list_backends(exclude_tags=())
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    usual = torch.compiler.list_backends()
    others = f"and {len(known) - len(usual)} for debugging, such as eager and aot_eager"
    raise UsageError(f"unknown --backend {name!r}; {hint}known are {', '.join(usual)}, {others}")


def _from_function(model: Any, spec: str) -> Callable[..., Any]:
    """Call the user's function with a copy of the model.

    One that changes the model in place would otherwise change the reference with it, and the two
    would agree whatever it did.
    """
    function = resolve(spec, "--candidate")
    try:
        own = copy.deepcopy(model)
    except Exception as error:
        raise UsageError(
            f"the model cannot be copied for --candidate {spec!r}: "
            f"{type(error).__name__}: {error}; call paritas.verify from Python instead"
        ) from error
    candidate: Callable[..., Any] = call(function, spec, "--candidate", own)
    if not callable(candidate) or isinstance(candidate, type):
        raise UsageError(
            f"--candidate {spec!r} returned {candidate!r:.80}, which cannot be called; "
            "return what is to be called in place of the model"
        )
    return candidate


def move_leaf(leaf: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """An input where the model is: floating ones in its dtype, others only on its device."""
    if not isinstance(leaf, torch.Tensor) or (device is None and dtype is None):
        return leaf
    cast = dtype if leaf.is_floating_point() else None
    moved = leaf.detach().to(device=device, dtype=cast)
    return moved.requires_grad_(leaf.requires_grad)
