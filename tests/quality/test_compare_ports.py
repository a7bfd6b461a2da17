"""A port with other names: what is matched by order alone is never called the fault."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from click.testing import CliRunner

from paritas.app.cli import main
from paritas.comparison.compare import compare
from paritas.core.results.findings import Status
from paritas.recording.capture import capture
from quality.ported_model import EPS, WORDS, Original, port

WRONG = 1e-2
ROLES = {
    "Port": "Original",
    "attn": "self_attn",
    "blocks": "layers",
    "final_norm": "norm",
    "head": "lm_head",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "tok": "embed_tokens",
    "w2": "down_proj",
    "wo": "o_proj",
}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """A function that records the original and the port, each once."""
    folder = tmp_path_factory.mktemp("ports")
    torch.manual_seed(0)
    original, words = Original(), torch.randint(0, WORDS, (2, 5))

    @functools.cache
    def record(level, eps):
        model = original if eps is None else port(original, eps)
        if eps is not None:  # other bits on every machine: some compute fused products alike
            weight = model.blocks[0].mlp.w2.weight.detach()
            weight.copy_(torch.nextafter(weight, 2 * weight))
        path = folder / f"{level}-{eps}"
        with torch.no_grad(), capture(path, level=level):
            model(words)
        return path

    return lambda level, eps: (record(level, eps), record(level, None))


@functools.cache
def compared(my, golden):
    return compare(my, golden)


def paths(found):
    """My and the golden module of each pair that was matched by order or value."""
    return {
        tuple(
            re.sub(r"^forward/|[#/].*", "", side.id.removeprefix("forward/"))
            for side in (row.my, row.golden)
        )
        for row in found.rows
        if row.matched_by in ("order", "value")
    }


def role(name):
    """What a module of either model is for; the port has fewer of them."""
    return ".".join(ROLES.get(part, part) for part in name.split("."))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("level", ["module", "both"])
@pytest.mark.parametrize("eps", [EPS, WRONG])
def test_modules_of_other_layers_and_roles_are_not_paired(dumps, level, eps):
    pairs = paths(compared(*dumps(level, eps)))
    assert len(pairs) > 10
    assert not [pair for pair in pairs if role(pair[0]) != pair[1]]


@pytest.mark.parametrize("level", ["module", "both"])
def test_a_correct_port_is_not_called_different(dumps, level):
    found = compared(*dumps(level, EPS))
    assert found.status is Status.UNVERIFIED  # the fused projections have no counterpart
    assert found.first is None


def test_of_modules_alone_the_first_that_differs_for_certain_is_the_whole(dumps, tmp_path):
    my, golden = dumps("module", WRONG)
    found = compared(my, golden)
    assert (found.status, found.first.kind) == (Status.DIFFERENT, "unmatched")
    assert found.rows[found.first.row].name == "forward/Original#0/output.0"
    doubtful = [row for row in found.rows if row.matched_by == "order" and not row.status.passes()]
    assert doubtful[0].name == "forward/layers.1.input_layernorm#0/output.0"
    assert doubtful[0].status is Status.UNVERIFIED
    assert doubtful[0].reason.startswith("the two are matched by order only, and differ: ")
    ran = CliRunner().invoke(
        main,
        ["compare", "--my-path", str(my), "--golden-path", str(golden), "--output", str(tmp_path)],
    )
    said = " ".join(ran.output.split())
    assert "look at this operator first" not in said
    assert "next: map the names of the values before it with --rename, and compare again" in said


def test_with_operators_the_wrong_number_is_named(dumps):
    found = compared(*dumps("both", WRONG))
    row = found.rows[found.first.row]
    assert row.name == "forward/layers.1.input_layernorm/aten.add.Tensor#0/input.1"
    assert (row.matched_by, row.reason) == ("value", "0.01 instead of 1e-05")


@pytest.mark.parametrize("level", ["module", "both"])
def test_with_the_proposed_rules_the_module_is_named(dumps, level):
    my, golden = dumps(level, WRONG)
    note = compared(my, golden).notes[-1]
    assert note.startswith("rules for names that seem to belong together: --rename '")
    rules = [tuple(rule.split("=")) for rule in re.findall(r"--rename '([^']+)'", note)]
    found = compare(my, golden, renames=rules)
    row = found.rows[found.first.row]
    assert row.name.startswith("forward/layers.1.input_layernorm")
    assert row.matched_by == "rename"
    assert found.first.kind == "made" or level == "both"
