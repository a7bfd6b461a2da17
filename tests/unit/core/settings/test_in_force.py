"""What a value of the file or the environment becomes, and which of several counts."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from letters import LETTERS
from paritas.core.errors import UsageError
from paritas.core.settings import Settings, SettingsFile, bind_variables, check_names, settable

HOME = Path("/project")
LOOK_STRICT = "PARITAS_LOOK_AT_STRICT"
OPTIONS = [
    click.Option(["--dtype"], type=click.Choice(["float32", "bfloat16"])),
    click.Option(["--strict"], is_flag=True),
    click.Option(["--dynamic/--no-dynamic"], default=None),
    click.Option(["--jobs"], type=click.IntRange(1), default=2),
    click.Option(["--time"], type=float, default=1.5),
    click.Option(["-r", "--ranks", "--rank"], multiple=True, type=int),
    click.Option(["--json", "json_path"], type=click.Path(path_type=Path)),
    click.Option(["--graph"], metavar="FILE|module:factory"),
    click.Option(["--ignore"], multiple=True, metavar="REGEX"),
    click.Option(["--no-lift"], is_flag=True),
    click.Option(["--overwrite"], is_flag=True),
]
CHECK = click.Command("check", params=[click.Argument(["target"]), *OPTIONS])
LOOK = click.Command("look-at", params=[click.Option(["--strict"], is_flag=True)])
for _name, _command in {"check": CHECK, "look-at": LOOK}.items():
    bind_variables(_name, _command)


@pytest.fixture(autouse=True)
def silence(monkeypatch):
    """No variable of ours in the environment."""
    for name in [name for name in os.environ if name.startswith("PARITAS_")]:
        monkeypatch.delenv(name)


def settings(prefix="tool.paritas", **values):
    file = SettingsFile(HOME / "pyproject.toml", prefix, values)
    return Settings(file, {"check": CHECK, "look-at": LOOK})


def refusal(found, command="check"):
    with pytest.raises(UsageError) as caught:
        found.for_command(command)
    return str(caught.value)


# --- which counts ---------------------------------------------------------------------------------


def test_a_key_above_the_tables_holds_for_every_command_that_has_the_option():
    found = settings(strict=True, dtype="float32")
    assert found.for_command("check") == {"strict": True, "dtype": "float32"}
    assert found.for_command("look-at") == {"strict": True}
    assert found.origin("look-at", "strict") == "pyproject.toml [tool.paritas]"


def test_own_table_then_own_variable_override(monkeypatch):
    found = settings(dtype="float32", check={"dtype": "bfloat16"})
    assert found.for_command("check")["dtype"] == "bfloat16"
    assert found.origin("check", "dtype") == "pyproject.toml [tool.paritas.check]"
    monkeypatch.setenv("PARITAS_DTYPE", "float32")
    assert found.for_command("check")["dtype"] == "float32"
    assert found.origin("check", "dtype") == "PARITAS_DTYPE"
    monkeypatch.setenv("PARITAS_CHECK_DTYPE", "bfloat16")
    assert found.for_command("check")["dtype"] == "bfloat16"
    assert found.origin("check", "dtype") == "PARITAS_CHECK_DTYPE"


def test_a_variable_takes_back_a_flag_of_the_file(monkeypatch):
    monkeypatch.setenv("PARITAS_LOOK_AT_STRICT", "0")
    found = settings(strict=True)
    assert found.for_command("look-at") == {"strict": False}
    assert found.for_command("check") == {"strict": True}


def test_an_empty_variable_is_none(monkeypatch):
    monkeypatch.setenv("PARITAS_STRICT", "")
    assert settings().for_command("look-at") == {}


def test_what_is_not_set_is_shown_with_its_default():
    found = {it.key: it for it in settings().in_force("check")}
    assert list(found) == [
        "dtype", "strict", "dynamic", "jobs", "time", "ranks", "json", "graph", "ignore", "no-lift",
    ]  # fmt: skip
    assert {it.origin for it in found.values()} == {"default"}
    assert (found["jobs"].value, found["dtype"].value, found["strict"].value) == (2, None, False)


def test_the_command_gets_what_is_shown_as_in_force(monkeypatch):
    monkeypatch.setenv("PARITAS_CHECK_RANKS", "3 4")
    found = settings(dynamic=False, check={"json": "out.json", "jobs": 4})
    context = CHECK.make_context("check", ["it"], default_map=found.default_map("check"))
    assert context.params["ranks"] == (3, 4)
    for setting in found.in_force("check"):
        if setting.source != "default":
            assert context.params[setting.name] == setting.value, setting


# --- values ---------------------------------------------------------------------------------------


def test_both_spellings_of_a_key_and_of_an_option_are_known():
    assert settings(check={"no_lift": True, "rank": [1]}).for_command("check") == {
        "no_lift": True,
        "ranks": (1,),
    }
    both = settings(check={"no_lift": True, "no-lift": False})
    assert refusal(both).endswith("'no_lift' and 'no-lift' are one setting; keep one")


def test_a_pair_of_flags_is_one_key():
    assert settings(check={"dynamic": False}).for_command("check") == {"dynamic": False}


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("dtype", "bf16", "'bf16' is not one of 'float32', 'bfloat16'."),
        ("strict", "yes", "must be true or false"),
        ("strict", 1, "must be true or false"),
        ("jobs", 0, "0 is not in the range x>=1."),
        ("jobs", 2.7, "'2.7' is not a valid integer range."),
        ("jobs", True, "must be a string or a number"),
        ("time", float("nan"), "must be finite"),
        ("ranks", 3, 'must be an array such as ["a", "b"]'),
        ("ignore", "abc", 'must be an array such as ["a", "b"]'),
        ("ranks", [1, "x"], "'x' is not a valid integer."),
        ("graph", {"a": 1}, "must be a string or a number"),
        ("json", "a\0b", "must not contain a NUL character"),
        ("json", ["a"], "must be a string or a number"),
    ],
)
def test_a_value_that_the_option_does_not_take_is_refused_with_its_place(key, value, why):
    message = refusal(settings(check={key: value}))
    assert message.startswith(f"/project/pyproject.toml [tool.paritas.check] {key} = ")
    assert message.endswith(f": {why}")


def test_a_variable_that_the_option_does_not_take_is_refused_by_its_name(monkeypatch):
    monkeypatch.setenv("PARITAS_STRICT", "perhaps")
    assert refusal(settings(), "look-at").startswith("PARITAS_STRICT='perhaps': 'perhaps' is not")


def test_a_path_is_meant_from_the_folder_of_the_file():
    found = settings(check={"json": "out/v.json", "graph": "net.pt2"}).for_command("check")
    assert found == {"json_path": HOME / "out" / "v.json", "graph": str(HOME / "net.pt2")}
    for kept in ("package.nets:build", "s3://bucket/net.pt2", "/elsewhere/net.pt2"):
        assert settings(check={"graph": kept}).for_command("check") == {"graph": kept}


def test_a_path_in_the_environment_is_meant_from_the_working_directory(monkeypatch):
    monkeypatch.setenv("PARITAS_CHECK_JSON", "v.json")
    assert settings().for_command("check") == {"json_path": Path("v.json")}


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(LETTERS) | st.dates()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(LETTERS), inner), max_leaves=4
)


@limits(max_examples=60)
@given(st.dictionaries(st.sampled_from(sorted(settable(CHECK))), VALUES, max_size=3))
def test_any_value_is_taken_or_refused_and_never_passed_over(table):
    try:
        found = settings(check=table).for_command("check")
    except UsageError as error:
        told = str(error)
    else:
        told = ""
        assert {settable(CHECK)[key].name for key in table} == set(found)
    assert not told or "/project/pyproject.toml [tool.paritas.check]" in told


# --- names ----------------------------------------------------------------------------------------


def test_all_unknown_names_are_told_each_with_its_nearest():
    found = settings(
        strit=True, chek={"dtype": "x"}, check={"dtpye": "x", "zzz": 1}, config={}, look={}
    )
    with pytest.raises(UsageError) as caught:
        check_names(found)
    keys = "dtype, dynamic, graph, ignore, jobs, json, no-lift, rank, ranks, strict, time"
    start = "/project/pyproject.toml [tool.paritas"
    assert str(caught.value).splitlines() == [
        f"{start}.chek]: no such table; did you mean 'check'?",
        f"{start}.check]: no setting 'dtpye'; did you mean 'dtype'?",
        f"{start}.check]: no setting 'zzz'; known are {keys}",
        f"{start}.config]: no such table; the command 'config' has no settings",
        f"{start}.look]: no such table; did you mean 'look-at'?",
        f"{start}]: no setting 'strit'; did you mean 'strict'?",
    ]


def test_in_a_file_of_its_own_there_is_no_prefix():
    with pytest.raises(UsageError, match=r"\.toml, top level: no setting 'strit'; did you"):
        check_names(settings(prefix="", strit=True))
    assert "pyproject.toml [check]: no setting 'x'" in refusal(settings("", check={"x": 1}))


def test_a_command_that_is_no_table_is_told():
    with pytest.raises(UsageError, match=r"\.check\] must be a table; it is \[\{'dtype': 1\}\]"):
        check_names(settings(check=[{"dtype": 1}]))


def test_what_replaces_data_cannot_be_set():
    message = "--overwrite can only be given on the command line"
    assert refusal(settings(check={"overwrite": True})).endswith(message)
    with pytest.raises(UsageError, match=message):
        check_names(settings(overwrite=True))


def test_a_variable_that_looks_like_ours_is_refused_and_another_is_let_be(monkeypatch):
    monkeypatch.setenv("PARITAS_WHOLE_CORPUS", "1")
    monkeypatch.setenv("PARITAS_CHROMIUM", "chromium")
    monkeypatch.setenv("PARITAS_GUARD", "0")
    check_names(settings())
    monkeypatch.setenv("PARITAS_CHECK_DTPYE", "float32")
    monkeypatch.setenv("PARITAS_LOOK_AT_ALL", "1")
    with pytest.raises(UsageError) as caught:
        check_names(settings())
    first, second = str(caught.value).splitlines()
    assert first.startswith("environment variable PARITAS_CHECK_DTPYE='float32': no such setting; ")
    assert first.endswith("did you mean PARITAS_CHECK_DTYPE?")
    assert second.endswith(" PARITAS_LOOK_AT_ALL='1': no such setting; known are " + LOOK_STRICT)


def test_asking_for_what_does_not_exist_is_an_error():
    with pytest.raises(UsageError, match="no settings for 'chek'; did you mean 'check'"):
        settings().for_command("chek")
    with pytest.raises(UsageError, match="check has no setting 'dtpye'; did you mean 'dtype'"):
        settings().origin("check", "dtpye")
