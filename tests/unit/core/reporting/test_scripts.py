"""What is said of a script that was run."""

from __future__ import annotations

import collections
import functools
import http
import json
import re
from pathlib import Path

import numpy as np
import pytest

from paritas.core.reporting.scripts import SHOWN, NoScriptError, Script, WrittenScript, literal


@pytest.mark.parametrize(
    ("exit_code", "output", "shows", "said"),
    [
        (1, f"off by 1\n{SHOWN}\n", True, SHOWN),
        (1, f"{SHOWN}\nrepro.py:9: UserWarning: slow\n  y = x @ x\n", True, SHOWN),
        (0, "no difference\n", False, "no difference"),
        (1, "Traceback\nValueError: no\n", False, "ValueError: no"),
        (1, "", False, "it prints nothing"),
        (None, "", False, ""),
    ],
)
def test_a_script_that_shows_the_failure_says_so_whatever_torch_warns_of(
    exit_code, output, shows, said
):
    written = WrittenScript(Path("repro.py"), exit_code=exit_code, output=output)
    assert (written.shows, written.said) == (shows, said)


def text_of(path, imports):
    script = Script(
        ("Title",), tuple(imports), {}, "\n\ndef program(x):\n    return x\n",
        "\n\ndef main():\n    return 1\n", ("a", "b"),
    )  # fmt: skip
    return script.text(path)


def test_a_script_finds_modules_that_lie_where_the_user_s_program_does(tmp_path, monkeypatch):
    (tmp_path / "beside_the_program.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = ["from beside_the_program import value", "import numpy", "import json.decoder"]
    text = text_of(tmp_path / "bug" / "repro.py", lines)
    assert "sys.path.append(str(Path(__file__).resolve().parents[1]))  # beside_the_program" in text
    assert text.count("sys.path") == 1  # not for what is installed
    assert text.index("sys.path") < text.index("from beside_the_program")
    elsewhere = text_of(Path("/somewhere/repro.py"), lines)
    assert f"sys.path.append(str({str(tmp_path.resolve())!r}))" in elsewhere
    assert "sys.path" not in text_of(tmp_path / "repro.py", ["import numpy", "import gone_module"])


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, (2.5, None)], "b": {"c": frozenset({"x", "y"})}},
        {3, 1},
        json.dumps,
        collections.OrderedDict,
        functools.partial(int, base=2),
        http.HTTPStatus.OK,
        re.IGNORECASE | re.MULTILINE,
        float("inf"),
    ],
    ids=["nested", "set", "function", "class", "partial", "enum", "flags", "infinity"],
)
def test_what_has_a_name_or_plain_parts_is_written_as_code(value):
    again = eval(literal(value))
    if isinstance(value, functools.partial):
        again, value = again("101"), 5
    assert again == value


def test_numbers_of_numpy_are_written_as_plain_numbers():
    assert literal([np.float64(0.5), np.str_("a")]) == "[0.5, 'a']"


class _Unnamed:
    pass


@pytest.mark.parametrize(
    "value",
    [lambda: 0, _Unnamed(), functools.partial(lambda: 0)],
    ids=["lambda", "object", "partial"],
)
def test_what_no_other_process_could_import_is_refused(value):
    with pytest.raises(NoScriptError, match="cannot be written as code"):
        literal([value])
