"""The figures of a journal: places, kinds, shrunk programs."""

from __future__ import annotations

import collections
import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.lab.figures import Figure, line
from benchmarks.lab.journals import read_rows

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# A fault that was seen, however it was answered. Those that were not seen are listed apart.
_ANSWERS = ("exact", "near", "other", "none", "out of time", "died", "error")
_SHRUNK = ("shrunk", "no script")
COUNTED = {*_ANSWERS, *_SHRUNK, "planted"}

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """The rows of a journal; of a fault that was tried twice, the last."""
    rows = read_rows(path)
    keys = ("half", "what", "model", "source", "number")
    return list({tuple(row[key] for key in keys): row for row in rows}.values())


def show(rows: list[Row], *, details: bool) -> None:
    """Print the figures of each half."""
    groups: dict[tuple[str, str], list[Row]] = collections.defaultdict(list)
    for row in rows:
        groups[row["half"], row["what"]].append(row)
    for (half, what), own in sorted(groups.items()):
        print(f"\n== {half} half, {what}: {len(own)} tried")
        for figure in figures(own):
            print(line(figure))
        if what == "plant":
            print(dict(collections.Counter(row["outcome"] for row in own)))
            for row in own:
                if row["outcome"] not in {"planted", "no fault fits"}:
                    print(f"  {row['outcome']}: {_name(row)} {row.get('reason')} {row.get('size')}")
        else:
            (_show_shrink if what in {"shrink", "search"} else _show_places)(own, details=details)


def figures(rows: list[Row]) -> list[Figure]:
    """The promised figures that these rows measure, each with its bar."""
    found = []
    for what, bar in (("verify", 90.0), ("guard", 97.0)):
        own = [row for row in rows if row["what"] == what and row["outcome"] in COUNTED]
        if not own:
            continue
        exact = [row for row in own if row["outcome"] == "exact"]
        name = "names the place" if what == "verify" else "names the exact node"
        found.append(_percent(f"{what} {name}", len(exact), len(own), bar))
        kinds = [(row, score_kind(row, row.get("kind", ""))) for row in exact]
        right = sum(score == "right" for _, score in kinds)
        wrong = sum(score == "wrong" for _, score in kinds)
        worded = sum(bool(row.get("kinds")) for row in exact)
        asked = sum(row.get("kinds") is not None for row in exact)
        found.append(_percent(f"{what}: the kind at the place is right", right, worded, 85.0))
        found.append(
            _percent(f"{what}: the kind at the place is wrong", wrong, asked, 1.0, "lower")
        )
        if what == "verify":
            false = sum(
                any(score_kind(row, kind) == "wrong" for kind in _output_kinds(row)) for row in own
            )
            found.append(
                _percent("verify: a wrong kind at an output", false, len(own), 1.0, "lower")
            )
    for what, name in (("shrink", "shrink"), ("search", "shrink without a place")):
        own = [row for row in rows if row["what"] == what and row["outcome"] in COUNTED]
        if not own:
            continue
        # The call of a method that only reads a part counts as no operator.
        small = sum(row.get("left") is not None and row["left"] <= 3 for row in own)
        found.append(_percent(f"{name}: at most 3 operators", small, len(own), 97.0))
        for key, words in (("kept", "the limit is kept"), ("written", "the script is written"),
                           ("fails", "the script fails by itself")):  # fmt: skip
            good = sum(bool(row.get(key)) for row in own)
            found.append(_percent(f"{name}: {words}", good, len(own), 100.0))
    return found


def _percent(name: str, part: int, whole: int, bar: float, better: Any = "higher") -> Figure:
    value = 100 * part / whole if whole else None
    return Figure(name, value, "%", bar, better, f"{part} of {whole}")


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.1f} %)" if whole else "0 of 0"


def _show_places(rows: list[Row], *, details: bool) -> None:
    counted = [row for row in rows if row["outcome"] in COUNTED]
    outcomes = collections.Counter(row["outcome"] for row in rows)
    exact = [row for row in counted if row["outcome"] == "exact"]
    print(f"places: {dict(outcomes)}")
    by_source = collections.defaultdict(list)
    for row in counted:
        by_source[row["source"]].append(row["outcome"])
    for source, own in sorted(by_source.items()):
        print(
            f"  {source}: {_share(own.count('exact'), len(own))} {dict(collections.Counter(own))}"
        )
    also = [row for row in exact if any(p["place"] == "other" for p in row.get("places", []))]
    print(f"exact, with a false place beside it: {_share(len(also), len(exact))}")
    kinds = collections.Counter(score_kind(row, row.get("kind", "")) for row in exact)
    print(f"kinds at the place: {dict(kinds)}")
    _show_outputs(counted)
    _show_times(counted)
    _confusions("kind at the place", exact, lambda row: [row.get("kind", "")])
    _confusions("kind at an output", counted, _output_kinds)
    for row in rows:
        if row["outcome"] == "missed":
            print(f"  not seen: {_name(row)} size {row['size']:.2g} {row.get('said')}")
    if details:
        for row in counted:
            if row["outcome"] != "exact":
                first = next(iter(row.get("places") or []), {})
                said = {k: v for k, v in first.items() if v and k not in {"place", "confidence"}}
                reason = row.get("reason", "")
                print(f"  {row['outcome']}: {_name(row)} at {_where(row)}: {said or reason}")


def _show_outputs(counted: list[Row]) -> None:
    stated = [score_kind(row, kind) for row in counted for kind in _output_kinds(row)]
    faults = sum(bool(_output_kinds(row)) for row in counted)
    print(f"kinds at outputs: of {faults} faults, {dict(collections.Counter(stated))}")


def _output_kinds(row: Row) -> list[str]:
    return [one["kind"] for one in row.get("at outputs", [])]


def score_kind(row: Row, kind: str) -> str:
    """`right`, `loose`, `none` or `wrong`; `not asked` if nobody knows the word."""
    if row.get("kinds") is None:
        return "not asked"
    if not kind:
        return "none"
    if kind in row["kinds"]:
        return "right"
    return "loose" if kind in row.get("loose", []) else "wrong"


def _confusions(title: str, rows: Iterable[Row], kinds: Any) -> None:
    found = collections.Counter(
        (row["fault"], kind)
        for row in rows
        for kind in kinds(row)
        if score_kind(row, kind) == "wrong"
    )
    for (fault, kind), count in found.most_common():
        print(f"  wrong {title}: {fault} called {kind!r} ({count})")


def _show_times(rows: list[Row]) -> None:
    whole = [row["seconds"] for row in rows if "seconds" in row]
    search = [sum(row["search"]) for row in rows if row.get("search")]
    for name, took in (("in all", whole), ("the search", search)):
        if took:
            took.sort()
            print(f"seconds, {name}: median {statistics.median(took):.1f}, "
                  f"90 % {took[int(0.9 * (len(took) - 1))]:.1f}, most {took[-1]:.1f}")  # fmt: skip


def _name(row: Row) -> str:
    return f"{row['model']} [{row['source']} {row['number']}] {row.get('fault', '')}"


def _where(row: Row) -> str:
    truth = row.get("truth") or {}
    nodes = [*(truth.get("nodes") or []), *(truth.get("modules") or [])]
    back = " backward" if truth.get("backward") else ""
    return f"{' '.join(map(str, nodes[:4]))} {(truth.get('operators') or ['?'])[0]}{back}"


def _show_shrink(rows: list[Row], *, details: bool) -> None:
    counted = [row for row in rows if row["outcome"] in COUNTED]
    print(dict(collections.Counter(row["outcome"] for row in rows)))
    done = [row for row in counted if row["outcome"] == "shrunk"]
    small = [row for row in done if row["left"] is not None and row["left"] <= 3]
    _show_times(counted)
    sizes = collections.Counter(row["left"] for row in done)
    print(f"operators left: {dict(sorted(sizes.items(), key=lambda pair: pair[0] or 0))}")
    for row in counted:
        good = row["outcome"] == "shrunk" and row["fails"] and row["kept"] and row in small
        if details and not good:
            names = ("left", "seconds", "kept", "fails", "written", "after", "reason", "said")
            told = {name: row[name] for name in names if name in row}
            print(f"  {row['outcome']}: {_name(row)}: {told}")
