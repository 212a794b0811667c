"""Errors on the command line: one line for a user's mistake, a traceback for a bug."""

from __future__ import annotations

import contextlib
import math
import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from rl8x.disk import check_writable
from rl8x.output import say

LOST_ROWS = 3  # exit code of a completed training that lost rows on the way to the store or the disk
_PACKAGE = str(Path(__file__).parent.parent)


class UserError(click.ClickException):
    """A mistake of the user's: one line, exit code 2."""

    exit_code = 2


class FiniteRange(click.FloatRange):
    """A range of finite numbers, as comparisons with NaN are always false."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; fail if it is not finite or not in the range."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class WholeRange(click.IntRange):
    """A range of whole numbers, which may be written as 1e5, as in a run file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; fail if it is not whole or not in the range."""
        with contextlib.suppress(ValueError):
            int(value)  # a float would round a large one
            return super().convert(value, param, ctx)
        with contextlib.suppress(ValueError):
            if float(value).is_integer():
                return super().convert(int(float(value)), param, ctx)
        return self.fail(f"{value!r} is not a whole number.", param, ctx)


tracking_uri = click.option("--tracking-uri", metavar="URI", help="Where the runs are. Default: as in training.")


def is_users_mistake(error: BaseException) -> bool:
    """Whether rl8x raised an exception to reject a user's input, rather than it being a bug of rl8x or of user code."""
    # Python sets the `name` of a failed import; our own errors, which say what to install, have none.
    missing = type(error) is ImportError and error.name is None
    if not (missing or isinstance(error, ValueError | TypeError)):
        return False
    # Errors raised in torch or in a user's own environment need their traceback to be understood.
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_PACKAGE)


@contextmanager
def users_mistakes(*others: type[Exception]) -> Iterator[None]:
    """Turn user mistakes and errors of the types `others` in the block into `UserError`; let everything else pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, others) or is_users_mistake(error):
            raise UserError(str(error)) from error
        raise


class CheckedCommand(click.Command):
    """A command that rejects empty options, such as `--output "$FILE"` with an unset variable."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words; raise `BadParameter` if an option is empty."""
        rest = super().parse_args(ctx, args)
        for each in self.get_params(ctx):
            value = ctx.params.get(each.name or "")
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(each, click.Option) and isinstance(text, str) and not text.strip():
                    raise click.BadParameter("it is empty. Leave the option out for its default.", ctx, each)
        return rest


class Command(CheckedCommand):
    """A command that reports every error for which `is_users_mistake` holds as a `UserError`."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with users_mistakes():
            return super().invoke(ctx)


def check_folder(folder: Path, option: str) -> None:
    """Raise `UserError` if a folder cannot be written to, before anything is computed for it."""
    folder = folder.absolute()
    try:
        check_writable(folder)
    except OSError as error:
        raise UserError(f"nothing can be written to {folder}: {error.strerror}. Give another {option}.") from None


def name_for_files(run: str) -> str:
    """Return a name for files made from a run: the last folder of its path, or its name with "-" for slashes."""
    return os.path.basename(os.path.abspath(run)) if os.path.exists(run) else run.replace("/", "-")


def check_file(file: str, option: str) -> None:
    """Raise `UserError` if a file cannot be written, before anything is computed for it; its folders may be missing."""
    if os.path.isdir(file):  # not Path.is_dir(), which raises if a name is too long
        raise UserError(f"{option} names a file to write; {file} is a folder.")
    check_folder(Path(file).parent, option)


def hidden(text: str) -> str:
    """Hide secrets in a text. If `hide` cannot be imported, neither can the code whose texts hold secrets."""
    try:
        from rl8x.tracking.secrets import hide  # imported late, as most commands start without tracking
    except Exception:  # numpy is broken
        return text
    return hide(text)


def show_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback as Python does, without passwords."""
    say(hidden("".join(traceback.format_exception(kind, error, trace))).rstrip(), err=True)


def show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    """Print a warning: rl8x's own in one line without passwords, others as Python does."""
    if filename.startswith(_PACKAGE):
        report(str(message), kind="warning")
    else:
        say(warnings.formatwarning(message, category, filename, lineno, line).rstrip(), err=True)


def report(message: str, *, kind: str = "error", debug: bool = False) -> None:
    """Print one line to standard error without passwords, with `debug` after the traceback."""
    if debug:
        say(hidden(traceback.format_exc()), err=True)
    say(f"rl8x: {kind}: {' '.join(hidden(message).split())}", err=True)
