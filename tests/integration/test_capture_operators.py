"""Operators that `paritas.capture` records, each under the module at work."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from integration.captures import Dumped, tokens, transformer
from paritas.core.errors import UsageError
from paritas.recording.capture import capture


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return torch.relu_(self.fc(x)) * 2


def test_operators_go_by_their_module_and_line(tmp_path):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 3)
    with torch.no_grad(), capture(tmp_path / "d", level="op"):
        y = model(x)
    dumped = Dumped(tmp_path / "d")
    assert dumped.names("op") == [
        "fc/aten.t.default",
        "fc/aten.addmm.default",
        "Net/aten.relu_.default",
        "Net/aten.mul.Tensor",
    ]
    assert dumped.names("module") == []
    assert torch.equal(dumped["forward/Net/aten.mul.Tensor#0/output.0"], y)
    assert dumped["forward/Net/aten.mul.Tensor#0/input.1"] == "2"
    site = dumped.by_key[0, "forward/fc/aten.addmm.default#0/output.0"].site
    assert (site.op, site.module) == ("aten.addmm.default", "fc")
    assert site.code == "return torch.relu_(self.fc(x)) * 2"


def test_an_operator_that_writes_in_place_is_recorded_before_and_after(tmp_path):
    with capture(tmp_path / "d", level="op"):
        x = torch.tensor([-1.0, 1.0])
        x.relu_()
    dumped = Dumped(tmp_path / "d")
    assert dumped["forward/aten.relu_.default#0/input.0"].tolist() == [-1, 1]
    assert dumped["forward/aten.relu_.default#0/output.0"].tolist() == [0, 1]


def test_what_an_operator_without_results_wrote_is_recorded(tmp_path):
    with capture(tmp_path / "d", level="op", ops=["_foreach_add_"]):
        torch._foreach_add_([torch.zeros(2), torch.ones(2)], 3.0)
    dumped = Dumped(tmp_path / "d")
    assert dumped["forward/aten._foreach_add_.Scalar#0/input.0.1"].tolist() == [1, 1]
    assert dumped["forward/aten._foreach_add_.Scalar#0/output.self.1"].tolist() == [4, 4]


def test_memory_that_nobody_wrote_to_is_no_value(tmp_path):
    with capture(tmp_path / "d", level="op"):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=torch.empty(2, 2))
    ids = Dumped(tmp_path / "d").ids()
    assert "forward/aten.mm.out#0/output.0" in ids
    assert "forward/aten.mm.out#0/input.out" not in ids
    assert not any("empty" in name and "output" in name for name in ids)


def test_operators_of_the_backward_pass_belong_to_the_module_they_serve(tmp_path):
    torch.manual_seed(0)
    model = transformer()
    with capture(tmp_path / "d", level="op", phases="backward", ops=["mm"], mode="output"):
        model(tokens())["logits"].sum().backward()
    dumped = Dumped(tmp_path / "d")
    modules = list(dict.fromkeys(record.site.module for record in dumped.records))
    parts = ("mlp.2", "mlp.0", "out", "qkv")
    assert modules == ["head", *(f"layers.{n}.{part}" for n in (1, 0) for part in parts)]
    assert torch.equal(
        dumped["backward/layers.0.qkv/aten.mm.default#1/output.0"],
        model.layers[0].qkv.weight.grad,
    ) or torch.equal(
        dumped["backward/layers.0.qkv/aten.mm.default#1/output.0"].T,
        model.layers[0].qkv.weight.grad,
    )
    line = dumped.by_key[0, "backward/layers.0.qkv/aten.mm.default#0/output.0"].site.line
    assert line.endswith("in forward")


def test_an_optimizer_is_recorded_like_any_operator(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with capture(tmp_path / "d", level="op", ops="aten.add_"):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    dumped = Dumped(tmp_path / "d")
    assert torch.equal(dumped["forward/aten.add_.Tensor#0/output.0"], model.weight.detach())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_program_shows_the_same_operators_with_and_without_gradients(tmp_path, context):
    names = []
    for folder, condition in (("a", torch.enable_grad), ("b", context)):
        with condition(), capture(tmp_path / folder, level="op", phases="forward"):
            transformer()(tokens())
        found = Dumped(tmp_path / folder).names("op")
        # Autograd adds detach of its own; which kernel attention takes depends on gradients.
        names.append([name for name in found if "detach" not in name and "attention" not in name])
    assert names[0] == names[1]


def test_casts_of_autocast_are_operators(tmp_path):
    model = Net()
    with (
        capture(tmp_path / "d", level="op", gradients=False),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        model(torch.ones(2, 3))
    dumped = Dumped(tmp_path / "d")
    assert dumped["forward/fc/aten.addmm.default#0/output.0"].dtype is torch.bfloat16
    assert "fc/aten._to_copy.default" in dumped.names("op")


def test_what_recording_itself_does_is_seen_by_no_mode(tmp_path):
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    counts = []
    for level in (None, "module", "both"):
        with FlopCounterMode(display=False) as counter:
            if level is None:
                model(x).sum().backward()
            else:
                with capture(tmp_path / level, level=level):
                    model(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == counts[2]
    names = Dumped(tmp_path / "both").names("op")
    assert not any("clone" in name for name in names)


def test_a_default_device_is_none_of_recordings_business(tmp_path):
    model = nn.Linear(2, 2)
    x = torch.ones(2)
    with torch.device("meta"), torch.no_grad(), capture(tmp_path / "d", level="both"):
        y = model(x)
    assert torch.equal(Dumped(tmp_path / "d")["forward/Linear#0/output.0"], y)


def test_a_transformed_program_is_left_alone_and_the_dump_says_so(tmp_path):
    model = nn.Linear(2, 2)
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    expected = torch.vmap(model)(x)
    with capture(tmp_path / "d", gradients=False):
        result = torch.vmap(model)(x)
        torch.fx.symbolic_trace(nn.Sequential(model))
        torch.export.export(model, (x,))
        model(x)
    assert torch.equal(result, expected)
    dumped = Dumped(tmp_path / "d")
    assert dumped.names() == ["Linear"]
    assert any("traced or transformed" in note for note in dumped.notes)


def test_tensors_without_values_are_left_out_and_the_dump_says_so(tmp_path):
    model = nn.Linear(2, 2, device="meta")
    with capture(tmp_path / "d", level="both"):
        model(torch.ones(2, device="meta"))
        nn.Identity()(torch.ones(1))
    dumped = Dumped(tmp_path / "d")
    assert any("have no values to record" in note for note in dumped.notes)
    assert all(r.tensor is None or r.tensor.device == "cpu" for r in dumped.records)


def test_higher_order_operators_run_as_ever(tmp_path):
    x = torch.ones(2)
    with capture(tmp_path / "d", level="op"):
        y = torch.cond(x.sum() > 1, lambda x: x + 1, lambda x: x - 1, (x,))
    assert y.tolist() == [2, 2]


def test_pausing_below_another_mode_waits_for_it(tmp_path):
    from torch.utils.flop_counter import FlopCounterMode

    depth = torch._C._len_torch_dispatch_stack  # noqa: TID251
    with capture(tmp_path / "d", level="op") as recording:
        torch.ones(1).add(1)
        with FlopCounterMode(display=False):
            recording.pause()
            torch.ones(1).add(2)
        recording.resume()
        torch.ones(1).add(3)
        recording.pause()
        assert depth() == 0
        with (
            FlopCounterMode(display=False),
            pytest.raises(UsageError, match="inside another dispatch mode"),
        ):
            recording.resume()
    dumped = Dumped(tmp_path / "d")
    added = [dumped[name] for name in dumped.ids() if "add" in name and name.endswith("input.1")]
    assert added == ["1", "3"]
    assert depth() == 0
