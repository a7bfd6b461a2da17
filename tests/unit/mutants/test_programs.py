"""A model traced as one flat graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paritas.core.errors import UsageError
from paritas.core.results.items import nth_output
from paritas.mutants.programs import trace_program


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        self.last.copy_(x[0])
        return self.layer(x - self.mean)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_program_returns_outputs_gradients_and_buffers():
    torch.manual_seed(0)
    model, x = Counting(), draw(0, 4, 3)
    program = trace_program(model, [x])
    results = dict(
        zip(map(str, program.results), program.module(*program.fresh_inputs()), strict=True)
    )
    assert list(results) == [
        "output[0]",
        "gradient of layer.weight",
        "gradient of layer.bias",
        "buffer mean",
        "buffer last",
    ]
    # The model itself is unchanged until now.
    assert bool((model.mean == 0).all())
    out = model(x)
    assert torch.equal(results["output[0]"], out)
    out.backward(program.inputs[-1])
    assert torch.equal(results["gradient of layer.weight"], model.layer.weight.grad)
    assert torch.equal(results["buffer mean"], model.mean)
    assert torch.equal(results["buffer last"], model.last)


def test_the_backward_pass_is_distinguished_from_the_forward_pass():
    torch.manual_seed(0)
    program = trace_program(nn.Linear(3, 3), [draw(0, 4, 3)])
    targets = {node.name: str(node.target) for node in program.calls}
    assert [targets[name] for name in targets if "mm" in name and name not in program.backward] == [
        "aten.addmm.default"
    ]
    assert any(targets[name] == "aten.mm.default" for name in program.backward)


def test_a_model_without_gradients_has_no_backward_pass():
    program = trace_program(nn.Linear(3, 3), [draw(0, 4, 3)], gradients=False)
    assert program.backward == frozenset()
    assert program.results == (nth_output(0),)


def test_a_model_that_returns_no_tensor_is_refused():
    with pytest.raises(UsageError, match=r"^the model returns no tensor"):
        trace_program(lambda x: None, [draw(0, 2)])
