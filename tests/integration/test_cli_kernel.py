"""`paritas kernel`: verdicts, limits, scripts and exit codes, with candidates in processes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from paritas.app.cli import main
from paritas.kernels import judging
from paritas.kernels.calling import STREAM

if TYPE_CHECKING:
    from pathlib import Path

TASK = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n))
    def forward(self, x):
        return torch.relu(x * self.weight).sum(-1)

def get_inputs():
    return [torch.randn(4, 10)]

def get_init_inputs():
    return [10]
"""
RIGHT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n))
    def forward(self, x):
        y = x * self.weight
        return torch.where(y < 0, torch.zeros_like(y), y).sum(-1)
"""
# It reads ten columns, whatever the weight, and knows how many rows there are.
FIXED = RIGHT.replace(".sum(-1)", ".sum(-1)[:4]")
CRASHES = RIGHT.replace("        y = x", "        import os; os._exit(7)\n        y = x")
# The derivative of relu at zero is 0; the other one agrees everywhere else.
DIFFERENTIABLE = RIGHT.replace("y < 0", "y <= 0")
WRONG_BACKWARD = DIFFERENTIABLE.replace(
    "y = x * self.weight", "y = x * (2 * self.weight - self.weight.detach())"
)
COMPILED = RIGHT.replace(
    "    def forward", "    @torch.compile(backend='eager', dynamic=True)\n    def forward"
).replace(".sum(-1)", ".flip(-1).sum(-1)")
FORBIDDEN = RIGHT.replace("torch.where(y < 0, torch.zeros_like(y), y)", "torch.relu(y)")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    named = {
        "task": TASK,
        "right": RIGHT,
        "fixed": FIXED,
        "crashes": CRASHES,
        "relu": FORBIDDEN,
        "compiled": COMPILED,
        "differentiable": DIFFERENTIABLE,
        "backward": WRONG_BACKWARD,
    }
    for name, text in named.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def run(files: Path, candidate: str, *options: str) -> tuple[int, str, dict[str, object]]:
    out = files / "out.json"
    args = ["kernel", str(files / "task.py"), str(files / f"{candidate}.py"), "--cases", "16"]
    done = CliRunner().invoke(
        main, [*args, "--json", str(out), "--call-seconds", "600", "--seconds", "600", *options]
    )
    return done.exit_code, done.output, json.loads(out.read_bytes()) if out.exists() else {}


def test_a_right_kernel_passes_and_has_a_row_for_each_case(files: Path) -> None:
    code, shown, found = run(files, "right")
    assert code == 0, shown
    assert len(found["rows"]) == 22  # 16 cases, 2 with filled memory, 4 other callers
    assert "equivalent" in shown or "identical" in shown


@pytest.mark.usefixtures("untried")
def test_a_kernel_for_one_shape_fails_with_a_script_or_has_limits(files: Path) -> None:
    script = files / "show.py"
    code, shown, found = run(files, "fixed", "--script", str(script), "--cases", "8")
    assert code == 1, shown
    assert found["script"] == str(script)
    assert "does not compute what" in script.read_text()
    code, shown, found = run(files, "fixed", "--fixed-shapes", "--cases", "8")
    assert code == 0, shown
    assert any(row["is_limit"] for row in found["rows"])
    assert "limits of the kernel, not failures" in shown


def test_a_kernel_that_ends_its_process_is_a_row(files: Path) -> None:
    code, shown, found = run(files, "crashes")
    assert code == 1, shown
    assert "its process ended with exit code 7" in " ".join(shown.split())
    assert {row["ended"] for row in found["rows"]} == {"crashed", "not called"}


def test_a_forbidden_operator_is_seen(files: Path) -> None:
    code, shown, _ = run(files, "relu", "--forbid", "torch.relu", "--cases", "2")
    assert code == 1, shown
    words = " ".join(shown.split())
    assert "the candidate calls aten.relu.default, which --forbid torch.relu rules out" in words


def test_a_missing_file_is_wrong_usage(files: Path) -> None:
    code, shown, _ = run(files, "nothing")
    assert code == 2
    assert "there is no file" in shown


def test_gradients_are_compared_in_every_family_of_cases(files: Path) -> None:
    code, shown, found = run(files, "differentiable", "--gradients")
    assert code == 0, shown
    assert {"nonfinite", "layouts", "sizes", "weights"} <= {row["family"] for row in found["rows"]}
    code, shown, found = run(files, "backward", "--gradients", "--cases", "4")
    assert code == 1, shown
    assert "gradient of weight: different" in shown
    assert run(files, "backward", "--cases", "4")[0] == 0


STATEFUL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.hidden = torch.randn(3, 6)
    def forward(self, x):
        self.hidden = torch.tanh(self.linear(x) + self.hidden)
        return self.hidden * 0.1

def get_inputs():
    return [torch.randn(3, 6)]
"""
# It keeps its weight transposed, and a buffer that a flag outside of the state says is filled.
OTHERWISE = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        made = nn.Linear(6, 6)
        self.transposed = nn.Parameter(made.weight.detach().t().contiguous())
        self.bias = nn.Parameter(made.bias.detach())
        self.hidden = torch.randn(3, 6)
        self.register_buffer("tenth", torch.zeros(()))
        self.is_filled = False
    def forward(self, x):
        if not self.is_filled:
            self.tenth.fill_(0.1)
            self.is_filled = True
        self.hidden = torch.tanh(torch.addmm(self.bias, x, self.transposed) + self.hidden)
        return self.hidden * self.tenth
"""
FOLDED = OTHERWISE.replace(
    "self.is_filled = False\n",
    "self.is_filled = False\n        self.kept = made.weight.detach().t()\n",
).replace("x, self.transposed", "x, self.kept")
# The transpose is a view of the weight, until the module is moved.
VIEW = OTHERWISE.replace(
    "        self.transposed = nn.Parameter(made.weight.detach().t().contiguous())\n",
    "        self.weight = nn.Parameter(made.weight.detach())\n"
    "        self.transposed = nn.Parameter(self.weight.detach().t())\n",
)
IN_EVALUATION = OTHERWISE.replace(
    "        self.hidden = torch.tanh(",
    "        x = x if self.training else 2 * x\n        self.hidden = torch.tanh(",
).replace("self.is_filled = False\n    def", "self.is_filled = False\n        self.eval()\n    def")


def test_what_a_kernel_keeps_for_itself_is_its_own_affair(tmp_path: Path) -> None:
    named = {"task": STATEFUL, "own": OTHERWISE, "folded": FOLDED, "evaluation": IN_EVALUATION}
    for name, text in (named | {"view": VIEW}).items():
        (tmp_path / f"{name}.py").write_text(text)
    code, shown, _ = run(tmp_path, "own", "--fixed-dtypes", "--fixed-shapes")
    assert code == 0, shown
    code, shown, found = run(tmp_path, "folded", "--fixed-dtypes", "--fixed-shapes", "--cases", "6")
    assert code == 1, shown
    rows = [row for row in found["rows"] if row["status"] == "different" and not row["is_limit"]]
    assert all("other parameters" in row["case"] for row in rows), shown
    code, shown, found = run(tmp_path, "view", "--fixed-dtypes", "--fixed-shapes")
    assert code == 1, shown
    rows = [row for row in found["rows"] if row["status"] == "different" and not row["is_limit"]]
    assert [row["case"] for row in rows] == ["other parameters after a move, seed 2"], shown
    # The reference is constructed in training mode, and so must a kernel be.
    code, shown, found = run(tmp_path, "evaluation", "--fixed-dtypes", "--cases", "2")
    assert code == 1, shown


def test_a_failure_in_gradients_alone_has_a_script_that_shows_it(files: Path) -> None:
    script = files / "show.py"
    code, shown, found = run(
        files, "backward", "--gradients", "--script", str(script), "--cases", "4"
    )
    assert code == 1, shown
    assert found["script"] == str(script)
    assert not [note for note in found["notes"] if "does not show it" in note], found["notes"]
    assert "NAMES" in script.read_text()


def test_what_torch_compile_made_is_said_to_run_in_eager_in_float64(files: Path) -> None:
    code, shown, found = run(files, "compiled", "--cases", "3")
    assert code == 0, shown
    notes = {note for row in found["rows"] for note in row["verdict"]["notes"]}
    assert "in float64, what the candidate compiles with torch.compile ran in eager" in notes


def test_a_kernel_that_returns_integers_is_compared_below_autocast_too(tmp_path: Path) -> None:
    ways = "import torch\ndef top(x):\n    return x.argmax(-1)\n"
    ways += "def same(x):\n    return x.max(-1)[1]\n"
    low = "def low(x):\n    return top(x) * (not torch.is_autocast_enabled('cpu'))\n"
    task = "def get_inputs():\n    return [torch.randn(4, 10)]\n"
    (tmp_path / "ways.py").write_text(ways + low + task)
    for name, expected in (("same", 0), ("low", 1)):
        pair = [f"{tmp_path}/ways.py:top", f"{tmp_path}/ways.py:{name}", "--cases", "4"]
        done = CliRunner().invoke(main, ["kernel", *pair])
        assert done.exit_code == expected, done.output
        assert ("below autocast" in done.output) is bool(expected)


def judged(tmp_path: Path, source: str, *options: str) -> tuple[int, str]:
    """Judge `kernel` of a file against its `task`."""
    given = "def get_inputs():\n    return [torch.randn(4, 10)]\n"
    (tmp_path / "ways.py").write_text(f"import os\nimport torch\n{given}{source}")
    pair = [f"{tmp_path}/ways.py:task", f"{tmp_path}/ways.py:kernel", "--cases", "2"]
    done = CliRunner().invoke(main, ["kernel", *pair, *options])
    return done.exit_code, " ".join(done.output.split())


DOUBLED = "def kernel(x):\n    return x + x\n"
KILLED = "os.kill(os.getpid(), 11)"


def test_a_reference_that_crashes_is_unverified(tmp_path: Path) -> None:
    call = f"def task(x):\n    {KILLED}\n    return 2 * x\n"
    construct = f"class task(torch.nn.Module):\n    def __init__(self):\n        {KILLED}\n"
    for source, where in ((call, "as given"), (construct, "constructing the reference")):
        code, shown = judged(tmp_path, source + DOUBLED)
        assert code == 3, shown
        assert "the reference does not return: its process was killed by SIGSEGV" in shown
        assert where in shown
    code, shown = judged(tmp_path, f"{KILLED}\ndef task(x):\n    return 2 * x\n{DOUBLED}")
    assert code == 2, shown
    assert "cannot be imported: its process was killed by SIGSEGV" in shown


def test_a_case_in_which_the_reference_crashes_is_not_asked(tmp_path: Path) -> None:
    task = f"def task(x):\n    x.isnan().any() and {KILLED}\n    return 2 * x\n"
    code, shown = judged(tmp_path, task + DOUBLED, "--cases", "16")
    assert code == 0, shown
    assert "1 made case not judged: the reference does not return: its process was killed" in shown


def test_a_kernel_may_keep_a_nan_that_the_reference_loses_in_its_dtype(tmp_path: Path) -> None:
    """As torch's fused attention on x86 does; it keeps it in float64."""
    lost = "x.nan_to_num(0) if x.dtype == torch.float32 else x"
    task = f"def task(x):\n    return 2 * ({lost})\n"
    code, shown = judged(tmp_path, task + DOUBLED, "--cases", "16")
    assert code == 0, shown
    halved = "def kernel(x):\n    return torch.where(x.isnan(), -torch.inf, x + x)\n"
    code, shown = judged(tmp_path, task + halved, "--cases", "16")
    assert code == 1, shown
    assert "NaN in one place" in shown


def test_inputs_in_float8_are_judged(tmp_path: Path) -> None:
    """No operator tells whether their values are finite."""
    task = "def get_inputs():\n    return [torch.linspace(-4, 4, 64).to(torch.float8_e4m3fn)]\n"
    task += "def task(x):\n    return 2 * x.float()\n"
    code, shown = judged(tmp_path, task + "def kernel(x):\n    return x.float() + x.float()\n")
    assert code == 0, shown
    code, shown = judged(tmp_path, task + "def kernel(x):\n    return x.float().abs() * 2\n")
    assert code == 1, shown


def test_a_pass_needs_a_comparison_on_the_given_inputs(tmp_path: Path) -> None:
    task = "def task(x):\n    return torch.rand_like(x) if x.isfinite().all() else 2 * x\n"
    code, shown = judged(tmp_path, task + DOUBLED, "--cases", "16")
    assert code == 3, shown
    assert "the given inputs show nothing: the reference draws random numbers" in shown


def test_a_kernel_that_cannot_be_built_again_for_a_caller_fails(tmp_path: Path) -> None:
    mark = f"open({str(tmp_path / 'mark')!r}, 'w')"
    task = "class task(torch.nn.Module):\n    def forward(self, x):\n        return 2 * x\n"
    kernel = f"""
class kernel(task):
    def __init__(self):
        super().__init__()
        if os.path.exists({str(tmp_path / "mark")!r}):
            raise ValueError("not twice")
    def forward(self, x):
        torch.is_inference_mode_enabled() and ({mark}, os._exit(7))
        return x + x
"""
    code, shown = judged(tmp_path, task + kernel)
    assert code == 1, shown
    reason = "(exception) the candidate cannot be constructed: ValueError: not twice"
    for caller in ("below autocast", "in another thread", "after many calls"):
        assert f"as given, {caller} candidate: different {reason}" in shown


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (
            (
                "library = torch.library.Library('aten', 'IMPL')\n"
                "library.impl('equal', lambda a, b: True, 'CPU')\n"
            ),
            "the kernel aten::equal/CPU: different",
        ),
        ("import sys\nsys.addaudithook(lambda *_: None)\n", "the candidate adds an audit hook"),
        ("import os\nos.fork() or os._exit(0)\n", "the candidate forks a process"),
    ],
)
def test_what_an_import_leaves_behind_is_seen(tmp_path: Path, source: str, shown: str) -> None:
    given = "import torch\ndef get_inputs():\n    return [torch.randn(4, 10)]\n"
    (tmp_path / "task.py").write_text(f"{given}def task(x):\n    return 2 * x\n")
    (tmp_path / "own.py").write_text(f"import torch\n{source}{DOUBLED}")
    pair = [f"{tmp_path}/task.py:task", f"{tmp_path}/own.py:kernel", "--cases", "2"]
    done = CliRunner().invoke(main, ["kernel", *pair])
    assert done.exit_code == 1, done.output
    assert shown in " ".join(done.output.split())


def test_a_kernel_is_called_from_compiled_code(tmp_path: Path) -> None:
    task = "def task(x):\n    return 2 * x\n"
    kernel = "def kernel(x):\n    return x * (3 if torch.compiler.is_compiling() else 2)\n"
    assert judged(tmp_path, task + kernel)[0] == 0
    code, shown = judged(tmp_path, task + kernel, "--compiled")
    assert code == 1, shown
    assert "as given, from compiled code output: different" in shown
    assert judged(tmp_path, task + DOUBLED, "--compiled")[0] == 0


def test_a_device_without_streams_is_not_asked_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "callers_on", lambda *_, **__: [STREAM])
    monkeypatch.setattr(judging, "has_streams", lambda _: False)
    code, shown = judged(tmp_path, "def task(x):\n    return 2 * x\n" + DOUBLED)
    assert code == 0, shown
    assert "not called on another stream: cpu has no streams" in shown
