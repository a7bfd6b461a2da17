"""The program on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paritas.errors import UsageError
from paritas.partition.plans.traces import Trace
from paritas.partition.plans.training import Manner, build_model, same_surroundings, train

if TYPE_CHECKING:
    import contextlib

    import torch

    from paritas.partition.plans.program import Program

__all__ = ["run_reference"]


def run_reference(
    program: Program,
    *,
    wide: bool = False,
    mode: contextlib.AbstractContextManager[Any] | None = None,
    watch_modules: bool = False,
    device: torch.device | None = None,
) -> Trace:
    """Train the model as it is, without its plan.

    Args:
        wide: model, batches and default dtype in float64.
        mode: entered around forward, loss, backward and optimizer of each step, in turn. Without
            one, a wide run lifts the program's own casts to narrow dtypes as well.
        watch_modules: in the last step, note what every module gives and the gradients that arrive
            there and leave it.
        device: where; None leaves the model and the batches where they are.

    Raises:
        UsageError: the program makes no sense. Anything else that it raises is in the trace.
    """
    trace = Trace()
    manner = Manner(wide=wide, watch_modules=watch_modules, device=device, mode=mode)
    with same_surroundings(manner):
        built = build_model(program, manner)
        try:
            train(program, built, manner, trace)
        except UsageError:
            raise
        except Exception:  # noqa: BLE001  (it is in the trace, and becomes a finding)
            return trace
    return trace
