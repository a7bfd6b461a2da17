"""Two dumps of several ranks: what is compared rank by rank, and what is put together."""

from __future__ import annotations

import math

import pytest
import torch
from msgspec.structs import replace

from paritas.comparison.gathering import operands
from paritas.comparison.rules import Rules
from paritas.core.errors import UsageError
from paritas.formats.files.records import Header
from paritas.formats.foreign import sglang
from unit.comparison.shards import Ranks

WHOLE = torch.arange(48.0).reshape(4, 12)


class Recorded(Ranks):
    """Parts, with what `operands` asks of a dump."""

    def __init__(self, world_size=1):
        super().__init__()
        self._world_size = world_size

    @property
    def ranks(self):
        return {record.rank: None for record in self.parts}

    def header(self, rank):
        return Header(run="a" * 32, rank=rank, world_size=self._world_size)

    def records(self):
        return iter(sorted(self.parts, key=lambda one: (one.rank, one.sequence)))


def single(whole=WHOLE, **more):
    dump = Recorded()
    dump.add(0, whole, **more)
    return dump


def plain(count, tensors, **more):
    dump = Recorded(count)
    for rank, tensor in zip(range(count), tensors, strict=True):
        dump.add(rank, tensor, **more)
    return dump


def shown(found):
    return [(one.record.site.name, one.ranks, one.words) for one in found]


def test_dumps_of_one_rank_are_compared_record_by_record():
    mine, golden, notes = operands(single(), single(), Rules())
    assert shown(mine) == shown(golden) == [("x", (0,), "")]
    assert notes == []


def test_what_is_split_alike_is_compared_rank_by_rank():
    dumps = [Recorded(2).distribute(WHOLE, (2,), ("shard(0)",)) for _ in range(2)]
    mine, golden, notes = operands(*dumps, Rules())
    assert shown(mine) == shown(golden) == [("x", (0,), ""), ("x", (1,), "")]
    assert notes == []


@pytest.mark.parametrize(
    "golden",
    [
        single(),
        Recorded(2).distribute(WHOLE, (2,), ("shard(1)",)),
        Recorded(4).distribute(WHOLE, (2, 2), ("shard(0)", "partial(sum)")),
    ],
    ids=["whole", "split otherwise", "more ranks"],
)
def test_what_is_split_otherwise_is_put_together_on_both_sides(golden):
    dump = Recorded(2).distribute(WHOLE, (2,), ("shard(0)",))
    (mine,), (theirs,), notes = operands(dump, golden, Rules())
    assert torch.equal(mine.read(dump.read), WHOLE)
    assert torch.equal(theirs.read(golden.read), WHOLE)
    assert notes == []


def test_each_name_is_decided_by_itself_and_the_order_of_the_program_is_kept():
    dumps = []
    for second in ("shard(0)", "shard(1)"):
        dump = Recorded(2)
        for name, placement in (("a", "shard(0)"), ("b", second), ("c", "shard(0)")):
            dump.distribute(WHOLE, (2,), (placement,), name=name)
        dumps.append(dump)
    mine, golden, _ = operands(*dumps, Rules())
    expected = [("a", (0,)), ("b", (0, 1)), ("c", (0,)), ("a", (1,)), ("c", (1,))]
    assert [item[:2] for item in shown(mine)] == expected
    assert [item[:2] for item in shown(golden)] == expected


def test_ranks_that_nothing_is_said_of_stay_apart_and_a_note_says_so():
    dump = plain(2, WHOLE.chunk(2, dim=1))
    mine, golden, notes = operands(dump, single(), Rules())
    assert [one.ranks for one in mine] == [(0,), (1,)]
    assert [one.ranks for one in golden] == [(0,)]
    (note,) = notes
    assert note == (
        "1 value on ranks 0-1 in my dump and on rank 0 in the golden dump: nothing says how they "
        "are split, so they are compared by rank number. Use --dims and --mesh to "
        "describe the split. The first is forward/x#0/output.0, [4, 6] and [4, 12]: dimension 1 "
        "appears to be split"
    )


def test_what_all_ranks_hold_alike_is_one():
    digest = "0123456789abcdef" * 2
    dump = plain(3, [WHOLE] * 3, digest=digest)
    (mine,), _, notes = operands(dump, single(), Rules())
    assert mine.words == "the same on ranks 0-2"
    assert torch.equal(mine.read(dump.read), WHOLE)
    assert notes == []


def without_tensors(dump, *values):
    dump.parts = [
        replace(part, tensor=None, payload=None, value=value)
        for part, value in zip(dump.parts, values, strict=True)
    ]
    return dump


def test_numbers_that_all_ranks_hold_alike_are_one():
    golden = without_tensors(single(), "3")
    alike = without_tensors(plain(2, [WHOLE] * 2), "3", "3")
    (mine,), _, notes = operands(alike, golden, Rules())
    assert (mine.ranks, notes) == ((0, 1), [])
    unlike = without_tensors(plain(2, [WHOLE] * 2), "3", "4")
    mine, _, notes = operands(unlike, golden, Rules())
    assert ([one.ranks for one in mine], len(notes)) == ([(0,), (1,)], 1)


def test_an_annotation_of_the_users_says_how():
    rules = Rules.of(dims=[("x", "b h[tp]")], mesh="tp=2")
    dump = plain(2, WHOLE.chunk(2, dim=1))
    (mine,), (golden,), notes = operands(dump, single(), rules)
    assert torch.equal(mine.read(dump.read), WHOLE)
    assert golden.recipe is None
    assert notes == []


def test_the_last_axis_of_a_mesh_varies_fastest():
    rules = Rules.of(dims=[("x", "b[cp] h[tp]")], mesh="tp=3,cp=2")
    parts = [half for third in WHOLE.chunk(3, dim=1) for half in third.chunk(2)]
    dump = plain(6, parts)
    (mine,), _, _ = operands(dump, single(), rules)
    assert torch.equal(mine.read(dump.read), WHOLE)


def test_ranks_beyond_the_mesh_are_copies_and_a_note_says_so():
    rules = Rules.of(dims=[("x", "b h[tp]")], mesh="tp=2")
    dump = plain(4, WHOLE.chunk(2, dim=1) * 2)
    (mine,), _, notes = operands(dump, single(), rules)
    assert torch.equal(mine.read(dump.read), WHOLE)
    assert notes == [
        (
            "the mesh tp=2 covers 2 of the 4 ranks of my dump: the other ranks are treated as "
            "copies and must agree"
        )
    ]


def test_a_mesh_that_does_not_divide_the_ranks_is_refused():
    rules = Rules.of(dims=[("x", "b h[tp]")], mesh="tp=2")
    dump = plain(3, WHOLE.chunk(3, dim=1))
    (mine,), _, _ = operands(dump, single(), rules)
    with pytest.raises(UsageError, match="the mesh tp=2 has 2 ranks, but my dump has 3"):
        mine.read(dump.read)


def test_a_rank_that_was_not_recorded_is_missed():
    rules = Rules.of(dims=[("x", "b h[tp]")], mesh="tp=2")
    dump = Recorded(2)
    dump.add(0, WHOLE[:, :6])
    (mine,), _, _ = operands(dump, single(), rules)
    with pytest.raises(UsageError, match=r"1 of 2 parts are missing: rank 1 \(tp 1\)"):
        mine.read(dump.read)


def test_a_bad_annotation_is_told_at_once():
    with pytest.raises(UsageError, match="zigzig"):
        operands(single(), single(), Rules.of(dims=[("y", "b[cp:zigzig]")]))


# --- SGLang ---------------------------------------------------------------------------------------


def save(folder, rank, value, dims, **sizes):
    """A file as SGLang's dumper writes it, with where the rank is among the others."""
    folder.mkdir(exist_ok=True)
    world = math.prod(size for size, _ in sizes.values())
    info = {f"{axis}_rank": at for axis, (_, at) in sizes.items()}
    info |= {f"{axis}_size": size for axis, (size, _) in sizes.items()}
    meta = {"dims": dims, "sglang_parallel_info": info, "world_size": world}
    name = f"step=0___rank={rank}___dump_index=1___name=attn.pt"
    torch.save({"value": value, "meta": meta}, folder / name)


def test_dumps_of_sglang_are_put_together_as_they_say(tmp_path):
    whole = torch.arange(2 * 8 * 4.0).reshape(2, 8, 4)
    chunks = whole.chunk(4, dim=1)
    for rank in range(4):
        cp, tp = divmod(rank, 2)
        local = torch.cat([chunks[cp], chunks[3 - cp]], dim=1).chunk(2, dim=2)[tp]
        place = {"cp": (2, cp), "tp": (2, tp)}
        save(tmp_path / "my", rank, local.clone(), "b s[cp:zigzag] h[tp]", **place)
    # The golden run has one rank, the other order of dimensions, and one of length 1 more.
    save(tmp_path / "golden", 0, whole.transpose(0, 1)[:, None], "s 1 b h[tp]", tp=(1, 0))
    my, golden = (sglang.open_dump(tmp_path / name) for name in ("my", "golden"))
    (mine,), (theirs,), notes = operands(my, golden, Rules())
    assert notes == []
    assert torch.equal(mine.read(my.read), whole.transpose(0, 1))
    assert torch.equal(theirs.read(golden.read), whole.transpose(0, 1))
    assert mine.words == (
        "put together from ranks 0-3: dimension 1 over cp, dimension 2 over tp, then dimensions "
        "rearranged to s b h"
    )


def test_a_bad_annotation_of_a_dump_is_the_row_s_alone(tmp_path):
    for rank in (0, 1):
        save(tmp_path / "my", rank, WHOLE, "b h[tp", tp=(2, rank))
    save(tmp_path / "golden", 0, WHOLE, "b h", tp=(1, 0))
    my, golden = (sglang.open_dump(tmp_path / name) for name in ("my", "golden"))
    (mine,), _, _ = operands(my, golden, Rules())
    with pytest.raises(UsageError, match="not a dimension"):
        mine.read(my.read)
