"""Mistakes in plans as torchtitan writes them, one at a time in a run that is right without it.

`place` has the names where the mistake may be said to start: a module, `loss`, or `gradient
reduction`; `kind` what a diagnosis should claim, where the numbers show one. Both empty: any
failure will do (the plan raises, or what is wrong has no place, as another learning rate).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
)

from quality.parallel_plans import SEQUENCE, TENSOR, context
from quality.titan_further import EXPERTS, IN_FLOAT8, LOADED, RING, mistaken
from quality.titan_plans import (
    CP,
    DP,
    DP_TP,
    HYBRID,
    LOSS_PARALLEL,
    PP,
    TP,
    VOCABULARY,
    Interleaved,
    Pipe,
    Run,
    Sizes,
    Step,
    Titan,
    adamw,
)

REDUCTION = "gradient reduction"
MISSING, SCALE, SHARD_OF_ANOTHER = "missing reduction", "scale", "wrong rank's shard"


@dataclasses.dataclass(frozen=True)
class Mistake:
    run: Run
    place: tuple[str, ...] = ()
    kind: str = ""

    def __str__(self) -> str:
        return self.run.name


def styles(base: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """Other styles in layer 1; None leaves a module out."""
    found = {name: style for name, style in base.items() if not name.startswith("layers.*")}
    for name, style in base.items():
        if not name.startswith("layers.*"):
            continue
        short = name.removeprefix("layers.*.").replace(".", "_")
        found[name.replace("*", "0")] = style
        other = changed.pop(short, style)
        if other is not None:
            found[name.replace("*", "1")] = other
    for name, style in changed.items():
        if style is None:
            found.pop(name)
        else:
            found[name] = style
    return found


# --- what is done to a model under its plan -------------------------------------------------------


def module(path: str, model: nn.Module) -> Any:
    return model.get_submodule(path)


def output(path: str, change: Any) -> Any:
    """Change the output of a module on the ranks."""

    def spoil(model: nn.Module, _mesh: Any) -> None:
        module(path, model).register_forward_hook(lambda _module, _args, value: change(value))

    return spoil


def back(path: str, change: Any) -> Any:
    """Change the gradient that leaves the output of a module on the ranks."""

    def hook(_module: nn.Module, _args: Any, value: Any) -> Any:
        value = value.view_as(value)
        value.register_hook(change)
        return value

    def spoil(model: nn.Module, _mesh: Any) -> None:
        module(path, model).register_forward_hook(hook)

    return spoil


def gradient_of(name: str, change: Any) -> Any:
    def spoil(model: nn.Module, _mesh: Any) -> None:
        model.get_parameter(name).register_hook(change)

    return spoil


def parameter(name: str, change: Any) -> Any:
    """Change the weights that the ranks start with."""

    def spoil(model: nn.Module, _mesh: Any) -> None:
        with torch.no_grad():
            one = model.get_parameter(name)
            local = one.to_local() if isinstance(one, DTensor) else one
            local.copy_(change(local))

    return spoil


def frozen(name: str) -> Any:
    def spoil(model: nn.Module, _mesh: Any) -> None:
        model.get_parameter(name).requires_grad_(requires_grad=False)

    return spoil


def buffer(model: nn.Module, _mesh: Any) -> None:
    """A buffer that was never restored."""
    for layer in model.layers:
        layer.attention.rotation.cos.zero_()


def unsynchronised(model: nn.Module, _mesh: Any) -> None:
    model.set_requires_gradient_sync(requires_gradient_sync=False)


def factor(value: float) -> Any:
    def spoil(model: nn.Module, _mesh: Any) -> None:
        for one in (*model.layers, model):
            one.set_gradient_divide_factor(value)

    return spoil


def ignores_the_norm(model: nn.Module, mesh: Any) -> None:
    """FSDP is told to leave the parameters of the last norm alone."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=set(model.norm.parameters()))


def own_samples(model: nn.Module, _mesh: Any) -> None:
    """Every rank trains on the samples in another order."""
    model.register_forward_pre_hook(lambda _module, args: (args[0].flip(0),))


def swap_heads(value: Any) -> Any:
    return torch.cat(list(reversed(value.chunk(2, -1))), -1)


def detached(model: nn.Module, _mesh: Any) -> None:
    """A recomputed layer that loses its gradient."""
    forward = model.layers[1].mlp.forward
    model.layers[1].mlp.forward = lambda x: forward(x).detach()


def also(*spoils: Any) -> Any:
    def spoil(model: nn.Module, mesh: Any) -> None:
        for one in spoils:
            one(model, mesh)

    return spoil


def by_hand(model: nn.Module, mesh: Any, *, spoil: Any) -> None:
    context(model, mesh)
    spoil(model, mesh)


def unshifted(model: nn.Module, _mesh: Any) -> None:
    for layer in model.layers:
        layer.attention.rotation.first = 0


def unmasked(model: nn.Module, _mesh: Any) -> None:
    model.layers[1].attention.core.first = 0


# --- optimizers -----------------------------------------------------------------------------------


def on_ranks(right: Any, wrong: Any) -> Any:
    """Another optimizer on ranks than on one device."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return (wrong if distributed.is_initialized() else right)(parameters)

    return make


PLAIN = functools.partial(torch.optim.SGD, lr=0.1)


class Forgetful(torch.optim.AdamW):
    """Its checkpoint has no moments."""

    def state_dict(self) -> dict[str, Any]:
        made = super().state_dict()
        zeros = {
            number: {name: torch.zeros_like(one) for name, one in held.items()}
            for number, held in made["state"].items()
        }
        return {**made, "state": zeros}


# --- pipelines ------------------------------------------------------------------------------------


def stage(rank: int, spoil: Any) -> Any:
    def apply(piece: Any, here: int) -> None:
        if here == rank:
            spoil(piece)

    return apply


def add_hook(path: str, change: Any) -> Any:
    def spoil(piece: Any) -> None:
        module(path, piece).register_forward_hook(lambda _module, _args, value: change(value))

    return spoil


# --- the corpus -----------------------------------------------------------------------------------

_tp = functools.partial(Run, mesh=TP)
_fsdp = functools.partial(Run, mesh=DP, split=("dp",))
_sharded = Titan(shard=("dp",))
_two_axes = functools.partial(Run, mesh=DP_TP, split=("dp",))


def _tensor(name: str, spoil: Any = None, base: Any = TENSOR, **changed: Any) -> Run:
    return _tp(name, Titan(styles(base, **changed), spoil=spoil))


def _data(name: str, spoil: Any = None, step: Step | None = None, **how: Any) -> Run:
    return _fsdp(name, dataclasses.replace(_sharded, spoil=spoil), step=step, **how)


DOWN, OUT, NORM = "layers.1.mlp.down", "layers.1.attention.out", "layers.1.attention_norm"

MISTAKES = [
    # tensor parallel
    Mistake(
        _tensor("the mlp is never reduced", mlp_down=RowwiseParallel(output_layouts=Partial())),
        (DOWN,),
        MISSING,
    ),
    Mistake(
        _tensor(
            "attention is never reduced", attention_out=RowwiseParallel(output_layouts=Partial())
        ),
        (OUT,),
        MISSING,
    ),
    Mistake(_tensor("reduced twice", output(DOWN, lambda x: 2 * x)), (DOWN,), SCALE),
    Mistake(_tensor("averaged, not summed", output(OUT, lambda x: x / 2)), (OUT,), SCALE),
    Mistake(
        _tensor("heads of the other rank", output("layers.1.attention.q", swap_heads)),
        ("layers.1.attention.q",),
    ),
    Mistake(
        _tensor("half of a gradient", back(DOWN, lambda g: g / 2)),
        (DOWN, "layers.1.mlp", "layers.1", "loss"),
    ),
    Mistake(
        _tensor("weights of a rank scaled", parameter("layers.0.mlp.up.weight", lambda w: 1.1 * w)),
        ("layers.0.mlp.up",),
    ),
    Mistake(_tensor("a frozen weight", frozen("layers.1.mlp_norm.weight"))),
    Mistake(
        _tensor("keys split, values not", attention_v=None),
    ),
    Mistake(
        _tensor("the norm's gradient doubled", gradient_of("norm.weight", lambda g: 2 * g)),
        ("norm",),
        SCALE,
    ),
    # sequence parallel
    Mistake(
        _tensor("a norm outside of sequence parallel", base=SEQUENCE, attention_norm=None),
        (NORM,),
        MISSING,
    ),
    Mistake(
        _tensor(
            "attention over the rank's tokens",
            output(NORM, lambda x: x.to_local()),
            base=SEQUENCE,
            attention=None,
        ),
    ),
    Mistake(
        _tensor(
            "tokens of the other rank",
            output("layers.0.mlp", lambda x: x.roll(1, 0)),
            base=SEQUENCE,
        ),
        ("layers.0.mlp",),
    ),
    Mistake(
        _tensor("the last norm outside of sequence parallel", base=SEQUENCE, norm=None),
    ),
    # loss parallel
    Mistake(
        _tp(
            "a loss over the rank's part of the vocabulary",
            Titan(
                {
                    **SEQUENCE,
                    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
                }
            ),
            step=Step(),
        ),
    ),
    Mistake(
        _tp(
            "logits scaled before a parallel loss",
            Titan(LOSS_PARALLEL, spoil=output("head", lambda x: 1.01 * x)),
            step=VOCABULARY,
        ),
        ("head",),
        SCALE,
    ),
    # FSDP2
    Mistake(_data("gradients summed", factor(1.0)), (REDUCTION,), SCALE),
    Mistake(_data("gradients divided by four", factor(4.0)), (REDUCTION,), SCALE),
    Mistake(_data("gradients never reduced", unsynchronised)),
    Mistake(
        _fsdp("a norm that FSDP ignores", ignores_the_norm),
        (REDUCTION, "norm"),
        MISSING,
    ),
    Mistake(_data("samples in another order", own_samples), kind="permutation"),
    Mistake(
        _data("weights that differ", parameter("layers.1.mlp.up.weight", lambda w: w + 0.01)),
        ("layers.1.mlp.up",),
    ),
    Mistake(
        Run(
            "hybrid sharding without its replicas",
            Titan(shard=("shard",)),
            HYBRID,
            tuple(HYBRID),
        ),
        (REDUCTION,),
        MISSING,
    ),
    Mistake(
        Run(
            "hybrid sharding over tp without its replicas",
            Titan(TENSOR, ("shard",)),
            {**HYBRID, "tp": 2},
            tuple(HYBRID),
        ),
        (REDUCTION,),
        MISSING,
    ),
    Mistake(
        _two_axes(
            "two axes, the mlp doubled", Titan(TENSOR, ("dp",), spoil=output(DOWN, lambda x: 2 * x))
        ),
        (DOWN,),
        SCALE,
    ),
    Mistake(
        _two_axes(
            "two axes, never reduced",
            Titan(styles(TENSOR, mlp_down=RowwiseParallel(output_layouts=Partial())), ("dp",)),
        ),
        (DOWN,),
        MISSING,
    ),
    # checkpointing, meta device, compilation
    Mistake(
        _tp(
            "a recomputed layer without gradient", Titan(TENSOR, checkpointing=True, spoil=detached)
        ),
        ("layers.1.mlp", "layers.1", "layers.1.mlp.down"),
    ),
    Mistake(
        _fsdp("a buffer lost on the meta device", Titan(shard=("dp",), meta=True, spoil=buffer)),
        ("layers.0.attention.rotation",),
    ),
    Mistake(
        _fsdp(
            "a weight initialised once more",
            Titan(
                shard=("dp",),
                meta=True,
                spoil=parameter("layers.0.mlp.gate.weight", torch.randn_like),
            ),
        ),
        ("layers.0.mlp.gate",),
    ),
    Mistake(
        _tp(
            "a compiled layer, doubled",
            Titan(TENSOR, compiled=True, spoil=output("layers.1", lambda x: 2 * x)),
        ),
        ("layers.1",),
        SCALE,
    ),
    # accumulation
    Mistake(
        _data("micro-batches summed", step=Step(parts=2, spoil="sums the parts")),
        ("loss",),
        SCALE,
    ),
    Mistake(_data("the last micro-batch skipped", step=Step(parts=2, spoil="skips the last"))),
    Mistake(
        _tp(
            "earlier micro-batches forgotten",
            Titan(TENSOR),
            step=Step(parts=2, spoil="forgets the earlier"),
        )
    ),
    Mistake(_data("never reduced at the end", step=Step(parts=2, spoil="never reduces"))),
    # clipping
    Mistake(
        _data("norm of the own shards", step=Step(limit=0.1, spoil="norm of the own shards")),
        (REDUCTION,),
    ),
    Mistake(
        _data("norm summed over ranks", step=Step(limit=0.1, spoil="norm summed over ranks")),
        (REDUCTION,),
        SCALE,
    ),
    Mistake(
        _data("each parameter clipped", step=Step(limit=0.02, spoil="clips each parameter")),
        (REDUCTION,),
    ),
    # optimizers
    Mistake(
        _data(
            "another learning rate",
            optimizer=on_ranks(PLAIN, functools.partial(torch.optim.SGD, lr=0.2)),
        )
    ),
    Mistake(
        _data(
            "no weight decay",
            optimizer=on_ranks(
                adamw, functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0)
            ),
        )
    ),
    # context parallel
    Mistake(
        Run("positions not shifted", functools.partial(by_hand, spoil=unshifted), CP),
        ("layers.0.attention.rotation", "layers.0.attention.core"),
    ),
    Mistake(
        Run("a mask of the first tokens", functools.partial(by_hand, spoil=unmasked), CP),
        ("layers.1.attention.core",),
    ),
    # pipelines
    Mistake(
        Run("micro-batches of a pipeline summed", Pipe(scale=False), PP),
        (REDUCTION,),
        SCALE,
    ),
    Mistake(
        Run("stages in another order", Pipe(order=(1, 0)), PP),
        ("layers.0.attention_norm", "layers.0"),
    ),
    Mistake(
        Run(
            "a wrong layer of a stage",
            Pipe(spoil=stage(1, add_hook("layers.0.mlp.down", lambda x: 1.01 * x))),
            PP,
        ),
        ("layers.1.mlp.down",),
    ),
    Mistake(
        Run(
            "a stage that loses its gradient",
            Pipe(spoil=stage(0, add_hook("layers.0.attention", lambda x: x.detach()))),
            PP,
        ),
        ("layers.0", "layers.0.attention", "layers.0.attention.out"),
    ),
    Mistake(
        Run(
            "a micro-batch of a pipeline in another order",
            Pipe(spoil=stage(1, add_hook("head", lambda x: x.flip(0)))),
            PP,
        ),
        ("head",),
    ),
    Mistake(
        Run(
            "a wrong layer of an interleaved stage",
            Interleaved(stage(2, add_hook("layers.0.mlp.down", lambda x: 1.01 * x))),
            PP,
            sizes=Sizes(layers=4),
        ),
        ("layers.2.mlp.down",),
    ),
    # experts
    *(
        Mistake(mistaken(EXPERTS, spoil), ("layers.0.mlp",))
        for spoil in (
            "experts of the other rank",
            "weights not normalised",
            "rows beyond a capacity dropped",
            "rows sent back by expert",
        )
    ),
    Mistake(
        mistaken(EXPERTS, "gradients of experts not divided"),
        ("layers.1.mlp", "layers.0.mlp", REDUCTION),
        SCALE,
    ),
    Mistake(
        mistaken(EXPERTS, "the router is never reduced"),
        ("layers.1.mlp.router", "layers.0.mlp.router", REDUCTION),
        MISSING,
    ),
    # a ring
    *(
        Mistake(mistaken(RING, spoil), ("layers.0.attention.core",))
        for spoil in ("a part too few", "the mask of the own part", "parts averaged")
    ),
    Mistake(
        mistaken(RING, "gradients sent onwards", mesh={"cp": 4}),
        ("layers.1.attention.core", "layers.1.attention.rotation", "layers.1.attention.v"),
    ),
    # checkpoints
    Mistake(mistaken(LOADED, "a weight saved before the last step"), ("layers.1.mlp.up",)),
    Mistake(mistaken(LOADED, "a weight left out"), ("layers.0.mlp.down",)),
    Mistake(
        mistaken(LOADED, "a shard of another rank"), ("layers.1.attention.q",), SHARD_OF_ANOTHER
    ),
    Mistake(_data("moments that are not saved", optimizer=Forgetful, resume={"dp": 4})),
    # float8
    Mistake(mistaken(IN_FLOAT8, "each rank has its own scale"), ("layers.0.mlp.up",)),
]


def is_named(mistake: Mistake, verdict: Any) -> bool:
    """Whether the first place of a verdict and one of its diagnoses are those of a mistake."""
    place = next((f.origin.name for f in verdict.failures if f.origin is not None), None)
    kinds = {
        f.diagnosis.best.kind
        for f in verdict.failures
        if f.diagnosis is not None and f.diagnosis.best is not None
    }
    right_place = not mistake.place or place in mistake.place
    return right_place and (not mistake.kind or mistake.kind in kinds)
