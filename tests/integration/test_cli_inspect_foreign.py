"""`paritas inspect` on what other tools left."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from paritas.app.cli import main

STAMP = "20240125031118787351"


def inspect(*arguments):
    done = CliRunner().invoke(main, ["inspect", *map(str, arguments)])
    return done.exit_code, done.output


def fx_tree(root):
    folder = root / "msit_fx_dump" / "worldsize1_global_rank0" / "graph_1" / "0"
    folder.mkdir(parents=True)
    np.save(folder / f"mm-aten.mm.default.INPUT.0.{STAMP}.npy", np.ones((2, 3), np.float32))
    bad = np.array([[1.0, np.nan]], np.float32)
    np.save(folder / f"mm-aten.mm.default.OUTPUT.0.{STAMP}.npy", bad)
    return root / "msit_fx_dump"


def test_a_tree_of_torchair_is_told_with_its_first_nan(tmp_path):
    code, output = inspect(fx_tree(tmp_path))
    assert code == 0, output
    assert "records  2 (2 node)" in output
    assert "layout fx" in output
    assert "first NaN" in output
    assert "aten.mm.default" in output


def test_files_of_weights_are_told(tmp_path):
    save_file({"layer.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    code, output = inspect(tmp_path)
    assert code == 0, output
    assert "float32[4,4]" in output
    alone = inspect(tmp_path / "model.safetensors")
    assert alone[0] == 0, alone[1]


def test_a_kind_can_be_forced(tmp_path):
    tree = fx_tree(tmp_path)
    code, output = inspect(tree, "--kind", "files")
    assert code == 0, output
    assert "2 tensor" in output
    code, output = inspect(tree, "--kind", "paritas")
    assert code == 2
    assert "is not a paritas dump" in output


@pytest.mark.parametrize("content", [None, "notes.txt"])
def test_a_folder_that_no_tool_left_is_refused(content, tmp_path):
    if content:
        (tmp_path / content).write_text("nothing")
    code, output = inspect(tmp_path)
    assert code == 2
    assert "found neither" in output


def test_a_damaged_file_is_a_problem_and_the_rest_is_told(tmp_path):
    tree = fx_tree(tmp_path)
    (file,) = tree.rglob("*INPUT.0*")
    file.write_bytes(file.read_bytes()[:-3])
    code, output = inspect(tree)
    assert code == 3, output
    assert "problem:" in output
    assert "OUTPUT" in output or "records  2" in output
