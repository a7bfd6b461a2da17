"""Make Inductor work less: the same code, in less time.

Everything here is a repetition that is left out. None of it changes what is generated.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from typing import TYPE_CHECKING, Any

from paritas.core.torch_private.kernel_units import one_unit

if TYPE_CHECKING:
    from collections.abc import Iterator

_asked = contextvars.ContextVar("paritas_rules_once", default=False)
_KNOWN = "_paritas_known_rules"


@contextlib.contextmanager
def quick_compiles() -> Iterator[None]:
    """Compile without repetitions in this context, and build kernels as in `one_unit`."""
    token = _asked.set(_install())
    try:
        with one_unit():
            yield
    finally:
        _asked.reset(token)


def has_dtype_rules() -> bool:
    """Whether this torch collects its dtype rules in the way that is expected here."""
    try:
        from torch._inductor.codegen.common import pointwise_overrides_data
        from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
        from torch._inductor.utils import op_dtype_propagation_rules
    except ImportError:
        return False
    return (
        isinstance(op_dtype_propagation_rules, dict)
        and isinstance(pointwise_overrides_data, dict)
        and [*inspect.signature(DtypePropagationOpsHandler.__init__).parameters] == ["self"]
        and "_instance" in vars(DtypePropagationOpsHandler)
    )


@functools.cache
def _install() -> bool:
    """Collect the dtype rules of operators only if there are new ones, in contexts that ask for it.

    Inductor has one object with these rules, and collects all of them again for every operation of
    every kernel. This takes a twentieth of its time.
    """
    if not has_dtype_rules():
        return False
    from torch._inductor.codegen.common import pointwise_overrides_data
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler as Handler
    from torch._inductor.utils import op_dtype_propagation_rules

    collect = Handler.__init__

    @functools.wraps(collect)
    def collect_new(self: Any) -> None:
        rules: list[dict[str, Any]] = [op_dtype_propagation_rules, pointwise_overrides_data]
        if not _asked.get() or vars(self).get(_KNOWN) != rules:
            collect(self)
            vars(self)[_KNOWN] = [dict(rule) for rule in rules]

    Handler.__init__ = collect_new  # type: ignore[method-assign]
    return True
