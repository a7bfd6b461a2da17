"""What is said of a script that was run."""

from __future__ import annotations

from pathlib import Path

import pytest

from paritas.reports.scripts import SHOWN, Script, WrittenScript


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
