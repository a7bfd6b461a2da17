"""`paritas kernel`: formats of few bits, results in a kernel's own memory, and the time limit."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from paritas.app.cli import main
from paritas.core import time_limit
from paritas.kernels.called import CalledCandidate

if TYPE_CHECKING:
    from pathlib import Path

FLOAT8 = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, n, k):
        super().__init__()
        w = torch.randn(n, k)
        s = w.abs().amax(1, keepdim=True) / 448
        self.register_buffer("weight", (w / s).to(torch.float8_e4m3fn))
        self.register_buffer("scale", s.squeeze(1))
    def forward(self, x):
        return (x.float() @ self.weight.float().T) * self.scale

def get_inputs():
    return [(torch.rand(5, 16) * 8 - 4).to(torch.float8_e4m3fn)]

def get_init_inputs():
    return [6, 16]
"""
PACKED = """
import torch

def product(x, q, s):
    w = torch.stack([q & 15, q >> 4], -1).flatten(-2).to(x.dtype) - 8
    return x @ (w * s[:, None]).T

def get_inputs():
    return [torch.randn(3, 400), torch.randint(0, 256, (6, 200), dtype=torch.uint8), torch.rand(6)]
"""
FLOAT4 = """
import torch

VALUES = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])

def product(x, w, s):
    codes = w.view(torch.uint8).long()
    wide = torch.stack([VALUES[codes & 15], VALUES[codes >> 4]], -1).flatten(-2)
    return x @ (wide * s.float()[:, None]).T

def get_inputs():
    w = torch.randint(0, 256, (6, 8), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    s = torch.randint(120, 132, (6,), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return [torch.randn(4, 16), w, s]
"""
UNSIGNED = """
import torch

def picked(x, q):
    return x[q.long()] * 2

def get_inputs():
    return [torch.randn(9, 5), torch.tensor([0, 3, 8, 2, 2, 7]).to(torch.uint16)]
"""
RELU = """
import torch

def relu(x):
    return torch.relu(x)

def get_inputs():
    return [torch.randn(4, 9)]
"""
OWN_BUFFER = """
import torch

BUFFERS = {}

def relu(x):
    key = x.shape, x.dtype
    if key not in BUFFERS:
        BUFFERS[key] = torch.empty(x.shape, dtype=x.dtype)
    return BUFFERS[key].copy_(torch.relu(x))
"""
OWN_STATE = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("result", torch.empty(0))
    def forward(self, x):
        self.result = self.result if self.result.numel() > 100 else torch.empty(1 << 16)
        return self.result[: x.numel()].view(x.shape).copy_(torch.relu(x))
"""
REMEMBERS = """
import torch

KNOWN = {}

def relu(x):
    key = x.dtype, x.shape, tuple(x.double().flatten().tolist())
    if key not in KNOWN:
        KNOWN[key] = torch.relu(x)
    return KNOWN[key]
"""
WRONG = "import torch\n\ndef relu(x):\n    return torch.relu(x) * 1.01\n"
LIMIT = "a result that is kept until the next call"


def judged(
    folder: Path, task: str, candidate: str, *options: str
) -> tuple[int, str, dict[str, object]]:
    (folder / "task.py").write_text(task)
    (folder / "candidate.py").write_text(candidate)
    files = [str(folder / "task.py"), str(folder / "candidate.py")]
    asked = ["--cases", "12", "--call-seconds", "600", "--seconds", "600", *options]
    done = CliRunner().invoke(main, ["kernel", *files, "--json", str(folder / "j"), *asked])
    found = json.loads((folder / "j").read_bytes()) if (folder / "j").exists() else {}
    return done.exit_code, " ".join(done.output.split()), found


# --- Formats of few bits --------------------------------------------------------------------------


def test_weights_in_float8_are_judged(tmp_path: Path) -> None:
    right = FLOAT8.replace("Model(", "ModelNew(").replace(".float()", ".bfloat16().float()")
    code, shown, found = judged(tmp_path, FLOAT8, right)
    assert code == 0, shown
    assert "weights" in {row["family"] for row in found["rows"]}
    code, shown, _ = judged(tmp_path, FLOAT8, right.replace("* self.scale", "* self.scale.mean()"))
    assert code == 1, shown


@pytest.mark.parametrize("task", [PACKED, FLOAT4, UNSIGNED], ids=["int4", "float4", "uint16"])
def test_numbers_that_torch_hardly_computes_with_are_judged(tmp_path: Path, task: str) -> None:
    code, shown, found = judged(tmp_path, task, task)
    assert code == 0, shown
    assert {"sizes", "values", "layouts"} <= {row["family"] for row in found["rows"]}


# --- Results in memory of the kernel's own --------------------------------------------------------


def test_a_kernel_that_returns_its_own_buffer_again_has_a_limit(tmp_path: Path) -> None:
    code, shown, found = judged(tmp_path, RELU, OWN_BUFFER)
    assert code == 0, shown
    assert f"limits of the kernel, not failures: {LIMIT}" in shown
    assert [row["case"] for row in found["rows"] if row["is_limit"]] == [LIMIT]
    assert "the kernel returns memory of its own" in found["notes"][0]
    code, shown, _ = judged(tmp_path, RELU, OWN_BUFFER, "--fresh-outputs")
    assert code == 1, shown
    assert "the result of an earlier call is overwritten by this one" in shown


def test_a_registered_buffer_that_is_returned_is_a_limit_too(tmp_path: Path) -> None:
    task = RELU.replace("def relu(x):", "class Model(torch.nn.Module):\n  def forward(self, x):")
    code, shown, found = judged(tmp_path, task, OWN_STATE, "--fixed-dtypes")
    assert code == 0, shown
    assert LIMIT in [row["case"] for row in found["rows"] if row["is_limit"]]
    code, shown, _ = judged(tmp_path, task, OWN_STATE, "--fixed-dtypes", "--fresh-outputs")
    assert code == 1, shown


def test_a_kernel_that_remembers_results_is_wrong_after_their_caller_writes_to_them(
    tmp_path: Path,
) -> None:
    code, shown, _ = judged(tmp_path, RELU, REMEMBERS)
    assert code == 1, shown


# --- The time limit -------------------------------------------------------------------------------


@pytest.fixture
def slow_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of the candidate takes ten seconds, by the clock of the time limit."""
    now = itertools.count(step=10)
    reached = [0.0]
    call = CalledCandidate.call

    def called(self: CalledCandidate, *args: object, **further: object) -> dict[str, object]:
        reached[0] = next(now)
        return call(self, *args, **further)

    clock = SimpleNamespace(monotonic=lambda: reached[0])
    monkeypatch.setattr(time_limit, "time", clock)
    monkeypatch.setattr(CalledCandidate, "call", called)


@pytest.mark.usefixtures("slow_calls")
def test_if_time_is_short_the_given_inputs_come_first_and_the_rest_is_named(tmp_path: Path) -> None:
    code, shown, found = judged(tmp_path, RELU, RELU, "--cases", "40", "--seconds", "60")
    assert code == 3, shown
    rows = [row for row in found["rows"] if row["status"] != "unverified"]
    assert "as given" in {row["case"] for row in rows}
    assert "the time limit was reached after" in found["notes"][-1]
    assert "not called: the time limit was reached before any case of its family" in shown
    assert "cases not judged" in shown


@pytest.mark.usefixtures("slow_calls")
def test_a_fault_that_was_found_in_time_is_kept(tmp_path: Path) -> None:
    code, shown, found = judged(tmp_path, RELU, WRONG, "--cases", "40", "--seconds", "60")
    assert code == 1, shown
    assert any(row["status"] == "different" for row in found["rows"])


def test_a_candidate_that_is_not_loaded_in_time_is_unverified(tmp_path: Path) -> None:
    hangs = "import time\ntime.sleep(600)\n" + WRONG
    code, shown, _ = judged(tmp_path, RELU, hangs, "--seconds", "2", "--cases", "1")
    assert code == 3, shown
    assert "the time limit was reached before the candidate was loaded" in shown


@pytest.mark.slow
def test_a_task_whose_inputs_are_not_made_in_time_is_unverified(tmp_path: Path) -> None:
    hangs = RELU.replace("    return [", "    import time; time.sleep(600)\n    return [")
    (tmp_path / "task.py").write_text(hangs)
    (tmp_path / "candidate.py").write_text(RELU)
    command = [sys.executable, "-m", "paritas", "kernel", "task.py", "candidate.py"]
    done = subprocess.run(
        [*command, "--seconds", "1", "--json", "j"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "the time limit was reached while making the inputs" in " ".join(done.stdout.split())
    assert json.loads((tmp_path / "j").read_bytes())["rows"][0]["status"] == "unverified"
