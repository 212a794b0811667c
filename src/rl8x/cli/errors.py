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

LOST_ROWS = 3  # exit code of a run that was trained, but lost rows on its way to the store or the disk
_PACKAGE = str(Path(__file__).parent.parent)


class UserError(click.ClickException):
    """A mistake of the user's: one line, exit code 2."""

    exit_code = 2


class FiniteRange(click.FloatRange):
    """A range of finite numbers: a comparison with NaN says nothing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; refuse what is none of the range."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class WholeRange(click.IntRange):
    """A range of whole numbers, which may be written as 1e5, as in a run file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; refuse what is none of the range."""
        with contextlib.suppress(ValueError):
            int(value)  # a float would round a large one
            return super().convert(value, param, ctx)
        with contextlib.suppress(ValueError):
            if float(value).is_integer():
                return super().convert(int(float(value)), param, ctx)
        return self.fail(f"{value!r} is not a whole number.", param, ctx)


tracking_uri = click.option("--tracking-uri", metavar="URI", help="Where the runs are. Default: as in training.")


def is_users_mistake(error: BaseException) -> bool:
    """Whether an exception is one of our refusals of what a user gave, rather than a bug of ours or of their code.

    Refusals are raised on purpose, by rl8x itself: what comes out of torch or out of a user's own environment needs its
    traceback to be understood. An `ImportError` of ours says what to install.
    """
    # Python sets the `name` of a failed import; our own errors, which say what to install, have none.
    missing = type(error) is ImportError and error.name is None
    if not (missing or isinstance(error, ValueError | TypeError)):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_PACKAGE)


@contextmanager
def users_mistakes(*others: type[Exception]) -> Iterator[None]:
    """Turn our refusals within the block into `UserError`, and errors of `others`; let everything else through."""
    try:
        yield
    except Exception as error:
        if isinstance(error, others) or is_users_mistake(error):
            raise UserError(str(error)) from error
        raise


class CheckedCommand(click.Command):
    """A command that refuses an option that is empty, as `--output "$FILE"` is where the variable is not set."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words."""
        rest = super().parse_args(ctx, args)
        for each in self.get_params(ctx):
            value = ctx.params.get(each.name or "")
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(each, click.Option) and isinstance(text, str) and not text.strip():
                    raise click.BadParameter("it is empty. Leave the option out for its default.", ctx, each)
        return rest


class Command(CheckedCommand):
    """A command in which our refusals are the user's mistakes, from its first line to its last."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        with users_mistakes():
            return super().invoke(ctx)


def check_folder(folder: Path, option: str) -> None:
    """Refuse a folder in which nothing can be written, before anything is computed for it."""
    folder = folder.absolute()
    try:
        check_writable(folder)
    except OSError as error:
        raise UserError(f"nothing can be written to {folder}: {error.strerror}. Give another {option}.") from None


def name_for_files(run: str) -> str:
    """Name what is made of a run: after the last folder of its path, or its whole name, which may have slashes."""
    return os.path.basename(os.path.abspath(run)) if os.path.exists(run) else run.replace("/", "-")


def check_file(file: str, option: str) -> None:
    """Refuse a file that cannot be written, before anything is computed for it; missing folders are no reason."""
    if os.path.isdir(file):  # not Path.is_dir(), which raises at a name that is too long
        raise UserError(f"{option} names a file to write; {file} is a folder.")
    check_folder(Path(file).parent, option)


def hidden(text: str) -> str:
    """Take secrets out of a text. If `hide` cannot be imported, neither can the code whose texts hold secrets."""
    try:
        from rl8x.tracking.secrets import hide  # only now: most commands need nothing of tracking at their start
    except Exception:  # numpy is broken
        return text
    return hide(text)


def show_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback as Python does, without passwords."""
    say(hidden("".join(traceback.format_exception(kind, error, trace))).rstrip(), err=True)


def show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    """Print a warning: one of rl8x in a line, without passwords, others as Python does."""
    if filename.startswith(_PACKAGE):
        report(str(message), kind="warning")
    else:
        say(warnings.formatwarning(message, category, filename, lineno, line).rstrip(), err=True)


def report(message: str, *, kind: str = "error", debug: bool = False) -> None:
    """Print one line to standard error, after the traceback where that is wanted; without passwords."""
    if debug:
        say(hidden(traceback.format_exc()), err=True)
    say(f"rl8x: {kind}: {' '.join(hidden(message).split())}", err=True)
