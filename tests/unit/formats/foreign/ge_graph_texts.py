"""Graphs in words, as Ascend's graph engine writes them."""

from __future__ import annotations


def quoted(text):
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def attribute(key, value):
    return f"attr {{\n key: {quoted(key)}\n value {{\n {value}\n }}\n}}\n"


def op_text(name, op_type, inputs=(), *, outputs=(), originals=None, meta=""):
    """An operator; `outputs` are the file stems of its results, empty where it has none."""
    text = f"op {{\n name: {quoted(name)}\n type: {quoted(op_type)}\n"
    text += "".join(f" input: {quoted(source)}\n" for source in inputs)
    if originals is not None:
        names = "".join(f" s: {quoted(one)}" for one in originals)
        listed = f"list {{{names} val_type: VT_LIST_STRING }}"
        text += attribute("_datadump_original_op_names", listed)
    for stem in outputs:
        text += 'output_desc {\n name: "y"\n dtype: DT_FLOAT16\n shape { dim: 2 dim: 3 }\n'
        text += ' layout: "ND"\n'
        text += attribute("_meta", f"s: {quoted(meta)}") if meta else ""
        text += attribute("_fx_tensor_name", f"s: {quoted(stem)}") if stem else ""
        text += "}\n"
    return text + "}\n"


def graph_text(*ops):
    return 'name: "a_graph"\n' + "".join(ops)
