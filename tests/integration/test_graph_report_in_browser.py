"""The page of a graph in a real browser: what a person would see, click and type."""

from __future__ import annotations

from integration.chromium import ask_page
from paritas.sharding.graphs.page import graph_page
from unit.sharding.graphs.graph_samples import HOSTILE, empty, hostile, transformer

SELECTED = 'text("#selected .name")'


def column(field: str) -> str:
    cells = f"#table .tabulator-row .tabulator-cell[tabulator-field={field}]"
    return f"all('{cells}').map((cell) => cell.textContent.trim())"


def test_operators_are_shown_filtered_and_walked_through(tmp_path):
    steps = f"""
    said.shown = text("#shown");
    said.outcomes = {column("outcome")};
    said.right = {column("right")};
    said.selected = {SELECTED};
    said.splits = all("#selected .splits > tbody > tr:not(.why)").length;
    said.open = all("#selected .splits details").map((one) => one.open);
    said.findings = text("#selected details[open] .findings");
    said.wrong = all("#dims .dim.s-different").length;
    await type("#words", "LINEAR up");
    said.words = [text("#shown"), {column("node")}];
    await press("#filters [type=reset]");
    await press("[data-outcome=nothing]");
    said.nothing = [text("#shown"), {column("node")}];
    await press("[data-outcome=unsupported]");
    said.both = text("#shown");
    await press("#filters [type=reset]");
    await type("#operator", "torch.nn.functional.linear");
    said.operator = {column("node")};
    await press("#filters [type=reset]");
    await key("#table .tabulator-tableholder", "ArrowDown");
    said.second = {SELECTED};
    await key("#table .tabulator-tableholder", "End");
    said.last = {SELECTED};
    await press("[data-outcome=nothing]");
    await press("#dims tbody tr:nth-child(2) [data-row]");
    said.back = [text("#shown"), {SELECTED}];
    said.light = getComputedStyle(document.body).backgroundColor;
    await press("#theme");
    await press("#theme");
    said.dark = getComputedStyle(document.body).backgroundColor;
    """
    said = ask_page(graph_page(transformer()), tmp_path, steps)
    assert (said["state"], said["faults"]) == ("ready", [])
    assert said["shown"] == "7 of 7"
    assert said["outcomes"][0] == "≠ failed", "what needs a person comes first"
    assert said["outcomes"][-1] == "– nothing to check"
    assert said["right"][0] == "2 of 3"
    assert said["selected"] == "linear_down_0"
    assert (said["splits"], said["open"]) == (3, [False, True, False])
    assert "gradient of args[0]" in said["findings"]
    assert said["wrong"] == 3, "k twice in the rule, and in the legend"
    assert said["words"] == ["1 of 7", ["linear_up_0"]]
    assert said["nothing"] == ["2 of 7", ["getitem_0", "sum"]]
    assert said["both"] == "3 of 7"
    assert said["operator"] == ["linear_down_0", "linear_up_0"]
    assert said["second"] == "rotate_0"
    assert said["last"] == "sum"
    assert said["back"] == ["7 of 7", "embedding"], "no filter hides what was asked for"
    assert said["light"] != said["dark"]


def test_hostile_names_stay_text(tmp_path):
    steps = f"""
    said.title = document.title;
    said.scripts = all("script").length;
    said.bold = all("b[onclick]").length;
    said.links = all("main a").length;
    said.selected = {SELECTED};
    said.losses = all("#selected .splits .num").map((cell) => cell.textContent);
    """
    said = ask_page(graph_page(hostile()), tmp_path, steps)
    assert (said["state"], said["faults"]) == ("ready", [])
    assert said["title"] != "owned"
    assert (said["bold"], said["links"]) == (0, 0)
    assert said["scripts"] == 4, "the driver, the data, and the page's own two"
    assert said["selected"] == HOSTILE
    assert said["losses"][-4:-1] == ["NaN", "inf", "NaN"]


def test_a_graph_without_calls_loads_without_errors(tmp_path):
    said = ask_page(graph_page(empty()), tmp_path, "said.heading = text('h1');")
    assert (said["state"], said["faults"]) == ("ready", [])
    assert said["heading"] == "unverified: transformer_block.ckp"
