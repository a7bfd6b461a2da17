"""The blocks of a model, and the model without them.

Blocks are the repeated modules of a model: its layers. A model is cut where it calls them: each
call of a block is a program of its own, and so is the rest, in which each call of a block is
replaced by a cut that takes the block's inputs and returns a given result. If all these programs
compute the same on both sides, so do the two models.
"""

from __future__ import annotations

import collections
import contextlib
import fnmatch
import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paritas.core.errors import UsageError, did_you_mean
from paritas.core.execution.reachable import original_of
from paritas.core.execution.saved_state import RandomState
from paritas.core.numerics.contents import leaves
from paritas.core.torch_private.tensors import INTERNALS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# --- Finding blocks -------------------------------------------------------------------------------

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# A module outside of the repeated ones is a block of its own, as an embedding or a head, if it has
# at least this share of the parameters of the largest of them.
LARGE_SHARE = 0.25
_WRAPPER = "_orig_mod"


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
    found: dict[str, nn.Module] = {}
    for prefix, module in modules.items():
        found |= dict(_repeated(module, prefix.removesuffix(".")))
    if found:
        largest = max(map(parameter_bytes, found.values()))
        for prefix, module in modules.items():
            name = prefix.removesuffix(".")
            found |= dict(_large_ones(module, name, found, LARGE_SHARE * largest))
    order = [name for name, _ in named_modules(modules)]
    return {name: found[name] for name in order if name in found}


def named_modules(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """All modules of a program by name; what `torch.compile` wraps has the name of its wrapper."""
    for prefix, root in modules.items():
        yield from _named_below(root, prefix.removesuffix("."), set())


def _named_below(module: nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield name, module
    for key, child in module.named_children():
        yield from _named_below(child, _joined(name, key), seen)


def _joined(name: str, key: str) -> str:
    if key == _WRAPPER:
        return name
    return f"{name}.{key}" if name else key


def _match_blocks(
    modules: Mapping[str, nn.Module], patterns: Sequence[str]
) -> dict[str, nn.Module]:
    known: dict[str, nn.Module] = {}
    for name, module in named_modules(modules):
        known.setdefault(name, module)
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        fits = {
            name: module
            for name, module in known.items()
            if name and fnmatch.fnmatchcase(name, pattern)
        }
        if not fits:
            hint = did_you_mean(pattern, sorted(filter(None, known)))
            raise UsageError(f"blocks: no module of the model matches {pattern!r}; {hint}")
        found |= fits
    # A container is not called, its children are; `layers.*` also matches what is inside of them.
    found = {name: one for name, one in found.items() if not _is_only_container(one)}
    inner = {
        name for name in found for other in found if name != other and name.startswith(f"{other}.")
    }
    return {name: found[name] for name in known if name in found and name not in inner}


def _is_only_container(module: nn.Module) -> bool:
    return type(module) in {nn.ModuleList, nn.ModuleDict}


def _repeated(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost repeated modules; stages that all differ are searched for smaller ones."""
    groups: dict[type, list[nn.Module]] = collections.defaultdict(list)
    if isinstance(module, _CONTAINERS):
        for child in module.children():
            if _can_be_block(child):
                groups[type(child)].append(child)
    groups = {kind: group for kind, group in groups.items() if len(group) > 1}
    alike = {kind: _are_alike(group) for kind, group in groups.items()}
    for key, child in module.named_children():
        here = _joined(name, key)
        if type(child) not in groups:
            yield from _repeated(child, here)
            continue
        inner = dict(_repeated(child, here)) if not alike[type(child)] else {}
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


def _signature(module: nn.Module) -> Any:
    tensors = [
        (name, tuple(tensor.shape), tensor.dtype) for name, tensor in module.named_parameters()
    ]
    return type(module), tuple(tensors), tuple(type(child) for child in module.modules())


def _large_ones(
    module: nn.Module, name: str, found: Mapping[str, nn.Module], limit: float
) -> Iterator[tuple[str, nn.Module]]:
    """The smallest modules outside of the blocks that have at least `limit` bytes of parameters."""
    if name in found and found[name] is module:
        return
    own = sum(tensor.nbytes for tensor in module.parameters(recurse=False))
    if own >= limit and name and not isinstance(module, torch.jit.ScriptModule):
        yield name, module
        return
    for key, child in module.named_children():
        yield from _large_ones(child, _joined(name, key), found, limit)


def parameter_bytes(module: nn.Module) -> int:
    """The memory of a module's parameters and buffers."""
    tensors = {id(t): t.nbytes for t in (*module.parameters(), *module.buffers())}
    return sum(tensors.values())


# --- Cutting a model at its blocks ----------------------------------------------------------------


class ReachedInsideError(AttributeError):
    """The model reads a parameter or a submodule of a block, which it then cannot do without."""

    def __init__(self, block: str, name: str) -> None:
        """`name` is the attribute."""
        super().__init__(f"the model reads {name} of its block {block}")
        self.block = block


class TooManyCallsError(RuntimeError):
    """A model calls a block more often than the reference does."""


class Cut(nn.Module):
    """Takes the place of a block: it takes its inputs, and returns a given result.

    It has the plain attributes of the block, and is an instance of its class, but has none of its
    parameters and submodules.
    """

    # The block's class may replace it, for example to recompute activations.
    __call__ = nn.Module.__call__

    def __init__(self, block: nn.Module, name: str, left_out: frozenset[int | str]) -> None:
        """Cut a block out.

        Args:
            block: the module.
            name: its name in the model.
            left_out: the arguments to leave out of what is taken, by position or keyword.
        """
        nn.Module.__init__(self)
        for key, value in vars(block).items():
            # Some libraries replace the method `forward` of single modules, and `Module.compile`
            # keeps the compiled call.
            if key not in INTERNALS and key not in {"forward", "_compiled_call_impl"}:
                self.__dict__[key] = value
        self.cut_name = name
        self.cut_left_out = left_out
        self.cut_given: list[Any] = []
        self.cut_taken: list[Any] = []
        self.cut_draws: Sequence[tuple[RandomState, RandomState]] = ()
        self.__dict__["cut_block"] = weakref.ref(block)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take the inputs and return the next given result."""
        number = len(self.cut_taken)
        if number >= len(self.cut_given):
            raise TooManyCallsError(f"{self.cut_name} is called more than {number} times")
        left_out = self.cut_left_out
        taken = [None if place in left_out else value for place, value in enumerate(args)]
        named = {key: None if key in left_out else value for key, value in kwargs.items()}
        self.cut_taken.append((taken, named))
        if self.cut_draws:
            _advance(*self.cut_draws[number])
        return self.cut_given[number]

    def __getattr__(self, name: str) -> Any:
        """Refuse what only the block has."""
        known = self.__dict__.get("cut_block")
        block = None if known is None else known()
        if block is not None and hasattr(block, name):
            raise ReachedInsideError(self.__dict__["cut_name"], name)
        return nn.Module.__getattr__(self, name)

    def __getitem__(self, place: Any) -> Any:
        """Refuse a module of a block that is a container."""
        raise ReachedInsideError(self.cut_name, f"[{place!r}]")

    def __iter__(self) -> Iterator[Any]:
        """Refuse the modules of a block that is a container."""
        raise ReachedInsideError(self.cut_name, "its modules")

    def __len__(self) -> int:
        """Refuse the number of modules of a block that is a container."""
        raise ReachedInsideError(self.cut_name, "its modules")

    def __bool__(self) -> bool:
        return True


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _advance(before: RandomState, after: RandomState) -> None:
    """Move the generators as the block does, unless they draw other numbers in this run."""
    if before.same_torch(RandomState.of_torch()):
        after.restore()


def make_cut(block: nn.Module, name: str, left_out: frozenset[int | str] = frozenset()) -> Cut:
    """A cut that is also an instance of the block's class."""
    block = original_of(block)
    own: Any = type(block)
    kind = _cut_class(own)
    made = object.__new__(kind)  # FSDP's class would make a module of the original class
    Cut.__init__(made, block, name, left_out)
    return made


@functools.cache
def _cut_class(block: type) -> type[Cut]:
    # One class for all cuts of a class: compiled code depends on it.
    made: Any = type(f"Cut{block.__name__}", (Cut, block), {"__module__": __name__})
    kind: type[Cut] = made
    return kind


@contextlib.contextmanager
def replaced_modules(
    modules: Mapping[str, nn.Module], instead: Sequence[tuple[nn.Module, nn.Module]]
) -> Iterator[None]:
    """Replace modules by others, in every place of the model that holds them."""
    others = {id(old): new for old, new in instead}
    places: list[tuple[dict[str, Any], str, nn.Module]] = []
    seen: set[int] = set()
    for root in modules.values():
        for module in root.modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            table = vars(module)["_modules"]
            places += [(table, key, child) for key, child in table.items() if id(child) in others]
    try:
        for table, key, child in places:
            table[key] = others[id(child)]
        yield
    finally:
        for table, key, child in places:
            table[key] = child


def make_rest(call: Callable[..., Any], cuts: Mapping[str, Cut]) -> Callable[..., Any]:
    """The model without its blocks, as a function.

    It takes the model's own arguments, and the results of the blocks by `RESULTS`; it returns the
    model's result, and what each block gets. It can be compiled, and leaves no state behind.
    """

    def rest(*args: Any, **kwargs: Any) -> Any:
        results = kwargs.pop(RESULTS)
        for name, cut in cuts.items():
            cut.cut_given, cut.cut_taken = results[name], []
        result = call(*args, **kwargs)
        taken = {name: cut.cut_taken for name, cut in cuts.items()}
        for cut in cuts.values():
            cut.cut_given, cut.cut_taken = [], []
        return result, taken

    return rest


# The name of the argument of the rest that holds the results of the blocks.
RESULTS = "results_of_blocks"


# Where an object comes from: a block, what it does with it, in which call, and where in that.
Source = tuple[str, str, int, int | str]


def find_passages(
    given: Mapping[str, list[Any]], taken: Mapping[str, list[Any]]
) -> dict[tuple[str, int | str], tuple[Source, ...]]:
    """The arguments of blocks that are results of others, or that others get too, as objects.

    Where they have the same sources on both sides, there is nothing to compare. Each argument, by
    block and by position or keyword, has one source per call.
    """
    known: dict[int, Source] = {}
    for name, results in given.items():
        for number, result in enumerate(results):
            for path, leaf in leaves(result):
                if isinstance(leaf, torch.Tensor):
                    known[id(leaf)] = name, "returns", number, path
    found: dict[tuple[str, int | str], list[Source]] = collections.defaultdict(list)
    for name, calls in taken.items():
        for number, (args, kwargs) in enumerate(calls):
            for place, value in (*enumerate(args), *kwargs.items()):
                if any(isinstance(leaf, torch.Tensor) for _, leaf in leaves(value)):
                    first: Source = name, "gets", number, place
                    found[name, place].append(known.setdefault(id(value), first))
    return {
        (name, place): tuple(sources)
        for (name, place), sources in found.items()
        if len(sources) == len(taken[name]) and (name, "gets") not in {one[:2] for one in sources}
    }
