"""The blocks of a model: its repeated modules, which are its layers."""

from __future__ import annotations

import collections
import fnmatch
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paritas.core.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# A module outside of the repeated ones is a block of its own, as an embedding or a head, if it has
# at least this share of the parameters of the largest of them.
LARGE_SHARE = 0.25
_WRAPPER = "_orig_mod"


def require_blocks(
    modules: Mapping[str, nn.Module], patterns: Sequence[str] | None, whose: str
) -> dict[str, nn.Module]:
    """The blocks of a program that is to be checked by blocks, as `find_blocks` finds them.

    Args:
        whose: `model` or `reference`, for the message.

    Raises:
        UsageError: it has no blocks, or a pattern matches no module.
    """
    blocks = find_blocks(modules, patterns)
    if not blocks:
        raise UsageError(
            f"by='blocks' found no repeated modules in the {whose}; name its blocks, as in "
            "blocks=['layers.*']"
        )
    return blocks


def find_blocks(
    modules: Mapping[str, nn.Module], patterns: Sequence[str] | None = None
) -> dict[str, nn.Module]:
    """The blocks of a program by name, in the order of the model; they do not overlap.

    Args:
        modules: prefix of a name -> module, as `reachable_modules` gives them.
        patterns: names or globs of the blocks, such as `layers.*`; the outermost modules that match
            are taken. By default, blocks are found by structure.

    Raises:
        UsageError: a pattern matches no module.
    """
    if patterns is not None:
        return _match_blocks(modules, patterns)
    blocks_by_name: dict[str, nn.Module] = {}
    for prefix, module in modules.items():
        blocks_by_name |= dict(_find_repeated_modules(module, prefix.removesuffix(".")))
    if blocks_by_name:
        largest = max(map(parameter_bytes, blocks_by_name.values()))
        for prefix, module in modules.items():
            name = prefix.removesuffix(".")
            blocks_by_name |= dict(_large_ones(module, name, blocks_by_name, LARGE_SHARE * largest))
    return {name: blocks_by_name[name] for name in named_modules(modules) if name in blocks_by_name}


def count_kinds(blocks: Iterable[nn.Module]) -> int:
    """The number of kinds of blocks: blocks that differ only in their weights are of one kind."""
    return len({_signature(block) for block in blocks})


def named_modules(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """All modules of a program by name; what `torch.compile` wraps has the name of its wrapper."""
    named: dict[str, nn.Module] = {}
    for prefix, root in modules.items():
        for name, module in _named_below(root, prefix.removesuffix("."), set()):
            named.setdefault(name, module)
    return named


def _named_below(
    module: nn.Module, name: str, visited_ids: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in visited_ids:
        return
    visited_ids.add(id(module))
    yield name, module
    for key, child in module.named_children():
        yield from _named_below(child, _join_names(name, key), visited_ids)


def _join_names(name: str, key: str) -> str:
    if key == _WRAPPER:
        return name
    return f"{name}.{key}" if name else key


def _match_blocks(
    modules: Mapping[str, nn.Module], patterns: Sequence[str]
) -> dict[str, nn.Module]:
    modules_by_name = named_modules(modules)
    matched_modules: dict[str, nn.Module] = {}
    for pattern in patterns:
        fits = {
            name: module
            for name, module in modules_by_name.items()
            if name and fnmatch.fnmatchcase(name, pattern)
        }
        if not fits:
            hint = did_you_mean(pattern, sorted(filter(None, modules_by_name)))
            raise UsageError(f"blocks: no module of the model matches {pattern!r}; {hint}")
        matched_modules |= fits
    # A container is not called, its children are; `layers.*` also matches what is inside of them.
    matched_modules = {
        name: matched_module
        for name, matched_module in matched_modules.items()
        if not _is_only_container(matched_module)
    }
    inner = {
        name
        for name in matched_modules
        for other in matched_modules
        if name != other and name.startswith(f"{other}.")
    }
    return {
        name: matched_modules[name]
        for name in modules_by_name
        if name in matched_modules and name not in inner
    }


def _is_only_container(module: nn.Module) -> bool:
    return type(module) in {nn.ModuleList, nn.ModuleDict}


def _find_repeated_modules(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost repeated modules; stages that all differ are searched for smaller ones."""
    groups: dict[type, list[nn.Module]] = collections.defaultdict(list)
    if isinstance(module, _CONTAINERS):
        for child in module.children():
            if _can_be_block(child):
                groups[type(child)].append(child)
    groups = {kind: group for kind, group in groups.items() if len(group) > 1}
    alike = {kind: _are_alike(group) for kind, group in groups.items()}
    for key, child in module.named_children():
        here = _join_names(name, key)
        if type(child) not in groups:
            yield from _find_repeated_modules(child, here)
            continue
        inner = dict(_find_repeated_modules(child, here)) if not alike[type(child)] else {}
        covered = sum(map(parameter_bytes, inner.values()))
        if 2 * covered >= parameter_bytes(child) > 0:
            yield from inner.items()
        else:
            yield here, child


def _can_be_block(module: nn.Module) -> bool:
    """Whether a module is more than one operator, and has something to verify."""
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    has_children = next(module.children(), None) is not None
    return has_children and not is_scripted and parameter_bytes(module) > 0


def _are_alike(group: list[nn.Module]) -> bool:
    """Whether at least half of the modules have the same structure."""
    counts = collections.Counter(map(_signature, group))
    return 2 * counts.most_common(1)[0][1] >= len(group)


def count_alike(blocks: Mapping[str, nn.Module]) -> int:
    """The number of blocks in the largest group of blocks with the same structure."""
    return max(collections.Counter(map(_signature, blocks.values())).values(), default=0)


def _signature(module: nn.Module) -> Any:
    tensors = [
        (name, tuple(tensor.shape), tensor.dtype) for name, tensor in module.named_parameters()
    ]
    return type(module), tuple(tensors), tuple(type(child) for child in module.modules())


def _large_ones(
    module: nn.Module, name: str, blocks_by_name: Mapping[str, nn.Module], limit: float
) -> Iterator[tuple[str, nn.Module]]:
    """The smallest modules outside of the blocks that have at least `limit` bytes of parameters."""
    if name in blocks_by_name and blocks_by_name[name] is module:
        return
    own_bytes = sum(tensor.nbytes for tensor in module.parameters(recurse=False))
    if own_bytes >= limit and name and not isinstance(module, torch.jit.ScriptModule):
        yield name, module
        return
    for key, child in module.named_children():
        yield from _large_ones(child, _join_names(name, key), blocks_by_name, limit)


def parameter_bytes(module: nn.Module) -> int:
    """The memory of a module's parameters and buffers."""
    tensors = {id(t): t.nbytes for t in (*module.parameters(), *module.buffers())}
    return sum(tensors.values())
