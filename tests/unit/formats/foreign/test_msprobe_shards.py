import pytest
import torch

from paritas.formats.foreign.msprobe import open_dump
from unit.formats.foreign.msprobe_dumps import tensor, write_process

SHARD = {"Shard": {"dim": 0}}
REPLICATE = {"Replicate": {}}
PARTIAL = {"Partial": {"reduce_op": "sum"}}


def distributed(shape, mesh, placements):
    leaf = tensor(torch.ones(shape)) | {"type": "torch.distributed.tensor.DTensor"}
    return leaf | {"device_mesh": mesh, "placements": placements}


def write_rank(folder, rank, leaf, step=0):
    write_process(folder / f"step{step}/rank{rank}", {"Torch.f.0.forward": {"output": [leaf]}})


def test_shards_of_unequal_size_are_parts_of_one_whole(tmp_path):
    for rank, rows in enumerate((3, 3, 1)):
        write_rank(tmp_path, rank, distributed((rows, 2), [0, 1, 2], [SHARD]))
    dump = open_dump(tmp_path)
    assert dump.problems == []
    found = [record.placement for record in dump.records()]
    assert [one.global_offset for one in found] == [(0, 0), (3, 0), (6, 0)]
    assert {(one.global_shape, one.placements, one.mesh) for one in found} == {
        ((7, 2), ("shard(0)",), (3,))
    }


def test_a_mesh_of_two_dimensions_is_followed(tmp_path):
    mesh = [[0, 2], [1, 3]]
    for rank in range(4):
        columns = 5 if rank < 2 else 4
        leaf = distributed((6, columns), mesh, [PARTIAL, {"Shard": {"dim": -1}}])
        write_rank(tmp_path, rank, leaf)
    found = {record.rank: record.placement for record in open_dump(tmp_path).records()}
    assert {rank: one.coordinate for rank, one in found.items()} == {
        0: (0, 0),
        1: (1, 0),
        2: (0, 1),
        3: (1, 1),
    }
    assert found[3].global_shape == (6, 9)
    assert found[3].global_offset == (0, 5)
    assert found[3].placements == ("partial(sum)", "shard(1)")


def test_a_replicated_tensor_is_the_whole(tmp_path):
    write_rank(tmp_path, 1, distributed((4,), [0, 1], [REPLICATE]))
    (record,) = open_dump(tmp_path).records()
    assert record.placement.global_shape == (4,)
    assert record.placement.coordinate == (1,)


@pytest.mark.parametrize(
    ("mesh", "placements", "reason"),
    [
        ([0, 1], [SHARD], "rank 1 did not record its part of the tensor"),
        ([[0, 1], [2, 3]], [SHARD, SHARD], "one dimension is sharded over several mesh dimensions"),
        ([5, 6], [REPLICATE], "its mesh has only the ranks [5, 6]"),
        ([0, 1], [], "its placements on a mesh of (2,) are not valid: []"),
        ([0, 1], [{"Shard": {"dim": 2}}], "its placement {'Shard': {'dim': 2}}"),
        ([0, 1], [{"Partial": {"reduce_op": "a b"}}], "its placement {'Partial'"),
        ([[0], [1, 2]], [SHARD], "its mesh [[0], [1, 2]]"),
        ([], [], "its mesh []"),
        ([[[[[[[[[[0]]]]]]]]]], [SHARD], "its mesh [[[[[[[[[[0]]]]]]]]]]"),
        (None, [SHARD], "its mesh None"),
    ],
)
def test_what_cannot_be_put_together_is_told_and_stays_a_local_tensor(
    tmp_path, mesh, placements, reason
):
    write_rank(tmp_path, 0, distributed((4, 2), mesh, placements))
    dump = open_dump(tmp_path)
    (record,) = dump.records()
    assert record.placement is None
    assert record.tensor.shape == (4, 2)
    (problem,) = dump.problems
    assert reason in problem
