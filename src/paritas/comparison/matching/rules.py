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
from typing import Any, Self, TypeVar

import msgspec

from paritas.comparison.matching.aligning import check_steps
from paritas.comparison.matching.renaming import PART, Renaming
from paritas.errors import UsageError
from paritas.numerics.requirements import Requirement

__all__ = ["Rules", "plain_name"]

_ID = re.compile(r"(?:forward|backward)/(.*)#\d+/(?:input|output)\.[^/]*", re.DOTALL)
_T = TypeVar("_T")
_LARGEST_FILE = 16 << 20
_MESH = re.compile(r"\s*(\w+)\s*=\s*(\d{1,6})\s*")


class _Split(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dim: int = 0
    parts: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()


class _Concat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    of: tuple[str, ...]
    dim: int = 0


class _Rename(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    my: str
    golden: str
    permute: tuple[int, ...] = ()
    split: _Split | None = None
    concat: _Concat | None = None


class _Dims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    dims: str


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ignore: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    rules: dict[str, str] = {}
    rename: tuple[_Rename, ...] = ()
    dims: tuple[_Dims, ...] = ()
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
        file = _File() if config is None else _load(Path(config))
        wanted = tuple(steps) or file.steps
        check_steps(wanted)
        given = [_Rename(my=my, golden=golden) for my, golden in renames]
        return cls(
            requirements=tuple(
                (_compiled(name, "rules"), _requirement(name, text))
                for name, text in (*rules, *file.rules.items())
            ),
            renamings=tuple(_renaming(one) for one in (*given, *file.rename)),
            dims=tuple(
                (_compiled(name, "dims"), text)
                for name, text in (*dims, *((one.name, one.dims) for one in file.dims))
            ),
            mesh=_mesh(_parse_mesh(mesh) if mesh else file.mesh),
            steps=wanted,
            ignored=tuple(_compiled(text, "ignore") for text in (*ignore, *file.ignore)),
        )

    def requirement_for(self, name: str, module: str = "") -> Requirement | None:
        """What a pair of that canonical name is held to; None where nothing was said."""
        return _first(self.requirements, name, module)

    def dims_for(self, name: str, module: str = "") -> str | None:
        """How the ranks share the tensor of that canonical name, where it was said."""
        return _first(self.dims, name, module)

    def ignores(self, name: str, module: str = "") -> bool:
        """Whether what has that canonical name does not count."""
        return bool(self.ignored) and any(_matches(one, name, module) for one in self.ignored)


@functools.lru_cache(maxsize=1 << 16)
def plain_name(name: str) -> str:
    """A canonical name without pass, call and side; any other stays as it is."""
    found = _ID.fullmatch(name)
    return found[1] if found else name


def _first(among: Sequence[tuple[re.Pattern[str], _T]], name: str, module: str) -> _T | None:
    return next((found for pattern, found in among if _matches(pattern, name, module)), None)


def _matches(pattern: re.Pattern[str], name: str, module: str) -> bool:
    texts = (name, plain_name(name), module)
    return any(pattern.search(text) is not None for text in texts if text)


# --- what was written -----------------------------------------------------------------------------


def _load(path: Path) -> _File:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise UsageError(f"{path} has more than {_LARGEST_FILE} bytes: no file of rules")
        found: Any = tomllib.loads(path.read_text(encoding="utf-8"))
        return msgspec.convert(found, _File)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise UsageError(f"{path} is no file of rules: it is nested too deeply") from None
    except msgspec.ValidationError as error:
        known = ", ".join(_File.__struct_fields__)
        raise UsageError(f"{path} is no file of rules: {error}; it may have {known}") from None


def _compiled(text: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"{where}: {text!r} is no regular expression: {error}") from None


def _requirement(name: str, text: str) -> Requirement:
    try:
        return Requirement.parse(text)
    except UsageError as error:
        raise UsageError(f"rules: for {name!r}, {error}") from None


def _renaming(one: _Rename) -> Renaming:
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
    _compiled(one.my.replace(PART, ""), "rename")
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


def _mesh(mesh: dict[str, int]) -> dict[str, int]:
    for axis, size in mesh.items():
        if size < 1:
            raise UsageError(f"mesh: {axis} = {size}: give how many ranks there are along it")
    return mesh
