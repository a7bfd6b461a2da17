import math
import os
import re
import tracemalloc
from random import Random

import msgspec
import pytest
import torch

from paritas.core.errors import UsageError
from paritas.formats.foreign.msprobe import open_dump
from unit.formats.foreign.msprobe_dumps import linear_program, scalar, tensor, write_process

# More of them where that is asked for: see tests/README.md.
ACCIDENTS = 800 if os.environ.get("PARITAS_WHOLE_CORPUS") else 120


def test_what_does_not_hold_is_told_and_the_rest_goes_on(tmp_path):
    def at(name):
        return tensor(torch.ones(2), file=name)

    wrong = {"type": "torch.Tensor", "dtype": "torch.float32", "Max": 1, "Min": 0}
    data = {
        "Torch.a.0.forward": {"output": [wrong | {"shape": [-2]}, at("good.pt")]},
        "Torch.b.0.forward": {"output": [wrong | {"shape": [2**40, 2**40]}, at("missing.pt")]},
        "Torch.c.0.forward": {"output": [at("../../secret.pt"), at("other.pt")]},
        "Torch.d.0.forward": {"output": [wrong | {"shape": [2], "Min": 5}]},
        "Torch.e.0.forward": {"outputs": []},
        "\ud800.0.forward": {"output": [at("good.pt")]},
    }
    deep = []
    for _ in range(150):
        deep = [deep]
    data["Torch.f.0.forward"] = {"output": deep}
    files = {"good.pt": torch.ones(2), "other.pt": torch.ones(5)}
    write_process(tmp_path / "step0/rank0", data, files=files)
    dump = open_dump(tmp_path)
    assert dump.problems == [
        "step0/rank0/: the entry '\\ud800.0.forward' has no valid name",
        "step0/rank0/Torch.a.0.forward, 0: its shape [-2] is not valid",
        f"step0/rank0/Torch.b.0.forward, 0: its shape {[2**40, 2**40]} is larger than any memory",
        "step0/rank0/dump_tensor_data/missing.pt is missing",
        "step0/rank0/Torch.c.0.forward: '../../secret.pt' is not a file name",
        "step0/rank0/Torch.d.0.forward, 0: its minimum 5.0 is greater than its maximum 1.0",
        "step0/rank0/Torch.e.0.forward: unknown key 'outputs'",
        f"step0/rank0/Torch.f.0.forward: {'0.' * 40!r} is nested deeper than 100 containers",
    ]
    good, missing, secret, other = dump.records()
    assert torch.equal(dump.read(good), torch.ones(2))
    for record, message in (
        (missing, "missing.pt is missing: No such file"),
        (secret, "only statistics were recorded"),
        (other, "holds float32 of (5,), but dump.json says float32 of (2,)"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            dump.read(record)


def test_a_file_outside_of_the_dump_is_not_read(tmp_path):
    torch.save(torch.ones(2), tmp_path / "outside.pt")
    folder = tmp_path / "dump/step0/rank0"
    leaf = tensor(torch.ones(2), file="link.pt")
    write_process(folder, {"Torch.f.0.forward": {"output": [leaf]}})
    (folder / "dump_tensor_data").mkdir()
    (folder / "dump_tensor_data/link.pt").symlink_to(tmp_path / "outside.pt")
    dump = open_dump(tmp_path / "dump")
    with pytest.raises(UsageError, match="outside the dump"):
        dump.read(next(dump.records()))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"task": "statistics", "data": {"Torch.f.0.forward": {"outp', "dump.json is damaged: "),
        ('{"task": "statistics", "data": {}}', "it has no entries: msprobe writes them when"),
        ('{"task": "statistics", "data": []}', "dump.json has no data"),
        ('{"task": ' + "[" * 200_000, "dump.json is nested too deeply"),
        ('{"task": ' + "9" * 5000 + "}", "dump.json is damaged: "),
        ('{"task": "\xff"}', "dump.json is damaged: "),
    ],
)
def test_a_damaged_file_is_told_and_other_ranks_are_read(tmp_path, text, reason):
    write_process(tmp_path / "step0/rank0", {"Torch.f.0.forward": {"output": [scalar("int", 1)]}})
    (tmp_path / "step0/rank1").mkdir()
    (tmp_path / "step0/rank1/dump.json").write_bytes(text.encode("latin-1"))
    dump = open_dump(tmp_path)
    assert [record.rank for record in dump.records()] == [0]
    (problem,) = dump.problems
    assert problem.startswith(f"step0/rank1: {reason}")
    with pytest.raises(UsageError, match=re.escape(reason)):
        open_dump(tmp_path / "step0/rank1")


def test_a_file_of_json_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    write_process(tmp_path / "d", {"Torch.f.0.forward": {"output": [scalar("int", 1)]}})
    monkeypatch.setattr("paritas.formats.foreign.msprobe_values._LARGEST_JSON", 100)
    with pytest.raises(UsageError, match=r"dump\.json has \d+ bytes, the limit is 100"):
        open_dump(tmp_path / "d")


def test_missing_or_damaged_files_beside_it_cost_only_what_they_would_have_told(tmp_path):
    linear_program(tmp_path / "step0/rank0")
    (tmp_path / "step0/rank0/stack.json").write_text("{")
    (tmp_path / "step0/rank0/construct.json").write_text('{"a": [], "b": [null, 3], "c": 4}')
    dump = open_dump(tmp_path)
    (problem,) = dump.problems
    assert problem.startswith("step0/rank0/stack.json: stack.json is damaged")
    assert len(list(dump.records())) == 18


@pytest.mark.parametrize("stack", [[], {"0": 4}, {"0": [[3], [None, 5]]}, {"0": [["x"], ["File"]]}])
def test_odd_stacks_give_no_line(tmp_path, stack):
    write_process(tmp_path / "d", {"Torch.f.0.forward": {"output": [None]}}, stack=stack)
    (record,) = open_dump(tmp_path / "d").records()
    assert record.site.line == ""


def test_a_small_file_cannot_claim_many_values(tmp_path):
    linear_program(tmp_path / "step0/rank0")
    file = tmp_path / "step0/rank0/dump.json"
    many = '"Torch.f.0.forward": {"output": [' + "0," * 50_000 + "0]}"
    file.write_text(file.read_text().replace('"data": {', '"data": {' + many + ",", 1))
    tracemalloc.start()
    dump = open_dump(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * file.stat().st_size
    (problem,) = dump.problems
    assert "there are more than" in problem


def mutated(content: bytes, random: Random) -> bytes:
    """A file after an accident: bits turned, cut off, or with numbers grown beyond all measure."""
    kind = random.randrange(4)
    if kind == 0:
        return content[: random.randrange(len(content))]
    if kind == 1:
        numbers = list(re.finditer(rb"\d+", content))
        found = random.choice(numbers)
        huge = random.choice([b"9" * 19, b"-7", b"1e999", b"9" * 5000, b"NaN", b"null", b"[[]]"])
        return content[: found.start()] + huge + content[found.end() :]
    changed = bytearray(content)
    for _ in range(random.choice([1, 4, 30])):
        place = random.randrange(len(changed))
        changed[place] = changed[place] ^ (1 << random.randrange(8))
    if kind == 2:
        begin = random.randrange(len(changed))
        changed[begin:begin] = changed[: random.randrange(len(changed))]
    return bytes(changed)


def test_no_accident_to_any_file_does_more_than_make_a_problem(tmp_path, monkeypatch):
    linear_program(tmp_path / "step0/rank0")
    random = Random(20)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    texts = [path for path in files if path.suffix == ".json"]
    taken: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: taken.append(a[0]) or empty(*a, **k))
    hurt = 0
    for number in range(ACCIDENTS):
        victim = random.choice(texts) if number % 2 else random.choice(files)
        whole = victim.read_bytes()
        victim.write_bytes(mutated(whole, random))
        largest = max(path.stat().st_size for path in files)
        tracemalloc.start()
        try:
            dump = open_dump(tmp_path)
            hurt += bool(dump.problems)
            for record in dump.records():
                assert record.id == record.site.id
                msgspec.json.encode(record)
                if record.payload is not None and record.payload.file.endswith(victim.name):
                    try:
                        dump.read(record)
                    except UsageError:
                        hurt += 1
        except UsageError:
            hurt += 1
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 40 * largest + (4 << 20), victim
        assert all(
            math.prod(size if isinstance(size, tuple) else (size,)) <= largest for size in taken
        )
        taken.clear()
        victim.write_bytes(whole)
    assert hurt > ACCIDENTS // 4
    assert open_dump(tmp_path).problems == []
