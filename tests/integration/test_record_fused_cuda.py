"""Buffers of Triton's kernels; skipped where there is no CUDA device."""

from __future__ import annotations

import pytest
import torch

from integration.fused_graphs import Block, Listening, convolutional, perceptron
from paritas.formats.dumps.reading import Dump
from paritas.recording.record import record

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = {
    "perceptron": (perceptron, (3, 8)),
    "convolutional": (convolutional, (2, 3, 6, 6)),
    "transformer": (Block, (2, 5, 16)),
}


@pytest.mark.parametrize("case", CASES)
def test_each_named_buffer_holds_the_value_of_its_node_and_none_is_missed(case):
    build, shape = CASES[case]
    torch.compiler.reset()
    torch.manual_seed(0)
    backend = Listening()
    compiled = torch.compile(build().cuda(), backend=backend)
    compiled(torch.randn(shape, device="cuda", requires_grad=True)).square().mean().backward()
    assert [one.lowered.is_backward for one in backend.told] == [False, True]
    for one in backend.told:
        assert one.wrong(allowed=2e-3) == []
        assert one.code.missed == ()
        assert any("triton" in kernel.name for kernel in one.code.kernels)
        for mine, theirs in zip(one.plain, one.listening, strict=True):
            # Triton tunes each compilation by measuring, and may choose another order of summing.
            torch.testing.assert_close(mine, theirs)


# Torch records an empty graph first, to make room; before 2.12 it warns about that.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_recording_leaves_the_program_as_it_is(mode, tmp_path):
    def run(backend, **how):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = perceptron().cuda()
        compiled = torch.compile(model, backend=backend, **how)
        results = []
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            y = compiled(torch.randn(3, 8, device="cuda"))
            y.square().mean().backward()
            results += [y.detach().clone(), *(p.grad.clone() for p in model.parameters())]
            model.zero_grad()
        return results

    expected = run("inductor", mode=mode)
    with record(tmp_path / "dump", source="fused") as backend:
        results = run(backend, mode=mode)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(results, expected, strict=True))
    dump = Dump.open(tmp_path / "dump")
    assert {what.status for what in dump.header(0).observed} <= {"unchanged", "changed"}
    assert {r.step for r in dump.records() if r.site.level == "buffer"} == {0, 1, 2, 3}
    assert any(r.site.kernel.startswith("triton") for r in dump.records())
