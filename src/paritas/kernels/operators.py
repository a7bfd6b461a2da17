"""What a custom operator registers beside its kernel: fake, autograd, vmap."""

from __future__ import annotations

from typing import Any

import torch

from paritas.errors import in_one_line

_LONGEST_TEXT = 300


def is_custom_operator(target: Any) -> bool:
    """Whether a callable is a custom operator of `torch.library`."""
    return hasattr(target, "_opoverload") or hasattr(target, "_schema")


def check_registrations(target: Any, inputs: tuple[Any, dict[str, Any]]) -> dict[str, Any]:
    """Run `torch.library.opcheck` in the candidate's process; returns test -> what it says."""
    args, kwargs = inputs
    if not is_custom_operator(target):
        return {"results": {}}
    try:
        found = torch.library.opcheck(target, tuple(args), kwargs, raise_exception=False)
    except Exception as error:  # noqa: BLE001  (it becomes a finding)
        return {"results": {"opcheck": in_one_line(error, _LONGEST_TEXT)}}
    results = {
        name: ""
        if outcome == "SUCCESS"
        else in_one_line(outcome, _LONGEST_TEXT)
        if isinstance(outcome, BaseException)
        else str(outcome)[:_LONGEST_TEXT]
        for name, outcome in found.items()
    }
    return {"results": results}
