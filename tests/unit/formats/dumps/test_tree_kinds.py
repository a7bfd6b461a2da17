"""Which reader is taken for which files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from paritas.formats.dumps.opening import open_dump

if TYPE_CHECKING:
    from pathlib import Path


def fx(folder: Path) -> None:
    top = folder / "msit_fx_dump" / "worldsize1_global_rank0" / "graph_1" / "0"
    top.mkdir(parents=True)
    np.save(top / "mm-aten.mm.default.OUTPUT.0.20240125031118787351.npy", np.zeros(2))


def sglang(folder: Path) -> None:
    torch.save(torch.zeros(2), folder / "step=0___rank=0___dump_index=1___name=x.pt")


def files(folder: Path) -> None:
    np.save(folder / "x.npy", np.zeros(2))
    torch.save(torch.zeros(2), folder / "y.pt")


@pytest.mark.parametrize("write", [fx, sglang, files], ids=lambda one: one.__name__)
def test_the_kind_is_found_out(tmp_path: Path, write: object) -> None:
    assert callable(write)
    write(tmp_path)
    assert open_dump(tmp_path).kind == write.__name__


def test_the_kind_can_be_forced(tmp_path: Path) -> None:
    sglang(tmp_path)
    assert open_dump(tmp_path, "files").kind == "files"


def test_a_rank_that_no_run_has_does_not_make_a_run_of_so_many(tmp_path: Path) -> None:
    name = "step=0___rank=999999999___dump_index=1___name=x.pt"
    torch.save(torch.zeros(2), tmp_path / name)
    dump = open_dump(tmp_path)
    assert list(dump.ranks) == [999999999]
    assert dump.header(999999999).world_size == 100_000
