"""Random inputs for a model of transformers, chosen by its signature and configuration."""

from __future__ import annotations

import inspect
import itertools
import re
from typing import TYPE_CHECKING, Any, cast

import torch

from paritas.targets.configurations import fields_of, parts_of
from paritas.targets.documented import Documented, read_shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Maker = Callable[["Drawing"], Any]

BATCH, TOKENS, SAMPLES, FRAMES = 2, 16, 8000, 64
_MOST_LAYOUTS = 32
_SIDE, _LARGE_SIDE, _CHOICES, _LONG_WAVE = 64, 224, 3, 24000
_MOST_FRAMES, _LARGE_MERGE = 4096, 8
_WORDS = 100  # the size of an unknown vocabulary
_UNKNOWN_SIZE = 4  # of an axis in the documentation
_SPECIAL = re.compile(r"(token_id|token_index|token_ids)$")

_IMAGES = ("pixel_values", "pixel_values_images", "image", "flattened_patches")
_VIDEOS = ("pixel_values_videos", "pixel_values_video", "video")
_AUDIO = ("input_features", "input_values", "audio_values", "audio_input_features", "input_audio")
_MEDIA = {"image": _IMAGES, "video": _VIDEOS, "audio": _AUDIO}
# Arguments that accompany images and sound, if the signature has them.
_COMPANIONS = (
    *("image_grid_thw", "image_grid_hw", "grid_thw", "image_sizes", "aspect_ratio_ids"),
    *("aspect_ratio_mask", "spatial_shapes", "pixel_attention_mask", "image_position_ids"),
    *("pixel_position_ids", "qformer_input_ids", "target_sizes", "image_attention_mask"),
    *("merge_sizes", "image_merge_sizes", "input_features_mask", "feature_attention_mask"),
    *("bbox", "mm_token_type_ids"),
)
# Masks of what a model sees entirely by default.
_MASKS = ("pixel_attention_mask", "input_features_mask", "feature_attention_mask")
_SERIES = (
    *("past_time_features", "past_observed_mask", "future_values", "future_time_features"),
    "static_categorical_features",
)
_LAST = ("input_ids", "mm_token_type_ids")  # drawn when the placeholders can be counted


# The layouts of audio codes; the first is that of words.
_CODES: tuple[Callable[[int], tuple[int, ...]], ...] = (
    lambda _: (BATCH, TOKENS),
    lambda books: (BATCH * books, TOKENS),
    lambda books: (BATCH, books, TOKENS),
    lambda books: (BATCH, TOKENS, books),
)


class Drawing:
    """Draws inputs for a model in several layouts, until the model accepts one.

    Args:
        model: a model with its `config`.

    Attributes:
        drawn: the arguments drawn so far.
        counts: placeholders in each row of tokens, by modality.
        documented: the shapes that the documentation of the model gives, by argument.
        names: the arguments to draw in this attempt.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.config: Any = model.config
        self.takes = inspect.signature(cast("Any", model).forward).parameters
        self.parts = [
            (".".join(name.removesuffix("_config") for name in path), part)
            for path, part in parts_of(self.config)
        ]
        self.documented = read_shapes(cast("Any", model).forward, {*self.takes})
        self.drawn: dict[str, Any] = {}
        self.counts: dict[str, int] = {}
        self.names: list[str] = []
        self._sizes: dict[tuple[str, int], int] = {}
        self._layout: dict[str, int] = {}

    # --- Which arguments to draw ---

    def attempts(self) -> Iterator[dict[str, Any]]:
        """Yield arguments by name: with every modality, then in other layouts, then with fewer.

        Raises:
            LookupError: the model needs an argument that is not known here.
        """
        wanted = self._names()
        bare = [n for n in wanted if self._is_needed(n) or n not in _MASKS]
        needed = [name for name in wanted if self._is_needed(name)]
        tried: list[list[str]] = []
        for names in (wanted, bare, needed):
            if names in tried:
                continue
            tried.append(names)
            layouts = {name: len(_LAYOUTS[name]) for name in names if name in _LAYOUTS}
            if self.codebooks > 1:
                codes = [n for n in ("decoder_input_ids", "input_ids") if n in names]
                layouts |= dict.fromkeys(codes[:1], len(_CODES))
            # The likely ones first: those in which few arguments have an unusual layout.
            choices = sorted(itertools.product(*map(range, layouts.values())), key=sum)
            for chosen in choices[:_MOST_LAYOUTS]:
                self._layout = dict(zip(layouts, chosen, strict=True))
                self.names, self._sizes = names, {}
                try:
                    yield self._draw()
                except (AttributeError, TypeError, ValueError, KeyError, RuntimeError):
                    if not layouts:
                        raise
                    continue

    def _is_needed(self, name: str) -> bool:
        needed = self.takes[name].default is inspect.Parameter.empty
        return needed or name in self._mains() or name == "decoder_input_ids"

    def _mains(self) -> list[str]:
        main = getattr(self.model, "main_input_name", "input_ids") or "input_ids"
        mains = [main] if isinstance(main, str) else list(main)
        return [name for name in mains if name in self.takes]

    def _names(self) -> list[str]:
        """The arguments to pass: the main one, required ones, and those of each modality."""
        takes = self.takes
        names = self._mains()
        for name, one in takes.items():
            if one.default is one.empty and one.kind not in {one.VAR_KEYWORD, one.VAR_POSITIONAL}:
                names.append(name)
        if not names:
            names += [n for n in (*_IMAGES, *_AUDIO, "inputs_embeds") if n in takes][:1]
        if getattr(self.config, "is_encoder_decoder", False):
            names += [n for n in ("decoder_input_ids", "decoder_input_values") if n in takes][:1]
        if "input_ids" in names:
            for group in (_IMAGES, _AUDIO):
                names += [n for n in group if n in takes][:1]
            if not any(n in names for n in _IMAGES):
                names += [n for n in _VIDEOS if n in takes][:1]
        elif "input_ids" in takes and (self.part("text") is not self.config or self._has_words()):
            names.append("input_ids")
        media = (*_IMAGES, *_VIDEOS, *_AUDIO, "hidden_states")
        has_media = any(n in names for n in media)
        names += [n for n in _COMPANIONS if has_media or n == "bbox"]
        names += [n for n in ("visual_embeds",) if "input_ids" in names]
        if "Entity" in type(self.model).__name__:
            names += [n for n in takes if n.startswith("entity_")]
        if "past_values" in names:
            names += [n for n in _SERIES if self.find("cardinality") or "static" not in n]
        known = [n for n in dict.fromkeys(names) if n in takes]
        return [n for n in known if n not in _LAST] + [n for n in _LAST if n in known]

    def _has_words(self) -> bool:
        return hasattr(self.config, "vocab_size")

    def _draw(self) -> dict[str, Any]:
        self.counts, self.drawn = {}, {}
        for name in self.names:
            value = self.draw(name)
            if value is not None:
                self.drawn[name] = value
        return dict(self.drawn)

    def draw(self, name: str) -> Any:
        """Draw one argument; it may depend on those drawn before.

        Raises:
            LookupError: the argument is not known here.
        """
        if name in _LAYOUTS:
            value = _LAYOUTS[name][self._layout.get(name, 0)](self)
        elif maker := _MAKERS.get(name) or self._by_documentation(name) or _by_name(name):
            value = maker(self)
        else:
            raise _UnknownArgumentError(name)
        for (of, axis), size in self._sizes.items():
            if of == name and isinstance(value, torch.Tensor):
                value = _with_size(value, axis, size)
        return value

    def _by_documentation(self, name: str) -> Maker | None:
        found = self.documented.get(name)
        if found is None or not found.sizes:
            return None
        return lambda self: _documented(self, name, found)

    def resize(self, drawn: dict[str, Any], before: int, after: int) -> dict[str, Any] | None:
        """Draw again, with another size where an argument has this one; None if none has it.

        The last axis is the likeliest and the batch stays.
        """
        for axis in (-1, 1, 2, 3):
            for name, value in drawn.items():
                if not isinstance(value, torch.Tensor) or axis >= value.ndim:
                    continue
                place = axis % value.ndim if value.ndim else 0
                if place == 0 or value.shape[place] != before or (name, place) in self._sizes:
                    continue
                self._sizes[name, place] = after
                self.names = [*self.names, *(n for n in drawn if n not in self.names)]
                return self._draw()
        return None

    def without(self, drawn: dict[str, Any], name: str) -> dict[str, Any]:
        """Draw again without an argument; embeddings take the place of tokens."""
        self.names = [one for one in drawn if one != name]
        embeds = name.replace("input_ids", "inputs_embeds")
        if embeds in self.takes and embeds not in self.names:
            self.names.append(embeds)
        return self._draw()

    def recount(self, drawn: dict[str, Any], kind: str, each: int) -> dict[str, Any]:
        """The same arguments with another number of placeholders in each row."""
        self.drawn = {name: value for name, value in drawn.items() if name not in _LAST}
        self.counts[kind] = each
        for name in _LAST:
            if name in drawn:
                self.drawn[name] = self.draw(name)
        return dict(self.drawn)

    # --- Reading the configuration ---

    def part(self, kind: str) -> Any:
        """The part of the configuration for text, vision or audio; the whole if there is none."""
        for name, one in self.parts:
            if kind in name.split("."):
                return one
        for name, one in self.parts:
            if kind in name:
                return one
        if kind == "vision":
            for word in ("image", "backbone", "encoder"):
                for name, one in self.parts:
                    if word in name and hasattr(one, "num_channels"):
                        return one
        return self.config

    def find(self, *names: str, at: str = "", default: Any = None) -> Any:
        """The value of the first of these settings that is set, in the part `at` or anywhere."""
        start = [self.part(at)] if at else []
        for one in (*start, *(part for _, part in self.parts)):
            for name in names:
                value = getattr(one, name, None)
                if value is not None and not callable(value):
                    return value
        return default

    def number(self, *names: str, at: str = "", default: int) -> int:
        """Like `find`, for a number; for a list, its first element."""
        found = self.find(*names, at=at, default=default)
        found = found[0] if isinstance(found, list | tuple) and found else found
        return int(found) if isinstance(found, int | float) else default

    def special_ids(self) -> set[int]:
        """The ids of special tokens."""
        found = set()
        for field in fields_of(self.config):
            if _SPECIAL.search(field.name):
                values = field.value if isinstance(field.value, list | tuple) else [field.value]
                found |= {v for v in values if isinstance(v, int)}
        return found

    def vocabulary(self, *, decoder: bool = False) -> int:
        """The size of the vocabulary of the model or its decoder."""
        text = self.config
        getter = getattr(self.config, "get_text_config", None)
        if getter is not None:
            try:
                text = getter(decoder=True) if decoder else getter(encoder=True)
            except Exception:  # noqa: BLE001 - a configuration without a text part
                text = self.config
        size = getattr(text, "vocab_size", None)
        if not isinstance(size, int):
            size = self.find("vocab_size", "text_vocab_size", "encoder_vocab_size", at="text")
        table = None if decoder else _table_size(self.model)
        return min((s for s in (size, table) if isinstance(s, int) and s > 0), default=_WORDS)

    def words(self, shape: tuple[int, ...], *, decoder: bool = False) -> torch.Tensor:
        """Ids of words; each row ends with the end-of-sentence token."""
        size, special = self.vocabulary(decoder=decoder), self.special_ids()
        usual = [i for i in range(size) if i not in special] or list(range(size))
        ids = torch.tensor(usual)[torch.randint(0, len(usual), shape)]
        end = self.find("eos_token_id", at="text")
        if isinstance(end, int) and 0 <= end < size:
            ids[..., -1] = end
        return ids

    @property
    def codebooks(self) -> int:
        """The number of codebooks of an audio model; 1 for words."""
        names = ("num_codebooks", "n_codes_total", "num_code_groups", "n_codebooks")
        return self.number(*names, default=1)

    # --- Placeholders for images and sound among the words ---

    def tokens(self) -> torch.Tensor:
        """Ids of words, with one placeholder for each feature of images and audio."""
        if type(self.model).__name__.endswith("ForMultipleChoice"):
            return self.words((BATCH, _CHOICES, TOKENS))
        if codes := self._layout.get("input_ids"):
            return self.words(_CODES[codes](self.codebooks))
        ids = self.words((BATCH, TOKENS))
        pieces = [ids[:, :2]]
        for kind, names in _MEDIA.items():
            token = self.placeholder(kind)
            if kind == "video" and self.placeholder("image") is None:
                names = (*names, *_IMAGES)  # noqa: PLW2901 - a model of video alone
            if token is None or not any(name in self.drawn for name in names):
                continue
            count = self.count_features(kind)
            if count:
                begin = self._mark(kind, "start", "begin", "boi", "vision_start")
                end = self._mark(kind, "end", "eoi", "vision_end")
                row = [*begin, *([token] * count), *end]
                pieces.append(torch.tensor(row).expand(BATCH, -1))
        return torch.cat([*pieces, ids[:, 2:]], dim=1)

    def _mark(self, kind: str, *words: str) -> list[int]:
        for word in words:
            for name in (f"{kind}_{word}_token_id", f"{word}_token_id", f"{word}_token_index"):
                value = getattr(self.config, name, None)
                if isinstance(value, int):
                    return [value]
        return []

    def placeholder(self, kind: str) -> int | None:
        """The placeholder token for one feature of an image, a video or a sound."""
        words = {"image": ("image", "img", "media"), "audio": ("audio", "speech", "sound")}
        endings = ("token_id", "token_index", "pad_token_id", "placeholder_id", "patch_id")
        for _, part in self.parts:
            for word in words.get(kind, (kind,)):
                for ending in (*endings, "context_token_id"):
                    value = getattr(part, f"{word}_{ending}", None)
                    if isinstance(value, int):
                        return value
        return None

    def count_features(self, kind: str) -> int:
        """The number of placeholders in each row, as the model reports it."""
        if kind not in self.counts:
            self.counts[kind] = self._ask_for_features(kind)
        return self.counts[kind]

    def _ask_for_features(self, kind: str) -> int:
        for owner in (self.model, getattr(self.model, "model", None)):
            ask = getattr(owner, f"get_{kind}_features", None)
            rows = 0 if ask is None else self._count_rows(ask)
            if rows and rows % BATCH == 0:
                return rows // BATCH
        names = ("{}_seq_length", "mm_tokens_per_{}", "num_{}_tokens", "{}_seq_len")
        return self.number(*(name.format(kind) for name in names), default=1)

    def _count_rows(self, ask: Callable[..., Any]) -> int:
        takes = inspect.signature(ask).parameters
        try:
            with torch.no_grad():
                return _count_rows(ask(**{n: v for n, v in self.drawn.items() if n in takes}))
        except Exception:  # noqa: BLE001 - the forward pass will report the error
            return 0


class _UnknownArgumentError(LookupError):
    pass


def _count_rows(found: Any) -> int:
    pooled = getattr(found, "pooler_output", None)
    if pooled is None:
        pooled = getattr(found, "last_hidden_state", found)
    if isinstance(pooled, torch.Tensor):
        return pooled.numel() // pooled.shape[-1]
    if isinstance(pooled, list | tuple):
        if pooled and isinstance(pooled[0], list | tuple):
            pooled = pooled[0]
        return sum(t.numel() // t.shape[-1] for t in pooled if isinstance(t, torch.Tensor))
    return 0


def _table_size(model: Any) -> int | None:
    try:
        return int(model.get_input_embeddings().num_embeddings)
    except Exception:  # noqa: BLE001 - a model without words
        return None


# --- Images and video -----------------------------------------------------------------------------


def _channels(self: Drawing) -> int:
    names = ("num_channels", "in_channels", "in_chans", "image_channels")
    return self.number(*names, at="vision", default=3)


def _sides(self: Drawing) -> tuple[int, int]:
    names = ("image_size", "img_size", "input_size", "crop_size", "image_resolution")
    side = self.find(*names, "pretrain_image_size", at="vision", default=_SIDE)
    if isinstance(side, list | tuple) and all(isinstance(one, int) for one in side):
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
        order = [*likely, *(one for one in _PIXELS if one not in likely)]
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


_LAYOUTS: dict[str, tuple[Maker, ...]] = {
    **dict.fromkeys(_IMAGES[:3], tuple(_pixels(index) for index in range(len(_PIXELS)))),
    **dict.fromkeys(_VIDEOS, (_video, _image, _one_image_of_several, _patches)),
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
    by_time = _LAYOUTS["input_features"][self._layout.get("input_features", 0)]
    frames = sound.shape[1 if by_time is _spectrogram_by_time else -1]
    return torch.ones(BATCH, frames, dtype=torch.long)


def _boxes(self: Drawing) -> torch.Tensor:
    most = self.number("max_2d_position_embeddings", default=512) // 2
    corner = torch.randint(0, most, (BATCH, TOKENS, 2))
    return torch.cat([corner, corner + torch.randint(0, most, corner.shape)], dim=-1)


def _token_kinds(self: Drawing) -> torch.Tensor:
    ids = self.drawn["input_ids"]
    kinds = torch.zeros_like(ids)
    for number, kind in enumerate(_MEDIA, 1):
        if (token := self.placeholder(kind)) is not None:
            kinds[ids == token] = number
    return kinds


def _hidden(self: Drawing) -> torch.Tensor:
    if "grid_thw" in self.takes:
        return _patches(self)
    return torch.randn(BATCH, TOKENS, _width(self))


def _encoded(self: Drawing) -> torch.Tensor:
    names = ("cross_attention_hidden_size", "encoder_hidden_size")
    return torch.randn(BATCH, TOKENS, self.number(*names, default=_width(self)))


def _future_values(self: Drawing) -> torch.Tensor:
    past = self.drawn["past_values"]
    return torch.randn(BATCH, self.number("prediction_length", default=8), *past.shape[2:])


def _time_features(self: Drawing, steps: int) -> torch.Tensor:
    return torch.randn(BATCH, steps, self.number("num_time_features", default=0) or 1)


def _numbered_patches(self: Drawing) -> torch.Tensor:
    """Patches that begin with their row and column."""
    plain = _channels(self) * _patch(self) ** 2
    width = self.number("patch_embed_hidden_size", default=plain)
    places = torch.randint(0, 4, (BATCH, 16, 2))
    return torch.cat([places.float(), torch.randn(BATCH, 16, width)], dim=-1)


def _entities(_: Drawing) -> torch.Tensor:
    return torch.randint(0, TOKENS, (BATCH, 2))


_MAKERS: dict[str, Maker] = {
    "input_ids": Drawing.tokens,
    "decoder_input_ids": lambda self: self.words(
        _CODES[self._layout.get("decoder_input_ids", 0)](self.codebooks), decoder=True
    ),
    "attention_mask": lambda self: torch.ones_like(
        self.drawn.get("input_ids", torch.ones(BATCH, TOKENS, dtype=torch.long))
    ),
    "visual_attention_mask": lambda _: torch.ones(BATCH, 4, dtype=torch.long),
    "visual_token_type_ids": lambda _: torch.ones(BATCH, 4, dtype=torch.long),
    "inputs_embeds": lambda self: torch.randn(BATCH, TOKENS, _width(self)),
    "encoder_hidden_states": _encoded,
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
    "future_values": _future_values,
    "freq": lambda _: [0] * BATCH,
    "task_inputs": lambda self: torch.randint(
        1, _WORDS, (BATCH, self.number("task_seq_len", default=77))
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


def _with_size(value: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    if value.is_floating_point():
        return torch.randn(*value.shape[:axis], size, *value.shape[axis + 1 :])
    return value.index_select(axis, torch.arange(size) % value.shape[axis])


# The sizes that documentation names; other names are settings.
_SIZES: tuple[tuple[re.Pattern[str], Maker], ...] = (
    (re.compile(r"^(batch|bsz|b$|num_images|num_videos)"), lambda _: BATCH),
    (re.compile(r"num_choices"), lambda _: _CHOICES),
    (
        re.compile(r"(sequence|seq|text|target|source|tgt|episode|token)s?_?(length|len)"),
        lambda _: TOKENS,
    ),
    (re.compile(r"^(num_)?channels$"), _channels),
    (re.compile(r"^(image_)?(height|size|h)$"), lambda self: _sides(self)[0]),
    (re.compile(r"^(image_)?(width|w)$"), lambda self: _sides(self)[1]),
    (
        re.compile(r"^(hidden_size|embed(ding)?_(dim|size)|d_model|hidden_dim)$"),
        lambda self: _width(self),
    ),
    (re.compile(r"^num_patches$"), lambda self: (_sides(self)[0] // _patch(self)) ** 2),
)


def _documented(self: Drawing, name: str, found: Documented) -> torch.Tensor:
    """A tensor of the documented shape and kind."""
    shape = tuple(_documented_size(self, size) for size in found.sizes)
    kind = found.kind or ("long" if name.endswith(("_ids", "mask")) else "float")
    if "mask" in name:
        whole = {"bool": torch.bool, "float": torch.float32}.get(kind, torch.long)
        return torch.ones(shape, dtype=whole)
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
    if size.isdecimal():
        return int(size)
    for pattern, maker in _SIZES:
        if pattern.search(size):
            return int(maker(self))
    return self.number(re.sub(r".*\bconfig\.", "", size), default=_UNKNOWN_SIZE)


def _by_name(name: str) -> Maker | None:
    """How to draw an argument without an entry, by the end of its name."""
    if name.endswith("_ids"):
        return lambda self: self.words((BATCH, TOKENS))
    if name.endswith("attention_mask"):
        return lambda _: torch.ones(BATCH, TOKENS, dtype=torch.long)
    if name.endswith(("_embeds", "embeddings", "hidden")):
        return lambda self: torch.randn(BATCH, TOKENS, _width(self))
    return None
