"""How often a statement of some raw confidence was right: measured, not thought.

Counted by `benchmarks/bench_diagnosis.py` on its tuning half: planted faults, faults that have no
name (where every claim is a wrong one) and rounding. It also prints the held-out half beside this.
"""

from __future__ import annotations

__all__ = ["BUCKETS", "calibrated"]

# From this raw confidence on: what is stated, and the counts that it rests on (right, of all).
BUCKETS: tuple[tuple[float, float, int, int], ...] = (
    (0.0, 0.42, 11, 26),
    (0.7, 0.97, 132, 136),
    # All of them; but no count of some hundreds bears a certainty.
    (0.98, 0.99, 815, 815),
)


def calibrated(raw: float) -> float:
    """The share of such statements that turned out to be right; nothing for what is no number."""
    stated = 0.0
    for low, share, _, _ in BUCKETS:
        if raw >= low:
            stated = share
    return stated
