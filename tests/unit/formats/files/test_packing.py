"""Data files: appended to while they are written, safetensors once they are closed."""

from __future__ import annotations

import json

import pytest
import torch
import xxhash
from safetensors import SafetensorError, safe_open

from paritas.formats.files.safetensors_files import (
    PackedFile,
    PackedPiece,
    complete,
    header_room,
    is_complete,
)
from paritas.formats.files.tensor_bytes import digest, in_safetensors, raw_bytes
from unit.formats.files.entries import PLAIN, bits, filled

SHAPES = [(3, 2), (5,), (), (0, 4)]


def put(file, key, tensor, hasher=None):
    return file.append(key, tensor, raw_bytes(tensor), hasher)


def pack(path, tensors, **options):
    file = PackedFile(path, **options)
    places = [put(file, key, tensor) for key, tensor in tensors.items()]
    return file, places


def everything():
    """A tensor of each dtype and shape; the odd sizes between them call for fillers."""
    return {
        f"{dtype} {shape}": filled(dtype, shape, seed=number)
        for number, dtype in enumerate(PLAIN)
        for shape in SHAPES
    }


def test_safetensors_reads_every_dtype_of_a_closed_file(tmp_path):
    tensors = everything()
    file, _ = pack(tmp_path / "data", tensors)
    file.close()
    with safe_open(tmp_path / "data", framework="pt") as opened:
        names = set(opened.keys())
        for key, tensor in tensors.items():
            read = opened.get_tensor(key)
            assert bits(read) == bits(tensor), key
            name, _ = in_safetensors(tensor.dtype, tensor.shape)
            if name.startswith(("I", "B")) or not (name == "U8" or tensor.dtype.is_complex):
                assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape), key
    assert all(name.startswith(".filler.") for name in names - set(tensors))


def test_values_begin_at_a_multiple_of_their_width(tmp_path):
    tensors = everything()
    file, places = pack(tmp_path / "data", tensors)
    file.close()
    raw = (tmp_path / "data").read_bytes()
    assert (8 + int.from_bytes(raw[:8], "little")) % 64 == 0
    for (_, begin), tensor in zip(places, tensors.values(), strict=True):
        assert raw[begin : begin + tensor.nbytes] == bits(tensor)
        assert begin % tensor.dtype.itemsize == 0 or not tensor.nbytes


def test_what_was_appended_can_be_read_before_the_file_is_closed(tmp_path):
    tensors = everything()
    file, places = pack(tmp_path / "data", tensors)
    raw = (tmp_path / "data").read_bytes()
    for (_, begin), tensor in zip(places, tensors.values(), strict=True):
        assert begin + tensor.nbytes <= len(raw)
        assert raw[begin : begin + tensor.nbytes] == bits(tensor)
    assert not is_complete(tmp_path / "data")
    with pytest.raises(SafetensorError):
        safe_open(tmp_path / "data", framework="pt").__enter__()
    file.close()
    assert is_complete(tmp_path / "data")


def test_a_name_that_is_taken_gets_a_number(tmp_path):
    file = PackedFile(tmp_path / "data")
    names = [put(file, key, torch.ones(1) * number)[0] for number, key in enumerate("aaba")]
    assert names == ["a", "a@2", "b", "a@3"]
    assert put(file, "a@2", torch.ones(1))[0] == "a@2@2"
    file.close()
    with safe_open(tmp_path / "data", framework="pt") as opened:
        assert opened.get_tensor("a@3") == 3


def test_names_with_quotes_and_other_letters_are_kept(tmp_path):
    names = ['say "x"', "back\\slash", "naïve Σ 🙂", "tab\tand\nline", "nul\0"]
    file, _ = pack(tmp_path / "data", {name: torch.ones(2) for name in names})
    file.close()
    with safe_open(tmp_path / "data", framework="pt") as opened:
        assert set(opened.keys()) == set(names)


def test_a_file_is_full_when_its_header_or_its_bytes_are(tmp_path):
    value = torch.ones(16)
    file = PackedFile(tmp_path / "bytes", largest=100)
    assert file.has_room("x", torch.ones(1 << 20)), "one that is too large goes in alone"
    put(file, "x", value)
    assert not file.has_room("y", value)
    file.close()
    file = PackedFile(tmp_path / "header")
    count = 0
    while file.has_room(f'"{count}"' * 100, value):
        put(file, f'"{count}"' * 100, value)
        count += 1
    file.close()
    with safe_open(tmp_path / "header", framework="pt") as opened:
        assert len(opened.keys()) == count > 20


def test_the_room_for_headers_grows_with_the_dump():
    rooms = [header_room(number) for number in range(100)]
    assert rooms[0] == 64 << 10
    assert rooms == sorted(rooms)
    assert rooms[-1] == 4 << 20
    assert all(room % 64 == 0 for room in rooms)


class Stubborn:
    """A file that takes a few bytes at a time, and fails after so many."""

    def __init__(self, file, most, limit=None):
        self._file = file
        self._most = most
        self._limit = limit
        self.calls = 0

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        self.calls += 1
        if self._limit is not None and self.calls > self._limit:
            raise OSError(28, "No space left on device")
        return self._file.write(memoryview(data).cast("B")[: self._most])


def test_a_short_write_is_continued(tmp_path):
    value = torch.arange(100.0)
    file = PackedFile(tmp_path / "data")
    file._file = Stubborn(file._file, most=7)
    _, begin = put(file, "x", value)
    assert file._file.calls == 58
    file.close()
    assert (tmp_path / "data").read_bytes()[begin:] == bits(value)
    with safe_open(tmp_path / "data", framework="pt") as opened:
        assert torch.equal(opened.get_tensor("x"), value)


def test_a_short_write_of_any_dtype_is_continued(tmp_path):
    tensors = {key: tensor for key, tensor in everything().items() if tensor.nbytes}
    file = PackedFile(tmp_path / "data")
    file._file = Stubborn(file._file, most=5)
    places = [put(file, key, tensor) for key, tensor in tensors.items()]
    file.close()
    raw = (tmp_path / "data").read_bytes()
    for (_, begin), tensor in zip(places, tensors.values(), strict=True):
        assert raw[begin : begin + tensor.nbytes] == bits(tensor)


def test_bytes_are_hashed_as_they_are_written(tmp_path):
    file = PackedFile(tmp_path / "data")
    for dtype in PLAIN:
        tensor = filled(dtype, (3, 100_003), seed=3)
        hasher = xxhash.xxh3_128()
        _, begin = put(file, str(dtype), tensor, hasher)
        assert hasher.hexdigest() == digest(tensor)
    file.close()
    assert (tmp_path / "data").read_bytes()[begin:] == bits(tensor)


def test_a_payload_that_failed_is_taken_back(tmp_path):
    value = torch.arange(100.0)
    file, _ = pack(tmp_path / "data", {"x": value})
    real, file._file = file._file, Stubborn(file._file, most=7, limit=10)
    with pytest.raises(OSError, match="No space left"):
        put(file, "y", value)
    file._file = real
    assert (tmp_path / "data").stat().st_size == file.end
    put(file, "z", value + 1)
    file.close()
    with safe_open(tmp_path / "data", framework="pt") as opened:
        assert set(opened.keys()) == {"x", "z"}
        assert torch.equal(opened.get_tensor("z"), value + 1)


def test_a_file_that_was_left_open_is_completed_from_its_index(tmp_path):
    tensors = everything()
    file, places = pack(tmp_path / "data", tensors)
    file._file.write(b"half a payload")
    file._file.close()
    pieces = [
        PackedPiece(key, tensor.dtype, tuple(tensor.shape), begin, tensor.nbytes)
        for (key, begin), tensor in zip(places, tensors.values(), strict=True)
    ]
    complete(tmp_path / "data", reversed(pieces))
    with safe_open(tmp_path / "data", framework="pt") as opened:
        for key, tensor in tensors.items():
            assert bits(opened.get_tensor(key)) == bits(tensor)


def test_pieces_that_overlap_are_not_made_a_header_of(tmp_path):
    file, [(_, begin)] = pack(tmp_path / "data", {"x": torch.ones(4)})
    file._file.close()
    pieces = [PackedPiece(key, torch.float32, (4,), begin, 16) for key in "xy"]
    with pytest.raises(ValueError, match="y begins at 65536, before byte 65552"):
        complete(tmp_path / "data", pieces)
    (tmp_path / "short").write_bytes(b"")
    with pytest.raises(ValueError, match="does not begin with a header length"):
        complete(tmp_path / "short", pieces[:1])


@pytest.mark.parametrize("content", [b"", bytes(4 << 20)], ids=["empty", "reserved"])
def test_a_file_that_was_hardly_begun_is_completed_without_a_tensor(tmp_path, content):
    (tmp_path / "data").write_bytes(content)
    complete(tmp_path / "data", [])
    with safe_open(tmp_path / "data", framework="pt") as opened:
        assert list(opened.keys()) == [".filler.end"]


def test_the_header_says_that_it_is_torchs(tmp_path):
    file, _ = pack(tmp_path / "data", {"x": torch.ones(2)})
    file.close()
    raw = (tmp_path / "data").read_bytes()
    header = json.loads(raw[8 : header_room(0)])
    assert header["__metadata__"] == {"format": "pt", "writer": "paritas"}
    assert header["x"] == {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
