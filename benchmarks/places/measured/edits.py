"""Edits for measuring: of Python code, and of kernels."""

from __future__ import annotations

from typing import Any

EDITS: dict[str, Any] = {}
KERNEL_EDITS: dict[str, Any] = {}
TRITON_EDITS: dict[str, Any] = {}
