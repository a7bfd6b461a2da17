"""Damaged files of Ascend's graph engine: nothing worse than a message comes of them."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc

import numpy as np
import pytest
import torch

from paritas.core.errors import ParitasError
from paritas.formats.foreign import ge_tensors
from paritas.formats.foreign.ge_dump import open_dump
from paritas.formats.foreign.ge_graphs import read_graph
from unit.formats.foreign import ge_files as ge
from unit.formats.foreign.ge_graph_texts import graph_text, op_text

SEED = 20240130
WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
# Of the files that are damaged, the usual run has a fourth.
SHARE = 1 if WHOLE else 4
# Enough for what Python itself needs for a handful of records.
ALWAYS_TAKEN = 1 << 20


def seeds():
    """Whole files, each with something of its own."""
    half = np.float16(np.arange(24).reshape(2, 3, 4))
    tiled = ge.to_tiles(np.int32(np.arange(400).reshape(20, 20)), 16, 16, 0)
    blocked = ge.to_blocks(
        np.int32(np.arange(72).reshape(2, 9, 2, 2)),
        "NCHW",
        ("N", "C1", "H", "W", "C0"),
        {"C": 8},
        0,
    )
    yield ge.ge_bytes(
        [ge.tensor(half, ge.F16), ge.tensor(np.bool_([1, 0]), ge.BOOL)],
        [ge.tensor(half, ge.F16)],
        buffers=[b"abc"],
        space=[b"defg"],
        attrs=[("thread", "{}")],
    )
    yield ge.ge_bytes([ge.tensor(tiled, ge.I32, format=29) | {"original": (20, 20)}])
    yield ge.ge_bytes([], [ge.tensor(blocked, ge.I32, format=3) | {"original": (2, 9, 2, 2)}])
    yield ge.ge_bytes([{"payload": bytes(8), "dtype": ge.INT4, "shape": (16,), "original": (16,)}])
    yield ge.nano_bytes(
        [(bytes(24), 0, (2, 3), (2, 3))], [(bytes(4), 1, (2,), (2,)), (bytes(8), 9, (1,), (1,))]
    )


def mutated(data, rng):
    """The file with some bits turned, its end cut off, a size made larger, or several of these."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 2)):
        kind = rng.choice([0, 0, 0, 0, 1, 2, 3, 3, 4])
        if kind == 0 and data:
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[rng.randrange(len(data) + 1) :]
        elif kind == 2:
            size = rng.choice([0, 1, 2**31, 2**40, 2**63, 2**64 - 1, len(data), len(data) * 2])
            data[:8] = struct.pack("<Q", size)
        elif kind == 3 and data:
            at = rng.randrange(min(len(data), 120))
            data[at : at + 1] = ge.varint(rng.choice([0, 127, 2**32, 2**62, 2**63, 2**64 - 1]))
        else:
            data[8 : 8 + rng.randint(0, 30)] = rng.randbytes(rng.randint(0, 30))
    return bytes(data)


def use_all(folder):
    """Open a dump and read what is in it; gives how many values came out."""
    count = 0
    try:
        dump = open_dump(folder)
    except ParitasError:
        return 0
    for record in dump.records():
        try:
            values = dump.read(record)
        except ParitasError:
            continue
        assert record.tensor is not None
        assert tuple(values.shape) == record.tensor.shape
        count += values.numel()
    return count


def test_damaged_tensor_files_do_no_harm(tmp_path, monkeypatch):
    rng = random.Random(SEED)
    originals = list(seeds())
    path = ge.write(tmp_path, "", ge.file_name("Add", "Add_2"), originals[0])
    asked = []
    empty = torch.empty
    monkeypatch.setattr(
        ge_tensors.torch, "empty", lambda size, **more: asked.append(size) or empty(size, **more)
    )
    counts = []
    for number in range(1000 // SHARE):
        data = mutated(originals[number % len(originals)], rng)
        path.write_bytes(data)
        asked.clear()
        counts.append(use_all(tmp_path))
        # A tensor never takes more than its bytes in the file, and an element an eighth of one.
        assert max(asked, default=0) <= len(data)
        assert counts[-1] <= 8 * len(data)
    assert (
        sum(count > 0 for count in counts) > 100 // SHARE
    )  # some damage leaves something to be read


def test_damaged_headers_take_no_memory(tmp_path):
    rng = random.Random(SEED)
    originals = list(seeds())
    path = ge.write(tmp_path, "", ge.file_name("Add", "Add_2"), originals[0])
    use_all(tmp_path)
    tracemalloc.start()
    try:
        for number in range(200 // SHARE):
            path.write_bytes(mutated(originals[number % len(originals)], rng))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            use_all(tmp_path)
            assert tracemalloc.get_traced_memory()[1] - before < ALWAYS_TAKEN
        # The most that can be said in few bytes: many tensors.
        header = b"\x22\x00" * 1000
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        use_all(tmp_path)
        assert tracemalloc.get_traced_memory()[1] - before < 8 * ALWAYS_TAKEN
    finally:
        tracemalloc.stop()


def test_damaged_graphs_do_no_harm(tmp_path):
    rng = random.Random(SEED)
    text = graph_text(
        op_text("x", "Data", outputs=[""]),
        op_text("Add_2", "Add", ["x:0"], outputs=["add-aten.OUTPUT.0"], meta='a: {"b"} \\'),
        op_text("F", "Fused", ["Add_2:0"], outputs=["f-x.OUTPUT.0"], originals=["Add_2"]),
    ).encode()
    path = tmp_path / "dynamo_original_graph_1_rank_0_pid_1_ts_2.txt"
    read = 0
    for _ in range(600 // SHARE):
        data = bytearray(text)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            if rng.random() < 0.3:
                del data[at:]
                data = data or bytearray(b" ")
            elif rng.random() < 0.5:
                data[at] ^= 1 << rng.randrange(8)
            else:
                data[at:at] = rng.choice([b"{", b"}", b'"', b"\\", b"op {", b"[", b"\n", b"\xff"])
        path.write_bytes(data)
        try:
            graph = read_graph(path)
        except ParitasError:
            continue
        read += 1
        graph.split("Add_2F")
        for op in graph.ops.values():
            assert graph.outside((op,)) is not None
    assert read > 50 // SHARE


def test_a_graph_takes_a_few_times_its_own_size(tmp_path):
    path = tmp_path / "dynamo_original_graph_1.txt"
    text = "".join(f'op{{name:"{number:x}"}}' for number in range(6000))
    path.write_text(text, encoding="utf-8")
    tracemalloc.start()
    try:
        assert len(read_graph(path).ops) == 6000
        assert tracemalloc.get_traced_memory()[1] < 20 * len(text)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", [".csv", "_min_max.npz"])
def test_damaged_statistics_do_no_harm(tmp_path, suffix):
    rng = random.Random(SEED)
    path = tmp_path / f"{ge.file_name('Add', 'Add_2')}{suffix}"
    if suffix == ".csv":
        columns = "Input/Output,Index,Data Size,Data Type,Format,Shape,Max Value,Min Value,Count"
        path.write_text(f"{columns}\nInput,0,12,DT_FLOAT16,ND,2x3,1.5,-2,6\n", encoding="utf-8")
    else:
        np.savez(path, inputs=np.ones((3, 2)), outputs=np.ones((1, 2)))
    original = path.read_bytes()
    found = 0
    for _ in range(500 // SHARE):
        data = bytearray(original)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data[: rng.randint(1, len(data))] if rng.random() < 0.2 else data)
        try:
            found += sum(one.statistics is not None for one in open_dump(tmp_path).records())
        except ParitasError:
            continue
    assert found > 50 // SHARE


def test_damaged_mappings_do_no_harm(tmp_path):
    rng = random.Random(SEED)
    ge.write(tmp_path, "", "12345", ge.ge_bytes([ge.tensor(np.float32([1]), ge.F32)]))
    ge.write(tmp_path, "", ge.file_name("Add", "Add_2"), ge.ge_bytes())
    original = f'12345,{ge.file_name("Add", "Add_3")}\n"6,7\n'.encode()
    for _ in range(200 // SHARE):
        data = bytearray(original)
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        ge.write(tmp_path, "", "mapping.csv", bytes(data))
        use_all(tmp_path)
