"""Models by class, with a small library that has the shape of transformers."""

from __future__ import annotations

import itertools
import sys
import types

import pytest
import torch
from torch import nn

from paritas.core.errors import UsageError
from paritas.core.targets import configurations, is_target
from paritas.core.targets.hugging_face import build_model


class TextConfig:
    model_type = "text"

    def __init__(
        self,
        *,
        vocab_size=50000,
        hidden_size=4096,
        num_attention_heads=32,
        pad_token_id=49999,
        image_token_id=49998,
        use_cache=True,
        hidden_dropout=0.1,
        layer_types=("slow", "slow", "slow", "full"),
        num_hidden_layers=4,
    ):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_attention_heads = num_attention_heads
        self.pad_token_id, self.use_cache = pad_token_id, use_cache
        self.image_token_id = image_token_id
        self.hidden_dropout = hidden_dropout
        self.layer_types, self.num_hidden_layers = layer_types, num_hidden_layers


class StagesConfig:
    """Widths and heads in lists that run in step."""

    model_type = "stages"

    def __init__(self, hidden_sizes=(256, 512, 1024), num_heads=(1, 2, 4), depths=(3, 4, 6)):
        self.hidden_sizes, self.num_heads, self.depths = hidden_sizes, num_heads, depths
        self.num_channels, self.image_size = 3, 64


class FixedConfig(StagesConfig):
    def __init__(self, hidden_sizes=(384, 768, 1536), num_heads=(1, 2, 4), depths=(1, 1, 1)):
        super().__init__(hidden_sizes, num_heads, depths)


class PairConfig:
    model_type = "pair"

    def __init__(self, text_config=None, vision_config=None, image_token_id=49998):
        self.text_config = text_config or TextConfig()
        self.vision_config = vision_config or StagesConfig()
        self.image_token_id = image_token_id


class SharingConfig(TextConfig):
    """The last layers use keys of earlier ones of the same kind."""

    model_type = "sharing"

    def __init__(
        self,
        *,
        num_hidden_layers=8,
        num_kv_shared_layers=4,
        layer_types=("near", "near", "near", "far") * 2,
        intermediate_size=(256,) * 8,
        sliding_window=512,
        scale=None,
        is_decoder=False,
        **settings,
    ):
        super().__init__(**settings)
        self.layer_types, self.num_hidden_layers = layer_types, num_hidden_layers
        self.num_kv_shared_layers, self.sliding_window = num_kv_shared_layers, sliding_window
        self.intermediate_size, self.scale = intermediate_size, scale
        self.is_decoder = is_decoder


class TextModel(nn.Module):
    config_class = TextConfig
    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__()
        self.config = config
        if config.hidden_size % config.num_attention_heads:
            raise ValueError("hidden_size must be a multiple of num_attention_heads")
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        self.drop = nn.Dropout(0.5)

    def forward(self, input_ids=None, attention_mask=None):
        return self.drop(self.table(input_ids))


class SharingForCausalLM(TextModel):
    config_class = SharingConfig

    def forward(self, input_ids=None):
        config = self.config
        own = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
        for kind, size in zip(config.layer_types, config.intermediate_size, strict=True):
            own.index(kind)
            assert size == config.intermediate_size[0]
        if config.scale is None:
            raise RuntimeError(f"{config.scale}: one of them must not be None")
        return self.table(input_ids) * config.scale


class StagesModel(nn.Module):
    config_class = StagesConfig
    main_input_name = "pixel_values"

    def __init__(self, config):
        super().__init__()
        self.config = config
        sizes = (3, *config.hidden_sizes)
        pairs = itertools.pairwise(sizes)
        self.stages = nn.Sequential(*(nn.Conv2d(a, b, 2, 2) for a, b in pairs))

    def forward(self, pixel_values):
        return self.stages(pixel_values)


class PairModel(nn.Module):
    """Its images' features take the places of tokens, whose number has to fit."""

    config_class = PairConfig
    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.text = TextModel(config.text_config)
        self.vision = StagesModel(config.vision_config)

    def get_image_features(self, pixel_values):
        return self.vision(pixel_values).flatten(2).transpose(1, 2)

    def forward(self, input_ids=None, pixel_values=None):
        features = self.get_image_features(pixel_values)
        places = int((input_ids == self.config.image_token_id).sum())
        if places != features.shape[0] * features.shape[1]:
            raise ValueError(f"{places} places")
        return self.text(input_ids), features


class CountingModel(PairModel):
    """It says how many tokens it needs, and only when it is called."""

    def get_image_features(self, pixels):
        return super().get_image_features(pixels)

    def forward(self, input_ids=None, pixel_values=None):
        places = int((input_ids == self.config.image_token_id).sum())
        if places != 12:
            raise ValueError(
                f"Image features and image tokens do not match, tokens: {places}, features: 12"
            )
        return self.text(input_ids)


class MasklessModel(TextModel):
    def forward(self, input_ids=None, attention_mask=None):
        found = self.table(input_ids)
        return found if attention_mask is None else found / attention_mask[..., None]


class DocumentedConfig(TextConfig):
    model_type = "documented"

    def __init__(self, state_dim=17, **settings):
        super().__init__(**settings)
        self.state_dim = state_dim


class DocumentedModel(nn.Module):
    config_class = DocumentedConfig
    main_input_name = "states"

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layer = nn.Linear(config.state_dim, config.hidden_size)

    def forward(self, states, steps, chosen):
        """Compute.

        Args:
            states (`torch.FloatTensor` of shape `(batch_size, episode_length, state_dim)`):
                States.
            steps (`torch.LongTensor` of shape `(batch_size, episode_length)`):
                Steps.
            chosen (`torch.BoolTensor`, of shape `(batch_size, 1)`):
                Which rows.
        """
        return self.layer(states) * chosen[..., None] + steps[..., None]


class WideModel(DocumentedModel):
    """Its width is not in its signature: the error of the matrix product names it."""

    main_input_name = "hidden_states"

    def __init__(self, config):
        super().__init__(config)
        self.layer = nn.Linear(37, 4)

    def forward(self, hidden_states):
        return self.layer(hidden_states)


class LongModel(DocumentedModel):
    main_input_name = "input_values"

    def forward(self, input_values):
        if input_values.shape[-1] % 1920:
            raise ValueError(f"the length {input_values.shape[-1]} is not a multiple of 1920")
        return input_values


class ClashingModel(TextModel):
    def forward(self, input_ids=None, inputs_embeds=None):
        if input_ids is not None:
            raise ValueError("`input_ids` is expected to be `None`")
        return inputs_embeds


class EmbeddedModel(TextModel):
    """It needs an argument that only its error names."""

    def forward(self, input_ids=None, position_ids=None):
        if position_ids is None:
            raise ValueError("`position_ids` must not be None")
        return self.table(input_ids) + position_ids[..., None]


class QuietModel(TextModel):
    """Only the lines around its error name what is missing."""

    def forward(self, input_ids=None, position_ids=None):
        if position_ids is None:
            raise ValueError("something is missing")
        return self.table(input_ids) + position_ids[..., None]


class PartSpec:
    model_type, init_kwargs = "stages", {}

    def get_config_class(self, model_type):
        assert model_type == "stages"
        return StagesConfig


class OptionalConfig:
    model_type = "optional"
    sub_configs_defaults = {"vision_config": PartSpec()}  # noqa: RUF012 - as in transformers

    def __init__(self, text_config=None, vision_config=None, image_token_id=49998):
        self.text_config = text_config or TextConfig()
        self.vision_config = vision_config
        self.image_token_id = image_token_id


class OptionalModel(PairModel):
    config_class = OptionalConfig


class RecurrentModel(TextModel):
    """Its cache is written in place, which autograd does not allow."""

    def forward(self, input_ids=None):
        state = self.table(input_ids).sigmoid()
        found = (state * state).sum(1)
        if self.config.use_cache:
            state.mul_(2)
        return found


class FixedModel(StagesModel):
    config_class = FixedConfig

    def __init__(self, config):
        super().__init__(config)
        self.last = nn.Linear(1536, 3)

    def forward(self, pixel_values):
        return self.last(super().forward(pixel_values).mean((2, 3)))


class OddModel(TextModel):
    main_input_name = "graph_edges"

    def forward(self, graph_edges):
        return self.table(graph_edges)


class PickyModel(TextModel):
    def forward(self, input_ids=None, attention_mask=None):
        raise ValueError("the moon is not full")


class TextPreTrainedModel(nn.Module):
    config_class = TextConfig


class TextTokenizer:
    pass


class OwnModel(nn.Module):
    def forward(self, x):
        return x


class AutoModelForCausalLM:
    pass


@pytest.fixture(autouse=True)
def library(monkeypatch):
    module = types.ModuleType("transformers")
    for cls in (
        TextConfig,
        StagesConfig,
        PairConfig,
        AutoModelForCausalLM,
        OwnModel,
        TextModel,
        TextPreTrainedModel,
        TextTokenizer,
        SharingForCausalLM,
        StagesModel,
        PairModel,
        CountingModel,
        MasklessModel,
        DocumentedModel,
        WideModel,
        LongModel,
        ClashingModel,
        EmbeddedModel,
        QuietModel,
        OptionalModel,
        RecurrentModel,
        FixedModel,
        OddModel,
        PickyModel,
    ):
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    return module


def test_only_what_begins_so_is_meant():
    assert is_target("hf:TextModel")
    assert is_target("timm:resnet18")
    assert is_target("torchvision:resnet18")
    assert not is_target("hf.models:TextModel")
    assert not is_target("hf")


@pytest.mark.parametrize("spec", ["hf:TextModel", "hf:transformers.TextModel"])
def test_a_class_is_built_small_with_inputs_that_it_takes(spec):
    model, inputs = build_model(spec)
    assert (model.config.vocab_size, model.config.hidden_size) == (256, 64)
    assert model.config.pad_token_id == 255  # or it would be out of the small vocabulary
    assert model.config.image_token_id == 254
    assert model.config.use_cache is True
    assert model(**inputs.kwargs).shape == (2, 16, 64)


def test_words_are_drawn_without_ids_that_mean_something_else():
    _, inputs = build_model("hf:TextModel")
    words = inputs.kwargs["input_ids"][inputs.kwargs["attention_mask"] == 1]
    assert not {254, 255} & set(words.tolist())


def test_one_row_is_padded_and_its_mask_says_so():
    model, inputs = build_model("hf:TextModel")
    ids, mask = inputs.kwargs["input_ids"], inputs.kwargs["attention_mask"]
    assert mask.sum(dim=1).tolist() == [16, 13]
    assert (ids[-1, -3:] == model.config.pad_token_id).all()


def test_a_mask_that_the_model_does_not_stand_is_left_out():
    _, inputs = build_model("hf:MasklessModel")
    assert list(inputs.kwargs) == ["input_ids"]


def test_an_argument_is_drawn_in_its_documented_shape():
    model, inputs = build_model("hf:DocumentedModel")
    assert inputs.kwargs["states"].shape == (2, 16, 17)
    assert inputs.kwargs["steps"].dtype == torch.long
    assert inputs.kwargs["chosen"].dtype == torch.bool
    assert model(**inputs.kwargs).shape[:2] == (2, 16)


@pytest.mark.parametrize(
    "name", ["WideModel", "LongModel", "ClashingModel", "EmbeddedModel", "QuietModel"]
)
def test_what_the_error_asks_for_is_given(name):
    model, inputs = build_model(f"hf:{name}")
    assert torch.isfinite(model(**inputs.kwargs)).all()


def test_parts_that_are_optional_are_filled():
    model, inputs = build_model("hf:OptionalModel")
    assert model.config.vision_config is not None
    assert "pixel_values" in inputs.kwargs


def test_a_cache_that_stops_gradients_is_turned_off():
    model, _ = build_model("hf:RecurrentModel")
    assert model.config.use_cache is False


def test_where_narrow_widths_do_not_fit_they_stay():
    model, _ = build_model("hf:FixedModel")
    assert model.config.hidden_sizes == (384, 768, 1536)


def test_one_layer_of_each_kind_stays():
    model, _ = build_model("hf:TextModel")
    assert model.config.num_hidden_layers == 2
    assert model.config.layer_types == ("slow", "full")


def test_layers_that_share_keys_keep_one_of_each_kind_to_share_with():
    model, inputs = build_model("hf:SharingForCausalLM")
    config = model.config
    assert config.layer_types == ("near", "far", "near", "far")
    assert (config.num_hidden_layers, config.num_kv_shared_layers) == (4, 2)
    assert len(config.intermediate_size) == 4
    # A window that is longer than the inputs would never be seen.
    assert config.sliding_window < inputs.kwargs["input_ids"].shape[1]


def test_a_class_for_next_tokens_is_a_decoder_and_its_missing_number_is_filled():
    model, _ = build_model("hf:SharingForCausalLM")
    assert model.config.is_decoder is True
    assert model.config.scale == 1.0
    model, _ = build_model("hf:SharingForCausalLM?is_decoder=false")
    assert model.config.is_decoder is False


def test_a_number_of_layers_that_is_computed_is_left_to_the_configuration():
    class CycledConfig:
        model_type = "cycled"

        def __init__(self, *, num_hidden_layers=16, num_layers_per_stack=None):
            self.hidden_size = 4096
            if num_layers_per_stack is None:
                num_layers_per_stack, num_hidden_layers = num_hidden_layers, 8 * num_hidden_layers
            self.num_layers_per_stack = num_layers_per_stack
            self.num_hidden_layers = num_hidden_layers

    usual = CycledConfig()
    changes = configurations.plan(usual)
    made = configurations.build(CycledConfig, usual, changes)
    assert (made.num_layers_per_stack, made.num_hidden_layers) == (2, 16)


def test_the_part_of_a_width_that_a_factor_names_is_not_too_narrow():
    class FactorConfig:
        model_type = "factor"

        def __init__(self, *, hidden_size=4096, qk_dim_factor=0.5, v_dim_factor=1.0):
            self.hidden_size, self.v_dim_factor = hidden_size, v_dim_factor
            self.qk_dim_factor = qk_dim_factor

    assert configurations.plan(FactorConfig())[()]["hidden_size"] == 2 * configurations.WIDTH


def test_nothing_is_left_to_chance_in_training_mode():
    model, inputs = build_model("hf:TextModel")
    assert model.config.hidden_dropout == 0.0
    model.train()
    assert torch.equal(model(**inputs.kwargs), model(**inputs.kwargs))


def test_chance_that_is_asked_for_stays():
    model, _ = build_model("hf:TextModel?hidden_dropout=0.25")
    assert model.config.hidden_dropout == 0.25
    assert model.drop.p == 0.5


def test_sizes_can_be_given():
    model, _ = build_model("hf:TextModel?hidden_size=8&vocab_size=10")
    assert model.table.weight.shape == (10, 8)


def test_lists_are_made_small_in_step():
    model, inputs = build_model("hf:StagesModel")
    assert model.config.hidden_sizes == (64, 128, 256)
    assert model.config.num_heads == (1, 2, 4)
    assert model.config.depths == (1, 1, 1)
    assert inputs.kwargs["pixel_values"].shape == (2, 3, 64, 64)


@pytest.mark.parametrize(("name", "places"), [("PairModel", 64), ("CountingModel", 6)])
def test_there_are_as_many_places_for_images_as_features(name, places):
    model, inputs = build_model(f"hf:{name}")
    assert sorted(inputs.kwargs) == ["input_ids", "pixel_values"]
    found = (inputs.kwargs["input_ids"] == model.config.image_token_id).sum(dim=1)
    assert found.tolist() == [places, places]


def test_with_inputs_of_the_users_own_the_model_is_only_built():
    model, inputs = build_model("hf:OddModel", model_alone=True)
    assert isinstance(model, OddModel)
    assert inputs is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hf:TextModl", "'hf:TextModl': transformers has no 'TextModl'; did you mean 'TextModel'"),
        ("hf:TextConfig", "TextConfig is not a model; use a model class such as TextModel"),
        ("hf:TextTokenizer", "TextTokenizer is not a model; use a model class such as TextModel"),
        (
            "hf:TextPreTrainedModel",
            (
                "'hf:TextPreTrainedModel': TextPreTrainedModel has no forward: it is a base class, "
                "or only generates; use a model class such as TextModel"
            ),
        ),
        (
            "hf:AutoModelForCausalLM",
            (
                "AutoModelForCausalLM chooses a class for a checkpoint, and paritas loads none; "
                "use a model class such as LlamaForCausalLM"
            ),
        ),
        ("hf:OwnModel", "OwnModel has no configuration of its own; use a model class such as"),
        ("hf:TextModel?hiden_size=8", "has no setting 'hiden_size'; did you mean 'hidden_size'?"),
        ("hf:TextModel?hidden_size", "write settings as ?name=value&name=value"),
        (
            "hf:TextModel?hidden_size=3",
            "must be a multiple of num_attention_heads; set other sizes",
        ),
        (
            "hf:OddModel",
            "paritas cannot draw graph_edges for OddModel; pass a function that",
        ),
        ("hf:PickyModel", "rejects all inputs drawn for it: ValueError: the moon is not full"),
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
