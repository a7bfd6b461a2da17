"""What Dynamo keeps with the code of a function is left as it was."""

from __future__ import annotations

import torch

from paritas.core.torch_private.dynamo import CountingBackend, leaving_no_entries


def test_what_is_compiled_meanwhile_is_gone_and_what_was_compiled_before_stays() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    own, other = CountingBackend(), CountingBackend()
    torch.compile(double, backend=own)(torch.ones(2))
    code = double.__code__
    for count in (1, 2):
        with leaving_no_entries():
            assert double.__code__ is not code
            torch.compile(double, backend=other)(torch.ones(2))
            torch.compile(triple, backend=other)(torch.ones(2))
        assert other.graphs == 2 * count  # both are compiled again each time
    assert double.__code__ is code
    torch.compile(double, backend=own)(torch.ones(2))
    assert own.graphs == 1
