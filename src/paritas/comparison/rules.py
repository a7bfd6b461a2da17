r"""The user's rules for comparing two dumps: what to match, what may differ, what to ignore.

A rules file is TOML; every part is optional:

.. code-block:: toml

    ignore = ['rotary_emb', '^lm_head']       # regular expressions
    steps = ["1-3:0-2"]                       # my steps 1 to 3 against golden steps 0 to 2

    [rules]                                   # the first match applies
    'layers\.\d+\.attn' = "rel_l2 <= 1e-3 and max_abs < 1"
    '.*' = "cosine_similarity >= 0.999"

    [[rename]]                                # search and replace in my names
    my = '^model\.'
    golden = 'transformer.'

    [[rename]]                                # my tensor is transposed
    my = '(.*)\.fc\.weight'
    golden = '\1.c_fc.weight'
    permute = [1, 0]

    [[rename]]                                # one tensor in mine, three in golden
    my = '(.*)\.qkv\.weight'
    golden = '\1.{part}_proj.weight'
    split = { dim = 0, parts = ["q", "k", "v"], sizes = [64, 16, 16] }

    [[rename]]                                # two tensors in mine, one in golden
    my = '(.*)\.{part}_proj\.bias'
    golden = '\1.gate_up.bias'
    concat = { dim = 0, of = ["gate", "up"] }

    [[dims]]                                  # how a tensor is split over the ranks
    name = 'attn\.out'
    dims = "b s[cp] h[tp] d"

    [mesh]
    cp = 2
    tp = 4

A regular expression matches if it is found in the canonical name (`forward/graph_0/mm#0/output.0`),
in the plain name, which omits pass, call and side (`graph_0/mm`), or in the module's path. Rules
from the command line come before those of the file.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import msgspec
import torch

from paritas.comparison.operands import Operand
from paritas.core.errors import UsageError
from paritas.core.numerics.requirements import Requirement
from paritas.core.placement.meshes import read_axis
from paritas.core.results.wording import ranges, read_span

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torch import Tensor

    from paritas.core.results.items import Order


# --- Steps ----------------------------------------------------------------------------------------

_FORMS = "write 3 or 0-4, or 1:0 or 1-3:0-2 to compare different steps of my and the golden dump"
_MOST_STEPS = 1_000_000


def align_steps(
    my: Collection[int], golden: Collection[int], step_choices: Sequence[str] = ()
) -> tuple[dict[int, int], list[str]]:
    """Map my steps to golden steps; also return notes for the user.

    Steps with the same number match. If each side has a single step, they match whatever their
    numbers, since tools start counting differently.

    Args:
        step_choices: the user's choice instead: `3`, `0-4`, `1:0` or `1-3:0-2`.

    Raises:
        UsageError: `step_choices` cannot be parsed, or a dump does not have that step.
    """
    if step_choices:
        return _align_asked(set(my), set(golden), step_choices), []
    common = sorted(set(my) & set(golden))
    mapping = {step: step for step in common}
    notes: list[str] = []
    if not common and len(set(my)) == len(set(golden)) == 1:
        ((my_step,), (golden_step,)) = set(my), set(golden)
        mapping = {my_step: golden_step}
        notes.append(f"my step {my_step} is compared with golden step {golden_step}, the only ones")
    elif not common and my and golden:
        notes.append(
            f"the dumps have no step in common: mine has {span_text(my)}, the golden one "
            f"{span_text(golden)}; use --steps to match them, for example "
            f"{min(my)}:{min(golden)}"
        )
    else:
        for whose, extra in (("my", set(my) - set(golden)), ("the golden", set(golden) - set(my))):
            if extra:
                steps = "steps" if len(extra) > 1 else "step"
                advice = f"use --steps {span_text(common)} to compare only the common steps"
                advice = advice if common else "the other dump has no steps"
                notes.append(f"only {whose} dump has {steps} {span_text(extra)}; {advice}")
    return mapping, notes


def span_text(steps: Collection[int]) -> str:
    """Steps as short text: `0-4, 7`."""
    return ranges(sorted(set(steps)))


def _align_asked(my: set[int], golden: set[int], step_choices: Sequence[str]) -> dict[int, int]:
    mapping: dict[int, int] = {}
    for text in step_choices:
        for my_step, golden_step in _parse_pairs(text):
            for whose, step, dump_steps in (
                ("my", my_step, my),
                ("the golden", golden_step, golden),
            ):
                if step not in dump_steps:
                    raise UsageError(
                        f"steps: {text!r} selects step {step}, but {whose} dump has "
                        f"{span_text(dump_steps) or 'none'}"
                    )
            if mapping.setdefault(my_step, golden_step) != golden_step:
                raise UsageError(
                    f"steps: {text!r} maps my step {my_step} to golden step {golden_step}, "
                    "but it is "
                    f"already mapped to {mapping[my_step]}; map it once"
                )
    return mapping


def _parse_pairs(text: str) -> Iterator[tuple[int, int]]:
    for part in re.split(r"[,|]", text):
        my_text, colon, golden_text = part.strip().partition(":")
        my_span, golden_span = read_span(my_text), read_span(golden_text if colon else my_text)
        if my_span is None or golden_span is None:
            raise UsageError(f"steps: cannot parse {part!r}; {_FORMS}")
        my_steps, golden_steps = (range(first, last + 1) for first, last in (my_span, golden_span))
        if not my_steps or len(my_steps) != len(golden_steps) or len(my_steps) > _MOST_STEPS:
            raise UsageError(
                f"steps: {part!r} selects {len(my_steps)} of my steps and {len(golden_steps)} "
                "golden steps; select the same number of each, with the lower number first"
            )
        yield from zip(my_steps, golden_steps, strict=True)


# --- Renames --------------------------------------------------------------------------------------

# A rename rule maps names of my dump to names of the golden dump. What it does to the values is a
# recipe, which is applied when the operand is read.

# Placeholder in the names of a rule, replaced by each part's name in turn.
PART = "{part}"


@dataclasses.dataclass(frozen=True)
class Rearranged:
    """Permutes dimensions, then flattens runs of them.

    Attributes:
        words: the text for the table.
        joined: how many of the permuted dimensions become each new one; by default one.
    """

    words: str
    order: tuple[int, ...]
    joined: tuple[int, ...] = ()

    def apply(self, parts: Sequence[Tensor]) -> Tensor:
        """Rearrange the one part."""
        (tensor,) = parts
        if tensor.ndim != len(self.order):
            raise UsageError(
                f"{self.words}: expected {len(self.order)} dimensions, got shape "
                f"{tuple(tensor.shape)}"
            )
        moved = tensor.permute(self.order)
        if not self.joined:
            return moved
        extents = iter(moved.shape)
        return moved.reshape([math.prod(itertools.islice(extents, n)) for n in self.joined])


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """One of `count` parts of a tensor that is split along a dimension.

    Attributes:
        sizes: the length of each part; empty if all are equally long.
    """

    dim: int
    index: int
    count: int
    sizes: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        """The text for the table."""
        return f"part {self.index + 1} of {self.count} along dimension {self.dim}"

    def apply(self, parts: Sequence[Tensor]) -> Tensor:
        """Take this part."""
        (tensor,) = parts
        length = _check_dim(tensor, self.dim)
        sizes = self.sizes or (length // self.count,) * self.count
        if sum(sizes) != length:
            parts_text = (
                f"parts of {list(self.sizes)}" if self.sizes else f"{self.count} equal parts"
            )
            raise UsageError(
                f"dimension {self.dim} of shape {tuple(tensor.shape)} cannot be split into "
                f"{parts_text}"
            )
        return tensor.narrow(self.dim, sum(sizes[: self.index]), sizes[self.index])


@dataclasses.dataclass(frozen=True)
class Joined:
    """`torch.cat`, as a recipe."""

    dim: int
    count: int

    @property
    def words(self) -> str:
        """The text for the table."""
        return f"{self.count} joined along dimension {self.dim}"

    def apply(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate the parts."""
        dtypes = dict.fromkeys(part.dtype for part in parts)
        if len(dtypes) > 1:
            raise UsageError(f"cannot concatenate dtypes {', '.join(map(str, dtypes))}")
        others = set()
        for part in parts:
            _check_dim(part, self.dim)
            shape = list(part.shape)
            del shape[self.dim]
            others.add(tuple(shape))
        if len(others) > 1:
            shapes = dict.fromkeys(tuple(part.shape) for part in parts)
            told = " and ".join(map(str, shapes))
            raise UsageError(f"cannot concatenate shapes {told} along dimension {self.dim}")
        return torch.cat(list(parts), dim=self.dim)


def _check_dim(tensor: Tensor, dim: int) -> int:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise UsageError(
            f"a rename uses dimension {dim}, but the tensor has shape {tuple(tensor.shape)}"
        )
    return tensor.shape[dim]


class _SplitRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Split my tensor into parts; without `sizes`, all are equally long."""

    dim: int = 0
    parts: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.parts or tuple(map(str, range(len(self.sizes))))


class _ConcatRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Concatenate several of my tensors."""

    of: tuple[str, ...]
    dim: int = 0


class Renaming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    r"""A rule that maps a name of my dump to one of the golden dump.

    Attributes:
        my: the regular expression to search in my name; with `concat`, `{part}` is each part.
        golden: the replacement, with `\1` for the first group; with `split`, `{part}` is each part.
        permute: the order of my dimensions, applied last.
    """

    my: str
    golden: str
    permute: tuple[int, ...] = ()
    split: _SplitRule | None = None
    concat: _ConcatRule | None = None

    def patterns(self) -> list[re.Pattern[str]]:
        """The regular expression for each of my parts."""
        parts = self.concat.of if self.concat else ("",)
        return [re.compile(self.my.replace(PART, re.escape(part))) for part in parts]

    def replacements(self) -> list[str]:
        """The replacement for each golden part."""
        parts = self.split.names if self.split else ("",)
        return [self.golden.replace(PART, part) for part in parts]

    def operand(self, operands: Sequence[Operand], golden_part: int = 0) -> Operand:
        """My operand, transformed to match golden part number `golden_part`."""
        operand = operands[0]
        if self.concat:
            operand = Operand(tuple(operands), Joined(self.concat.dim, len(self.concat.of)))
        elif self.split:
            split = self.split
            part = TensorPart(split.dim, golden_part, len(split.names), split.sizes)
            operand = Operand((operand,), part)
        if not self.permute:
            return operand
        words = f"dimensions permuted to {', '.join(map(str, self.permute))}"
        return Operand((operand,), Rearranged(words, self.permute))


# --- Dims annotations -----------------------------------------------------------------------------

# The syntax is that of SGLang's dumper::
#
#     b s[cp:zigzag] h[tp] d # dp:=moe_dp ep:replicated
#
# One word per dimension. Brackets name the mesh axes that it is split over, outermost first:
# `s[cp,sp]`. `zigzag`: rank r of n holds chunks r and 2n-1-r of 2n. `h[tp:partial]`: the ranks hold
# terms of a sum. `h*d` or `(h*d)`: two dimensions flattened into one. `1`: a dimension of length 1
# to drop. After `#`: axes over which the tensor is replicated, and the name of the data-parallel
# axis.

# A name (or names in parentheses), then axes in brackets, or parentheses in older SGLang releases.
_DIMENSION = re.compile(r"(\([^()\[\]#]*\)|[^\s()\[\]#]+)(?:\[([^\[\]#]*)\]|\(([^()#]*)\))?(?!\S)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_SPACE = re.compile(r"\s*")
_LONGEST = 1000
_SQUEEZED = "1"


@dataclasses.dataclass(frozen=True)
class AxisSplit:
    """A mesh axis that a dimension is split over, or (`partial`) reduced over."""

    axis: str
    order: Order = "natural"
    partial: bool = False


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One dimension.

    Attributes:
        names: several if dimensions were flattened into one; none if it is dropped.
        splits: outermost first.
    """

    names: tuple[str, ...]
    splits: tuple[AxisSplit, ...] = ()

    @property
    def is_squeezed(self) -> bool:
        """Whether it is dropped."""
        return not self.names


@dataclasses.dataclass(frozen=True)
class Dims:
    """A parsed annotation.

    Attributes:
        data_axis: the axis of ranks with different samples; only one of them holds the tensor.
        replicated: axes over which all ranks hold the same values.
    """

    text: str
    dimensions: tuple[Dimension, ...]
    data_axis: str = "dp"
    replicated: tuple[str, ...] = ()

    @property
    def splits(self) -> tuple[AxisSplit, ...]:
        """The splits of all dimensions."""
        return tuple(split for dimension in self.dimensions for split in dimension.splits)

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The names of the dimensions that are kept."""
        return tuple(dimension.names for dimension in self.dimensions if not dimension.is_squeezed)


@functools.lru_cache(maxsize=4096)
def parse_dims(text: str) -> Dims:
    """Parse an annotation."""
    if len(text) > _LONGEST:
        raise UsageError(f"dims has {len(text)} characters; the limit is {_LONGEST}")
    shape, _, rest = text.partition("#")
    dimensions = tuple(_parse_dimensions(text, len(shape)))
    if not dimensions:
        _refuse(text, 0, "no dimension given: write one word for each, such as b s h[tp] d")
    data_axis, replicated = _parse_declared(text, len(text) - len(rest))
    dims = Dims(text, dimensions, data_axis, replicated)
    _check_unique(dims)
    return dims


def _parse_dimensions(text: str, end: int) -> Iterator[Dimension]:
    at = _skip_space(text, 0)
    while at < end:
        match = _DIMENSION.match(text, at, end)
        if match is None:
            _refuse(text, at, "not a dimension: write name, name[axis] or (name*name)[axis]")
        axes = 2 if match[2] is not None else 3
        splits: tuple[AxisSplit, ...] = ()
        if match[axes] is not None:
            splits = tuple(_parse_splits(text, match.start(axes), match[axes]))
        names = _parse_names(text, at, match[1])
        if splits and not names:
            _refuse(text, at, "a dimension of length 1 cannot be split: write 1")
        yield Dimension(names, splits)
        at = _skip_space(text, match.end())


def _parse_names(text: str, at: int, word: str) -> tuple[str, ...]:
    if word == _SQUEEZED:
        return ()
    inner = word[1:-1] if word.startswith("(") else word
    names = tuple(name.strip() for name in inner.split("*"))
    for name in names:
        if not _NAME.fullmatch(name):
            _refuse(text, at, f"{name!r} is not a valid name: use letters, digits and _")
    return names


def _parse_splits(text: str, at: int, inner: str) -> Iterator[AxisSplit]:
    for part in inner.split(","):
        begin = at + len(part) - len(part.lstrip())
        axis, _, qualifiers = part.strip().partition(":")
        if not _NAME.fullmatch(axis):
            _refuse(text, begin, f"{axis!r} is not a valid axis: write for example tp")
        yield _parse_qualifiers(
            text, begin, axis, [qualifier.strip() for qualifier in qualifiers.split("+")]
        )
        at += len(part) + 1


def _parse_qualifiers(text: str, at: int, axis: str, qualifiers: list[str]) -> AxisSplit:
    for qualifier in filter(None, qualifiers):
        if qualifier not in ("partial", "zigzag", "natural", "sharded"):
            _refuse(
                text,
                at,
                f"unknown qualifier {qualifier!r}: use partial, zigzag, natural or sharded",
            )
    if "partial" in qualifiers and "zigzag" in qualifiers:
        _refuse(text, at, "zigzag and partial exclude each other: use one of them")
    order: Order = "zigzag" if "zigzag" in qualifiers else "natural"
    return AxisSplit(axis, order, partial="partial" in qualifiers)


def _parse_declared(text: str, at: int) -> tuple[str, tuple[str, ...]]:
    """The data axis and the replicated axes, which follow the `#`."""
    data_axis, replicated = "", []
    for match in re.finditer(r"\S+", text[at:]):
        word_start = at + match.start()
        axis, _, what = match[0].partition(":")
        if what == "replicated" and _NAME.fullmatch(axis):
            replicated.append(axis)
        elif axis == "dp" and what.startswith("=") and _NAME.fullmatch(what[1:]):
            if data_axis:
                _refuse(text, word_start, f"dp is already {data_axis}: define it once")
            data_axis = what[1:]
        else:
            _refuse(
                text, word_start, f"cannot parse {match[0]!r}: write axis:replicated or dp:=axis"
            )
    return data_axis or "dp", tuple(replicated)


def _check_unique(dims: Dims) -> None:
    names = [name for dimension in dims.dimensions for name in dimension.names]
    axes = [*(split.axis for split in dims.splits), *dims.replicated]
    for what, declared_names in (("dimension", names), ("axis", axes)):
        for name in declared_names:
            if declared_names.count(name) > 1:
                again = list(re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", dims.text))[-1]
                _refuse(dims.text, again.start(), f"the {what} {name!r} appears twice: use it once")


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _refuse(text: str, at: int, why: str) -> NoReturn:
    raise UsageError(f"dims: {why}\n    {text}\n    {' ' * at}^")


# --- The file of rules ----------------------------------------------------------------------------

_ID = re.compile(r"(?:forward|backward)/(.*)#\d+/(?:input|output)\.[^/]*", re.DOTALL)
_T = TypeVar("_T")
_LARGEST_FILE = 16 << 20


class _DimsRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    dims: str


class _RulesFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ignore: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    rules: dict[str, str] = {}
    rename: tuple[Renaming, ...] = ()
    dims: tuple[_DimsRule, ...] = ()
    mesh: dict[str, int] = {}


@dataclasses.dataclass(frozen=True)
class Rules:
    """The user's rules, validated; the first match applies.

    Attributes:
        requirements: what pairs must satisfy, by name.
        dims: how tensors are split over ranks, by name.
        mesh: the number of ranks along each axis.
        steps: the steps to compare, as `align_steps` takes them.
    """

    requirements: tuple[tuple[re.Pattern[str], Requirement], ...] = ()
    renamings: tuple[Renaming, ...] = ()
    dims: tuple[tuple[re.Pattern[str], str], ...] = ()
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)
    steps: tuple[str, ...] = ()
    ignored: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def of(
        cls,
        config: Path | None = None,
        *,
        rules: Sequence[tuple[str, str]] = (),
        renames: Sequence[tuple[str, str]] = (),
        dims: Sequence[tuple[str, str]] = (),
        mesh: str = "",
        steps: Sequence[str] = (),
        ignore: Sequence[str] = (),
    ) -> Self:
        """Rules from a file and from arguments, which come first; see `compare`.

        `mesh` and `steps` replace those of the file.

        Raises:
            UsageError: something is invalid; the message shows it.
        """
        file = _RulesFile() if config is None else _load_file(Path(config))
        chosen_steps = tuple(steps) or file.steps
        for text in chosen_steps:
            list(_parse_pairs(text))  # raises if it is invalid
        renamings = [Renaming(my=my, golden=golden) for my, golden in renames]
        return cls(
            requirements=tuple(
                (_compile_pattern(name, "rules"), _parse_requirement(name, text))
                for name, text in (*rules, *file.rules.items())
            ),
            renamings=tuple(_check_renaming(renaming) for renaming in (*renamings, *file.rename)),
            dims=tuple(
                (_compile_pattern(name, "dims"), text)
                for name, text in (*dims, *((dim.name, dim.dims) for dim in file.dims))
            ),
            mesh=_check_mesh(_parse_mesh(mesh) if mesh else file.mesh),
            steps=chosen_steps,
            ignored=tuple(_compile_pattern(text, "ignore") for text in (*ignore, *file.ignore)),
        )

    def requirement_for(self, name: str, module: str = "") -> Requirement | None:
        """What the pair with that canonical name must satisfy, if there is a rule."""
        return _find_first(self.requirements, name, module)

    def dims_for(self, name: str, module: str = "") -> str | None:
        """The annotation of the tensor with that canonical name, if there is one."""
        return _find_first(self.dims, name, module)

    def ignores(self, name: str, module: str = "") -> bool:
        """Whether the value with that canonical name is ignored."""
        return any(_matches(pattern, name, module) for pattern in self.ignored)


@functools.lru_cache(maxsize=1 << 16)
def plain_name(name: str) -> str:
    """A canonical name without pass, call and side; other names are unchanged."""
    match = _ID.fullmatch(name)
    return match[1] if match else name


def _find_first(among: Sequence[tuple[re.Pattern[str], _T]], name: str, module: str) -> _T | None:
    return next(
        (rule_value for pattern, rule_value in among if _matches(pattern, name, module)), None
    )


def _matches(pattern: re.Pattern[str], name: str, module: str) -> bool:
    texts = (name, plain_name(name), module)
    return any(pattern.search(text) is not None for text in texts if text)


# --- parsing --------------------------------------------------------------------------------------


def _load_file(path: Path) -> _RulesFile:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise UsageError(f"{path} is not a rules file: it has more than {_LARGEST_FILE} bytes")
        toml_document: Any = tomllib.loads(path.read_text(encoding="utf-8"))
        return msgspec.convert(toml_document, _RulesFile)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise UsageError(f"{path} is not a rules file: it is nested too deeply") from None
    except msgspec.ValidationError as error:
        known_keys = ", ".join(_RulesFile.__struct_fields__)
        raise UsageError(
            f"{path} is not a rules file: {error}; its keys are {known_keys}"
        ) from None


def _compile_pattern(text: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"{where}: invalid regular expression {text!r}: {error}") from None


def _parse_requirement(name: str, text: str) -> Requirement:
    try:
        return Requirement.parse(text)
    except UsageError as error:
        raise UsageError(f"rules: for {name!r}, {error}") from None


def _check_renaming(renaming: Renaming) -> Renaming:
    split, concat = renaming.split, renaming.concat
    rule = f"rename: my = {renaming.my!r}, golden = {renaming.golden!r}"
    if split is not None and concat is not None:
        raise UsageError(f"{rule}: use split or concat, not both")
    if split is not None:
        _check_parts(rule, split.names, "golden", renaming.golden)
        if split.sizes and (len(split.sizes) != len(split.names) or min(split.sizes) < 0):
            raise UsageError(
                f"{rule}: sizes = {list(split.sizes)} does not fit the parts {list(split.names)}"
            )
    if concat is not None:
        _check_parts(rule, concat.of, "my", renaming.my)
    if sorted(renaming.permute) != list(range(len(renaming.permute))):
        raise UsageError(
            f"{rule}: permute = {list(renaming.permute)} is not a permutation of the "
            "dimensions 0 to "
            f"{len(renaming.permute) - 1}"
        )
    _compile_pattern(renaming.my.replace(PART, ""), "rename")
    try:
        for pattern in renaming.patterns():
            for text in renaming.replacements():
                pattern.sub(text, "")  # validates the replacement even without a match
    except (re.error, IndexError) as error:
        raise UsageError(f"{rule}: {error}; \\1 stands for the first group") from None
    return renaming


def _check_parts(rule: str, parts: tuple[str, ...], side: str, name: str) -> None:
    if len(set(parts)) != len(parts) or len(parts) <= 1:
        raise UsageError(f"{rule}: the parts are {list(parts)}; list two or more, each once")
    if PART not in name:
        raise UsageError(f"{rule}: write {PART} in {side} as a placeholder for the part's name")


def _parse_mesh(text: str) -> dict[str, int]:
    mesh: dict[str, int] = {}
    for part in text.split(","):
        axis = read_axis(part)
        if axis is None or axis[0] in mesh:
            raise UsageError(f"mesh={text!r}: cannot parse {part!r}; write for example tp=2,cp=4")
        mesh[axis[0]] = axis[1]
    return mesh


def _check_mesh(mesh: dict[str, int]) -> dict[str, int]:
    for axis, size in mesh.items():
        if size < 1:
            raise UsageError(f"mesh: {axis} = {size} is invalid: an axis has 1 or more ranks")
    return mesh
