"""Find the class of `hf:LlamaForCausalLM` in transformers, and refuse what is no model."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import re
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.errors import UsageError, in_one_line

if TYPE_CHECKING:
    from types import ModuleType


def model_class(library: ModuleType, name: str, factory: str) -> Any:
    """The model class of that name; anything else is refused with what to use instead."""
    try:
        model_cls = getattr(library, name, None)
    except ImportError as error:
        raise UsageError(
            f"{factory!r}: transformers cannot import {name}: {in_one_line(error)}; install its "
            "requirements"
        ) from error
    if model_cls is None:
        near = difflib.get_close_matches(name, dir(library), n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise UsageError(f"{factory!r}: transformers has no {name!r}{hint}")
    if reason := _unfit(model_cls, name):
        usable = " or ".join(_similar_models(library, name))
        raise UsageError(f"{factory!r}: {name} {reason}; use a model class such as {usable}")
    return model_cls


def _unfit(candidate_cls: Any, name: str) -> str | None:
    """Why nothing that can be called is built from this class; None if something is."""
    if name.startswith("AutoModel"):
        return "chooses a class for a checkpoint, and paritas loads none"
    if not (isinstance(candidate_cls, type) and issubclass(candidate_cls, torch.nn.Module)):
        return "is not a model"
    if candidate_cls.forward is torch.nn.Module.forward:
        return "has no forward: it is a base class, or only generates"
    if getattr(candidate_cls, "config_class", None) is None:
        return "has no configuration of its own"
    return None


_USUAL_MODEL = "LlamaForCausalLM"
_NO_MODEL = re.compile(
    r"(PreTrained)?(Model|Config|Tokenizer|Processor|ImageProcessor|VideoProcessor"
    r"|FeatureExtractor)(Base|Fast|Pil)?$"
)


def _similar_models(library: ModuleType, name: str) -> list[str]:
    """Models of the same family, or else with the same head; at most two."""
    if name.startswith("AutoModel"):
        head = name.removeprefix("AutoModel") or "Model"
        name_pattern = re.compile(rf"(Llama|Bert|ViT|Wav2Vec2|T5){head}")
    else:
        family = re.escape(_NO_MODEL.sub("", name)) or "Llama"
        name_pattern = re.compile(rf"{family}(For[A-Z]\w+|([A-Z]\w+)?Model)")
    similar_names = sorted(
        filter(name_pattern.fullmatch, dir(library)),
        key=lambda class_name: ("For" in class_name, len(class_name)),
    )
    usable = (
        class_name
        for class_name in similar_names
        if _unfit(_load_class(library, class_name), class_name) is None
    )
    return list(itertools.islice(usable, 2)) or [_USUAL_MODEL]


def _load_class(library: ModuleType, name: str) -> Any:
    with contextlib.suppress(ImportError):  # it needs a package that is not installed
        return getattr(library, name)
    return None
