"""Where blocks begin and end on ranks: in which form each rank gets and returns their values.

A rank may hold all of a value, a shard of it by DTensor or as a plain tensor, the rows of its own
samples, or a term of a sum. The form of each value is read off a native run of the parallel model,
by comparing what ranks hold with what the reference has there. A block can then be given the
reference's values, in the form in which the model gives it its own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.errors import ParitasError
from paritas.core.execution.block_runs import Parked, TrainingRecorder
from paritas.core.execution.observation import OUTPUT
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.contents import leaves, replace_leaves
from paritas.core.placement.assembly import Segment, take
from paritas.core.placement.rank_pieces import RankPiece, locate
from paritas.core.results.items import LocalPlacement, Partial, Replicate, Shard
from paritas.sharding.plans.dtensor import dtensor_placement
from paritas.sharding.plans.relating import (
    Relation,
    add_terms,
    find_part,
    group_terms,
    rows_of_rank,
)
from paritas.sharding.plans.traces import EqualPieces, piece_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from paritas.core.execution.block_runs import BlockCall
    from paritas.core.execution.saved_state import Surroundings
    from paritas.core.numerics.gates import Near
    from paritas.core.placement.assembly import Where
    from paritas.sharding.plans.plan import ParallelProgram
    from paritas.sharding.plans.traces import Trace


class NotByBlocksError(ParitasError, RuntimeError):
    """A plan that cannot be checked by blocks, or a block that cannot be cut out; it says why."""


# --- Recording the calls of blocks on a rank ------------------------------------------------------


class Boxed:
    """A value that is a leaf of nested values, though its class has fields."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class RankRecorder(TrainingRecorder):
    """Records what blocks get and return on a rank; values that ranks share are kept once."""

    def __init__(
        self, blocks: Mapping[str, nn.Module], equal: EqualPieces | None, step: int
    ) -> None:
        super().__init__(blocks)
        self._equal, self._step = equal, step

    def keep(self, tensor: Tensor) -> Boxed:
        """A copy of what this rank holds."""
        return Boxed(self.keep_gradient(tensor))

    def keep_gradient(self, value: Tensor) -> RankPiece:
        """The same of a gradient."""
        piece = piece_of(value)
        if self._equal is None:
            return piece
        # Blocks run in the same order on all ranks, so equal values are looked for in one shape.
        return self._equal.share_piece((self._step, "block", piece.whole_shape), piece)


# --- Forms ----------------------------------------------------------------------------------------


def _as_pieces(pieces: Mapping[int, Any]) -> Mapping[int, RankPiece | None]:
    """The gradients of a call: a `RankRecorder` keeps pieces where one device parks tensors."""
    return pieces


@dataclasses.dataclass(frozen=True)
class Form:
    """How a rank holds a value of the reference.

    Attributes:
        where: which part of these rows.
        rows: begin and end of the rows that belong to the samples of the rank; None for all.
        placement: of a distributed tensor; None for a plain one.
        factor: gradients of a mean over a part of the batch are larger by the number of parts.
        turn: for a term of a sum, its number among the terms; None for a value that is no term.
        agrees: whether it was the reference's value when its form was found.
    """

    where: Where
    rows: tuple[int, int] | None = None
    placement: LocalPlacement | None = None
    factor: float = 1.0
    turn: int | None = None
    agrees: bool = True

    def base(self, value: Tensor) -> Tensor:
        """The rows of the reference's value, with the factor."""
        rows = value if self.rows is None else value[self.rows[0] : self.rows[1]]
        return rows if self.factor == 1 else rows * self.factor

    def part_of(self, value: Tensor, mesh: DeviceMesh | None) -> Tensor:
        """What the rank gets if the reference's value is this one."""
        local = take(self.base(value.detach()), self.where).clone()
        if self.turn is not None:  # the first rank has all of the sum
            local = local if self.turn == 0 else torch.zeros_like(local)
        return local if self.placement is None else _make_dtensor(local, self.placement, mesh)

    def piece(self, tensor: Tensor) -> RankPiece:
        """What a rank holds of a value in this form."""
        piece = piece_of(tensor)
        local = piece.local if self.factor == 1 else piece.local / self.factor
        if piece.placement is not None:
            where = locate(0, piece) if piece.placement.coordinate else None
            return RankPiece(local, piece.placement, where and self._in_whole(where))
        where = self._in_whole(self.where)
        if self.turn is None:
            return RankPiece(local, where=where)
        shape = tuple(local.shape)
        term = LocalPlacement(
            mesh=(self.turn + 1,),
            coordinate=(self.turn,),
            placements=("partial(sum)",),
            global_shape=shape,
            global_offset=(0,) * len(shape),
        )
        return RankPiece(local, term, where)

    def _in_whole(self, where: Where) -> Where:
        """A part of the rows as a part of the whole."""
        if self.rows is None or not where:
            return where
        begin = self.rows[0]
        first = tuple(
            Segment(segment.source, segment.target + begin, segment.length) for segment in where[0]
        )
        return (first, *where[1:])


def _make_dtensor(local: Tensor, placement: LocalPlacement, mesh: DeviceMesh | None) -> Tensor:
    from torch.distributed import tensor as dt

    names = placement.mesh_names
    own_mesh = _submesh(mesh, names)
    if own_mesh is None or tuple(own_mesh.shape) != placement.mesh:
        raise NotByBlocksError(f"the plan has a mesh ({', '.join(names)}) of its own")
    roles = list(map(dtensor_placement, placement.roles))
    shape = torch.Size(placement.global_shape)
    strides = torch.empty(shape, device="meta").stride()
    dtensor: Tensor = dt.DTensor.from_local(
        local, own_mesh, roles, run_check=False, shape=shape, stride=strides
    )
    return dtensor.detach()


def _submesh(mesh: DeviceMesh | None, names: tuple[str, ...]) -> DeviceMesh | None:
    if mesh is None or names == tuple(mesh.mesh_dim_names or ()):
        return mesh
    try:
        return mesh[names]
    except (KeyError, RuntimeError, ValueError):
        return None


# --- The forms of one call ------------------------------------------------------------------------


@dataclasses.dataclass
class CallForms:
    """One call of a block on one rank, with a form in place of each tensor.

    Attributes:
        args: nested positional arguments; what is not a tensor is the rank's own.
        kwargs: the same for keyword arguments.
        results: path of an output -> its form.
        upstream: path of an output -> the form of its upstream gradient.
        returned: (0 for positional or 1 for keyword, path) -> the form of the gradient that the
            call sends back to that argument.
        around: the modes of torch around it.
    """

    args: Any
    kwargs: Any
    results: dict[str, Form]
    upstream: dict[str, Form]
    returned: dict[tuple[int, str], Form]
    around: Surroundings


@dataclasses.dataclass
class FormFinder:
    """Finds the forms in which ranks hold the values at the boundaries of blocks.

    Attributes:
        program: the whole model under its plan.
        ranks: the native traces of the ranks.
        near: compares with the native reference.
    """

    program: ParallelProgram
    ranks: list[Trace]
    near: Near

    def forms(self, reference: BlockCall, step: int) -> dict[int, CallForms]:
        """Rank -> the forms of one call.

        Raises:
            NotByBlocksError: a value is on the ranks in a form that is not known.
        """
        calls: dict[int, BlockCall] = {}
        for trace in self.ranks:
            block_calls = trace.steps[step].blocks.get(reference.name, [])
            if reference.number >= len(block_calls):
                raise NotByBlocksError(f"rank {trace.rank} does not call it as one device does")
            calls[trace.rank] = block_calls[reference.number]
        call_forms = {
            r: CallForms(None, None, {}, {}, {}, call.around) for r, call in calls.items()
        }
        for argument_number, field in enumerate(("args", "kwargs")):
            reference_leaves = dict(leaves(getattr(reference, field)))
            rank_leaves = {rank: dict(leaves(getattr(call, field))) for rank, call in calls.items()}
            forms = self._tree(
                f"its argument {'*' * (argument_number + 1)}{field}", reference_leaves, rank_leaves
            )
            for rank, call in calls.items():
                setattr(call_forms[rank], field, with_forms(getattr(call, field), forms[rank]))
            for key, parked in reference.returned.items():
                if key[0] == argument_number:
                    pieces = _as_pieces({r: call.returned.get(key) for r, call in calls.items()})
                    values = {rank: forms[rank][key[1]] for rank in calls}
                    for rank, form in self._gradient(pieces, values, parked.back()).items():
                        call_forms[rank].returned[key] = form
        reference_leaves = dict(leaves(reference.result))
        results = {rank: dict(leaves(call.result)) for rank, call in calls.items()}
        forms = self._tree("its result", reference_leaves, results)
        for item, parked in reference.upstream.items():
            path = item.name.removeprefix(OUTPUT)
            pieces = _as_pieces({rank: call.upstream.get(item) for rank, call in calls.items()})
            values = {rank: forms[rank][path] for rank in calls}
            for rank, form in self._gradient(pieces, values, parked.back()).items():
                call_forms[rank].upstream[path] = form
        for rank, table in forms.items():
            call_forms[rank].results = table
        return call_forms

    def _tree(
        self, what: str, reference_leaves: Mapping[str, Any], rank_leaves: dict[int, dict[str, Any]]
    ) -> dict[int, dict[str, Form]]:
        """Rank -> path -> form, of all tensors in nested values."""
        forms_by_rank: dict[int, dict[str, Form]] = {rank: {} for rank in rank_leaves}
        for path, value in reference_leaves.items():
            if not isinstance(value, Parked):
                continue
            full_value = value.back().detach().cpu()
            pieces = {
                rank: tree[path].value
                for rank, tree in rank_leaves.items()
                if isinstance(tree.get(path), Boxed)
            }
            if len(pieces) < len(rank_leaves):
                raise NotByBlocksError(f"{what}{path} is not a tensor on all ranks")
            for rank, form in self._value(f"{what}{path}", pieces, full_value).items():
                forms_by_rank[rank][path] = form
        return forms_by_rank

    def _value(
        self, what: str, pieces: dict[int, RankPiece], full_value: Tensor
    ) -> dict[int, Form]:
        """The form of one value on each rank."""
        samples = {trace.rank: trace.samples for trace in self.ranks}
        forms_by_rank: dict[int, Form] = {}
        for rank, piece in pieces.items():
            rows = rows_of_rank(self.program, samples, rank, full_value)
            tried = [
                form
                for some in dict.fromkeys((rows, None))
                if (form := self._form_in(rank, piece, Form((), some), full_value)) is not None
            ]
            if not tried:
                shapes = f"{list(piece.whole_shape)}, on one device {list(full_value.shape)}"
                raise NotByBlocksError(f"{what} has another shape on the ranks: {shapes}")
            forms_by_rank[rank] = next((form for form in tried if form.agrees), tried[0])
        return self._as_terms(pieces, forms_by_rank, full_value)

    def _form_in(self, rank: int, piece: RankPiece, form: Form, full_value: Tensor) -> Form | None:
        """The form of a piece that is a part of given rows; None if it has another shape."""
        base, placement = form.base(full_value), piece.placement
        if placement is None:
            relation, where = find_part(self.program, rank, piece.local, base, self.near)
            agrees = relation in {Relation.WHOLE, Relation.SHARD}
            return None if where is None else dataclasses.replace(form, where=where, agrees=agrees)
        if placement.global_shape != tuple(base.shape) or not placement.coordinate:
            return None
        where = locate(rank, piece)
        at = zip(placement.coordinate, placement.roles, strict=True)
        terms = [coordinate for coordinate, role in at if role == Partial("sum")]
        is_whole_or_shard = [
            isinstance(role, Replicate) or (isinstance(role, Shard) and role.pieces == 1)
            for role in placement.roles
        ]
        if sum(is_whole_or_shard) + len(terms) < len(placement.roles):
            raise NotByBlocksError(f"it is distributed as {', '.join(placement.placements)}")
        agrees = bool(terms) or self.near(piece.local, take(base, where))
        return dataclasses.replace(
            form,
            where=where,
            placement=placement,
            turn=sum(terms) if terms else None,
            agrees=agrees,
        )

    def _gradient(
        self, pieces: Mapping[int, RankPiece | None], values: dict[int, Form], full_value: Tensor
    ) -> dict[int, Form]:
        """The forms of gradients; plain ones lie where the values lie whose gradients they are."""
        full_value, factor = full_value.detach().cpu(), float(self.program.data_ranks)
        rank_pieces = {rank: piece for rank, piece in pieces.items() if piece is not None}
        forms_by_rank: dict[int, Form] = {}
        for rank, value in values.items():
            plain = dataclasses.replace(
                value, placement=None, turn=None, factor=factor, agrees=False
            )
            piece = rank_pieces.get(rank)
            if piece is not None and piece.placement is not None:
                form = self._form_in(rank, piece, plain, full_value)
                if form is None:
                    raise NotByBlocksError("a gradient has another shape on the ranks")
                forms_by_rank[rank] = form
            else:
                expected = take(plain.base(full_value), plain.where)
                agrees = piece is not None and self.near(piece.local, expected)
                forms_by_rank[rank] = dataclasses.replace(plain, agrees=agrees)
        return self._as_terms(rank_pieces, forms_by_rank, full_value)

    def _as_terms(
        self, pieces: Mapping[int, RankPiece], forms: dict[int, Form], full_value: Tensor
    ) -> dict[int, Form]:
        """Plain values that are wrong on each rank may be terms of a sum."""
        turned_forms = dict(forms)
        groups: dict[Any, list[int]] = {}
        for rank, form in forms.items():
            if form.placement is None and not form.agrees and rank in pieces:
                groups.setdefault((form.where, form.rows), []).append(rank)
        for ranks in groups.values():
            for parts in group_terms(self.program, ranks):
                if all(self._add_up(part, pieces, forms, full_value) for part in parts):
                    for part in parts:
                        for turn, rank in enumerate(part):
                            turned_forms[rank] = dataclasses.replace(
                                forms[rank], turn=turn, agrees=True
                            )
                    break
        return turned_forms

    def _add_up(
        self,
        ranks: list[int],
        pieces: Mapping[int, RankPiece],
        forms: Mapping[int, Form],
        full_value: Tensor,
    ) -> bool:
        values = [pieces[rank].local for rank in ranks]
        added = add_terms(values, self.near) if all(map(is_inexact, values)) else None
        if added is None:
            return False
        total, noise = added
        form = forms[ranks[0]]
        return self.near(total, take(form.base(full_value), form.where).double(), noise)


def with_forms(tree: Any, forms: Mapping[str, Form]) -> Any:
    """Nested values with forms instead of tensors; paths are those of `leaves`."""
    boxed = {path: Boxed(form) for path, form in forms.items()}
    return replace_leaves(tree, [boxed.get(path, leaf) for path, leaf in leaves(tree)])
