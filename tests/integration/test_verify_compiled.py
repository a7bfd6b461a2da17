"""verify() of what torch.compile makes: clean programs pass, whatever they do."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from paritas import Inputs, Status, Verdict, VerifyConfig, verify
from spying import Spy

# Narrow dtypes where all is asked for: see tests/README.md.
WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
DTYPES = [torch.float32, *([torch.bfloat16, torch.float16] if WHOLE else [])]
FINE = {Status.IDENTICAL, Status.EQUIVALENT}


def verdict_on(inputs: Any, reference: Any, candidate: Any, **options: Any) -> Verdict:
    config = VerifyConfig(raise_on_mismatch=False, **options)
    return verify(inputs, reference, candidate, config)


class Net(nn.Module):
    """A bit of everything: norm, activation, a cast, a hidden constant, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 16, bias=False), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = nn.functional.gelu(self.norm(self.linear(x)))
        scores = hidden.float().softmax(-1)
        return {"scores": scores, "best": scores.argmax(-1), "positive": hidden > 0, "three": 3}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_backward_by_inductor(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Net().to(dtype)
    x = torch.randn(4, 8).to(dtype).requires_grad_()
    verdict = verdict_on([x], model, torch.compile(model))
    assert verdict.status in FINE, str(verdict)
    gradients = [f for f in verdict.findings if f.path.startswith("gradient of")]
    assert len(gradients) == 1 + len(list(model.parameters()))
    assert any(finding.lifted is not None for finding in verdict.findings)


def test_several_input_sets_with_dynamic_shapes() -> None:
    torch.manual_seed(0)
    model = Net()
    sets = [Inputs((torch.randn(rows, 8),)) for rows in (3, 5, 8)]
    verdict = verdict_on(sets, model, torch.compile(model, dynamic=True, backend="aot_eager"))
    assert verdict.passed, str(verdict)
    assert {f.path.split("(")[-1] for f in verdict.findings if "scores" in f.path} == {
        "inputs 1)",
        "inputs 2)",
        "inputs 3)",
    }


def test_batch_norm_in_training_compares_its_statistics_over_two_calls() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = [torch.randn(2, 3, 8, 8)]
    compiled = torch.compile(model, backend="inductor" if WHOLE else "aot_eager")
    verdict = verdict_on(inputs, model, compiled, verify_gradients=False)
    assert verdict.passed, str(verdict)
    paths = {finding.path for finding in verdict.findings}
    assert "state 1.running_mean after the call" in paths
    assert "state 1.running_mean after the call (second call)" in paths
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_autocast_is_respected() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.GELU())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled = torch.compile(model, backend="inductor" if WHOLE else "aot_eager")
        verdict = verdict_on([torch.randn(4, 16)], model, compiled)
    assert verdict.passed, str(verdict)
    assert any(finding.lifted is not None for finding in verdict.findings)


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5))


@pytest.mark.usefixtures("scalar_kernels")
def test_dropout_of_another_stream_is_unverified_and_names_the_switch() -> None:
    model = dropping().requires_grad_(requires_grad=False)
    compiled = torch.compile(model)
    verdict = verdict_on([torch.randn(4, 16)], model, compiled, verify_gradients=False)
    assert verdict.status is Status.UNVERIFIED
    assert verdict.exit_code == 3
    assert "fallback_random" in str(verdict)


@pytest.mark.usefixtures("scalar_kernels")
def test_dropout_of_the_same_stream_compares() -> None:
    model = dropping()
    compiled = torch.compile(model, options={"fallback_random": True})
    verdict = verdict_on([torch.randn(4, 16)], model, compiled, verify_gradients=WHOLE)
    assert verdict.passed, str(verdict)


@pytest.mark.usefixtures("scalar_kernels")
def test_mutation_aliases_and_views_survive_compilation() -> None:
    def program(x: torch.Tensor, memory: torch.Tensor) -> Any:
        memory.add_(x.sum(0))
        return x * memory, x.view(-1), memory

    inputs = [torch.randn(4, 16), torch.zeros(16)]
    verdict = verdict_on(inputs, program, torch.compile(program))
    assert verdict.passed, str(verdict)
    assert torch.equal(inputs[1], torch.zeros(16))
    assert any(f.path == "input[1] after the call" for f in verdict.findings)


@pytest.mark.parametrize("how", ["function", "method", "in place", "submodule"])
def test_every_way_of_compiling_is_seen_through(how: str) -> None:
    torch.manual_seed(0)
    model = Net()
    if how == "function":
        candidate: Any = torch.compile(lambda x: dict(model(x)), backend="aot_eager")
    elif how == "method":
        candidate = torch.compile(model.forward, backend="aot_eager")
    elif how == "in place":
        model.compile(backend="aot_eager")
        candidate = model
    else:
        holder = nn.Module()
        holder.inner = torch.compile(model, backend="aot_eager")
        candidate = lambda x: dict(holder.inner(x))  # noqa: E731
    reference = Net()
    reference.load_state_dict(model.state_dict())
    verdict = verdict_on([torch.randn(4, 8)], reference, candidate, verify_gradients=False)
    assert verdict.passed, str(verdict)


def test_a_fault_of_compiled_code_inside_a_wrapper_is_found_by_the_lifted_run() -> None:
    """In bfloat16 the fault rounds away; lifting the wrapper's eager original would miss it."""

    def scales(graph: Any, example_inputs: Any) -> Any:
        del example_inputs
        return lambda *args: tuple(out * 1.0005 for out in graph(*args))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh()).bfloat16().requires_grad_(False)
    compiled = torch.compile(model, backend=scales)
    x = torch.randn(4, 16).bfloat16()
    verdict = verdict_on([x], model, lambda x: compiled(x).clone())
    assert verdict.status is Status.DIFFERENT, str(verdict)
    assert any("eager code around" in note for note in verdict.notes)


def test_a_module_that_torch_skips_is_not_called_verified() -> None:
    """Dynamo runs an LSTM eagerly without a word; eager against eager verifies no compiler."""
    torch.compiler.reset()
    model = nn.LSTM(4, 8, batch_first=True)
    verdict = verdict_on([torch.randn(2, 3, 4)], model, torch.compile(model))
    torch.compiler.reset()  # the skip would outlive this test
    assert verdict.status is Status.UNVERIFIED
    assert "compiled nothing" in str(verdict)


def test_lifted_run_says_when_it_cannot_be_made() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        bits = x.view(torch.int32) & 0x7FFFFFFF
        return bits.view(torch.float32).sin()

    verdict = verdict_on([torch.randn(100)], program, torch.compile(program))
    assert verdict.passed, str(verdict)
    assert any("reads the bits" in note for note in verdict.notes) or verdict.status is (
        Status.IDENTICAL
    )


def test_a_model_that_is_compiled_already_is_compiled_once_more_only_in_float64() -> None:
    compiled_in = Spy()

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compiled_in.note(next(one.dtype for one in inputs if isinstance(one, torch.Tensor)))
        return graph.forward

    class Layer(nn.Linear):
        """With code of its own: Dynamo counts all that is compiled of `nn.Linear.forward`."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.gelu(super().forward(x))

    model, x = Layer(8, 4), torch.randn(2, 8)
    compiled = torch.compile(model, backend=backend)
    compiled(x).sum().backward()
    model.zero_grad()
    for _ in range(2):
        assert verdict_on([x], model, compiled).passed
    assert compiled_in.notes() == [torch.float32, torch.float64]


@torch.compiler.disable
def widened_outside(x: torch.Tensor) -> torch.Tensor:
    return (x.float() / 3).to(x.dtype)


def with_a_cast_at_a_graph_break(x: torch.Tensor) -> torch.Tensor:
    return widened_outside(x.softmax(-1)).exp().softmax(-1)


@pytest.mark.parametrize("fault", [0.0, 1e-4])
def test_a_cast_that_dynamo_leaves_to_eager_is_not_a_fault_of_the_compiler(fault: float) -> None:
    def candidate(x: torch.Tensor) -> torch.Tensor:
        return widened_outside(x.softmax(-1) * (1 + fault)).exp().softmax(-1)

    torch.manual_seed(0)
    compiled = torch.compile(candidate, backend="aot_eager_decomp_partition")
    verdict = verdict_on([torch.randn(4, 8)], with_a_cast_at_a_graph_break, compiled)
    assert verdict.passed == (not fault), str(verdict)
    assert any("between the compiled graphs" in note for note in verdict.notes), str(verdict)
