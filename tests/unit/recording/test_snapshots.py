"""Copies of values, and the memory that they are made in."""

from __future__ import annotations

import torch

from paritas.recording.pipeline import CopyPool, Snapshot, kind_of


def taken(tensor, known, pool):
    return Snapshot(tensor, kind_of(tensor), None, known, pool)


def test_what_is_known_is_not_copied_again():
    known, pool = set(), CopyPool(1 << 20)
    first, again = (taken(torch.arange(6.0), known, pool) for _ in range(2))
    assert first.wait() is not None
    assert again.wait() is None
    assert again.key == first.key
    assert again.nbytes == 0


def test_the_memory_of_a_copy_serves_the_next_of_its_size():
    pool = CopyPool(1 << 20)
    first = taken(torch.zeros(100), set(), pool)
    place = first.wait().data_ptr()
    other = taken(torch.ones(100), set(), pool)
    assert other.wait().data_ptr() != place  # the first one is still looked at
    first.release()
    assert first.wait() is None
    second = taken(torch.full((100,), 2.0), set(), pool)
    assert second.wait().data_ptr() == place
    assert second.wait().tolist() == [2.0] * 100


def test_memory_that_is_kept_has_a_bound():
    pool = CopyPool(1000)
    shots = [taken(torch.full((100,), float(k)), set(), pool) for k in range(5)]
    for shot in shots:
        shot.release()
    places = {shot for shot in pool._free.values() for shot in map(torch.Tensor.data_ptr, shot)}
    assert len(places) <= 2
    large = taken(torch.zeros(1000), set(), pool)
    large.release()
    assert not any(pool._free.values())


def test_a_copy_keeps_every_bit():
    odd = torch.arange(64, dtype=torch.uint8).view(torch.bool)
    shot = taken(odd, set(), CopyPool(1 << 20))
    assert shot.wait().view(torch.uint8).tolist() == list(range(64))
