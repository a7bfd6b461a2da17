"""Models of timm and torchvision by name, with small libraries that have their shape."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from paritas.core.errors import UsageError
from paritas.core.targets import build_target


class Blocks(nn.Module):
    """Its images have to be of the size that it was made for."""

    def __init__(self, num_classes=1000, img_size=224, depth=12, embed_dim=768, num_heads=12):
        super().__init__()
        self.side, self.depth = img_size, depth
        self.pretrained_cfg = {"input_size": (3, 224, 224)}
        self.stem = nn.Conv2d(3, embed_dim, 16, 16)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, images):
        if images.shape[-1] != self.side:
            raise ValueError(f"side {images.shape[-1]}, not {self.side}")
        return self.head(self.drop(self.stem(images).mean((2, 3))))


class Wide(nn.Module):
    """It has no setting for its size, and needs images of 96 at least."""

    def __init__(self, num_classes=1000):
        super().__init__()
        self.stem = nn.Conv2d(3, num_classes, 96)

    def forward(self, images):
        return self.stem(images)


class Detector(nn.Module):
    def forward(self, images, targets=None):
        if self.training and targets is None:
            raise ValueError("targets should not be none when in training mode")
        return [{"boxes": image.mean((1, 2))} for image in images]


def detector(*, weights=None, weights_backbone=None, num_classes=91, min_size=800, max_size=1333):
    assert weights is None
    assert weights_backbone is None
    return Detector()


detector.__module__ = "torchvision.models.detection.detector"


def plain(*, weights=None, num_classes=1000):
    assert weights is None
    return Wide(num_classes)


plain.__module__ = "torchvision.models.plain"


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    timm = types.ModuleType("timm")
    known = {"blocks": Blocks, "wide": Wide}
    timm.list_models = lambda: list(known)
    timm.create_model = lambda name, *, pretrained, **given: known[name](**given)
    monkeypatch.setitem(sys.modules, "timm", timm)
    torchvision = types.ModuleType("torchvision")
    builders = {"detector": detector, "plain": plain}
    torchvision.models = types.SimpleNamespace(
        list_models=lambda: list(builders), get_model_builder=builders.get
    )
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)


def test_a_model_is_as_small_as_its_settings_allow():
    model, inputs = build_target("timm:blocks")
    assert (model.depth, model.side, model.stem.out_channels) == (2, 64, 64)
    assert inputs.args[0].shape == (2, 3, 64, 64)
    assert model(*inputs.args).shape == (2, 10)


def test_images_are_the_smallest_that_it_takes():
    _, inputs = build_target("timm:wide")
    assert inputs.args[0].shape == (2, 3, 96, 96)
    _, inputs = build_target("torchvision:plain")
    assert inputs.args[0].shape == (2, 3, 96, 96)


def test_settings_can_be_given():
    model, _ = build_target("timm:blocks?num_classes=5&img_size=224")
    assert (model.head.out_features, model.side) == (5, 224)


def test_nothing_is_left_to_chance_in_training_mode():
    model, inputs = build_target("timm:blocks", train=True)
    model.train()
    assert torch.equal(model(*inputs.args), model(*inputs.args))


def test_a_detector_is_given_lists_and_targets():
    model, inputs = build_target("torchvision:detector", train=True)
    images, targets = inputs.args
    assert [image.shape for image in images] == [(3, 64, 64)] * 2
    assert [sorted(target) for target in targets] == [["boxes", "labels"]] * 2
    assert len(model.train()(*inputs.args)) == 2


def test_with_inputs_of_the_users_own_the_model_is_only_built():
    model, inputs = build_target("torchvision:plain", model_alone=True)
    assert isinstance(model, Wide)
    assert inputs is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("timm:block", "'timm:block': timm has no 'block'; did you mean 'blocks'?"),
        ("torchvision:plan", "torchvision has no 'plan'; did you mean 'plain'?"),
        ("timm:blocks?depth", "write settings as ?name=value&name=value"),
        ("timm:wide?num_clases=3", "unexpected keyword argument 'num_clases'"),
    ],
)
def test_slips_are_told(spec, message):
    with pytest.raises(UsageError) as caught:
        build_target(spec)
    assert message in str(caught.value)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_without_the_library_it_says_what_to_install(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=f"pip install {library}"):
        build_target(f"{library}:plain")
