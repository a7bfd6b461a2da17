"""What a model's error says about its inputs or its configuration, and the next thing to try."""

from __future__ import annotations

import contextlib
import linecache
import re
import traceback
from typing import TYPE_CHECKING, Any

from paritas.core.targets import configurations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.core.targets.drawing import Drawing


# Models say which argument is missing, which size they expected, how many placeholders an image
# needs, which settings have to agree. Each function here returns what to try next, or None if the
# error does not help.

_COUNTED = re.compile(
    r"(\w+) features and \w+ tokens do not match.*?tokens: (\d+).*?features:? (\d+)", re.DOTALL
)
_UNWANTED = re.compile(
    r"`?(\w+)`? is (?:not expected|expected to be `?None)|cannot (?:\w+ ){1,2}both `?(\w+)`?"
)
# A size that an argument has, and the size that the model expects.
_SIZES = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"expected input\[[\d, ]*\] to have (?P<after>\d+) channels, but got (?P<before>\d+)",
        r"cannot be multiplied \(\d+x(?P<before>\d+) and (?P<after>\d+)x\d+\)",
        r"with shape \[\*, (?P<after>\d+)\], but got input of size\s*\[[\d, ]*?(?P<before>\d+)\]",
        r"tensor a \((?P<before>\d+)\) must match the size of tensor b \((?P<after>\d+)\)",
        r"tensor a \((?P<after>\d+)\) must match the size of tensor b \((?P<before>\d+)\)",
        r"running_mean should contain (?P<before>\d+) elements not (?P<after>\d+)",
        r"multiple of [^.]*?\((?P<unit>\d+)\), but got (?P<before>\d+)",
        r"(?P<before>\d+) (?:is|are) not (?:a )?(?:multiple of|divisible by) [^.\d]*(?P<unit>\d+)",
        r"[Ee]xpect(?:ed|s) [^.]*?(?P<after>\d+)[^.]*?(?:got|found)[^.\d]*(?P<before>\d+)",
        r"got (?P<before>\d+)[^.]*?[Ee]xpected[^.\d]*(?P<after>\d+)",
    )
)
_SECTIONS = re.compile(r"split_sizes to sum exactly to (\d+) .* split_sizes=\[([\d, ]+)\]")
_MISSING = re.compile(r"'(\w+Config)' object has no attribute '(\w+)'")
_EQUAL = re.compile(r"`([\w.]+)` \((\d+)\) must (?:equal|match|be equal to) [^(]*\((\d+)\)")
_DIVISIBLE = re.compile(r"\((\d+)\) must be divisible by \w+ \((\d+)\)")
_LARGEST_SIZE = 32768
_NAMED = 1000  # the weight of a name in the message itself
_NEVER_DRAWN = {"labels", "past_key_values", "inputs_embeds", "decoder_inputs_embeds"}


def repair_inputs(
    drawing: Drawing, kwargs: dict[str, Any], error: Exception
) -> Iterator[dict[str, Any]]:
    """Yield other arguments for a model that rejected these, the likeliest first."""
    message = str(error)
    match = _COUNTED.search(message)
    if match is not None and "input_ids" in kwargs:
        counted = _with_counts(drawing, kwargs, match[1].lower(), int(match[3]))
        if counted is not None:
            yield counted
        return
    if match := _UNWANTED.search(message):
        unwanted = match[1] or match[2]
        if unwanted in kwargs and len(kwargs) + ("inputs_embeds" in drawing.takes) > 1:
            yield drawing.without(kwargs, unwanted)
    if (more := _with_missing(drawing, kwargs, error, clearly=True)) is not None:
        yield more
    for before, after in _sizes_in(message):
        resized = drawing.resize(kwargs, before, after)
        if resized is not None:
            yield resized
    if (more := _with_missing(drawing, kwargs, error, clearly=False)) is not None:
        yield more


def _sizes_in(message: str) -> Iterator[tuple[int, int]]:
    """Yield the sizes that the arguments have, each with the one that the model expects."""
    for pattern in _SIZES:
        if (match := pattern.search(message)) is None:
            continue
        groups = {name: int(text) for name, text in match.groupdict().items()}
        before = groups["before"]
        unit = groups.get("unit", 1) or 1
        after = groups.get("after", -(-before // unit) * unit)
        if 0 < after <= _LARGEST_SIZE and after != before:
            yield before, after


def _with_missing(
    drawing: Drawing, kwargs: dict[str, Any], error: Exception, *, clearly: bool
) -> Any:
    """Draw an argument that the error names, or, less clearly, the lines that raised it."""
    named = names_in_error(error, before=6)
    if clearly and "None" not in str(error):
        named = {name: weight for name, weight in named.items() if weight == _NAMED}
    missing = [n for n, p in drawing.takes.items() if n not in kwargs and p.default is None]
    for name in sorted((n for n in missing if n in named), key=lambda n: -named[n]):
        if name in _NEVER_DRAWN:
            continue
        drawing.drawn = dict(kwargs)
        with contextlib.suppress(Exception):  # it cannot be drawn
            if (value := drawing.draw(name)) is not None:
                return {**kwargs, name: value}
    return None


def _with_counts(drawing: Drawing, kwargs: dict[str, Any], kind: str, features: int) -> Any:
    """Use as many placeholders as the model has features."""
    batch = kwargs["input_ids"].shape[0]
    if kind not in {"image", "video", "audio"} or features % batch:
        return None
    if drawing.counts.get(kind) == features // batch:
        return None
    return drawing.recount(kwargs, kind, features // batch)


def repair_changes(
    usual: Any, changes: configurations.Changes, error: Exception
) -> configurations.Changes | None:
    """Change the configuration as the error says."""
    inner = error.__cause__
    message = f"{error} {inner}" if inner is not None else str(error)
    if "mrope_section" in names_in_error(error) and "None" in message:
        return configurations.with_sections(usual, changes, [2, 3, 3], configurations.HEAD // 2)
    if "must not be None" in message:
        return _with_number(usual, changes, names_in_error(error))
    if "concatenate list (not" in message:
        return _with_lists(usual, changes)
    for pattern, repair in _CONFIGURED:
        if match := pattern.search(message):
            more: configurations.Changes | None = repair(usual, changes, match)
            return more
    return None


_COMMON = {
    "initializer_range": 0.02,
    "initializer_factor": 1.0,
    "layer_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
}


def _with_setting(config: Any, changes: Any, match: re.Match[str]) -> Any:
    """Add a setting that a class expects in a part; None if no size is known for it."""
    owner, name = match[1], match[2]
    kind = configurations.Field((), name, None).kind
    width = configurations.WIDTH if kind == "width" else None
    size = _COMMON.get(name, configurations.USUAL_SIZES.get(kind, width))
    parts = configurations.parts_of(config)
    path = next((p for p, config_part in parts if type(config_part).__name__ == owner), None)
    if size is None or path is None or name in changes.get(path, {}):
        return None
    return {**changes, path: {**changes.get(path, {}), name: size}}


def _with_sections(usual: Any, changes: Any, match: re.Match[str]) -> Any:
    sections = [int(section) for section in match[2].split(",")]
    return configurations.with_sections(usual, changes, sections, int(match[1]))


def _with_equal(_: Any, changes: Any, match: re.Match[str]) -> Any:
    *path, name = match[1].split(".")
    node, size = changes.get(tuple(path), {}), int(match[3])
    return None if node.get(name) == size else {**changes, tuple(path): {**node, name: size}}


def _with_outputs(usual: Any, changes: Any, match: re.Match[str]) -> Any:
    # As many features as places, so their widths differ.
    return _with_output_widths(usual, changes) if match[2] == match[3] else None


def _with_lists(config: Any, changes: configurations.Changes) -> configurations.Changes | None:
    """Lists in place of tuples, for classes that join them to lists; None if there are none."""
    more = dict(changes)
    for path, part in configurations.parts_of(config):
        node = {
            **{f.name: f.value for f in configurations.fields_of(part) if not f.path},
            **changes.get(path, {}),
        }
        lists = {n: list(v) for n, v in node.items() if isinstance(v, tuple)}
        if lists:
            more[path] = {**changes.get(path, {}), **lists}
    return None if more == changes else more


def _with_number(
    config: Any, changes: configurations.Changes, names: dict[str, int]
) -> configurations.Changes | None:
    """Set a number among these settings that is None, where a class cannot do without it."""
    for field in configurations.fields_of(config):
        node = changes.get(field.path, {})
        if field.value is None and field.name in names and field.name not in node:
            return {**changes, field.path: {**node, field.name: 1.0}}
    return None


def _with_multiple(
    changes: configurations.Changes, size: int, unit: int
) -> configurations.Changes | None:
    """A multiple of a unit wherever a changed setting has this size; None if none has it."""
    up = -(-size // unit) * unit
    more = {
        path: {n: up if type(v) is int and v == size else v for n, v in node.items()}
        for path, node in changes.items()
    }
    return None if more == changes else more


_OUTPUTS = re.compile(r"^out(put)?_(hidden_size|dim|size|channels)$|^proj(ection)?_(dim|size)$")


def _with_output_widths(
    config: Any, changes: configurations.Changes
) -> configurations.Changes | None:
    """Give what the parts put out the width of the words; None if it has that already."""
    texts = [path for path, _ in configurations.parts_of(config) if path and "text" in path[-1]]
    if not texts:
        return None
    changed_config = configurations.build(type(config), config, changes)
    sizes = dict(configurations.parts_of(changed_config))
    width = getattr(sizes[texts[0]], "hidden_size", None)
    more = dict(changes)
    for field in configurations.fields_of(changed_config):
        if _OUTPUTS.match(field.name) and field.path != texts[0] and type(field.value) is int:
            more[field.path] = {**more.get(field.path, {}), field.name: width}
    return None if more == changes or width is None else more


_CONFIGURED: tuple[tuple[re.Pattern[str], Any], ...] = (
    (_MISSING, _with_setting),
    (_SECTIONS, _with_sections),
    (_COUNTED, _with_outputs),
    (_DIVISIBLE, lambda _, c, match: _with_multiple(c, int(match[1]), int(match[2]))),
    (_EQUAL, _with_equal),
)


def names_in_error(error: BaseException, before: int = 0) -> dict[str, int]:
    """Names in an error or in the lines that raised it, with weights: the nearest counts most."""
    words: dict[str, int] = {}
    frames = traceback.extract_tb(error.__traceback__)
    for weight, frame in enumerate(frames, 1):
        if "paritas/core/targets/" in frame.filename or "site-packages/torch/" in frame.filename:
            continue
        last = frame.lineno or 0
        lines = [linecache.getline(frame.filename, n) for n in range(last - before, last)]
        for word in re.findall(r"\w+", "".join([*lines, frame.line or ""])):
            words[word] = max(words.get(word, 0), weight)
    for word in re.findall(r"\w+", str(error)):
        words[word] = _NAMED
    return words
