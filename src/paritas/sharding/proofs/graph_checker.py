"""Check the certificate of a graph: `python -m paritas.sharding.proofs.graph_checker FILE ...`.

A graph is right if each call has an accepted certificate about this operator with arguments of
these shapes, whose roles are the placements of the values that it gets and gives, or gets only what
all ranks have; if each collective fits the placement of its argument; and if the results have the
placements that are claimed. Parts are equal and in the order of the ranks. What is printed is the
program that was checked, with the placement of each value.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from paritas.sharding.proofs.certificates import GRAPH_VERSION, describe_tensor
from paritas.sharding.proofs.checker import (
    MALFORMED,
    Checker,
    as_text,
    call_words,
    check_files,
)
from paritas.sharding.proofs.kernel import Refused
from paritas.sharding.rows import assuming

if TYPE_CHECKING:
    from collections.abc import Callable

SAME, TERMS = "replicate", "partial(sum)"
SHARD = re.compile(r"shard\((\d+)\)")
PACKED = re.compile(r"_S\((\d+), (\d+)\)")
WHOLE_LENGTH = [[["N"], 1]]  # the size of a dimension that is split in single elements

# The fields of each kind of call, by the one that only this kind has.
FIELDS = {
    "collective": {"value", "collective", "of", "with", "placements"},
    "item": {"value", "item", "placements"},
    "same as": {"value", "same as", "placements"},
    "pieces": {"value", "pieces", "of", "dim", "placements"},
    "same on all ranks": {"value", "arguments", "same on all ranks", "placements"},
    "certificate": {"value", "arguments", "certificate", "placements"},
}


def role_of(word: str) -> list[Any]:
    """A placement as a certificate of a call writes it."""
    match = SHARD.fullmatch(word) or PACKED.fullmatch(word)
    if match:
        return ["shard", int(match[1])]
    kind = re.fullmatch(r"partial\((sum|avg|max|min|product)\)", word)
    if kind is None and word not in {SAME, "once"}:
        raise Refused(f"unknown placement {word!r:.40}")
    return ["partial", kind[1]] if kind else [word]


class GraphChecker:
    """Follows the placements, shapes and dtypes through a graph."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.placements: dict[str, list[str]] = {}
        # The shape and the dtype of each tensor of a value.
        self.tensors: dict[str, list[Any]] = {}
        self.kinds: dict[str, Callable[[Any], tuple[str, list[str], list[Any]]]] = {
            "collective": self.collective,
            "item": self.item,
            "same as": self.same_as,
            "pieces": self.cut,
            "same on all ranks": self.function_of_same,
            "certificate": self.by_rule,
        }
        self.lines: list[str] = []
        self.assumes: dict[str, None] = {}

    def check(self) -> str:
        """Follow all calls.

        Returns:
            The theorem: the program, and the placements of its values.

        Raises:
            Refused: the graph is not right.
        """
        try:
            return self._check()
        except MALFORMED as error:
            raise Refused(f"not a certificate: {error!r:.200}") from error

    def _check(self) -> str:
        if set(self.data) != {"paritas graph certificate", "inputs", "calls", "outputs"}:
            raise Refused("it has other fields than a certificate of a graph")
        if as_text(self.data["paritas graph certificate"]) != as_text(GRAPH_VERSION):
            raise Refused("it is of another version")
        for name, input_data in self.data["inputs"].items():
            self._take_input(name, input_data)
        for call in self.data["calls"]:
            self._take_call(call)
        if not self.data["outputs"]:
            raise Refused("nothing is claimed: the graph has no result")
        for output in self.data["outputs"]:
            if set(output) != {"value", "placement"}:
                raise Refused("a result with other fields")
            if self.placements[output["value"]] != [output["placement"]]:
                raise Refused(f"{output['value']} is not {output['placement']}")
            self.lines.append(f"result {output['value']}: {output['placement']}")
        proved = (
            "proved over the reals, forward and backward, for all lengths and ranks that the rules "
            f"allow, parts of equal size{assuming(self.assumes)}"
        )
        return "\n  ".join([proved, *self.lines])

    def _take_input(self, name: str, input_data: Any) -> None:
        if set(input_data) != {"placement", "tensor", "dtype"}:
            raise Refused(f"input {name} has other fields")
        role = role_of(input_data["placement"])
        if role[0] == "shard" and role[1] >= len(input_data["tensor"]):
            raise Refused(f"input {name} has no dimension {role[1]}")
        self.placements[name] = [input_data["placement"]]
        self.tensors[name] = [{key: input_data[key] for key in ("tensor", "dtype")}]
        self.lines.append(f"input {name}: {input_data['placement']}")

    def _take_call(self, call: Any) -> None:
        kinds = [kind for kind in FIELDS if kind in call]
        if len(kinds) != 1 or set(call) != FIELDS[kinds[0]]:
            raise Refused("a call with other fields")
        name = call["value"]
        if name in self.placements:
            raise Refused(f"{name} is computed twice")
        words, placements, tensors = self.kinds[kinds[0]](call)
        if as_text(placements) != as_text(call["placements"]):
            raise Refused(f"{name} is placed in another way")
        self.placements[name], self.tensors[name] = placements, tensors
        self.lines.append(f"{name} = {words}: {', '.join(placements)}")

    # --- each kind of call: its words, and the placements and shapes of its results ---------------

    def collective(self, call: Any) -> tuple[str, list[str], list[Any]]:
        """Ranks that exchange data."""
        kind, source, dim_or_reduction = call["collective"], call["of"], call["with"]
        (tensor,) = self.tensors[source]
        if kind != "all_reduce" and (
            type(dim_or_reduction) is not int or dim_or_reduction >= len(tensor["tensor"])
        ):
            raise Refused(f"{source} has no dimension {dim_or_reduction!r:.40}")
        placement = self.after(kind, self.one(source), dim_or_reduction)
        return f"{kind}({source}, {dim_or_reduction})", [placement], [tensor]

    def item(self, call: Any) -> tuple[str, list[str], list[Any]]:
        """One of several results."""
        source, number = call["item"]
        source_placements, tensors = self.placements[source], self.tensors[source]
        if len(source_placements) == 1 and source_placements != [SAME]:
            raise Refused(f"{source} is one tensor")
        if type(number) is not int or (tensors and not 0 <= number < len(tensors)):
            raise Refused(f"{source} has no part {number!r:.40}")
        placements = (
            source_placements if len(source_placements) == 1 else [source_placements[number]]
        )
        return f"{source}[{number}]", placements, [tensors[number]] if tensors else []

    def same_as(self, call: Any) -> tuple[str, list[str], list[Any]]:
        """Another name."""
        source = call["same as"]
        return source, [self.one(source)], self.tensors[source]

    def cut(self, call: Any) -> tuple[str, list[str], list[Any]]:
        """A packed value that is cut into its pieces."""
        dim, count, source = call["dim"], call["pieces"], call["of"]
        if self.one(source) != f"_S({dim}, {count})":
            raise Refused(f"{source} does not have {count} pieces")
        (tensor,) = self.tensors[source]
        shape = list(tensor["tensor"])
        if shape[dim] % count:
            raise Refused(f"{source} cannot be cut into {count} pieces")
        shape[dim] //= count
        pieces = [{**tensor, "tensor": shape}] * count
        return f"{count} pieces of {source} along {dim}", [f"shard({dim})"] * count, pieces

    def function_of_same(self, call: Any) -> tuple[str, list[str], list[Any]]:
        """Whatever is computed from what all ranks have."""
        names = [name for names in call["arguments"].values() for name in names]
        if any(self.one(name) != SAME for name in names):
            raise Refused(f"{call['value']} is not the same on all ranks")
        results = call["same on all ranks"]
        if any(set(described_result) != {"tensor", "dtype"} for described_result in results):
            raise Refused(f"{call['value']}: its results are not described")
        shapes = ", ".join(
            f"{described_result['dtype']} {described_result['tensor']}"
            for described_result in results
        )
        argument_words = ", ".join(names) or "nothing"
        words = f"any function of {argument_words} that gives {shapes or 'no tensor'}"
        return words, [SAME], results

    def by_rule(self, call: Any) -> tuple[str, list[str], list[Any]]:
        """The placements that the certificate of a call shows."""
        certificate, arguments = call["certificate"], call["arguments"]
        checker = Checker(certificate)
        checker.check()
        values = self.values_by_tensor(call)
        for name, value in values.items():
            if certificate["tensors"][name]["role"] != role_of(self.one(value)):
                raise Refused(f"{call['value']}: {value} is placed in another way")
        placements_by_argument = {
            argument_place: list(map(self.one, names))
            for argument_place, names in arguments.items()
        }
        pieces = self.pieces(call, placements_by_argument)
        if any(output["written"] is not None for output in certificate["outputs"]):
            raise Refused(f"{call['value']} writes to its arguments")
        output_roles = [output["role"] for output in certificate["outputs"]]
        if output_roles != list(map(role_of, call["placements"])):
            raise Refused(f"{call['value']}: the result is placed in another way")
        for word in call["placements"]:
            packed = PACKED.fullmatch(word)
            if role_of(word)[0] == "shard" and (int(packed[2]) if packed else 1) != pieces:
                raise Refused(f"{call['value']}: the result has other pieces")
        self.assumes |= dict.fromkeys(certificate["assumes"])
        words = call_words(certificate, values.__getitem__)
        return (
            words,
            call["placements"],
            [describe_tensor(result_tensor) for result_tensor in checker.results],
        )

    def values_by_tensor(self, call: Any) -> dict[str, str]:
        """The value for each tensor of a certificate; shapes and dtypes must be the same."""
        tensors: dict[str, list[tuple[str, Any]]] = {}
        for name, described in _described_tensors(call["certificate"]["call"]):
            tensors.setdefault(name.partition("[")[0], []).append((name, described))
        if set(tensors) != set(call["arguments"]):
            raise Refused(f"{call['value']}: the certificate is about other arguments")
        values_by_name = {}
        for argument_place, names in call["arguments"].items():
            for (name, described), value in zip(tensors[argument_place], names, strict=True):
                if as_text(self.tensors[value]) != as_text([described]):
                    raise Refused(f"{call['value']}: {value} has another shape or dtype")
                values_by_name[name] = value
        return values_by_name

    def pieces(self, call: Any, placements_by_argument: dict[str, list[str]]) -> int:
        """Into how many pieces what is split is cut: each rank has a part of each of them.

        A rule for parts of any size holds for parts of one element, so that all elements are
        treated alike, and any of them may be on a rank.
        """
        words = [word for words in placements_by_argument.values() for word in words]
        counts = {
            int(packed_match[2]) for word in words if (packed_match := PACKED.fullmatch(word))
        }
        counts |= {1 for word in words if SHARD.fullmatch(word)}
        if len(counts) > 1:
            raise Refused(f"{call['value']}: arguments with different pieces")
        if counts <= {1}:
            return 1
        certificate = call["certificate"]
        tensors = certificate["tensors"]
        roles = [tensor["role"] for tensor in tensors.values()]
        if (
            certificate["parts"] != "any"
            or any(whole_number != local for whole_number, local in certificate["numbers"].values())
            or any(role[0] not in {"shard", "replicate"} for role in roles)
            or any(name.startswith("draw ") for name in tensors)
            or any(
                tensor["sizes"][tensor["role"][1]] != WHOLE_LENGTH
                for tensor in tensors.values()
                if tensor["role"][0] == "shard"
            )
        ):
            raise Refused(f"{call['value']}: the rule does not hold for packed shards")
        return counts.pop()

    def after(self, kind: str, before: str, dim_or_reduction: Any) -> str:
        """The placement after a collective."""
        changes = {
            ("all_reduce", f"partial({dim_or_reduction})"): SAME,
            ("all_gather", f"shard({dim_or_reduction})"): SAME,
            ("reduce_scatter", TERMS): f"shard({dim_or_reduction})",
            ("keep_slice", SAME): f"shard({dim_or_reduction})",
        }
        if kind == "all_reduce" and dim_or_reduction in {"max", "min"}:
            changes[kind, SAME] = SAME  # of what all ranks have
        if (kind, before) not in changes:
            raise Refused(f"{kind} of a value that is {before}")
        return changes[kind, before]

    def one(self, name: str) -> str:
        """The placement of a value that is one tensor."""
        value_placements = self.placements[name]
        if len(value_placements) != 1:
            raise Refused(f"{name} has several parts")
        return value_placements[0]


def _described_tensors(call: Any) -> list[tuple[str, Any]]:
    """The tensors of a call by the names that its certificate has for them."""
    described_tensors = []
    for argument_place, value in (*enumerate(call["args"]), *call["kwargs"].items()):
        items = value.get("list", value.get("tuple")) if isinstance(value, dict) else None
        for at, element in enumerate([value] if items is None else items):
            if isinstance(element, dict) and "tensor" in element:
                described_tensors.append(
                    (str(argument_place) if items is None else f"{argument_place}[{at}]", element)
                )
    return described_tensors


def check_any(data: Any) -> str:
    """The theorem of a certificate of a graph, or of a single call."""
    is_graph = isinstance(data, dict) and "paritas graph certificate" in data
    return GraphChecker(data).check() if is_graph else Checker(data).check()


def main() -> int:
    """Check the files that are given."""
    return check_files(sys.argv[1:], check_any)


if __name__ == "__main__":
    sys.exit(main())
