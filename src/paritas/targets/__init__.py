"""Models by name: `hf:LlamaForCausalLM`, `timm:resnet18`, `torchvision:fasterrcnn_resnet50_fpn`.

A name stands for a small model of that class with random weights and inputs that it takes. Nothing
is downloaded. Settings follow `?`, as in `hf:BertModel?num_hidden_layers=3&hidden_size=96`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from paritas.execution.subjects import Inputs

_HOMES = {"hf": "hugging_face", "timm": "vision", "torchvision": "vision"}


def is_target(name: str) -> bool:
    """Whether a name begins as those of a library do; other names are `module:factory`."""
    return name.partition(":")[0] in _HOMES and ":" in name


def build_target(
    name: str, *, train: bool = False, model_alone: bool = False
) -> tuple[torch.nn.Module, Inputs | None]:
    """Make the model that a name stands for, and inputs for it.

    Weights and inputs are drawn from torch's generator: seed it first.

    Args:
        name: as `is_target` knows it.
        train: it is to run in training mode, where detectors need targets among their inputs.
        model_alone: the caller has inputs of their own; the model is built, and not called.

    Returns:
        The model, and its inputs; None for these where the model is built alone.

    Raises:
        UsageError: the library is missing, there is no such model or setting, or it cannot be built
            and called; the message says why and what to pass instead.
    """
    home = _HOMES.get(name.partition(":")[0])
    if home == "hugging_face":
        from paritas.targets.hugging_face import build_model

        return build_model(name, model_alone=model_alone)
    from paritas.targets.vision import build_vision

    return build_vision(name, train=train, model_alone=model_alone)
