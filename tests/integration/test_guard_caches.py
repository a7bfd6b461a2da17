"""Compile caches hand back code that was made before: the guard has to see it all the same."""

from __future__ import annotations

import torch

import paritas


def program(x, weight):
    return (x @ weight).sin().square()


def differentiated(backend):
    torch.compiler.reset()
    torch.manual_seed(0)
    x, weight = torch.randn(6, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    torch.compile(program, backend=backend)(x, weight).sum().backward()
    return x.grad


def test_code_that_lies_in_the_caches_is_guarded_forward_and_backward():
    """Above Inductor a hit would skip the guard; below, what comes out of the cache is checked."""
    plain = [differentiated("inductor") for _ in range(2)]
    backend = paritas.guard("inductor")
    assert torch.equal(differentiated(backend), plain[0])
    labels = [(entry.label, entry.checked) for entry in backend.journal.graphs]
    assert labels == [("graph 0 forward", 1), ("graph 0 backward", 1)]
    assert backend.verdict().passed


def test_code_that_never_came_by_the_guard_is_unverified(monkeypatch):
    from paritas.core.compiled import guard as guarding

    def out_of_a_cache(graph, example_inputs, watch, options=None, around=None):
        return graph.forward

    monkeypatch.setattr(guarding, "compile_watched", out_of_a_cache)
    backend = paritas.guard("inductor", on_mismatch="record")
    differentiated(backend)
    verdict = backend.verdict()
    assert verdict.exit_code == 3
    assert "that the guard never saw" in str(verdict)
