r"""What a user says of two dumps: what belongs together, what may differ, what does not count.

A file of rules is TOML; all of it may be left out:

.. code-block:: toml

    ignore = ['rotary_emb', '^lm_head']       # regular expressions
    steps = ["1-3:0-2"]                       # my steps 1 to 3 against golden ones 0 to 2

    [rules]                                   # where several match, the first counts
    'layers\.\d+\.attn' = "rel_l2 <= 1e-3 and max_abs < 1"
    '.*' = "cosine_similarity >= 0.999"

    [[rename]]                                # the name of mine is searched, what it finds replaced
    my = '^model\.'
    golden = 'transformer.'

    [[rename]]                                # mine is transposed
    my = '(.*)\.fc\.weight'
    golden = '\1.c_fc.weight'
    permute = [1, 0]

    [[rename]]                                # mine is one, the golden side has three
    my = '(.*)\.qkv\.weight'
    golden = '\1.{part}_proj.weight'
    split = { dim = 0, parts = ["q", "k", "v"], sizes = [64, 16, 16] }

    [[rename]]                                # mine are two, the golden side has one
    my = '(.*)\.{part}_proj\.bias'
    golden = '\1.gate_up.bias'
    concat = { dim = 0, of = ["gate", "up"] }

    [[dims]]                                  # how the ranks of a run share a tensor
    name = 'attn\.out'
    dims = "b s[cp] h[tp] d"

    [mesh]
    cp = 2
    tp = 4

A regular expression is searched in the canonical name (`forward/graph_0/mm#0/output.0`), in the
plain one, which is the same without pass, call and side (`graph_0/mm`), and in the module's path;
one that is found in any of them matches. What is given on the command line comes before the file.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
import torch

from paritas.comparison.operands import Operand
from paritas.errors import UsageError
from paritas.numerics.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from torch import Tensor


# --- Steps ----------------------------------------------------------------------------------------

_SPAN = r"(\d{1,9})(?:-(\d{1,9}))?"
_ASKED = re.compile(rf"{_SPAN}(?::{_SPAN})?")
_FORMS = "write 3, 0-4, or 1:0 and 1-3:0-2 for my steps against golden ones"
_MOST_STEPS = 1_000_000


def align_steps(
    my: Collection[int], golden: Collection[int], asked: Sequence[str] = ()
) -> tuple[dict[int, int], list[str]]:
    """Steps of mine, and the golden steps they belong to; and what should be known of that.

    Steps of the same number belong together. Where there is one step on each side, these do,
    whatever they are called: tools do not agree where to begin to count.

    Args:
        asked: what the user wants instead, `3`, `0-4`, `1:0` or `1-3:0-2`.

    Raises:
        UsageError: what was asked for cannot be read, or a dump has no such step.
    """
    if asked:
        return _as_asked(set(my), set(golden), asked), []
    common = sorted(set(my) & set(golden))
    mapping = {step: step for step in common}
    notes: list[str] = []
    if not common and len(set(my)) == len(set(golden)) == 1:
        ((mine,), (theirs,)) = set(my), set(golden)
        mapping = {mine: theirs}
        notes.append(f"my step {mine} is compared with golden step {theirs}: there is no other")
    elif not common and my and golden:
        notes.append(
            f"no step is in both dumps: mine has {span_text(my)}, the golden one "
            f"{span_text(golden)}; say which belong together, for example "
            f"{min(my)}:{min(golden)}"
        )
    else:
        for whose, extra in (
            ("mine", set(my) - set(golden)),
            ("the golden one", set(golden) - set(my)),
        ):
            if extra:
                advice = f"ask for {span_text(common)} to compare what both have"
                advice = advice if common else "the other one has none"
                notes.append(f"{_describe_steps(extra)} in but one dump, {whose}; {advice}")
    return mapping, notes


def check_steps(asked: Iterable[str]) -> None:
    """See whether what was asked for can be read.

    Raises:
        UsageError: it cannot.
    """
    for text in asked:
        list(_parse_pairs(text))


def span_text(steps: Collection[int]) -> str:
    """Steps in few words: `0-4, 7`."""
    spans: list[list[int]] = []
    for step in sorted(set(steps)):
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _describe_steps(steps: Collection[int]) -> str:
    return f"steps {span_text(steps)} are" if len(steps) > 1 else f"step {span_text(steps)} is"


def _as_asked(my: set[int], golden: set[int], asked: Sequence[str]) -> dict[int, int]:
    mapping: dict[int, int] = {}
    for text in asked:
        for mine, theirs in _parse_pairs(text):
            for whose, step, there in (("my", mine, my), ("the golden", theirs, golden)):
                if step not in there:
                    raise UsageError(
                        f"steps: {text!r} asks for step {step}, and {whose} dump has "
                        f"{span_text(there) or 'none'}"
                    )
            if mapping.setdefault(mine, theirs) != theirs:
                raise UsageError(
                    f"steps: {text!r} puts my step {mine} against golden step {theirs}, and "
                    f"another against {mapping[mine]}; give it once"
                )
    return mapping


def _parse_pairs(text: str) -> Iterator[tuple[int, int]]:
    for part in re.split(r"[,|]", text):
        found = _ASKED.fullmatch(part.strip())
        if found is None:
            raise UsageError(f"steps: {part!r} cannot be read; {_FORMS}")
        mine = _parse_span(found[1], found[2])
        theirs = mine if found[3] is None else _parse_span(found[3], found[4])
        if not mine or len(mine) != len(theirs) or len(mine) > _MOST_STEPS:
            raise UsageError(
                f"steps: {part!r} has {len(mine)} steps of mine and {len(theirs)} golden ones; "
                f"give as many of each, and the lesser number first"
            )
        yield from zip(mine, theirs, strict=True)


def _parse_span(first: str, last: str | None) -> range:
    return range(int(first), int(last or first) + 1)


# --- Names, and what is done to the values --------------------------------------------------------

# A rule is applied to the names of my dump and gives names of the golden one. What it does to the
# values is a recipe, which travels with the operand until that is read.

# Stands, in the names of a rule, for each of the parts in turn.
PART = "{part}"


@dataclasses.dataclass(frozen=True)
class Permuted:
    """The dimensions of a tensor in another order, as `Tensor.permute` has it."""

    order: tuple[int, ...]

    @property
    def words(self) -> str:
        """What is done, for the table."""
        return f"dimensions permuted to {', '.join(map(str, self.order))}"

    def apply(self, parts: Sequence[Tensor]) -> Tensor:
        """Do it.

        Raises:
            UsageError: it has another number of dimensions.
        """
        tensor = _take_only(parts)
        if tensor.ndim != len(self.order):
            raise UsageError(
                f"a rename permutes {len(self.order)} dimensions to {list(self.order)}, and the "
                f"tensor has the shape {tuple(tensor.shape)}"
            )
        return tensor.permute(self.order)


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """One of the parts that a tensor is taken apart to along a dimension.

    Attributes:
        index: which.
        count: of how many.
        sizes: how long each is; empty where all are equally long.
    """

    dim: int
    index: int
    count: int
    sizes: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        """What is done, for the table."""
        return f"part {self.index + 1} of {self.count} along dimension {self.dim}"

    def apply(self, parts: Sequence[Tensor]) -> Tensor:
        """Do it.

        Raises:
            UsageError: it cannot be taken apart like that.
        """
        tensor = _take_only(parts)
        length = _check_dim(tensor, self.dim)
        sizes = self.sizes or (length // self.count,) * self.count
        if sum(sizes) != length:
            told = f"parts of {list(self.sizes)}" if self.sizes else f"{self.count} equal parts"
            raise UsageError(
                f"dimension {self.dim} of the shape {tuple(tensor.shape)} does not split into "
                f"{told}"
            )
        return tensor.narrow(self.dim, sum(sizes[: self.index]), sizes[self.index])


@dataclasses.dataclass(frozen=True)
class Joined:
    """Tensors put one behind the other along a dimension."""

    dim: int
    count: int

    @property
    def words(self) -> str:
        """What is done, for the table."""
        return f"{self.count} joined along dimension {self.dim}"

    def apply(self, parts: Sequence[Tensor]) -> Tensor:
        """Do it.

        Raises:
            UsageError: they do not fit together.
        """
        shapes = [tuple(part.shape) for part in parts]
        told = " and ".join(map(str, dict.fromkeys(shapes)))
        dtypes = dict.fromkeys(part.dtype for part in parts)
        if len(dtypes) > 1:
            raise UsageError(f"parts of the dtypes {', '.join(map(str, dtypes))} are not joined")
        for part in parts:
            at = self.dim % part.ndim if _check_dim(part, self.dim) >= 0 else 0
            rest = (*part.shape[:at], *part.shape[at + 1 :])
            first = (*shapes[0][:at], *shapes[0][at + 1 :])
            if rest != first or part.ndim != len(shapes[0]):
                raise UsageError(f"the shapes {told} do not join along dimension {self.dim}")
        return torch.cat(list(parts), dim=self.dim)


def _take_only(parts: Sequence[Tensor]) -> Tensor:
    (tensor,) = parts
    return tensor


def _check_dim(tensor: Tensor, dim: int) -> int:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise UsageError(
            f"a rename speaks of dimension {dim}, and the tensor has the shape "
            f"{tuple(tensor.shape)}"
        )
    return tensor.shape[dim]


@dataclasses.dataclass(frozen=True)
class Renaming:
    r"""A rule: what is called so in my dump is called otherwise in the golden one.

    Attributes:
        my: is searched in a name of mine; with `concat`, `{part}` stands for each part.
        golden: what the found text is replaced by, with `\1` for what the first group found; with
            `split`, `{part}` stands for each part.
        dim: the dimension along which is split or joined.
        split: the parts that mine is taken apart to.
        sizes: how long these are; empty where all are equally long.
        concat: the parts of mine that are joined.
        permute: the order that the dimensions of mine are brought to, after all else.
    """

    my: str
    golden: str
    dim: int = 0
    split: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    concat: tuple[str, ...] = ()
    permute: tuple[int, ...] = ()

    def patterns(self) -> list[re.Pattern[str]]:
        """What is searched for: one for each part of mine."""
        parts = self.concat or ("",)
        return [re.compile(self.my.replace(PART, re.escape(part))) for part in parts]

    def replacements(self) -> list[str]:
        """What it is replaced by: one for each golden part."""
        parts = self.split or ("",)
        return [self.golden.replace(PART, part) for part in parts]

    def operand(self, mine: Sequence[Operand], golden_part: int = 0) -> Operand:
        """Mine, made into what the golden side has.

        Args:
            mine: one, or all of `concat`.
            golden_part: which part of `split`.
        """
        made = mine[0]
        if self.concat:
            made = Operand(tuple(mine), Joined(self.dim, len(self.concat)))
        elif self.split:
            made = Operand((made,), TensorPart(self.dim, golden_part, len(self.split), self.sizes))
        return Operand((made,), Permuted(self.permute)) if self.permute else made


# --- The file of rules ----------------------------------------------------------------------------

_ID = re.compile(r"(?:forward|backward)/(.*)#\d+/(?:input|output)\.[^/]*", re.DOTALL)
_T = TypeVar("_T")
_LARGEST_FILE = 16 << 20
_MESH = re.compile(r"\s*(\w+)\s*=\s*(\d{1,6})\s*")


class _SplitRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dim: int = 0
    parts: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()


class _ConcatRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    of: tuple[str, ...]
    dim: int = 0


class _RenameRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    my: str
    golden: str
    permute: tuple[int, ...] = ()
    split: _SplitRule | None = None
    concat: _ConcatRule | None = None


class _DimsRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    dims: str


class _RulesFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ignore: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    rules: dict[str, str] = {}
    rename: tuple[_RenameRule, ...] = ()
    dims: tuple[_DimsRule, ...] = ()
    mesh: dict[str, int] = {}


@dataclasses.dataclass(frozen=True)
class Rules:
    """What was said, checked; where several match, the first counts.

    Attributes:
        requirements: what pairs are held to, by their names.
        renamings: names of mine that are others on the golden side.
        dims: how the ranks share a tensor, by its name.
        mesh: how many ranks there are along each axis.
        steps: which steps to compare, as `align_steps` takes them.
        ignored: names of what does not count.
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
        """Rules from a file and from what was given beside it, which counts first.

        Args:
            config: the file.
            rules: regular expression and requirement.
            renames: regular expression in my names, and what is put for it.
            dims: regular expression and annotation.
            mesh: `tp=2,cp=2`; takes the place of the file's.
            steps: take the place of the file's.

        Raises:
            UsageError: something cannot be read; the message shows it.
        """
        file = _RulesFile() if config is None else _load_file(Path(config))
        wanted = tuple(steps) or file.steps
        check_steps(wanted)
        given = [_RenameRule(my=my, golden=golden) for my, golden in renames]
        return cls(
            requirements=tuple(
                (_compile_pattern(name, "rules"), _parse_requirement(name, text))
                for name, text in (*rules, *file.rules.items())
            ),
            renamings=tuple(_make_renaming(one) for one in (*given, *file.rename)),
            dims=tuple(
                (_compile_pattern(name, "dims"), text)
                for name, text in (*dims, *((one.name, one.dims) for one in file.dims))
            ),
            mesh=_check_mesh(_parse_mesh(mesh) if mesh else file.mesh),
            steps=wanted,
            ignored=tuple(_compile_pattern(text, "ignore") for text in (*ignore, *file.ignore)),
        )

    def requirement_for(self, name: str, module: str = "") -> Requirement | None:
        """What a pair of that canonical name is held to; None where nothing was said."""
        return _find_first(self.requirements, name, module)

    def dims_for(self, name: str, module: str = "") -> str | None:
        """How the ranks share the tensor of that canonical name, where it was said."""
        return _find_first(self.dims, name, module)

    def ignores(self, name: str, module: str = "") -> bool:
        """Whether what has that canonical name does not count."""
        return bool(self.ignored) and any(_matches(one, name, module) for one in self.ignored)


@functools.lru_cache(maxsize=1 << 16)
def plain_name(name: str) -> str:
    """A canonical name without pass, call and side; any other stays as it is."""
    found = _ID.fullmatch(name)
    return found[1] if found else name


def _find_first(among: Sequence[tuple[re.Pattern[str], _T]], name: str, module: str) -> _T | None:
    return next((found for pattern, found in among if _matches(pattern, name, module)), None)


def _matches(pattern: re.Pattern[str], name: str, module: str) -> bool:
    texts = (name, plain_name(name), module)
    return any(pattern.search(text) is not None for text in texts if text)


# --- what was written -----------------------------------------------------------------------------


def _load_file(path: Path) -> _RulesFile:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise UsageError(f"{path} has more than {_LARGEST_FILE} bytes: no file of rules")
        found: Any = tomllib.loads(path.read_text(encoding="utf-8"))
        return msgspec.convert(found, _RulesFile)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise UsageError(f"{path} is no file of rules: it is nested too deeply") from None
    except msgspec.ValidationError as error:
        known = ", ".join(_RulesFile.__struct_fields__)
        raise UsageError(f"{path} is no file of rules: {error}; it may have {known}") from None


def _compile_pattern(text: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"{where}: {text!r} is no regular expression: {error}") from None


def _parse_requirement(name: str, text: str) -> Requirement:
    try:
        return Requirement.parse(text)
    except UsageError as error:
        raise UsageError(f"rules: for {name!r}, {error}") from None


def _make_renaming(one: _RenameRule) -> Renaming:
    split, concat = one.split, one.concat
    told = f"rename: my = {one.my!r}, golden = {one.golden!r}"
    if split is not None and concat is not None:
        raise UsageError(f"{told}: give split or concat, not both")
    parts = () if split is None else split.parts or tuple(map(str, range(len(split.sizes))))
    if split is not None:
        _check_parts(told, parts, "golden", one.golden)
        if split.sizes and (len(split.sizes) != len(parts) or min(split.sizes) < 0):
            raise UsageError(f"{told}: sizes = {list(split.sizes)} for the parts {list(parts)}")
    if concat is not None:
        _check_parts(told, concat.of, "my", one.my)
    if sorted(one.permute) != list(range(len(one.permute))):
        raise UsageError(
            f"{told}: permute = {list(one.permute)} is no order of the dimensions 0 to "
            f"{len(one.permute) - 1}"
        )
    made = Renaming(
        my=one.my,
        golden=one.golden,
        dim=split.dim if split else concat.dim if concat else 0,
        split=parts,
        sizes=split.sizes if split else (),
        concat=concat.of if concat else (),
        permute=one.permute,
    )
    _compile_pattern(one.my.replace(PART, ""), "rename")
    try:
        for pattern in made.patterns():
            for text in made.replacements():
                pattern.sub(text, "")  # reads the replacement, even where there is nothing to do
    except (re.error, IndexError) as error:
        raise UsageError(f"{told}: {error}; \\1 stands for what the first group found") from None
    return made


def _check_parts(told: str, parts: tuple[str, ...], side: str, name: str) -> None:
    if len(set(parts)) != len(parts) or len(parts) <= 1:
        raise UsageError(f"{told}: the parts are {list(parts)}; give two or more, each once")
    if PART not in name:
        raise UsageError(f"{told}: write {PART} in {side}, where the name of the part stands")


def _parse_mesh(text: str) -> dict[str, int]:
    mesh: dict[str, int] = {}
    for part in text.split(","):
        found = _MESH.fullmatch(part)
        if found is None or found[1] in mesh:
            raise UsageError(f"mesh={text!r}: {part!r} cannot be read; write tp=2,cp=4")
        mesh[found[1]] = int(found[2])
    return mesh


def _check_mesh(mesh: dict[str, int]) -> dict[str, int]:
    for axis, size in mesh.items():
        if size < 1:
            raise UsageError(f"mesh: {axis} = {size}: give how many ranks there are along it")
    return mesh
