"""The description of a model under a parallel plan, and which samples each rank has."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.operators import WIDE
from paritas.errors import UsageError
from paritas.execution.subjects import Inputs, input_sets
from paritas.numerics.contents import leaves, map_leaves
from paritas.parallel.hugging_face import SHIPPED_PLANS, split_axes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from paritas.parallel.dropout import Dropout


# --- The program: everything that a run needs -----------------------------------------------------

PLAN_NAMES = ("ddp", "fsdp", *SHIPPED_PLANS)
_AXES = ("outer", "inner")


@dataclasses.dataclass(frozen=True)
class ParallelProgram:
    """A few steps of training, on one device and under a plan; see `make_program`.

    Attributes:
        model: a module, which is copied before each run; or a function that makes one.
        plan: how it becomes parallel: a `dict[str, ParallelStyle]`, a name, or a function
            of the model and the mesh that returns the parallel model, a pipeline schedule, or None
            if it changed the model in place.
        batches: the inputs of the steps, repeated from the start as needed.
        mesh: name of each axis -> number of ranks along it.
        loss: a function of the output and the batch; None means the output itself if it is a
            scalar, and otherwise a weighted mean of it.
        optimizer: a function of the parameters; None means SGD with momentum.
        step: a function of the model and the batch that runs forward and backward, as often as it
            likes, and returns the loss; None means once.
        steps: how many.
        first: how many steps were trained before, on other ranks.
        split: axes of the mesh along which ranks have different samples.
        seed: for making the model, for each step, and for the weights of that mean.
        dropout: what becomes of dropout on both sides.
        compute_dtype: the dtype in which the plan computes on purpose, if that is narrower than the
            model's.
    """

    model: nn.Module | Callable[[], nn.Module]
    plan: Any
    batches: tuple[Inputs, ...]
    mesh: Mapping[str, int]
    loss: Callable[..., Any] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    step: Callable[..., Any] | None = None
    steps: int = 2
    first: int = 0
    split: tuple[str, ...] = ()
    seed: int = 0
    dropout: Dropout = "drawn"
    compute_dtype: torch.dtype | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def data_ranks(self) -> int:
        """Number of parts that a batch is split into."""
        return math.prod(self.mesh[axis] for axis in self.split)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The coordinate of a rank on the mesh; the last axis runs fastest."""
        found: list[int] = []
        for size in reversed(tuple(self.mesh.values())):
            rank, place = divmod(rank, size)
            found.append(place)
        return tuple(reversed(found))

    def data_rank(self, rank: int) -> int:
        """Which part of a batch a rank has."""
        part = 0
        for axis, place in zip(self.mesh, self.coordinate(rank), strict=True):
            if axis in self.split:
                part = part * self.mesh[axis] + place
        return part

    def batch(self, step: int) -> Inputs:
        """The inputs of a step, counted from 0."""
        return self.batches[(self.first + step) % len(self.batches)]


def make_program(  # noqa: PLR0913
    model: nn.Module | Callable[[], nn.Module],
    plan: Any,
    inputs: Any,
    mesh: int | Sequence[int] | Mapping[str, int] = 2,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    step: Callable[..., Any] | None = None,
    steps: int = 2,
    split: str | Sequence[str] | None = None,
    seed: int = 0,
    compute_dtype: torch.dtype | None = None,
    least: int = 2,
) -> ParallelProgram:
    """Check the arguments of `verify_parallel` and make a program of them.

    Args:
        inputs: one batch as `[x, ...]` or `Inputs`, or several as a list of `Inputs`.
        mesh: how many ranks, along one axis or several: `4`, `(2, 2)`, `{"dp": 2, "tp": 2}`.
        split: the axes along which ranks have different samples of a batch: by default all of them
            for `ddp` and `fsdp`, `fsdp` for `hf`, none otherwise. `()` gives every rank the whole
            batch.
        least: the smallest number of ranks; one rank is all that a machine with one GPU has.

    Raises:
        UsageError: an argument is not valid.
    """
    if not callable(model):
        raise UsageError(f"model={model!r:.80}: pass a module or a function that makes one")
    axes = _mesh_axes(mesh, least)
    checked = _checked_plan(plan)
    if isinstance(checked, dict) and len(axes) > 1:
        raise UsageError(
            f"mesh={dict(axes)!r}: a dict of parallel styles needs a mesh with one axis; pass a "
            "function of the model and the mesh, which can call parallelize_module on one axis"
        )
    if split is None and checked in SHIPPED_PLANS:
        parts = split_axes(axes)
    else:
        named = isinstance(checked, str)
        parts = tuple(axes) if split is None and named else _split_axes(split, axes)
    for name, given in (("loss", loss), ("optimizer", optimizer), ("step", step)):
        if given is not None and not callable(given):
            raise UsageError(f"{name}={given!r:.80}: pass a function")
    if step is not None and loss is not None:
        raise UsageError("step= returns the loss itself: drop loss=")
    if type(steps) is not int or steps < 1:
        raise UsageError(f"steps={steps!r}: pass an integer of 1 or more")
    if compute_dtype is not None and compute_dtype not in WIDE:
        raise UsageError(f"compute_dtype={compute_dtype!r:.80}: pass a floating dtype of torch")
    if type(seed) is not int:
        raise UsageError(f"seed={seed!r}: pass an integer")
    batches = tuple(input_sets(inputs))
    return ParallelProgram(
        model=model,
        plan=checked,
        batches=batches,
        mesh=axes,
        loss=loss,
        optimizer=optimizer,
        step=step,
        steps=steps,
        split=parts,
        seed=seed,
        compute_dtype=compute_dtype,
    )


def _mesh_axes(mesh: Any, least: int) -> dict[str, int]:
    """Name -> extent of each axis."""
    if isinstance(mesh, Mapping):
        axes = dict(mesh)
    elif type(mesh) is int:
        axes = {"ranks": mesh}
    elif isinstance(mesh, (list, tuple)) and mesh:
        names = _AXES if len(mesh) == len(_AXES) else [f"axis{n}" for n in range(len(mesh))]
        axes = {"ranks": mesh[0]} if len(mesh) == 1 else dict(zip(names, mesh, strict=True))
    else:
        raise UsageError(f"mesh={mesh!r}: pass the number of ranks, or one number for each axis")
    for name, size in axes.items():
        if not isinstance(name, str) or type(size) is not int or size < 1:
            raise UsageError(f"mesh={mesh!r}: axis {name!r} needs 1 or more ranks, got {size!r}")
    if math.prod(axes.values()) < least:
        raise UsageError(f"mesh={mesh!r} has only one rank: pass 2 or more")
    return axes


def _checked_plan(plan: Any) -> Any:
    if isinstance(plan, str):
        if plan in PLAN_NAMES:
            return plan
        raise UsageError(
            f"plan={plan!r}: pass {', '.join(map(repr, PLAN_NAMES))}, a dict of parallel styles, "
            "or a function of the model and the mesh"
        )
    if isinstance(plan, Mapping):
        if not plan:
            raise UsageError("plan={}: the dict of parallel styles is empty")
        return dict(plan)
    if callable(plan):
        return plan
    raise UsageError(
        f"plan={plan!r:.80}: pass {', '.join(map(repr, PLAN_NAMES))}, a dict of parallel styles, "
        "or a function of the model and the mesh"
    )


def _split_axes(split: str | Sequence[str] | None, axes: dict[str, int]) -> tuple[str, ...]:
    asked = (split,) if isinstance(split, str) else tuple(split or ())
    for name in asked:
        if name not in axes:
            known = ", ".join(axes)
            raise UsageError(f"split={split!r}: the mesh has no axis {name!r}; its axes: {known}")
    return tuple(name for name in axes if name in asked)


# --- Which samples of a batch each rank has -------------------------------------------------------


def batch_size(inputs: Inputs) -> int | None:
    """Number of samples of a batch: the length of its first tensor that is not a scalar."""
    for _, leaf in leaves((inputs.args, inputs.kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    return None


def check_batches(program: ParallelProgram) -> None:
    """Make sure that every batch can be split evenly.

    Raises:
        UsageError: it cannot, so the mean of the ranks' losses would not be the loss of the batch.
    """
    parts = program.data_ranks
    if parts == 1:
        return
    axes = " and ".join(program.split)
    for place, batch in enumerate(program.batches):
        size = batch_size(batch)
        if size is None:
            raise UsageError(
                f"batch {place} has no tensor to split over the {parts} ranks along {axes}: pass "
                "split=() to give every rank the whole batch"
            )
        if size % parts:
            raise UsageError(
                f"batch {place} has {size} samples, which do not divide evenly over the {parts} "
                f"ranks along {axes}: pass a batch of {size + parts - size % parts}, or another "
                "mesh"
            )


def samples_of(program: ParallelProgram, rank: int, step: int = 0) -> tuple[int, int] | None:
    """Begin and end of a rank's samples; None if it has all of them."""
    if program.data_ranks == 1:
        return None
    size = (batch_size(program.batch(step)) or 0) // program.data_ranks
    begin = program.data_rank(rank) * size
    return begin, begin + size


def part_of_batch(program: ParallelProgram, rank: int, step: int) -> Inputs:
    """The inputs of a rank: its samples of each tensor as long as the batch, the rest whole."""
    whole, samples = program.batch(step), samples_of(program, rank, step)
    if samples is None:
        return whole
    return samples_from(whole, *samples)


def samples_from(whole: Inputs, begin: int, end: int) -> Inputs:
    """These samples of each tensor as long as the batch, the rest whole."""
    size = batch_size(whole)

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == size:
            return leaf[begin:end]
        return leaf

    args, kwargs = map_leaves((whole.args, whole.kwargs), cut)
    return dataclasses.replace(whole, args=args, kwargs=kwargs)


def to_device(inputs: Inputs, device: torch.device | None) -> Inputs:
    """The same batch on a device; None leaves it where it is."""
    if device is None:
        return inputs
    args, kwargs = map_leaves(
        (inputs.args, inputs.kwargs),
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf,
    )
    return dataclasses.replace(inputs, args=args, kwargs=kwargs)
