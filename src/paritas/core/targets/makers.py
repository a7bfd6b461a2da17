"""How single arguments are drawn: images, sound, series, words, and the layouts that models use."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.targets.drawing import Documented, Drawing

    Maker = Callable[[Drawing], Any]

BATCH, TOKENS, SAMPLES, FRAMES = 2, 16, 8000, 64
MOST_LAYOUTS = 32
PADDING = 3  # tokens at the end of the last row
_SIDE, _LARGE_SIDE, CHOICES, _LONG_WAVE = 64, 224, 3, 24000
_MOST_FRAMES, _LARGE_MERGE = 4096, 8
WORDS = 100  # the size of an unknown vocabulary
_UNKNOWN_SIZE = 4  # of an axis in the documentation
SPECIAL = re.compile(r"(token_id|token_index|token_ids)$")

IMAGES = ("pixel_values", "pixel_values_images", "image", "flattened_patches")
VIDEOS = ("pixel_values_videos", "pixel_values_video", "video")
AUDIO = ("input_features", "input_values", "audio_values", "audio_input_features", "input_audio")
MEDIA = {"image": IMAGES, "video": VIDEOS, "audio": AUDIO}
# Arguments that accompany images and sound, if the signature has them.
COMPANIONS = (
    *("image_grid_thw", "image_grid_hw", "grid_thw", "image_sizes", "aspect_ratio_ids"),
    *("aspect_ratio_mask", "spatial_shapes", "pixel_attention_mask", "image_position_ids"),
    *("pixel_position_ids", "qformer_input_ids", "target_sizes", "image_attention_mask"),
    *("merge_sizes", "image_merge_sizes", "input_features_mask", "feature_attention_mask"),
    *("bbox", "mm_token_type_ids"),
)
# Masks of what a model sees entirely by default.
MASKS = ("pixel_attention_mask", "input_features_mask", "feature_attention_mask")
SERIES = (
    *("past_time_features", "past_observed_mask", "future_values", "future_time_features"),
    "static_categorical_features",
)
LAST = ("input_ids", "mm_token_type_ids")  # drawn when the placeholders can be counted


# The layouts of audio codes; the first is that of words.
CODES: tuple[Callable[[int], tuple[int, ...]], ...] = (
    lambda _: (BATCH, TOKENS),
    lambda books: (BATCH * books, TOKENS),
    lambda books: (BATCH, books, TOKENS),
    lambda books: (BATCH, TOKENS, books),
)


# --- One argument by what is known of it ----------------------------------------------------------


def maker_by_name(name: str) -> Maker | None:
    """How to draw an argument without an entry, by the end of its name."""
    if name.endswith("_ids"):
        return lambda self: self.words((BATCH, TOKENS))
    if name.endswith("_id"):
        return lambda _: torch.zeros(BATCH, 1, dtype=torch.long)
    if name.endswith("attention_mask"):
        return lambda _: torch.ones(BATCH, TOKENS, dtype=torch.long)
    if name.endswith(("_embeds", "embeddings", "hidden", "hidden_states")):
        return lambda self: torch.randn(BATCH, TOKENS, _width(self))
    return None


def documented_tensor(self: Drawing, name: str, documented: Documented) -> torch.Tensor:
    """A tensor of the documented shape and kind."""
    shape = tuple(_documented_size(self, size) for size in documented.sizes)
    kind = documented.kind or ("long" if name.endswith(("_ids", "mask")) else "float")
    if "mask" in name:
        dtype = {"bool": torch.bool, "float": torch.float32}.get(kind, torch.long)
        return torch.ones(shape, dtype=dtype)
    if kind == "bool":
        return torch.rand(shape) < 0.5  # noqa: PLR2004 - as often true as false
    if kind == "float":
        return torch.randn(shape)
    if "position" in name or "timestep" in name:
        return torch.arange(shape[-1]).expand(shape).contiguous()
    if name.endswith("_ids") and "type" not in name:
        return self.words(shape)
    return torch.randint(0, 2, shape)


def _documented_size(self: Drawing, size: str) -> int:
    total = 1
    for part in re.split(r"\s*[*x]\s+", size):
        total *= _documented_factor(self, part.strip())
    return total


def _documented_factor(self: Drawing, size: str) -> int:
    if size.isdecimal():
        return int(size)
    for pattern, maker in _SIZES:
        if pattern.search(size):
            return int(maker(self))
    return self.number(re.sub(r".*\bconfig\.", "", size), default=_UNKNOWN_SIZE)


def with_size(value: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """The tensor with another size along an axis."""
    if value.is_floating_point():
        return torch.randn(*value.shape[:axis], size, *value.shape[axis + 1 :])
    return value.index_select(axis, torch.arange(size) % value.shape[axis])


# --- Images and video -----------------------------------------------------------------------------


def _channels(self: Drawing) -> int:
    names = ("num_channels", "in_channels", "in_chans", "image_channels")
    return self.number(*names, at="vision", default=3)


def _sides(self: Drawing) -> tuple[int, int]:
    names = ("image_size", "img_size", "input_size", "crop_size", "image_resolution")
    side = self.find(*names, "pretrain_image_size", at="vision", default=_SIDE)
    if isinstance(side, list | tuple) and all(isinstance(side_length, int) for side_length in side):
        return int(side[0]), int(side[-1])
    return (side, side) if isinstance(side, int) else (_SIDE, _SIDE)


def _patch(self: Drawing) -> int:
    return self.number("patch_size", "spatial_patch_size", at="vision", default=14)


def _grid(self: Drawing) -> int:
    """The number of patches along a side, for images of variable size."""
    names = ("spatial_merge_size", "merge_size", "downsample_factor", "merge_kernel_size")
    merge = self.number(*names, at="vision", default=2)
    return max(1, merge) * (2 if merge < _LARGE_MERGE else 1)


def _image(self: Drawing) -> torch.Tensor:
    return torch.randn(BATCH, _channels(self), *_sides(self))


def _large_image(self: Drawing) -> torch.Tensor:
    return torch.randn(BATCH, _channels(self), _LARGE_SIDE, _LARGE_SIDE)


def _one_image_of_several(self: Drawing) -> torch.Tensor:
    return torch.randn(BATCH, 1, _channels(self), *_sides(self))


def _tiles(self: Drawing) -> torch.Tensor:
    tiles = self.number("max_num_tiles", default=4)
    return torch.randn(BATCH, 1, tiles, _channels(self), *_sides(self))


def _video(self: Drawing) -> torch.Tensor:
    frames = self.number("num_frames", "frames_per_clip", at="vision", default=2)
    return torch.randn(BATCH, frames, _channels(self), *_sides(self))


def _video_by_channel(self: Drawing) -> torch.Tensor:
    return _video(self).transpose(1, 2).contiguous()


def _patches(self: Drawing) -> torch.Tensor:
    """Flat patches of all images in one sequence."""
    frames = self.number("temporal_patch_size", "patch_temporal", at="vision", default=1)
    return torch.randn(BATCH * _grid(self) ** 2, _channels(self) * frames * _patch(self) ** 2)


def _patch_images(self: Drawing) -> torch.Tensor:
    """Patches of all images, as small images."""
    return torch.randn(BATCH * _grid(self) ** 2, _channels(self), _patch(self), _patch(self))


def _patch_video(self: Drawing) -> torch.Tensor:
    return _patch_images(self)[None]


def _patch_rows(self: Drawing) -> torch.Tensor:
    """Flat patches, image by image."""
    return _patches(self).reshape(BATCH, _grid(self) ** 2, -1)


def _frames_as_images(self: Drawing) -> torch.Tensor:
    return _video(self).flatten(0, 1)


def _pair_of_images(self: Drawing) -> torch.Tensor:
    return torch.randn(BATCH, 2, _channels(self), *_sides(self))


_PIXELS = (
    *(_image, _one_image_of_several, _video, _patches, _large_image, _video_by_channel),
    *(_patch_images, _patch_video, _tiles, _frames_as_images, _pair_of_images),
)


def _pixels(index: int) -> Maker:
    """The layout with that number; those that the other arguments suggest come first."""

    def draw(self: Drawing) -> torch.Tensor:
        likely = _likely_layouts(self)
        order = [*likely, *(layout for layout in _PIXELS if layout not in likely)]
        return order[index % len(order)](self)

    return draw


def _likely_layouts(self: Drawing) -> list[Callable[[Drawing], torch.Tensor]]:
    if "aspect_ratio_ids" in self.takes:
        return [_tiles]
    if {"image_grid_thw", "grid_thw", "image_grid_hw", "video_grid_thw"} & {*self.takes}:
        return [_patches, _patch_images]
    if {"spatial_shapes", "pixel_position_ids", "image_position_ids"} & {*self.takes}:
        return [_patch_rows, _patches]
    if {"pixel_attention_mask", "image_sizes", "image_attention_mask"} & {*self.takes}:
        return [_one_image_of_several, _image]
    if isinstance(self.find("num_frames", "tubelet_size", at="vision"), int):
        return [_video, _image, _video_by_channel]
    return []


# --- Sound ----------------------------------------------------------------------------------------


def _mels(self: Drawing) -> int:
    names = ("num_mel_bins", "feature_size", "mel_dim", "n_mels", "input_feat_per_channel")
    others = ("num_mel_filters", "feature_projection_input_dim", "input_feat_size", "input_dim")
    return self.number(*names, *others, "model_in_dim", at="audio", default=80)


def _spectrogram(self: Drawing) -> torch.Tensor:
    # Two frames of a spectrogram become one position.
    positions = self.number("max_source_positions", at="audio", default=FRAMES // 2)
    return torch.randn(BATCH, _mels(self), 2 * positions)


def _spectrogram_by_time(self: Drawing) -> torch.Tensor:
    length = self.number("max_length", at="audio", default=FRAMES)
    return torch.randn(BATCH, length if FRAMES < length < _MOST_FRAMES else FRAMES, _mels(self))


def _spectrogram_as_image(self: Drawing) -> torch.Tensor:
    return torch.randn(BATCH, 1, 1024, _mels(self))


def _wave(_: Drawing) -> torch.Tensor:
    return torch.randn(BATCH, SAMPLES)


def _wave_by_channel(self: Drawing) -> torch.Tensor:
    return torch.randn(BATCH, self.number("audio_channels", "channels", default=1), SAMPLES)


def _long_wave(_: Drawing) -> torch.Tensor:
    return torch.randn(BATCH, 1, _LONG_WAVE)


# --- Series ---------------------------------------------------------------------------------------


def _past(self: Drawing) -> int:
    lag = max(self.find("lags_sequence", default=[0]))
    return self.number("context_length", "prediction_length", default=32) + int(lag)


def _past_values(self: Drawing) -> torch.Tensor:
    width = self.number("num_input_channels", "input_size", default=1)
    if "past_time_features" in self.takes and width == 1:
        return _past_row(self)
    return torch.randn(BATCH, _past(self), width)


def _past_row(self: Drawing) -> torch.Tensor:
    return torch.randn(BATCH, _past(self))


def _past_list(self: Drawing) -> list[torch.Tensor]:
    length = self.number("context_length", default=64)
    return [torch.randn(length) for _ in range(BATCH)]


LAYOUTS: dict[str, tuple[Maker, ...]] = {
    **dict.fromkeys(IMAGES[:3], tuple(_pixels(index) for index in range(len(_PIXELS)))),
    **dict.fromkeys(VIDEOS, (_video, _image, _one_image_of_several, _patches)),
    "hidden_states": (lambda self: _hidden(self), _image),  # noqa: PLW0108 - defined below
    "inputs": (
        *(lambda self: self.words((BATCH, TOKENS)), _image, _video, _wave_by_channel),
        *(_wave, _spectrogram_by_time),
    ),
    "input_features": (_spectrogram, _spectrogram_by_time, _spectrogram_as_image, _wave),
    "input_values": (_wave, _wave_by_channel, _spectrogram_by_time, _spectrogram, _long_wave),
    "past_values": (_past_values, _past_row, _past_list),
}


# --- The rest -------------------------------------------------------------------------------------


def _width(self: Drawing) -> int:
    names = ("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim", "dim")
    return self.number(*names, default=64)


def _thw(self: Drawing) -> torch.Tensor:
    return torch.tensor([[1, _grid(self), _grid(self)]] * BATCH)


def _grid_sides(self: Drawing) -> torch.Tensor:
    return torch.tensor([[_grid(self)] * 2] * BATCH)


def _image_sizes(self: Drawing) -> torch.Tensor:
    return torch.tensor([list(_sides(self))] * BATCH)


def _tile_mask(self: Drawing) -> torch.Tensor:
    return torch.ones(BATCH, 1, self.number("max_num_tiles", default=4), dtype=torch.long)


def _pixel_mask(self: Drawing) -> torch.Tensor | None:
    pixels = self.drawn.get("pixel_values")
    if pixels is None:
        return None
    if "spatial_shapes" in self.takes:
        return torch.ones(pixels.shape[:2], dtype=torch.long)
    shape = (*pixels.shape[:-3], *pixels.shape[-2:])
    return torch.ones(shape, dtype=torch.bool) if len(shape) == pixels.ndim - 1 else None


def _places(self: Drawing) -> torch.Tensor:
    side = torch.arange(_grid(self))
    rows = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1)
    return rows.reshape(1, -1, 2).repeat(BATCH, 1, 1)


def _sound_mask(self: Drawing) -> torch.Tensor | None:
    sound = self.drawn.get("input_features")
    if not isinstance(sound, torch.Tensor):
        return None
    by_time = LAYOUTS["input_features"][self.layout.get("input_features", 0)]
    frames = sound.shape[1 if by_time is _spectrogram_by_time else -1]
    return torch.ones(BATCH, frames, dtype=torch.long)


def _boxes(self: Drawing) -> torch.Tensor:
    most = self.number("max_2d_position_embeddings", default=512) // 2
    corner = torch.randint(0, most, (BATCH, TOKENS, 2))
    return torch.cat([corner, corner + torch.randint(0, most, corner.shape)], dim=-1)


def _token_kinds(self: Drawing) -> torch.Tensor:
    ids = self.drawn["input_ids"]
    kinds = torch.zeros_like(ids)
    for number, kind in enumerate(MEDIA, 1):
        if (token := self.placeholder(kind)) is not None:
            kinds[ids == token] = number
    return kinds


def _hidden(self: Drawing) -> torch.Tensor:
    if "grid_thw" in self.takes:
        return _patches(self)
    return torch.randn(BATCH, TOKENS, _width(self))


def _draw_encoder_states(self: Drawing) -> torch.Tensor:
    names = ("cross_attention_hidden_size", "encoder_hidden_size")
    return torch.randn(BATCH, TOKENS, self.number(*names, default=_width(self)))


def _future_values(self: Drawing) -> torch.Tensor:
    past = self.drawn["past_values"]
    return torch.randn(BATCH, self.number("prediction_length", default=8), *past.shape[2:])


def _time_features(self: Drawing, steps: int) -> torch.Tensor:
    return torch.randn(BATCH, steps, self.number("num_time_features", default=0) or 1)


def _frequency(self: Drawing) -> Any:
    kind = str(self.takes["freq"].annotation)
    listed = "Sequence" in kind or "list" in kind or "Tensor" not in kind
    return [0] * BATCH if listed else torch.zeros(BATCH, 1, dtype=torch.long)


def _numbered_patches(self: Drawing) -> torch.Tensor:
    """Patches that begin with their row and column."""
    plain = _channels(self) * _patch(self) ** 2
    width = self.number("patch_embed_hidden_size", default=plain)
    places = torch.randint(0, 4, (BATCH, 16, 2))
    return torch.cat([places.float(), torch.randn(BATCH, 16, width)], dim=-1)


def _entities(_: Drawing) -> torch.Tensor:
    return torch.randint(0, TOKENS, (BATCH, 2))


MAKERS: dict[str, Maker] = {
    "input_ids": lambda self: self.tokens(),
    "decoder_input_ids": lambda self: self.words(
        CODES[self.layout.get("decoder_input_ids", 0)](self.codebooks), decoder=True
    ),
    "attention_mask": lambda self: torch.ones_like(
        self.drawn.get("input_ids", torch.ones(BATCH, TOKENS, dtype=torch.long))
    ),
    "visual_attention_mask": lambda _: torch.ones(BATCH, 4, dtype=torch.long),
    "visual_token_type_ids": lambda _: torch.ones(BATCH, 4, dtype=torch.long),
    "inputs_embeds": lambda self: torch.randn(BATCH, TOKENS, _width(self)),
    "encoder_hidden_states": _draw_encoder_states,
    "image_grid_thw": _thw,
    "grid_thw": _thw,
    "video_grid_thw": _thw,
    "image_grid_hw": _grid_sides,
    "spatial_shapes": _grid_sides,
    "target_sizes": _grid_sides,
    "image_sizes": _image_sizes,
    "aspect_ratio_ids": lambda _: torch.ones(BATCH, 1, dtype=torch.long),
    "aspect_ratio_mask": _tile_mask,
    "pixel_attention_mask": _pixel_mask,
    "image_position_ids": _places,
    "pixel_position_ids": _places,
    "merge_sizes": lambda _: torch.ones(BATCH, dtype=torch.long),
    "image_merge_sizes": lambda _: torch.ones(BATCH, dtype=torch.long),
    "image_attention_mask": lambda _: torch.ones(BATCH, TOKENS, 1, dtype=torch.long),
    "input_features_mask": _sound_mask,
    "feature_attention_mask": _sound_mask,
    "bbox": _boxes,
    "mm_token_type_ids": _token_kinds,
    "flattened_patches": _numbered_patches,
    "spectrogram": _spectrogram_by_time,
    "decoder_input_values": _spectrogram_by_time,
    "past_time_features": lambda self: _time_features(self, _past(self)),
    "future_time_features": lambda self: _time_features(
        self, self.number("prediction_length", default=8)
    ),
    "past_observed_mask": lambda self: torch.ones_like(self.drawn["past_values"]),
    "past_values_padding": lambda self: torch.zeros_like(
        self.drawn["past_values"], dtype=torch.long
    ),
    "future_values": _future_values,
    "freq": _frequency,
    "task_inputs": lambda self: torch.randint(
        1, WORDS, (BATCH, self.number("task_seq_len", default=77))
    ),
    "codebook_idx": lambda _: 1,
    "entity_ids": lambda _: torch.ones(BATCH, 2, dtype=torch.long),
    "entity_position_ids": lambda _: torch.randint(0, TOKENS, (BATCH, 2, 4)),
    "entity_attention_mask": lambda _: torch.ones(BATCH, 2, dtype=torch.long),
    "entity_token_type_ids": lambda _: torch.zeros(BATCH, 2, dtype=torch.long),
    "entity_start_positions": _entities,
    "entity_end_positions": _entities,
    "visual_feats": lambda self: torch.randn(BATCH, 4, self.number("visual_feat_dim", default=64)),
    "visual_pos": lambda self: torch.rand(BATCH, 4, self.number("visual_pos_dim", default=4)),
    "visual_embeds": lambda self: torch.randn(
        BATCH, 4, self.number("visual_embedding_dim", default=64)
    ),
    "lang_ids": lambda _: torch.zeros(BATCH, dtype=torch.long),
}


# --- Sizes by the name that the documentation gives them ------------------------------------------

# The sizes that documentation names; other names are settings.
_SIZES: tuple[tuple[re.Pattern[str], Maker], ...] = (
    (re.compile(r"^(batch|bsz|b$|num_images|num_videos)"), lambda _: BATCH),
    (re.compile(r"num_choices"), lambda _: CHOICES),
    (
        re.compile(r"(sequence|seq|text|target|source|tgt|episode|token)s?_?(length|len)"),
        lambda _: TOKENS,
    ),
    (re.compile(r"^(num_)?channels$"), _channels),
    (re.compile(r"^(image_)?(height|size|h)$"), lambda self: _sides(self)[0]),
    (re.compile(r"^(image_)?(width|w)$"), lambda self: _sides(self)[1]),
    (
        re.compile(r"^(hidden_size|embed(ding)?_(dim|size)|d_model|hidden_dim)$"),
        _width,
    ),
    (re.compile(r"^num_patches$"), lambda self: (_sides(self)[0] // _patch(self)) ** 2),
)
