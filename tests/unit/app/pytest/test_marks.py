"""The names that a mark takes are those that `verify` and `guard` take."""

from __future__ import annotations

import dataclasses
import inspect

import paritas
from paritas.app.pytest.parity import GUARD_NAMES, VERIFY_NAMES


def test_a_mark_takes_every_setting_of_guard():
    assert set(inspect.signature(paritas.guard).parameters) - {"backend"} == GUARD_NAMES


def test_a_mark_takes_every_setting_of_verify():
    assert {field.name for field in dataclasses.fields(paritas.VerifyConfig)} == VERIFY_NAMES
