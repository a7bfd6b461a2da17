"""What the inputs and outputs of a lowered graph are to the user: parameters, gradients, outputs.

AOTAutograd numbers everything (`primals_5`), but leaves descriptions that lead back to the captured
graph, whose inputs know their place in the user's program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paritas._torch.graphs import module_path, output_node, placeholders, returned

if TYPE_CHECKING:
    from torch.fx import GraphModule


def captured_input_names(module: GraphModule) -> list[str]:
    """The inputs of a graph that Dynamo captured, as the user would write them."""
    return [_source_name(node) or node.name for node in placeholders(module)]


def lowered_input_names(module: GraphModule, captured: list[str]) -> list[str]:
    """The inputs of a graph below AOTAutograd."""
    return [
        _described(node.meta.get("desc"), captured) or node.name for node in placeholders(module)
    ]


def lowered_output_names(module: GraphModule, captured: list[str]) -> list[str]:
    """The outputs of a graph below AOTAutograd, each named once."""
    values = returned(module)
    described = output_node(module).meta.get("desc") or [None] * len(values)
    names: list[str] = []
    for position, (value, description) in enumerate(zip(values, described, strict=False)):
        name = _described(description, captured)
        if not name:
            name = f"output[{position}]" if value is None else f"value {value}"
        if name in names:
            name = f"{name} (output {position})"
        names.append(name)
    return names


def _described(description: Any, captured: list[str]) -> str:
    kind = type(description).__name__
    if kind in {"PlainAOTInput", "ParamAOTInput", "BufferAOTInput"}:
        position = getattr(description, "idx", None)
        if isinstance(position, int) and position < len(captured):
            return captured[position]
        return str(getattr(description, "target", "") or "")
    if kind == "PlainAOTOutput":
        return f"output[{description.idx}]"
    if kind == "GradAOTOutput":
        of = _described(description.grad_of, captured)
        return f"gradient of {of}" if of else ""
    if kind == "TangentAOTInput":
        of = _described(description.output, captured)
        return f"upstream gradient of {of}" if of else ""
    if kind == "InputMutationAOTOutput":
        of = _described(description.mutated_input, captured)
        return f"{of}, as changed" if of else ""
    return ""


def _source_name(node: Any) -> str:
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None)
    name = getattr(source, "name", "")
    name = name() if callable(name) else name  # a method before torch 2.12
    return module_path(str(name)) if name else ""
