"""Models of timm and torchvision by name: `timm:resnet18`, `torchvision:maskrcnn_resnet50_fpn`.

They are built with random weights, with few classes, and as small as the factory's settings allow.
The inputs are the smallest images, clips or pairs of frames that the model accepts.
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import inspect
import warnings
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.errors import UsageError, in_one_line
from paritas.core.execution.subjects import Inputs
from paritas.core.targets import parse_target, turn_off_chance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

_BATCH, _CLASSES, _FRAMES, _DETECTIONS = 2, 10, 8, 8
_SIDES = (64, 96, 128, 160, 192, 224, 256, 288, 384, 448, 512)


def build_vision(
    factory: str, *, train: bool = False, model_alone: bool = False
) -> tuple[torch.nn.Module, Inputs | None]:
    """Build a model of timm or torchvision, and inputs for it.

    Args:
        factory: `timm:name` or `torchvision:name`, with settings after `?`.
        train: the model will run in training mode.
        model_alone: build the model without inputs, and do not call it.

    Raises:
        UsageError: the library is missing, it has no such model or setting, or the model rejects
            the inputs.
    """
    library, name, user_settings = parse_target(factory)
    module = _import(library)
    find = _timm_plans if library == "timm" else _torchvision_plans
    state = torch.get_rng_state()
    first: Exception | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for make, settings, inputs in find(module, name, user_settings, factory):
            try:
                torch.set_rng_state(state)
                model = make(**{**settings, **user_settings})
                drawn = None if model_alone else inputs()
                if drawn is not None:
                    _call(copy.deepcopy(model), drawn, train=train)
            except Exception as error:  # noqa: BLE001 - reported if no other plan works
                first = first or error
                continue
            if not any("drop" in key or "stochastic" in key for key in user_settings):
                turn_off_chance(model)
            return model, drawn
    raise UsageError(
        f"{factory!r}: {name} could not be built and called: "
        f"{'nothing was tried' if first is None else in_one_line(first)}; set sizes with "
        "?name=value, or build it in your own function and name that as module:function"
    ) from first


def _import(library: str) -> ModuleType:
    try:
        return importlib.import_module(library)
    except (ImportError, RuntimeError) as error:  # a build for another torch raises RuntimeError
        raise UsageError(
            f"models named {library}:... need {library}, which cannot be imported "
            f"({in_one_line(error)}): pip install {library} in a version that fits this torch"
        ) from error


def _check_name(name: str, known_names: list[str], factory: str) -> None:
    if name not in known_names:
        near = difflib.get_close_matches(name, known_names, n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise UsageError(f"{factory!r}: {factory.partition(':')[0]} has no {name!r}{hint}")


def _call(model: torch.nn.Module, inputs: Inputs, *, train: bool) -> None:
    model.train(train)
    with torch.no_grad():
        model(*copy.deepcopy(inputs.args))


# --- timm -----------------------------------------------------------------------------------------

# Settings for depth and width, and the small values that they get.
_KNOBS: dict[str, tuple[Any, ...]] = {
    "depth": (2,),
    "depths": ((1, 1, 1, 1), (1, 1, 1)),
    "layers": ((1, 1, 1, 1), (1, 1, 1), (1, 1, 1, 1, 1)),
    "num_blocks": (2,),
}
_WIDTHS = {"embed_dim": 64, "num_heads": 4}


def _timm_plans(
    library: Any, name: str, user_settings: dict[str, Any], factory: str
) -> Iterator[tuple[Callable[..., Any], dict[str, Any], Callable[[], Inputs]]]:
    _check_name(name.partition(".")[0], library.list_models(), factory)

    def make(**settings: Any) -> torch.nn.Module:
        model: torch.nn.Module = library.create_model(name, pretrained=False, **settings)
        return model

    with torch.device("meta"):
        usual = make()
    takes = inspect.signature(type(usual).__init__).parameters
    pretrained_config: dict[str, Any] = getattr(usual, "pretrained_cfg", {}) or {}
    channels, *_, largest = pretrained_config.get("input_size", (3, 224, 224))
    base = {"num_classes": _CLASSES} if "num_classes" in takes else {}
    for knobs in _timm_knobs(takes):
        sized = "img_size" in takes
        for side in (*(s for s in _SIDES if s < largest), largest):
            settings = {**base, **knobs, **({"img_size": side} if sized else {})}
            if _can_make(make, {**settings, **user_settings}):
                yield make, settings, functools.partial(_images, channels, side)
    yield make, base, functools.partial(_images, channels, largest)


def _timm_knobs(takes: Any) -> Iterator[dict[str, Any]]:
    depths = [{knob: v} for knob, values in _KNOBS.items() if knob in takes for v in values]
    widths = {name: size for name, size in _WIDTHS.items() if name in takes}
    if len(widths) == len(_WIDTHS):
        yield from ({**depth, **widths} for depth in depths if "depth" in depth)
    yield from depths
    yield {}


def _can_make(make: Callable[..., Any], settings: dict[str, Any]) -> bool:
    """Whether the factory accepts these settings; tried on the meta device, without memory."""
    try:
        with torch.device("meta"):
            make(**settings)
    except NotImplementedError:
        return True  # not every model can be built on the meta device
    except Exception as error:  # noqa: BLE001 - the next settings are tried
        return "meta" in str(error)
    return True


def _images(channels: int, side: int) -> Inputs:
    return Inputs((torch.randn(_BATCH, channels, side, side),))


# --- torchvision ----------------------------------------------------------------------------------


def _torchvision_plans(
    library: Any, name: str, _: dict[str, Any], factory: str
) -> Iterator[tuple[Callable[..., Any], dict[str, Any], Callable[[], Inputs]]]:
    _check_name(name, library.models.list_models(), factory)
    builder = library.models.get_model_builder(name)
    home = builder.__module__
    takes = inspect.signature(builder).parameters
    none = {key: None for key in ("weights", "weights_backbone") if key in takes}
    classes = 2 if name.startswith("keypoint") else _CLASSES
    named = {"num_classes": classes} if "optical_flow" not in home else {}
    if ".detection" in home:
        sides = {"min_size": _SIDES[0], "max_size": _SIDES[0]}
        few = (
            {**sides, name: _DETECTIONS}
            for name in ("box_detections_per_img", "detections_per_img")
        )
        for sized in (*few, sides, {}):
            yield builder, {**none, **named, **sized}, functools.partial(_scenes, _SIDES[0], name)
        return
    if ".optical_flow" in home:
        yield builder, none, lambda: Inputs((*_images(3, 128).args, *_images(3, 128).args))
        return
    if ".video" in home:
        for frames, side in ((_FRAMES, 64), (_FRAMES, 112), (16, 112), (16, 224)):
            yield builder, {**none, **named}, functools.partial(_clip, frames, side)
        return
    quantized = {"quantize": False} if ".quantization" in home else {}
    for side in _SIDES:
        inputs = functools.partial(_images, 3, side)
        yield builder, {**none, **named, **quantized, "image_size": side}, inputs
        yield builder, {**none, **named, **quantized}, inputs


def _clip(frames: int, side: int) -> Inputs:
    return Inputs((torch.randn(_BATCH, 3, frames, side, side),))


def _scenes(side: int, name: str) -> Inputs:
    """Images for a detector, and the targets that it needs in training."""
    images = [torch.rand(3, side, side) for _ in range(_BATCH)]
    corner = side // 4
    boxes = torch.tensor([[1.0, 1.0, side / 2, side / 2], [corner, corner, side - 1.0, side - 2.0]])
    targets = []
    for _ in images:
        target: dict[str, Any] = {"boxes": boxes.clone(), "labels": torch.tensor([1, 1])}
        if name.startswith("mask"):
            masks = torch.zeros(2, side, side, dtype=torch.uint8)
            masks[:, corner:-corner, corner:-corner] = 1
            target["masks"] = masks
        if name.startswith("keypoint"):
            points = torch.rand(2, 17, 3) * side
            points[..., 2] = 1
            target["keypoints"] = points
        targets.append(target)
    return Inputs((images, targets))
