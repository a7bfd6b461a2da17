"""Is an operator the same when it is split over ranks?

The names below are the public surface; each is fetched from its home on first use, as in `paritas`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.core.importing import import_on_use as _import_on_use

__all__ = [
    "Annotation",
    "IRObject",
    "PartitionConfig",
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
    "Annotation": "paritas.sharding.operators.annotation",
    "IRObject": "paritas.sharding.operators.configuration",
    "PartitionConfig": "paritas.sharding.operators.configuration",
    "TensorInfo": "paritas.sharding.operators.configuration",
    "VerifyConfig": "paritas.sharding.operators.configuration",
    "annotated": "paritas.sharding.operators.library",
    "check_dtensor": "paritas.sharding.plans.dtensor",
    "check_partition": "paritas.sharding.operators.verify",
    "check_recipe": "paritas.sharding.operators.recipe_checks",
    "confirm_on_gloo": "paritas.sharding.operators.ranks.threads",
    "discover_partitions": "paritas.sharding.operators.discovery",
    "prove": "paritas.sharding.proofs.prove",
    "prove_dtensor": "paritas.sharding.proofs.dtensor",
    "prove_graph": "paritas.sharding.proofs.graphs",
    "register": "paritas.sharding.operators.library",
    "verify_parallel": "paritas.sharding.plans.verify",
    "verify_partition_options": "paritas.sharding.operators.verify",
}

if TYPE_CHECKING:
    from paritas.sharding.operators.annotation import Annotation
    from paritas.sharding.operators.configuration import (
        IRObject,
        PartitionConfig,
        TensorInfo,
        VerifyConfig,
    )
    from paritas.sharding.operators.discovery import discover_partitions
    from paritas.sharding.operators.library import annotated, register
    from paritas.sharding.operators.ranks.threads import confirm_on_gloo
    from paritas.sharding.operators.recipe_checks import check_recipe
    from paritas.sharding.operators.verify import check_partition, verify_partition_options
    from paritas.sharding.plans.dtensor import check_dtensor
    from paritas.sharding.plans.verify import verify_parallel
    from paritas.sharding.proofs.dtensor import prove_dtensor
    from paritas.sharding.proofs.graphs import prove_graph
    from paritas.sharding.proofs.prove import prove
else:
    # Out of a type checker's sight, or it would take any misspelt name for an attribute.
    __getattr__ = _import_on_use(globals(), _HOMES)


def __dir__() -> list[str]:
    return list(__all__)
