"""ONNX Runtime as a candidate; what needs it is skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import logging

import pytest
import torch
from torch import nn

import paritas
from paritas import candidates
from paritas.core.errors import UsageError
from paritas.core.results.findings import Status

QUIET = paritas.VerifyConfig(raise_on_mismatch=False)


def test_what_is_missing_is_named_with_the_extra(monkeypatch):
    found = importlib.util.find_spec

    def hidden(name, *args):
        return None if name in {"onnxruntime", "onnxscript"} else found("json", *args)

    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    with pytest.raises(UsageError) as caught:
        candidates.onnxruntime(nn.Linear(2, 2), [torch.ones(1, 2)])
    assert str(caught.value) == (
        "candidate 'onnxruntime' needs packages that are not installed: onnxscript, onnxruntime; "
        "pip install 'paritas[onnx]'"
    )


class Net(nn.Module):
    def __init__(self, gelu):
        super().__init__()
        self.first, self.norm = nn.Linear(16, 32), nn.LayerNorm(32)
        self.gelu = gelu

    def forward(self, x, *, scale):
        y = self.norm(torch.tanh(self.first(x)))
        y = nn.functional.gelu(y) if self.gelu else y
        return {"y": y * scale["by"], "none": None, "largest": y.argmax(-1)}


@pytest.mark.slow
def test_it_is_equivalent_and_lifted_as_far_as_it_can_be():
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    torch.manual_seed(0)
    inputs = paritas.Inputs((torch.randn(4, 16),), {"scale": {"by": torch.tensor(0.7)}})
    for gelu, by in ((False, "in float32"), (True, "ONNX's reference evaluator ran it")):
        model = Net(gelu).eval()
        verdict = paritas.verify(inputs, model, candidates.onnxruntime(model, inputs), QUIET)
        assert verdict.status is Status.EQUIVALENT
        found = {finding.path: finding for finding in verdict.findings}
        assert found["output['y']"].lifted is not None
        assert any(by in note for note in verdict.notes)


@pytest.mark.slow
def test_a_model_that_was_exported_with_other_weights_is_different():
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    torch.manual_seed(0)
    model = nn.Linear(16, 8).eval()
    x = torch.randn(4, 16)
    candidate = candidates.onnxruntime(model, [x])
    with torch.no_grad():
        model.weight[3, 5] += 1e-3
    assert paritas.verify([x], model, candidate, QUIET).status is Status.DIFFERENT


@pytest.mark.slow
def test_what_it_cannot_run_in_float64_is_a_note_and_prints_nothing(capfd, monkeypatch):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    monkeypatch.setattr(logging.root, "handlers", [])  # as outside pytest
    torch.manual_seed(0)
    model, x = nn.GRU(4, 4).eval(), torch.randn(3, 1, 4)
    verdict = paritas.verify([x], model, candidates.onnxruntime(model, [x]), QUIET)
    assert verdict.status is Status.EQUIVALENT
    (note,) = [note for note in verdict.notes if "float" in note]
    assert note.startswith("only the native run was made: the candidate in float64 raised")
    assert capfd.readouterr() == ("", "")
