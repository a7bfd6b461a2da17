"""Files changed at random: no reader may crash, hang, or take more memory than they merit."""

from __future__ import annotations

import os
import random
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from paritas.core.errors import ParitasError
from paritas.formats.foreign import npy_tree, plain_files, sglang

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# More of them where that is asked for: see tests/README.md.
MUTANTS = 600 if os.environ.get("PARITAS_WHOLE_CORPUS") else 80
TIMES = 64
ROOM = 1 << 20  # for what Python itself needs, whatever the file
SOME = torch.arange(48, dtype=torch.float32).reshape(6, 8)


def fx_files(folder: Path) -> None:
    top = folder / "worldsize1_global_rank0" / "graph_1" / "0"
    top.mkdir(parents=True)
    np.save(top / "mm-aten.mm.default.OUTPUT.0.20240125031118787351.npy", SOME.numpy())
    np.save(top / "mm-aten.mm.default.INPUT.1.20240125031118787351.npy", np.array(3))
    np.save(top / "to-aten.to.default.INPUT.1.20240125031118787352.npy", np.array(None))
    np.save(top / "to-aten.to.default.INPUT.2.20240125031118787352.npy", np.array("text"))
    summary = np.array([0.0, 1.0])
    np.save(top / "add-aten.add.Tensor.OUTPUT.0.20240125031118787353_min_max.npy", summary)
    np.save(top / "123.npy", SOME.numpy())
    (top / "mapping.csv").write_text("123,a-aten.a.default.OUTPUT.0.20240125031118787354\n")
    torch.save(SOME, folder / "worldsize1_global_rank0" / "mm_device_0_1.pt")


def plain(folder: Path) -> None:
    save_file({"w": SOME, "b": SOME[0].bfloat16()}, folder / "a.safetensors")
    np.savez(folder / "b.npz", x=SOME.numpy(), y=np.arange(5))
    np.savez_compressed(folder / "c.npz", x=np.zeros((20, 20)), y=SOME.numpy())
    np.save(folder / "d.npy", SOME.numpy())
    linear = torch.nn.Linear(3, 2)
    tree = {"model": linear.state_dict(), "t": SOME.t(), "e": SOME[:1].expand(9, 8), "step": 3}
    torch.save(tree, folder / "e.pt")


def sglang_files(folder: Path) -> None:
    meta = {"dims": "b h[tp]", "world_size": 2, "sglang_parallel_info": {"tp_rank": 0}}
    for index in range(3):
        name = f"step=0___rank=0___dump_index={index}___name=x___layer_id={index}.pt"
        torch.save({"value": {"a": SOME.t(), "b": [SOME]}, "meta": meta}, folder / name)


def mutant(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    kind = dice.randrange(5)
    at = dice.randrange(len(changed))
    if kind == 0:
        for _ in range(dice.randrange(1, 9)):
            changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    elif kind == 1:
        del changed[at:]
    elif kind == 2:  # a size or an offset that is far too large
        width = dice.choice((1, 2, 4, 8))
        number = dice.choice(
            (2 ** (8 * width) - 1, 2 ** (8 * width - 1), dice.getrandbits(8 * width))
        )
        changed[at : at + width] = number.to_bytes(width, "little")
    elif kind == 3:
        changed[at:at] = changed[at : at + dice.randrange(1, 64)]
    else:  # a number of a header that is written in digits
        digits = [place for place, byte in enumerate(changed) if chr(byte).isdecimal()]
        if digits:
            place = dice.choice(digits)
            changed[place : place + 1] = str(dice.getrandbits(70)).encode()
    return bytes(changed)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many bytes were asked of torch, which tracemalloc does not see."""
    sizes: list[int] = []
    real = torch.empty

    def watched(*shape: Any, **options: Any) -> torch.Tensor:
        made = real(*shape, **options)
        sizes.append(made.untyped_storage().nbytes())
        return made

    monkeypatch.setattr(torch, "empty", watched)
    tracemalloc.start()
    yield sizes
    tracemalloc.stop()


READERS = [
    (npy_tree.open_dump, fx_files, False),
    (plain_files.open_dump, plain, True),
    (sglang.open_dump, sglang_files, True),
]


@pytest.mark.parametrize(("reader", "write", "alone"), READERS, ids=["fx", "files", "sglang"])
def test_files_changed_at_random_do_no_harm(
    tmp_path: Path,
    taken: list[int],
    reader: Callable[[Path], Any],
    write: Callable[[Path], None],
    alone: bool,
) -> None:
    torch.manual_seed(0)
    write(tmp_path)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    whole = {path: path.read_bytes() for path in files}
    dice = random.Random(0)
    refused = 0
    for _ in range(MUTANTS):
        path = dice.choice(files)
        path.write_bytes(mutant(whole[path], dice))
        taken.clear()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        refused += _go_through(reader, path if alone else tmp_path)
        total = len(whole[path]) if alone else sum(map(len, whole.values()))
        assert tracemalloc.get_traced_memory()[1] - before < TIMES * total + ROOM
        assert max(taken, default=0) <= TIMES * total
        path.write_bytes(whole[path])
    assert refused > MUTANTS // 10  # else the changes would not have been worth the name


def _go_through(reader: Callable[[Path], Any], path: Path) -> bool:
    """Whether anything was refused; whatever is no error of paritas comes through."""
    try:
        dump = reader(path)
    except ParitasError:
        return True
    refused = bool(dump.problems)
    for record in dump.records():
        try:
            values = dump.read(record)
        except ParitasError:
            refused = True
            continue
        assert record.tensor is None or tuple(values.shape) == record.tensor.shape
        if values.numel() <= 10_000:
            values.contiguous()
    return refused
