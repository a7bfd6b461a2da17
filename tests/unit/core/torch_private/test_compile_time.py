"""Inductor repeats less work, and still sees what is new."""

from __future__ import annotations

import importlib

from paritas.core.torch_private.compile_time import quick_compiles


def test_dtype_rules_are_collected_again_only_if_there_are_new_ones(monkeypatch):
    importlib.import_module("torch._inductor.lowering")  # it has the rules
    collector = importlib.import_module("torch._inductor.dtype_propagation")
    collect = collector.DtypePropagationOpsHandler
    rules = importlib.import_module("torch._inductor.utils").op_dtype_propagation_rules
    with quick_compiles():
        handler = collect()
        monkeypatch.setattr(handler, "exp", "kept")
        assert collect().exp == "kept"
        monkeypatch.setitem(rules, "of_a_user", rules["exp"])
        assert hasattr(collect(), "of_a_user")
        assert collect().exp != "kept"
        monkeypatch.undo()
        collect()
        vars(handler).pop("of_a_user")
