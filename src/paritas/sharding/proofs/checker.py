"""Check certificates of single calls: `python -m paritas.sharding.proofs.checker FILE ...`.

A certificate is not believed. From the operator, the arguments and the rule that it names, the
definition and the split are derived again, by the code that tests compare with torch; all that is
in the file must be exactly this. Then `kernel`, which shares no code with what finds proofs, shows
that both sides of the split are equal. What is printed is the theorem that was checked.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from paritas.core.errors import UsageError, in_one_line
from paritas.core.operators.indices import LENGTH
from paritas.core.operators.terms import OutsideTheoryError
from paritas.sharding.proofs.certificates import derive_certificate
from paritas.sharding.proofs.kernel import Kernel, Refused
from paritas.sharding.proofs.splits import shown_index
from paritas.sharding.rows import assuming

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

# What malformed data raises: it is refused.
MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Checker:
    """Checks one certificate.

    Attributes:
        results: what the call returns, as tensors without its values; known once it is checked.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self.results: list[torch.Tensor] = []

    def check(self) -> str:
        """Derive the certificate again, and compare both sides of the split.

        Returns:
            The theorem.

        Raises:
            Refused: the certificate does not show it.
        """
        try:
            derived, self.results = derive_certificate(self.data)
            self._compare(derived)
            Kernel(derived).check()
        except (OutsideTheoryError, UsageError) as error:
            raise Refused(f"there is no such theorem: {in_one_line(error, 200)}") from error
        except MALFORMED as error:
            raise Refused(f"not a certificate: {in_one_line(error, 200)}") from error
        return theorem(derived)

    def _compare(self, derived: dict[str, Any]) -> None:
        if not isinstance(self.data, dict) or set(self.data) != set(derived):
            raise Refused("it has other fields than a certificate")
        for key, value in derived.items():
            if as_text(self.data[key]) != as_text(value):
                raise Refused(f"`{key}` is not what follows from the operator and the rule")
        returned = [output for output in derived["outputs"] if output["written"] is None]
        if len(returned) != len(self.results):
            raise Refused(f"the operator returns {len(self.results)} tensors")


def as_text(data: Any) -> str:
    """JSON data as text, in which 1, 1.0 and true differ."""
    return json.dumps(data, sort_keys=True)


# --- The theorem in words -------------------------------------------------------------------------


def theorem(data: dict[str, Any]) -> str:
    """What a certificate says, from what was checked."""
    roles = [
        _role_words(output["role"])
        + (f" (argument {output['written']})" if output["written"] else "")
        for output in data["outputs"]
    ]
    rule = "" if data["rule"] is None else f", {data['rule']}, split by {data['split by']}"
    parts = {"any": "parts of any size", "equal": "parts of equal size"}[data["parts"]]
    return (
        f"{call_words(data, lambda name: _tensor_words(data, name))} -> {', '.join(roles)}{rule}: "
        f"proved over the reals, forward and backward, for all lengths and ranks, {parts}"
        f"{assuming(data['assumes'])}"
    )


def call_words(data: dict[str, Any], tensor: Callable[[str], str]) -> str:
    """The call of a certificate, with words for its tensors."""
    call_data = data["call"]
    arguments = [
        _argument(tensor, str(at), argument) for at, argument in enumerate(call_data["args"])
    ]
    arguments += [
        f"{name}={_argument(tensor, name, argument)}"
        for name, argument in call_data["kwargs"].items()
    ]
    return f"{data['operator']}({', '.join(arguments)})"


def _tensor_words(data: dict[str, Any], name: str) -> str:
    tensor = data["tensors"][name]
    sizes = " ".join(_size_words(size, data["split by"]) for size in tensor["sizes"])
    return f"[{sizes}] {_role_words(tensor['role'])}"


def _argument(tensor: Callable[[str], str], name: str, value: Any) -> str:
    match value:
        case {"tensor": _}:
            return tensor(name)
        case {"list": items} | {"tuple": items}:
            each = [_argument(tensor, f"{name}[{at}]", item) for at, item in enumerate(items)]
            return f"({', '.join(each)})"
        case {"slice": items}:
            return ":".join("" if item is None else str(item) for item in items)
        case {"ellipsis": _}:
            return "..."
        case {"float": word} | {"torch": word}:
            return str(word)
    return repr(value)


def _size_words(size: Any, split_by: str | None) -> str:
    def name_size(atom: str) -> str:
        return split_by or atom if atom == LENGTH else atom.removeprefix("n:")

    words = shown_index(tuple((tuple(map(name_size, atoms)), value) for atoms, value in size))
    return words.replace(" + ", "+").replace(" ", "*")


def _role_words(role: list[Any]) -> str:
    return f"{role[0]}({role[1]})" if len(role) > 1 else str(role[0])


# --- The command ----------------------------------------------------------------------------------


def check_files(paths: list[str], check: Callable[[Any], str]) -> int:
    """Check files and print their theorems; the exit code is 0 if all are accepted."""
    if not paths:
        print("name the certificates to check: python -m paritas.sharding.proofs.checker FILE ...")
        return 2
    refused = 0
    for path in paths:
        try:
            words = check(json.loads(pathlib.Path(path).read_text("utf-8")))
        except (Refused, OSError, ValueError, RecursionError) as error:
            words, refused = f"refused: {error}", refused + 1
        print(f"{path}: {words}")
    return 1 if refused else 0


def main() -> int:
    """Check the files that are given."""
    return check_files(sys.argv[1:], lambda data: Checker(data).check())


if __name__ == "__main__":
    sys.exit(main())
