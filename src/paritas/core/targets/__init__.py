"""Models by name: `hf:LlamaForCausalLM`, `timm:resnet18`, `torchvision:fasterrcnn_resnet50_fpn`.

A name stands for a small model of that class with random weights and matching inputs. Nothing is
downloaded. Settings follow `?`, as in `hf:BertModel?num_hidden_layers=3&hidden_size=96`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from paritas.core.errors import UsageError

if TYPE_CHECKING:
    import torch

    from paritas.core.execution.subjects import Inputs

_HOMES = {"hf": "hugging_face", "timm": "vision", "torchvision": "vision"}


def is_target(name: str) -> bool:
    """Whether a name begins with a library; other names are `module:factory`."""
    return name.partition(":")[0] in _HOMES and ":" in name


def build_target(
    name: str, *, train: bool = False, model_alone: bool = False
) -> tuple[torch.nn.Module, Inputs | None]:
    """Build the model that a name stands for, and inputs for it.

    Weights and inputs are drawn from torch's generator: seed it first.

    Args:
        name: a name for which `is_target` is true.
        train: the model will run in training mode, where detectors need targets as inputs.
        model_alone: build the model without inputs, and do not call it.

    Returns:
        The model and its inputs; None for the inputs if `model_alone`.

    Raises:
        UsageError: the library is missing, there is no such model or setting, or it cannot be built
            and called; the message says why and what to pass instead.
    """
    home = _HOMES.get(name.partition(":")[0])
    if home == "hugging_face":
        from paritas.core.targets.hugging_face import build_model

        return build_model(name, model_alone=model_alone)
    from paritas.core.targets.vision import build_vision

    return build_vision(name, train=train, model_alone=model_alone)


def parse_target(factory: str) -> tuple[str, str, dict[str, Any]]:
    """Split `library:name?setting=value` into library, name and settings."""
    library, _, rest = factory.partition(":")
    name, _, query = rest.partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise UsageError(f"{factory!r}: write settings as ?name=value&name=value") from error
    return library, name, {key: _parse_value(text) for key, text in pairs}


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# The attributes of layers that drop whole paths, by the end of their class names.
_PATHS = {"StochasticDepth": "p", "DropPath": "drop_prob", "DropBlock2d": "drop_prob"}


def turn_off_chance(model: torch.nn.Module) -> None:
    """Set the probabilities of dropout and of dropped paths to zero."""
    from torch import nn
    from torch.nn.modules import dropout

    for module in model.modules():
        kind = type(module)
        if isinstance(module, dropout._DropoutNd):  # noqa: SLF001 - the one base of all kinds
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
        for base in kind.__mro__:
            name = next(
                (n for name_ending, n in _PATHS.items() if base.__name__.endswith(name_ending)),
                None,
            )
            if name is not None and isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
