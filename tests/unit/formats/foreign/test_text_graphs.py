from __future__ import annotations

import re

import pytest

from paritas.formats.foreign.ge_graph_text import (
    FusedFacts,
    NodeFacts,
    ValueFacts,
    optimized_graph_text,
    original_graph_text,
)

TOKEN = re.compile(r'\s*(?:([A-Za-z_][\w]*|-?\d+)|("(?:[^"\\\n]|\\.)*")|([{}:]))')


def parse(text: str) -> list[tuple[str, object]]:
    """Protobuf's text format, as far as these graphs use it: strict, and knowing nothing more."""
    text = text.strip()
    tokens, at = [], 0
    while at < len(text):
        found = TOKEN.match(text, at)
        assert found, text[at : at + 40]
        tokens.append(found[0].strip())
        at = found.end()
    fields, rest = fields_of(tokens)
    assert not rest
    return fields


def fields_of(tokens: list[str]) -> tuple[list[tuple[str, object]], list[str]]:
    fields: list[tuple[str, object]] = []
    while tokens and tokens[0] != "}":
        name, sign, *tokens = tokens
        if sign == "{":
            inner, tokens = fields_of(tokens)
            assert tokens[0] == "}"
            fields.append((name, inner))
            tokens = tokens[1:]
        else:
            assert sign == ":"
            value, *tokens = tokens
            fields.append((name, unquoted(value) if value[0] == '"' else value))
    return fields, tokens


def unquoted(text: str) -> str:
    def character(found):
        code = found[1]
        plain = {"n": b"\n", "t": b"\t", "r": b"\r", '"': b'"', "\\": b"\\"}
        return plain[code] if code in plain else bytes([int(code, 8)])

    raw = text[1:-1].encode("ascii")
    pattern = rb"\\([0-7]{3}|.)"
    return re.sub(pattern, lambda m: character([None, m[1].decode()]), raw).decode()


def all_of(fields, name):
    return [value for key, value in fields if key == name]


def attributes(fields):
    found = {}
    for attribute in all_of(fields, "attr"):
        (key,), (value,) = all_of(attribute, "key"), all_of(attribute, "value")
        found[key] = value[0][1]
    return found


MM = NodeFacts(
    name="mm",
    op="aten.mm.default",
    inputs=("x:0", "w:0"),
    outputs=(ValueFacts("float32", (-1, 4)),),
    module="layers.0",
    line="model.py:18, in forward",
)


def test_a_captured_graph_says_what_each_node_takes_and_gives():
    split = NodeFacts(
        name="split",
        op="aten.split.Tensor",
        inputs=("mm:0",),
        outputs=(ValueFacts("bfloat16", (2, 2)), ValueFacts("int4", ())),
    )
    graph = parse(original_graph_text("graph_0", [MM, split]))
    assert graph[0] == ("name", "graph_0")
    first, second = all_of(graph, "op")
    assert first[:4] == [
        ("name", "mm"),
        ("type", "aten.mm.default"),
        ("input", "x:0"),
        ("input", "w:0"),
    ]
    assert attributes(first) == {"module": "layers.0", "line": "model.py:18, in forward"}
    (described,) = all_of(first, "output_desc")
    assert described[:3] == [
        ("dtype", "DT_FLOAT"),
        ("shape", [("dim", "-1"), ("dim", "4")]),
        ("layout", "ND"),
    ]
    assert attributes(described)["_fx_tensor_name"] == "mm-aten.mm.default.OUTPUT.0"
    results = all_of(second, "output_desc")
    assert [all_of(one, "dtype") for one in results] == [["DT_BF16"], ["DT_UNDEFINED"]]
    assert attributes(results[1])["_fx_tensor_name"] == "split-aten.split.Tensor.OUTPUT.1"


def test_a_fused_graph_says_what_each_buffer_stands_for():
    fused = FusedFacts(node=MM, buffer="buf0", kernel="cpp_fused_mm_0", originals=("t", "mm"))
    (op,) = all_of(parse(optimized_graph_text("graph_0", [fused])), "op")
    found = attributes(op)
    assert (found["buffer"], found["kernel"]) == ("buf0", "cpp_fused_mm_0")
    assert found["_datadump_original_op_names"] == [
        ("s", "t"),
        ("s", "mm"),
        ("val_type", "VT_LIST_STRING"),
    ]


@pytest.mark.parametrize(
    "text", ['a "b" \\c', "x: {1} }\n\t", "é: 模型", "a:  b", "{", '\\040"'], ids=ascii
)
def test_any_text_is_quoted_so_that_it_comes_back(text):
    node = NodeFacts(name=text, op="op", line=text)
    written = original_graph_text("graph_0", [node])
    (op,) = all_of(parse(written), "op")
    assert all_of(op, "name") == [text]
    assert attributes(op)["line"] == text


def test_readers_that_go_line_by_line_are_not_misled_by_text():
    node = NodeFacts(name="a: b {c} }", op="op")
    lines = original_graph_text("graph_0", [node]).splitlines()
    (named,) = [line for line in lines[1:] if "name" in line]
    assert named.count(": ") == 1
    assert "{" not in named
    assert "}" not in named
