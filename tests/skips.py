"""Which tests a run skipped: `pytest --skipped` runs those alone, and a package that is missing is a failure then."""

import re

import pytest

KEY = "rl8x/skipped"
# In reasons, pytest's own among them.
MISSING = re.compile(r"not installed|could not import|no module named", re.IGNORECASE)
_skipped = set()


def pytest_addoption(parser) -> None:
    parser.addoption("--skipped", action="store_true", help="run what the last run skipped; no package may be missing")


def pytest_runtest_logreport(report) -> None:
    if report.skipped:
        _skipped.add(report.nodeid)


pytest_collectreport = pytest_runtest_logreport  # of a whole module


def pytest_collection_modifyitems(config, items) -> None:
    """Leave out what the last run did not skip."""
    if config.option.skipped:
        skipped = set(config.cache.get(KEY, []))
        left_out = [item for item in items if not skipped & {item.nodeid, item.nodeid.partition("::")[0]}]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Report a test as failed where it lacks a package that ought to be there."""
    report = yield
    if item.config.option.skipped and report.skipped and MISSING.search(str(report.longrepr)):
        report.outcome, report.longrepr = "failed", f"a package is missing: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """The same of a module that skips itself."""
    return (yield from pytest_runtest_makereport(collector))


def pytest_sessionfinish(session) -> None:
    """Note what was skipped, in the process that gets all reports; pass where the last run skipped nothing."""
    if session.config.option.skipped:
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK
    elif not hasattr(session.config, "workerinput") and hasattr(session.config, "cache"):  # not `-p no:cacheprovider`
        session.config.cache.set(KEY, sorted(_skipped))
