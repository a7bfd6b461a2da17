"""Checkpoints that are damaged, something else, or malicious: never run, always refused."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paritas.core.errors import UsageError
from paritas.sharding.graphs.calls import Graph
from paritas.sharding.graphs.checkpoints import read_checkpoint
from unit.sharding.graphs.ckp_files import (
    BLOCK,
    GATHER,
    Writer,
    instructions,
    with_changes,
    with_text,
    written_call,
    written_text,
)

REAL = GATHER.read_bytes()
WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
# Instructions that push one complete value.
_VALUES = {"NONE", "NEWTRUE", "NEWFALSE", "BININT1", "SHORT_BINUNICODE", "EMPTY_DICT", "EMPTY_LIST"}
_VALUES |= {"EMPTY_TUPLE", "BINGET", "LONG_BINGET", "EMPTY_SET"}


def refusal(folder: Path, data: bytes) -> str:
    path = folder / "graph.ckp"
    path.write_bytes(data)
    with pytest.raises(UsageError) as told:
        read_checkpoint(path)
    assert str(told.value).startswith(str(path))
    return str(told.value)


# --- payloads -------------------------------------------------------------------------------------


def payloads(marker: Path) -> dict[str, bytes]:
    """Instructions each of which creates a file when the pickle is loaded."""
    touch = written_text(f"touch {marker}")
    opening = written_text(f"open({str(marker)!r}, 'w').close()")
    opener = written_call("builtins.getattr", b"cbuiltins\ngetattr\n", written_text("__self__"))
    found = written_call("builtins.getattr", opener, written_text("eval"))
    return {
        "os.system": written_call("os.system", touch),
        "posix.system": written_call("posix.system", touch),
        "builtins.eval": written_call("builtins.eval", opening),
        "builtins.exec": written_call("builtins.exec", opening),
        "builtins.getattr": found + b"(" + opening + b"tR",
        "pathlib.Path": written_call(
            "builtins.getattr",
            written_call("pathlib.Path", written_text(str(marker))),
            written_text("touch"),
        )
        + b")R",
        "subprocess.getoutput": written_call("subprocess.getoutput", touch),
    }


@pytest.mark.parametrize("name", payloads(Path("x")))
def test_a_payload_is_refused_by_name_and_not_run(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "run"
    payload = payloads(marker)[name]
    told = refusal(tmp_path, b"\x80\x04" + payload + b"0" + REAL[2:])
    assert f"it refers to `{name}` at byte " in told
    assert "None of its code was run" in told
    assert not marker.exists()
    pickle.loads(b"\x80\x04" + payload + b".")
    assert marker.exists()


def test_a_payload_is_refused_wherever_a_value_can_stand(tmp_path: Path) -> None:
    marker = tmp_path / "run"
    payload = payloads(marker)["os.system"]
    places = [place for place, (name, _, _) in enumerate(instructions(REAL)) if name in _VALUES]
    assert len(places) > 2000
    for place in places[::127]:
        told = refusal(tmp_path, with_changes(REAL, {place: payload}))
        assert "it refers to `os.system` at byte " in told
    assert not marker.exists()


def test_a_function_made_of_code_in_the_file_is_not_called(tmp_path: Path) -> None:
    """Real files contain the code of rules, but no call of it."""
    data = BLOCK.read_bytes()
    steps = instructions(data)
    scope = next(place for place, step in enumerate(steps) if step[0] == "GLOBAL")
    # After the namespace, the name, no defaults and the cells, the function is made; here it is
    # also called.
    made = next(place for place in range(scope, len(steps)) if steps[place][1] == "__annotations__")
    end = next(place for place in range(made, 0, -1) if steps[place][0] == "REDUCE")
    told = refusal(tmp_path, with_changes(data, {end: b"R)R"}))
    assert "it refers to `the result of dill._dill._create_function` at byte " in told


@pytest.mark.parametrize(
    ("call", "asked"),
    [
        (written_call("dill._dill._eval_repr", written_text("exit()")), "dill._dill._eval_repr"),
        (written_call("dill._dill._load_type", written_text("CodeType")), "dill._dill._load_type"),
        (
            written_call("dill._dill._import_module", written_text("os")),
            "dill._dill._import_module",
        ),
        (written_call("dill._dill._create_type", b")"), "dill._dill._create_type"),
        (written_call("builtins.setattr", b")", b")", b")"), "builtins.setattr"),
        (
            written_call("builtins.getattr", b"cdill\n_dill\n", written_text("x")),
            "builtins.getattr",
        ),
        (written_call("typing.Dict", b")"), "typing.Dict"),
        (written_call("torch.load", written_text("x")), "torch.load"),
        (written_call("torch.hub.load", written_text("x")), "torch.hub.load"),
        (written_call("torch.nn.Module", written_text("x")), "torch.nn.Module"),
        (written_call("torch.Size", written_text("x")), "torch.Size"),
        (written_call("nnscaler.graph.graph.IRGraph", b")"), "nnscaler.graph.graph.IRGraph"),
        (b"cnumpy.core\nrun\n", "numpy.core.run"),
        (b"c \n;\n", " .;"),
        (b"cmodel\nBlock\n)\x81", "model.Block"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_known_names_are_accepted_only_as_graphs_use_them(
    call: bytes, asked: str, tmp_path: Path
) -> None:
    told = refusal(tmp_path, b"\x80\x04" + call + b"0" + REAL[2:])
    assert f"it refers to `{asked}` at byte " in told


def test_a_class_of_another_version_is_reported_as_such(tmp_path: Path) -> None:
    told = refusal(tmp_path, with_text(REAL, "IRGraph", "IRGraph2"))
    assert "`nnscaler.graph.graph.IRGraph2` at byte " in told
    assert "the checkpoint is from another version; paritas reads those of nnScaler 0.9" in told


def test_a_missing_attribute_is_reported(tmp_path: Path) -> None:
    told = refusal(tmp_path, with_text(REAL, "signature", "signed"))
    assert "IRDimops linear 1 has no `signature`: the checkpoint is from another version" in told


# --- damaged, and something else ------------------------------------------------------------------


@pytest.mark.parametrize("path", [GATHER, BLOCK], ids=lambda path: str(path.stem))
def test_a_truncated_file_is_refused_wherever_it_ends(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    for end in range(0, len(data), 997 if WHOLE else 4999):
        refusal(tmp_path, data[:end])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (
            b"PK\x03\x04abcdefgh",
            r"it starts with b'PK\\x03\\x0",
        ),
        (b"\x80\x09" + REAL[2:], "its pickle has version 9; the latest known one is 5"),
        (pickle.dumps({"a": 1}), "it is a pickle of a dict, not of a graph with its counters"),
        (pickle.dumps(((1, 2, 3), [])), "it is a pickle of a tuple, not of a graph"),
        (REAL + b"more", "4 bytes follow the end of its pickle"),
    ],
    ids=["empty", "zip", "version", "dict", "tuple", "more"],
)
def test_what_is_not_a_checkpoint_is_refused(data: bytes, why: str, tmp_path: Path) -> None:
    assert re.search(why, refusal(tmp_path, data))


def test_a_path_that_is_not_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is a folder; give the graph checkpoint \(.ckp\) itself"):
        read_checkpoint(tmp_path)
    with pytest.raises(UsageError, match="cannot be read: No such file or directory; give"):
        read_checkpoint(tmp_path / "none.ckp")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="it is not a regular file"):
        read_checkpoint(tmp_path / "pipe")


def test_a_file_that_is_too_large_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "large.ckp"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match="it has 1099511627776 bytes; 33554432 are allowed"):
        read_checkpoint(path)


@given(st.lists(st.tuples(st.integers(0, len(REAL) - 1), st.integers(0, 255)), max_size=8))
@example([(100, 0x51)])
def test_flipped_bytes_are_refused_or_give_a_graph(
    tmp_path_factory: Any, flips: list[tuple[int, int]]
) -> None:
    data = bytearray(REAL)
    for at, byte in flips:
        data[at] = byte
    path = tmp_path_factory.getbasetemp() / "flipped.ckp"
    path.write_bytes(data)
    try:
        assert isinstance(read_checkpoint(path), Graph)
    except UsageError as why:
        assert str(why).startswith(str(path))  # noqa: PT017


# --- endless structures ---------------------------------------------------------------------------


def test_arguments_that_contain_themselves_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Writer(monkeypatch)
    endless: list[Any] = []
    endless.append(endless)
    told = refusal(tmp_path, write.graph([write.node("torch.relu", endless, [])]))
    assert "its arguments are nested more than 32 deep" in told


def test_arguments_that_double_at_each_level_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Writer(monkeypatch)
    tree: list[Any] = []
    for _ in range(30):
        tree = [tree, tree]
    told = refusal(tmp_path, write.graph([write.node("torch.relu", tree, [])]))
    assert "parts in total" in told


def test_a_value_that_is_its_own_value_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Writer(monkeypatch)
    value = write.value("n", 0)
    value._value = value
    told = refusal(tmp_path, write.graph([write.node("torch.relu", [value], [])]))
    assert "more than 32 deep" in told


def test_a_segment_that_contains_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Writer(monkeypatch)
    nodes: list[Any] = []
    segment = write.make("nnscaler.graph.segment.IRSegment", _id=1, name="part", _nodes=nodes)
    nodes.append(segment)
    told = refusal(tmp_path, write.graph([segment]))
    assert "IRSegment part 1 occurs twice, or is nested in more than 64 segments" in told


@pytest.mark.parametrize("deep", [b"]" * 20_000 + b"a" * 19_999, b"(" * 20_000 + b"t" * 20_000])
def test_endless_nesting_is_refused(deep: bytes, tmp_path: Path) -> None:
    refusal(tmp_path, b"\x80\x04" + deep + b".")


def test_a_shape_of_any_size_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Writer(monkeypatch)
    large = write.tensor("x", (10**12, 10**6), 1)
    path = tmp_path / "graph.ckp"
    path.write_bytes(write.graph([write.node("torch.relu", [large], [large])]))
    assert read_checkpoint(path).calls[0].outputs[0].shape == (10**12, 10**6)
    told = refusal(
        tmp_path, write.graph([write.node("torch.relu", [write.tensor("x", (10**12,) * 2, 1)], [])])
    )
    assert "has the shape (1000000000000, 1000000000000), which is too large for a tensor" in told


def test_a_very_long_string_is_refused(tmp_path: Path) -> None:
    told = refusal(tmp_path, with_text(REAL, "torch.relu", "x" * 20_000))
    assert "it has a string of 20000 characters; 10000 are allowed" in told
