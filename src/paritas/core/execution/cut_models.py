"""Models cut at their blocks: each block, compiled alone if need be, and the rest of the model.

A model is cut where it calls its blocks: each call of a block is a program of its own, and so is
the rest, in which each call of a block is replaced by a cut that takes the block's inputs and
returns a given result. If all these programs compute the same on both sides, so do the two models.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from paritas.core.execution.block_runs import Parked, bring_back, left_on_host, version_of
from paritas.core.execution.isolation import copy_inputs
from paritas.core.execution.observation import INPUT, OUTPUT
from paritas.core.execution.other_arguments import find_other_arguments
from paritas.core.execution.reachable import original_of
from paritas.core.execution.saved_state import RandomState
from paritas.core.execution.subjects import Inputs, inspect_subject
from paritas.core.numerics.contents import leaves, map_leaves
from paritas.core.numerics.flattening import flatten_value
from paritas.core.results.items import Item, output
from paritas.core.torch_private.dynamo import compile_like, room_for_entries, run_as_it_is
from paritas.core.torch_private.global_state import taking_stance
from paritas.core.torch_private.operators import DispatchMode
from paritas.core.torch_private.tensors import INTERNALS, is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import Tensor

    from paritas.core.execution.block_runs import BlockCall
    from paritas.core.execution.observation import Observation, RunConditions
    from paritas.core.execution.other_arguments import ArgumentKey, OtherArguments

# What lies between the blocks, as a part of the model.
BETWEEN = "between blocks"
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two models.

    Attributes:
        given: what the caller passed.
        call: the same without `torch.compile` around it.
        modules: its modules, by prefix of their names.
        blocks: its blocks by name.
    """

    given: Callable[..., Any]
    call: Callable[..., Any]
    modules: dict[str, nn.Module]
    blocks: dict[str, nn.Module]

    @property
    def is_closed(self) -> bool:
        """Whether it is one compiled program, whose blocks cannot be called."""
        return self.call is not self.given

    def like(self, part: Callable[..., Any]) -> Callable[..., Any]:
        """A part of the model, compiled as the model is compiled."""
        compiled_part: Callable[..., Any] = (
            compile_like(self.given, part) if self.is_closed else part
        )
        return compiled_part


# --- What lies between the blocks -----------------------------------------------------------------


class Rest:
    """The two models without their blocks.

    Attributes:
        reference: the reference.
        candidate: the candidate.
        calls: the recorded calls of the blocks that are cut out.
        uncut: block -> why the model cannot be cut there.
        computes: whether any operator runs between the blocks, once it was looked for.
    """

    def __init__(
        self, reference: Side, candidate: Side, inputs: Inputs, calls: dict[str, list[BlockCall]]
    ) -> None:
        self.reference, self.candidate = reference, candidate
        self.calls = dict(calls)
        self.uncut: dict[str, str] = {}
        self._inputs = inputs
        self._left_out: dict[str, frozenset[int | str]] = {}
        # A block and an argument of it -> where it comes from in each call, for those left out.
        self._sources: dict[tuple[str, int | str], tuple[Source, ...]] = {}
        self._written: set[str] = set()
        # Block -> key in the candidate's calls of it -> key in the reference's.
        self._renamed: dict[str, dict[ArgumentKey, ArgumentKey]] = {}
        self.computes = False

    def inputs(self) -> Inputs:
        """The inputs of the model, and the results of its blocks."""
        results = {
            name: [bring_back(call.result) for call in calls] for name, calls in self.calls.items()
        }
        # A leaf that requires grad cannot be written to.
        results |= {name: map_leaves(results[name], _not_a_leaf) for name in self._written}
        return Inputs(self._inputs.args, {**self._inputs.kwargs, RESULTS: results})

    @contextlib.contextmanager
    def cut(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        """The rest of both models, while their blocks are replaced by cuts."""
        with self._cut_side(self.reference, {}) as (reference_rest, cuts):
            same = self.candidate.call is self.reference.call
            with self._cut_side(self.candidate, cuts) as (candidate_rest, _):
                candidate_program = reference_rest if same else candidate_rest
                # Dynamo never again compiles code in which it once found nothing to compile.
                yield (
                    reference_rest,
                    self.candidate.like(candidate_program) if self.computes else candidate_program,
                )

    @contextlib.contextmanager
    def _cut_side(
        self, side: Side, existing_cuts: Mapping[int, Cut]
    ) -> Iterator[tuple[Callable[..., Any], dict[int, Cut]]]:
        cuts: dict[str, Cut] = {}
        for name, calls in self.calls.items():
            block = side.blocks[name]
            block_cut = existing_cuts.get(id(block))
            if block_cut is None:
                block_cut = make_cut(block, name, self._left_out.get(name, frozenset()))
                block_cut.cut_renamed = (
                    {} if side is self.reference else self._renamed.get(name, {})
                )
                if any(call.is_random for call in calls):
                    block_cut.cut_draws = [call.draws for call in calls]
            cuts[name] = block_cut
        with cut_out(side.call, side.modules, side.blocks, cuts) as rest:
            yield rest, {id(side.blocks[name]): cut for name, cut in cuts.items()}

    def look_for_passages(self, rng: RandomState) -> None:
        """Find arguments that need no comparison, and blocks that the model looks into."""

        def find_sources() -> tuple[dict[Any, Any], dict[Any, Any]]:
            self._left_out = {}
            return self._passages(self.reference, rng), self._passages(self.candidate, rng)

        source_tables = run_without_blocks(find_sources, self.calls, self._leave_uncut)
        sources, candidate_sources = source_tables or ({}, {})
        passed: dict[str, set[int | str]] = collections.defaultdict(set)
        for (name, argument_key), source in sources.items():
            if candidate_sources.get((name, argument_key)) == source:
                passed[name].add(argument_key)
                self._sources[name, argument_key] = source
        self._left_out = {name: frozenset(places) for name, places in passed.items()}

    def _leave_uncut(self, name: str, why: str) -> None:
        self.uncut[name] = why
        del self.calls[name]

    def find_other_arguments(self, rng: RandomState) -> None:
        """Note with each call of a block what the candidate passes to it in another form.

        Both sides run once. If the candidate is compiled, its compiler only traces it: what it then
        passes may be other than in eager mode, where transformers leaves a causal mask out.
        """
        with self.cut() as (reference_rest, candidate_rest):
            expected = self._run_for_arguments(reference_rest, rng)
            with self._traced():
                passed = self._run_for_arguments(candidate_rest, rng)
        for name, calls in self.calls.items():
            for call, before, now in zip(
                calls, expected.get(name, ()), passed.get(name, ()), strict=False
            ):
                call.others = _find_others(self.candidate.blocks[name], before, now)
            renamed = [call.others.renamed for call in calls if call.others is not None]
            if renamed and all(keys == renamed[0] for keys in renamed):
                self._renamed[name] = renamed[0]

    def _run_for_arguments(self, rest: Callable[..., Any], rng: RandomState) -> dict[str, Any]:
        """What each block gets; empty if the run raises, as the check of the rest then shows."""
        state = inspect_subject(rest, "reference", "framework_model").state
        inputs = copy_inputs(self.inputs())
        rng.restore()
        try:
            taken: dict[str, Any] = rest(*inputs.args, **inputs.kwargs)[1]
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return {}
        finally:
            state.restore()
        return taken

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        """Run what a compiler traces as it is."""
        if not self.candidate.is_closed:
            yield
            return
        with room_for_entries(), taking_stance("default", backend=run_as_it_is):
            yield

    def other_arguments(self) -> list[OtherArgument]:
        """The arguments that the candidate passes in another form."""
        return [
            OtherArgument(call, key, words, _label_input(call, calls) + _argument_path(key)[3:])
            for calls in self.calls.values()
            for call in calls
            if call.others is not None
            for key, words in call.others.described.items()
        ]

    def _passages(self, side: Side, rng: RandomState) -> dict[Any, Any]:
        with self._cut_side(side, {}) as (rest, _):
            state = inspect_subject(rest, "reference", "framework_model").state
            inputs = copy_inputs(self.inputs())
            rng.restore()
            try:
                with torch.no_grad(), _AnyOperator() as operators:
                    block_results = inputs.kwargs[RESULTS]
                    _, taken = rest(*inputs.args, **inputs.kwargs)
                self.computes |= operators.ran
                self._written |= {
                    name
                    for name, block_result in block_results.items()
                    if _is_written(block_result)
                }
            except ReachedInsideError:
                raise
            except Exception:
                if side is self.reference:
                    raise
                # A candidate raises what it likes, and the check itself shows it. Which values the
                # pieces hand on unchanged is not known then, so all of them are compared.
                self.computes = True
                return {}
            finally:
                state.restore()
            return find_passages(block_results, taken)

    def upstream(self, native: Observation, conditions: RunConditions) -> dict[Item, Tensor]:
        """The upstream gradients of the model's outputs, and of what the blocks get."""
        upstream_gradients = {
            output(_inner_path(item)): conditions.cotangent(item, value)
            for item, value in native.outputs.items()
            if native.requires_grad.get(item)
        }
        for calls in self.calls.values():
            for call in calls:
                for (tree_index, path), parked in call.returned.items():
                    item = output(self._path_of_argument(call, tree_index, path))
                    earlier_sum = upstream_gradients.get(item)
                    value = parked.back()
                    upstream_gradients[item] = value if earlier_sum is None else earlier_sum + value
        return upstream_gradients if native.gradients else {}

    def _path_of_argument(self, call: BlockCall, tree_index: int, path: str) -> str:
        """Where the rest returns an argument: what several blocks get, it returns for the first."""
        for argument_key in self._left_out.get(call.name, ()):
            start = f"[{argument_key!r}]"
            block, what, number, key = self._sources[call.name, argument_key][call.number]
            if what == "gets" and path.startswith(start):
                tree_index = 0 if isinstance(key, int) else 1
                inner_path = path.removeprefix(start)
                return f"{OUTPUT}[1][{block!r}][{number}][{tree_index}][{key!r}]{inner_path}"
        return f"{_taken_path(call)}[{tree_index}]{path}"

    def list_expected(self, native: Observation) -> dict[Item, Any]:
        """What the rest must return: the model's outputs, and what the blocks got."""
        expected_items: dict[Item, Any] = {
            output(_inner_path(item)): value for item, value in native.outputs.items()
        }
        for calls in self.calls.values():
            for call in calls:
                taken = flatten_value(
                    bring_back([call.args, call.kwargs]), _taken_path(call)
                ).leaves
                expected_items |= {output(path): leaf for path, leaf in taken.items()}
        return expected_items

    def release(self, call: BlockCall) -> None:
        """Release what a call recorded, except for what is compared as a part of the rest."""
        left_out = self._left_out.get(call.name, frozenset())
        call.args = [
            None if position in left_out else argument
            for position, argument in enumerate(call.args)
        ]
        call.kwargs = {
            key: None if key in left_out else argument for key, argument in call.kwargs.items()
        }
        call.upstream, call.buffers = {}, {}

    def names(self, native: Observation) -> dict[str, str]:
        """Path in the rest -> how findings name it."""
        names = {_inner_path(item): item.name for item in native.outputs}
        for calls in self.calls.values():
            for call in calls:
                number = f"[{call.number}]" if len(calls) > 1 else ""
                tree = flatten_value(left_on_host([call.args, call.kwargs])).leaves
                for path in tree:
                    item_path = f"{_taken_path(call)}{path}"
                    names[item_path] = _label_input(call, calls) + path[3:]
                for path in flatten_value(left_on_host(call.result)).leaves:
                    item_path = f"{INPUT}[{RESULTS!r}][{call.name!r}][{call.number}]{path}"
                    names[item_path] = f"result of {call.name}{number} {path}".rstrip()
        return names


class _AnyOperator(DispatchMode):
    """Notes whether any operator runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.ran = True
        return func(*args, **(kwargs or {}))


def _not_a_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
        return leaf
    with torch.enable_grad():
        return leaf.view_as(leaf)


def _is_written(results: Any) -> bool:
    """Whether copies have been written to since they were made."""
    tensors = [leaf for _, leaf in leaves(results) if isinstance(leaf, torch.Tensor)]
    return any(version_of(tensor) > 0 for tensor in tensors)


def _inner_path(item: Item) -> str:
    """The path of an output of the model among those of its rest."""
    return f"{OUTPUT}[0]{item.name.removeprefix(OUTPUT)}"


@dataclasses.dataclass(frozen=True)
class OtherArgument:
    """An argument of one call of a block that the candidate passes in another form.

    Attributes:
        key: its key in the reference's call, or a new keyword.
        words: what both sides pass.
        name: how findings name it.
    """

    call: BlockCall
    key: ArgumentKey
    words: str
    name: str

    def includes(self, path: str) -> bool:
        """Whether an output of the rest is this argument, or a part of it."""
        # A path goes on after a bracket: [1] is no beginning of [10].
        return path.startswith(_taken_path(self.call) + _argument_path(self.key))

    def checked_leaves(self) -> list[Any]:
        """What the candidate's block was checked with, leaf by leaf."""
        others = self.call.others
        if others is None or self.key not in others.replaced:
            return []
        return [*flatten_value(bring_back(others.replaced[self.key])).leaves.values()]


def _label_input(call: BlockCall, calls: Sequence[BlockCall]) -> str:
    number = f"[{call.number}]" if len(calls) > 1 else ""
    return f"input of {call.name}{number} "


def _find_others(
    block: nn.Module,
    reference: tuple[list[Any], dict[str, Any]],
    candidate: tuple[list[Any], dict[str, Any]],
) -> OtherArguments | None:
    """What the candidate passes in another form, parked."""
    others = find_other_arguments(block, reference, candidate)
    if others is None:
        return None
    replaced = {key: map_leaves(value, _park) for key, value in others.replaced.items()}
    return dataclasses.replace(others, replaced=replaced)


def _argument_path(key: ArgumentKey) -> str:
    return f"[0][{key}]" if isinstance(key, int) else f"[1][{key!r}]"


def _park(leaf: Any) -> Any:
    return Parked(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _taken_path(call: BlockCall) -> str:
    return f"{OUTPUT}[1][{call.name!r}][{call.number}]"


# --- Cuts -----------------------------------------------------------------------------------------


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
        self.cut_renamed: Mapping[ArgumentKey, ArgumentKey] = {}
        self.__dict__["cut_block"] = weakref.ref(block)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take the inputs and return the next given result."""
        number = len(self.cut_taken)
        if number >= len(self.cut_given):
            raise TooManyCallsError(f"{self.cut_name} is called more than {number} times")
        left_out = self.cut_left_out
        taken = [None if position in left_out else value for position, value in enumerate(args)]
        named = {key: None if key in left_out else value for key, value in kwargs.items()}
        if self.cut_renamed:
            taken, named = _rename_arguments(taken, named, self.cut_renamed)
        self.cut_taken.append((taken, named))
        if self.cut_draws:
            _advance(*self.cut_draws[number])
        return self.cut_given[number]

    def __getattr__(self, name: str) -> Any:
        """Refuse what only the block has."""
        block_ref = self.__dict__.get("cut_block")
        block = None if block_ref is None else block_ref()
        if block is not None and hasattr(block, name):
            raise ReachedInsideError(self.__dict__["cut_name"], name)
        return nn.Module.__getattr__(self, name)

    def __getitem__(self, key: Any) -> Any:
        """Refuse a module of a block that is a container."""
        raise ReachedInsideError(self.cut_name, f"[{key!r}]")

    def __iter__(self) -> Iterator[Any]:
        """Refuse the modules of a block that is a container."""
        raise ReachedInsideError(self.cut_name, "its modules")

    def __len__(self) -> int:
        """Refuse the number of modules of a block that is a container."""
        raise ReachedInsideError(self.cut_name, "its modules")

    def __bool__(self) -> bool:
        return True


def _rename_arguments(
    args: list[Any], kwargs: dict[str, Any], renamed: Mapping[ArgumentKey, ArgumentKey]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by the keys that the reference gives them."""
    pairs: list[tuple[ArgumentKey, Any]] = [*enumerate(args), *kwargs.items()]
    by_key: dict[ArgumentKey, Any] = {renamed.get(key, key): value for key, value in pairs}
    positions = sorted(key for key in by_key if isinstance(key, int))
    named = {key: value for key, value in by_key.items() if isinstance(key, str)}
    return [by_key[position] for position in positions], named


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _advance(before: RandomState, after: RandomState) -> None:
    """Move the generators as the block does, unless they draw other numbers in this run."""
    if before.same_torch(RandomState.of_torch()):
        after.restore()


def make_cut(block: nn.Module, name: str, left_out: frozenset[int | str] = frozenset()) -> Cut:
    """A cut that is also an instance of the block's class."""
    block = original_of(block)
    block_class: Any = type(block)
    kind = _cut_class(block_class)
    cut_module = object.__new__(kind)  # FSDP's class would make a module of the original class
    Cut.__init__(cut_module, block, name, left_out)
    return cut_module


@functools.cache
def _cut_class(block: type) -> type[Cut]:
    # One class for all cuts of a class: compiled code depends on it.
    cut_class: Any = type(f"Cut{block.__name__}", (Cut, block), {"__module__": __name__})
    kind: type[Cut] = cut_class
    return kind


@contextlib.contextmanager
def cut_out(
    call: Callable[..., Any],
    modules: Mapping[str, nn.Module],
    blocks: Mapping[str, nn.Module],
    cuts: Mapping[str, Cut],
) -> Iterator[Callable[..., Any]]:
    """The rest of a model, while some of its blocks are replaced by cuts.

    Args:
        call: the model.
        modules: its modules, by prefix of their names.
        blocks: its blocks by name.
        cuts: what takes the place of blocks.
    """
    pairs = [(blocks[name], cut) for name, cut in cuts.items()]
    with replaced_modules(modules, pairs):
        yield make_rest(call, cuts)


def run_without_blocks(
    run: Callable[[], _T],
    blocks: Collection[str],
    leave_uncut: Callable[[str, str], None],
) -> _T | None:
    """Run a model without its blocks; those that it looks into become a part of the rest.

    Args:
        run: runs it once.
        blocks: the blocks that are cut out; nothing is run once there are none.
        leave_uncut: removes one of them, and notes why.

    Returns:
        What the run returned; None if no block is left.
    """
    while blocks:
        try:
            return run()
        except ReachedInsideError as error:
            leave_uncut(error.block, str(error))
    return None


@contextlib.contextmanager
def replaced_modules(
    modules: Mapping[str, nn.Module], instead: Sequence[tuple[nn.Module, nn.Module]]
) -> Iterator[None]:
    """Replace modules by others, in every place of the model that holds them."""
    others = {id(old): new for old, new in instead}
    places: list[tuple[dict[str, Any], str, nn.Module]] = []
    visited_ids: set[int] = set()
    for root in modules.values():
        for module in root.modules():
            if id(module) in visited_ids:
                continue
            visited_ids.add(id(module))
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
    results_by_name: Mapping[str, list[Any]], taken: Mapping[str, list[Any]]
) -> dict[tuple[str, int | str], tuple[Source, ...]]:
    """The arguments of blocks that are results of others, or that others get too, as objects.

    Where they have the same sources on both sides, there is nothing to compare. Each argument, by
    block and by position or keyword, has one source per call.
    """
    source_by_id: dict[int, Source] = {}
    for name, results in results_by_name.items():
        for number, result in enumerate(results):
            for path, leaf in leaves(result):
                if isinstance(leaf, torch.Tensor):
                    source_by_id[id(leaf)] = name, "returns", number, path
    sources_by_argument: dict[tuple[str, int | str], list[Source]] = collections.defaultdict(list)
    for name, calls in taken.items():
        for number, (args, kwargs) in enumerate(calls):
            for argument_key, value in (*enumerate(args), *kwargs.items()):
                if any(isinstance(leaf, torch.Tensor) for _, leaf in leaves(value)):
                    first: Source = name, "gets", number, argument_key
                    sources_by_argument[name, argument_key].append(
                        source_by_id.setdefault(id(value), first)
                    )
    return {
        (name, argument): tuple(sources)
        for (name, argument), sources in sources_by_argument.items()
        if len(sources) == len(taken[name])
        and (name, "gets") not in {source[:2] for source in sources}
    }
