"""The most memory that `verify` as a whole takes, over that of the training step it checks.

A plain transformer in bfloat16 with its loss, checked against itself under `torch.compile`, with
gradients. Everything counts: the model, its gradients, values between operators. Each size is
measured in a process of its own: on a CPU, the peak of the resident memory on top of what a check
of a tiny model has left there, compiled by aot_eager; on a GPU, the peak of torch's allocator,
compiled by Inductor. Sketches of large gradients are compared at all of these sizes. Nothing is
undecided here; a perturbed run takes less than the candidate in float64, whose backward pass
returns all its gradients at once.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
from benchmarks.lab.figures import Figure, Report, Table, write
from torch import Tensor, nn
from torch.nn import functional

import paritas

# A model has 48 squares of its width, and two tables of words.
WIDTHS = {"cpu": (768, 1024, 1536, 2048), "cuda": (1024, 2048, 3072, 4096)}
LAYERS, WORDS, TOKENS = 4, 8192, 64
MOST = 6.0
MIB = 1 << 20


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Run one layer."""
        heads = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.silu(self.up(self.second(x))))


class Transformer(nn.Module):
    """A stack of layers between two tables of words, and its loss."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def make(width: int, device: str, layers: int = LAYERS, words: int = WORDS) -> tuple[Any, Any]:
    """A model, and its inputs."""
    torch.manual_seed(0)
    with torch.device(device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Transformer(width, layers, words)
        finally:
            torch.set_default_dtype(default)
        return model, torch.randint(0, words, (2, 1, TOKENS)).unbind()


def step(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """One plain training step, without an optimizer."""
    model(*inputs).backward()
    model.zero_grad(set_to_none=True)


def check(model: nn.Module, inputs: tuple[Tensor, ...], device: str) -> str:
    """Verify a model as a whole; returns the status."""
    compiled = torch.compile(model, backend="inductor" if device == "cuda" else "aot_eager")
    config = paritas.VerifyConfig(raise_on_mismatch=False)
    verdict = paritas.verify(list(inputs), model, compiled, config, by="whole")
    assert verdict.passed, str(verdict)
    return verdict.status.value


def peak_of(width: int, what: str, device: str) -> tuple[float, float]:
    """The peak of a step or of a check, and what the model takes, in MiB, in its own process."""
    start = multiprocessing.get_context("spawn")
    results = start.SimpleQueue()
    child = start.Process(target=_measure, args=(width, what, device, results))
    child.start()
    child.join()
    if child.exitcode:
        raise RuntimeError(f"width {width}, {what}: the process ended with {child.exitcode}")
    peak: tuple[float, float] = results.get()
    return peak


def _measure(width: int, what: str, device: str, results: Any) -> None:
    torch.set_num_threads(1)
    tiny = make(64, device, 1, 64)
    step(*tiny)
    if what == "check":
        check(*tiny, device)
    del tiny
    before = _now(device)
    model, inputs = make(width, device)
    size = sum(parameter.nbytes for parameter in model.parameters())
    _reset(device)
    if what == "step":
        step(model, inputs)
    else:
        check(model, inputs, device)
    results.put(((_peak(device) - before) / MIB, size / MIB))


def _now(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else _status("VmRSS")


def _reset(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key))) * 1024


def main(widths: list[int]) -> None:
    """Measure every size."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[list[Any]] = []
    for width in widths or WIDTHS[device]:
        plain, size = peak_of(width, "step", device)
        checking, _ = peak_of(width, "check", device)
        rows.append([width, size, plain, checking, checking / plain])
        print(rows[-1], flush=True)
    figures = [
        Figure(
            f"memory of verify over that of a training step, {device}, most",
            max(row[-1] for row in rows), "x", MOST,
            note=f"models of {rows[0][1]:,.0f} to {rows[-1][1]:,.0f} MiB",
        ),
    ]  # fmt: skip
    columns = ["width", "model, MiB", "step, MiB", "check, MiB", "ratio"]
    table = Table(f"Each size, {device}", columns, rows)
    script = "verify_memory" if device == "cpu" else f"{device}_verify_memory"
    write(Report(script, figures, [table], what=__doc__))


if __name__ == "__main__":
    main([int(width) for width in sys.argv[1:]])
