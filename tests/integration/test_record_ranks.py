"""Several processes write one dump, and what is split over them can be put together again."""

from __future__ import annotations

import textwrap

import pytest
import torch

import processes
from integration.once import made_once
from paritas.comparison.gathering import gather
from paritas.formats.dumps.reading import Dump

BEGIN = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import paritas

path = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)


class Keep(nn.Module):
    def forward(self, x):
        return x
"""


def run_ranks(folder, body, world_size=2):
    script = folder / "program.py"
    script.write_text(BEGIN + textwrap.dedent(body) + "\ndist.destroy_process_group()\n")
    ranks = processes.run_ranks(script, folder / "dump", world_size=world_size)
    return [rank.returncode for rank in ranks], [rank.stdout + rank.stderr for rank in ranks]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return made_once(tmp_path_factory, "recorded ranks", make)


def make(folder):
    codes, outputs = run_ranks(
        folder,
        """
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        whole = torch.randn(6, 4)
        part = torch.arange(8.0).reshape(2, 4) * (rank + 1)
        with paritas.capture(path), torch.no_grad():
            Keep()(distribute_tensor(whole, mesh, [Shard(0)]))
            nn.Identity()(DTensor.from_local(part, mesh, [Partial()]))
            nn.Flatten(0)(distribute_tensor(whole, mesh, [Replicate()]))
        with paritas.capture(path + "_stats", data="stats"), torch.no_grad():
            Keep()(distribute_tensor(whole, mesh, [Shard(1)]))
            nn.Identity()(DTensor.from_local(part, mesh, [Partial()]))
        with paritas.capture(path + "_of_one", ranks=[1]):
            nn.Linear(2, 2)(torch.ones(1, 2))
        if rank == 0:
            torch.save(whole, path + ".pt")
        """,
    )
    assert codes == [0, 0], outputs


def by_rank(dump, name):
    found = [r for r in dump.records() if r.site.name == name and r.site.side == "output"]
    return {record.rank: record for record in found}


@pytest.mark.slow
def test_two_ranks_write_one_dump(sharded):
    dump = Dump.open(sharded / "dump")
    assert sorted(dump.ranks) == [0, 1]
    assert dump.problems == []
    assert dump.header(0).run == dump.header(1).run
    assert dump.header(0).world_size == 2


@pytest.mark.slow
def test_shards_say_where_in_the_whole_they_lie(sharded):
    dump = Dump.open(sharded / "dump")
    whole = torch.load(sharded / "dump.pt")
    for rank, record in by_rank(dump, "Keep").items():
        place = record.placement
        assert place.placements == ("shard(0)",)
        assert place.mesh == (2,)
        assert place.mesh_names == ("tp",)
        assert place.coordinate == (rank,)
        assert place.global_shape == (6, 4)
        begin = place.global_offset[0]
        assert torch.equal(dump.read(record), whole[begin : begin + 3])


@pytest.mark.slow
def test_partial_and_replicated_values_say_so(sharded):
    dump = Dump.open(sharded / "dump")
    partial = by_rank(dump, "Identity")
    assert {r.placement.placements for r in partial.values()} == {("partial(sum)",)}
    total = dump.read(partial[0]) + dump.read(partial[1])
    assert torch.equal(total, torch.arange(8.0).reshape(2, 4) * 3)
    replicated = by_rank(dump, "Flatten")
    assert {r.placement.placements for r in replicated.values()} == {("replicate",)}


@pytest.mark.slow
def test_sketches_of_shards_add_up_to_that_of_the_whole(sharded):
    from paritas.core.numerics.sketch import sketch

    dump = Dump.open(sharded / "dump_stats")
    whole = torch.load(sharded / "dump.pt")
    for name, expected in [("Keep", whole), ("Identity", torch.arange(8.0).reshape(2, 4) * 3)]:
        parts = by_rank(dump, name)
        assert all(record.payload is None for record in parts.values())
        total = dump.read_sketch(parts[0]) + dump.read_sketch(parts[1])
        torch.testing.assert_close(total, sketch(expected))


@pytest.mark.slow
def test_what_two_ranks_recorded_is_put_together_for_a_comparison(sharded):
    dump = Dump.open(sharded / "dump")
    whole = torch.load(sharded / "dump.pt")
    found = gather(
        list(dump.records()), dims_for=lambda _: None, coordinates=lambda _: None, mesh={}
    )
    values = {
        one.record.site.name: one.read(dump.read)
        for one in found
        if one.record.site.side == "output"
    }
    assert all(one.ranks == (0, 1) for one in found if one.record.tensor is not None)
    assert torch.equal(values["Keep"], whole)
    assert torch.equal(values["Identity"], torch.arange(8.0).reshape(2, 4) * 3)
    assert torch.equal(values["Flatten"], whole.flatten())


@pytest.mark.slow
def test_a_rank_that_is_not_wanted_writes_nothing(sharded):
    assert sorted(Dump.open(sharded / "dump_of_one").ranks) == [1]
