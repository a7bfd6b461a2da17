"""Faults deep inside small programs, as `verify` sees them at the outputs: without an operator."""

# ruff: noqa: E501  (a fault is a line)

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from benchmarks.diagnosing.operators import cut_off
from benchmarks.diagnosing.parts import Sample
from torch import Tensor, nn

import paritas
from paritas.core.diagnosis.stating import COUNTED

Change = Callable[[Tensor], Tensor]


def unchanged(x: Tensor) -> Tensor:
    """No fault."""
    return x


class Program(nn.Module):
    """A program with named places where a fault may be."""

    sites: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.site, self.change = "", unchanged

    def at(self, site: str, x: Tensor) -> Tensor:
        """A value on its way, changed if the fault is here."""
        return self.change(x) if site == self.site else x


class Transformer(Program):
    """Two blocks of causal attention and a feed-forward part, then a norm and logits."""

    sites = ("query", "scores", "weights", "mixed", "norm", "hidden", "logits")

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of each token."""
        for block in range(2):
            first = block == 0
            y = F.layer_norm(x, (32,))
            y = self.at("norm", y) if first else y
            q, k, v = (part(y) for part in self.parts[:3])
            q = self.at("query", q) if first else q
            scores = q @ k.mT / 32**0.5
            scores = self.at("scores", scores) if first else scores
            seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            weights = self.at("weights", weights) if first else weights
            mixed = self.parts[3](weights @ v)
            x = x + (self.at("mixed", mixed) if first else mixed)
            hidden = F.gelu(self.up(F.layer_norm(x, (32,))))
            x = x + self.down(self.at("hidden", hidden) if first else hidden)
        return self.at("logits", self.head(F.layer_norm(x, (32,))))


class Convolutions(Program):
    """Convolutions with batch statistics and pooling, then class scores."""

    sites = ("first", "activated", "pooled", "scores")

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.at("first", self.one(x))
        x = self.at("activated", F.relu(F.group_norm(x, 4)))
        x = F.silu(self.two(x)).mean((2, 3))
        return self.at("scores", self.head(self.at("pooled", x)))


class Gated(Program):
    """RMS norms and gated layers without biases; nothing but sums and products at the end."""

    sites = ("norm", "gate", "product", "residual", "last norm")

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(40, 64, bias=False), nn.Linear(40, 64, bias=False)
        self.down = nn.Linear(64, 40, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        for block in range(2):
            first = block == 0
            y = F.rms_norm(x, (40,))
            y = self.at("norm", y) if first else y
            gate = F.silu(self.gate(y))
            both = (self.at("gate", gate) if first else gate) * self.up(y)
            both = self.at("product", both) if first else both
            x = self.at("residual", x) + self.down(both) if first else x + self.down(both)
        return self.at("last norm", F.rms_norm(x, (40,)))


class Straight(Program):
    """Linear maps only: the traces of a fault keep their form."""

    sites = ("first", "second", "end")

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(24, 24), nn.Linear(24, 30)

    def forward(self, x: Tensor) -> Tensor:
        """A linear function of the input."""
        return self.at("end", self.two(self.at("second", self.at("first", self.one(x)) * 1.5)))


class Loss(Program):
    """A classifier and its loss: one number."""

    sites = ("hidden", "logits", "loss")

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(20, 32), nn.Linear(32, 9)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        logits = self.at("logits", self.two(self.at("hidden", self.one(x).tanh())))
        return self.at("loss", F.cross_entropy(logits, torch.arange(len(x)) % 9))


PROGRAMS: tuple[tuple[type[Program], tuple[int, ...]], ...] = (
    (Transformer, (2, 10, 32)),
    (Convolutions, (4, 3, 10, 10)),
    (Gated, (24, 40)),
    (Straight, (20, 24)),
    (Loss, (36, 20)),
)


# --- The faults -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ProgramFault:
    """A change of one value inside, and what it may be called."""

    family: str
    kinds: tuple[str, ...]
    change: Change


def natively(change: Change) -> Change:
    """A change of the native run only, as by rounding."""
    return lambda x: x if x.dtype == torch.float64 else change(x)


def triangle(x: Tensor, diagonal: int) -> Tensor:
    """Attention weights, or any matrix, cut at another diagonal and summing up to the same."""
    cut = x.tril(diagonal)
    return cut * (x.sum(-1, keepdim=True) / (cut.sum(-1, keepdim=True) + 1e-6))


def each_channel(x: Tensor) -> Tensor:
    """A number for each channel."""
    return torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype) if x.dim() else x.new_ones(())


def along(x: Tensor, change: Change) -> Tensor:
    """A change that needs an axis; a single number is doubled instead."""
    return change(x) if x.dim() and x.shape[-1] > 1 else 2 * x


PROGRAM_FAULTS = (
    ProgramFault("twice", ("scale",), lambda x: 2 * x),
    ProgramFault("halved", ("scale",), lambda x: x / 2),
    ProgramFault("scaled by a percent", ("scale",), lambda x: 1.01 * x),
    ProgramFault("scaled by 1e-5", ("scale",), lambda x: (1 + 1e-5) * x),
    ProgramFault("scaled by any factor", ("scale",), lambda x: 1.0372918 * x),
    ProgramFault("divided by sqrt(d)", ("scale",), lambda x: x / max(x.shape[-1:], default=4) ** 0.5),
    ProgramFault("negated", ("sign", "scale"), lambda x: -x),
    ProgramFault("all zero", ("zeros",), lambda x: 0 * x),
    ProgramFault("a channel of zeros", ("zeros", "scale"), lambda x: along(x, lambda y: torch.cat([y[..., :-1], 0 * y[..., -1:]], -1))),
    ProgramFault("zeros like dropout", ("zeros", "scale"), lambda x: x * ((9e3 * x).sin() > -0.9)),
    ProgramFault("rolled", ("shift", "permutation", "scale"), lambda x: along(x, lambda y: y.roll(1, 0))),
    ProgramFault("channels rolled", ("shift", "permutation", "scale"), lambda x: along(x, lambda y: y.roll(1, -1))),
    ProgramFault("reversed", ("permutation", "shift", "scale"), lambda x: along(x, lambda y: y.flip(-1))),
    ProgramFault("a small offset", ("offset",), lambda x: x + 1e-4),
    ProgramFault("one more", ("offset",), lambda x: x + 1),
    ProgramFault("an offset for each channel", ("axis offset", "missing bias", "offset", "scale"), lambda x: x + 0.03 * each_channel(x)),
    ProgramFault("a factor for each channel", ("axis scale", "scale"), lambda x: x * each_channel(x)),
    ProgramFault("clipped", ("clipped",), lambda x: x.clamp(-0.7, 0.7)),
    ProgramFault("off by eps", ("eps", "scale"), lambda x: x / (1 + 1e-3 / (x.square().mean(-1, keepdim=True) + 0.1)) if x.dim() else 1.001 * x),
    ProgramFault("off by a smaller eps", ("eps", "scale"), lambda x: x / (1 + 1e-5 / (x.square().mean(-1, keepdim=True) + 0.1)) if x.dim() else 1.00001 * x),
    ProgramFault("by n - 1", ("off by one reduction", "scale"), lambda x: x * (max(x.shape[-1:], default=9) / (max(x.shape[-1:], default=9) - 1)) ** 0.5),
    ProgramFault("a mask off by one", ("mask", "scale"), lambda x: along(x, lambda y: triangle(y, -1) if y.dim() > 1 else y.roll(1))),
    ProgramFault("no causality", ("mask", "scale"), lambda x: along(x, lambda y: (y + y.mean(-1, keepdim=True)) / 2)),
    ProgramFault("another formula", (), lambda x: x + 1e-3 * (3 * x).sin()),
    ProgramFault("a small formula", (), lambda x: x + 1e-5 * (40 * x).sin()),
    ProgramFault("a polynomial", (), lambda x: x - 2e-4 * x**3),
    ProgramFault("tanh of it", (), lambda x: (0.1 * x).tanh() * 10),
    ProgramFault("noise of the values", (), lambda x: x * (1 + 2e-3 * (1e4 * x).sin())),
    ProgramFault("small noise of the values", (), lambda x: x * (1 + 3e-5 * (1e4 * x).sin())),
    ProgramFault("leaky", (), lambda x: F.leaky_relu(x, 0.9)),
    ProgramFault("smallest dropped", ("zeros",), lambda x: x * (x.abs() > 0.02)),
    ProgramFault("mean removed", (), lambda x: along(x, lambda y: y - 0.01 * y.mean(-1, keepdim=True))),
    ProgramFault("mixed with its neighbour", (), lambda x: along(x, lambda y: 0.999 * y + 0.001 * y.roll(1, -1))),
    ProgramFault("in bfloat16", ("precision",), natively(lambda x: x.bfloat16().float())),
    ProgramFault("in float16", ("precision",), natively(lambda x: x.half().float())),
    ProgramFault("in tf32", ("precision",), natively(cut_off)),
    ProgramFault("in float8", ("precision",), natively(lambda x: x.to(torch.float8_e4m3fn).float())),
    ProgramFault("rounded to a step", ("precision",), natively(lambda x: (x * 4096).round() / 4096)),
    ProgramFault("always in bfloat16", ("precision",), lambda x: x.bfloat16().to(x.dtype)),
    ProgramFault("not a number", ("nonfinite",), lambda x: x.masked_fill(x > x.mean(), torch.nan)),
)  # fmt: skip


def say(fault: ProgramFault, seed: int) -> Iterator[Sample]:
    """What is stated at the output of each program, with the fault in one of its places."""
    config = paritas.VerifyConfig(raise_on_mismatch=False, verify_gradients=False, locate_seconds=0)
    for number, (make, shape) in enumerate(PROGRAMS):
        torch.manual_seed(seed)
        reference = make().eval()
        candidate = copy.deepcopy(reference)
        chosen = (seed + number + len(fault.family)) % len(make.sites)
        for site in {make.sites[chosen], make.sites[-1]}:
            candidate.site, candidate.change = site, fault.change
            verdict = paritas.verify([torch.randn(shape)], reference, candidate, config)
            name = f"{fault.family} at {make.__name__}.{site}, seed {seed}"
            for finding in verdict.failures[:1]:
                best = finding.diagnosis.best if finding.diagnosis else None
                if best is None:
                    yield Sample(fault.family, name, fault.kinds)
                else:
                    grade = str(best.evidence[COUNTED])
                    said = best.kind, grade, best.confidence
                    yield Sample(fault.family, name, fault.kinds, *said)
