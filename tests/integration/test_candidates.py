"""`paritas verify --candidate NAME`, and models by class."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import paritas
from paritas import candidates
from paritas.app.cli import main
from paritas.core.results.findings import Status
from quality.guard_program_table import inductor_settings

PROGRAM = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    return model, [torch.randn(3, 16)]

def build_two():
    from paritas import Inputs
    model, (x,) = build()
    return model, [Inputs((x,)), Inputs((x[:2],))]

def function():
    return torch.sin, [torch.randn(3)]
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "candidate_program.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "candidate_program"
    sys.modules.pop("candidate_program", None)


def run(*args):
    return CliRunner().invoke(main, ["verify", *args])


@pytest.mark.parametrize("name", ["export", "export-decomposed"])
def test_an_exported_model_is_compared_with_its_gradients(program, name):
    asked = ("--candidate", name, "--dtype", "bfloat16", "--json", "verdict.json")
    found = run(f"{program}:build", *asked)
    assert found.exit_code == 0, found.output
    assert found.stdout.splitlines()[-1].startswith(("identical: ", "equivalent: "))
    verdict = paritas.Verdict.from_json(Path("verdict.json").read_bytes())
    paths = {finding.path for finding in verdict.findings}
    assert {"output", "gradient of 0.weight", "gradient of 2.bias"} <= paths


@pytest.mark.parametrize(
    ("factory", "name", "message"),
    [
        ("build", "onnx", "unknown --candidate 'onnx'; did you mean 'onnxruntime'?"),
        ("function", "export", "torch.export, which takes an nn.Module, not builtin"),
        ("build_two", "export", "takes one set of inputs, got 2"),
    ],
)
def test_what_cannot_be_a_candidate_is_told(program, factory, name, message):
    found = run(f"{program}:{factory}", "--candidate", name)
    assert found.exit_code == 2
    assert message in " ".join(found.output.split())


def test_a_model_by_class_is_verified_and_one_of_unknown_inputs_is_refused(monkeypatch):
    class Config:
        def __init__(self, hidden_size=4096, vocab_size=50000):
            self.hidden_size, self.vocab_size = hidden_size, vocab_size

    class TinyLM(nn.Module):
        config_class = Config

        def __init__(self, config):
            super().__init__()
            self.config = config
            self.table = nn.Embedding(config.vocab_size, config.hidden_size)

        def forward(self, input_ids):
            return self.table(input_ids) @ self.table.weight.T

    class TinyGraph(TinyLM):
        main_input_name = "edges"

        def forward(self, edges):
            return self.table(edges)

    library = types.ModuleType("transformers")
    library.TinyLM, library.TinyGraph = TinyLM, TinyGraph
    monkeypatch.setitem(sys.modules, "transformers", library)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    found = run("hf:TinyLM?hidden_size=8", "--candidate", "export")
    assert found.exit_code == 0, found.output
    refused = run("hf:TinyGraph", "--candidate", "export")
    assert refused.exit_code == 2
    assert "with --inputs module:function" in " ".join(refused.output.split())


@pytest.mark.slow
def test_code_compiled_ahead_of_time_is_equivalent():
    torch.manual_seed(0)
    model = nn.Linear(16, 32).eval()  # a kernel of its own would be another file of C++
    x = torch.randn(3, 16)
    config = paritas.VerifyConfig(raise_on_mismatch=False, lift=False)
    # To compile all headers beforehand, or to optimise, takes longer than this one program.
    settings = {
        "aot_inductor.precompile_headers": False,
        "aot_inductor.compile_wrapper_opt_level": "O0",
    }
    with inductor_settings(**settings):
        verdict = paritas.verify([x], model, candidates.aot_inductor(model, [x]), config)
    assert verdict.status in {Status.IDENTICAL, Status.EQUIVALENT}
    assert "aot_inductor returns values only" in verdict.notes[0]
