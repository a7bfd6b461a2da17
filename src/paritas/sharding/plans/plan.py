"""The plan: what a training is given on both sides, and how a rank applies the plan to its model.

Given are the program, each rank's samples, the loss and dropout.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from paritas.core.call_options import takes_options
from paritas.core.errors import UsageError
from paritas.core.execution.observation import Contexts
from paritas.core.execution.subjects import Inputs, input_sets
from paritas.core.numerics.contents import leaves
from paritas.core.placement.meshes import coordinate_of, rank_at
from paritas.core.results.wording import list_first
from paritas.core.torch_private.operators import WIDE
from paritas.core.torch_private.ranks import pipeline_of
from paritas.sharding.plans.shipped_plans import DATA_AXIS, UnsupportedPlanError, apply_shipped_plan
from paritas.sharding.plans.traces import ModelNames

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterable

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from paritas.core.torch_private.ranks import Pipeline
    from paritas.sharding.plans.traces import Trace


# --- The program: everything that a run needs -----------------------------------------------------

# `hf` is tensor parallel; with `hf-ep`, experts are on different ranks of the same axis.
SHIPPED_PLANS = ("hf", "hf-ep")
PLAN_NAMES = ("ddp", "fsdp", *SHIPPED_PLANS)
_AXES = ("outer", "inner")
# By default: the first steps in full, and enough others for what happens every fourth step.
FULL_STEPS, LATER_STEPS = 2, 4


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
        steps: how many are compared in full.
        later: how many follow, which are compared in float64 alone.
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
    later: int = 0
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
        return coordinate_of(rank, tuple(self.mesh.values()))

    def data_rank(self, rank: int) -> int:
        """Which part of a batch a rank has."""
        axes = zip(self.mesh, self.coordinate(rank), strict=True)
        coordinate = [position for axis, position in axes if axis in self.split]
        return rank_at(coordinate, [self.mesh[axis] for axis in self.mesh if axis in self.split])

    def batch(self, step: int) -> Inputs:
        """The inputs of a step, counted from 0."""
        return self.batches[(self.first + step) % len(self.batches)]


@dataclasses.dataclass(frozen=True)
class ProgramOptions:
    """How a program is trained.

    Attributes:
        mesh: how many ranks, along one axis or several: `4`, `(2, 2)`, `{"dp": 2, "tp": 2}`.
        loss: a function of the output and the batch; by default the output if it is a scalar, and
            otherwise a weighted mean of it.
        optimizer: a function of the parameters; by default SGD with momentum.
        step: a function of the model and the batch that runs forward and backward itself, in
            micro-batches or with clipping of gradients, and returns the loss.
        steps: how many are compared in full, each with its native values. By default the first 2
            are, and 4 more are compared in float64 alone; if these are not plainly equal, all 6
            are compared in full.
        split: axes of the mesh along which ranks have different samples of a batch: by default all
            of them for `"ddp"` and `"fsdp"`, `fsdp` for `"hf"`, none otherwise. `()` gives every
            rank the whole batch.
        seed: for making the model and for every random draw.
        compute_dtype: the dtype in which the plan computes on purpose (mixed precision): its
            rounding is allowed, and outputs in it are. By default that of the model.
    """

    mesh: int | Sequence[int] | Mapping[str, int] = 2
    _: dataclasses.KW_ONLY
    loss: Callable[..., Any] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    step: Callable[..., Any] | None = None
    steps: int | None = None
    split: str | Sequence[str] | None = None
    seed: int = 0
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("loss", "optimizer", "step"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise UsageError(f"{name}={function!r:.80}: pass a function")
        if self.step is not None and self.loss is not None:
            raise UsageError("step= returns the loss itself: drop loss=")
        if self.steps is not None and (type(self.steps) is not int or self.steps < 1):
            raise UsageError(f"steps={self.steps!r}: pass an integer of 1 or more")
        if self.compute_dtype is not None and self.compute_dtype not in WIDE:
            raise UsageError(
                f"compute_dtype={self.compute_dtype!r:.80}: pass a floating dtype of torch"
            )
        if type(self.seed) is not int:
            raise UsageError(f"seed={self.seed!r}: pass an integer")


@takes_options(ProgramOptions)
def make_program(
    model: nn.Module | Callable[[], nn.Module], plan: Any, inputs: Any, options: ProgramOptions
) -> ParallelProgram:
    """Make a program; the fields of `ProgramOptions` are its keyword arguments."""
    return program_of(model, plan, inputs, options)


def program_of(
    model: nn.Module | Callable[[], nn.Module],
    plan: Any,
    inputs: Any,
    options: ProgramOptions,
    *,
    least: int = 2,
) -> ParallelProgram:
    """Check the subjects of `verify_parallel` and make a program of them.

    Args:
        inputs: one batch as `[x, ...]` or `Inputs`, or several as a list of `Inputs`.
        least: the smallest number of ranks; one rank is all that a machine with one GPU has.

    Raises:
        UsageError: an argument is not valid.
    """
    mesh, split, steps = options.mesh, options.split, options.steps
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
        # Along the others, ranks have the same samples.
        parts = tuple(axis for axis in axes if axis == DATA_AXIS)
    else:
        named = isinstance(checked, str)
        parts = tuple(axes) if split is None and named else _split_axes(split, axes)
    batches = tuple(input_sets(inputs))
    return ParallelProgram(
        model=model,
        plan=checked,
        batches=batches,
        mesh=axes,
        loss=options.loss,
        optimizer=options.optimizer,
        step=options.step,
        steps=FULL_STEPS if steps is None else steps,
        later=LATER_STEPS if steps is None else 0,
        split=parts,
        seed=options.seed,
        compute_dtype=options.compute_dtype,
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
    asked_axes = (split,) if isinstance(split, str) else tuple(split or ())
    for name in asked_axes:
        if name not in axes:
            mesh_axes = ", ".join(axes)
            raise UsageError(
                f"split={split!r}: the mesh has no axis {name!r}; its axes: {mesh_axes}"
            )
    return tuple(name for name in axes if name in asked_axes)


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
    for batch_number, batch in enumerate(program.batches):
        size = batch_size(batch)
        if size is None:
            raise UsageError(
                f"batch {batch_number} has no tensor to split over the {parts} ranks along "
                f"{axes}: pass "
                "split=() to give every rank the whole batch"
            )
        if size % parts:
            raise UsageError(
                f"batch {batch_number} has {size} samples, which do not divide evenly over "
                f"the {parts} "
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
    batch_inputs, samples = program.batch(step), samples_of(program, rank, step)
    if samples is None:
        return batch_inputs
    return samples_from(batch_inputs, *samples)


def samples_from(inputs: Inputs, begin: int, end: int) -> Inputs:
    """These samples of each tensor as long as the batch, the rest whole."""
    size = batch_size(inputs)

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == size:
            return leaf[begin:end]
        return leaf

    return inputs.map_leaves(cut)


def to_device(inputs: Inputs, device: torch.device | None) -> Inputs:
    """The same batch on a device; None leaves it where it is."""
    if device is None:
        return inputs
    return inputs.map_leaves(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf
    )


# --- The loss of a step: the user's, the model's own, or a mean over every element ----------------

# Weights of the default loss are eighths up to one: exact in every floating dtype.
_EIGHTHS = 8


def training_loss(
    program: ParallelProgram,
    output: Any,
    batch: Inputs,
    trace: Trace,
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """The loss of the current step: the user's, the model's own, or a weighted mean.

    Args:
        rows: begin and end of the samples of the output in the whole batch; None for all that the
            rank has.

    Raises:
        UsageError: it is not one number, or does not require a gradient.
    """
    if program.loss is not None:
        loss = program.loss(output, *batch.args, **batch.kwargs)
    else:
        loss = _own_loss(output)
        if loss is None:
            loss = _weighted_mean(program, output, trace, rows)
    scalar_loss = as_scalar(loss)
    if not scalar_loss.requires_grad:
        raise UsageError("the loss does not depend on anything that requires a gradient")
    return scalar_loss


def as_scalar(loss: Any) -> Tensor:
    """The loss as a tensor without dimensions.

    Raises:
        UsageError: it is not one number.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shown = list(loss.shape) if isinstance(loss, torch.Tensor) else f"{loss!r:.80}"
        raise UsageError(f"the loss must be one number, got {shown}")
    return loss.reshape(()) if loss.dim() else loss


def _own_loss(output: Any) -> Tensor | None:
    """The loss that a model returns: its output, or `loss` in it."""
    for candidate_loss in (output, getattr(output, "loss", None)):
        if (
            isinstance(candidate_loss, torch.Tensor)
            and candidate_loss.numel() == 1
            and candidate_loss.is_floating_point()
        ):
            return candidate_loss
    loss_entry = output.get("loss") if isinstance(output, dict) else None
    return loss_entry if isinstance(loss_entry, torch.Tensor) and loss_entry.numel() == 1 else None


def _weighted_mean(
    program: ParallelProgram, output: Any, trace: Trace, rows: tuple[int, int] | None
) -> Tensor:
    """The sum of the weighted means of all outputs, with weights drawn for the whole batch.

    A plain mean would not change if elements change places.
    """
    number = len(trace.steps) - 1
    total: Tensor | None = None
    for leaf_number, (_, leaf) in enumerate(leaves(output)):
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            continue
        full_tensor = leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
        seed = program.seed + 1009 * (program.first + number) + leaf_number
        weights = _loss_weights(tuple(full_tensor.shape), program, trace, number, seed, rows)
        term = (full_tensor * weights.to(full_tensor.device, full_tensor.dtype)).mean()
        total = term if total is None else total + term
    if total is None:
        raise UsageError(
            "no output of the model requires a gradient: pass loss=, or a model that trains"
        )
    return total


def _loss_weights(
    shape: tuple[int, ...],
    program: ParallelProgram,
    trace: Trace,
    number: int,
    seed: int,
    rows: tuple[int, int] | None,
) -> Tensor:
    samples = rows
    if rows is None and trace.ranks > 1:
        samples = samples_of(program, trace.rank, number)
    is_part_of_batch = samples is not None and bool(shape) and shape[0] == samples[1] - samples[0]
    size = batch_size(program.batch(number)) or 0
    full_shape = (size, *shape[1:]) if is_part_of_batch else shape
    draws = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, _EIGHTHS + 1, full_shape, generator=draws) / _EIGHTHS
    signs = torch.randint(0, 2, full_shape, generator=draws) * 2 - 1
    signed_weights = weights * signs
    return (
        signed_weights[samples[0] : samples[1]]
        if is_part_of_batch and samples is not None
        else signed_weights
    )


# --- Dropout: switched off, or with masks that every rank draws alike -----------------------------
# Ranks draw other random numbers than one device, even if the plan is right. What a plan must
# keep is where dropout is applied and how it scales. So each mask is made a function of the
# values that it masks: an element is dropped or kept wherever it is, in the whole tensor or in a
# shard of it.

# `drawn` is torch's own dropout; `off` drops nothing; `first` and `second` are two kinds of masks.
Dropout = Literal["drawn", "off", "first", "second"]
KEYED: tuple[Dropout, Dropout] = ("first", "second")

_PLAIN = {F.dropout, torch.dropout, F.alpha_dropout, F.feature_alpha_dropout}
_FEATURES = {F.dropout1d, F.dropout2d, F.dropout3d}
# Masks depend on the leading bits of these multiples of a value. The multiples are arbitrary, so
# that common numbers such as 1 and 1/2 are not next to where the leading bits change.
_MULTIPLES = {"first": 1.2345678912345, "second": 1.4567891234567}
_LOST_BITS = np.uint64(40)
_PRIME = np.uint64(0x5851F42D4C957F2D)
_RANGE = np.uint64(1 << 20)


class DropoutMode(TorchFunctionMode):
    """Replaces dropout, also that of attention."""

    def __init__(self, kind: Dropout) -> None:
        super().__init__()
        self.kind = kind

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PLAIN or func in _FEATURES:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self,
        input: Tensor,  # noqa: A002  (the name that torch gives it)
        p: float = 0.5,
        training: bool = True,  # noqa: FBT001, FBT002
        inplace: bool = False,  # noqa: FBT001, FBT002
        train: bool = True,  # noqa: FBT001, FBT002
    ) -> Tensor:
        if not (training and train) or p == 0 or self.kind == "off":
            return input
        return input.copy_(self._mask_value(input, p)) if inplace else self._mask_value(input, p)

    def _mask_value(self, value: Tensor, p: float) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate

        if not isinstance(value, DTensor):
            return value * self._mask(value, p)
        placements = [
            Replicate() if placement.is_partial() else placement for placement in value.placements
        ]
        value = value.redistribute(placements=placements)
        local = value.to_local()
        return DTensor.from_local(
            local * self._mask(local, p),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )

    def _mask(self, value: Tensor, p: float) -> Tensor:
        """Zeros, and the factor of what is kept, by the leading bits of each value."""
        if p >= 1:
            return torch.zeros_like(value)
        # NumPy, because a run in float64 refuses to read bits, and a perturbed one adds noise.
        multiples = value.detach().double().cpu().numpy() * _MULTIPLES[self.kind]
        mixed = (np.ascontiguousarray(multiples).view(np.uint64) >> _LOST_BITS) * _PRIME
        is_kept = (mixed ^ (mixed >> np.uint64(29))) % _RANGE >= p * float(_RANGE)
        mask = torch.from_numpy(is_kept.reshape(value.shape) / (1 - p))
        return mask.to(value.device, value.dtype)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002
        **keywords: Any,
    ) -> Tensor:
        """The parameters in torch's order; `scale` and `enable_gqa` have no place in it."""
        how = {"attn_mask": attn_mask, "is_causal": is_causal, **keywords}
        if dropout_p == 0 or self.kind == "off":
            return F.scaled_dot_product_attention(query, key, value, **how)
        if how.pop("enable_gqa", False):
            times = query.shape[-3] // key.shape[-3]
            key, value = (tensor.repeat_interleave(times, -3) for tensor in (key, value))
        # The weights of attention are what it returns for the identity matrix.
        length = key.shape[-2]
        identity = torch.eye(length, dtype=value.dtype, device=value.device)
        identity = identity.expand(*value.shape[:-2], length, length)
        weights = F.scaled_dot_product_attention(query, key, identity, **how)
        return self._mask_value(weights, dropout_p) @ value


def with_dropout(
    kind: Dropout, running: contextlib.AbstractContextManager[Any]
) -> contextlib.AbstractContextManager[Any]:
    """A context that also replaces dropout."""
    if kind == "drawn":
        return running
    return Contexts(running, DropoutMode(kind))


# --- The stages of a rank as one module -----------------------------------------------------------


class PipelinedModel(nn.Module):
    """The stages that a rank holds; the schedule calls them.

    Attributes:
        pipeline: the schedule.
        known: the user's modules before the plan was applied, by identity, with their names.
    """

    pipeline: Pipeline
    known: Mapping[nn.Module, str]

    def __init__(self, pipeline: Pipeline, module_names: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.stages = nn.ModuleList([stage.module for stage in pipeline.stages])
        # Not attributes of a module: these must not be registered as submodules.
        object.__setattr__(self, "pipeline", pipeline)
        object.__setattr__(self, "known", module_names)


@dataclasses.dataclass(frozen=True)
class StageNames(ModelNames):
    """Names in stages: a module of the user's model keeps its name wherever a stage puts it.

    Other modules, such as those of a copied model, are expected to have the same name in their
    stage as in the model.
    """

    def of(self, path: str) -> str:
        """The plain name of a path of the stages."""
        parts = path.split(".") if path else []
        if len(parts) < 2:  # noqa: PLR2004  (the list of stages, or all of it)
            return "all stages"
        module: Any = self.model.get_submodule(".".join(parts[:2]))
        pipelined: Any = self.model
        # A stage itself is never the whole model, even if it is what is left of it.
        name = pipelined.known.get(module) or ""
        if len(parts) == 2:  # noqa: PLR2004
            number = pipelined.pipeline.stages[int(parts[1])].number
            return name or f"stage {number}"
        plain = ModelNames(module).of(".".join(parts[2:]))
        at, rest = module, plain.split(".")
        for depth, part in enumerate(rest, start=1):
            at = getattr(at, part, None)
            if isinstance(at, nn.Module) and at in pipelined.known:
                name = pipelined.known[at]
                plain = ".".join([name, *rest[depth:]])
        return f"{name}.{plain}" if name and not plain.startswith(name) else plain


# --- Any plan -------------------------------------------------------------------------------------

_MOST_LISTED = 5


def parallel_model(
    program: ParallelProgram, model: nn.Module, device: torch.device | None
) -> nn.Module:
    """The model under its plan; it may be the same object, changed in place."""
    from torch.distributed.device_mesh import init_device_mesh

    kinds = {tensor.device.type for tensor in model.parameters()} - {"meta"}
    kind = next(iter(kinds), "cpu")
    mesh = init_device_mesh(kind, tuple(program.mesh.values()), mesh_dim_names=tuple(program.mesh))
    return apply_plan(program, model, mesh, device)


def apply_plan(
    program: ParallelProgram, model: nn.Module, mesh: DeviceMesh, device: torch.device | None
) -> nn.Module:
    """The same on a mesh that exists."""
    plan = program.plan
    if plan == "ddp":
        placed = None if device is None or device.index is None else [device.index]
        return nn.parallel.DistributedDataParallel(model, device_ids=placed)
    if plan == "fsdp":
        _shard_blocks(model, mesh)
        return model
    if plan in SHIPPED_PLANS:
        return apply_shipped_plan(model, mesh, experts=plan == "hf-ep")
    if isinstance(plan, dict):
        from torch.distributed.tensor.parallel import parallelize_module

        unmatched = unmatched_names(plan, model)
        if len(unmatched) == len(plan):
            raise UnsupportedPlanError(
                f"no module matches {_list_names(unmatched)} of the plan, so nothing is parallel"
            )
        matched = {name: style for name, style in plan.items() if name not in unmatched}
        # Styles keep state of their rank, so ranks that are threads must not share them.
        return parallelize_module(model, mesh, copy.deepcopy(matched))
    module_names = {module: name for name, module in model.named_modules()}
    planned_model: Any = plan(model, mesh)
    pipeline = pipeline_of(planned_model)
    if pipeline is not None:
        if not pipeline.has_loss:
            raise UnsupportedPlanError(
                "the pipeline schedule has no loss, so it trains nothing: pass loss_fn=, which "
                "verify_parallel replaces by its own loss"
            )
        return PipelinedModel(pipeline, module_names)
    if planned_model is not None and not isinstance(planned_model, nn.Module):
        raise UnsupportedPlanError(
            f"the plan returned {planned_model!r:.80}: return the parallel module, a "
            "pipeline schedule, or "
            "None if the model was changed in place"
        )
    return model if planned_model is None else planned_model


def plan_notes(program: ParallelProgram, model: nn.Module) -> list[str]:
    """What is to be said about a plan before it is applied to a model."""
    unmatched = unmatched_names(program.plan, model) if isinstance(program.plan, dict) else []
    return [f"no module matches {_list_names(unmatched)} of the plan"] if unmatched else []


def unmatched_names(plan: dict[str, Any], model: nn.Module) -> list[str]:
    """The names and globs of a dict of parallel styles that match no module."""
    paths = [_atoms(name) for name, _ in model.named_modules()]
    return [name for name in plan if not any(_matches(path, _atoms(name)) for path in paths)]


def _list_names(names: list[str]) -> str:
    return list_first([repr(name) for name in names], _MOST_LISTED)


def apply_styles(model: nn.Module, mesh: DeviceMesh, plan: dict[str, Any], block: str) -> None:
    """Apply the parallel styles of a plan to one block, and to the modules around and inside it.

    This is what `parallelize_module` does there. Of a plan for many layers it is a small part.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    for pattern, style in plan.items():
        atoms = _atoms(pattern)
        for name, module in list(model.named_modules()):
            path = _atoms(name)
            near = all(map(str.__eq__, path, _atoms(block)))
            if near and _matches(path, atoms):
                parallelize_module(module, mesh, copy.deepcopy(style))


def _atoms(name: str) -> list[str]:
    return name.split(".") if name else []


def _matches(path: list[str], atoms: list[str]) -> bool:
    return len(path) == len(atoms) and all(map(fnmatch.fnmatch, path, atoms))


def _shard_blocks(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply FSDP as is usual: to each block of a list or sequence, then to the rest."""
    from torch.distributed.fsdp import fully_shard

    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _blocks(module: nn.Module) -> list[nn.Module]:
    modules: list[nn.Module] = []
    for child in module.children():
        holds = any(True for _ in child.parameters())
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        if listed and holds and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            modules.append(child)
        else:
            modules += _blocks(child)
    return modules
