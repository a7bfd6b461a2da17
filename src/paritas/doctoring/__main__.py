"""`python -m paritas.doctoring [--quick]`: a line of JSON for each thing that torch takes part in.

In a process of its own: whatever torch does there, even a crash, is told by who started it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.doctoring.checks import Check


def examine(*, quick: bool) -> Iterator[Check]:
    """Look at torch, at the hooks into it, and ask the questions of the self-test."""
    from paritas.doctoring import hooks, self_test, torch_itself
    from paritas.doctoring.checks import MISSING, OK, Check
    from paritas.doctoring.machine import find_compiler

    yield from torch_itself.versions()
    yield from torch_itself.devices()
    backend = "aot_eager"
    if quick:
        yield Check("torch", "torch.compile", MISSING, "not tried: --quick was asked for")
    else:
        for check in torch_itself.compiling(has_compiler=find_compiler()[1] is not None):
            backend = "inductor" if check.state == OK else backend
            yield check
    yield from hooks.examine()
    yield from self_test.examine(backend)


def main() -> None:
    """Write the lines to what is stdout at the start; whatever else is printed goes to stderr."""
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)
        for check in examine(quick="--quick" in sys.argv[1:]):
            print(check.to_line(), file=lines, flush=True)


if __name__ == "__main__":
    main()
