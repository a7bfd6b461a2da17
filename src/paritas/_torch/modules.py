"""The places in an nn.Module where its parameters and buffers stand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

# What every module has in its __dict__; the rest is the user's own.
INTERNALS = frozenset(vars(torch.nn.Module())) - {"training"}


def tensor_slots(module: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """The module's own parameters and buffers by name, as the dicts it reads them from.

    Writing to these dicts puts another tensor into the module's place without registering it
    anew, so that hooks, tied weights and the order of parameters stay as they are. A scripted
    module keeps its tensors where no one can put others: its dicts are copies, to read from.
    """
    if isinstance(module, torch.jit.ScriptModule):
        own = module.named_parameters(recurse=False), module.named_buffers(recurse=False)
        return dict(own[0]), dict(own[1])
    return module._parameters, module._buffers  # type: ignore[return-value]
