"""`make test-all`: what `make test` skipped runs, and what lacks a package fails."""

from pathlib import Path

import pytest
from tests import skips

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_everywhere(): pass

def test_package(): pytest.importorskip("a_package")

@pytest.mark.skipif(True, reason="there is no browser")
def test_browser(): pass
"""
MODULE = 'import pytest\npytest.importorskip("a_package", reason="a_package is not installed")\ndef test_it(): pass\n'


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_skipped_runs_once_its_package_is_there_and_fails_without_it(pytester, workers):
    pytester.makeconftest(Path(skips.__file__).read_text())
    pytester.makepyfile(test_tests=TESTS, test_module=MODULE)
    options = ("-n", str(workers), "--continue-on-collection-errors")
    pytester.runpytest_subprocess(*options).assert_outcomes(passed=1, skipped=3)

    done = pytester.runpytest_subprocess(*options, "--skipped")
    done.assert_outcomes(failed=1, skipped=1, errors=1, deselected=0 if workers else 1)
    assert done.ret == 1
    done.stdout.fnmatch_lines(["*a package is missing*a_package*"])

    pytester.makepyfile(a_package="")
    done = pytester.runpytest_subprocess(*options, "--skipped")
    done.assert_outcomes(passed=2, skipped=1, deselected=0 if workers else 1)
    assert done.ret == 0


def test_nothing_skipped_leaves_nothing_to_run(pytester):
    pytester.makeconftest(Path(skips.__file__).read_text())
    pytester.makepyfile("def test_everywhere(): pass")
    assert pytester.runpytest_subprocess().ret == 0
    assert pytester.runpytest_subprocess("--skipped").ret == 0
