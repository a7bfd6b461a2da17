"""Small dumps in every layout that is read, and single bytes of them changed."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import shutil
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from integration.dump_making import Making, site, values
from paritas.comparison.compare import compare
from paritas.core.errors import UsageError
from paritas.core.numerics.sketch import sketch
from paritas.core.results.findings import Status
from paritas.formats.dumps.opening import open_dump
from unit.formats.files.entries import bits
from unit.formats.foreign import ge_files as ge
from unit.formats.foreign.msprobe_dumps import linear_program, tensor, write_process

TENSORS = {
    "w": values(5, 8),
    "half": values(3, 4, seed=1, dtype=torch.bfloat16),
    "counts": torch.arange(7),
    "flags": torch.tensor([True, False, True]),
}
ARRAYS = {name: value.float().numpy() for name, value in TENSORS.items()}
STAMP = "20240125031118787351"


# --- every layout that is read --------------------------------------------------------------------


def packed(path, **facts):
    for rank in range(2):
        making = Making(path, rank=rank, world_size=2, **facts)
        x = values(4, 8, seed=rank)
        for layer in range(2):
            y = x.cos() + layer
            making.call(f"layers.{layer}/aten.log.default", [x, 0.5], y)
            x = y
        making.add(site("mask"), values(1, 6).expand(3, 6))
        making.close()


def msit(path):
    packed(path, layout="msit")


def stats(path):
    making = Making(path, data="stats")
    for number in range(3):
        value = values(4, 8, seed=number)
        making.add(site(f"layers.{number}/aten.log.default"), value, sketch=sketch(value))
    making.close()


def msprobe(path):
    linear_program(path / "step0" / "rank0")


def msprobe_numpy(path):
    rank = path / "step0" / "rank0"
    leaf = tensor(TENSORS["w"], file="Functional.f.0.forward.output.0.npy")
    write_process(rank, {"Functional.f.0.forward": {"input_args": [], "output": [leaf]}})
    (rank / "dump_tensor_data").mkdir()
    np.save(rank / "dump_tensor_data" / "Functional.f.0.forward.output.0.npy", ARRAYS["w"])


def msprobe_statistics(path):
    leaves = [tensor(value) for name, value in TENSORS.items() if name in ("w", "counts")]
    data = {"Functional.f.0.forward": {"input_args": leaves[1:], "output": leaves[:1]}}
    write_process(path / "step0" / "rank0", data)


def npy(path):
    for name, array in ARRAYS.items():
        np.save(path / f"{name}.npy", array)


def npz(path):
    np.savez(path / "all.npz", **ARRAYS)


def npz_compressed(path):
    np.savez_compressed(path / "all.npz", **ARRAYS, zeros=np.zeros((9, 9)))


def pt(path):
    tree = {**TENSORS, "t": TENSORS["w"].t(), "step": 3, "nested": {"x": [TENSORS["w"][1:3]]}}
    torch.save(tree, path / "all.pt")


def safetensors(path):
    save_file(TENSORS, path / "all.safetensors")


def sglang(path):
    for index, value in enumerate(TENSORS.values()):
        name = f"step=0___rank=0___dump_index={index}___name=x{index}.pt"
        torch.save({"value": value, "meta": {"dims": "b h"}}, path / name)


def fx(path):
    top = path / "worldsize1_global_rank0" / "graph_1" / "0"
    top.mkdir(parents=True)
    np.save(top / f"mm-aten.mm.default.OUTPUT.0.{STAMP}.npy", ARRAYS["w"])
    np.save(top / f"mm-aten.mm.default.INPUT.1.{STAMP}.npy", np.array(3))
    np.save(top / f"to-aten.to.default.INPUT.2.{STAMP}.npy", np.array("text"))
    np.save(top / f"add-aten.add.Tensor.OUTPUT.0.{STAMP}_min_max.npy", np.array([-1.5, 2.5]))
    torch.save(TENSORS["w"], path / "worldsize1_global_rank0" / "mm_device_0_1.pt")


def graph_engine(path):
    given, made = ARRAYS["w"], ARRAYS["w"] * 2
    data = ge.ge_bytes([ge.tensor(given, ge.F32)], [ge.tensor(made, ge.F32)], name="Add_2")
    ge.write(path, ge.STEP, ge.file_name("Add", "Add_2"), data)
    pairs = {"inputs": np.array([[-1.0, 2.0]]), "outputs": np.array([[-3.0, 4.0]])}
    folder = path / ge.STEP
    np.savez(folder / f"{ge.file_name('Mul', 'Mul_3')}_min_max.npz", **pairs)


LAYOUTS = {
    make.__name__: make
    for make in (
        packed, msit, stats, msprobe, msprobe_numpy, msprobe_statistics, npy, npz, npz_compressed,
        pt, safetensors, sglang, fx, graph_engine,
    )
}  # fmt: skip

# How the library that writes such files reads them, as far as there is one.
LIBRARIES = {
    "npy": lambda path: {file.name: np.load(file) for file in path.iterdir()},
    "npz": lambda path: dict(np.load(path / "all.npz")),
    "npz_compressed": lambda path: dict(np.load(path / "all.npz")),
    "safetensors": lambda path: load_file(path / "all.safetensors"),
    "pt": lambda path: torch.load(path / "all.pt", weights_only=True),
}


def make(layout, path):
    path.mkdir()
    LAYOUTS[layout](path)
    return path


# --- one byte changed -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Flip:
    """A byte of a file, and which of its bits are turned."""

    file: str
    at: int
    mask: int

    def apply(self, path):
        place = path / self.file
        data = bytearray(place.read_bytes())
        data[self.at] ^= self.mask
        place.write_bytes(data)


def flips(path, count, seed):
    """Bytes anywhere in a dump, every file in turn: small ones say as much as large ones."""
    dice = random.Random(seed)
    files = sorted(one for one in path.rglob("*") if one.is_file() and one.stat().st_size)
    found = []
    for number in range(count):
        file = files[number % len(files)]
        # Half of them beyond the first zero bytes of a header that has room to grow.
        content = file.read_bytes()
        places = (
            range(len(content)) if number % 2 else [i for i, byte in enumerate(content) if byte]
        )
        at = dice.choice(places)
        found.append(Flip(file.relative_to(path).as_posix(), at, _mask(content[at], dice)))
    return found


def _mask(byte, dice):
    """One bit, any bits, or those that make another letter or digit: text stays text."""
    for letters in (b"0123456789", b"abcdefghijklmnopqrstuvwxyz"):
        if byte in letters and dice.random() < 0.5:
            return byte ^ dice.choice([other for other in letters if other != byte])
    return dice.choice((1 << dice.randrange(8), dice.randrange(1, 256)))


def flipped(golden, flip, path):
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(golden, path)
    flip.apply(path)
    return path


def outcome(my, golden):
    """How a comparison ends: a status, or `refused` with a plain message."""
    try:
        found = compare(my, golden, jobs=1, replay=False)
    except UsageError:
        return "refused"
    assert all(row.reason for row in found.rows if row.status is Status.UNVERIFIED)
    return found.status.value


def decoded(path):
    """All that a dump says of values, to compare two by.

    Names do not count: what goes by another name may be matched by its place in the order.
    """
    found = []
    dump = open_dump(path)
    for record in dump.records():
        if record.payload is not None and record.tensor is not None:
            value = dump.read(record)
            found.append((str(value.dtype), tuple(value.shape), bits(value)))
        else:
            # With a digest, figures that differ by no more than rounding does change nothing.
            told = None if record.digest else record.statistics
            figures = told and msgspec.to_builtins(told)
            shape = record.tensor and record.tensor.shape
            found.append((record.value, figures, record.digest, shape))
    return sorted(found, key=repr)


def libraries_agree(layout, my, golden):
    """Whether what the library reads is the same; what it refuses does not count."""
    read = LIBRARIES.get(layout)
    if read is None:
        return True
    with contextlib.suppress(Exception):  # whatever it raises of a damaged file
        return _values_in(read(my)) == _values_in(read(golden))
    return True


def _values_in(tree):
    """The values of a tree, without names; a bool is what is not zero, whichever bits it has."""
    if isinstance(tree, dict):
        return sorted(value for part in tree.values() for value in _values_in(part))
    if isinstance(tree, list):
        return [value for part in tree for value in _values_in(part)]
    if not isinstance(tree, torch.Tensor):
        tree = torch.as_tensor(tree)
    raw = bits(tree)
    is_bool = tree.dtype is torch.bool
    return [(str(tree.dtype), bytes(byte != 0 for byte in raw) if is_bool else raw)]


def experiment(layout, folder, count, seed=0):
    """Change a byte, compare with the original, again and again; how each ended.

    Returns:
        Counts by outcome, and the flips after which values are called identical and are not.
    """
    golden = make(layout, folder / "golden")
    counts, wrong = Counter(), []
    for flip in flips(golden, count, seed):
        my = flipped(golden, flip, folder / "my")
        ended = outcome(my, golden)
        counts[ended] += 1
        if ended == "identical" and not (
            decoded(my) == decoded(golden) and libraries_agree(layout, my, golden)
        ):
            wrong.append(flip)
    return counts, wrong


if __name__ == "__main__":
    import sys
    import tempfile

    for name in sys.argv[2:] or LAYOUTS:
        with tempfile.TemporaryDirectory() as room:
            print(name, *experiment(name, Path(room), int(sys.argv[1])), flush=True)  # noqa: T201
