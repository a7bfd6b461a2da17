"""Faults that transformers had and fixed: a relation must be red before the fix and green after it.

    python -m benchmarks.zoo.history ENVIRONMENTS OUT.jsonl
    python -m benchmarks.zoo.history ENVIRONMENTS OUT.jsonl --summary

ENVIRONMENTS has a virtual environment for each release, named by its version, with transformers of
that version and the same torch. `history.toml` lists the faults. Each row is a forked process; a
process for each release imports it once. Rows that OUT has already are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

_HERE = Path(__file__).parent
_PASSES = ("identical", "equivalent", "unstable")
_FAILS = ("different", "degraded", "unverified")
_SECONDS = 120


def faults():
    """The table."""
    return tomllib.loads((_HERE / "history.toml").read_text())["fault"]


# --- In the environment of one release ------------------------------------------------------------


def _built(value, sizes):
    """Settings, where a table with a "*" is a configuration of that class, and "+" names sizes."""
    import transformers

    if not isinstance(value, dict):
        return value
    more = {name: _built(one, sizes) for name, one in value.items() if name not in ("*", "+")}
    made = {**sizes.get(value.get("+"), {}), **more}
    return getattr(transformers, value["*"])(**made) if "*" in value else made


def build(fault):
    """The model of a row and its inputs: token ids drawn at random."""
    import torch
    import transformers

    if fault.get("drawn"):
        from paritas.core.targets import build_target

        torch.manual_seed(0)
        model, inputs = build_target("hf:" + fault["model"])
        return model.eval(), inputs
    table = tomllib.loads((_HERE / "history.toml").read_text())["sizes"]
    settings = {}
    for name in fault.get("sizes", ()):
        settings |= table[name]
    settings |= _built(fault.get("config", {}), table)
    model_class = getattr(transformers, fault["model"])
    config_class = model_class.config_class
    if "config_class" in fault:
        config_class = getattr(transformers, fault["config_class"])
    config = config_class(**settings)
    torch.manual_seed(fault.get("seed", 0))
    how = {"attn_implementation": fault["attention"]} if "attention" in fault else {}
    model = model_class._from_config(config, **how)  # noqa: SLF001  (no weights to load)
    for parameter in model.parameters():  # small weights hide everything behind the residuals
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=fault.get("std", 0.15))
    model.train(fault.get("train", False))
    size = (fault.get("rows", 2), fault.get("tokens", 11))
    ids = torch.randint(3, fault.get("vocabulary", 60), size)
    inputs = {"input_ids": ids}
    if fault.get("decoder"):
        inputs["decoder_input_ids"] = torch.randint(3, fault.get("vocabulary", 60), size)
        inputs["input_ids"] = torch.randint(3, 60, (size[0], fault.get("encoder_tokens", 9)))
    return model, inputs


def check(fault, relations):
    """What the relations say."""
    import paritas

    model, inputs = build(fault)
    report = paritas.invariants(model, inputs, only=relations)
    return {
        one.relation: {
            "word": one.word,
            "about": one.summary[:300],
            "failing": [
                (f.item.option, f.status.value, f.origin.name if f.origin else "", f.reason[:200])
                for f in one.verdict.failures
            ],
        }
        for one in report.rows
    }


def _forked(task):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
        try:
            found = task()
        except BaseException as error:  # noqa: BLE001  (a crash is a row too)
            found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        with os.fdopen(write, "w") as out:
            out.write(json.dumps(found))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"killed, perhaps after {_SECONDS} s"}


def in_release(rows, everything):
    """Check rows with the release that is installed here; one line of JSON each."""
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    import paritas.relations.checking  # noqa: F401

    transformers.logging.set_verbosity_error()
    for fault in rows:
        only = ["serving"] if everything else [fault["relation"]]
        found = _forked(lambda fault=fault, only=only: check(fault, only))
        print("ROW " + json.dumps(found), flush=True)


# --- Over all releases ----------------------------------------------------------------------------


def _name(fault):
    return f"{fault['pull']} {fault['model']} {fault['relation']}"


def run(environments, out, chosen, everything):
    """Check all rows before and after."""
    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {(row["name"], row["version"]) for row in known}
    wanted: dict[str, list[dict]] = {}
    for fault in faults():
        if chosen and str(fault["pull"]) not in chosen and fault["model"] not in chosen:
            continue
        for version in (fault["before"], fault["after"]):
            if (_name(fault), version) not in done:
                wanted.setdefault(version, []).append(fault)
    for version, rows in wanted.items():
        command = [
            str(environments / version / "bin" / "python"),
            *("-m", "benchmarks.zoo.history", "-", "-", "--child"),
            *(["--everything"] if everything else []),
        ]
        done_by = subprocess.run(
            command, input=json.dumps(rows), capture_output=True, text=True, check=False
        )
        lines = [one[4:] for one in done_by.stdout.splitlines() if one.startswith("ROW ")]
        if len(lines) != len(rows):
            print(version, "stopped:", done_by.stderr[-800:], file=sys.stderr)
        with out.open("a") as file:
            for fault, line in zip(rows, lines, strict=False):
                row = {"name": _name(fault), "version": version, "found": json.loads(line)}
                file.write(json.dumps(row) + "\n")


def summary(out):
    """Red before and green after, for each row."""
    found = {
        (row["name"], row["version"]): row["found"]
        for row in map(json.loads, out.read_text().splitlines())
    }

    def word(fault, version):
        """What was found, whether it fails where the table says, and why."""
        row = found.get((_name(fault), version))
        if row is None or "error" in row:
            return "not run" if row is None else row["error"][:150], None, ""
        mine = row[fault["relation"]]
        if mine["word"] not in _PASSES + _FAILS:
            return mine["word"], None, mine["about"]
        asked = fault.get("case")
        failing = [one for one in mine["failing"] if asked in (None, one[0])]
        others = sorted({one[0] for one in mine["failing"]} - {asked})
        first = failing[0] if failing else ["", "", "", ""]
        about = f"{first[0]}; {first[2]}; {first[3]}"[:150] if failing else ""
        return mine["word"], bool(failing), f"{about} [{', '.join(others)}]" if others else about

    right = 0
    for fault in faults():
        before, red, why = word(fault, fault["before"])
        after, still_red, other = word(fault, fault["after"])
        good = red is True and still_red is False
        right += good
        print(f"{'ok  ' if good else 'MISS'} {_name(fault)}: {before} in {fault['before']} ({why})")
        print(f"       {after} in {fault['after']} ({other})")
    print(f"{right} of {len(faults())} red before and green after")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("environments", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", help="pull requests or classes")
    parser.add_argument("--everything", action="store_true", help="all relations of serving")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        in_release(json.loads(sys.stdin.read()), asked.everything)
    elif not asked.summary:
        run(asked.environments.resolve(), asked.out, asked.only, asked.everything)
    if not asked.child:
        summary(asked.out)


if __name__ == "__main__":
    main()
