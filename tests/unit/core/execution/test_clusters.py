"""A cluster as its client sees it: workers that do not fit, workers that go."""

from __future__ import annotations

import importlib.metadata
import types

import pytest

from paritas.core import time_limit
from paritas.core.errors import ClusterLostError, UsageError
from paritas.core.execution import executors
from paritas.core.settings import own_version


class Client:
    """As dask's, as far as it is used."""

    status = "running"

    def __init__(self, workers, **versions):
        self.workers, self.versions = workers, versions

    def run(self, function, *_, on_error):
        assert function is importlib.metadata.version
        return self.versions

    def get_executor(self, **_):
        return types.SimpleNamespace(submit=lambda *_: "submitted")

    def scheduler_info(self, **_):
        return {"workers": self.workers}


def test_workers_with_the_same_paritas_are_taken():
    executors._check_workers(Client({}, a=own_version(), b=own_version()), "host:1")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.0.1", "the worker at b has paritas 0.0.1: install paritas"),
        (
            importlib.metadata.PackageNotFoundError("paritas"),
            "the worker at b has no paritas .*: install paritas",
        ),
    ],
)
def test_a_worker_with_another_paritas_or_none_is_refused(version, words):
    with pytest.raises(UsageError, match=words):
        executors._check_workers(Client({}, a=own_version(), b=version), "host:1")


def test_a_lost_scheduler_takes_no_more_work():
    cluster = executors._Cluster(Client({"a": {}}), "host:1")
    assert cluster.submit(print) == "submitted"
    cluster._client.status = "connecting"
    with pytest.raises(ClusterLostError, match="host:1': the connection to the scheduler is lost"):
        cluster.submit(print)


def test_a_cluster_may_be_without_workers_only_for_a_while(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time_limit.time, "monotonic", lambda: now[0])
    cluster = executors._Cluster(Client({}), "host:1")
    now[0] = 119.0
    cluster.check()
    cluster._client.workers = {"a": {}}
    cluster.check()
    cluster._client.workers = {}
    now[0] = 238.0
    cluster.check()
    now[0] = 240.0
    with pytest.raises(ClusterLostError, match="has had no workers for 120 s"):
        cluster.check()
