"""What the metrics of one pair cost, as ratios to plain torch: 16M pairs of float32.

Wall-clock seconds with torch's default number of threads, alternating, the minimum of each.
"""

from __future__ import annotations

import torch
from benchmarks.lab.figures import Figure, Report, write
from benchmarks.lab.timing import in_turns

from paritas.core.numerics.metrics import bitwise_equal, pair_metrics

NUMEL = 16 << 20
ROUNDS = 7


def main():
    torch.manual_seed(0)
    a = torch.randn(NUMEL)
    same, near, room = a.clone(), a + 1e-6 * torch.randn(NUMEL), torch.empty(NUMEL)
    assert bitwise_equal(a, same)
    assert pair_metrics(a, near).mismatched
    functions = {
        "copy": lambda: room.copy_(a),
        "equal": lambda: torch.equal(a, same),
        "largest": lambda: (a.double() - near.double()).abs().max(),
        "bits": lambda: bitwise_equal(a, same),
        "apart": lambda: pair_metrics(a, near),
        "alike": lambda: pair_metrics(a, same),
    }
    spent = in_turns(functions, ROUNDS, take="least")
    wall = {name: one.wall for name, one in spent.items()}
    largest = "x (a.double() - b.double()).abs().max()"
    figures = [
        Figure("bitwise_equal, equal", wall["bits"] / wall["equal"], "x torch.equal"),
        Figure("pair_metrics, equal", wall["alike"] / wall["equal"], "x torch.equal"),
        Figure("pair_metrics, all different", wall["apart"] / wall["largest"], largest),
        Figure("the same, against a copy", wall["apart"] / wall["copy"], "x one copy"),
    ]
    write(Report("metrics", figures, what=__doc__))


if __name__ == "__main__":
    main()
