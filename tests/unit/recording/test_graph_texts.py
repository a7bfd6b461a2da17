from __future__ import annotations

import operator
import re
from pathlib import Path

import pytest
import torch
from torch import fx

from paritas.core.torch_private.buffers import Buffer, Kernel, SeenBuffer
from paritas.formats.files.records import Site
from paritas.formats.foreign.ge_graph_text import ValueFacts
from paritas.recording.graphs import buffer_facts, node_facts, write_graph_texts

aten = torch.ops.aten


@pytest.fixture(name="module")
def _module() -> fx.GraphModule:
    """The two halves of `x`, added."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    split = graph.create_node("call_function", aten.split.Tensor, (x, 2), name="split")
    halves = [graph.call_function(operator.getitem, (split, index)) for index in range(2)]
    total = graph.create_node("call_function", aten.add.Tensor, tuple(halves), name="add")
    graph.output((total,))
    x.meta["val"] = torch.empty(4, 3)
    split.meta["val"] = (torch.empty(2, 3), torch.empty(2, 3))
    for half in halves:
        half.meta["val"] = torch.empty(2, 3)
    total.meta["val"] = torch.empty(2, 3, dtype=torch.bfloat16)
    return fx.GraphModule({}, graph)


HALF = ValueFacts("float32", (2, 3))
KERNEL = Kernel(
    name="cpp_fused_add_0",
    nodes=("split", "getitem", "getitem_1", "add"),
    reads=(Buffer("x"),),
    writes=(
        Buffer("buf0", "cpp_fused_add_0", ("split", "getitem", "getitem_1", "add"), "add", ("x",)),
    ),
)
COPY = Kernel(
    name="extern_copy",
    nodes=(),
    reads=KERNEL.writes,
    writes=(Buffer("buf1", "extern_copy", ("add",), None, ("buf0",)),),
)


def site_of(seen: SeenBuffer) -> Site:
    names = {"buf0": "add", "buf1": "add.buf1"}
    return Site(
        source="fused",
        level="buffer",
        name=names[seen.buffer.name],
        op="aten.add.Tensor",
        module="layers.0",
    )


def test_a_node_has_its_results_and_where_its_arguments_come_from(module):
    x, split, first, second, total = node_facts(module)
    assert (x.op, x.outputs) == ("placeholder", (ValueFacts("float32", (4, 3)),))
    assert (split.inputs, split.outputs) == (("x:0",), (HALF, HALF))
    assert (first.inputs, second.inputs) == (("split:0",), ("split:1",))
    assert total.op == "aten.add.Tensor"
    assert total.inputs == ("getitem:0", "getitem_1:0")
    assert total.outputs == (ValueFacts("bfloat16", (2, 3)),)


def test_a_buffer_bears_the_name_of_its_record_and_claims_no_more_than_is_known(module):
    exact, other = buffer_facts(node_facts(module), [KERNEL, COPY], site_of)
    assert (exact.node.name, exact.buffer, exact.kernel) == ("add", "buf0", "cpp_fused_add_0")
    assert exact.originals == ("split", "getitem", "getitem_1", "add")
    assert exact.node.inputs == ("x:0",)
    assert exact.node.outputs == (ValueFacts("bfloat16", (2, 3)),)
    assert other.node.inputs == ("add:0",)
    assert other.node.outputs == (ValueFacts(),)


def test_two_files_bear_the_names_that_torchair_gives_them(module, tmp_path):
    write_graph_texts(tmp_path, 3, "graph_0_backward", module, [KERNEL], site_of)
    original, optimized = sorted(tmp_path.iterdir(), reverse=True)
    tail = r"_graph_0_backward_rank_3_pid_\d+_ts_\d{20}\.txt"
    assert re.fullmatch(f"dynamo_original{tail}", original.name)
    assert re.fullmatch(f"dynamo_optimized{tail}", optimized.name)
    assert original.read_text().count("\nop {") == 5
    assert optimized.read_text().count("\nop {") == 1


def test_a_file_that_could_not_be_written_whole_is_not_there(module, tmp_path, monkeypatch):
    def half(path, text, encoding):
        path.write_bytes(text[: len(text) // 2].encode(encoding))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        write_graph_texts(tmp_path, 3, "graph_0_backward", module, [KERNEL], site_of)
    assert list(tmp_path.iterdir()) == []
