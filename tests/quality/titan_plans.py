"""Plans as torchtitan writes them for Llama, of parts that can be switched on: all are right.

Tensor and sequence parallel with a parallel loss, FSDP2 and hybrid sharding, activation
checkpointing, gradient accumulation, clipping by norm, layers compiled one by one, a model made on
the meta device, a pipeline. `titan_mistakes.py` spoils one thing at a time.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from paritas.core.execution.subjects import Inputs
from paritas.sharding.plans.verify import verify_parallel
from quality.parallel_models import SMALL, Llama, Sizes, batches, next_token
from quality.parallel_plans import SEQUENCE, TENSOR, context

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from paritas.core.results.findings import Verdict

TP, DP, CP, PP = {"tp": 2}, {"dp": 2}, {"cp": 2}, {"pp": 2}
DP_TP = {"dp": 2, "tp": 2}
HYBRID = {"replicate": 2, "shard": 2}
LOSS_PARALLEL = {
    **SEQUENCE,
    "head": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}


# --- the plan -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Titan:
    """A plan of parts; it is called with the model and the mesh.

    Attributes:
        styles: for `parallelize_module` along `tp`.
        shard: axes of FSDP2; two of them are hybrid sharding.
        checkpointing: recompute each layer in backward.
        compiled: compile each layer.
        meta: make the model on the meta device and load the weights into its shards.
        spoil: called with the parallel model and the mesh at the end.
    """

    styles: dict[str, Any] | None = None
    shard: tuple[str, ...] = ()
    checkpointing: bool = False
    compiled: bool = False
    meta: bool = False
    spoil: Callable[[Any, DeviceMesh], Any] | None = None

    def __call__(self, model: Llama, mesh: DeviceMesh) -> nn.Module:
        made = _empty_copy(model) if self.meta else model
        if self.styles is not None:
            parallelize_module(made, mesh["tp"], copy.deepcopy(self.styles))
        if self.checkpointing:
            for layer in made.layers:
                recompute(layer)
        if self.compiled:
            for layer in made.layers:
                layer.compile(backend="eager")
        if self.shard:
            for layer in made.layers:
                fully_shard(layer, mesh=mesh[self.shard])
            fully_shard(made, mesh=mesh[self.shard])
        if self.meta:
            made.to_empty(device="cpu")
            whole = StateDictOptions(full_state_dict=True)
            set_model_state_dict(made, model.state_dict(), options=whole)
        changed = self.spoil(made, mesh) if self.spoil is not None else None
        return made if changed is None else changed


def _empty_copy(model: Llama) -> Llama:
    with torch.device("meta"):
        return copy.deepcopy(model).to("meta")


def recompute(layer: nn.Module) -> None:
    """Keep only the inputs of a layer for backward."""
    forward = layer.forward
    layer.forward = lambda x: checkpoint(forward, x, use_reentrant=False)


# --- the step -------------------------------------------------------------------------------------


def norm_of(parameters: list[Tensor]) -> Tensor:
    """Of all gradients together, also if they are shards."""
    total: Any = 0.0
    for one in parameters:
        if one.grad is not None:
            norm = torch.linalg.vector_norm(one.grad)
            total = total + (norm.full_tensor() if hasattr(norm, "full_tensor") else norm) ** 2
    return total**0.5


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of training: gradient accumulation, then clipping.

    Attributes:
        parts: number of micro-batches.
        limit: of the norm of all gradients.
        vocabulary: whether ranks have different parts of the logits.
        spoil: a name; where it is looked at, a mistake is made, on the ranks only.
    """

    parts: int = 1
    limit: float | None = None
    vocabulary: bool = False
    spoil: str = ""

    def mistaken(self, model: nn.Module, name: str) -> bool:
        ranks = torch.distributed.is_initialized()
        return self.spoil == name and ranks

    def __call__(self, model: nn.Module, tokens: Tensor) -> Tensor:
        total = torch.zeros((), dtype=next(model.parameters()).dtype)
        chunks = tokens.chunk(self.parts)
        if self.mistaken(model, "skips the last"):
            chunks = chunks[:-1]
        for number, part in enumerate(chunks):
            if self.mistaken(model, "forgets the earlier"):
                model.zero_grad()
            if isinstance(model, FSDPModule):
                last = number == len(chunks) - 1 and not self.mistaken(model, "never reduces")
                model.set_requires_gradient_sync(last)
            total = total + self.one(model, part)
        if self.limit is not None:
            self.clip(model)
        return total

    def one(self, model: nn.Module, part: Tensor) -> Tensor:
        divisor = 1 if self.mistaken(model, "sums the parts") else self.parts
        if self.vocabulary and torch.distributed.is_initialized():
            with loss_parallel():
                loss = next_token(model(part), part) / divisor
                loss.backward()
        else:
            loss = next_token(model(part), part) / divisor
            loss.backward()
        loss = loss.detach()
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss

    def clip(self, model: nn.Module) -> None:
        parameters = [one for one in model.parameters() if one.grad is not None]
        norm = norm_of(parameters)
        if self.mistaken(model, "norm of the own shards"):
            local = [one.grad.to_local() for one in parameters]
            norm = nn.utils.get_total_norm(local)
        if self.mistaken(model, "norm summed over ranks"):
            norm = norm.square()
            torch.distributed.all_reduce(norm)
            norm = norm.sqrt()
        if self.mistaken(model, "clips each parameter"):
            for one in parameters:
                factor = (self.limit / (norm_of([one]) + 1e-6)).clamp(max=1.0)
                one.grad.mul_(factor)
            return
        factor = (self.limit / (norm + 1e-6)).clamp(max=1.0)
        for one in parameters:
            one.grad.mul_(factor)


# --- pipelines ------------------------------------------------------------------------------------


class Piece(nn.Module):
    """What a stage has left of the model."""

    def __init__(self, model: Llama, first: int, last: int) -> None:
        super().__init__()
        self.embed = model.embed if first == 0 else None
        self.layers = model.layers[first:last]
        ends = last == len(model.layers)
        self.norm, self.head = (model.norm, model.head) if ends else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        for module in (self.embed, *self.layers, self.norm, self.head):
            x = x if module is None else module(x)
        return x


@dataclasses.dataclass(frozen=True)
class Pipe:
    """A pipeline of one layer for each rank; `spoil` gets the stage's module and its rank."""

    kind: Any = Schedule1F1B
    parts: int = 2
    scale: bool = True
    spoil: Callable[[Piece, int], Any] | None = None
    order: tuple[int, ...] = (0, 1)

    def __call__(self, model: Llama, mesh: DeviceMesh) -> Any:
        rank = mesh.get_local_rank("pp")
        piece = Piece(model, rank, rank + 1)
        piece.layers = nn.ModuleList([model.layers[self.order[rank]]])
        if self.spoil is not None:
            self.spoil(piece, rank)
        stage = PipelineStage(piece, rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        return self.kind(
            stage, self.parts, loss_fn=lambda output, _: output.mean(), scale_grads=self.scale
        )


@dataclasses.dataclass(frozen=True)
class Interleaved:
    """A pipeline of four stages of one layer, two on each rank; `spoil` as in `Pipe`."""

    spoil: Callable[[Piece, int], Any] | None = None

    def __call__(self, model: Llama, mesh: DeviceMesh) -> Any:
        rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
        stages = []
        for number in (rank, rank + 2):
            piece = Piece(model, number, number + 1)
            if self.spoil is not None:
                self.spoil(piece, number)
            stages.append(PipelineStage(piece, number, 4, torch.device("cpu"), group=group))
        return ScheduleInterleaved1F1B(stages, 4, loss_fn=lambda output, _: output.mean())


# --- the corpus -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """A training under a plan; see `verify_parallel`."""

    name: str
    plan: Any
    mesh: dict[str, int]
    split: tuple[str, ...] = ()
    step: Step | None = None
    optimizer: Callable[..., Any] | None = None
    sizes: Sizes = SMALL
    make: Callable[[Sizes], nn.Module] = Llama
    resume: dict[str, int] | None = None

    def __str__(self) -> str:
        return self.name

    def verdict(
        self, dtype: torch.dtype = torch.float32, steps: int = 1, by: Any = "whole"
    ) -> Verdict:
        torch.manual_seed(0)
        return verify_parallel(
            self.make(self.sizes).to(dtype),
            self.plan,
            [Inputs([tokens]) for tokens in batches(self.sizes, samples=8)[:steps]],
            self.mesh,
            loss=None if self.step is not None else next_token,
            step=self.step,
            optimizer=self.optimizer,
            split=self.split,
            steps=steps,
            by="whole" if self.resume else by,
            resume=self.resume,
        )


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


VOCABULARY = Step(vocabulary=True)
HEAD_WHOLE = {
    **SEQUENCE,
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}

RIGHT = [
    Run("tp", Titan(TENSOR), TP),
    Run("tp, sp", Titan(SEQUENCE), TP),
    Run("tp, sp, loss parallel", Titan(LOSS_PARALLEL), TP, step=VOCABULARY),
    Run("tp, sp, 4 ranks", Titan(SEQUENCE), {"tp": 4}, sizes=Sizes(heads=8, kv_heads=4)),
    Run("fsdp2", Titan(shard=("dp",)), DP, ("dp",)),
    Run("fsdp2, adamw", Titan(shard=("dp",)), DP, ("dp",), optimizer=adamw),
    Run("hybrid sharding", Titan(shard=("replicate", "shard")), HYBRID, tuple(HYBRID)),
    Run("fsdp2 over tp", Titan(TENSOR, ("dp",)), DP_TP, ("dp",)),
    Run("fsdp2 over tp, sp", Titan(SEQUENCE, ("dp",)), DP_TP, ("dp",)),
    Run(
        "hybrid sharding over tp",
        Titan(TENSOR, ("replicate", "shard")),
        {**HYBRID, "tp": 2},
        tuple(HYBRID),
    ),
    Run("checkpointing", Titan(SEQUENCE, checkpointing=True), TP),
    Run("checkpointing, fsdp2", Titan(shard=("dp",), checkpointing=True), DP, ("dp",)),
    Run("accumulation", Titan(shard=("dp",)), DP, ("dp",), Step(parts=2)),
    Run("accumulation in four", Titan(shard=("dp",)), DP, ("dp",), Step(parts=4)),
    Run("clipping", Titan(shard=("dp",)), DP, ("dp",), Step(limit=0.1)),
    Run("clipping, tp", Titan(TENSOR), TP, step=Step(limit=0.1)),
    Run("clipping, never reached", Titan(TENSOR), TP, step=Step(limit=1e6)),
    Run(
        "accumulation, clipping, checkpointing, adamw",
        Titan(shard=("dp",), checkpointing=True),
        DP,
        ("dp",),
        Step(parts=2, limit=0.1),
        adamw,
    ),
    Run("meta device, fsdp2", Titan(shard=("dp",), meta=True), DP, ("dp",)),
    Run("meta device, tp", Titan(TENSOR, meta=True), TP),
    Run("resumed on more ranks", Titan(shard=("dp",)), DP, ("dp",), resume={"dp": 4}),
    Run("resumed on another mesh", Titan(TENSOR, ("dp",)), DP_TP, ("dp",), resume={"dp": 1, **TP}),
    Run("compiled layers, tp", Titan(TENSOR, compiled=True), TP),
    Run("context parallel", context, CP),
    Run("gpipe", Pipe(ScheduleGPipe), PP),
    Run("1f1b", Pipe(parts=4), PP),
    Run("interleaved 1f1b", Interleaved(), PP, sizes=Sizes(layers=4)),
]
