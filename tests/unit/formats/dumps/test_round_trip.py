"""What is written is read, bit for bit, with its facts."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from paritas.core.numerics.statistics import Statistics
from paritas.core.results.items import LocalPlacement
from paritas.formats.dumps.reading import Dump
from paritas.formats.dumps.writing import DumpWriter
from paritas.formats.files.records import Entry, Header
from unit.formats.files.entries import (
    PLAIN,
    abandon,
    bits,
    entry_of,
    facts_of,
    filled,
    site,
    write_dump,
)


@st.composite
def tensors(draw):
    """Any dtype, shape and stride: transposed, sliced, expanded, empty, of no dimension."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = filled(draw(st.sampled_from(PLAIN)), shape, seed=draw(st.integers(0, 99)))
    for change in draw(st.lists(st.sampled_from(["turn", "slice", "repeat", "index"]), max_size=4)):
        if change == "repeat" and tensor.dim() < 6:
            where = draw(st.integers(0, tensor.dim()))
            tensor = tensor.unsqueeze(where)
            sizes = [-1] * tensor.dim()
            sizes[where] = draw(st.integers(0, 5))
            tensor = tensor.expand(sizes)
        elif tensor.dim() and change == "turn":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        elif tensor.dim() and change == "slice":
            which = draw(st.integers(0, tensor.dim() - 1))
            step = draw(st.integers(1, 3))
            tensor = tensor[(slice(None),) * which + (slice(1, None, step),)]
        elif tensor.dim() and tensor.shape[0] and change == "index":
            tensor = tensor[-1]
    return tensor


@given(batch=st.lists(tensors(), min_size=1, max_size=8), closed=st.booleans())
def test_every_dtype_shape_and_stride_comes_back(tmp_path_factory, batch, closed):
    path = tmp_path_factory.mktemp("dump")
    writer = write_dump(path, batch, close=closed)
    if not closed:
        abandon(writer)
    dump = Dump.open(path)
    records = list(dump.records())
    assert len(records) == len(batch)
    for record, tensor in zip(records, batch, strict=True):
        assert record.tensor == facts_of(tensor)
        read = dump.read(record)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert bits(read) == bits(tensor)
    assert len(dump.problems) == (0 if closed else 1)


def test_everything_an_entry_says_is_in_its_record(tmp_path):
    tensor = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    entry = entry_of(
        tensor,
        sequence=0,
        step=7,
        site=site("block.0", call=2, side="input", position="mask", line="net.py:18, in forward"),
        statistics=Statistics(count=6, minimum=0.0, maximum=5.0, exponents=((0, 1), (1, 2))),
        sketch=torch.linspace(0, 1, 8),
        alias_of=None,
        placement=LocalPlacement(
            mesh=(2,),
            coordinate=(1,),
            placements=("shard(0)",),
            global_shape=(6, 2),
            global_offset=(3, 0),
        ),
    )
    header = Header(run="r", created="2026-01-01", notes=("a note",))
    writer = DumpWriter(tmp_path, header)
    written = writer.add(entry)
    writer.add(Entry(sequence=1, step=7, site=site("y"), value="None", alias_of=0))
    writer.close(header)
    dump = Dump.open(tmp_path)
    record, value = dump.records()
    assert record == written
    assert record.id == "forward/block.0#2/input.mask"
    assert (record.site, record.tensor) == (entry.site, entry.tensor)
    assert (record.statistics, record.placement) == (entry.statistics, entry.placement)
    assert torch.equal(dump.read_sketch(record), entry.sketch)
    assert (value.value, value.alias_of, value.payload) == ("None", 0, None)
    assert dump.header(0) == Header(
        run="r", created="2026-01-01", notes=("a note",), closed=True, records=2
    )


def test_what_is_read_is_the_readers_own(tmp_path):
    write_dump(tmp_path, [torch.zeros(4)])
    dump = Dump.open(tmp_path)
    (record,) = dump.records()
    dump.read(record).add_(1)
    assert dump.read(record).sum() == 0


def test_a_tensor_expanded_beyond_memory_is_written_and_read(tmp_path):
    tensor = torch.tensor([1.0, 2.0]).reshape(2, 1).expand(2, 1 << 40)
    writer = write_dump(tmp_path, [tensor])
    assert writer.written_bytes == 8
    dump = Dump.open(tmp_path)
    read = dump.read(next(dump.records()))
    assert read.shape == tensor.shape
    assert read[1, 12345] == 2


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantised_tensor_is_read_as_what_it_stood_for(tmp_path):
    tensor = torch.quantize_per_tensor(torch.tensor([[0.1, 0.2]]), 0.1, 0, torch.qint8)
    write_dump(tmp_path, [tensor.expand(3, 2), tensor])
    dump = Dump.open(tmp_path)
    first, second = dump.records()
    assert first.tensor.dtype == "qint8"
    assert torch.equal(dump.read(first), tensor.dequantize().expand(3, 2))
    assert first.payload.begin == second.payload.begin


def test_many_records_fill_several_files(tmp_path):
    count = 3000
    values = [torch.full((8,), float(number)) for number in range(count)]
    write_dump(tmp_path / "headers", values)
    write_dump(tmp_path / "bytes", values, largest_file=20_000)
    for name, least in (("headers", 3), ("bytes", 5)):
        dump = Dump.open(tmp_path / name)
        assert dump.problems == []
        assert least <= len(list((tmp_path / name / "rank0").glob("data-*"))) < 2 * least
        records = list(dump.records())
        assert len(records) == count
        for record in records[::97]:
            assert dump.read(record)[0] == record.sequence
