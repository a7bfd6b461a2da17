"""Relations of attention: its implementations, and sequences that are packed into one row."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import re
import sys
from typing import TYPE_CHECKING, Any

import torch

from paritas.core import transformers_library
from paritas.core.errors import in_one_line
from paritas.core.execution.saved_state import RandomState
from paritas.core.execution.token_models import TokenModel, config_parts, has_cache
from paritas.core.execution.ways import (
    DoesNotApply,
    NotPromised,
    computing_nothing,
)
from paritas.core.precision.lifting import LiftMode
from paritas.core.torch_private.dynamo import original_of, undo_compile
from paritas.core.torch_private.operators import plain_flex_attention
from paritas.relations.relation import (
    Case,
    CheckedModel,
    Relation,
    RelationFamily,
    make_relations,
    makes_way,
)
from paritas.relations.serving import PADDING, in_chunks, pad_rows, plain_case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.execution.subjects import Inputs
    from paritas.relations.relation import Way

EAGER, SDPA, FLEX = "eager", "sdpa", "flex_attention"
# The packages with the kernels of flash attention, by the name of the implementation.
FLASH = {"flash_attention_3": "flash_attn_interface", "flash_attention_2": "flash_attn"}
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_LONGEST_REASON = 160


# --- Implementations ------------------------------------------------------------------------------


@contextlib.contextmanager
def _implementation(model: Any, name: str) -> Iterator[Any]:
    """The model with another attention implementation."""
    if not transformers_library.can_switch_attention(model):
        yield _rebuilt(model, name)
        return
    before = transformers_library.attention_implementation(model.config)
    transformers_library.set_attention(model, name)
    try:
        yield model
    finally:
        transformers_library.set_attention(model, before)


def _rebuilt(model: Any, name: str) -> Any:
    """A new model of the same weights."""
    state = RandomState.now()
    config = copy.deepcopy(model.config)
    try:
        rebuilt_model = transformers_library.build_with_attention(type(model), config, name)
    finally:
        state.restore()
    modules = dict(model.named_modules())
    for path, module in rebuilt_model.named_modules():
        source_module = modules[path]
        module._parameters.update(source_module._parameters)  # noqa: SLF001
        module._buffers.update(source_module._buffers)  # noqa: SLF001
        module.training = source_module.training
    return rebuilt_model


@makes_way
def _with_implementation(
    model: Any, inputs: Inputs, name: str, inner: Way, *, compiles: bool = False
) -> dict[str, Tensor]:
    """A way with another implementation.

    Flex attention is compiled unless this is switched off: torch then computes the same scores and
    masks by plain operators, which also exist in float64. Whether its kernels are right is asked
    by a relation of its own.
    """
    original = original_of(model)
    is_compiled = undo_compile(model) is not model
    wide = next(original.parameters()).dtype is torch.float64
    plain = name == FLEX and not is_compiled and (wide or not compiles)
    how = plain_flex_attention(LiftMode) if plain else contextlib.nullcontext()
    with _implementation(original, name) as other, how:
        return dict(inner(model if other is original else other, inputs))


def _own_implementation(tokens: TokenModel) -> str:
    implementation = transformers_library.attention_implementation(tokens.config)
    if implementation is None or not transformers_library.is_pretrained_model(
        original_of(tokens.model)
    ):
        raise DoesNotApply("not a model of transformers with attention implementations")
    return str(implementation)


def _explain_refusal(model: Any, name: str) -> str:
    """Why a model does not run with an implementation; empty if it does."""
    try:
        with _implementation(model, name) as other:
            implementation = transformers_library.attention_implementation(other.config)
    except (ValueError, ImportError) as error:  # transformers refuses by these
        return in_one_line(error, _LONGEST_REASON)
    return (
        ""
        if implementation == name
        else f"{name} cannot be chosen for it: it stays at {implementation}"
    )


def _no_flash(model: Any) -> str:
    """Why flash attention cannot run here; empty if it can."""
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    if weight.device.type == "cpu":
        return "flash attention needs a GPU"
    if not any(importlib.util.find_spec(package) for package in FLASH.values()):
        return "flash attention needs the package flash_attn or flash_attn_interface"
    if weight.dtype not in _FLASH_DTYPES:
        return f"flash attention needs float16 or bfloat16, and the model has {weight.dtype}"
    return ""


def _implementations(model: Any) -> tuple[list[str], list[str]]:
    """The implementations that the class promises and that exist here; why others do not."""
    names, missing = [EAGER], []
    if getattr(model, "_supports_sdpa", False):
        names.append(SDPA)
    if getattr(model, "_supports_flex_attn", False):
        names.append(FLEX)
    if getattr(model, "_supports_flash_attn", getattr(model, "_supports_flash_attn_2", False)):
        reason = _no_flash(model)
        if reason:
            missing.append(reason)
        else:
            names += [
                name
                for name, package_name in FLASH.items()
                if importlib.util.find_spec(package_name)
            ]
    return names, missing


def _attention_cases(checked: CheckedModel) -> Iterator[Case]:
    tokens = checked.tokens
    model = original_of(tokens.model)
    own_implementation = _own_implementation(tokens)
    names, missing = _implementations(model)
    refused = []
    for name in names:
        if name == own_implementation:
            continue
        reason = _explain_refusal(model, name)
        if reason:
            refused.append(reason)
            continue
        ways: dict[str, Way] = {name: tokens.whole}
        if tokens.mask:
            ways[f"{name}, right padded"] = pad_rows(tokens, 0, PADDING)
        if has_cache(tokens):
            ways[f"{name}, after a prompt"] = in_chunks(tokens, [tokens.size[1] // 2, 1])
        for label, way in ways.items():
            yield plain_case(tokens, _with_implementation(name, way), label)
    if refused:
        raise NotPromised("; ".join(refused))
    if names == [own_implementation]:
        missing.insert(0, f"{own_implementation} is its only attention implementation here")
    if missing:
        raise DoesNotApply("; ".join(missing))


def _flex_kernel_cases(checked: CheckedModel) -> Iterator[Case]:
    """Flex attention as torch compiles it; in float64, for which it has no kernels, plainly."""
    tokens = checked.tokens
    model = original_of(tokens.model)
    _own_implementation(tokens)
    if not getattr(model, "_supports_flex_attn", False):
        raise DoesNotApply("its class does not support it (_supports_flex_attn)")
    reason = _explain_refusal(model, FLEX)
    if reason:
        raise NotPromised(reason)
    ways: dict[str, Way] = {"whole": tokens.whole}
    if tokens.mask:
        ways["right padded"] = pad_rows(tokens, 0, PADDING)
    for label, way in ways.items():
        yield plain_case(tokens, _with_implementation(FLEX, way, compiles=True), label)


# --- Packed sequences -----------------------------------------------------------------------------


@makes_way
def _pack_rows(
    model: Any, inputs: Inputs, tokens: TokenModel, *, with_mask: bool = False
) -> dict[str, Tensor]:
    """All rows one after the other in one row, told apart by positions that start again.

    With a mask, it is of four axes and says of each pair of tokens whether one sees the other.
    """
    ids = tokens.ids(inputs)
    rows, total = ids.shape
    places = torch.arange(total, device=ids.device).repeat(rows)[None]
    call_options = {tokens.positions: places}
    if with_mask:
        call_options[tokens.mask] = _block_mask(original_of(model), ids)
    with computing_nothing():  # rows are in the axis of the tokens
        output = tokens.call(model, inputs, ids.reshape(1, -1), **call_options)
    value = tokens.value_of(output)
    return {tokens.value: value.reshape(rows, total, *value.shape[2:])}


def _block_mask(model: Any, ids: Tensor) -> Tensor:
    """What is added to the scores so that a token sees the earlier tokens of its own row only."""
    rows, total = ids.shape
    row = torch.arange(rows, device=ids.device).repeat_interleave(total)
    is_visible = (row[:, None] == row[None]).tril()
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    hidden = torch.full(is_visible.shape, torch.finfo(weight.dtype).min, dtype=weight.dtype)
    return hidden.to(ids.device).masked_fill(is_visible, 0.0)[None, None]


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
    reason = _keeps_a_state(model, tokens)
    if reason:
        raise NotPromised(reason)
    reasons = {
        "positions": _no_separation(model, tokens),
        "block mask": _no_block_mask(model, tokens),
    }
    for label, reason in reasons.items():
        if not reason:
            yield plain_case(tokens, _pack_rows(tokens, with_mask=label == "block mask"), label)
    refused = [reason for reason in reasons.values() if reason]
    if refused:
        raise NotPromised("; ".join(dict.fromkeys(refused)))


_RECURRENT = ("mamba", "linear", "conv", "recurrent", "ssm", "rwkv")


def _keeps_a_state(model: Any, tokens: TokenModel) -> str:
    """What neither positions nor a mask separate in a model; empty if there is nothing."""
    if getattr(model, "_is_stateful", False):
        return "it has a state, which positions do not separate (_is_stateful)"
    if has_cache(tokens) and transformers_library.keeps_states(tokens.first_cache()):
        return "layers of its cache have a state, which positions do not separate"
    for part in config_parts(tokens.config):
        kinds = {str(layer_kind) for layer_kind in getattr(part, "layer_types", None) or ()}
        recurrent_kinds = sorted(kind for kind in kinds if any(word in kind for word in _RECURRENT))
        if recurrent_kinds:
            return (
                f"layers of the kind {recurrent_kinds[0]} have a state, which positions "
                "do not separate"
            )
    return ""


_BUILDER = "create_causal_mask"
_NO_BUILDER = f"it does not build its mask with {_BUILDER}, which separates sequences"


def _no_separation(model: Any, tokens: TokenModel) -> str:
    """Why positions that start again do not separate sequences; empty if the mask gets them."""
    if tokens.config is None:
        return "whether positions that start again separate sequences is not documented"
    try:
        masks_built = _masks_built(model, lambda: _pack_rows(tokens)(model, tokens.inputs))
    except Exception as error:  # noqa: BLE001  (positions of another form)
        return f"it does not take packed positions: {in_one_line(error, _LONGEST_REASON)}"
    if _BUILDER not in masks_built:
        return _NO_BUILDER
    places = [call.get("position_ids") for calls in masks_built.values() for call in calls]
    if any(
        isinstance(position, torch.Tensor) and position.shape[-1] > tokens.size[1]
        for position in places
    ):
        return ""
    return f"it does not hand its positions on to {_BUILDER}, which separates sequences"


def _no_block_mask(model: Any, tokens: TokenModel) -> str:
    """Why a mask of one's own is not promised; empty if it is.

    transformers says that `create_causal_mask` returns a mask of four axes as it is.
    """
    if tokens.config is None or not tokens.mask:
        return "whether it takes a mask of four axes is not documented"
    if transformers_library.attention_implementation(tokens.config) not in {EAGER, SDPA}:
        return "a mask of four axes is for the implementations eager and sdpa"
    try:
        way = _pack_rows(tokens, with_mask=True)
        masks_built = _masks_built(model, lambda: way(model, tokens.inputs))
    except Exception as error:  # noqa: BLE001  (it computes something else from its mask)
        return f"it does not take a mask of four axes: {in_one_line(error, _LONGEST_REASON)}"
    if _BUILDER not in masks_built:
        return _NO_BUILDER
    others = sorted(name for name in masks_built if name != _BUILDER)
    if others:
        return f"a mask of one's own has no window, which its layers have ({others[0]})"
    masks = [mask_kwargs.get("attention_mask") for mask_kwargs in masks_built[_BUILDER]]
    if all(isinstance(mask, torch.Tensor) and mask.dim() == MASK_AXES for mask in masks):
        return ""
    return f"it does not hand its mask on to {_BUILDER}"


MASK_AXES = 4


def _masks_built(model: Any, run: Callable[[], Any]) -> dict[str, list[dict[str, Any]]]:
    """The functions that build masks (`create_..._mask`) which a run calls, with what they get."""
    module = sys.modules.get(type(model).__module__)
    names = [
        function_name
        for function_name in vars(module or object())
        if _BUILDERS.fullmatch(function_name)
    ]
    builders = {name: getattr(module, name) for name in names}
    calls_by_builder: dict[str, list[dict[str, Any]]] = {}

    def watch_builder(name: str) -> Callable[..., Any]:
        def build(*args: Any, **kwargs: Any) -> Any:
            calls_by_builder.setdefault(name, []).append(kwargs)
            return builders[name](*args, **kwargs)

        return build

    for name in builders:
        setattr(module, name, watch_builder(name))
    try:
        with torch.no_grad():
            run()
    finally:
        for name, build in builders.items():
            setattr(module, name, build)
    return calls_by_builder


_BUILDERS = re.compile(r"create_\w*mask\w*")


ATTENTION: tuple[Relation, ...] = (
    *make_relations(
        RelationFamily.SERVING,
        ("attention", "all attention implementations agree", _attention_cases),
        ("packing", "sequences packed into one row = separate rows", _packing_cases),
    ),
    *make_relations(
        RelationFamily.SERVING,
        (
            "flex-kernels",
            "flex attention, compiled = the model's own attention",
            _flex_kernel_cases,
        ),
        on_request=True,
    ),
)
