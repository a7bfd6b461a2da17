"""The pieces of a model that power() plants faults in: the whole model, or one block at a time.

By blocks, the model runs once, natively, and what its blocks get is recorded, with the gradients
that flow into them. Each piece is then traced, measured and released before the next, so only one
block has a graph, float64 copies and noise in memory.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paritas._torch.dynamo import backends_of, original_of
from paritas.checks.cut_models import Rest, Side
from paritas.errors import UsageError, in_one_line
from paritas.execution.block_runs import Recorder
from paritas.execution.blocks import find_blocks
from paritas.execution.observation import OUTPUT, RunConditions, RunOptions, running_subject
from paritas.execution.reachable import reachable_modules
from paritas.execution.saved_state import RandomState
from paritas.execution.subjects import inspect_subject
from paritas.numerics.contents import leaves
from paritas.results.wording import counted, enumerated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paritas.execution.block_runs import BlockCall
    from paritas.execution.subjects import Inputs

BETWEEN = "between blocks"
_MOST_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Piece:
    """A program to plant faults in.

    Attributes:
        model: a module or function.
        inputs: its inputs.
        gradients: whether its backward pass belongs to it.
        autocast: the dtype of autocast around it; None if that is off.
        upstream: path of an output -> the gradient that flows into it; None to draw them.
        block: the name of the block; empty for the whole model.
        prefix: what the names of its parameters begin with in the whole model.
    """

    model: Callable[..., Any]
    inputs: Inputs
    gradients: bool
    autocast: torch.dtype | None = None
    upstream: Mapping[str, Tensor] | None = None
    block: str = ""
    prefix: str = ""


class ModelInPieces:
    """A model that is cut at its blocks.

    Attributes:
        names: the pieces: the blocks, in the order of the model, then what lies between them.
        notes: what a reader of the report should know.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        inputs: Inputs,
        patterns: Sequence[str] | None,
        *,
        gradients: bool,
        autocast: torch.dtype | None,
        seed: int,
    ) -> None:
        """Run the model once, and record what its blocks get.

        Raises:
            UsageError: the model has no blocks, cannot be cut at them, or raises.
        """
        if backends_of(model):
            raise UsageError("by='blocks' needs a model that is not compiled")
        modules = dict(reachable_modules(model, original_of))
        blocks = find_blocks(modules, patterns)
        if not blocks:
            raise UsageError(
                "by='blocks' found no repeated modules in the model; name its blocks, as in "
                "blocks=['layers.*']"
            )
        self._model, self._inputs = model, inputs
        self._gradients, self._autocast = gradients, autocast
        rng = RandomState.now()
        recorder = self._record(blocks, rng, seed)
        side = Side(model, model, modules, blocks)
        calls = {
            name: calls
            for name, calls in recorder.calls.items()
            if calls and name not in recorder.uncut
        }
        self._rest = Rest(side, side, inputs, calls)
        self._find_rest(rng)
        uncut = {**recorder.uncut, **self._rest.uncut}
        if not self._rest.calls:
            why = next(iter(uncut.values()), "the model calls none of them")
            raise UsageError(f"the model cannot be cut at its blocks: {why}; use by='whole'")
        self.names = [*self._rest.calls, *([BETWEEN] if self._rest.computes else [])]
        self.notes = list(self._describe(uncut))

    def _record(self, blocks: dict[str, nn.Module], rng: RandomState, seed: int) -> Recorder:
        subject = inspect_subject(self._model, "reference", "model", lends_parameters=True)
        recorder = Recorder(blocks)
        conditions = RunConditions(
            gradients=self._gradients and torch.is_grad_enabled(),
            seed=seed,
            options=RunOptions(watch=recorder),
            sketches=True,
        )
        with self._casting(), running_subject(subject, rng, conditions) as call:
            seen = call(self._inputs)
        error = seen.error or seen.gradient_error
        if error is not None:
            raise UsageError(f"the model cannot be run: {in_one_line(error, 120)}") from error
        return recorder

    def _casting(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        tensors = [leaf for _, leaf in leaves(list(self._inputs.args)) if isinstance(leaf, Tensor)]
        kind = tensors[0].device.type if tensors else "cpu"
        return torch.autocast(kind, self._autocast)

    def _find_rest(self, rng: RandomState) -> None:
        try:
            with self._casting():
                self._rest.look_for_passages(rng)
        except Exception as error:
            reason = in_one_line(error, 120)
            raise UsageError(
                f"without its blocks, the model raises {reason}; name other blocks, or use "
                "by='whole'"
            ) from error

    def _describe(self, uncut: Mapping[str, str]) -> Iterator[str]:
        calls = self._rest.calls
        between = ", and between them" if self._rest.computes else ""
        yield (
            f"by blocks: {counted(len(calls), 'block')} ({enumerated(list(calls), _MOST_NAMED)})"
            f"{between}; each fault is judged on its block, and compared with the noise of its "
            "block"
        )
        if uncut:
            name, why = next(iter(uncut.items()))
            count = counted(len(uncut), "module")
            yield f"{count} treated as a part of what lies between the blocks: {name}: {why}"
        if any(len(one) > 1 for one in calls.values()):
            yield "a block that is called several times is judged on its first call"

    @contextlib.contextmanager
    def piece(self, name: str) -> Iterator[Piece]:
        """One of the pieces; the model is cut while it is used."""
        if name != BETWEEN:
            yield self._block(self._rest.calls[name][0])
            return
        with self._rest.cut() as (rest, _):
            yield Piece(
                _standing_for(self._model, rest),
                self._rest.inputs(),
                self._gradients,
                self._autocast,
                block=BETWEEN,
            )

    def _block(self, call: BlockCall) -> Piece:
        upstream = {
            item.name.removeprefix(OUTPUT): parked.back() for item, parked in call.upstream.items()
        }
        block = self._rest.reference.blocks[call.name]
        own = next(block.parameters(), None)
        kind = "cpu" if own is None else own.device.type
        casts = {name: dtype for name, is_on, dtype in call.around.autocast if is_on}
        return Piece(
            block,
            call.inputs(),
            self._gradients and bool(upstream),
            casts.get(kind),
            upstream or None,
            block=call.name,
            prefix=f"{call.name}.",
        )


def _standing_for(model: Callable[..., Any], rest: Callable[..., Any]) -> Callable[..., Any]:
    """The rest of a model as another object with the same parameters under the same names."""
    if not isinstance(model, nn.Module):
        return rest
    other = copy.copy(model)
    other.forward = rest
    return other
