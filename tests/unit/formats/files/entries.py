"""Making small dumps, for the tests of the store."""

from __future__ import annotations

import warnings

import torch

from paritas.formats.dumps.writing import DumpWriter
from paritas.formats.files.records import Entry, Header, Site, TensorFacts
from paritas.formats.files.tensor_bytes import as_stored, digest

# What torch calls by several names is one dtype.
DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
QUANTISED = [dtype for dtype in DTYPES if str(dtype).startswith(("torch.qint", "torch.quint"))]
PLAIN = [dtype for dtype in DTYPES if dtype not in QUANTISED]


def site(name="x", **more) -> Site:
    return Site(source="eager", level="op", name=name, **more)


def facts_of(tensor) -> TensorFacts:
    return TensorFacts(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=tensor.storage_offset(),
        requires_grad=tensor.requires_grad,
    )


def entry_of(tensor, sequence=0, step=0, name="x", **more) -> Entry:
    stored = as_stored(tensor)
    given = {
        "sequence": sequence,
        "step": step,
        "site": site(name),
        "tensor": facts_of(tensor),
        "stored": stored,
        "digest": digest(stored),
    }
    return Entry(**{**given, **more})


def write_dump(path, tensors, *, close=True, header=None, **options):
    """Write tensors as x0, x1, ...; gives back the writer."""
    header = header or Header(run="a" * 32)
    writer = DumpWriter(path, header, **options)
    for number, tensor in enumerate(tensors):
        writer.add(entry_of(tensor, number, name=f"x{number}"))
    if close:
        writer.close(header)
    return writer


def abandon(writer) -> None:
    """Let go of the files as the end of a process does, without closing the dump."""
    for volume in {id(v): v for v in [*writer._kept, *(v for _, v in writer._ring)]}.values():
        volume._index.close()
        if volume._data is not None:
            volume._data._file.close()
    writer._lock.release()


def bits(tensor) -> bytes:
    """The bytes of the values in row-major order, whatever their dtype."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    itemsize = plain.dtype.itemsize
    if itemsize == 16:
        plain = torch.view_as_real(plain)
        itemsize = 8
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        flat = plain.reshape(plain.shape or (1,)).view(carrier)
    return flat.contiguous().numpy().tobytes()


def filled(dtype, shape, seed=0):
    """A contiguous tensor of any dtype but the quantised, of bits at random."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        raw = raw & 1
    with warnings.catch_warnings():
        # Torch says of complex32 that few operators know it.
        warnings.simplefilter("ignore", UserWarning)
        return raw.view(dtype).reshape(shape)
