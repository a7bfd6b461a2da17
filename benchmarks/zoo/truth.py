"""What is true, computed by hand: how far compiled and eager are from the model in float64.

Nothing of paritas is used here. Each side is run on copies of the model and its inputs, and the
gradients are those of one random weighting of all floating outputs, the same for every side.
"""

from __future__ import annotations

import contextlib
import copy
import math

import torch

# Of the compiled program's error, in units of eager's own: less is no fault, more is one; between
# the two a person decides.
NO_FAULT, FAULT = 2.0, 8.0


def leaves(value, path=""):
    """The tensors of nested containers, by where they are; caches are containers too."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from leaves(one, f"{path}[{index}]")
    elif hasattr(value, "layers") and isinstance(value.layers, list):
        for index, layer in enumerate(value.layers):
            for name in ("keys", "values"):
                yield from leaves(getattr(layer, name, None), f"{path}.{index}.{name}")


def move(value, dtype=None, device=None):
    """The same containers with floating tensors in another dtype."""
    if isinstance(value, torch.Tensor):
        cast = dtype if value.is_floating_point() else None
        return value.detach().clone().to(device=device, dtype=cast)
    if isinstance(value, dict):
        return {key: move(one, dtype, device) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(move(one, dtype, device) for one in value)
    return value


def observe(run, model, args, kwargs, gradients, autocast=None):
    """Outputs and gradients of parameters, by name, in float64."""
    device = next((p.device.type for p in model.parameters()), "cpu")
    torch.manual_seed(0)
    with (
        torch.set_grad_enabled(gradients),
        torch.autocast(device, dtype=autocast, enabled=autocast is not None),
    ):
        outputs = dict(leaves(run(*args, **kwargs)))
    found = {f"output{name}": value.detach().double().cpu() for name, value in outputs.items()}
    if gradients:
        generator = torch.Generator().manual_seed(1)
        total = 0.0
        for value in outputs.values():
            weights = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            if value.is_floating_point() and value.requires_grad:
                total = total + (value.double() * weights.to(value.device)).sum()
        if isinstance(total, torch.Tensor):
            total.backward()
            for name, one in model.named_parameters():
                if one.grad is not None:
                    found[f"gradient {name}"] = one.grad.detach().double().cpu()
    return found


def grouped_product(left, right, offs=None, **_):
    """Torch's grouped product by single ones, in any dtype."""
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    if left.dim() == right.dim():
        parts = [left[:, a:b] @ right[a:b] for a, b in zip(starts, ends, strict=True)]
        return torch.stack(parts)
    if left.dim() == 3:
        return torch.cat(
            [left[i] @ right[:, a:b] for i, (a, b) in enumerate(zip(starts, ends, strict=True))],
            1,
        )
    return torch.cat(
        [left[a:b] @ right[i] for i, (a, b) in enumerate(zip(starts, ends, strict=True))]
    )


@contextlib.contextmanager
def grouped_products():
    """Mixtures of experts in float64: torch's grouped product takes narrower dtypes only."""
    homes = [(torch, "_grouped_mm"), (torch.nn.functional, "grouped_mm")]
    homes = [(home, name, getattr(home, name)) for home, name in homes if hasattr(home, name)]
    for home, name, _ in homes:
        setattr(home, name, grouped_product)
    try:
        yield
    finally:
        for home, name, before in homes:
            setattr(home, name, before)


@contextlib.contextmanager
def wide_casts():
    """A model's own casts to float32, as in `mask.float() * torch.finfo(scores.dtype).min`."""
    before = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.Tensor.float = before


def relative_error(found, exact):
    if found.shape != exact.shape:
        return math.inf
    size = float(exact.norm()) or 1.0
    error = float((found - exact).norm()) / size
    return math.inf if math.isnan(error) else error


def measure(model, args, kwargs, compile_it, *, gradients, autocast=None):
    """For every output and gradient: the errors of eager and compiled to float64; their ratio."""

    def run(make, dtype=None, cast=None):
        own = copy.deepcopy(model)
        own = own.to(dtype) if dtype is not None else own
        return observe(make(own), own, move(args, dtype), move(kwargs, dtype), gradients, cast)

    with grouped_products(), wide_casts():
        exact = run(lambda one: one, torch.float64)
    eager = run(lambda one: one, cast=autocast)
    compiled = run(compile_it, cast=autocast)
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.float32}
    # Eager may happen to be exact: a few units of its dtype are nobody's fault.
    least = max(torch.finfo(one).eps for one in (*dtypes, autocast or torch.float32))
    rows = []
    for name, true in exact.items():
        if not true.numel():
            continue
        if name not in eager or name not in compiled:
            rows.append({"name": name, "ratio": math.inf, "missing": True})
            continue
        ours, theirs = relative_error(compiled[name], true), relative_error(eager[name], true)
        ratio = ours / max(theirs, least)
        rows.append({"name": name, "eager": theirs, "compiled": ours, "ratio": ratio})
    return sorted(rows, key=lambda row: -row["ratio"])


def decide(rows):
    """`fault`, `no fault` or `open`, by the worst ratio."""
    worst = rows[0]["ratio"] if rows else math.inf
    return "no fault" if worst <= NO_FAULT else "fault" if worst > FAULT else "open"
