"""No file runs code by being opened: not a pickle where text is expected, nor text that is code.

Files that are pickles by their format (`.pt`, `.ckp`, `.npz`, `.pt2`) have tests where they are
read. Here are the places where no pickle belongs, and somebody laid one.
"""

from __future__ import annotations

import io
import os
import pickle

import msgspec
import pytest
import torch
from click.testing import CliRunner

from paritas.app.cli import main
from paritas.app.pytest.parity import golden_of, read_golden, write_golden
from paritas.comparison import results_folder as comparison_files
from paritas.comparison.rows import Comparison
from paritas.comparison.rules import Rules
from paritas.core.errors import UsageError
from paritas.core.results.findings import Verdict
from paritas.core.settings import find_file
from paritas.formats.dumps.reading import Dump
from paritas.formats.foreign.fusion_switch import load_switch
from paritas.mutants.rows import PowerReport
from paritas.sharding.graphs import results_folder
from paritas.sharding.graphs.rows import GraphReport

MARK = "was-run"


class Harm:
    """Makes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (MARK,)


def saved():
    stream = io.BytesIO()
    torch.save({"state": Harm()}, stream)
    return stream.getvalue()


# As text, as bytes, as torch saves, and as a line of JSON would begin.
PICKLES = {
    "protocol 0": pickle.dumps(Harm(), protocol=0),
    "protocol 5": pickle.dumps(Harm(), protocol=5),
    "torch.save": saved(),
    "after JSON": b'{"format": 1}\n' + pickle.dumps(Harm(), protocol=0) + b"\n",
}
CODE = f"__import__('os').mkdir({MARK!r})"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder to work in; whatever is done there, nothing may have run."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PARITAS_")]:
        monkeypatch.delenv(name)
    (tmp_path / ".git").mkdir()
    yield tmp_path
    assert not (tmp_path / MARK).exists()


def read_journal(path):
    about = results_folder.About(graph="g", calls="c", settings={}, versions={})
    report = GraphReport(graph=about.graph, kind="fx", ended=False)
    with results_folder.GraphJournal(path.parent, about, report):
        pass


READERS = {
    "paritas.toml": lambda path: find_file(path.parent),
    "pyproject.toml": lambda path: find_file(path.parent),
    "rules.toml": Rules.of,
    "fusion_switch.cfg": load_switch,
    "comparison.json": lambda path: comparison_files.read_comparison(path.parent),
    "verdict.json": lambda path: Verdict.from_json(path.read_bytes()),
    "power.json": lambda path: PowerReport.from_json(path.read_bytes()),
    "results.json": lambda path: GraphReport.from_json(path.read_bytes()),
    "all.json": lambda path: Comparison.from_json(path.read_bytes()),
    results_folder.JOURNAL_NAME: read_journal,
}


@pytest.mark.parametrize("name", READERS)
def test_a_pickle_in_place_of_a_text_is_refused_and_never_run(name, place):
    for kind, content in PICKLES.items():
        (place / name).write_bytes(content)
        if name == results_folder.JOURNAL_NAME and b"\n" not in content:
            continue  # a line that was cut short, which is dropped with a note
        with pytest.raises(UsageError):
            pytest.fail(f"{kind} was read: {READERS[name](place / name)}")


def test_the_mark_would_be_seen(place):
    pickle.loads(PICKLES["protocol 0"])
    (place / MARK).rmdir()
    eval(CODE)
    (place / MARK).rmdir()


@pytest.fixture
def golden(place):
    write_golden(place / "golden", golden_of({"x": torch.ones(2), "n": 3}), "test")
    return place / "golden"


def test_a_pickle_in_place_of_any_file_of_a_golden_is_never_run(golden):
    files = [path for path in golden.rglob("*") if path.is_file()]
    assert len(files) >= 3
    for path in files:
        whole = path.read_bytes()
        for kind, content in PICKLES.items():
            path.write_bytes(content)
            with pytest.raises(UsageError):
                pytest.fail(f"{kind} in {path.name} was read: {read_golden(golden)}")
        path.write_bytes(whole)
    assert read_golden(golden).values["value['n']"] == 3


def test_code_in_place_of_a_golden_value_is_never_run(golden):
    changed = 0
    for path in golden.rglob("*"):
        if path.is_file() and b'"value":"3"' in (whole := path.read_bytes()):
            path.write_bytes(whole.replace(b'"value":"3"', b'"value":' + msgspec.json.encode(CODE)))
            changed += 1
    assert changed == 1
    with pytest.raises(UsageError):
        read_golden(golden)
    assert Dump.open(golden).records()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("paritas.toml", "config"),
        ("comparison.json", "report ."),
        ("results.json", "report ."),
        ("results.json", "shrink ."),
        ("comparison.json", "shrink ."),
    ],
)
def test_a_command_refuses_a_pickle_without_a_traceback(name, arguments, place):
    for content in PICKLES.values():
        (place / name).write_bytes(content)
        result = CliRunner().invoke(main, arguments.split())
        assert result.exit_code == 2, result.output
        assert "Traceback" not in result.output
