"""Files of other tools are mapped where their bytes are the values."""

from __future__ import annotations

import os
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from paritas.core.errors import UsageError
from paritas.formats.dumps.opening import open_dump
from paritas.formats.files import tensor_bytes
from unit.formats.files.entries import bits
from unit.formats.foreign import ge_files as ge
from unit.formats.foreign.msprobe_dumps import linear_program

VALUES = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def maps_all(monkeypatch):
    """However few the bytes, they are mapped."""
    monkeypatch.setattr(tensor_bytes, "LEAST_MAPPED", 1)


def mapped_in(path) -> dict[str, bool]:
    """By name, whether a value is mapped; it is the same as what is read in any case."""
    dump = open_dump(path)
    found = {}
    for record in dump.records():
        if record.tensor is None:
            continue
        before = len(tensor_bytes._mapped)
        view = dump.view(record)
        found[record.site.name] = len(tensor_bytes._mapped) > before
        read = dump.read(record)
        assert (view.dtype, view.shape, view.stride()) == (read.dtype, read.shape, read.stride())
        assert bits(view) == bits(read), record.id
        # Of all these, archives alone have checksums.
        assert dump.verify(record) == record.payload.file.endswith((".pt", ".npz"))
        del view
    assert found
    return found


def test_numpys_files_are_mapped_unless_their_bytes_are_swapped(tmp_path):
    array = VALUES.numpy()
    np.save(tmp_path / "plain.npy", array)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(array))
    np.save(tmp_path / "swapped.npy", array.astype(">f4"))
    np.save(tmp_path / "flags.npy", array > 0)
    np.save(tmp_path / "none.npy", array[:0])
    names = mapped_in(tmp_path)
    assert {name for name, is_mapped in names.items() if is_mapped} == {"plain", "fortran", "flags"}


def test_a_byte_that_is_no_bool_is_true(tmp_path):
    np.save(tmp_path / "flags.npy", np.array([True, False, True]))
    data = (tmp_path / "flags.npy").read_bytes()
    (tmp_path / "flags.npy").write_bytes(data[:-3] + b"\x02\x00\x01")
    dump = open_dump(tmp_path)
    (record,) = dump.records()
    assert dump.view(record).int().tolist() == [1, 0, 1]


def test_archives_are_mapped_where_nothing_is_compressed_and_values_are_aligned(tmp_path):
    array = VALUES.numpy()
    with zipfile.ZipFile(tmp_path / "own.npz", "w") as archive:
        for name in ("a", "ab", "abc", "abcd"):
            np.save(tmp_path / "x.npy", array)
            archive.write(tmp_path / "x.npy", f"{name}.npy")
    (tmp_path / "x.npy").unlink()
    assert sorted(mapped_in(tmp_path / "own.npz").values()) == [False, False, False, True]
    np.savez_compressed(tmp_path / "packed.npz", a=array)
    assert mapped_in(tmp_path / "packed.npz") == {"a": False}


def test_files_of_safetensors_are_mapped(tmp_path):
    save_file({"a": VALUES, "b": VALUES.bfloat16(), "c": VALUES > 0}, tmp_path / "all.safetensors")
    assert mapped_in(tmp_path) == {"a": True, "b": True, "c": True}


def test_files_of_torch_are_mapped_with_their_strides(tmp_path):
    saved = {"a": VALUES, "b": VALUES.T, "c": VALUES[1:, ::2], "d": VALUES[0].expand(3, 8)}
    torch.save(saved, tmp_path / "all.pt")
    assert mapped_in(tmp_path) == dict.fromkeys("abcd", True)


def test_conjugate_values_are_as_they_are_read(tmp_path):
    torch.save({"z": torch.view_as_complex(VALUES.reshape(-1, 2)).conj()}, tmp_path / "all.pt")
    mapped_in(tmp_path)


def test_files_of_msprobe_are_mapped(tmp_path):
    linear_program(tmp_path / "step0" / "rank0")
    assert all(mapped_in(tmp_path).values())


def ge_dump(tmp_path, **facts):
    """A dump of one output, which begins at each of four places of a file in turn."""
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir(parents=True)
        given = {"dtype": ge.F32, "payload": VALUES.numpy().tobytes(), "shape": (6, 8)} | facts
        data = ge.ge_bytes(outputs=[given], name="A" * (number + 1))
        (folder / f"Add.Add_2.44.6.{ge.TIME}").write_bytes(data)
        yield folder


def test_files_of_the_graph_engine_are_mapped_where_their_values_are_aligned(tmp_path):
    found = [mapped_in(folder)["Add_2"] for folder in ge_dump(tmp_path)]
    assert sorted(found) == [False, False, False, True]
    flags = {"dtype": ge.BOOL, "payload": b"\0\1\1\0" * 12}
    assert all(mapped_in(folder)["Add_2"] for folder in ge_dump(tmp_path / "flags", **flags))


def test_another_layout_of_the_graph_engine_is_put_in_order(tmp_path):
    blocks = torch.zeros(1, 1, 16, 16)
    blocks[0, 0, :6, :8] = VALUES
    facts = {"format": 29, "shape": (1, 1, 16, 16), "original": (6, 8)}
    for folder in ge_dump(tmp_path, payload=blocks.numpy().tobytes(), **facts):
        mapped_in(folder)
        dump = open_dump(folder)
        (record,) = dump.records()
        assert torch.equal(dump.view(record), VALUES)


@pytest.mark.parametrize("kind", ["npy", "safetensors", "pt"])
def test_a_file_that_is_cut_off_after_it_was_opened_is_refused(tmp_path, kind):
    path = tmp_path / f"all.{kind}"
    if kind == "npy":
        np.save(path, VALUES.numpy())
    elif kind == "safetensors":
        save_file({"a": VALUES}, path)
    else:
        torch.save(VALUES, path)
    dump = open_dump(tmp_path)
    (record,) = dump.records()
    for size in (100, 0):
        os.truncate(path, size)
        with pytest.raises(UsageError, match=f"ends at byte {size}, before byte"):
            dump.view(record)


# --- checksums of archives ------------------------------------------------------------------------


def change(path, at, mask=1):
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


def only_record(path):
    dump = open_dump(path)
    (record,) = dump.records()
    return dump, record


@pytest.mark.parametrize("ending", ["pt", "npz"])
def test_a_view_is_held_against_the_checksum_of_its_archive_if_that_is_asked_for(tmp_path, ending):
    path = tmp_path / f"x.{ending}"
    if ending == "pt":
        torch.save(VALUES, path)
    else:
        np.savez(path, x=VALUES.numpy())
    change(path, path.read_bytes().index(VALUES.numpy().tobytes()) + 5)
    dump, record = only_record(path)
    assert dump.view(record).shape == VALUES.shape
    for look in (dump.read, dump.verify, lambda record: dump.view(record, check=True)):
        with pytest.raises(UsageError, match=f"of x.{ending} has checksum"):
            look(record)


def test_a_compressed_member_is_read_to_its_end_where_its_checksum_is(tmp_path):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.arange(5000))
    with zipfile.ZipFile(path) as archive:
        (member,) = archive.infolist()
    data = bytearray(path.read_bytes())
    found = data.rindex(member.CRC.to_bytes(4, "little"))
    data[found] ^= 1  # in the directory of the archive, which is at its end
    path.write_bytes(data)
    dump, record = only_record(path)
    for look in (dump.read, dump.view, dump.verify):
        with pytest.raises(UsageError, match="Bad CRC-32"):
            look(record)


def test_a_pickle_that_does_not_match_its_checksum_is_not_followed(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"weight": VALUES}, path)
    change(path, path.read_bytes().index(b"weight") + 1)
    dump, record = only_record(path)
    assert record.tensor is None
    assert "data.pkl has checksum" in dump.problems[0]


def test_a_member_that_lies_under_another_name_is_refused(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, weight=VALUES.numpy())
    change(path, path.read_bytes().index(b"weight"))  # where it lies; the directory comes later
    dump, _ = only_record(path)
    assert "another member lies where the archive says" in dump.problems[0]
