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
    "register",
    "verify_parallel",
    "verify_partition_options",
]

_HOMES = {
    "Annotation": "paritas.partition.annotations.annotation",
    "IRObject": "paritas.partition.configuration.config",
    "TensorInfo": "paritas.partition.configuration.config",
    "VerifyConfig": "paritas.partition.configuration.config",
    "annotated": "paritas.partition.library",
    "check_dtensor": "paritas.partition.dtensor.claims",
    "check_partition": "paritas.partition.verifying",
    "check_recipe": "paritas.partition.checking",
    "confirm_on_gloo": "paritas.partition.ranks.gloo",
    "discover_partitions": "paritas.partition.discovery.discovering",
    "register": "paritas.partition.library",
    "verify_parallel": "paritas.partition.plans.verifying",
    "verify_partition_options": "paritas.partition.verifying",
}

if TYPE_CHECKING:
    from paritas.partition.annotations.annotation import Annotation
    from paritas.partition.checking import check_recipe
    from paritas.partition.configuration.config import IRObject, TensorInfo, VerifyConfig
    from paritas.partition.discovery.discovering import discover_partitions
    from paritas.partition.dtensor.claims import check_dtensor
    from paritas.partition.library import annotated, register
    from paritas.partition.plans.verifying import verify_parallel
    from paritas.partition.ranks.gloo import confirm_on_gloo
    from paritas.partition.verifying import check_partition, verify_partition_options
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
