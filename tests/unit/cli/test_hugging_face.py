"""Models by class, with a small library that has the shape of transformers."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from paritas.candidates.building import build_model, is_hugging_face
from paritas.errors import UsageError


class TextConfig:
    model_type = "text"

    def __init__(self, vocab_size=50000, hidden_size=4096, pad_token_id=49999, use_cache=True):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.pad_token_id, self.use_cache = pad_token_id, use_cache


class PairConfig:
    model_type = "pair"
    sub_configs = {"text_config": TextConfig, "vision_config": TextConfig}  # noqa: RUF012

    def __init__(self, text_config=None, vision_config=None):
        self.text_config = text_config or TextConfig()
        self.vision_config = vision_config or TextConfig()


class TextModel(nn.Module):
    config_class = TextConfig
    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__()
        self.config = config
        if config.hidden_size % 2:
            raise ValueError("hidden_size must be even")
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, input_ids=None, attention_mask=None):
        return self.table(input_ids)


class PairModel(TextModel):
    config_class = PairConfig

    def __init__(self, config):
        super().__init__(config.text_config)
        self.config = config

    def forward(self, input_ids=None, pixel_values=None):
        return self.table(input_ids), pixel_values


class OddModel(TextModel):
    main_input_name = "graph_edges"


@pytest.fixture(autouse=True)
def library(monkeypatch):
    module = types.ModuleType("transformers")
    for cls in (TextConfig, PairConfig, TextModel, PairModel, OddModel):
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    return module


def test_only_what_begins_so_is_meant():
    assert is_hugging_face("hf:TextModel")
    assert not is_hugging_face("hf.models:TextModel")


@pytest.mark.parametrize("spec", ["hf:TextModel", "hf:transformers.TextModel"])
def test_a_class_is_built_small_with_inputs_that_it_takes(spec):
    model, inputs = build_model(spec)
    assert (model.config.vocab_size, model.config.hidden_size) == (256, 64)
    assert model.config.pad_token_id == 255  # or it would be out of the small vocabulary
    assert model.config.use_cache is False
    assert model(**inputs.kwargs).shape == (2, 16, 64)


def test_sizes_can_be_given():
    model, _ = build_model("hf:TextModel?hidden_size=8&vocab_size=10")
    assert model.table.weight.shape == (10, 8)


def test_the_parts_of_a_model_of_two_kinds_are_small_as_well():
    model, inputs = build_model("hf:PairModel")
    assert model.table.weight.shape == (256, 64)
    assert sorted(inputs.kwargs) == ["input_ids", "pixel_values"]
    assert inputs.kwargs["pixel_values"].shape == (2, 3, 32, 32)


def test_a_model_that_takes_what_is_not_known_has_no_inputs():
    model, inputs = build_model("hf:OddModel")
    assert isinstance(model, OddModel)
    assert inputs is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hf:TextModl", "'hf:TextModl': transformers has no 'TextModl'; did you mean 'TextModel'"),
        ("hf:TextConfig", "TextConfig is no model class with a configuration of its own"),
        ("hf:TextModel?hiden_size=8", "has no setting 'hiden_size'; did you mean 'hidden_size'?"),
        ("hf:TextModel?hidden_size", "settings are written ?name=value&name=value"),
        ("hf:TextModel?hidden_size=3", "ValueError: hidden_size must be even; give other sizes"),
    ],
)
def test_slips_are_told(spec, message):
    with pytest.raises(UsageError) as caught:
        build_model(spec)
    assert message in str(caught.value)


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'paritas\[transformers\]'"):
        build_model("hf:TextModel")


def test_weights_are_drawn_and_not_fetched():
    torch.manual_seed(0)
    first, _ = build_model("hf:TextModel")
    torch.manual_seed(0)
    second, _ = build_model("hf:TextModel")
    assert torch.equal(first.table.weight, second.table.weight)
