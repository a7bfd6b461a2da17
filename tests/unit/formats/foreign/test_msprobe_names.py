import pytest

from paritas.formats.foreign.msprobe_values import (
    MsprobeCall,
    forward_name,
    in_order,
    parents_of,
    parse_name,
    plain_paths,
)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        (
            "Module.layer1.0.conv1.Conv2d.forward.2",
            MsprobeCall("module", "layer1.0.conv1", "Conv2d", "forward", 2),
        ),
        ("Module.fc.Linear.backward.0", MsprobeCall("module", "fc", "Linear", "backward", 0)),
        ("Cell.net.Dense.forward.0", MsprobeCall("module", "net", "Dense", "forward", 0)),
        (
            "Module.fc.Linear.parameters_grad.3",
            MsprobeCall("gradient", "fc", "Linear", "backward", 3),
        ),
        (
            "Module.fc.Linear.parameters_grad",
            MsprobeCall("gradient", "fc", "Linear", "backward", 0),
        ),
        (
            "Functional.conv2d.11.backward",
            MsprobeCall("function", "Functional.conv2d", "Functional.conv2d", "backward", 11),
        ),
        (
            "Aten.add.Tensor.0.forward",
            MsprobeCall("function", "Aten.add.Tensor", "Aten.add.Tensor", "forward", 0),
        ),
        # A layer may bear the name of a pass.
        (
            "Module.forward.Linear.forward.1",
            MsprobeCall("module", "forward", "Linear", "forward", 1),
        ),
        ("hidden.states.0.debug", MsprobeCall("saved", "hidden.states", number=0)),
        ("Module.forward.0", MsprobeCall("other", "Module.forward.0")),
        ("Torch.f.99999999999.forward", MsprobeCall("other", "Torch.f.99999999999.forward")),
        ("", MsprobeCall("other", "")),
    ],
)
def test_a_name_says_which_call_it_is_of(name, call):
    assert parse_name(name) == call


@pytest.mark.parametrize(
    ("backward", "forward"),
    [
        ("Module.backward.Linear.backward.1", "Module.backward.Linear.forward.1"),
        ("Functional.relu.0.backward", "Functional.relu.0.forward"),
    ],
)
def test_a_backward_call_has_a_forward_call(backward, forward):
    assert forward_name(backward) == forward


def test_a_module_begins_before_what_happens_inside_it():
    parents = {"f": "inner", "inner": "outer", "g": "outer"}
    found = list(in_order(["f", "inner", "g", "outer"], parents))
    begun = [name for name, begins in found if begins]
    assert begun == ["outer", "inner", "f", "g"]
    assert [name for name, begins in found if not begins] == ["f", "inner", "g", "outer"]


def test_modules_that_are_inside_each_other_do_not_hold_up_the_reader():
    found = list(in_order(["a", "b"], {"a": "b", "b": "a"}))
    assert found == [("b", True), ("a", True), ("a", False), ("b", False)]


def test_a_backward_call_stands_where_its_forward_call_does():
    parents = parents_of(
        {
            "Torch.f.0.forward": ["Module.a.Block.forward.1", 0],
            "Torch.f.0.backward": "Module.z.Block.backward.0",
            "Torch.g.0.backward": "Module.z.Block.backward.0",
            "Torch.h.0.forward": None,
        }
    )
    assert parents == {
        "Torch.f.0.forward": "Module.a.Block.forward.1",
        "Torch.f.0.backward": "Module.a.Block.backward.1",
        "Torch.g.0.backward": "Module.z.Block.backward.0",
    }


def test_wrappers_leave_the_names_of_a_model_alone():
    assert plain_paths({"module": "Net", "module.fc": "Linear"}) == {
        "module": "Net",
        "module.fc": "fc",
    }
    assert plain_paths({"module": "Net", "fc": "Linear"}) == {"module": "module", "fc": "fc"}
    assert plain_paths({"_orig_mod.fc": "Linear"}) == {"_orig_mod.fc": "fc"}
