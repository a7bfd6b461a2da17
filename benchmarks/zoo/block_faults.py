"""One fault in one block of a model: drawn by a seed, and known to change what the block computes.

A kind is a function of a block that lists the places where it fits, with one that plants it there.
What a fault changes is measured here, without paritas: the block is called with what the model
gives it, right and wrong, natively and in float64.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import random
import re

import torch
from benchmarks.zoo import truth
from torch import nn

# A fault counts if its error in float64 is larger, or natively `truth.FAULT` times eager's own.
_LIFTED_ERROR = 1e-9


def plant_fault(model, candidate, args, kwargs, seed):
    """Plant a fault in one block of `candidate`, a copy of `model`; what it is, or None.

    Parameters of both that are all zero, as new biases are, get values: no fault in them would
    change anything.
    """
    draw = random.Random(seed)
    fill_zeros(model, candidate)
    calls = record_calls(model, args, kwargs)
    names = sorted(calls)
    draw.shuffle(names)
    for name in names:
        right, wrong = model.get_submodule(name), candidate.get_submodule(name)
        shared = parameters_outside(model, right)
        for kind in draw.sample(sorted(KINDS), len(KINDS)):
            list_sites, plant = KINDS[kind]
            sites = [site for site in list_sites(right) if not is_shared(right, site, shared)]
            if not sites:
                continue
            site = draw.choice(sites)
            effect = try_fault(right, functools.partial(plant, site=site), *calls[name])
            if effect["lifted_error"] > _LIFTED_ERROR or effect["native_ratio"] > truth.FAULT:
                plant(wrong, site)
                return {"block": name, "kind": kind, "site": site, **effect}
    return None


def fill_zeros(*models):
    """Give the same random values to the parameters of all models that are zero."""
    generator = torch.Generator().manual_seed(0)
    for pairs in zip(*(model.named_parameters() for model in models), strict=True):
        parameters = [parameter for _, parameter in pairs]
        if parameters[0].is_floating_point() and not parameters[0].any():
            values = 0.02 * torch.randn(parameters[0].shape, generator=generator)
            with torch.no_grad():
                for parameter in parameters:
                    parameter.copy_(values)


def record_calls(model, args, kwargs):
    """Block -> what its first call gets, for the blocks that a check by blocks looks for."""
    from paritas.core.execution.blocks import find_blocks
    from paritas.core.execution.reachable import original_of, reachable_modules

    calls = {}

    def recorder(name):
        def record(_, args, kwargs):
            if name not in calls:
                calls[name] = copy.deepcopy((args, kwargs))

        return record

    blocks = find_blocks(dict(reachable_modules(model, original_of)))
    handles = [
        block.register_forward_pre_hook(recorder(name), with_kwargs=True)
        for name, block in blocks.items()
    ]
    try:
        with torch.no_grad():
            model(*truth.move(args), **truth.move(kwargs))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def parameters_outside(model, block):
    """The parameters that other parts of the model have too, by identity."""
    inside = {id(module) for module in block.modules()}
    return {
        id(parameter)
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    }


def is_shared(block, site, shared):
    """Whether a fault in a parameter would be one in another part of the model as well."""
    return id(dict(block.named_parameters()).get(site)) in shared


def try_fault(block, plant, args, kwargs):
    """What a fault would change in a block; nothing if the block then raises."""
    trial = copy.deepcopy(block)
    try:
        plant(trial)
        return measure_effect(block, trial, args, kwargs)
    except Exception:  # noqa: BLE001 - such a fault needs no verifier
        return {"native_ratio": 0.0, "lifted_error": 0.0}


def measure_effect(right, wrong, args, kwargs):
    """How much a fault changes outputs and gradients of a block.

    Returns:
        native_ratio: the largest error to float64, in units of eager's own.
        lifted_error: the largest relative error in float64; 0 if the block does not run there.
    """

    def observe(block, dtype=None):
        alone = copy.deepcopy(block).to(dtype)
        arguments = copy.deepcopy((args, kwargs))
        moved = (truth.move(one, dtype) for one in arguments)
        return truth.observe(alone, alone, *moved, gradients=True)

    eager, faulty = observe(right), observe(wrong)
    least = max([torch.finfo(p.dtype).eps for p in right.parameters() if p.is_floating_point()])
    try:
        with truth.grouped_products():
            exact, lifted = observe(right, torch.float64), observe(wrong, torch.float64)
    except Exception:  # noqa: BLE001 - natively is enough
        exact = lifted = eager

    def largest(found, yardstick):
        errors = [
            truth.relative_error(found[name], true) / yardstick(name, true)
            if name in found
            else math.inf
            for name, true in exact.items()
            if true.numel()
        ]
        return max(errors, default=0.0)

    return {
        "native_ratio": largest(
            faulty, lambda name, true: max(truth.relative_error(eager[name], true), least)
        ),
        "lifted_error": largest(lifted, lambda *_: 1.0),
    }


# --- The kinds of faults: where each fits a block, and how it is planted --------------------------


def _list_weights(block):
    return [name for name, one in block.named_parameters() if name.endswith("weight")]


def _scale_weight(block, site):
    with torch.no_grad():
        block.get_parameter(site).mul_(1.01)


def _list_biases(block):
    return [name for name, _ in block.named_parameters() if name.endswith("bias")]


def _drop_bias(block, site):
    with torch.no_grad():
        block.get_parameter(site).zero_()


_EPSILONS = ("eps", "epsilon", "variance_epsilon", "layer_norm_eps", "norm_eps")
_SCALES = ("scaling", "scale", "softmax_scale", "inv_norm_factor", "norm_factor", "scale_factor")


def _list_numbers(names):
    def list_sites(block):
        return [
            f"{path}.{name}"
            for path, module in block.named_modules()
            for name in names
            if isinstance(getattr(module, name, None), float)
        ]

    return list_sites


def _multiply_number(times):
    def plant(block, site):
        path, _, name = site.rpartition(".")
        module = block.get_submodule(path)
        setattr(module, name, times * getattr(module, name))

    return plant


def _list_activations(block):
    return [
        path
        for path, module in block.named_modules()
        if path and re.search(r"(?i)gelu|silu|swish", type(module).__name__)
    ]


def _exchange_activation(block, site):
    is_gelu = "gelu" in type(block.get_submodule(site)).__name__.lower()
    path, _, name = site.rpartition(".")
    setattr(block.get_submodule(path), name, nn.SiLU() if is_gelu else nn.GELU())


def _list_block(_):
    return [""]


def _leave_out_residual(block, site):  # noqa: ARG001 - a block has one
    _replace_forward(block, _subtract_input)


def _subtract_input(block, forward, args, kwargs):
    residual = args[0] if args else kwargs["hidden_states"]
    result = forward(block, *args, **kwargs)
    first = result if isinstance(result, torch.Tensor) else result[0]
    if first.shape != residual.shape:
        raise ValueError("the block has no residual")
    left = first - residual
    return left if first is result else (left, *result[1:])


def _list_masks(block):
    parameters = inspect.signature(type(block).forward).parameters
    return [name for name in parameters if re.search("mask", name)]


def _drop_mask(block, site):
    position = [*inspect.signature(type(block).forward).parameters].index(site) - 1

    def forward_without(block, forward, args, kwargs):
        if position < len(args):
            args = (*args[:position], None, *args[position + 1 :])
        return forward(block, *args, **({**kwargs, site: None} if site in kwargs else kwargs))

    _replace_forward(block, forward_without)


def _replace_forward(block, call):
    """Let an instance of a module compute something else; it stays one of its class."""
    kind = type(block)

    def forward(self, *args, **kwargs):
        return call(self, kind.forward, args, kwargs)

    block.__class__ = type(f"Faulty{kind.__name__}", (kind,), {"forward": forward})


_PROJECTION = re.compile(r"(^|\.)(q|k|v|query|key|value|[qkv]_proj|[qkv]_lin|to_[qkv]|w[qkv])$")


def _list_projections(block):
    return [
        path
        for path, module in block.named_modules()
        if _PROJECTION.search(path) and _count_heads(block, path, module) is not None
    ]


def _count_heads(block, path, module):
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear):
        return None
    parent = block.get_submodule(path.rpartition(".")[0])
    for home in (parent, getattr(parent, "config", None)):
        for name in ("num_heads", "num_attention_heads", "n_heads", "num_key_value_heads"):
            heads = getattr(home, name, None)
            if isinstance(heads, int) and heads > 1 and weight.shape[0] % heads == 0:
                return heads if weight.shape[0] > heads else None
    return None


def _transpose_heads(block, site):
    module = block.get_submodule(site)
    heads = _count_heads(block, site, module)
    with torch.no_grad():
        for one in filter(lambda one: one is not None, (module.weight, module.bias)):
            split = one.unflatten(0, (heads, -1)).transpose(0, 1)
            one.copy_(split.flatten(0, 1).clone())


KINDS = {
    "weight scaled by 1.01": (_list_weights, _scale_weight),
    "bias dropped": (_list_biases, _drop_bias),
    "epsilon of a norm times 1000": (_list_numbers(_EPSILONS), _multiply_number(1e3)),
    "gelu and silu exchanged": (_list_activations, _exchange_activation),
    "attention scaled by 1.05": (_list_numbers(_SCALES), _multiply_number(1.05)),
    "residual left out": (_list_block, _leave_out_residual),
    "mask dropped": (_list_masks, _drop_mask),
    "heads split along the other axis": (_list_projections, _transpose_heads),
}
