"""Findings as SARIF 2.1.0, for systems that keep results of code analysis.

Written are failures and warnings: such a system takes every result for something to look at.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from paritas.numerics.findings import Status
from paritas.numerics.wording import MEANING
from paritas.settings.versions import own_version

if TYPE_CHECKING:
    from paritas.reporting.annotations import Account, Annotation

__all__ = ["MOST", "SCHEMA", "sarif"]

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
# As many as GitHub shows of a run; of more than five times that it refuses the file.
MOST = 5000
_ROOT = "SRCROOT"
# A later version of paritas may tell two items apart by other means.
_FINGERPRINT = "paritasItem/v1"


def sarif(account: Account) -> str:
    """One run with a result for each failure and warning, the gravest first."""
    told, left_out = account.gravest_first[:MOST], account.gravest_first[MOST:]
    rules = sorted({one.rule for one in told})
    run = {
        "tool": {
            "driver": {
                "name": "paritas",
                "version": own_version(),
                "rules": [_rule(rule) for rule in rules],
            }
        },
        "automationDetails": {"id": f"paritas/{account.command}/{account.subject}/"},
        "invocations": [
            {
                # It came to an answer; 3 says that something could not be compared.
                "executionSuccessful": account.exit_code in {0, 1},
                "exitCode": account.exit_code,
                "exitCodeDescription": account.headline,
                "toolExecutionNotifications": _counted(len(left_out)),
            }
        ],
        "originalUriBaseIds": {
            _ROOT: {"description": {"text": "The root of the repository."}},
        },
        "columnKind": "unicodeCodePoints",
        "results": [_result(one, account, rules.index(one.rule)) for one in told],
    }
    document = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _counted(left_out: int) -> list[dict[str, Any]]:
    if not left_out:
        return []
    words = f"{left_out} more results, none graver, are left out; the report has them."
    return [{"level": "warning", "message": {"text": words}}]


def _rule(rule: str) -> dict[str, Any]:
    status, _, pattern = rule.partition("/")
    meaning = f"The candidate {MEANING[Status(status)]}"
    words = f"{meaning}: {pattern.replace('-', ' ')}." if pattern else f"{meaning}."
    warns = status == Status.UNSTABLE
    return {
        "id": rule,
        "name": "".join(word.capitalize() for word in rule.replace("/", "-").split("-")),
        "shortDescription": {"text": words},
        "defaultConfiguration": {"level": "warning" if warns else "error"},
    }


def _result(one: Annotation, account: Account, rule: int) -> dict[str, Any]:
    text = f"{one.title}\n{one.message}" if one.message else one.title
    mark = f"{account.command}\n{account.subject}\n{one.rule}\n{one.item}"
    return {
        "ruleId": one.rule,
        "ruleIndex": rule,
        "level": one.level,
        "message": {"text": text},
        "locations": [_location(one, account)],
        "partialFingerprints": {_FINGERPRINT: hashlib.sha256(mark.encode()).hexdigest()},
    }


def _location(one: Annotation, account: Account) -> dict[str, Any]:
    """Where it is in the source, and in the model.

    A result without an artifact is allowed, but GitHub refuses the whole file for it. What has no
    line of its own is therefore put down to the file of the subject, or to its name.
    """
    path = one.path or account.file or account.subject
    physical: dict[str, Any] = {"artifactLocation": {"uri": quote(path), "uriBaseId": _ROOT}}
    if one.path:
        physical["region"] = {"startLine": one.line}
        if one.code:
            physical["region"]["snippet"] = {"text": one.code}
    logical = [{"fullyQualifiedName": one.item, "kind": "value"}]
    if one.place:
        logical.append({"fullyQualifiedName": one.place})
    return {"physicalLocation": physical, "logicalLocations": logical}
