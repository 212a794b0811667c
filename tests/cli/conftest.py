"""What tests of commands share."""

import pytest

from rl8x.cli.main import main


@pytest.fixture
def call(capsys):
    """Run a command that ends with an exit code; returns what it prints, or the one line of a mistake."""

    def run(*words, code=0):
        capsys.readouterr()
        assert main([*map(str, words)]) == code
        said = capsys.readouterr()
        assert code != 2 or said.err.count("\n") == 1, said.err
        return said.err if code == 2 else said.out

    return run
