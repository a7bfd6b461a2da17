from __future__ import annotations

import collections
import dataclasses

import pytest
import torch

from paritas import UsageError
from paritas.partition import IRObject, TensorInfo, VerifyConfig, check_partition
from paritas.sharding.operators.configuration import unwrap

Pair = collections.namedtuple("Pair", "first second")  # noqa: PYI024  (the kind without types)


def config(**changes):
    fields = {
        "fsig": "torch.add",
        "args": [TensorInfo("shape", (4, 2)), TensorInfo("shape", (4, 2))],
        "kwargs": {},
        "noutputs": 1,
        "parti_options": [{"idx": 0, "dim": 0}],
    }
    return VerifyConfig(**{**fields, **changes})


def test_a_tensor_info_is_written_by_position_or_by_name():
    assert TensorInfo("shape", (2, 3)) == TensorInfo(value_type="shape", value=(2, 3))
    assert TensorInfo("shape", value=[2, 3]).shape == (2, 3)
    assert TensorInfo("value", torch.zeros(5, 2)).shape == (5, 2)
    assert TensorInfo("value", 3).shape is None


def test_a_value_inside_anything_takes_the_place_of_its_object():
    nine = IRObject("size", value=IRObject("inner", value=9, is_constant=True), is_constant=True)
    assert unwrap(slice(IRObject("a", 0), nine, IRObject("b", 2))) == slice(0, 9, 2)
    assert unwrap({"k": [(nine, 1), {"in": nine}]}) == {"k": [(9, 1), {"in": 9}]}
    assert unwrap(Pair(nine, None)) == Pair(9, None)
    assert unwrap(torch.Size([2, 3])) == torch.Size([2, 3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("size", (2,)), "must be 'shape'"),
        (("shape", 3), "a shape is a tuple of sizes"),
        (("shape", (2, -1)), "a shape is a tuple of sizes"),
        (("shape", (2, 1.5)), "a shape is a tuple of sizes"),
        (("shape", "12"), "a shape is a tuple of sizes"),
        (("shape", (2,), "float32"), "must be a torch.dtype"),
        (("value", 3, torch.float32), "a value takes no dtype"),
    ],
)
def test_a_malformed_tensor_info_is_refused_with_what_to_write(arguments, message):
    with pytest.raises(UsageError, match=message):
        TensorInfo(*arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fsig": ""}, "fsig must be the name of an operator"),
        ({"args": [torch.zeros(2)]}, r"args\[0\] of torch.add must be TensorInfo"),
        ({"noutputs": 0}, "of 1 or more, got 0"),
        ({"noutputs": True}, "of 1 or more, got True"),
        ({"non_grad_indices": [2]}, "names argument 2, but torch.add has arguments 0 to 1"),
        ({"non_grad_indices": [-1]}, "names argument -1"),
        ({"parti_options": [(0, 1)]}, r"partition option \(0, 1\) is not a dictionary"),
        ({"parti_options": [{"idx": 0}]}, "has no key `dim`"),
        ({"parti_options": [{"idx": 0, "dim": 0, "n": 2}]}, "unknown key 'n'"),
        ({"parti_options": [{"idx": 0, "dim": -1}]}, "`dim` must be an integer of 0 or more"),
        (
            {"parti_options": [{"idx": 0, "dim": 0, "num": 1}]},
            "`num` must be an integer of 2 or more",
        ),
    ],
)
def test_a_malformed_configuration_is_refused_with_its_value(changes, message):
    with pytest.raises(UsageError, match=message):
        config(**changes)


def test_every_public_name_has_a_home_that_type_checkers_see_too():
    import ast
    from pathlib import Path

    from paritas import partition

    tree = ast.parse(Path(partition.__file__).read_text(encoding="utf-8"))
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("paritas.")
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    }
    assert seen == partition._HOMES
    assert partition.__all__ == sorted(partition._HOMES) == dir(partition)
    assert all(hasattr(partition, name) for name in partition.__all__)
    assert not hasattr(partition, "verify_partition_option")


# --- fields assigned before use -------------------------------------------------------------------


def test_fields_are_assigned_before_use_and_checked_there():
    asked = config()
    asked.fsig, asked.args[0].value = "torch.sub", (8, 2)
    used = asked.as_used()
    assert (used.fsig, used.args[0].shape) == ("torch.sub", (8, 2))
    asked.args[0].value = 3
    assert used.args[0].shape == (8, 2)
    with pytest.raises(UsageError, match=r"TensorInfo\('shape', 3\): a shape is a tuple of sizes"):
        asked.as_used()


def test_an_invalid_assigned_value_is_refused_on_use():
    asked = config()
    asked.noutputs = 0
    with pytest.raises(UsageError, match="noutputs must be an integer of 1 or more, got 0"):
        check_partition(asked)


def test_dataclasses_replace_makes_another_configuration():
    other = dataclasses.replace(config(), parti_options=[{"idx": 1, "dim": 1}])
    assert other.parti_options == [{"idx": 1, "dim": 1}]
    with pytest.raises(UsageError, match="must be 'shape'"):
        dataclasses.replace(other.args[0], value_type="size")


def test_a_misspelt_field_is_not_assigned():
    with pytest.raises(AttributeError, match="noutput"):
        config().noutput = 2
