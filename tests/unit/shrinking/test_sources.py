"""Every kind of failure becomes programs that can be shrunk."""

from __future__ import annotations

import functools
import gc
import re
import runpy
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import paritas
from paritas.core.errors import MismatchError, UsageError
from paritas.core.execution.compilation import Candidate
from paritas.core.judging.failures import recall_failed
from paritas.core.results.findings import Verdict
from paritas.shrinking import shrink as shrinking
from paritas.shrinking import sources
from quality import faulty_backends

if TYPE_CHECKING:
    from paritas.core.shrinking import ShrinkReport

RECORD = paritas.VerifyConfig(raise_on_mismatch=False)
SIN_AS_COS = Candidate(faulty_backends.backend("sin_as_cos")).resolve()
WRONG_GRADIENT = Candidate(faulty_backends.backend("gradient_of_sin_wrong")).resolve()


# Scripts are run in test_cli_shrink.py; a process for each test here would take long.
pytestmark = pytest.mark.usefixtures("untried", "undiagnosed")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Each test compiles the same class: beyond a limit Dynamo would run it eagerly."""
    torch.compiler.reset()


class Model(nn.Module):
    """A sine between other operators."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply them."""
        return self.last(torch.sin(self.first(x)) + x)


def _failing(**more: object) -> Verdict:
    model = Model()
    compiled = torch.compile(model, backend=SIN_AS_COS, **more)
    return paritas.verify([torch.ones(2, 8)], model, compiled, RECORD)


def _calls(report: ShrinkReport) -> list[str]:
    """The calls in the program of a script."""
    body = Path(report.script).read_text().partition("def program(")[2].partition("return")[0]
    return re.findall(r"= ([\w.]+)\(", body)


def test_a_failing_verdict_of_verify_shrinks_to_the_wrong_operator(tmp_path) -> None:
    result = _failing().shrink(outdir=tmp_path)
    assert result.after == "1 operator call"
    assert _calls(result) == ["torch.sin"]
    assert Path(result.script).parent == tmp_path


def test_the_verdict_of_a_mismatch_error_shrinks_too(tmp_path) -> None:
    model = Model()
    compiled = torch.compile(model, backend=SIN_AS_COS)
    with pytest.raises(MismatchError) as caught:
        paritas.verify([torch.ones(2, 8)], model, compiled)
    result = caught.value.verdict.shrink(outdir=tmp_path)
    assert _calls(result) == ["torch.sin"]


def test_dynamic_shapes_stay_dynamic(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def shrink(*args, **kwargs):
        seen.append(shrinking.shrink(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(sources, "shrink", shrink)
    _failing(dynamic=True).shrink(outdir=tmp_path)
    (shrunk,) = seen
    assert shrunk.program.dynamic


@pytest.mark.parametrize("gradients", [False, True], ids=["results", "gradients"])
def test_a_failing_guard_shrinks_to_the_wrong_operator(tmp_path, *, gradients: bool) -> None:
    backend = WRONG_GRADIENT if gradients else SIN_AS_COS
    guard = paritas.guard(backend, on_mismatch="record", locate=False)
    compiled = torch.compile(Model(), backend=guard)
    compiled(torch.ones(2, 8)).sum().backward()
    result = guard.verdict().shrink(outdir=tmp_path)
    assert _calls(result) == ["torch.sin"]
    assert result.what == f"different: value of {'gradient' if gradients else 'output'}"


def test_a_wrong_gradient_whose_place_is_known_is_searched_as_a_gradient(tmp_path) -> None:
    model = Model()
    compiled = torch.compile(model, backend=WRONG_GRADIENT)
    config = paritas.VerifyConfig(raise_on_mismatch=False, locate_seconds=60)
    verdict = paritas.verify([torch.ones(2, 8)], model, compiled, config)
    assert verdict.failures[0].origin is not None
    result = verdict.shrink(outdir=tmp_path)
    assert _calls(result) == ["torch.sin"]
    assert result.what == "different: value of gradient"
    assert result.queries <= 4


def test_what_a_guard_keeps_is_what_came_before_the_call(tmp_path) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        x.mul_(0)
        return y

    guard = paritas.guard(SIN_AS_COS, on_mismatch="record", locate=False)
    torch.compile(step, backend=guard)(torch.full((3,), 2.0))
    (failed,) = recall_failed(guard.verdict())
    assert torch.equal(failed.inputs[0], torch.full((3,), 2.0))


def test_a_verdict_that_passed_has_nothing_to_shrink() -> None:
    verdict = paritas.verify([torch.ones(2, 8)], torch.sin, torch.sin, RECORD)
    with pytest.raises(UsageError, match=r"^nothing failed \(the verdict is identical\)"):
        verdict.shrink()


def test_a_verdict_from_a_file_says_how_to_shrink_instead() -> None:
    read = Verdict.from_json(_failing().to_json())
    with pytest.raises(UsageError, match=r"read from a file.*paritas shrink"):
        read.shrink()


def test_a_candidate_that_no_compiler_made_is_refused() -> None:
    verdict = paritas.verify([torch.ones(2)], torch.sin, torch.cos, RECORD)
    with pytest.raises(UsageError, match=r"was not made by torch\.compile"):
        verdict.shrink()


def test_a_backend_that_no_script_could_import_is_refused() -> None:
    model = Model()
    compiled = torch.compile(model, backend=lambda graph, _: lambda *a: SIN_AS_COS(graph, a)(*a))
    verdict = paritas.verify([torch.ones(2, 8)], model, compiled, RECORD)
    with pytest.raises(UsageError, match="define it as a function at the top level of a module"):
        verdict.shrink()


@pytest.mark.parametrize(
    "wrong",
    [
        faulty_backends.swap_sin,
        functools.partial(faulty_backends.swap_sin, function=torch.tan),
        faulty_backends.IN_PLACE_OF_SIN,
    ],
    ids=["function", "partial", "object"],
)
def test_a_script_imports_what_the_options_of_the_compiler_hold(tmp_path, wrong: object) -> None:
    model = Model()
    options = {"passes": {"after": wrong, "level": faulty_backends.Level.HIGH}}
    compiled = torch.compile(model, backend=faulty_backends.changed_by_options, options=options)
    verdict = paritas.verify([torch.ones(2, 8)], model, compiled, RECORD)
    result = verdict.shrink(outdir=tmp_path)
    assert _calls(result) == ["torch.sin"]
    script = runpy.run_path(result.script)
    assert script["main"]() == 1


def test_an_option_that_no_script_could_import_is_refused_by_name() -> None:
    def local(graph: torch.fx.GraphModule) -> None:
        faulty_backends.swap_sin(graph)

    model, options = Model(), {"passes": {"after": local}}
    compiled = torch.compile(model, backend=faulty_backends.changed_by_options, options=options)
    verdict = paritas.verify([torch.ones(2, 8)], model, compiled, RECORD)
    with pytest.raises(UsageError, match=r"the compiler option 'passes' is .*local.*top level"):
        verdict.shrink()


def test_a_backend_that_is_a_variable_of_a_module_is_imported(tmp_path) -> None:
    model = Model()
    compiled = torch.compile(model, backend=faulty_backends.SIN_AS)
    verdict = paritas.verify([torch.ones(2, 8)], model, compiled, RECORD)
    result = verdict.shrink(outdir=tmp_path)
    assert runpy.run_path(result.script)["main"]() == 1


def test_a_verdict_that_is_gone_keeps_nothing_alive() -> None:
    model = nn.Linear(2, 2)
    kept = weakref.ref(model)
    verdict = paritas.verify([torch.ones(1, 2)], model, lambda x: x, RECORD)
    del model
    gc.collect()
    assert kept() is not None
    assert recall_failed(verdict)
    del verdict
    gc.collect()
    assert kept() is None
