"""A recording, from the value that a hook sees to the record that a reader finds."""

from __future__ import annotations

import gc
import os
import textwrap
import threading
import warnings

import pytest
import torch

import processes
from paritas.core.errors import ParitasError, UsageError
from paritas.formats.dumps.reading import Dump
from paritas.formats.dumps.selection import Selection
from paritas.formats.files.records import Site
from paritas.recording.pipeline import SessionOptions, Snapshot
from paritas.recording.session import RecordingSession


def session(path, selection=None, **options):
    return RecordingSession(path, selection or Selection.of(), SessionOptions(**options))


def site(name, **facts):
    return Site(source="eager", level="op", name=name, **facts)


def put(recording, name, value, **facts):
    where = site(name, **facts)
    if recording.wants(where):
        recording.put(where, value)


def by_name(path):
    dump = Dump.open(path)
    assert dump.problems == []
    return dump, {record.site.name: record for record in dump.records()}


# Of quantised tensors, with their scales, tests/unit/dumps/test_dtypes.py tells.
DTYPES = sorted(
    {
        value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype) and not name.startswith(("q", "quint"))
    },
    key=str,
)


@pytest.mark.parametrize("data", ["tensor", "stats"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_value_of_every_dtype_is_recorded_or_its_place_says_why_not(dtype, data, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on its rarer dtypes
        raw = torch.arange(64, dtype=torch.uint8)
        value = raw.view(dtype).reshape(2, -1)
        recording = session(tmp_path / "dump", data=data)
        put(recording, "rare", value)
        put(recording, "usual", torch.ones(3))
        recording.close()
    dump, found = by_name(tmp_path / "dump")
    assert found["usual"].statistics.count == 3
    record = found["rare"]
    if record.tensor is None:
        assert "not stored" in record.value
    else:
        assert record.tensor.dtype == str(dtype).removeprefix("torch.")
        if data == "tensor":
            bits = dump.read(record).contiguous().reshape(-1).view(torch.uint8)
            assert torch.equal(bits, raw)


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_values_are_those_of_the_moment(room, tmp_path):
    recording = session(tmp_path / "dump", queue_bytes=room)
    value = torch.zeros(100)
    for number in range(10):
        value.fill_(number)
        put(recording, f"v{number}", value)
    recording.close()
    dump, found = by_name(tmp_path / "dump")
    assert [float(dump.read(found[f"v{n}"])[0]) for n in range(10)] == list(range(10))


def test_what_shares_memory_says_so_as_long_as_it_lives(tmp_path):
    recording = session(tmp_path / "dump")
    base = torch.arange(6.0)
    put(recording, "base", base)
    put(recording, "view", base[2:].view(2, 2).t())
    put(recording, "other", torch.arange(6.0))
    recording.close()
    _, found = by_name(tmp_path / "dump")
    view = found["view"]
    assert view.alias_of == found["base"].sequence
    assert (view.tensor.shape, view.tensor.stride, view.tensor.offset) == ((2, 2), (1, 2), 2)
    assert found["other"].alias_of is None
    assert found["other"].digest == found["base"].digest


def test_equal_bytes_are_summed_up_as_what_each_of_them_is(tmp_path):
    recording = session(tmp_path / "dump", data="stats")
    one = torch.ones(())
    put(recording, "one", one)
    put(recording, "many", one.expand(4, 16))
    put(recording, "bits", one.view(torch.int32))
    put(recording, "line", torch.ones(2, 3))
    put(recording, "column", torch.ones(3, 2))
    recording.close()
    _, found = by_name(tmp_path / "dump")
    counts = {name: record.statistics.count for name, record in found.items()}
    assert counts == {"one": 1, "many": 64, "bits": 1, "line": 6, "column": 6}
    assert found["many"].statistics.l2 == 8.0
    assert found["bits"].statistics.maximum == 0x3F800000


def test_a_step_forgets_nothing_that_a_later_one_needs(tmp_path):
    for data in ("tensor", "stats"):
        recording = session(tmp_path / data, data=data)
        for _ in range(3):
            recording.enter("model")
            put(recording, "same", torch.ones(4))
        recording.close()
        records = list(Dump.open(tmp_path / data).records())
        assert [record.step for record in records] == [0, 1, 2]
        assert {record.statistics.count for record in records} == {4}


def test_threads_may_record_at_once(tmp_path):
    recording = session(tmp_path / "dump", queue_bytes=1 << 16)

    def work(number):
        for count in range(50):
            put(recording, f"t{number}", torch.full((64,), float(number)), call=count)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recording.close()
    records = list(Dump.open(tmp_path / "dump").records())
    assert [record.sequence for record in records] == list(range(200))


def test_values_that_are_no_tensors_are_kept_as_text(tmp_path):
    recording = session(tmp_path / "dump")
    put(recording, "number", 0.5)
    put(recording, "nothing", None)
    put(recording, "long", "x" * 5000)
    recording.close()
    _, found = by_name(tmp_path / "dump")
    assert (found["number"].value, found["nothing"].value) == ("0.5", "None")
    assert len(found["long"].value) == 1000


def test_a_tensor_that_cannot_be_stored_is_named_and_the_rest_goes_on(tmp_path):
    recording = session(tmp_path / "dump")
    put(recording, "sparse", torch.eye(3).to_sparse())
    put(recording, "dense", torch.eye(3))
    recording.close()
    _, found = by_name(tmp_path / "dump")
    assert "not stored" in found["sparse"].value
    assert found["dense"].payload is not None


def test_a_recording_without_a_value_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="nothing ran"):
        session(tmp_path / "dump").close()
    session(tmp_path / "other").close(raising=False)


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ParitasError, match="file"):
        session(tmp_path / "file" / "dump")


@pytest.mark.skipif(os.name != "posix", reason="needs limits on the size of files")
@pytest.mark.parametrize("room", [0, 1 << 26])
def test_a_full_disk_is_told_and_what_was_written_before_can_be_read(room, tmp_path):
    script = f"""
        import resource, signal, torch
        from paritas.formats.files.records import Site
        from paritas.core.errors import ParitasError
        from paritas.recording.pipeline import SessionOptions
        from paritas.formats.dumps.selection import Selection
        from paritas.recording.session import RecordingSession

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        options = SessionOptions(queue_bytes={room})
        recording = RecordingSession(r"{tmp_path / "dump"}", Selection.of(), options)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
        try:
            for number in range(40):
                where = Site(source="eager", level="op", name=f"v{{number}}")
                if recording.wants(where):
                    recording.put(where, torch.full((1 << 17,), float(number)))
            recording.close()
        except ParitasError as error:
            print("told:", error)
        recording.close(raising=False)
    """
    done = processes.run("-c", textwrap.dedent(script))
    assert "told: cannot write to" in done.stdout, done.stderr
    dump = Dump.open(tmp_path / "dump")
    records = list(dump.records())
    assert len(records) >= 4
    for record in records:
        value = float(record.site.name[1:])
        assert bool((dump.read(record) == value).all())
    assert not dump.header(0).closed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "mean"}, "data='mean'"),
        ({"layout": "zip"}, "layout='zip'"),
        ({"stepping": "never"}, "stepping='never'"),
        ({"queue_bytes": -1}, "queue_bytes must be a whole number, 0 or more, got -1"),
        ({"last": 1.5}, "last must be a whole number, 0 or more, got 1.5"),
    ],
)
def test_options_that_make_no_sense_show_the_value(options, message):
    with pytest.raises(UsageError, match=message):
        SessionOptions(**options)


@pytest.mark.parametrize("data", ["tensor", "stats"])
def test_a_closed_recording_that_is_kept_holds_no_copies(data, tmp_path):
    recording = session(tmp_path, data=data)
    for number in range(20):
        put(recording, f"x{number}", torch.full((64,), float(number)))
    recording.close()
    gc.collect()
    assert not any(recording._pool._free.values())
    copies = [held for held in gc.get_objects() if type(held) is Snapshot]
    assert copies == []
