"""Which tests a run skipped: `pytest --skipped` runs those alone, and a package that is missing is a failure then."""

import re

import pytest

KEY = "rl8x/skipped"
# In reasons, pytest's own among them.
MISSING = re.compile(r"not installed|could not import|no module named", re.IGNORECASE)


def pytest_addoption(parser) -> None:
    """Add `--skipped`."""
    parser.addoption("--skipped", action="store_true", help="run what the last run skipped; no package may be missing")


def pytest_configure(config) -> None:
    """Note what is skipped, in the process that gets all reports."""
    if not hasattr(config, "workerinput") and not config.option.skipped:
        config.pluginmanager.register(_Notes(config))


class _Notes:
    def __init__(self, config) -> None:
        self.config = config
        self.skipped = set()

    def pytest_runtest_logreport(self, report) -> None:
        if report.skipped:
            self.skipped.add(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport  # of a whole module

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "cache"):  # not under `-p no:cacheprovider`
            self.config.cache.set(KEY, sorted(self.skipped))


def pytest_collection_modifyitems(config, items) -> None:
    """Leave out what the last run did not skip."""
    if not config.option.skipped:
        return
    skipped = set(config.cache.get(KEY, []))
    chosen = [item for item in items if skipped & {item.nodeid, item.nodeid.partition("::")[0]}]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Report a test as failed where it lacks a package that ought to be there."""
    return _checked((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """The same of a module that skips itself."""
    return _checked((yield), collector.config)


def _checked(report, config):
    if config.option.skipped and report.skipped and MISSING.search(str(report.longrepr)):
        report.outcome, report.longrepr = "failed", f"a package is missing: {report.longrepr}"
    return report


def pytest_sessionfinish(session) -> None:
    """Pass where the last run skipped nothing."""
    if session.config.option.skipped and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
