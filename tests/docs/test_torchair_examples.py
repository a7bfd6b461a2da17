"""The examples of torchair's document on dumps, run as written but for the names of imports.

What the document leaves open (`model = ...`, the inference) is a linear layer and a GELU, called
with three tokens.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import processes
from paritas import torchair_dump
from paritas.core.errors import UsageError
from paritas.formats.dumps.reading import Dump

pytestmark = pytest.mark.slow

SWITCH = """\
{
  "Switch": {
    "GraphFusion": {
      "ALL": "off"
    },
    "UBFusion": {
      "ALL": "off"
    }
  }
}
"""

GE_EXISTING_CONFIG = """
import torch
import paritas.torchair_dump as torchair
from paritas import torchair_dump

model = build_model()
config = torchair.CompilerConfig()
torchair_dump.get_ge_dump_config(dump_path="dump", compiler_config=config)

npu_backend = torchair.get_npu_backend(compiler_config=config)
model = torch.compile(model, backend=npu_backend)
outputs = infer(model)
"""

GE_NEW_CONFIG = """
import torch
import paritas.torchair_dump as torchair
from paritas import torchair_dump

model = build_model()
config = torchair_dump.get_ge_dump_config(dump_path="dump")

npu_backend = torchair.get_npu_backend(compiler_config=config)
model = torch.compile(model, backend=npu_backend)
outputs = infer(model)
"""

FX_EXISTING_CONFIG = """
import torch
import paritas.torchair_dump as torchair
from paritas import torchair_dump

model = build_model()
config = torchair.CompilerConfig()
torchair_dump.get_fx_dump_config(dump_path="dump", compiler_config=config)

npu_backend = torchair.get_npu_backend(compiler_config=config)
model = torch.compile(model, backend=npu_backend)
outputs = infer(model)
"""

FX_NEW_CONFIG = """
import torch
import paritas.torchair_dump as torchair
from paritas import torchair_dump

model = build_model()
config = torchair_dump.get_fx_dump_config(dump_path="dump")

npu_backend = torchair.get_npu_backend(compiler_config=config)
model = torch.compile(model, backend=npu_backend)
outputs = infer(model)
"""

FUSION_OFF_EXISTING_CONFIG = """
import torch
import paritas.torchair_dump as torchair
from paritas import torchair_dump

model = build_model()
config = torchair.CompilerConfig()
torchair_dump.get_ge_dump_config(dump_path="dump_fusion_off",
                                 fusion_switch_file="fusion_switch.json", compiler_config=config)

npu_backend = torchair.get_npu_backend(compiler_config=config)
model = torch.compile(model, backend=npu_backend)
outputs = infer(model)
"""

FUSION_OFF_NEW_CONFIG = """\
import torch
import paritas.torchair_dump as torchair
from paritas import torchair_dump

model = build_model()
config = torchair_dump.get_ge_dump_config(dump_path="dump_fusion_off", fusion_switch_file="fusion_switch.json")

npu_backend = torchair.get_npu_backend(compiler_config=config)
model = torch.compile(model, backend=npu_backend)
outputs = infer(model)
"""  # noqa: E501  (as the document has it)

NAME = re.compile(r"([\w.]+)-([\w.]+)\.(INPUT|OUTPUT)\.(\w+(?:\.\d+)?)\.(\d{20})\.npy")
GRAPH = re.compile(r"dynamo_(original|optimized)_graph_0_rank_0_pid_\d+_ts_\d{20}\.txt")
ALIKE = {"rtol": 1e-5, "atol": 1e-6}


def build_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 6), nn.GELU())


def tokens() -> list[torch.Tensor]:
    seeded = torch.Generator().manual_seed(11)
    return [torch.randn(4, 8, generator=seeded) for _ in range(3)]


@torch.no_grad()
def infer(model: nn.Module) -> list[torch.Tensor]:
    return [model(token) for token in tokens()]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("fusion_switch.json").write_text(SWITCH)
    torch.compiler.reset()


def run(example: str) -> list[torch.Tensor]:
    names = {"build_model": build_model, "infer": infer}
    exec(example, names)
    names["npu_backend"].close()
    return names["outputs"]


def arrays(folder: Path, token: int) -> dict[tuple[str, str, str, str], np.ndarray]:
    """What a reader of torchair's layout finds, by node, operator, side and position."""
    found = {}
    paths = list((folder / "worldsize1_global_rank0" / "graph_0" / str(token)).iterdir())
    for path in paths:
        named = NAME.fullmatch(path.name)
        assert named, path.name
        found[named.group(1, 2, 3, 4)] = np.load(path, allow_pickle=False)
    assert len(found) == len(paths)
    return found


def top_of(folder: Path) -> set[str]:
    return {GRAPH.sub(r"\1", path.name) for path in folder.iterdir()}


def outputs_of(found, *, shape=(4, 6)) -> list[np.ndarray]:
    return [one for key, one in found.items() if key[2] == "OUTPUT" and one.shape == shape]


def assert_holds_the_results(folder: Path, results: list[torch.Tensor]) -> None:
    """Of every token, the result of the program is in it, and the program's is what eager gives."""
    expected = infer(build_model())
    for token, (result, eager) in enumerate(zip(results, expected, strict=True)):
        torch.testing.assert_close(result, eager)
        assert any(np.array_equal(one, result.numpy()) for one in outputs_of(arrays(folder, token)))


def assert_index_leads_to_the_files(folder: Path) -> None:
    dump = Dump.open(folder)
    assert dump.problems == []
    header = dump.header(0)
    assert header.layout == "msit"
    assert header.closed
    assert {seen.status for seen in header.observed} == {"unchanged"}
    records = [record for record in dump.records() if record.tensor is not None]
    assert records
    for record in records:
        values = np.load(folder / record.payload.file, allow_pickle=False)
        assert np.array_equal(dump.read(record).numpy(), values)


@pytest.mark.parametrize("example", [FX_EXISTING_CONFIG, FX_NEW_CONFIG], ids=["existing", "new"])
def test_fx_dump(example):
    results = run(example)
    folder = Path("dump/msit_fx_dump")
    assert top_of(folder) == {"rank0", "worldsize1_global_rank0"}
    assert_holds_the_results(folder, results)
    assert_index_leads_to_the_files(folder)
    model = build_model()
    for token, given in enumerate(tokens()):
        found = arrays(folder, token)
        linear = found["addmm", "aten.addmm.default", "OUTPUT", "0"]
        assert np.array_equal(linear, model[0](given).detach().numpy())
        assert np.array_equal(found["addmm", "aten.addmm.default", "INPUT", "1"], given.numpy())
        assert found["mul", "aten.mul.Tensor", "INPUT", "1"] == 0.5


@pytest.mark.parametrize("example", [GE_EXISTING_CONFIG, GE_NEW_CONFIG], ids=["existing", "new"])
def test_ge_dump(example):
    results = run(example)
    folder = Path("dump/msit_ge_dump")
    assert top_of(folder) == {"rank0", "worldsize1_global_rank0", "original", "optimized"}
    assert_holds_the_results(folder, results)
    assert_index_leads_to_the_files(folder)
    fused = [record for record in Dump.open(folder).records() if len(record.site.nodes) > 1]
    assert fused
    optimized = next(folder.glob("dynamo_optimized_*")).read_text()
    original = next(folder.glob("dynamo_original_*")).read_text()
    for node in fused[0].site.nodes:
        assert f'name: "{node}"' in original
        assert f's: "{node}"' in optimized
    for node, op, side, position in arrays(folder, 0):
        if side == "OUTPUT" and op != "placeholder" and not node.endswith(".node"):
            assert f's: "{node}-{op}.OUTPUT.{position}"' in optimized


@pytest.mark.parametrize(
    "example", [FUSION_OFF_EXISTING_CONFIG, FUSION_OFF_NEW_CONFIG], ids=["existing", "new"]
)
def test_ge_dump_with_fusion_off(example):
    results = run(example)
    folder = Path("dump_fusion_off/msit_ge_dump")
    assert top_of(folder) == {"rank0", "worldsize1_global_rank0", "original", "optimized"}
    assert_holds_the_results(folder, results)
    assert_index_leads_to_the_files(folder)
    run(FX_NEW_CONFIG)
    for token in range(3):
        apart, reference = arrays(folder, token), arrays(Path("dump/msit_fx_dump"), token)
        # With nothing fused, what is a value of the graph is one of the compiled code too.
        shared = [key for key in apart if key[1] != "placeholder" and key[2] == "OUTPUT"]
        assert {key[0] for key in shared} >= {"addmm", "mul", "mul_1", "erf", "add", "mul_2"}
        both = [key for key in shared if key in reference]
        assert len(both) >= 6
        for key in both:
            np.testing.assert_allclose(apart[key], reference[key], **ALIKE)


@pytest.mark.parametrize("example", [FX_NEW_CONFIG, GE_NEW_CONFIG], ids=["fx", "ge"])
def test_a_second_run_needs_a_folder_of_its_own(example):
    run(example)
    with pytest.raises(UsageError, match="give each run a dump_path of its own"):
        run(example)


def run_ge(**given) -> Path:
    config = torchair_dump.get_ge_dump_config(dump_path="dump", **given)
    backend = torchair_dump.get_backend(compiler_config=config)
    infer(torch.compile(build_model(), backend=backend))
    backend.close()
    return Path("dump/msit_ge_dump")


def test_dump_token_chooses_steps():
    folder = run_ge(dump_token=[1, 2])
    steps = (folder / "worldsize1_global_rank0" / "graph_0").iterdir()
    assert sorted(path.name for path in steps) == ["1", "2"]


@pytest.mark.parametrize(("mode", "side"), [("input", "INPUT"), ("output", "OUTPUT")])
def test_dump_mode_chooses_sides(mode, side):
    folder = run_ge(dump_mode=mode)
    assert {key[2] for key in arrays(folder, 0)} == {side}


def test_dump_layer_chooses_names_and_what_is_not_there_is_an_error_in_the_end():
    folder = run_ge(dump_layer=["AddMM"])
    found = arrays(folder, 0)
    assert {key[0] for key in found if key[2] == "OUTPUT"} == {"addmm"}
    assert {key[3] for key in found if key[0] == "addmm" and key[2] == "INPUT"} == {"0", "1", "2"}
    config = torchair_dump.get_ge_dump_config(dump_path="other", dump_layer=["addm"])
    backend = torchair_dump.get_backend(compiler_config=config)
    torch.compiler.reset()
    infer(torch.compile(build_model(), backend=backend))
    with pytest.raises(UsageError, match=r"'addm' matched none .*'addmm'"):
        backend.close()


def test_the_dump_is_whole_when_the_process_ends():
    Path("script.py").write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from test_torchair_examples import build_model, infer\n{FX_NEW_CONFIG}"
    )
    assert processes.run("script.py").returncode == 0
    folder = Path("dump/msit_fx_dump")
    assert json.loads((folder / "rank0" / "header.json").read_text())["closed"]
    assert_index_leads_to_the_files(folder)
