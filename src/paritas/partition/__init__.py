"""Is an operator the same when it is split over ranks?

The names below are the public surface; each is fetched from its home on first use, as in `paritas`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "Annotation",
    "IRObject",
    "TensorInfo",
    "VerifyConfig",
    "annotated",
    "check_dtensor",
    "check_partition",
    "check_recipe",
    "confirm_on_gloo",
    "discover_partitions",
    "prove",
    "prove_dtensor",
    "prove_graph",
    "register",
    "verify_parallel",
    "verify_partition_options",
]

_HOMES = {
    "Annotation": "paritas.partition.annotation",
    "IRObject": "paritas.partition.configuration",
    "TensorInfo": "paritas.partition.configuration",
    "VerifyConfig": "paritas.partition.configuration",
    "annotated": "paritas.partition.library",
    "check_dtensor": "paritas.parallel.dtensor",
    "check_partition": "paritas.partition.verify",
    "check_recipe": "paritas.partition.recipe_checks",
    "confirm_on_gloo": "paritas.partition.ranks.threads",
    "discover_partitions": "paritas.partition.discovery",
    "prove": "paritas.partition.proofs.prove",
    "prove_dtensor": "paritas.partition.proofs.dtensor",
    "prove_graph": "paritas.partition.proofs.graphs",
    "register": "paritas.partition.library",
    "verify_parallel": "paritas.parallel.verify",
    "verify_partition_options": "paritas.partition.verify",
}

if TYPE_CHECKING:
    from paritas.parallel.dtensor import check_dtensor
    from paritas.parallel.verify import verify_parallel
    from paritas.partition.annotation import Annotation
    from paritas.partition.configuration import IRObject, TensorInfo, VerifyConfig
    from paritas.partition.discovery import discover_partitions
    from paritas.partition.library import annotated, register
    from paritas.partition.proofs.dtensor import prove_dtensor
    from paritas.partition.proofs.graphs import prove_graph
    from paritas.partition.proofs.prove import prove
    from paritas.partition.ranks.threads import confirm_on_gloo
    from paritas.partition.recipe_checks import check_recipe
    from paritas.partition.verify import check_partition, verify_partition_options
else:
    # Out of a type checker's sight, or it would take any misspelt name for an attribute.
    def __getattr__(name: str) -> object:
        import importlib

        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return list(__all__)
