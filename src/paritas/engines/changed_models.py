"""Changed models: other weights, precisions, settings and layers than the reference has."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paritas.core.execution.token_models import config_parts
from paritas.core.torch_private.dynamo import original_of
from paritas.engines.changes import BLOCKS, Change, Family, Runner
from paritas.engines.looks import Reach

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from paritas.engines.changes import LogitsOf
    from paritas.engines.records import Request

_PLAIN = 1e4  # the usual base of rotary positions
PRECISION = "precision"  # the kind of a cause that only rounds more


# --- Other weights --------------------------------------------------------------------------------


def older_weights(
    runner: Runner, model: Any, older: Mapping[str, Any]
) -> Iterator[Change | Family]:
    """The engine runs, or partly runs, weights that the caller passed."""
    for name, old in older.items():
        words = f"the weights are those of {name}"
        yield Change("stale weights", words, make_model=functools.partial(_like, old))
        yield from _old_cache(runner, name, old)
        yield from _partly_old(model, name, old)
        yield from _update_times(model, name, old)


def _update_times(model: Any, name: str, old: Any) -> Iterator[Family]:
    """What was trained or merged since is added several times, or in part."""
    new_parameters, old_parameters = (
        dict(original_of(model_version).named_parameters()) for model_version in (model, old)
    )
    if new_parameters.keys() != old_parameters.keys():
        return

    def change(times: float) -> Change:
        def make(base: Any) -> Any:
            changed_model = share(base)
            for key, value in list(changed_model.named_parameters()):
                before = old_parameters[key].to(value)
                replace_parameter(changed_model, key, before + times * (value - before))
            return changed_model

        how = "twice" if times == 2 else f"{times:.4g} times"  # noqa: PLR2004
        words = f"what changed since {name} is applied {how}"
        return Change("stale weights", words, make_model=make)

    yield Family(change, 1.0, (2.0, 0.5, 3.0))


def share(model: Any) -> Any:
    """A copy of the modules with the same tensors: cheap, and one of them can be replaced."""
    original = original_of(model)
    tensors = {id(tensor): tensor for tensor in (*original.parameters(), *original.buffers())}
    return copy.deepcopy(original, dict(tensors))


def replace_parameter(model: nn.Module, path: str, value: Tensor) -> None:
    """Put another parameter in one place of a model; tied ones stay tied to each other."""
    before = model.get_parameter(path)
    parameter = nn.Parameter(value.detach(), requires_grad=before.requires_grad)
    for module in model.modules():
        for name, module_parameter in module.named_parameters(recurse=False):
            if module_parameter is before:
                setattr(module, name, parameter)


def _old_cache(runner: Runner, name: str, old: Any) -> Iterator[Change]:
    if not runner.tokens.cache:
        return

    def logits(model: Any, request: Request) -> Tensor | None:
        output = request.record.output[:-1]
        if not output:
            return None
        prompt_logits, cache = runner.prefill(_like(old, model), request.record.prompt)
        rest, _ = runner.decode(model, output, cache)
        return torch.cat([prompt_logits, rest])

    def decoding(model: Any, request: Request) -> Tensor | None:
        output = request.record.output[:-1]
        if not output:
            return None
        prompt_logits, cache = runner.prefill(model, request.record.prompt)
        rest, _ = runner.decode(_like(old, model), output, cache)
        return torch.cat([prompt_logits, rest])

    yield Change("stale weights", f"the cache of the prompt was computed by {name}", logits)
    words = f"the prompt is run right, the output by {name}"
    yield Change("stale weights", words, decoding, reach=Reach.OUTPUT)
    words = f"the prompt's prefix comes from a cache that {name} computed"
    for block in (1, *BLOCKS):
        text = f"{words}, in blocks of {block} tokens" if block > 1 else words
        yield Change("stale weights", text, _old_prefix(runner, old, block))


def _old_prefix(runner: Runner, old: Any, block: int) -> LogitsOf:
    """The prompt's whole blocks are in a cache of older weights; its last token never is."""

    def logits(model: Any, request: Request) -> Tensor | None:
        cached_length = (request.start - 1) // block * block
        if cached_length == 0:
            return None
        prefix_logits, cache = runner.prefill(
            _like(old, model), request.record.prompt[:cached_length]
        )
        rest, _ = runner.decode(model, request.ids[cached_length:-1], cache)
        return torch.cat([prefix_logits, rest])

    return logits


def _like(old: Any, model: Any) -> Any:
    """A copy of older weights in the precision of this run, which may be float64."""
    return copy.deepcopy(original_of(old)).to(_dtype(model))


def _dtype(model: Any) -> torch.dtype:
    dtype: torch.dtype = next(original_of(model).parameters()).dtype
    return dtype


def _partly_old(model: Any, name: str, old: Any) -> Iterator[Change]:
    new_parameters, old_parameters = (
        dict(original_of(model_version).named_parameters()) for model_version in (model, old)
    )
    if new_parameters.keys() != old_parameters.keys():
        return
    stale = [
        key for key in new_parameters if not torch.equal(new_parameters[key], old_parameters[key])
    ]
    for part in _parts(model, stale):

        def make(base: Any, part: str = part) -> Any:
            mixed = share(base)
            for key, value in list(mixed.named_parameters()):
                if key == part or key.startswith(f"{part}."):
                    replace_parameter(mixed, key, old_parameters[key].to(value))
            return mixed

        yield Change("stale weights", f"the weights of {part} are those of {name}", make_model=make)


def _parts(model: Any, changed: list[str]) -> list[str]:
    """The blocks and other parts that have changed parameters; empty if all of it is one part."""
    path, _ = blocks_of(model)
    changed_parts: dict[str, None] = {}
    for key in changed:
        if path and key.startswith(f"{path}."):
            number = key[len(path) + 1 :].partition(".")[0]
            changed_parts[f"{path}.{number}"] = None
        else:
            changed_parts[key.rpartition(".")[0] or key] = None
    return list(changed_parts) if len(changed_parts) > 1 else []


def blocks_of(model: Any) -> tuple[str, nn.ModuleList | None]:
    """The path of the longest list of modules, and the list."""
    lists = [
        (path, module)
        for path, module in original_of(model).named_modules()
        if isinstance(module, nn.ModuleList)
    ]
    if not lists:
        return "", None
    return max(lists, key=lambda pair: len(pair[1]))


# --- Quantised weights ----------------------------------------------------------------------------


def _by_steps(weight: Tensor, largest: int) -> Tensor:
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / largest
    return (weight / scale).round().clamp(-largest - 1, largest) * scale


def _by_range(weight: Tensor, steps: int) -> Tensor:
    low, high = weight.amin(dim=-1, keepdim=True), weight.amax(dim=-1, keepdim=True)
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = (high - low).clamp(min=1e-12) / steps
    zero = (-low / scale).round()
    return ((weight / scale).round().add(zero).clamp(0, steps) - zero) * scale


def _float8(weight: Tensor) -> Tensor:
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / largest
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


_NF4 = (
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
)  # fmt: skip


def _nf4(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12)
    levels = torch.tensor(_NF4, device=weight.device)
    nearest = ((weight / scale)[..., None] - levels).abs().argmin(dim=-1)
    return levels[nearest] * scale


def _round_in_groups(size: int, rounding: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Round groups of `size` values along the last axis; 0 for whole rows, -1 for the tensor."""

    def round_weight(weight: Tensor) -> Tensor:
        if size == -1:
            return rounding(weight.reshape(1, -1)).reshape(weight.shape)
        if size == 0 or weight.shape[-1] % size:
            return rounding(weight)
        return rounding(weight.unflatten(-1, (-1, size))).flatten(-2)

    return round_weight


_SIZES = (128, 64, 32)
QUANTISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "int8 by channel": _round_in_groups(0, lambda w: _by_steps(w, 127)),
    "int8 by tensor": _round_in_groups(-1, lambda w: _by_steps(w, 127)),
    **{
        f"int8 in groups of {size}": _round_in_groups(size, lambda w: _by_steps(w, 127))
        for size in _SIZES
    },
    "float8 by tensor": _round_in_groups(-1, _float8),
    "float8 by channel": _round_in_groups(0, _float8),
    "int4 in groups of 128": _round_in_groups(128, lambda w: _by_steps(w, 7)),
    "int4 in groups of 32": _round_in_groups(32, lambda w: _by_steps(w, 7)),
    "int4 with zero points in groups of 128": _round_in_groups(128, lambda w: _by_range(w, 15)),
    "int4 with zero points in groups of 32": _round_in_groups(32, lambda w: _by_range(w, 15)),
    "nf4 in groups of 64": _round_in_groups(64, _nf4),
}


# Engines that multiply in few bits round the inputs too, token by token.
INPUT_QUANTISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "int8 by channel": lambda x: _by_steps(x, 127),
    "float8 by tensor": _float8,
    "float8 by channel": _float8,
}


def quantised_weights() -> Iterator[Change]:
    """Weights of all products rounded to few bits, without and with the last one."""
    for name, rounding in QUANTISERS.items():
        for head in (False, True):
            words = f"the weights are quantised to {name}"
            words += ", those of the head too" if head else ""
            make = functools.partial(_quantise_model, rounding=rounding, head=head)
            yield Change("quantised weights", words, make_model=make)
    for name, inputs in INPUT_QUANTISERS.items():
        words = f"the weights are quantised to {name}, and the inputs of products by token"
        make = functools.partial(_quantise_model, rounding=QUANTISERS[name], inputs=inputs)
        yield Change("quantised weights", words, make_model=make)


def _quantise_model(
    model: Any,
    rounding: Callable[[Tensor], Tensor],
    inputs: Callable[[Tensor], Tensor] | None = None,
    *,
    head: bool = False,
) -> Any:
    changed = share(model)
    chosen = {id(product) for product in _products(changed, head=head)}
    if inputs is not None:
        for module in changed.modules():
            if isinstance(module, nn.Linear) and id(module.weight) in chosen:
                module.register_forward_pre_hook(functools.partial(_round_input, inputs))
    for path, weight in list(changed.named_parameters()):
        if id(weight) in chosen:
            rounded = rounding(weight.detach().float()).to(weight.dtype)
            replace_parameter(changed, path, rounded)
    return changed


def _round_input(rounding: Callable[[Tensor], Tensor], _: nn.Module, args: Any) -> Any:
    wide = args[0].to(torch.promote_types(args[0].dtype, torch.float32))
    return rounding(wide).to(args[0].dtype), *args[1:]


def _products(model: nn.Module, *, head: bool) -> Iterator[nn.Parameter]:
    """The weights of matrix products, without embeddings."""
    outer = {
        id(outer_module.weight)
        for outer_module in (
            _ask_module(model, "get_input_embeddings"),
            _ask_module(model, "get_output_embeddings"),
        )
        if outer_module is not None
    }
    heads = [
        head_module
        for head_module in [_ask_module(model, "get_output_embeddings")]
        if head_module is not None
    ]
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    for name, weight in model.named_parameters():
        is_outer = id(weight) in outer or name.startswith("lm_head.")
        if weight.dim() >= 2 and not is_outer and id(weight) not in embeddings:  # noqa: PLR2004
            yield weight
    if head:
        head_weights = [head_module.weight for head_module in heads] or [
            parameter for name, parameter in model.named_parameters() if name == "lm_head.weight"
        ]
        yield from (
            head_weight for head_weight in head_weights if id(head_weight) not in embeddings
        )


def _ask_module(model: nn.Module, name: str) -> Any:
    with contextlib.suppress(Exception):
        return getattr(model, name)()
    return None


# --- Precision ------------------------------------------------------------------------------------


def coarser_dtypes(model: Any) -> Iterator[Change]:
    """The same model in a dtype with fewer digits."""
    model_dtype = _dtype(model)
    for dtype in (torch.float16, torch.bfloat16):
        if torch.finfo(dtype).eps > torch.finfo(model_dtype).eps:
            words = f"the engine computes in {str(dtype).removeprefix('torch.')}"

            def make(base: Any, dtype: torch.dtype = dtype) -> Any:
                return copy.deepcopy(original_of(base)).to(dtype)

            yield Change(PRECISION, words, make_model=make, only_rounds=True)


# --- Layers and adapters --------------------------------------------------------------------------


class _Skipped(nn.Module):
    """Stands for a block that is left out; returns its first argument, as the block would."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.returns_tuple = False
        for name in ("attention_type", "layer_type"):
            if hasattr(block, name):
                setattr(self, name, getattr(block, name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states."""
        return args[0] if args else kwargs["hidden_states"]


def skipped_layers(model: Any) -> Iterator[Change]:
    """One block after the other is left out; adapters are switched off."""
    path, blocks = blocks_of(model)
    for number in range(0 if blocks is None else len(blocks)):

        def make(base: Any, number: int = number) -> Any:
            changed = share(base)
            _, changed_blocks = blocks_of(changed)
            if changed_blocks is not None:
                changed_blocks[number] = _Skipped(changed_blocks[number])
            return changed

        yield Change("layers", f"{path}.{number} is left out", make_model=make)
    disable = getattr(original_of(model), "disable_adapter_layers", None)
    if callable(disable):

        def without(base: Any) -> Any:
            changed = share(base)
            changed.disable_adapter_layers()
            return changed

        yield Change("stale weights", "the adapter is not applied", make_model=without)


# --- Settings -------------------------------------------------------------------------------------

_GATES = ("gelu", "gelu_pytorch_tanh", "silu", "relu")
# Setting -> what an engine that ignores it, or has another default, uses.
_OTHERS: dict[str, tuple[Any, ...]] = {
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "scale_embedding": (False,),
    "norm_topk_prob": (True, False),
    "routed_scaling_factor": (1.0,),
    "rms_norm_eps": (1e-5, 1e-6),
    "layer_norm_eps": (1e-5, 1e-12),
    "layer_norm_epsilon": (1e-5, 1e-12),
    "hidden_act": _GATES,
    "hidden_activation": _GATES,
    "activation_function": (*_GATES, "gelu_new"),
    "use_parallel_residual": (True, False),
    "partial_rotary_factor": (1.0,),
    "rope_theta": (_PLAIN, 5e5, 1e6),
    "rope_scaling": (None,),
    "sliding_window": (None,),
    "attention_chunk_size": (None,),
}


# Settings that act between tokens only.
_BETWEEN = ("rope", "window", "attn_", "attention_chunk", "layer_types")
# Numbers that may be any other, and what to begin with: powers of ten, or factors.
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_DECADES = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
_BASES = (3e3, 3e4, 1e5, 3e5, 3e6, 1e7)
_FACTORS = (
    "logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier",
    "attention_multiplier", "routed_scaling_factor", "final_logit_softcapping",
    "attn_logit_softcapping", "query_pre_attn_scalar",
)  # fmt: skip


def other_settings(model: Any) -> Iterator[Change | Family]:
    """The same weights under another configuration, if the class is built from one."""
    config = getattr(original_of(model), "config", None)
    if config is None:
        return
    for number, part in enumerate(config_parts(config)):
        settings = vars(part)
        for name, others in _OTHERS.items():
            for value in others:
                if name in settings and settings[name] != value and settings[name] is not None:
                    text = f"{name} is {value} in place of {settings[name]}"
                    yield _setting(number, {name: value}, text)
        count = settings.get("num_experts_per_tok")
        if isinstance(count, int):
            for value in (count - 1, count + 1):
                text = f"{value} experts are chosen in place of {count}"
                if value > 0:
                    yield _setting(number, {"num_experts_per_tok": value}, text)
        yield from _other_windows(number, settings)
        yield from _other_rotations(number, settings)
        yield from _other_numbers(number, settings)


def _other_numbers(number: int, settings: dict[str, Any]) -> Iterator[Family]:
    """Settings with a number that may be any other."""

    def family(
        name: str, configured_value: float, grid: tuple[float, ...], *, whole: bool = False
    ) -> Family:
        def change(value: float) -> Change:
            used = int(value) if whole else value
            text = f"{name} is {used:.4g} in place of {configured_value:.4g}"
            return _setting(number, {name: used}, text)

        return Family(change, configured_value, grid, whole, _reach(name))

    for name in (*_EPSILONS, *_FACTORS):
        value = settings.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            grid = _DECADES if name in _EPSILONS else (0.5 * value, 2.0 * value)
            yield family(name, float(value), grid)
    window = settings.get("sliding_window")
    if isinstance(window, int) and window > 1:
        steps = (window - 1, window + 1, window // 2, 2 * window)
        yield family("sliding_window", window, tuple(map(float, steps)), whole=True)


def _reach(name: str) -> Reach:
    return Reach.LATER if name.startswith(_BETWEEN) or "window" in name else Reach.ALL


def _other_windows(number: int, settings: dict[str, Any]) -> Iterator[Change]:
    """The window in all layers or in none, where only some have it."""
    kinds = settings.get("layer_types")
    if not isinstance(kinds, list) or len(set(kinds)) < 1:
        return
    for kind in ("full_attention", "sliding_attention"):
        if kind in kinds and len(set(kinds)) == 1:
            continue
        if "sliding_attention" in kinds and settings.get("sliding_window"):
            words = "in no layer" if kind == "full_attention" else "in all layers"
            text = f"the sliding window is applied {words}"
            yield _setting(number, {"layer_types": [kind] * len(kinds)}, text)


def _other_rotations(number: int, settings: dict[str, Any]) -> Iterator[Change | Family]:
    """Rotary positions with another base, without scaling, or with linear scaling."""
    ropes = settings.get("rope_parameters")
    if not isinstance(ropes, dict):
        return
    nested = all(isinstance(rope, dict) for rope in ropes.values())
    for rope_key in list(ropes) if nested else [""]:
        rope_settings = ropes[rope_key] if rope_key else ropes
        where = f" of {rope_key}" if rope_key else ""
        base = rope_settings.get("rope_theta", _PLAIN)
        plans: dict[str, dict[str, Any]] = {}
        if rope_settings.get("rope_type", "default") != "default":
            plain = {"rope_type": "default", "rope_theta": base}
            plans[f"rope scaling ({rope_settings['rope_type']}){where} is not applied"] = plain
            words = f"neither rope scaling nor rope_theta={base:g}{where} is applied"
            plans[words] = {"rope_type": "default", "rope_theta": _PLAIN}
        else:
            for factor in (2.0, 4.0, 8.0):
                words = f"rope positions{where} are divided by {factor:g}"
                plans[words] = {**rope_settings, "rope_type": "linear", "factor": factor}
        for other in (_PLAIN, 5e5, 1e6):
            if other != base:
                words = f"rope_theta{where} is {other:g} in place of {base:g}"
                plans[words] = {**rope_settings, "rope_theta": other}
        share = rope_settings.get("partial_rotary_factor")
        if share not in (None, 1.0):
            words = f"partial_rotary_factor{where} is 1 in place of {share}"
            plans[words] = {**rope_settings, "partial_rotary_factor": 1.0}
        for text, plan in plans.items():
            yield _setting(number, {"rope_parameters": plan}, text, rope_key)

        def with_base(
            value: float,
            base_settings: Any = rope_settings,
            where: str = where,
            settings_key: str = rope_key,
        ) -> Change:
            words = (
                f"rope_theta{where} is {value:.4g} in place of "
                f"{base_settings.get('rope_theta'):.4g}"
            )
            plan = {"rope_parameters": {**base_settings, "rope_theta": value}}
            return _setting(number, plan, words, settings_key)

        yield Family(with_base, float(base), _BASES, reach=Reach.LATER)


def _setting(number: int, values: dict[str, Any], text: str, nested_key: str = "") -> Change:
    """The model under a configuration with other values in its part of that number."""

    def make(base: Any) -> Any:
        original = original_of(base)
        config = copy.deepcopy(original.config)
        part = list(config_parts(config))[number]
        for name, value in values.items():
            if nested_key:
                value = {**getattr(part, name), nested_key: value}  # noqa: PLW2901
            setattr(part, name, value)
        with torch.random.fork_rng(devices=[]):
            rebuilt_model = type(original)(config)
        rebuilt_model.load_state_dict(original.state_dict())
        first = next(original.parameters())
        return rebuilt_model.to(device=first.device, dtype=first.dtype).train(original.training)

    name = next(iter(values))
    kind = "positions" if "rope" in name else "settings"
    return Change(kind, text, make_model=make, reach=_reach(name))
