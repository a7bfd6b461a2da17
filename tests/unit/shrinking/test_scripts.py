import contextlib
import dataclasses
import importlib
import io
import runpy

import pytest
import torch
from safetensors.torch import load, save
from torch import fx

from paritas.core.errors import UsageError
from paritas.core.execution.compilation import Candidate
from paritas.core.reporting.scripts import ScriptValues, write
from paritas.core.results.findings import Aspect, Diagnosis, Pattern, Status
from paritas.shrinking.programs import FailingProgram, FailureSignature
from paritas.shrinking.scripts import program_script
from quality.faulty_backends import backend

# Not the numbers that a script's own formula draws.
NUMBERS = torch.randn(100, generator=torch.Generator().manual_seed(9))
WRONG = FailureSignature(status=Status.DIFFERENT, aspect=Aspect.VALUE, role="output")


def program_of(function, *inputs, **more):
    return FailingProgram(fx.symbolic_trace(function), inputs, **more)


def sin(x):
    return torch.sin(x)


@pytest.fixture
def here(monkeypatch):
    """Scripts run in this process: torch takes seconds to import."""

    def run(path, seconds):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = runpy.run_path(str(path))["main"]()
        return code, printed.getvalue()

    monkeypatch.setattr("paritas.core.reporting.scripts.run_script", run)


def write_script(program, candidate, signature, diagnosis, path):
    return write(program_script(program, candidate, signature, diagnosis), path, 120.0)


def evaluated(values):
    written = ScriptValues()
    texts = [written.text(f"x{place}", value, place) for place, value in enumerate(values)]
    names = {"torch": torch, "stored": load(save(written.stored))}
    return [eval(text, names) for text in texts], texts, written.stored


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([[0.1, -2.5], [float("inf"), float("nan")]]),
        torch.tensor([1, 2, 300]),
        torch.tensor([True, False]),
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.arange(6.0).reshape(2, 3).T,
        torch.randn(3, 4, generator=torch.Generator().manual_seed(9)).to(torch.float16),
        torch.randn(200, generator=torch.Generator().manual_seed(9)),
        torch.ones(64, 64),
        torch.empty(0, 3),
        torch.tensor([1 + 2j, -0.5j]),
        torch.randn(9, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(9)),
        torch.randn(9, 8, dtype=torch.complex128, generator=torch.Generator().manual_seed(9)),
        torch.randn(9, 8, dtype=torch.complex128, generator=torch.Generator().manual_seed(9)).mH,
        torch.tensor([complex(float("inf"), 1), complex(float("nan"), -float("inf"))]),
        torch.randn(99, generator=torch.Generator().manual_seed(9)).to(torch.float8_e4m3fn),
        torch.ones(3, requires_grad=True),
        7,
    ],
    ids=str,
)
def test_inputs_come_back_bit_for_bit(value):
    (made,), *_ = evaluated([value])
    if not isinstance(value, torch.Tensor):
        assert made == value
        return
    assert made.dtype == value.dtype
    assert made.stride() == value.stride()
    assert made.requires_grad == value.requires_grad
    same = made.contiguous().reshape(-1).view(torch.uint8)
    assert torch.equal(same, value.contiguous().reshape(-1).view(torch.uint8))


def test_elements_that_share_memory_are_restored_separately():
    value = torch.randn(40, 1, generator=torch.Generator().manual_seed(9)).expand(40, 3)
    (made,), *_ = evaluated([value])
    assert torch.equal(made, value)


def test_an_input_that_no_file_holds_is_refused_by_its_dtype():
    bits = torch.arange(100, dtype=torch.uint8).view(torch.bits8)
    with pytest.raises(UsageError, match=r"input 'x' has dtype torch\.bits8"):
        ScriptValues().text("x", bits, 0)


def test_numbers_that_a_line_makes_are_not_stored():
    drawn = torch.randn(50, 50, generator=torch.Generator().manual_seed(0))
    counted = ((torch.arange(300) + 1) % 7 - 3).float().reshape(3, 100)
    _, texts, stored = evaluated([drawn, counted])
    assert stored == {}
    assert "manual_seed(0)" in texts[0]


@pytest.mark.unforked
def test_a_script_fails_on_its_own_and_says_what_it_is_about(tmp_path):
    pattern = Pattern(kind="scale", confidence=0.9, sentence="it is cos instead of sin")
    program = program_of(sin, NUMBERS, seed=3)
    candidate = Candidate(backend("sin_as_cos"))
    written = write_script(
        program, candidate, WRONG, Diagnosis(patterns=(pattern,)), tmp_path / "repro.py"
    )
    assert written.shows, written.output
    assert written.data_path is not None
    text = written.path.read_text()
    assert "it is cos instead of sin" in text
    assert f"torch {torch.__version__}" in text
    assert "seed 3" in text
    assert "paritas" not in text


def test_a_script_that_does_not_fail_says_so(tmp_path, here):
    program = program_of(sin, torch.ones(3))
    written = write_script(program, Candidate(backend("right")), WRONG, None, tmp_path / "repro.py")
    assert written.exit_code is not None
    assert not written.shows
    assert (
        "did not show the failure: it exits with 0: the fault is gone" in written.path.read_text()
    )


def test_another_failure_than_the_one_it_shows_is_not_taken_for_it(tmp_path, here):
    program = program_of(sin, torch.ones(3))
    candidate = Candidate(backend("sin_raises"))
    written = write_script(program, candidate, WRONG, None, tmp_path / "repro.py")
    assert written.exit_code is not None
    assert not written.shows
    assert "NotImplementedError" in written.output


def test_a_script_shows_a_wrong_gradient_and_a_missing_write(tmp_path, here):
    def write(x, y):
        y.add_(1)
        return torch.sin(x)

    program = program_of(write, torch.ones(3, requires_grad=True), torch.zeros(2), gradients=True)
    path = tmp_path / "repro.py"
    wrong = Candidate(backend("gradient_of_sin_wrong"))
    shown = write_script(program, wrong, WRONG, None, path).output
    assert "gradient of x: WRONG" in shown
    assert "y after the call: right" in shown
    shown = write_script(program, Candidate(backend("writes_left_out")), WRONG, None, path).output
    assert "y after the call: WRONG" in shown


def test_stored_inputs_that_are_written_to_are_loaded_again_for_each_run(tmp_path, here):
    def write_and_read(x):
        x.add_(1)
        return torch.sin(x)

    path = tmp_path / "repro.py"
    program = program_of(write_and_read, NUMBERS.clone())
    written = write_script(program, Candidate(backend("right")), WRONG, None, path)
    assert written.data_path is not None
    assert written.exit_code == 0, written.output
    smaller = program_of(sin, torch.ones(3))
    written = write_script(smaller, Candidate(backend("sin_as_cos")), WRONG, None, path)
    assert written.shows
    assert not path.with_suffix(".safetensors").exists(), "of the script before"


def test_sub_graphs_are_refused_by_name(tmp_path):
    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = fx.symbolic_trace(lambda x: x + 1)

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.get_attr("inner"), x))
    program = FailingProgram(fx.GraphModule(Holder(), graph), (torch.ones(1),))
    with pytest.raises(UsageError, match="has nested graphs"):
        write_script(program, Candidate(), WRONG, None, tmp_path / "repro.py")


REGISTERING = """
import torch


@torch.library.custom_op("{name}::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x):
    return torch.empty_like(x)
"""


def test_a_script_imports_what_registers_its_operators(tmp_path, monkeypatch):
    name = "registering_an_operator"
    (tmp_path / f"{name}.py").write_text(REGISTERING.format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(name)
    graph = fx.Graph()
    doubled = graph.call_function(
        getattr(torch.ops, name).doubled.default, (graph.placeholder("x"),)
    )
    graph.output((graph.call_function(torch.sin, (doubled,)),))
    program = FailingProgram(fx.GraphModule({}, graph), (torch.ones(3),))
    script = program_script(program, Candidate(backend("sin_as_cos")), WRONG, None)
    assert f"import {name}" in script.imports
    assert f"# {name}" in script.text(tmp_path / "bug" / "repro.py")


def test_an_error_of_the_script_itself_is_not_its_failure(tmp_path):
    program = program_of(sin, torch.ones(3))
    script = program_script(program, Candidate(backend("sin_as_cos")), WRONG, None)
    missing = dataclasses.replace(script, imports=("import a_module_that_nobody_has",))
    written = write(missing, tmp_path / "repro.py", 120.0)
    assert written.exit_code == 3
    assert not written.shows
    assert "No module named 'a_module_that_nobody_has'" in written.path.read_text()
