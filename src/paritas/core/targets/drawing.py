"""Random inputs for a model of transformers, by its signature, configuration and documentation."""

from __future__ import annotations

import inspect
import itertools
import re
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from paritas.core.targets.configurations import fields_of, parts_of
from paritas.core.targets.makers import (
    AUDIO,
    BATCH,
    CHOICES,
    CODES,
    COMPANIONS,
    IMAGES,
    LAST,
    LAYOUTS,
    MAKERS,
    MASKS,
    MEDIA,
    MOST_LAYOUTS,
    PADDING,
    SERIES,
    SPECIAL,
    TOKENS,
    VIDEOS,
    WORDS,
    documented_tensor,
    maker_by_name,
    with_size,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas.core.targets.makers import Maker


# --- The shapes that the documentation gives for the arguments of the forward method --------------
# The docstring of transformers' models describes each argument in a line such as
#
# prompt_masks (`torch.FloatTensor` of shape `(batch_size, num_channels, height, width)`):

_ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\((.*)|:.*)$")
_SHAPE = re.compile(r"(?:of )?shape:?\s*`{0,2}[(\[]([^()\[\]]*)[)\]]")
_KIND = re.compile(r"\b(Float|Long|Int|Bool|Double)Tensor\b")
_LINES = 3  # the lines of a description that may hold the shape


class Documented(NamedTuple):
    """What the documentation says about a tensor.

    Attributes:
        kind: `float`, `long` or `bool`; empty if it is not said.
        sizes: the names of its sizes, such as `batch_size`, or numbers.
    """

    kind: str
    sizes: tuple[str, ...]


def read_shapes(forward: Callable[..., Any], names: set[str]) -> dict[str, Documented]:
    """Read the shapes of arguments with these names from the documentation of a function."""
    lines = (getattr(forward, "__doc__", None) or "").split("\n")
    documented: dict[str, Documented] = {}
    for number, line in enumerate(lines):
        start = _ARGUMENT.match(line)
        if start is None or start[1] not in names or start[1] in documented:
            continue
        text = line
        for more in lines[number + 1 : number + _LINES]:
            nested = _ARGUMENT.match(more)
            if nested is not None and nested[1] in names:
                break
            text += " " + more.strip()
        shape = _SHAPE.search(text)
        if shape is None:
            continue
        kind = _KIND.search(text[: shape.start()])
        sizes = tuple(
            size_name.strip(" `") for size_name in shape[1].split(",") if size_name.strip(" `.")
        )
        documented[start[1]] = Documented(_kind_named(kind[1] if kind else ""), sizes)
    return documented


def _kind_named(name: str) -> str:
    return {"Float": "float", "Double": "float", "Bool": "bool", "": ""}.get(name, "long")


# --- The inputs -----------------------------------------------------------------------------------


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
        self.layout: dict[str, int] = {}

    # --- Which arguments to draw ---

    def attempts(self, *, least: bool = False) -> Iterator[dict[str, Any]]:
        """Yield arguments by name: with every modality, then in other layouts.

        Args:
            least: only the arguments that the model needs.

        Raises:
            LookupError: the model needs an argument that is not known here.
        """
        argument_names = self._names()
        bare = [n for n in argument_names if self._is_needed(n) or n not in MASKS]
        needed = [name for name in argument_names if self._is_needed(name)]
        tried: list[list[str]] = []
        for names in (needed,) if least else (argument_names, bare):
            if names in tried or (least and needed == argument_names):
                continue
            tried.append(names)
            layouts = {name: len(LAYOUTS[name]) for name in names if name in LAYOUTS}
            if self.codebooks > 1:
                codes = [n for n in ("decoder_input_ids", "input_ids") if n in names]
                layouts |= dict.fromkeys(codes[:1], len(CODES))
            # The likely ones first: those in which few arguments have an unusual layout.
            choices = sorted(itertools.product(*map(range, layouts.values())), key=sum)
            for chosen in choices[:MOST_LAYOUTS]:
                self.layout = dict(zip(layouts, chosen, strict=True))
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
        for name, parameter in takes.items():
            if parameter.default is parameter.empty and parameter.kind not in {
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            }:
                names.append(name)
        if not names:
            names += [n for n in (*IMAGES, *AUDIO, "inputs_embeds") if n in takes][:1]
        if getattr(self.config, "is_encoder_decoder", False):
            names += [n for n in ("decoder_input_ids", "decoder_input_values") if n in takes][:1]
        if "input_ids" in names:
            for group in (IMAGES, AUDIO):
                names += [n for n in group if n in takes][:1]
            if not any(n in names for n in IMAGES):
                names += [n for n in VIDEOS if n in takes][:1]
        elif "input_ids" in takes and (self.part("text") is not self.config or self._has_words()):
            names.append("input_ids")
        media = (*IMAGES, *VIDEOS, *AUDIO, "hidden_states")
        has_media = any(n in names for n in media)
        names += [n for n in COMPANIONS if has_media or n == "bbox"]
        names += [n for n in ("visual_embeds",) if "input_ids" in names]
        if "Entity" in type(self.model).__name__:
            names += [n for n in takes if n.startswith("entity_")]
        if "past_values" in names:
            names += [n for n in SERIES if self.find("cardinality") or "static" not in n]
        known_names = [n for n in dict.fromkeys(names) if n in takes]
        return [n for n in known_names if n not in LAST] + [n for n in LAST if n in known_names]

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
        if name in LAYOUTS:
            value = LAYOUTS[name][self.layout.get(name, 0)](self)
        elif maker := MAKERS.get(name) or self._by_documentation(name) or maker_by_name(name):
            value = maker(self)
        else:
            raise _UnknownArgumentError(name)
        for (of, axis), size in self._sizes.items():
            if of == name and isinstance(value, torch.Tensor):
                value = with_size(value, axis, size)
        return value

    def _by_documentation(self, name: str) -> Maker | None:
        documented = self.documented.get(name)
        if documented is None or not documented.sizes:
            return None
        return lambda self: documented_tensor(self, name, documented)

    def resize(self, drawn: dict[str, Any], before: int, after: int) -> dict[str, Any] | None:
        """Draw again, with another size where an argument has this one; None if none has it.

        The last axis is the likeliest and the batch stays.
        """
        for axis in (-1, 1, 2, 3):
            for name, value in drawn.items():
                if not isinstance(value, torch.Tensor) or axis >= value.ndim:
                    continue
                positive_axis = axis % value.ndim if value.ndim else 0
                if (
                    positive_axis == 0
                    or value.shape[positive_axis] != before
                    or (name, positive_axis) in self._sizes
                ):
                    continue
                self._sizes[name, positive_axis] = after
                self.names = [*self.names, *(n for n in drawn if n not in self.names)]
                return self._draw()
        return None

    def pad(self, drawn: dict[str, Any]) -> dict[str, Any] | None:
        """The same arguments with a padded last row and its mask; None if there is no mask."""
        ids, mask = drawn.get("input_ids"), drawn.get("attention_mask")
        if "attention_mask" not in self.takes or not isinstance(ids, torch.Tensor):
            return None
        if ids.ndim < 2 or ids.shape[-1] < TOKENS or self.layout.get("input_ids"):  # noqa: PLR2004
            return None
        if isinstance(mask, torch.Tensor) and mask.shape != ids.shape:
            return None
        pad = self.find("pad_token_id", at="text")
        ids, mask = ids.clone(), torch.ones_like(ids)
        rows, masks = ids.reshape(-1, ids.shape[-1]), mask.view(-1, ids.shape[-1])
        masks[-1, -PADDING:] = 0
        if isinstance(pad, int) and 0 <= pad < self.vocabulary():
            rows[-1, -PADDING - 1] = rows[-1, -1]
            rows[-1, -PADDING:] = pad
        return {**drawn, "input_ids": rows.view(ids.shape), "attention_mask": mask}

    def without(self, drawn: dict[str, Any], name: str) -> dict[str, Any]:
        """Draw again without an argument; embeddings take the place of tokens."""
        self.names = [drawn_name for drawn_name in drawn if drawn_name != name]
        embeds = name.replace("input_ids", "inputs_embeds")
        if embeds in self.takes and embeds not in self.names:
            self.names.append(embeds)
        return self._draw()

    def recount(self, drawn: dict[str, Any], kind: str, each: int) -> dict[str, Any]:
        """The same arguments with another number of placeholders in each row."""
        self.drawn = {name: value for name, value in drawn.items() if name not in LAST}
        self.counts[kind] = each
        for name in LAST:
            if name in drawn:
                self.drawn[name] = self.draw(name)
        return dict(self.drawn)

    # --- Reading the configuration ---

    def part(self, kind: str) -> Any:
        """The part of the configuration for text, vision or audio; the whole if there is none."""
        for name, config_part in self.parts:
            if kind in name.split("."):
                return config_part
        for name, config_part in self.parts:
            if kind in name:
                return config_part
        if kind == "vision":
            for word in ("image", "backbone", "encoder"):
                for name, config_part in self.parts:
                    if word in name and hasattr(config_part, "num_channels"):
                        return config_part
        return self.config

    def find(self, *names: str, at: str = "", default: Any = None) -> Any:
        """The value of the first of these settings that is set, in the part `at` or anywhere."""
        start = [self.part(at)] if at else []
        for config_part in (*start, *(part for _, part in self.parts)):
            for name in names:
                value = getattr(config_part, name, None)
                if value is not None and not callable(value):
                    return value
        return default

    def number(self, *names: str, at: str = "", default: int) -> int:
        """Like `find`, for a number; for a list, its first element."""
        setting = self.find(*names, at=at, default=default)
        setting = setting[0] if isinstance(setting, list | tuple) and setting else setting
        return int(setting) if isinstance(setting, int | float) else default

    def special_ids(self) -> set[int]:
        """The ids of special tokens."""
        token_ids = set()
        for field in fields_of(self.config):
            if SPECIAL.search(field.name):
                values = field.value if isinstance(field.value, list | tuple) else [field.value]
                token_ids |= {v for v in values if isinstance(v, int)}
        return token_ids

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
        return min((s for s in (size, table) if isinstance(s, int) and s > 0), default=WORDS)

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
            return self.words((BATCH, CHOICES, TOKENS))
        if codes := self.layout.get("input_ids"):
            return self.words(CODES[codes](self.codebooks))
        ids = self.words((BATCH, TOKENS))
        pieces = [ids[:, :2]]
        for kind, names in MEDIA.items():
            token = self.placeholder(kind)
            if kind == "video" and self.placeholder("image") is None:
                names = (*names, *IMAGES)  # noqa: PLW2901 - a model of video alone
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


def _count_rows(model_output: Any) -> int:
    pooled = getattr(model_output, "pooler_output", None)
    if pooled is None:
        pooled = getattr(model_output, "last_hidden_state", model_output)
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
