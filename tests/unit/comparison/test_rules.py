"""What a user says of two dumps, in a file and on the command line."""

from __future__ import annotations

import inspect
import pickle
import textwrap

import pytest

from paritas.comparison import rules as module
from paritas.comparison.rules import Rules, plain_name
from paritas.core.errors import UsageError


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "rules.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def documented(write):
    """The example in the words that describe the format."""
    lines = inspect.getdoc(module).split("code-block:: toml\n")[1].splitlines()
    example = [line for line in lines if not line or line.startswith("    ")]
    return write(textwrap.dedent("\n".join(example)))


def test_the_example_in_the_documentation_means_what_it_says(documented):
    rules = Rules.of(documented)
    name = "forward/layers.3.attn/aten.mm.default#0/output.0"
    assert rules.requirement_for(name).text == "rel_l2 <= 1e-3 and max_abs < 1"
    assert rules.requirement_for("forward/head#0/output.0").text == "cosine_similarity >= 0.999"
    assert rules.ignores("forward/graph_0/mul#0/output.0", "layers.0.rotary_emb")
    assert rules.ignores("forward/lm_head#0/output.0")
    assert not rules.ignores("forward/model.lm_head#0/output.0")
    assert rules.dims_for("forward/layers.0.attn.out#0/output.0") == "b s[cp] h[tp] d"
    assert rules.mesh == {"cp": 2, "tp": 4}
    assert rules.steps == ("1-3:0-2",)
    *plain, split, concat = rules.renamings
    assert [(one.split, one.concat) for one in plain] == [(None, None), (None, None)]
    assert split.split.parts == ("q", "k", "v")
    assert concat.concat.of == ("gate", "up")
    assert pickle.loads(pickle.dumps(rules)) == rules


def test_what_is_given_beside_the_file_comes_first(documented):
    rules = Rules.of(
        documented,
        rules=[("attn", "max_ulp <= 4")],
        renames=[("a", "b")],
        dims=[("out", "b s")],
        mesh="dp=8",
        steps=["3"],
        ignore=["extra"],
    )
    assert rules.requirement_for("forward/layers.3.attn#0/output.0").text == "max_ulp <= 4"
    assert rules.renamings[0].my == "a"
    assert rules.dims_for("forward/attn.out#0/output.0") == "b s"
    assert rules.mesh == {"dp": 8}
    assert rules.steps == ("3",)
    assert rules.ignores("forward/extra#0/output.0")
    assert rules.ignores("forward/rotary_emb#0/output.0")


def test_nothing_said_means_nothing():
    rules = Rules.of()
    assert rules == Rules()
    assert rules.requirement_for("forward/a#0/output.0") is None
    assert rules.dims_for("forward/a#0/output.0") is None
    assert not rules.ignores("forward/a#0/output.0")


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("forward/layers.0/aten.mm.default#12/output.0.1", "layers.0/aten.mm.default"),
        ("backward/graph_0/~mm#0/input.mask", "graph_0/~mm"),
        ("forward/a#b#0/output.0", "a#b"),
        ("something else", "something else"),
    ],
)
def test_a_plain_name_has_no_pass_call_and_side(name, plain):
    assert plain_name(name) == plain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour = 1", "unknown field `colour`.*its keys are ignore, steps, rules"),
        ("ignore = 3", "Expected `array`"),
        ("rules = [", "is not TOML"),
        pytest.param(f"steps = {'[' * 5000}", "is nested too deeply", id="nested"),
        ("ignore = ['(']", r"ignore: invalid regular expression '\('"),
        ("[rules]\n'(' = 'rel_l2 < 1'", r"rules: invalid regular expression '\('"),
        ("[rules]\na = 'rel_l3 < 1'", "rules: for 'a', cannot read the rule: unknown figure"),
        ("steps = ['x']", "steps: cannot parse 'x'"),
        ("[mesh]\ntp = 0", "mesh: tp = 0"),
        ("[[rename]]\nmy = 'a'", "missing required field `golden`"),
        ("[[rename]]\nmy = '('\ngolden = 'b'", r"rename: invalid regular expression '\('"),
        ("[[rename]]\nmy = 'a'\ngolden = '\\1'", "invalid group reference 1"),
        (
            "[[rename]]\nmy = 'a'\ngolden = 'b'\npermute = [1, 1]",
            "is not a permutation of the dimensions",
        ),
        (
            "[[rename]]\nmy = 'a'\ngolden = 'b'\nsplit = {parts = ['q', 'k']}",
            "write {part} in gold",
        ),
        ("[[rename]]\nmy = 'a'\ngolden = 'b'\nconcat = {of = ['q', 'k']}", "write {part} in my"),
        ("[[rename]]\nmy = 'a'\ngolden = '{part}'\nsplit = {parts = ['q']}", "two or more"),
        (
            "[[rename]]\nmy = 'a'\ngolden = '{part}'\nsplit = {parts = ['q', 'k'], sizes = [1]}",
            r"sizes = \[1\] does not fit the parts \['q', 'k'\]",
        ),
        (
            (
                "[[rename]]\nmy = '{part}'\ngolden = '{part}'\nsplit = {sizes = [1, 2]}\n"
                "concat = {of = ['q', 'k']}"
            ),
            "split or concat, not both",
        ),
    ],
)
def test_what_cannot_be_read_is_shown(write, text, message):
    with pytest.raises(UsageError, match=message):
        Rules.of(write(text))


@pytest.mark.parametrize("mesh", ["tp", "tp=x", "tp=2,tp=3", "tp=0"])
def test_a_mesh_that_cannot_be_read_is_refused(mesh):
    with pytest.raises(UsageError, match="mesh"):
        Rules.of(mesh=mesh)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*none\.toml: No such file"):
        Rules.of(tmp_path / "none.toml")
