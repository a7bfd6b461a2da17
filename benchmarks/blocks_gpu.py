"""A model that fills a GPU, verified by blocks: time and peak memory, on one H200.

    PYTHONPATH=src python benchmarks/blocks_gpu.py [forward-8b] [training-8b] [training-1b] [small]

Without arguments it measures all cases except `small`, which is for a first look. It prints one
line of JSON per case, and at the end one for all of them. It needs torch alone, and stops before a
case that would begin after 8 minutes.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

import paritas
from paritas import VerifyConfig

GIB = 1 << 30
LAST_START = 480.0


@dataclass(frozen=True)
class Sizes:
    """The extents of a model, and what is measured on it."""

    width: int
    layers: int
    heads: int
    groups: int
    inner: int
    vocabulary: int
    tokens: int
    trains: bool
    most_gib: float
    most_seconds: float
    most_again: float | None = None


CASES = {
    "small": Sizes(512, 4, 8, 2, 1536, 4096, 512, True, 20, 120),
    "training-1b": Sizes(2048, 22, 32, 4, 5632, 32000, 512, True, 20, 300, 5),
    "forward-8b": Sizes(4096, 32, 32, 8, 14336, 128256, 2048, False, 40, 180),
    "training-8b": Sizes(4096, 32, 32, 8, 14336, 128256, 2048, True, 110, 600),
}


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return self.weight * scaled.to(x.dtype)


class Layer(nn.Module):
    """Attention with grouped keys, and a gated MLP."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, head = sizes.width, sizes.width // sizes.heads
        self.heads, self.groups = sizes.heads, sizes.groups
        self.first, self.second = Norm(width), Norm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, head * sizes.groups, bias=False)
        self.v = nn.Linear(width, head * sizes.groups, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, sizes.inner, bias=False)
        self.up = nn.Linear(width, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, width, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Run one layer."""
        y = self.first(x)
        q = rotated(self._split(self.q(y), self.heads), *rope)
        k = rotated(self._split(self.k(y), self.groups), *rope)
        v = self._split(self.v(y), self.groups)
        k, v = (one.repeat_interleave(self.heads // self.groups, dim=1) for one in (k, v))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    @staticmethod
    def _split(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


class Llama(nn.Module):
    """A model of the shape of Llama."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_width = sizes.width // sizes.heads
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = Norm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits."""
        x = self.embed(tokens)
        places = torch.arange(tokens.shape[1], device=x.device, dtype=torch.float32)
        steps = torch.arange(0, self.head_width, 2, device=x.device) / self.head_width
        angles = places[:, None] / 500000.0**steps
        rope = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, rope)
        return self.head(self.norm(x))


def make(sizes: Sizes, device: str) -> tuple[Llama, Tensor]:
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = Llama(sizes)
        torch.set_default_dtype(torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        tokens = torch.randint(0, sizes.vocabulary, (1, sizes.tokens))
    return model, tokens


class Meter:
    """Seconds and peak memory of a piece of work."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> Self:
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.peak = 0.0
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated() / GIB
        self.seconds = time.perf_counter() - self._began


def step(model: nn.Module, tokens: Tensor, sizes: Sizes) -> None:
    """One plain forward run or training step."""
    if not sizes.trains:
        with torch.no_grad():
            model(tokens)
        return
    model(tokens).float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def measure(name: str, sizes: Sizes, device: str) -> dict[str, Any]:
    model, tokens = make(sizes, device)
    parameters = sum(one.numel() for one in model.parameters())
    biggest = max(
        sum(p.numel() for p in one.parameters()) for one in (*model.layers, model.embed, model.head)
    )
    step(model, tokens, sizes)
    with Meter(device) as plain:
        step(model, tokens, sizes)
    compiled = torch.compile(model)
    config = VerifyConfig(raise_on_mismatch=False, verify_gradients=None if sizes.trains else False)
    told: list[str] = []
    found: dict[str, Any] = {
        "case": name,
        "parameters": parameters,
        "plain_seconds": round(plain.seconds, 3),
        "plain_gib": round(plain.peak, 2),
    }
    with torch.set_grad_enabled(sizes.trains):
        with Meter(device) as compiling:
            step(compiled, tokens, sizes)
        found["compiling_seconds"] = round(compiling.seconds, 1)
        for occasion in ("first", "again"):
            with Meter(device) as meter:
                verdict = paritas.verify(
                    [tokens], model, compiled, config, by="blocks", on_progress=told.append
                )
            found[f"{occasion}_seconds"] = round(meter.seconds, 1)
            found[f"{occasion}_gib"] = round(meter.peak, 2)
            found[f"{occasion}_status"] = verdict.status.value
            if name == "training-8b":
                break
    allowed = plain.peak + 6 * biggest * 8 / GIB + 2
    found |= {
        "items": verdict.coverage.compared,
        "notes": list(verdict.notes)[:4],
        "failures": [f"{one.path}: {one.reason}"[:160] for one in verdict.failures[:5]],
        "allowed_gib_by_rule": round(allowed, 2),
        "meets": {
            "status": verdict.passed,
            "memory": found["first_gib"] <= sizes.most_gib,
            "memory_rule": found["first_gib"] <= allowed,
            "seconds": found["first_seconds"] <= sizes.most_seconds,
            "again": sizes.most_again is None or found["again_seconds"] <= sizes.most_again,
        },
    }
    return found


def main(names: list[str]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()
    results = []
    for name in names or ["training-1b", "forward-8b", "training-8b"]:
        if time.perf_counter() - began > LAST_START:
            results.append({"case": name, "skipped": "too little time was left"})
            continue
        try:
            results.append(measure(name, CASES[name], device))
        except Exception as error:  # noqa: BLE001  (the other cases are measured too)
            results.append({"case": name, "error": f"{type(error).__name__}: {error}"[:400]})
        print(json.dumps(results[-1]), flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
    print(json.dumps({"torch": torch.__version__, "device": device, "cases": results}))


if __name__ == "__main__":
    main(sys.argv[1:])
