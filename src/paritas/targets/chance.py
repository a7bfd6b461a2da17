"""Models without randomness in training mode."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import dropout

# The attributes of layers that drop whole paths, by the end of their class names.
_PATHS = {"StochasticDepth": "p", "DropPath": "drop_prob", "DropBlock2d": "drop_prob"}


def turn_off(model: nn.Module) -> None:
    """Set the probabilities of dropout and of dropped paths to zero."""
    for module in model.modules():
        kind = type(module)
        if isinstance(module, dropout._DropoutNd):  # noqa: SLF001 - the one base of all kinds
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
        for base in kind.__mro__:
            name = next((n for known, n in _PATHS.items() if base.__name__.endswith(known)), None)
            if name is not None and isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
