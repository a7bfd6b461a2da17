"""`python -m paritas.app.doctor [--quick]`: a line of JSON for each check that involves torch.

It runs in a process of its own: the parent reports even a crash of torch.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.app.doctor.examination import Check


def examine(*, quick: bool) -> Iterator[Check]:
    """Check torch and the hooks into it, and run the self-test."""
    from paritas.app.doctor import probes, self_test
    from paritas.app.doctor.examination import MISSING, OK, Check, find_compiler

    yield from self_test.torch_versions()
    yield from self_test.devices()
    backend = "aot_eager"
    if quick:
        yield Check("torch", "torch.compile", MISSING, "not tried because of --quick")
    else:
        for check in self_test.compiling(has_compiler=find_compiler()[1] is not None):
            backend = "inductor" if check.state == OK else backend
            yield check
    yield from probes.run_probes()
    yield from self_test.run_self_test(backend)


def main() -> None:
    """Write the lines to stdout; redirect all other output to stderr."""
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)
        for check in examine(quick="--quick" in sys.argv[1:]):
            print(check.to_line(), file=lines, flush=True)


if __name__ == "__main__":
    main()
