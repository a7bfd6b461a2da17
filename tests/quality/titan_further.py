"""Further plans as torchtitan writes them: experts, a ring of keys, checkpoints, float8. All right.

Experts are exchanged by all-to-all; context parallel passes keys and values around; a checkpoint is
saved on one mesh and loaded on another; linear layers multiply in float8 with a scale that all
ranks share. Each plan has a `spoil`, a name of a mistake that it then makes.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

from quality.parallel_models import Core, Llama, Sizes
from quality.parallel_plans import TENSOR, Passage, Team, context
from quality.titan_plans import CP, DP_TP, TP, Run

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# --- experts --------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Each token goes to the two best of four experts, and their results are weighted."""

    chosen = 2

    def __init__(self, sizes: Sizes, count: int = 4) -> None:
        super().__init__()
        self.count = count
        self.router = nn.Linear(sizes.dim, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, sizes.hidden, sizes.dim) / sizes.dim**0.5)
        self.down = nn.Parameter(torch.randn(count, sizes.dim, sizes.hidden) / sizes.hidden**0.5)

    def one(self, rows: Tensor, number: int) -> Tensor:
        hidden = functional.silu(functional.linear(rows, self.up[number]))
        return functional.linear(hidden, self.down[number])

    def all(self, rows: Tensor, counts: Tensor) -> Tensor:
        """What the experts make of rows that are sorted by expert."""
        parts = rows.split(counts.tolist())
        return torch.cat([self.one(part, number) for number, part in enumerate(parts)])

    def weigh(self, best: Tensor) -> Tensor:
        return best / best.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        best, number = self.router(tokens).softmax(-1).topk(self.chosen)
        order = number.flatten().argsort(stable=True)
        counts = number.flatten().bincount(minlength=self.count)
        made = self.all(tokens[order // self.chosen], counts)
        back = made[order.argsort()].unflatten(0, (-1, self.chosen))
        return (back * self.weigh(best)[..., None]).sum(1).view_as(x)


def mixture(sizes: Sizes) -> Llama:
    model = Llama(sizes)
    for layer in model.layers:
        layer.mlp = Experts(sizes)
    return model


class _Exchanged(torch.autograd.Function):
    """Rows to the ranks that want them; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, given: list[int], got: list[int], group: Any) -> Tensor:
        ctx.sizes = (got, given, group)
        return exchange(rows, given, got, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return exchange(gradient, *ctx.sizes), None, None, None


def exchange(rows: Tensor, given: list[int], got: list[int], group: Any) -> Tensor:
    taken = rows.new_empty((sum(got), *rows.shape[1:]))
    distributed.all_to_all_single(taken, rows.contiguous(), got, given, group=group)
    return taken


class RankExperts(Experts):
    """Some of the experts are on this rank; rows travel to them and back."""

    def __init__(self, whole: Experts, team: Team, spoil: str) -> None:
        nn.Module.__init__(self)
        self.count, self.team, self.spoil = whole.count, team, spoil
        self.router = whole.router
        self.up = nn.Parameter(self.mine(whole.up))
        self.down = nn.Parameter(self.mine(whole.down))

    def mine(self, weight: Tensor) -> Tensor:
        rank = self.team.rank
        if self.spoil == "experts of the other rank":
            rank = self.team.size - 1 - rank
        return weight.detach().chunk(self.team.size)[rank].clone()

    def weigh(self, best: Tensor) -> Tensor:
        return best if self.spoil == "weights not normalised" else super().weigh(best)

    def all(self, rows: Tensor, counts: Tensor) -> Tensor:
        ranks, group = self.team.size, self.team.group
        sent = counts.view(ranks, -1)
        there = torch.empty_like(sent)
        distributed.all_to_all_single(there, sent.contiguous(), group=group)
        given, got = sent.sum(1).tolist(), there.sum(1).tolist()
        arrived = _Exchanged.apply(rows, given, got, group)
        # By sender and expert; each expert needs its rows together.
        pieces = arrived.split(there.flatten().tolist())
        local = there.shape[1]
        made: dict[int, tuple[Tensor, ...]] = {}
        for number in range(local):
            own = pieces[number::local]
            result = self.one(torch.cat(own), number)
            if self.spoil == "rows beyond a capacity dropped":
                result = torch.cat([result[:6], torch.zeros_like(result[6:])])
            made[number] = result.split([len(one) for one in own])
        senders = [made[number][sender] for sender in range(ranks) for number in range(local)]
        if self.spoil == "rows sent back by expert":
            senders = [made[number][sender] for number in range(local) for sender in range(ranks)]
        return _Exchanged.apply(torch.cat(senders), got, given, group)


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
    """Experts on ranks that have different samples; other weights are on all of them."""

    spoil: str = ""

    def __call__(self, model: Llama, mesh: DeviceMesh) -> None:
        team = Team(mesh, "ep")
        for layer in model.layers:
            layer.mlp = RankExperts(layer.mlp, team, self.spoil)
        for name, parameter in model.named_parameters():
            if name.endswith((".mlp.up", ".mlp.down")):
                # Its gradient is a sum over the samples of all ranks already.
                if self.spoil != "gradients of experts not divided":
                    parameter.register_hook(lambda gradient: gradient / team.size)
            elif self.spoil != "the router is never reduced" or "router" not in name:
                parameter.register_hook(team.mean)


# --- a ring ---------------------------------------------------------------------------------------


def passed_on(x: Tensor, team: Team, by: int) -> Tensor:
    """What the rank before sent, while this rank sends to the next."""
    taken = torch.empty_like(x).contiguous()
    ranks = distributed.get_process_group_ranks(team.group)
    to, source = ranks[(team.rank + by) % team.size], ranks[(team.rank - by) % team.size]
    works = [
        distributed.P2POp(distributed.isend, x.contiguous(), to, team.group),
        distributed.P2POp(distributed.irecv, taken, source, team.group),
    ]
    for work in distributed.batch_isend_irecv(works):
        work.wait()
    return taken


class RingCore(Core):
    """Attention of this rank's queries to keys that come around, one part after the other."""

    def __init__(self, whole: Core, team: Team, first: int, spoil: str) -> None:
        super().__init__(whole.group)
        self.team, self.first, self.spoil = team, first, spoil
        back = 1 if spoil == "gradients sent onwards" else -1
        self.next = Passage(lambda x: passed_on(x, team, 1), lambda x: passed_on(x, team, back))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        total = normaliser = None
        length, ranks = k.shape[1], self.team.size
        for step in range(ranks - (self.spoil == "a part too few")):
            owner = (self.team.rank - step) % ranks
            if self.spoil == "the mask of the own part":
                owner = self.team.rank
            part, weight = self.part(q, k, v, owner * length)
            if total is None:
                total, normaliser = part, weight
            elif self.spoil == "parts averaged":
                total = (total + part) / 2
            else:
                joined = torch.logaddexp(normaliser, weight)
                total = total * (normaliser - joined).exp() + part * (weight - joined).exp()
                normaliser = joined
            if step + 1 < ranks:
                k, v = self.next(k), self.next(v)
        return total.transpose(1, 2).flatten(2)

    def part(self, q: Tensor, k: Tensor, v: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        """Attention to some keys, and the logarithm of its normaliser."""
        k, v = self.repeated(k), self.repeated(v)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        place = torch.arange(self.first, self.first + q.shape[1])[:, None]
        keys = torch.arange(begin, begin + k.shape[1])
        scores = scores.masked_fill(keys > place, -1e4)
        weight = scores.logsumexp(-1, keepdim=True)
        return torch.einsum("bhqk,bkhd->bhqd", (scores - weight).exp(), v), weight


@dataclasses.dataclass(frozen=True)
class Ring:
    """Each rank has all weights and a part of every sequence."""

    spoil: str = ""

    def __call__(self, model: Llama, mesh: DeviceMesh) -> None:
        team = Team(mesh, "cp")
        cores = [layer.attention.core for layer in model.layers]
        context(model, mesh)
        for layer, core in zip(model.layers, cores, strict=True):
            first = layer.attention.core.first
            layer.attention.core = RingCore(core, team, first, self.spoil)


# --- a checkpoint of another mesh -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Resharded:
    """Saved under tensor parallel and FSDP2, loaded under FSDP2 over all ranks."""

    spoil: str = ""

    def __call__(self, model: Llama, mesh: DeviceMesh) -> Llama:
        names = [mesh.get_rank() == 0 and tempfile.mkdtemp()]
        distributed.broadcast_object_list(names)
        folder = str(names[0])
        try:
            self.save(model, mesh, folder)
            return self.load(model, mesh, folder)
        finally:
            distributed.barrier()
            if mesh.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)

    def save(self, model: Llama, mesh: DeviceMesh, folder: str) -> None:
        saved = _copy(model)
        parallelize_module(saved, mesh["tp"], TENSOR)
        fully_shard(saved, mesh=mesh["dp"])
        state = saved.state_dict()
        if self.spoil == "a weight saved before the last step":
            with torch.no_grad():
                state["layers.1.mlp.up.weight"].mul_(1.01)
        dcp.save(state, checkpoint_id=folder)

    def load(self, model: Llama, mesh: DeviceMesh, folder: str) -> Llama:
        made = _copy(model)
        with torch.no_grad():
            for one in made.parameters():  # what is not loaded must not be right by chance
                one.normal_(generator=torch.Generator().manual_seed(1))
        everyone = init_device_mesh(mesh.device_type, (mesh.size(),))
        for layer in made.layers:
            fully_shard(layer, mesh=everyone)
        fully_shard(made, mesh=everyone)
        state = made.state_dict()
        if self.spoil == "a weight left out":
            state.pop("layers.0.mlp.down.weight")
        dcp.load(state, checkpoint_id=folder)
        if self.spoil == "a shard of another rank":
            _swap(made.layers[1].attention.q.weight, mesh)
        return made


def _copy(model: Llama) -> Llama:
    made = Llama(_sizes_of(model)).to(next(model.parameters()).dtype)
    made.load_state_dict(model.state_dict())
    return made


def _sizes_of(model: Llama) -> Sizes:
    attention = model.layers[0].attention
    return Sizes(
        dim=model.embed.weight.shape[1],
        heads=attention.q.weight.shape[0] // attention.head_dim,
        kv_heads=attention.k.weight.shape[0] // attention.head_dim,
        hidden=model.layers[0].mlp.up.weight.shape[0],
        vocabulary=model.embed.weight.shape[0],
        layers=len(model.layers),
        length=attention.rotation.cos.shape[0],
    )


def _swap(weight: Any, mesh: DeviceMesh) -> None:
    local = weight.to_local()
    with torch.no_grad():
        local.copy_(passed_on(local, Team(mesh, "dp"), 1))


# --- float8 ---------------------------------------------------------------------------------------

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max


def to_float8(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor in float8, and the factor that brings it back."""
    scale = (LARGEST / largest.float().clamp(min=1e-12)).float()
    return (x.float() * scale).clamp(-LARGEST, LARGEST).to(FLOAT8), 1 / scale


class _Float8Product(torch.autograd.Function):
    """`x @ weight.T` of float8 values, accumulated in float32; gradients in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, most: Tensor, wmost: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows, back = to_float8(x.flatten(0, -2), most)
        columns, wback = to_float8(weight, wmost)
        made = torch._scaled_mm(
            rows, columns.t(), scale_a=back, scale_b=wback, out_dtype=torch.float32
        )
        return made.to(x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        wide = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        return gradient @ weight, wide, None, None


class Float8Linear(nn.Module):
    """A linear layer in float8 with one scale for each tensor."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def largest(self, x: Tensor) -> Tensor:
        return x.detach().abs().max()

    def forward(self, x: Tensor) -> Tensor:
        return _Float8Product.apply(x, self.weight, self.largest(x), self.largest(self.weight))


def in_float8(sizes: Sizes) -> Llama:
    model = Llama(sizes)
    for layer in model.layers:
        layer.mlp.up = Float8Linear(layer.mlp.up.weight)
        layer.mlp.down = Float8Linear(layer.mlp.down.weight)
    return model


class RankFloat8(Float8Linear):
    """Some outputs, or some inputs, of a layer in float8; the scale is that of all ranks."""

    def __init__(self, whole: Float8Linear, team: Team, dim: int, spoil: str) -> None:
        super().__init__(team.mine(whole.weight, dim))
        self.team, self.spoil = team, spoil
        self.before = team.enter() if dim == 0 else None
        self.after = team.leave() if dim == 1 else None

    def largest(self, x: Tensor) -> Tensor:
        most = super().largest(x).clone()
        if self.spoil != "each rank has its own scale":
            distributed.all_reduce(most, distributed.ReduceOp.MAX, group=self.team.group)
        return most

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x if self.before is None else self.before(x))
        return made if self.after is None else self.after(made)


@dataclasses.dataclass(frozen=True)
class Float8Parallel:
    spoil: str = ""

    def __call__(self, model: Llama, mesh: DeviceMesh) -> None:
        team = Team(mesh, "tp")
        for layer in model.layers:
            enter = team.enter()
            layer.mlp.up = RankFloat8(layer.mlp.up, team, 0, self.spoil)
            layer.mlp.gate.weight = nn.Parameter(team.mine(layer.mlp.gate.weight, 0))
            layer.mlp.gate.register_forward_pre_hook(lambda _, args, go=enter: (go(args[0]),))
            layer.mlp.down = RankFloat8(layer.mlp.down, team, 1, self.spoil)


# --- what torch does not have on a CPU ------------------------------------------------------------


class AsyncColumn(nn.Module):
    """Asynchronous tensor parallel: tokens are gathered while the product is computed."""

    def __init__(self, whole: nn.Linear, team: Team) -> None:
        super().__init__()
        self.weight = nn.Parameter(team.mine(whole.weight.detach(), 0))
        self.team = team

    def forward(self, x: Tensor) -> Tensor:
        own, name = self.team.mine(x, 1), self.team.group.group_name
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        return fused(own, [self.weight.t()], 1, name)[1][0]


def asynchronous(model: Llama, mesh: DeviceMesh) -> None:
    team = Team(mesh, "tp")
    for layer in model.layers:
        for name in ("q", "k", "v"):
            whole = layer.attention.get_submodule(name)
            setattr(layer.attention, name, AsyncColumn(whole, team))


class FlashCore(Core):
    """The attention that torch's context parallel replaces."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = (x.transpose(1, 2) for x in (q, self.repeated(k), self.repeated(v)))
        made = functional.scaled_dot_product_attention(*given, is_causal=True)
        return made.transpose(1, 2).flatten(2)


def torch_context(model: Llama, mesh: DeviceMesh) -> None:
    """Torch's own context parallel."""
    from torch.distributed.tensor.experimental import context_parallel

    rotations = [layer.attention.rotation for layer in model.layers]
    for layer in model.layers:
        layer.attention.core = FlashCore(layer.attention.core.group)
    forward = model.forward

    def within(tokens: Tensor) -> Tensor:
        tables = [one for rotation in rotations for one in (rotation.cos, rotation.sin)]
        dims = [1, *(0 for _ in tables)]
        with context_parallel(mesh["cp"], buffers=[tokens, *tables], buffer_seq_dims=dims):
            return forward(tokens)

    model.forward = within


# --- the corpus -----------------------------------------------------------------------------------

EP = {"ep": 2}
EXPERTS = Run("experts, all-to-all", ExpertParallel(), EP, ("ep",), make=mixture)
RING = Run("context parallel in a ring", Ring(), CP)
LOADED = Run("a checkpoint of another mesh", Resharded(), DP_TP, ("dp", "tp"))
IN_FLOAT8 = Run("float8, one scale for all ranks", Float8Parallel(), TP, make=in_float8)

RIGHT_FURTHER = [
    EXPERTS,
    dataclasses.replace(EXPERTS, name="experts, 4 ranks", mesh={"ep": 4}),
    RING,
    dataclasses.replace(RING, name="context parallel in a ring of 4", mesh={"cp": 4}),
    LOADED,
    IN_FLOAT8,
]
NOT_ON_A_CPU = [
    (Run("asynchronous tensor parallel", asynchronous, TP), "symm_mem::fused_all_gather_matmul"),
    (Run("torch's context parallel", torch_context, CP), "flash_attention_for_cpu"),
]


def mistaken(run: Run, spoil: str, **how: Any) -> Run:
    """A run whose plan makes a mistake."""
    plan = dataclasses.replace(run.plan, spoil=spoil)
    return dataclasses.replace(run, name=f"{run.name}: {spoil}", plan=plan, **how)
