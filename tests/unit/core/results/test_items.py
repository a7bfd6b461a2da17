"""Items, and the words made of them."""

from __future__ import annotations

import msgspec
import pytest

from paritas.core.results.findings import Aspect, Finding, Status, Verdict
from paritas.core.results.items import (
    GRADIENTS,
    RANDOM_STATE,
    Item,
    ItemKind,
    after_call,
    gradient,
    harness,
    nth_output,
    output,
)

WORDS = {
    "output": output(),
    "output[1].logits": output("output[1].logits"),
    "input[0] after the call": after_call("input[0]"),
    "state norm.mean after the call": Item(ItemKind.STATE_AFTER_CALL, "norm.mean"),
    "state after the call": Item(ItemKind.STATE_AFTER_CALL),
    "state norm.mean after backward": Item(ItemKind.STATE_AFTER_BACKWARD, "norm.mean"),
    "input[0] after backward": Item(ItemKind.INPUT_AFTER_BACKWARD, "input[0]"),
    "gradient of input[0]": gradient("input[0]"),
    "gradient of w (second backward pass over one graph)": Item(ItemKind.GRADIENT_AGAIN, "w"),
    "second gradient of the cotangent of output": Item(
        ItemKind.SECOND_GRADIENT, "the cotangent of output"
    ),
    "x, as changed": Item(ItemKind.CHANGED_INPUT, "x"),
    "gradients": GRADIENTS,
    "random state (second call) (inputs 2)": RANDOM_STATE.during(2, 2),
    "graph 0 forward: output[0]": nth_output(0).in_graph("graph 0 forward"),
    "rank 1: graph 0: node add_1": Item(ItemKind.NODE, "add_1", graph="graph 0", rank=1),
    "step 3: gradient layer.weight": Item(ItemKind.TRAINING_GRADIENT, "layer.weight", step=3),
    "step 1: parameter w after step": Item(ItemKind.PARAMETER, "w", step=1),
    "output on rank 1": Item(ItemKind.OUTPUT, "output", part=1),
}


@pytest.mark.parametrize(("words", "item"), WORDS.items(), ids=list(WORDS))
def test_an_item_says_its_words(words, item):
    assert item.text == words


def test_an_option_goes_in_front_of_the_one_that_is_there():
    item = gradient("args[0]").under("on gloo ranks").under("{'idx': 0}: split by c")
    assert item.text == "{'idx': 0}: split by c, on gloo ranks, gradient of args[0]"


def test_a_draw_is_another_item_with_the_same_words():
    one, two = (Item(ItemKind.GRADIENT, "x", draw=draw) for draw in (1, 2))
    assert one != two
    assert one.text == two.text


def test_a_finding_has_the_words_of_its_item_whatever_becomes_of_it():
    finding = Finding(item=output(), aspect=Aspect.VALUE, status=Status.IDENTICAL)
    assert finding.path == "output"
    moved = msgspec.structs.replace(finding, item=output().in_graph("graph 1"))
    assert moved.path == "graph 1: output"


def test_items_come_back_from_json_with_the_words_beside_them():
    finding = Finding(item=after_call("x"), aspect=Aspect.VALUE, status=Status.IDENTICAL)
    written = Verdict(
        findings=(
            finding,
            Finding(item=harness("ranks"), aspect=Aspect.HARNESS, status=Status.UNVERIFIED),
        )
    ).to_json()
    assert b'"path":"x after the call"' in written
    assert b'"item":{"kind":"input after the call","name":"x"}' in written
    assert Verdict.from_json(written).findings[0] == finding
