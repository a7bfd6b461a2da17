"""What the metrics cost, as ratios to plain torch within one run: 16M pairs of float32."""

from __future__ import annotations

import time

import torch

from paritas.numerics.metrics import bitwise_equal, pair_metrics

NUMEL = 16 << 20
ROUNDS = 7


def best(function):
    """Least seconds of several rounds: what the machine does when nothing disturbs it."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def main():
    torch.manual_seed(0)
    a = torch.randn(NUMEL)
    same, near, room = a.clone(), a + 1e-6 * torch.randn(NUMEL), torch.empty(NUMEL)
    assert bitwise_equal(a, same)
    assert pair_metrics(a, near).mismatched

    copy = best(lambda: room.copy_(a))
    equal = best(lambda: torch.equal(a, same))
    largest = best(lambda: (a.double() - near.double()).abs().max())
    bits = best(lambda: bitwise_equal(a, same))
    apart = best(lambda: pair_metrics(a, near))
    alike = best(lambda: pair_metrics(a, same))

    baseline = "(a.double() - b.double()).abs().max()"
    print(f"{NUMEL >> 20}M float32 pairs, {torch.get_num_threads()} thread(s), times of")
    print(f"  bitwise_equal, equal tensors  {bits / equal:6.2f} x torch.equal(a, b)")
    print(f"  pair_metrics, equal tensors   {alike / equal:6.2f} x torch.equal(a, b)")
    print(f"  pair_metrics, all different   {apart / largest:6.2f} x {baseline}")
    print(f"  pair_metrics, all different   {apart / copy:6.2f} x one copy")


if __name__ == "__main__":
    main()
