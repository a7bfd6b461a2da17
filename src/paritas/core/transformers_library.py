"""The only door to Hugging Face's transformers: the names of the library that paritas uses.

A new release that moves or renames something is a change of this file. Models are also recognised
here, by the methods of the library that they have: a model of the user's own may have them, too.
Nothing here imports torch or transformers until it is called.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import logging
import os
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from paritas.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType

LIBRARY = "transformers"
# The library reads these on its import: nothing in paritas uses the network.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
# Modules of the library that take long to import.
SLOW_MODULES = (
    "transformers.generation.utils",
    "transformers.modeling_layers",
    "transformers.modeling_outputs",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.processing_utils",
)


def import_transformers() -> ModuleType:
    """Import the library, offline.

    Raises:
        UsageError: it is not installed, or cannot be imported.
    """
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module(LIBRARY)
    except ImportError as error:
        raise UsageError(
            f"models named hf:... need transformers, which cannot be imported ({error}): "
            "pip install 'paritas[transformers]'"
        ) from error


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Hide what the library logs about attempts."""
    logger = logging.getLogger(LIBRARY)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


# --- Models ---------------------------------------------------------------------------------------


def is_pretrained_model(model: Any) -> bool:
    """Whether a model has the methods of the library's base class."""
    return hasattr(model, "_from_config")


def is_from_library(model: Any) -> bool:
    """Whether the class of a model, or one that it derives from, is the library's."""
    return any(kind.__module__.startswith(f"{LIBRARY}.") for kind in type(model).__mro__)


def save_and_load(model: Any) -> Any:
    """The model, saved as files (of safetensors) and loaded from them."""
    attention = attention_implementation(model.config)
    how = {} if attention is None else {"attn_implementation": attention}
    dtype = "dtype" if hasattr(model.config, "dtype") else "torch_dtype"
    # Both show their progress.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder, **{dtype: model.dtype}, **how)
    return loaded.to(model.device)


def arguments_without_cache(model: Any, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The keyword arguments of the same call of a model, but without a cache that it would fill.

    None if they are the same, or if the caller passes a cache.
    """
    if (
        not is_pretrained_model(model)
        or "use_cache" not in inspect.signature(model.forward).parameters
    ):
        return None
    if kwargs.get("use_cache") is False or kwargs.get("past_key_values") is not None:
        return None
    return {**kwargs, "use_cache": False}


# --- Attention ------------------------------------------------------------------------------------


def attention_implementation(config: Any) -> Any:
    """The attention implementation of a configuration; None if it has none."""
    return getattr(config, "_attn_implementation", None)


def can_switch_attention(model: Any) -> bool:
    """Whether a built model takes another attention implementation: since transformers 4.54."""
    return hasattr(model, "set_attn_implementation")


def set_attention(model: Any, implementation: str) -> None:
    """Switch a model to another attention implementation."""
    model.set_attn_implementation(implementation)


def build_with_attention(cls: Any, config: Any, implementation: str) -> Any:
    """A new model with an attention implementation, for releases that choose it only here."""
    return cls._from_config(config, attn_implementation=implementation)


# --- Generation -----------------------------------------------------------------------------------

_GENERATION = "transformers.generation"
_RUN_BATCH = "continuous_batching_context_manager"


def generation_settings(**settings: Any) -> Any:
    """Settings of `generate`."""
    return import_transformers().GenerationConfig(**settings)


def has_generation_setting(name: str) -> bool:
    """Whether this release knows a setting of `generate`."""
    return hasattr(generation_settings(), name)


def overrides_generation(model: Any, method: str) -> bool:
    """Whether the class of a model has a method of generation of its own."""
    function = getattr(type(model), method, None)
    return function is not None and function.__module__ != f"{_GENERATION}.utils"


def has_continuous_batching(model: Any) -> bool:
    """Whether this release can run a batch that requests join and leave."""
    return hasattr(model, _RUN_BATCH)


def run_continuous_batch(model: Any, **settings: Any) -> Any:
    """The context of a running batch."""
    return getattr(model, _RUN_BATCH)(**settings)


def continuous_batch_settings(**settings: Any) -> Any:
    """Settings of a running batch."""
    return importlib.import_module(_GENERATION).ContinuousBatchingConfig(**settings)


# --- Caches ---------------------------------------------------------------------------------------

_CACHES = "transformers.cache_utils"
# What the static cache of a model with sliding layers was called before transformers 4.56.
_STATIC_KINDS = {"hybrid": "HybridCache", "hybrid_chunked": "HybridChunkedCache"}
_CHUNKED = "attention_chunk_size"
_PLAIN_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer"}


def loaded_dynamic_cache() -> Any:
    """The class of caches that grow; None if the library has not been imported."""
    return getattr(sys.modules.get(LIBRARY), "DynamicCache", None)


def has_offloading() -> bool:
    """Whether layers of a cache can wait in the memory of the CPU: since transformers 4.56."""
    return "offloading" in inspect.signature(import_transformers().DynamicCache).parameters


def offloaded_cache(config: Any) -> Any:
    """A cache that grows, whose layers wait in the memory of the CPU until they are needed."""
    return import_transformers().DynamicCache(config=text_config(config), offloading=True)


def keeps_states(cache: Any) -> bool:
    """Whether a layer of a cache of transformers 5 keeps a state of a convolution or recurrence."""
    layers = getattr(cache, "layers", None)
    names = ("conv_states", "recurrent_states")
    return isinstance(layers, list) and any(
        hasattr(layer, name) for layer in layers for name in names
    )


def own_static_kind(config: Any) -> str:
    """The kind of static cache that a configuration asks for; empty if it asks for none."""
    kind = getattr(text_config(config), "cache_implementation", None)
    return kind if kind in _STATIC_KINDS else ""


def refuses_static_cache(model: Any) -> str:
    """The flag by which the class of a model refuses static caches; empty if it takes them."""
    flags = ("_can_compile_fullgraph", "_supports_static_cache")
    flag = next((name for name in flags if hasattr(model, name)), flags[0])
    return "" if getattr(model, flag, False) else flag


def static_cache(config: Any, weight: Any, size: tuple[int, int], **how: Any) -> Any:
    """A static cache for rows of tokens.

    Args:
        config: the model's configuration.
        weight: a floating parameter of the model.
        size: the number of rows, and the most tokens of each.
        how: further settings of the cache.
    """
    config = text_config(config)
    kind = own_static_kind(config)
    kind = "hybrid_chunked" if kind and getattr(config, _CHUNKED, None) else kind
    library = importlib.import_module(_CACHES)
    build = getattr(library, _STATIC_KINDS.get(kind, "StaticCache"))
    # Before transformers 4.56 it also needs the size and dtype of its values.
    takes = inspect.signature(build).parameters
    rows, tokens = size
    rows_name = "max_batch_size" if "max_batch_size" in takes else "batch_size"
    sizes = {rows_name: rows, "device": weight.device, "dtype": weight.dtype}
    accepted_sizes = {name: value for name, value in sizes.items() if name in takes}
    return build(config=config, max_cache_len=tokens, **accepted_sizes, **how)


def lossless_quantised_cache(own_cache: Any, unquantised: int) -> Callable[[], Any] | None:
    """What makes a quantised cache in which nothing is lost, or None if it is not supported.

    What a quantiser loses is its own affair. When a layer quantises what, and in which order it
    puts old and new tokens together, is the cache's: with a quantiser that keeps every value, the
    cache must give what was put in.

    Args:
        own_cache: the cache that the model makes.
        unquantised: how many of the last tokens the cache leaves as they are.
    """
    library = sys.modules.get(_CACHES)
    quantised = getattr(library, "QuantizedLayer", None)
    layers = getattr(own_cache, "layers", None)
    if library is None or quantised is None or not isinstance(layers, list):
        return None
    if type(own_cache).__module__ != _CACHES:  # of its own kind, for which no other stands in
        return None
    if {type(layer).__name__ for layer in layers} - _PLAIN_LAYERS:
        return None
    keeps_all = {
        "_quantize": lambda self, tensor, axis: tensor,  # noqa: ARG005  (as the library calls it)
        "_dequantize": lambda self, tensor: tensor,  # noqa: ARG005
    }
    lossless = type("LosslessLayer", (quantised,), keeps_all)
    cache = library.Cache
    return lambda: cache(layers=[lossless(residual_length=unquantised) for _ in layers])


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the decoder of text."""
    if hasattr(config, "get_text_config"):
        return config.get_text_config(decoder=True)
    return getattr(config, "text_config", config)


# --- Parallel plans -------------------------------------------------------------------------------


def distributed_config() -> Any:
    """The class of the settings of a parallel plan.

    Raises:
        ImportError: this release ships no plans.
    """
    return importlib.import_module("transformers.distributed.configuration_utils").DistributedConfig


def distributed_mesh() -> Any:
    """The class of the meshes on which a plan is applied."""
    return importlib.import_module("transformers.distributed.utils").TransformersDeviceMesh
