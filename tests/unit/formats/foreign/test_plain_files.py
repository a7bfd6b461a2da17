"""Plain files of tensors, written by the libraries that they are named after."""

from __future__ import annotations

import collections
import struct
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from paritas.core.errors import UsageError
from paritas.formats.foreign import plain_files

if TYPE_CHECKING:
    from pathlib import Path

SOME = torch.arange(24, dtype=torch.float32).reshape(4, 6)


def names(path: Path) -> list[str]:
    return [record.site.name for record in plain_files.open_dump(path).records()]


@pytest.mark.parametrize("ending", ["safetensors", "npz", "pt", "pth", "bin"])
def test_the_tensors_of_one_file_are_named_by_their_keys(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"model.{ending}"
    if ending == "safetensors":
        save_file({"w": SOME, "b": SOME + 1}, file)
    elif ending == "npz":
        np.savez(file, w=SOME.numpy(), b=SOME.numpy() + 1)
    else:
        torch.save({"w": SOME, "b": SOME + 1}, file)
    assert plain_files.looks_like(file)
    dump = plain_files.open_dump(file)
    found = {record.id: dump.read(record) for record in dump.records()}
    assert set(found) == {"forward/w#0/output.0", "forward/b#0/output.0"}
    assert torch.equal(found["forward/w#0/output.0"], SOME)
    assert torch.equal(found["forward/b#0/output.0"], SOME + 1)


def test_a_lone_array_is_named_after_its_file(tmp_path: Path) -> None:
    np.save(tmp_path / "logits.npy", SOME.numpy())
    assert names(tmp_path / "logits.npy") == ["logits"]


def test_files_of_a_folder_are_named_alike_whichever_library_wrote_them(tmp_path: Path) -> None:
    for kind in ("npy", "pt"):
        (tmp_path / kind / "layers").mkdir(parents=True)
    for layer in (10, 2):
        np.save(tmp_path / "npy" / "layers" / f"{layer}.npy", SOME.numpy())
        torch.save(SOME, tmp_path / "pt" / "layers" / f"{layer}.pt")
    assert names(tmp_path / "npy") == names(tmp_path / "pt") == ["layers/2", "layers/10"]


def test_the_parts_of_a_checkpoint_are_one(tmp_path: Path) -> None:
    save_file({"a": SOME}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": SOME}, tmp_path / "model-00002-of-00002.safetensors")
    assert names(tmp_path) == ["a", "b"]


def test_folders_say_step_and_rank(tmp_path: Path) -> None:
    for step in (3, 12):
        for rank in (0, 1):
            folder = tmp_path / f"step{step}" / f"rank{rank}"
            folder.mkdir(parents=True)
            torch.save(SOME, folder / "out.pt")
    dump = plain_files.open_dump(tmp_path)
    found = [(one.rank, one.step, one.site.name) for one in dump.records()]
    assert found == [(0, 3, "out"), (0, 12, "out"), (1, 3, "out"), (1, 12, "out")]
    assert dump.header(1).world_size == 2


def test_two_folders_that_could_be_the_step_are_none(tmp_path: Path) -> None:
    (tmp_path / "step1" / "step2").mkdir(parents=True)
    torch.save(SOME, tmp_path / "step1" / "step2" / "a.pt")
    torch.save(SOME, tmp_path / "b.pt")
    found = [(one.step, one.site.name) for one in plain_files.open_dump(tmp_path).records()]
    assert found == [(0, "b"), (0, "step1/step2/a")]


def test_two_files_of_one_name_stay_two(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", SOME.numpy())
    torch.save(SOME, tmp_path / "a.pt")
    found = [record.id for record in plain_files.open_dump(tmp_path).records()]
    assert found == ["forward/a#0/output.0", "forward/a#1/output.0"]


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_torch_save_and_safetensors_comes_out_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    top = 2 if dtype is torch.bool else 256
    size = 12 * dtype.itemsize
    raw = torch.randint(0, top, (size,), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype).reshape(3, 4)
    torch.save(tensor, tmp_path / "a.pt")
    if dtype is not torch.complex128:
        save_file({"a": tensor}, tmp_path / "b.safetensors")
    dump = plain_files.open_dump(tmp_path)
    for record in dump.records():
        found = dump.read(record)
        assert found.dtype is dtype
        assert found.shape == (3, 4)
        assert torch.equal(found.contiguous().reshape(-1).view(torch.uint8), raw)


def test_tensors_keep_their_strides_and_share_what_they_repeat(tmp_path: Path) -> None:
    complex_one = torch.complex(SOME[0], SOME[1])
    given = {
        "turned": SOME.t(),
        "part": SOME[1:3, 2:],
        "repeated": SOME[:1].expand(1000, 6),
        "conjugate": complex_one.conj(),
        "negated": complex_one.clone().conj().imag,
        "empty": torch.empty(0, 3),
        "number": torch.tensor(5),
        "parameter": torch.nn.Parameter(SOME.clone()),
    }
    torch.save(given, tmp_path / "a.pt")
    dump = plain_files.open_dump(tmp_path / "a.pt")
    found = {record.site.name: record for record in dump.records()}
    for name, tensor in given.items():
        record = found[name]
        assert torch.equal(dump.read(record), tensor.detach()), name
        assert record.tensor is not None
        assert record.tensor.stride == tensor.stride(), name
        assert record.tensor.requires_grad == tensor.requires_grad, name
    repeated = found["repeated"].payload
    assert repeated is not None
    assert repeated.nbytes == 6 * 4


def test_what_is_no_tensor_is_a_value_and_an_object_is_told_not_made(tmp_path: Path) -> None:
    tree = {"step": 3, "lr": 0.5, "name": "x", "of": [None, {"deep": torch.float16}]}
    torch.save({**tree, "odd": collections.Counter("aab"), "w": SOME}, tmp_path / "a.pt")
    dump = plain_files.open_dump(tmp_path / "a.pt")
    values = {one.site.name: one.value for one in dump.records() if one.value is not None}
    assert values == {
        "step": "3", "lr": "0.5", "name": "'x'", "of.0": "None", "of.1.deep": "torch.float16",
    }  # fmt: skip
    assert dump.problems == ["a.pt: odd: it is made by collections.Counter, which is not called"]


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('ran')",)


def test_code_in_a_file_is_never_run(tmp_path: Path) -> None:
    torch.save({"evil": _Evil(), "w": SOME}, tmp_path / "a.pt")
    np.save(tmp_path / "b.npy", np.array([_Evil()]))
    dump = plain_files.open_dump(tmp_path)
    first, second = dump.problems
    assert first == "a.pt: evil: it is made by __builtin__.exec, which is not called"
    assert second == (
        "b.npy: its dtype is '|O': its values are pickled Python objects, which paritas does not "
        "load"
    )
    whole = next(record for record in dump.records() if record.site.name == "a/w")
    assert torch.equal(dump.read(whole), SOME)


def test_compressed_archives_are_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((500, 500)), y=np.arange(5))
    dump = plain_files.open_dump(tmp_path / "a.npz")
    found = {record.site.name: dump.read(record) for record in dump.records()}
    assert torch.equal(found["x"], torch.zeros(500, 500, dtype=torch.float64))
    assert torch.equal(found["y"], torch.arange(5))


def test_an_archive_that_would_unpack_to_far_more_than_itself_is_refused(tmp_path: Path) -> None:
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (100000000,), }"
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", start + bytes(100_000_000))
    dump = plain_files.open_dump(tmp_path / "a.npz")
    (record,) = dump.records()
    with pytest.raises(UsageError, match=r"it unpacks to 1000000\d\d bytes, more than 64 times"):
        dump.read(record)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ('{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,64]}}', "are not in the file"),
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,16]}}', "takes 8 bytes, not 16"),
        ('{"a":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}', "is negative"),
        ('{"a":{"dtype":"F99","shape":[4],"data_offsets":[0,16]}}', "unknown dtype 'F99'"),
        ('{"a":{"dtype":"F32","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}}', "larger"),
        ('{"a":7}', "header is damaged"),
        ("[" * 500, "header is damaged"),
    ],
)
def test_a_header_of_safetensors_that_lies_is_refused(
    tmp_path: Path, header: str, why: str
) -> None:
    text = header.encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    dump = plain_files.open_dump(tmp_path / "a.safetensors")
    (record,) = dump.records()
    assert len(dump.problems) == 1
    with pytest.raises(UsageError, match=why):
        dump.read(record)


def test_a_file_that_was_cut_off_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    torch.save(SOME, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "b.pt").write_bytes(whole[: len(whole) // 2])
    dump = plain_files.open_dump(tmp_path)
    first, second = dump.records()
    assert torch.equal(dump.read(first), SOME)
    with pytest.raises(UsageError, match=r"b\.pt: not a zip archive, or a damaged one"):
        dump.read(second)


def test_a_file_that_shrank_since_it_was_opened_is_told(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", SOME.numpy())
    dump = plain_files.open_dump(tmp_path)
    (record,) = dump.records()
    (tmp_path / "a.npy").write_bytes(b"")
    with pytest.raises(UsageError, match="ends at byte 0, before byte 224: it is truncated"):
        dump.read(record)


def test_files_of_other_kinds_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert not plain_files.looks_like(tmp_path)
    with pytest.raises(UsageError, match="has nothing to read as files"):
        plain_files.open_dump(tmp_path)
