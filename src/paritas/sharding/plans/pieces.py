"""A piece of a model as a program of its own: one block, or what lies between the blocks.

On one device, a piece gets the values that were recorded in the reference's own run. On the ranks,
the plan is applied to the whole model, of which only the parameters of this piece hold numbers, and
the piece gets the same values in the form in which the parallel model gives it its own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paritas.core.execution.block_runs import Parked
from paritas.core.execution.cut_models import BETWEEN, RESULTS, cut_out, make_cut
from paritas.core.execution.isolation import copy_inputs
from paritas.core.execution.observation import INPUT, OUTPUT
from paritas.core.execution.subjects import Inputs
from paritas.core.numerics.contents import leaves, replace_leaves
from paritas.core.results.items import output
from paritas.core.torch_private.operators import WIDE
from paritas.core.torch_private.tensors import copy_on_write
from paritas.sharding.plans.boundaries import Boxed, NotByBlocksError, with_forms
from paritas.sharding.plans.plan import (
    apply_plan,
    apply_styles,
    batch_size,
    part_of_batch,
    training_loss,
)
from paritas.sharding.plans.traces import (
    ModelNames,
    StepTrace,
    Trace,
    named_pieces,
    piece_of,
    plain_name,
    watched_modules,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from paritas.core.execution.block_runs import BlockCall
    from paritas.core.placement.rank_pieces import RankPiece
    from paritas.sharding.plans.boundaries import CallForms, Form
    from paritas.sharding.plans.plan import ParallelProgram

# The attribute under which a piece holds its module.
_INSIDE = "inside"


# --- What a piece is made of ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PieceTask:
    """A piece of a model.

    Attributes:
        program: the whole model under its plan; its model is a module.
        name: the block; empty for what lies between the blocks.
        calls: for each step, block -> its calls in the reference's own run: of this block, or of
            all that are cut out.
        forms: for each step, block -> for each of these calls, rank -> its forms.
        whole: keep the numbers of the rest of the model, which some plans need to be applied.
    """

    program: ParallelProgram
    name: str
    calls: list[dict[str, list[BlockCall]]]
    forms: list[dict[str, list[dict[int, CallForms]]]]
    whole: bool = False

    @property
    def label(self) -> str:
        """Its name for people."""
        return self.name or BETWEEN

    def mark(self, call: BlockCall) -> str:
        """What tells a call from others of the same block in one step, in paths of its values."""
        calls = next(step[call.name] for step in self.calls)
        return f"[call {call.number + 1}]" if len(calls) > 1 else ""


def piece_program(task: PieceTask) -> ParallelProgram:
    """A piece as a program to train on one device and on ranks."""
    # The samples of a rank are rows of such a batch, as of the model's own.
    batches = tuple(
        Inputs((torch.empty(batch_size(task.program.batch(step)) or 1, 0),))
        for step in range(task.program.steps)
    )
    return dataclasses.replace(
        task.program,
        model=PieceMaker(task),
        plan=PiecePlan(task),
        batches=batches,
        later=0,
        loss=None,
    )


@dataclasses.dataclass(frozen=True)
class PieceMaker:
    """Makes a new piece."""

    task: PieceTask

    def __call__(self) -> Piece:
        """Copy the model, with the numbers of this piece only."""
        model: Any = self.task.program.model
        blocks = {name: model.get_submodule(name) for name in self.task.calls[0]}
        piece_module = blocks[self.task.name] if self.task.name else model
        kept_ids = {id(tensor) for tensor in _tensors(model if self.task.whole else piece_module)}
        if not self.task.name and not self.task.whole:
            kept_ids = {id(tensor) for tensor in _outside(model, blocks)}
        return Piece(self.task, _skeleton(model, kept_ids))


@dataclasses.dataclass(frozen=True)
class PiecePlan:
    """Applies the plan of the whole model, and keeps the piece."""

    task: PieceTask

    def __call__(self, piece: Any, mesh: DeviceMesh) -> None:
        """Change the piece in place."""
        program, full_model = self.task.program, piece.whole
        if isinstance(program.plan, dict) and self.task.name:
            apply_styles(full_model, mesh, program.plan, self.task.name)
            piece.enter(full_model, full_model, mesh)
        else:
            piece.enter(apply_plan(program, full_model, mesh, None), full_model, mesh)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


def _outside(model: nn.Module, blocks: Mapping[str, nn.Module]) -> Iterator[Tensor]:
    """The parameters and buffers that modules outside of the blocks hold."""
    inside = {id(block_module) for block in blocks.values() for block_module in block.modules()}
    for module in model.modules():
        if id(module) not in inside:
            yield from itertools.chain(
                module.parameters(recurse=False), module.buffers(recurse=False)
            )


def _skeleton(model: nn.Module, kept_ids: set[int]) -> nn.Module:
    """A copy of a model of which only some parameters and buffers hold numbers."""
    memo: dict[int, Any] = {}
    for tensor in _tensors(model):
        if id(tensor) not in kept_ids:
            empty = torch.empty_like(tensor, device="meta", requires_grad=False)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = empty
    return copy.deepcopy(model, memo)


# --- The piece ------------------------------------------------------------------------------------


class Piece(nn.Module):
    """One block, or what lies between the blocks, on one device or on a rank.

    Attributes:
        task: what it is.
        whole: the model that it belongs to, under its plan if it has one.
        names: the names in this model.
        mesh: the mesh of ranks; None on one device.
        rest: the model without its blocks, as a function; None for a block.
    """

    task: PieceTask
    whole: nn.Module
    names: ModelNames
    mesh: DeviceMesh | None
    rest: Callable[..., Any] | None

    def __init__(self, task: PieceTask, model: nn.Module) -> None:
        """Take a piece of a model, which belongs to it from then on."""
        super().__init__()
        object.__setattr__(self, "task", task)
        object.__setattr__(self, "rest", None)
        self.enter(model, model, None)

    def enter(self, parallel: nn.Module, original: nn.Module, mesh: DeviceMesh | None) -> None:
        """Find the piece in a model, which is or contains the original one."""
        # Not attributes of a module: these must not be registered as submodules.
        object.__setattr__(self, "whole", parallel)
        object.__setattr__(self, "names", ModelNames.within(parallel, original))
        object.__setattr__(self, "mesh", mesh)
        name = self.task.name
        setattr(self, _INSIDE, self._blocks()[name] if name else parallel)

    def copy(self) -> Piece:
        """The same piece of a copy of the model, before a plan is applied to it."""
        return Piece(self.task, copy_on_write(self.whole))

    def _blocks(self) -> dict[str, nn.Module]:
        modules_by_name = watched_modules(self.names)
        missing = [name for name in self.task.calls[0] if name not in modules_by_name]
        if missing:
            raise NotByBlocksError(f"under the plan, the model has no module {missing[0]}")
        return {name: modules_by_name[name][0] for name in self.task.calls[0]}

    def move(self, device: torch.device) -> Piece:
        """Move what holds numbers to a device."""
        for tensor in _tensors(self):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(device)
        return self

    def begin(self) -> None:
        """Cut the blocks out of what lies between them."""
        if self.task.name:
            return
        blocks = self._blocks()
        cuts = {name: make_cut(block, name) for name, block in blocks.items()}
        # As long as this piece exists: the copy of the model is not used for anything else.
        replaced = contextlib.ExitStack()
        rest = replaced.enter_context(cut_out(self.whole, {"": self.whole}, blocks, cuts))
        object.__setattr__(self, "replaced", replaced)
        object.__setattr__(self, "rest", rest)

    # --- Forward and backward ---------------------------------------------------------------------

    def run_step(
        self,
        trace: Trace,
        running: contextlib.AbstractContextManager[Any],
        backward: contextlib.AbstractContextManager[Any],
        *,
        wide: bool,
    ) -> None:
        """Run one step forward and backward, and write what it gives into the trace."""
        step = _StepOfPiece(self, trace, wide=wide)
        with torch.enable_grad():
            call = step.prepare_rest() if self.rest is not None else step.prepare_block()
            with running:
                result = call()
        heads, gradients = step.take(result)
        with backward, running:
            if heads:
                torch.autograd.backward(heads, gradients)
        trace.steps[-1].returned = step.given_gradients()


class _StepOfPiece:
    """One step of a piece.

    What a piece is given, and what is kept of its results, is made outside of the modes in which it
    runs: in a run in float64, those change what tensors say about themselves.
    """

    def __init__(self, piece: Piece, trace: Trace, *, wide: bool) -> None:
        self.piece, self.trace, self.wide = piece, trace, wide
        self.number = len(trace.steps) - 1
        self.calls = piece.task.calls[self.number]
        self.forms = piece.task.forms[self.number]
        self._given: dict[str, tuple[Tensor, Form | None]] = {}
        self._heads: list[Tensor] = []
        self._gradients: list[Tensor | None] = []

    # --- A block ----------------------------------------------------------------------------------

    def prepare_block(self) -> Callable[[], Any]:
        """A function that calls the block as often as the model does."""
        inside: Any = getattr(self.piece, _INSIDE)
        prepared_calls: list[tuple[Any, Any, Any]] = []
        for call in self.calls[self.piece.task.name]:
            forms, mark = self._forms_of(call), self.piece.task.mark(call)
            args = self._feed_values(call.args, forms and forms.args)
            kwargs = self._feed_values(call.kwargs, forms and forms.kwargs)
            for argument_number, tree in enumerate((args, kwargs)):
                for path, leaf in leaves(tree):
                    if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                        form = forms.returned.get((argument_number, path)) if forms else None
                        self._given[f"{INPUT}{mark}{path}"] = leaf, form
            prepared_calls.append((call.around if forms is None else forms.around, args, kwargs))

        def run() -> list[Any]:
            results = []
            for around, args, kwargs in prepared_calls:
                with around.around():
                    results.append(inside(*args, **kwargs))
            return results

        return run

    def _take_results(self, results: list[Any]) -> None:
        for call, result in zip(self.calls[self.piece.task.name], results, strict=True):
            forms, mark = self._forms_of(call), self.piece.task.mark(call)
            for path, leaf in leaves(result):
                if isinstance(leaf, torch.Tensor):
                    form = forms.results.get(path) if forms else None
                    self._keep(f"{mark}{path}", leaf, form)
                    upstream = call.upstream.get(output(f"{OUTPUT}{path}"))
                    self._head(leaf, upstream, forms.upstream.get(path) if forms else None)

    # --- What lies between the blocks -------------------------------------------------------------

    def prepare_rest(self) -> Callable[[], Any]:
        """A function that calls the model without its blocks, and its loss."""
        program, rest = self.piece.task.program, self.piece.rest
        assert rest is not None  # noqa: S101  (the caller knows)
        on_rank = self.trace.ranks > 1
        rank_batch = (
            part_of_batch(program, self.trace.rank, self.number)
            if on_rank
            else program.batch(self.number)
        )
        batch = copy_inputs(rank_batch, widen=self.wide)
        results = {
            name: [self._result(call, self.piece.task.mark(call)) for call in calls]
            for name, calls in self.calls.items()
        }

        def run() -> tuple[Any, Any, Tensor]:
            result, taken = rest(*batch.args, **batch.kwargs, **{RESULTS: results})
            return result, taken, training_loss(program, result, batch, self.trace)

        return run

    def _take_rest(self, result: Any, taken: Any, loss: Tensor) -> None:
        noted = self.trace.steps[-1]
        noted.outputs, noted.loss = named_pieces(result), piece_of(loss)
        self._heads.append(loss)
        self._gradients.append(None)
        for name, calls in self.calls.items():
            for call, got in zip(calls, taken[name], strict=True):
                self._take_arguments(call, got, f" of {name}{self.piece.task.mark(call)}")

    # --- Both -------------------------------------------------------------------------------------

    def take(self, result: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        """Keep the results; where the backward pass begins, and with which gradients."""
        if self.piece.rest is None:
            self._take_results(result)
        else:
            self._take_rest(*result)
        return self._heads, self._gradients

    def given_gradients(self) -> dict[str, RankPiece]:
        """The gradients of what the piece was given."""
        pieces: dict[str, RankPiece] = {}
        for path, (leaf, form) in self._given.items():
            value = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            pieces[path] = self._piece(value, form)
        return pieces

    def _keep(self, path: str, value: Tensor, form: Form | None) -> None:
        self.trace.steps[-1].outputs[path] = self._piece(value, form)

    def _forms_of(self, call: BlockCall) -> CallForms | None:
        if self.piece.mesh is None:
            return None
        return self.forms[call.name][call.number][self.trace.rank]

    def _result(self, call: BlockCall, mark: str) -> Any:
        """What the model gets in place of a block's result."""
        forms = self._forms_of(call)
        table = None if forms is None else forms.results
        result = self._feed_values(
            call.result, None if table is None else with_forms(call.result, table)
        )
        for path, leaf in leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                form = forms.upstream.get(path) if forms else None
                self._given[f"result of {call.name}{mark}{path}"] = leaf, form
        return result

    def _take_arguments(self, call: BlockCall, got: Any, mark: str) -> None:
        """What the model gives to a block is an output of what lies between."""
        forms = self._forms_of(call)
        for argument_number, (tree, recorded_tree) in enumerate(
            zip(got, (call.args, call.kwargs), strict=True)
        ):
            there = dict(leaves(recorded_tree))
            shown = (
                {} if forms is None else dict(leaves((forms.args, forms.kwargs)[argument_number]))
            )
            for path, leaf in leaves(tree):
                if not isinstance(leaf, torch.Tensor) or not isinstance(there.get(path), Parked):
                    continue
                form = shown.get(path)
                rank_piece = form.value if isinstance(form, Boxed) else None
                self._keep(f": {INPUT}{mark}{path}", leaf, rank_piece)
                back = forms.returned.get((argument_number, path)) if forms else None
                self._head(leaf, call.returned.get((argument_number, path)), back)

    def _head(self, leaf: Tensor, gradient: Parked | None, form: Form | None) -> None:
        """Have backward start here too, with this gradient."""
        if gradient is None or not leaf.requires_grad:
            return
        value = _widen_tensor(gradient.back(), wide=self.wide)
        self._heads.append(leaf)
        self._gradients.append(value if form is None else form.part_of(value, self.piece.mesh))

    def _piece(self, value: Tensor, form: Form | None) -> RankPiece:
        return piece_of(value) if form is None else form.piece(value)

    def _feed_values(self, tree: Any, forms: Any) -> Any:
        """Recorded values as the piece gets them, in their forms on a rank."""
        values = [leaf for _, leaf in leaves(tree)]
        shown = [None] * len(values) if forms is None else [leaf for _, leaf in leaves(forms)]
        fed_tensors: dict[int, Tensor] = {}

        def feed_leaf(leaf: Any, form: Any) -> Any:
            if not isinstance(leaf, Parked):
                return leaf if forms is None else form
            if id(leaf) not in fed_tensors:  # a tensor that is passed twice stays one tensor
                value = _widen_tensor(leaf.back(), wide=self.wide)
                rank_part = (
                    value.clone() if form is None else form.value.part_of(value, self.piece.mesh)
                )
                fed_tensors[id(leaf)] = rank_part.requires_grad_(leaf.on_host().requires_grad)
            return fed_tensors[id(leaf)]

        return replace_leaves(tree, map(feed_leaf, values, shown))


def _widen_tensor(tensor: Tensor, *, wide: bool) -> Tensor:
    dtype = WIDE.get(tensor.dtype, tensor.dtype) if wide else tensor.dtype
    return tensor.detach().to(dtype)


def run_rest(task: PieceTask) -> None:
    """Run what lies between the blocks once, on one device.

    Raises:
        ReachedInsideError: the model reads something of a block that it cannot do without.
    """
    piece = PieceMaker(task)()
    piece.begin()
    trace = Trace(steps=[StepTrace()])
    with torch.enable_grad():
        _StepOfPiece(piece, trace, wide=False).prepare_rest()()


@dataclasses.dataclass(frozen=True)
class PieceNames(ModelNames):
    """Names in a piece: those of the whole model."""

    def of(self, path: str) -> str:
        """The name in the whole model of a path in the piece."""
        piece: Any = self.model
        if not path:
            return BETWEEN  # the piece itself is never called
        inner = path.removeprefix(_INSIDE).removeprefix(".")
        if not piece.task.name:
            return str(piece.names.of(inner))
        plain = plain_name(getattr(piece, _INSIDE), inner)
        return f"{piece.task.name}.{plain}" if plain else str(piece.task.name)
