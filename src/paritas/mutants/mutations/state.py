"""Wrong state: what should have been written is not, or what should be left alone is written."""

from __future__ import annotations

from typing import Any

from paritas.mutants.mutations.calls import Call, Fault, Place, number_in

# --- 28, 29: writes left out ----------------------------------------------------------------------


def _buffers(place: Place) -> list[str]:
    return [
        f"argument {position}"
        for position, name in place.writes.items()
        if name.startswith("buffer ")
    ]


def _kept_back(call: Call, detail: str) -> Any:
    position = number_in(detail)
    if call.in_place and position == 0:
        return call.args[0]
    old = call.args[position].clone()
    result = call.right()
    call.args[position].copy_(old)
    return result


def _written(place: Place) -> list[str]:
    """What writes in place, and not to a buffer: that one is called stale_buffer."""
    if 0 not in place.writes or place.kind.random or place.name in {"fill", "zero"}:
        return []
    return [] if place.writes[0].startswith("buffer ") else [""]


# --- 30: memory -----------------------------------------------------------------------------------


def _aliasable(place: Place) -> list[str]:
    return [] if place.donor is None else [f"argument {place.donor}"]


def _into_the_input(call: Call, detail: str) -> Any:
    given = call.args[number_in(detail)]
    return given.copy_(call.right())


FAULTS: dict[str, Fault] = {
    "stale_buffer": Fault(_buffers, _kept_back),
    "dropped_write": Fault(_written, lambda call, _: call.args[0]),
    "aliased_output": Fault(_aliasable, _into_the_input),
}
