"""The pytest entry point of paritas: options, a mark, a fixture, and hooks.

pytest imports every installed plugin at its start, in every project of the environment. This
module is therefore outside the package, and imports as little of it as possible: a run that never
checks parity does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from paritas.app.pytest.parity import Parity
    from paritas.app.pytest.session import Session

_SESSION = pytest.StashKey["Session"]()
_TESTS = pytest.StashKey[list[str]]()
# A worker of xdist sends its account under this name.
_ACCOUNT = "paritas"
_MARK = (
    "parity(**settings): settings of paritas.verify and paritas.guard for the checks of a test, "
    "such as strict=True or lift=False; the innermost mark takes precedence"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; all except --paritas-update are also settings in [tool.paritas.pytest]."""
    group = parser.getgroup("paritas", "does the candidate compute what the reference computes?")
    group.addoption(
        "--paritas-guard",
        action="store_true",
        default=None,
        help="check every call of compiled code in this run: a test fails if a compiled graph does "
        "not compute what the graph run op by op computes",
    )
    group.addoption(
        "--paritas-every",
        type=float,
        metavar="N|SHARE",
        help="with --paritas-guard, check every N-th call of a graph, or a share of its calls "
        "below 1; the first call of a graph is always checked",
    )
    group.addoption(
        "--paritas-strict",
        action="store_true",
        default=None,
        help="count unstable findings as failures",
    )
    group.addoption(
        "--paritas-locate-seconds",
        type=float,
        metavar="SECONDS",
        help="the time limit for finding where a failure of parity.verify starts; 0 turns it off",
    )
    group.addoption(
        "--paritas-update",
        action="store_true",
        default=None,
        help="write the goldens of the tests that run, where they are missing or differ",
    )
    group.addoption(
        "--paritas-golden-dir",
        metavar="DIR",
        help="the folder of goldens; default: golden/ beside each test",
    )
    group.addoption(
        "--paritas-report",
        metavar="DIR",
        help="write an HTML page and the whole verdict as JSON for each failed check",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and start if an option or a setting is given."""
    config.addinivalue_line("markers", _MARK)
    given = (name for name in vars(config.option) if name.startswith("paritas_"))
    if any(config.getoption(name) is not None for name in given) or _has_settings(config.rootpath):
        _session(config)


def _has_settings(root: Path) -> bool:
    from paritas.app.pytest import may_have_settings

    return may_have_settings(root)


def _session(config: pytest.Config) -> Session:
    """The state of this run, created when it is first needed."""
    if _SESSION not in config.stash:
        from paritas.app.pytest import PluginOptions
        from paritas.app.pytest.session import Session
        from paritas.core.errors import ParitasError

        try:
            config.stash[_SESSION] = Session(PluginOptions.of(config))
        except ParitasError as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[_SESSION]


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Parity:
    """Checks of parity: `verify`, `guard` and `golden`; the test's report has their verdicts.

    See `paritas.app.pytest.parity.Parity`.
    """
    return _session(request.config).parity_of(request.node)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remember all collected tests before some are deselected."""
    config.stash[_TESTS] = [item.nodeid for item in items]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Check what fixtures compile."""
    __tracebackhide__ = True
    return (yield from _watch(item, "setup"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Check what the test compiles, and judge its guards."""
    __tracebackhide__ = True
    return (yield from _watch(item, "call"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Check what the teardown compiles."""
    __tracebackhide__ = True
    return (yield from _watch(item, "teardown"))


def _watch(item: pytest.Item, phase: str) -> Generator[None, Any, Any]:
    __tracebackhide__ = True
    if _SESSION not in item.config.stash and item.get_closest_marker("parity") is None:
        result = yield
        # The test itself may have requested the fixture by getfixturevalue.
        if phase == "call" and _SESSION in item.config.stash:
            item.config.stash[_SESSION].conclude(item, phase)
        return result
    return (yield from _session(item.config).watch(item, phase))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Merge the account of a worker of xdist."""
    text = getattr(node, "workeroutput", {}).get(_ACCOUNT)
    if text is not None:
        from paritas.app.pytest.session import RunAccount

        _session(node.config).account.merge(RunAccount.decode(text))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the guard; a worker sends its account, other processes set the exit status."""
    config = session.config
    if _SESSION not in config.stash:
        return
    state = config.stash[_SESSION]
    is_whole = not any("::" in arg for arg in config.args) and not config.getoption("lf", False)
    tests = config.stash.get(_TESTS, None)
    state.finish(tests if tests and is_whole else [])
    if hasattr(config, "workeroutput"):
        config.workeroutput[_ACCOUNT] = state.account.encode()
    elif session.exitstatus == pytest.ExitCode.OK and state.has_failed_outside_tests:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """Restore torch, however the run ended."""
    if _SESSION in config.stash:
        config.stash[_SESSION].finish([])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Summarise the verdicts of the run, if there are any."""
    from paritas.app.pytest import has_outcomes

    reports = [report for found in terminalreporter.stats.values() for report in found]
    if _SESSION not in config.stash and not has_outcomes(reports):
        return
    from paritas.app.pytest.session import print_summary

    print_summary(terminalreporter, reports, _session(config))
