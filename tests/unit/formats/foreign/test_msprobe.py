import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from paritas.core.errors import UsageError
from paritas.formats.dumps.opening import open_dump as open_any
from paritas.formats.foreign.msprobe import looks_like, open_dump
from unit.formats.foreign.msprobe_dumps import linear_program, scalar, tensor, write_process

REAL = Path(__file__).parents[5] / "shared/fixtures/ascend/msprobe_gpu_stats"


def by_id(dump):
    return {record.id: record for record in dump.records()}


def test_a_program_is_read_in_its_order_under_the_names_of_our_own_recordings(tmp_path):
    linear_program(tmp_path / "step0/rank0")
    dump = open_dump(tmp_path)
    assert dump.problems == []
    assert [record.id for record in dump.records()] == [
        "forward/a#0/input.0",
        "forward/a#0/input.1",
        "forward/a.lin#0/input.0",
        "forward/a.lin#0/input.scale",
        "forward/a.lin.weight#0/input.value",
        "forward/Functional.linear#0/input.0",
        "forward/Functional.linear#0/input.1",
        "forward/Functional.linear#0/input.2",
        "forward/Functional.linear#0/output.0",
        "forward/a.lin#0/output.0",
        "forward/a#0/output.logits",
        "backward/a#0/output.logits",
        "backward/a.lin#0/output.0",
        "backward/Functional.linear#0/output.0",
        "backward/Functional.linear#0/input.grad_fn.1",
        "backward/a.lin.weight#0/output.grad",
        "backward/a.lin#0/input.0",
        "backward/a#0/input.1",
    ]
    assert [record.sequence for record in dump.records()] == list(range(18))


def test_values_are_read_and_gradients_are_those_of_what_bears_the_same_name(tmp_path):
    kept = linear_program(tmp_path / "step0/rank0")
    dump = open_dump(tmp_path)
    records = by_id(dump)
    wanted = {
        "forward/a.lin#0/input.0": "x",
        "forward/a.lin#0/output.0": "y",
        "forward/a.lin.weight#0/input.value": "weight",
        "backward/a.lin#0/output.0": "gy",
        "backward/a.lin#0/input.0": "gx",
        "backward/a#0/input.1": "gx",
        "backward/a.lin.weight#0/output.grad": "gw",
        "backward/Functional.linear#0/output.0": "gy",
    }
    for name, key in wanted.items():
        assert torch.equal(dump.read(records[name]), kept[key]), name
        assert records[name].statistics.maximum == kept[key].max().item()


def test_a_value_has_its_module_its_class_and_the_users_line(tmp_path):
    linear_program(tmp_path / "step0/rank0")
    records = by_id(open_dump(tmp_path))
    for name in ("forward/Functional.linear#0/output.0", "backward/Functional.linear#0/output.0"):
        site = records[name].site
        assert (site.level, site.module, site.op) == ("op", "a.lin", "Functional.linear")
        assert (site.line, site.code) == ("/app/net.py:18, in forward", "h = self.lin(x)")
    site = records["backward/a.lin#0/input.0"].site
    assert (site.level, site.module, site.op) == ("module", "a.lin", "Linear")
    assert site.line == "/app/net.py:18, in forward"
    assert records["backward/a.lin.weight#0/output.grad"].site.level == "parameter"
    assert records["forward/a.lin#0/input.scale"].value == "2.0"


@pytest.mark.parametrize("below", ["", "step3", "step3/rank2", "step3/rank2/dump.json"])
def test_each_level_of_the_folders_can_be_given(tmp_path, below):
    linear_program(tmp_path / "step3/rank2")
    given = tmp_path / below
    assert looks_like(given)
    dump = open_any(given)
    assert dump.kind == "msprobe"
    assert {(record.step, record.rank) for record in dump.records()} == {(3, 2)}
    assert all(dump.read(record).numel() for record in dump.records() if record.payload)


def test_a_step_may_have_been_moved_elsewhere(tmp_path):
    linear_program(tmp_path / "golden/rank1")
    dump = open_any(tmp_path / "golden")
    assert {(record.step, record.rank) for record in dump.records()} == {(0, 1)}


def test_steps_and_ranks_are_counted_as_numbers(tmp_path):
    data = {"Torch.f.0.forward": {"output": [tensor(torch.ones(2))]}}
    for step in (10, 2):
        for rank in (11, 0):
            write_process(tmp_path / f"step{step}/rank{rank}", data)
    dump = open_dump(tmp_path)
    assert list(dump.ranks) == [0, 11]
    assert [(record.rank, record.step, record.sequence) for record in dump.records()] == [
        (0, 2, 0),
        (0, 10, 1),
        (11, 2, 0),
        (11, 10, 1),
    ]
    assert dump.header(11).world_size == 2
    assert dump.header(0).data == "stats"


def test_processes_that_know_no_rank_are_one_program_or_several_ranks(tmp_path):
    data = {"Torch.f.0.forward": {"output": [tensor(torch.ones(2))]}}
    write_process(tmp_path / "one/step0/proc900", data)
    write_process(tmp_path / "one/step1/proc31", data)
    assert list(open_dump(tmp_path / "one").ranks) == [0]
    write_process(tmp_path / "two/step0/proc900", data)
    write_process(tmp_path / "two/step0/proc31", data)
    dump = open_dump(tmp_path / "two")
    assert list(dump.ranks) == [0, 1]
    assert dump.problems == [
        "proc31 counts as rank 0: msprobe did not know its rank",
        "proc900 counts as rank 1: msprobe did not know its rank",
    ]


def test_containers_give_positions_as_our_own_recordings_have_them(tmp_path):
    one = tensor(torch.ones(1))
    entry = {
        "input_args": [one, [one, {"m": one}], scalar("torch.Size", [4, 5])],
        "input_kwargs": {"mask": {"m": one}, "type": one},
        "output": [[one, one]],
    }
    write_process(tmp_path / "d", {"Module.a.Block.forward.0": entry})
    found = [
        record.id.removeprefix("forward/a#0/") for record in open_dump(tmp_path / "d").records()
    ]
    assert found == [
        "input.0",
        "input.1.0",
        "input.1.1.m",
        "input.2.0",
        "input.2.1",
        "input.mask.m",
        "input.type",
        "output.0",
        "output.1",
    ]


def test_what_wraps_a_model_does_not_change_its_names(tmp_path):
    one = {"output": [tensor(torch.ones(1))], "parameters": {"scale": tensor(torch.ones(1))}}
    names = ["module.Net", "module.fc.Linear", "module.b._checkpoint_wrapped_module.Block"]
    data = {f"Module.{name}.forward.0": one for name in names}
    write_process(tmp_path / "d", data)
    found = [record.site.name for record in open_dump(tmp_path / "d").records()]
    assert found == ["scale", "Net", "fc.scale", "fc", "b.scale", "b"]


def test_a_wrapper_and_what_it_wraps_keep_names_apart(tmp_path):
    one = {"output": [tensor(torch.ones(1))]}
    names = ["b.CheckpointWrapper", "b._checkpoint_wrapped_module.Block", "module.Linear"]
    write_process(tmp_path / "d", {f"Module.{name}.forward.0": one for name in names})
    found = [record.site.name for record in open_dump(tmp_path / "d").records()]
    assert found == ["b", "b._checkpoint_wrapped_module", "module"]


def test_gradients_are_counted_from_the_beginning_of_each_step(tmp_path):
    def gradients(*numbers):
        return {
            f"Module.fc.Linear.parameters_grad.{number}": {"weight": [tensor(torch.ones(1))]}
            for number in numbers
        }

    write_process(tmp_path / "step0/rank0", gradients(0, 1))
    write_process(tmp_path / "step1/rank0", gradients(10, 9))
    old = {"Module.fc.Linear.parameters_grad": {"weight": [tensor(torch.ones(1))]}}
    write_process(tmp_path / "step2/rank0", old)
    found = [(record.step, record.id) for record in open_dump(tmp_path).records()]
    weight = "backward/fc.weight#{}/output.grad".format
    wanted = [(0, 0), (0, 1), (1, 1), (1, 0), (2, 0)]
    assert found == [(step, weight(call)) for step, call in wanted]


def test_saved_variables_and_their_gradients_are_read(tmp_path):
    data = {
        "hidden.0.debug": tensor(torch.ones(2), file="hidden.0.debug.pt"),
        "hidden_grad.0.debug": tensor(torch.ones(2)),
        "lone_grad.0.debug": [tensor(torch.ones(2)), None],
        "hidden_grad.1.debug": None,
    }
    files = {"hidden.0.debug.pt": torch.ones(2)}
    write_process(tmp_path / "step0/proc7", data, files=files, main="debug.json")
    dump = open_any(tmp_path)
    assert [record.id for record in dump.records()] == [
        "forward/hidden#0/output.0",
        "backward/hidden#0/output.0",
        "forward/lone_grad#0/output.0",
        "forward/lone_grad#0/output.1",
    ]
    assert {record.site.level for record in dump.records()} == {"tensor"}
    assert torch.equal(dump.read(next(dump.records())), torch.ones(2))


def test_lines_of_older_releases_are_read(tmp_path):
    stack = {"Torch.f.0.forward": ["File /app/a b.py, line 3, in go, \n f(x)"]}
    write_process(tmp_path / "d", {"Torch.f.0.forward": {"output": [None]}}, stack=stack)
    (record,) = open_dump(tmp_path / "d").records()
    assert (record.site.line, record.site.code) == ("/app/a b.py:3, in go", "f(x)")


def test_other_folders_are_not_taken_for_dumps_of_msprobe(tmp_path):
    (tmp_path / "step0/rank0").mkdir(parents=True)
    (tmp_path / "step0/rank0/x.npy").write_bytes(b"")
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings/dump.json").write_text('{"colour": 3}')
    for path in (tmp_path, tmp_path / "settings", tmp_path / "nothing"):
        assert not looks_like(path)
    with pytest.raises(UsageError, match=r"it has no step0/rank0/dump\.json"):
        open_dump(tmp_path)


def leaf_count(tree, *, backward):
    """How many values are below, counted by other means: by the text of each object."""
    waiting, found = [tree], 0
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, dict) and {"type", "value"} - set(one) and "dtype" not in one:
            waiting += one.values()
        else:
            found += not (one is None and backward)
    return found


@pytest.mark.skipif(not REAL.is_dir(), reason="the real dump is not beside this checkout")
def test_a_real_dump_of_a_residual_network_is_read_completely():
    dump = open_any(REAL)
    assert (dump.kind, dump.problems, list(dump.ranks)) == ("msprobe", [], [0])
    records = list(dump.records())
    for step in (0, 1):
        text = (REAL / f"step{step}/proc2016/dump.json").read_text()
        data = json.loads(text)["data"]
        wanted = 0
        for name, entry in data.items():
            parts = [part for key, part in entry.items() if key != "is_recompute"]
            wanted += leaf_count(parts, backward="backward" in name)
        own = [record for record in records if record.step == step]
        assert len(own) == wanted
        tensors = [record for record in own if record.tensor is not None]
        assert len(tensors) == text.count('"torch.Tensor"') == 2071
        assert all(
            record.statistics.l2 is not None
            for record in tensors
            if "int" not in record.tensor.dtype
        )
        figures = Counter(record.statistics.maximum for record in tensors)
        assert figures == Counter(float(value) for value in re.findall(r'"Max": (\S+),', text))
    ids = [(record.step, record.id) for record in records]
    assert len(set(ids)) == len(ids)
    found = by_id(dump)
    site = found["forward/layer1.0.conv1#0/output.0"].site
    assert (site.op, site.module, site.level) == ("Conv2d", "layer1.0.conv1", "module")
    assert site.line.endswith("torchvision/models/resnet.py:146, in forward")
    assert found["backward/fc#0/output.0"].tensor.shape == (32, 1000)
    assert found["backward/fc#0/input.0"].tensor.shape == (32, 2048)
    assert found["forward/fc#0/output.0"].tensor.shape == (32, 1000)
    assert found["backward/fc.weight#0/output.grad"].tensor.shape == (1000, 2048)
    for record in records:
        if record.site.level == "module" and record.site.phase == "backward":
            forward = found[record.id.replace("backward/", "forward/", 1)]
            assert forward.tensor.shape == record.tensor.shape, record.id
