"""Two models cut at their blocks: blocks, compiled alone if need be, and the rest of each."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.execution.block_runs import bring_back, left_on_host, version_of
from paritas.core.execution.blocks import (
    RESULTS,
    ReachedInsideError,
    find_passages,
    make_cut,
    make_rest,
    replaced_modules,
)
from paritas.core.execution.isolation import copy_inputs
from paritas.core.execution.observation import INPUT, OUTPUT
from paritas.core.execution.subjects import Inputs, inspect_subject
from paritas.core.numerics.contents import leaves, map_leaves
from paritas.core.numerics.flattening import flattened
from paritas.core.results.items import Item, output
from paritas.core.torch_private.dynamo import compile_like
from paritas.core.torch_private.operators import DispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor, nn

    from paritas.core.execution.block_runs import BlockCall
    from paritas.core.execution.blocks import Cut
    from paritas.core.execution.observation import Observation, RunConditions
    from paritas.core.execution.saved_state import RandomState


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
        made: Callable[..., Any] = compile_like(self.given, part) if self.is_closed else part
        return made


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
        self._written: set[str] = set()
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
        with self._cut_side(self.reference, {}) as (mine, cuts):
            same = self.candidate.call is self.reference.call
            with self._cut_side(self.candidate, cuts) as (theirs, _):
                made = mine if same else theirs
                # Dynamo never again compiles code in which it once found nothing to compile.
                yield mine, self.candidate.like(made) if self.computes else made

    @contextlib.contextmanager
    def _cut_side(
        self, side: Side, known: Mapping[int, Cut]
    ) -> Iterator[tuple[Callable[..., Any], dict[int, Cut]]]:
        cuts: dict[str, Cut] = {}
        for name, calls in self.calls.items():
            block = side.blocks[name]
            made = known.get(id(block))
            if made is None:
                made = make_cut(block, name, self._left_out.get(name, frozenset()))
                if any(call.is_random for call in calls):
                    made.cut_draws = [call.draws for call in calls]
            cuts[name] = made
        pairs = [(side.blocks[name], made) for name, made in cuts.items()]
        with replaced_modules(side.modules, pairs):
            yield make_rest(side.call, cuts), {id(block): made for block, made in pairs}

    def look_for_passages(self, rng: RandomState) -> None:
        """Find arguments that need no comparison, and blocks that the model looks into."""
        while self.calls:
            self._left_out = {}
            try:
                sources = [self._passages(side, rng) for side in (self.reference, self.candidate)]
            except ReachedInsideError as error:
                self.uncut[error.block] = str(error)
                del self.calls[error.block]
                continue
            found: dict[str, set[int | str]] = collections.defaultdict(set)
            for key, source in sources[0].items():
                if sources[1].get(key) == source:
                    found[key[0]].add(key[1])
            self._left_out = {name: frozenset(places) for name, places in found.items()}
            return

    def _passages(self, side: Side, rng: RandomState) -> dict[Any, Any]:
        with self._cut_side(side, {}) as (rest, _):
            state = inspect_subject(rest, "reference", "framework_model").state
            inputs = copy_inputs(self.inputs())
            rng.restore()
            try:
                with torch.no_grad(), _AnyOperator() as operators:
                    given = inputs.kwargs[RESULTS]
                    _, taken = rest(*inputs.args, **inputs.kwargs)
                self.computes |= operators.ran
                self._written |= {name for name, one in given.items() if _is_written(one)}
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
            return find_passages(given, taken)

    def upstream(self, native: Observation, conditions: RunConditions) -> dict[Item, Tensor]:
        """The upstream gradients of the model's outputs, and of what the blocks get."""
        found = {
            output(_inner_path(item)): conditions.cotangent(item, value)
            for item, value in native.outputs.items()
            if native.requires_grad.get(item)
        }
        for calls in self.calls.values():
            for call in calls:
                for (place, path), parked in call.returned.items():
                    found[output(f"{_taken_path(call)}[{place}]{path}")] = parked.back()
        return found if native.gradients else {}

    def expected(self, native: Observation) -> dict[Item, Any]:
        """What the rest must return: the model's outputs, and what the blocks got."""
        found: dict[Item, Any] = {
            output(_inner_path(item)): value for item, value in native.outputs.items()
        }
        for calls in self.calls.values():
            for call in calls:
                taken = flattened(bring_back([call.args, call.kwargs]), _taken_path(call)).leaves
                found |= {output(path): leaf for path, leaf in taken.items()}
        return found

    def release(self, call: BlockCall) -> None:
        """Release what a call recorded, except for what is compared as a part of the rest."""
        left_out = self._left_out.get(call.name, frozenset())
        call.args = [None if place in left_out else one for place, one in enumerate(call.args)]
        call.kwargs = {key: None if key in left_out else one for key, one in call.kwargs.items()}
        call.upstream, call.buffers = {}, {}

    def names(self, native: Observation) -> dict[str, str]:
        """Path in the rest -> how findings name it."""
        names = {_inner_path(item): item.name for item in native.outputs}
        for calls in self.calls.values():
            for call in calls:
                number = f"[{call.number}]" if len(calls) > 1 else ""
                tree = flattened(left_on_host([call.args, call.kwargs])).leaves
                for path in tree:
                    place = f"{_taken_path(call)}{path}"
                    names[place] = f"input of {call.name}{number} {path[3:]}"
                for path in flattened(left_on_host(call.result)).leaves:
                    place = f"{INPUT}[{RESULTS!r}][{call.name!r}][{call.number}]{path}"
                    names[place] = f"result of {call.name}{number} {path}".rstrip()
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


def _taken_path(call: BlockCall) -> str:
    return f"{OUTPUT}[1][{call.name!r}][{call.number}]"
