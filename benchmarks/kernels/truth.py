"""What is true about one operator, computed by hand: nothing of paritas is used here.

The operator is run in eager and compiled, both in the dtype of the inputs, and in eager in float64.
The error of compiled counts in units of eager's own.
"""

from __future__ import annotations

import torch

# More times eager's error than this is a fault.
FAULT = 8.0


def leaves(value, path=""):
    """The tensors and numbers of nested containers, by where they are."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from leaves(one, f"{path}[{index}]")
    else:
        yield path, value


def copied(value, dtype=None):
    """The same containers; floating tensors in another dtype, with the same strides."""
    if isinstance(value, torch.Tensor):
        like = value.detach()
        wide = dtype if dtype is not None and like.is_floating_point() else like.dtype
        if dtype is not None and like.is_complex():
            wide = torch.complex128
        return like.clone().to(wide) if like.dtype is not wide else like.clone()
    if isinstance(value, dict):
        return {key: copied(one, dtype) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(one, dtype) for one in value)
    if dtype is not None and isinstance(value, torch.dtype) and value.is_floating_point:
        return dtype
    return value


def errors(operator, inputs):
    """For each output: eager's and compiled's error to float64, and how many NaN patterns differ.

    `inputs` are what the operator is called with. A text says why there is no answer.
    """
    torch.compiler.reset()
    try:
        wide = dict(leaves(operator(*copied(inputs, torch.float64))))
        eager = dict(leaves(operator(*copied(inputs))))
    except Exception as error:  # noqa: BLE001
        return f"eager raises {type(error).__name__}: {error}"[:200]
    try:
        compiled = dict(leaves(torch.compile(operator)(*copied(inputs))))
    except Exception as error:  # noqa: BLE001
        return f"compiled raises {type(error).__name__}: {error}"[:300]
    if eager.keys() != compiled.keys():
        return "compiled returns other outputs"
    return {path: _compared(eager[path], compiled[path], wide[path]) for path in eager}


def stands(found):
    """Whether what `errors` found is a fault of compiled code: what raises, or is far off."""
    if isinstance(found, str):
        return found.startswith("compiled")
    return any(_is_off(one) for one in (found or {}).values())


def _is_off(one):
    if "eager" not in one:
        return not one["same"]
    least = 1e-6 * one["scale"]
    return bool(one["nan"] or one["inf"] or one["compiled"] > max(FAULT * one["eager"], least))


def _compared(eager, compiled, wide):
    if not isinstance(eager, torch.Tensor):
        return {"same": eager == compiled}
    if eager.shape != compiled.shape or eager.dtype is not compiled.dtype:
        return {"same": False, "shapes": [list(eager.shape), list(compiled.shape)]}
    if not (eager.is_floating_point() or eager.is_complex()):
        return {"same": bool(torch.equal(eager, compiled)), "other": int((eager != compiled).sum())}
    if eager.is_complex():
        eager, compiled, wide = (
            torch.view_as_real(x.resolve_conj()) for x in (eager, compiled, wide)
        )
    eager, compiled, wide = (x.detach().double() for x in (eager, compiled, wide))
    nans = int((eager.isnan() != compiled.isnan()).sum())
    infinities = int((eager.isinf() != compiled.isinf()).sum())
    finite = eager.isfinite() & compiled.isfinite() & wide.isfinite()
    ours = (compiled - wide)[finite].abs()
    theirs = (eager - wide)[finite].abs()
    scale = wide[finite].abs().max().item() if finite.any() else 0.0
    return {
        "nan": nans,
        "inf": infinities,
        "eager": theirs.max().item() if finite.any() else 0.0,
        "compiled": ours.max().item() if finite.any() else 0.0,
        "eager_rms": theirs.square().mean().sqrt().item() if finite.any() else 0.0,
        "compiled_rms": ours.square().mean().sqrt().item() if finite.any() else 0.0,
        "scale": scale,
        "wide_nan": int((wide.isnan() != eager.isnan()).sum()),
    }
