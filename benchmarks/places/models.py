"""The models in two halves: small ones of transformers, and plain ones.

The half of a model is the hash of its class, so that nobody has chosen it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.places import plain
from torch.utils._pytree import tree_map  # noqa: TID251

if TYPE_CHECKING:
    from paritas.core.execution.subjects import Inputs

HALVES = ("building", "measured")
# Of transformers: every one runs without weights, and compiles to few graphs.
LIBRARY = (
    "AlbertModel", "BartModel", "BeitModel", "BertModel", "BloomForCausalLM", "CLIPModel",
    "ConvNextModel", "DebertaV2Model", "DeiTModel", "DistilBertModel", "ElectraModel", "FNetModel",
    "FalconForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTJForCausalLM",
    "GPTNeoXForCausalLM", "Gemma2ForCausalLM", "GemmaForCausalLM", "GlmForCausalLM",
    "GraniteForCausalLM", "LlamaForCausalLM", "MPNetModel", "MambaForCausalLM",
    "MistralForCausalLM", "MixtralForCausalLM", "MobileNetV2Model", "OPTForCausalLM",
    "Olmo2ForCausalLM", "PhiForCausalLM", "PoolFormerModel", "Qwen2ForCausalLM", "RegNetModel",
    "ResNetForImageClassification", "RoFormerModel", "RobertaModel", "SegformerModel",
    "SplinterModel", "StableLmForCausalLM", "SwinModel", "Swinv2Model",
    "T5ForConditionalGeneration", "ViTForImageClassification", "VideoMAEModel", "Wav2Vec2Model",
    "WhisperForConditionalGeneration", "XLNetModel", "YolosModel",
)  # fmt: skip


def half_of(name: str) -> str:
    """Which half a model is in."""
    return HALVES[hashlib.sha256(name.encode()).digest()[0] % 2]


def models_of(half: str) -> list[str]:
    """All models of a half, plain ones and those of the library mixed by a hash."""
    names = [name for name in (*plain.MODELS, *LIBRARY) if half_of(name) == half]
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()[1:])


def build(name: str, device: str = "cpu") -> tuple[torch.nn.Module, Inputs]:
    """A model in evaluation mode, and inputs for it; the same every time."""
    from paritas.core.execution.subjects import Inputs

    torch.manual_seed(0)
    if name in plain.MODELS:
        model: Any = plain.MODELS[name]()
        args = tuple(one.to(device) for one in plain.MODELS[name].inputs())
        return model.eval().to(device), Inputs(args=args)
    from paritas.core.targets import build_target

    model, inputs = build_target(f"hf:{name}")
    if inputs is None:
        raise ValueError(f"{name} has no inputs")
    moved = tree_map(lambda one: one.to(device) if isinstance(one, torch.Tensor) else one,
                     (inputs.args, inputs.kwargs))  # fmt: skip
    return model.eval().to(device), Inputs(*moved)
