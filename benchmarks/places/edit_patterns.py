"""Patterns of calls in generated code, for edits: regular expressions and what replaces them."""

from __future__ import annotations

import re

# What a call is given, with brackets in two levels.
_GIVEN = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
# Spellings of one operator.
GELU = "torch.ops.aten.gelu.default torch._C._nn.gelu torch.nn.functional.gelu functional.gelu"
SILU = "torch.ops.aten.silu.default torch.nn.functional.silu functional.silu"
TANH = "torch.ops.aten.tanh.default torch.tanh"
SOFTMAX = (
    "torch.ops.aten._softmax.default torch.ops.aten._safe_softmax.default "
    "torch.nn.functional.softmax torch.softmax"
)
LINEAR = "torch._C._nn.linear torch.ops.aten.addmm.default torch.ops.aten.mm.default"
ATTENTION = "torch._C._nn.scaled_dot_product_attention functional.scaled_dot_product_attention"
CONVOLUTION = "torch.conv1d torch.conv2d torch.ops.aten.convolution.default"
RELU = "torch.ops.aten.relu.default torch.relu torch.nn.functional.relu functional.relu"
SIGMOID = "torch.ops.aten.sigmoid.default torch.sigmoid"
TABLE = "torch.nn.functional.embedding torch.ops.aten.embedding.default self.table"


def around(calls: str, text: str) -> list[tuple[str, str]]:
    """The first call of one of these, with something around it; its first group is the call."""
    return [(rf"(?<![\w.])({re.escape(one)}{_GIVEN})", text) for one in calls.split()]


def method(name: str, text: str) -> list[tuple[str, str]]:
    """The same for the call of a method on a name."""
    return [(rf"\b(?!torch\b|aten\b)(\w+\.{name}{_GIVEN})", text)]


def operand(place: int, calls: str, text: str) -> list[tuple[str, str]]:
    """An operand that is a name, changed; its second group is the operand."""
    before = r"[\w.]+, " * place
    return [
        (rf"((?<![\w.]){re.escape(one)}\({before})(\w+)(?=[,)])", rf"\1{text}")
        for one in calls.split()
    ]


def function(calls: str, text: str) -> list[tuple[str, str]]:
    """A call whose first argument is a name, replaced; its first group is that argument."""
    return [(rf"(?<![\w.]){re.escape(one)}\((\w+)(?:, [^()]*)?\)", text) for one in calls.split()]


def between(sign: str, aten: str, text: str) -> list[tuple[str, str]]:
    """A sum or product of two names; its groups are these."""
    return [
        (rf"^torch\.ops\.aten\.{aten}\.Tensor\((\w+), ([a-z]\w*)\)$", text),
        (rf"^([a-z]\w*) {re.escape(sign)} ([a-z]\w*)$", text),
    ]
