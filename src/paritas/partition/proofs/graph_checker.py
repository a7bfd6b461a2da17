"""Check the certificate of a graph: `python -m paritas.partition.proofs.graph_checker FILE ...`.

It uses `checker` for single calls and nothing else of paritas. A graph is right if each call has an
accepted certificate whose roles are the placements of the values that it gets and gives, or gets
only what all ranks have; if each collective fits the placement of its argument; and if the results
have the placements that are claimed. Parts are equal and in the order of the ranks.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from typing import Any

from paritas.partition.proofs.checker import Checker, Refused

SAME, TERMS = "replicate", "partial(sum)"
SHARD = re.compile(r"shard\((\d+)\)")
PACKED = re.compile(r"_S\((\d+), (\d+)\)")
WHOLE_LENGTH = [[["N"], 1]]  # the size of a dimension that is split in single elements


def role_of(word: str) -> list[Any]:
    """A placement as a certificate of a call writes it."""
    found = SHARD.fullmatch(word) or PACKED.fullmatch(word)
    if found:
        return ["shard", int(found[1])]
    kind = re.fullmatch(r"partial\((\w+)\)", word)
    return ["partial", kind[1]] if kind else [word]


class GraphChecker:
    """Follows the placements through a graph."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.placements: dict[str, list[str]] = {
            name: [word] for name, word in data["inputs"].items()
        }

    def check(self) -> None:
        """Raise `Refused` unless the graph is right."""
        for call in self.data["calls"]:
            if call["value"] in self.placements:
                raise Refused(f"{call['value']} is computed twice")
            self.placements[call["value"]] = self.result(call)
        for output in self.data["outputs"]:
            if self.placements[output["value"]] != [output["placement"]]:
                raise Refused(f"{output['value']} is not {output['placement']}")

    def result(self, call: Any) -> list[str]:
        """The placements of the results of a call."""
        if "collective" in call:
            return [self.after(call["collective"], self.one(call["of"]), call["with"])]
        if "item" in call:
            source, number = call["item"]
            known = self.placements[source]
            if len(known) == 1 and known != [SAME]:
                raise Refused(f"{source} is one tensor")
            return known if len(known) == 1 else [known[number]]
        if "same as" in call:
            return [self.one(call["same as"])]
        if "pieces" in call:
            dim, count = call["dim"], call["pieces"]
            if self.one(call["of"]) != f"_S({dim}, {count})":
                raise Refused(f"{call['of']} does not have {count} pieces")
            return [f"shard({dim})"] * count
        given = {place: list(map(self.one, names)) for place, names in call["arguments"].items()}
        if call.get("same on all ranks"):
            if any(word != SAME for words in given.values() for word in words):
                raise Refused(f"{call['value']} is not the same on all ranks")
            return [SAME]
        return self.by_rule(call, given)

    def by_rule(self, call: Any, given: dict[str, list[str]]) -> list[str]:
        """The placements that the certificate of a call shows."""
        certificate = call["certificate"]
        Checker(certificate).check()
        roles: dict[str, list[Any]] = {}
        for name, tensor in certificate["tensors"].items():
            if not name.startswith("draw "):
                roles.setdefault(name.partition("[")[0], []).append(tensor["role"])
        if set(roles) != set(given):
            raise Refused(f"{call['value']}: the certificate is about other arguments")
        for place, words in given.items():
            if any(role != role_of(word) for role in roles[place] for word in words):
                raise Refused(f"{call['value']}: argument {place} is placed in another way")
        pieces = self.pieces(call, given)
        found = [one["role"] for one in certificate["outputs"] if one["written"] is None]
        if found != list(map(role_of, call["placements"])):
            raise Refused(f"{call['value']}: the result is placed in another way")
        for word in call["placements"]:
            packed = PACKED.fullmatch(word)
            if role_of(word)[0] == "shard" and (int(packed[2]) if packed else 1) != pieces:
                raise Refused(f"{call['value']}: the result has other pieces")
        return list(call["placements"])

    def pieces(self, call: Any, given: dict[str, list[str]]) -> int:
        """Into how many pieces what is split is cut: each rank has a part of each of them.

        A rule for parts of any size holds for parts of one element, so that all elements are
        treated alike, and any of them may be on a rank.
        """
        words = [word for words in given.values() for word in words]
        counts = {int(found[2]) for word in words if (found := PACKED.fullmatch(word))}
        counts |= {1 for word in words if SHARD.fullmatch(word)}
        if len(counts) > 1:
            raise Refused(f"{call['value']}: arguments with different pieces")
        if counts <= {1}:
            return 1
        certificate = call["certificate"]
        tensors = certificate["tensors"]
        roles = [one["role"] for one in tensors.values()]
        if (
            certificate["parts"] != "any"
            or any(whole != local for whole, local in certificate["numbers"].values())
            or any(role[0] not in {"shard", "replicate"} for role in roles)
            or any(name.startswith("draw ") for name in tensors)
            or any(
                one["sizes"][one["role"][1]] != WHOLE_LENGTH
                for one in tensors.values()
                if one["role"][0] == "shard"
            )
        ):
            raise Refused(f"{call['value']}: the rule does not hold for packed shards")
        return counts.pop()

    def after(self, kind: str, before: str, given: Any) -> str:
        """The placement after a collective."""
        changes = {
            ("all_reduce", f"partial({given})"): SAME,
            ("all_gather", f"shard({given})"): SAME,
            ("reduce_scatter", TERMS): f"shard({given})",
            ("keep_slice", SAME): f"shard({given})",
        }
        if kind == "all_reduce" and given in {"max", "min"}:
            changes[kind, SAME] = SAME  # of what all ranks have
        if (kind, before) not in changes:
            raise Refused(f"{kind} of a value that is {before}")
        return changes[kind, before]

    def one(self, name: str) -> str:
        """The placement of a value that is one tensor."""
        known = self.placements[name]
        if len(known) != 1:
            raise Refused(f"{name} has several parts")
        return known[0]


def main() -> int:
    """Check the files that are given."""
    for path in sys.argv[1:]:
        data = json.loads(pathlib.Path(path).read_text("utf-8"))
        try:
            if "paritas graph certificate" not in data:  # of a single call
                Checker(data).check()
                print(f"{path}: proved")
                continue
            GraphChecker(data).check()
        except (Refused, KeyError, IndexError, TypeError, ValueError) as error:
            print(f"{path}: refused: {error!r}")
            return 1
        print(f"{path}: {len(data['calls'])} calls: proved")
    return 0


if __name__ == "__main__":
    sys.exit(main())
