"""The entry point: finds the command, imports only its module, and reports user mistakes in one line."""

from __future__ import annotations

import ast
import contextlib
import errno
import importlib
import io
import os
import re
import signal
import sys
import warnings

from rl8x.processes import forget_errors, leave_working_directory, tolerate_warnings

if __name__ == "__main__" or os.path.basename(sys.argv[0]) == "rl8x":
    leave_working_directory(runs_module=__name__ == "__main__")  # its modules could shadow dependencies

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NoReturn

import click
from click.shell_completion import CompletionItem

from rl8x import __all__ as exported
from rl8x import __version__, trusted
from rl8x.cli.errors import report, show_bug, show_warning
from rl8x.importing import importing_much
from rl8x.names import did_you_mean
from rl8x.output import Unfailing, say

# Command -> its module, which has a variable of the same name, and its short help, shown without importing it.
COMMANDS: Final = {
    "train": ("rl8x.cli.train", "Train a policy, from a run file or by options."),
    "resume": ("rl8x.cli.train", "Continue a run from its last checkpoint."),
    "study": ("rl8x.cli.study", "Train under several configurations, and test in many environments."),
    "play": ("rl8x.cli.act", "Film a run's policy, or print its returns."),
    "collect": ("rl8x.cli.act", "Record a data set from what a run's policy does."),
    "export": ("rl8x.cli.looking", "Write a run's policy as a program for other runtimes."),
    "envs": ("rl8x.cli.looking", "List the built-in environments, or describe one."),
    "tuned": ("rl8x.cli.looking", "List settings that learn, or print the run file of one."),
    "bench": ("rl8x.cli.bench", "Measure how fast a problem trains in each execution mode."),
    "ui": ("rl8x.cli.looking", "Show the runs in MLflow's web page."),
    "cache": ("rl8x.cli.looking", "List or remove the compiled programs that are kept for later runs."),
    "report": ("rl8x.cli.study", "Report on a study: statistics, figures and a page."),
    "compare": ("rl8x.cli.study", "Compare runs: params, metrics, learning curves."),
    "sync": ("rl8x.cli.looking", "Send MLflow the rows that an outage held back."),
    "doctor": ("rl8x.cli.doctor", "Check versions, devices and what is installed, and say which features lack what."),
}

_MISTAKE: Final = 2  # exit code of a user's mistake
# Commands that make a run
_TRAINING: Final = (["train"], ["resume"])
# Words that make a command track nothing
_UNTRACKED: Final = frozenset({"-h", "--help", "--dry-run", "--no-tracking", "tracking=false"})

_HELP: Final = """Train reinforcement-learning policies on batched tensor environments, tracked in MLflow.

\b
rl8x envs                                    list the environments
rl8x train CartPole --stop "wall_time: 1m"   train for a minute
rl8x train CartPole --tuned                  train with a setting that learns; `rl8x tuned` lists them
rl8x train -f run.yaml                       train as a run file says
rl8x ui                                      look at the runs
"""
_PACKAGE: Final = Path(__file__).parents[1]


def environments() -> list[str]:
    """List the built-in environments, read from `__all__` of their module without importing it."""
    body = ast.parse((_PACKAGE / "envs" / "builtin.py").read_text()).body
    assigned = {ast.unparse(each.targets[0]): each.value for each in body if isinstance(each, ast.Assign)}
    return list(ast.literal_eval(assigned["__all__"]))


def algorithm_names() -> list[str]:
    """List the built-in algorithms by the configs that the package exports, without base classes."""
    bases = ("AlgorithmConfig", "LearnerConfig", "OffPolicyConfig", "OnPolicyConfig", "OnlineConfig")
    configs = (name for name in exported if name.endswith("Config") and name not in bases)
    return [name.removesuffix("Config") for name in configs]


def tuned_tasks() -> list[str]:
    """List the tasks with tuned settings, from the names of their files."""
    return sorted({path.stem.rpartition("-")[0] for path in (_PACKAGE / "config" / "settings").glob("*.yaml")})


def run_names() -> list[str]:
    """List the runs in the local database; none if there is no such database."""
    from rl8x.tracking.location import locate
    from rl8x.tracking.private import DatabaseRuns

    database = locate().database
    return [] if database is None or not database.exists() else sorted(DatabaseRuns(database).names())


# Completions for a shell, of a command's first word, of its further words, and of an option's value.
_Names = dict[str, Callable[[], list[str]]]
_FIRST: Final[_Names] = dict.fromkeys(("resume", "collect", "export", "play", "report", "compare"), run_names)
_FIRST.update(dict.fromkeys(("train", "bench", "envs"), environments), tuned=tuned_tasks)
_EACH: Final[_Names] = {"compare": run_names, "tuned": algorithm_names}
_VALUES: Final[_Names] = {"--algorithm": algorithm_names, "--env": environments}
_VALUES["--resume"] = lambda: ["auto", *run_names()]


class _Command(click.Command):
    """A stand-in for a command, which is imported when it is used, as torch and MLflow take seconds."""

    def __init__(self, name: str) -> None:
        words = click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, shell_complete=self._offer)
        settings = {"ignore_unknown_options": True, "allow_interspersed_args": True, "help_option_names": []}
        super().__init__(name, params=[words], context_settings=settings, short_help=COMMANDS[name][1])

    def imported(self) -> click.Command:
        """Import the command."""
        module = COMMANDS[str(self.name)][0]
        with contextlib.nullcontext() if module in sys.modules else importing_much():
            command: click.Command = getattr(importlib.import_module(module), str(self.name))
        return command

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the words with the imported command; for completion in a shell with this stand-in."""
        if extra.get("resilient_parsing"):
            return super().make_context(info_name, args, parent, **extra)
        return self.imported().make_context(info_name, args, parent, **extra)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the options of the imported command."""
        command = self.imported()
        with command.make_context(ctx.info_name, [], parent=ctx.parent, resilient_parsing=True) as own:
            return command.shell_complete(own, incomplete)

    def _offer(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Offer the words that rl8x knows for this position, else files."""
        words: tuple[Any, ...] = ctx.params.get("words") or ()
        is_value = bool(words) and str(words[-1]).startswith("-")
        offered = _VALUES.get(words[-1]) if is_value else (_EACH if words else _FIRST).get(str(self.name))
        names: list[str] = []
        with contextlib.suppress(Exception):  # a shell cannot show an error, such as that of a damaged database
            names = [] if offered is None else offered()
        if offered is algorithm_names and incomplete.islower():
            names = [name.lower() for name in names]
        items = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return items or [CompletionItem(incomplete, type="file")]


class _Commands(click.Group):
    """The commands, in the order of their table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in COMMANDS:
            known = f"there are {', '.join(COMMANDS)}.{did_you_mean(cmd_name, COMMANDS)}"
            raise click.UsageError(f"No such command {cmd_name!r}; {known}", ctx)
        return _Command(cmd_name)


@click.group(
    cls=_Commands,
    help=_HELP,
    # Inherited by the commands
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True},
    epilog="`rl8x COMMAND --help` explains a command.",
)
@click.version_option(__version__, prog_name="rl8x")
@click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks of mistakes too, in any command.")
def rl8x() -> None:
    """The command line."""


@contextlib.contextmanager
def _early_tracking(words: Sequence[str]) -> Iterator[None]:
    """Start the process that sends rows to MLflow early if a run is likely to be tracked, to import in parallel."""
    is_other_rank = os.environ.get("RANK", "0") not in ("", "0")  # only torchrun's first process tracks
    trains = words[:1] in _TRAINING and not is_other_rank
    if not trains or len(words) < 2 or not _UNTRACKED.isdisjoint(words):
        yield
        return
    from rl8x.tracking.location import locate
    from rl8x.tracking.protocol import TrackingError
    from rl8x.tracking.shipping import end_unused, start_early

    is_elsewhere = any(re.match(r"(--tracking-uri|tracking_uri)\b", word) for word in words)
    with contextlib.suppress(TrackingError):  # the run will report it
        start_early(None if is_elsewhere else locate().database)
    try:
        yield
    finally:
        end_unused()


def _end(number: int, frame: object) -> NoReturn:
    """End the process on a signal outside a run, with one line and the signal's exit code."""
    say(f"rl8x: ended by {signal.Signals(number).name}", err=True)
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, the words after `rl8x` or the process's own, and return the exit code.

    It is 0, or 2 after a user's mistake, 3 if rows of a run were lost, 130 after Ctrl-C. A bug raises, so that Python
    shows its traceback and exits with 1.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        sys.excepthook, warnings.showwarning = show_bug, show_warning
        for number in (signal.SIGTERM, signal.SIGHUP) if words[:1] in _TRAINING else ():
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _end)
        forget_errors()
        if isinstance(sys.stdout, io.TextIOWrapper):  # escape letters that the terminal cannot show
            sys.stdout.reconfigure(errors="backslashreplace")
    with warnings.catch_warnings():
        tolerate_warnings()
        trusted.newly.clear()
        code = _run(words, contextlib.nullcontext() if argv is not None else _early_tracking(words))
        for file in trusted.newly:
            if code != _MISTAKE:  # a mistake is reported in a single line
                say(f"rl8x: your trust in {file} is remembered until it changes (`rl8x doctor` shows it)", err=True)
        return code


def _run(words: Sequence[str], tracking: AbstractContextManager[None]) -> int:
    debug = "--debug" in words
    try:
        os.getcwd()
    except OSError:
        report("the working directory does not exist any more: change to another")
        return _MISTAKE
    try:
        with tracking:
            code: Any = rl8x.main([word for word in words if word != "--debug"], "rl8x", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return _MISTAKE
    except click.ClickException as error:  # a UserError among them
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "rl8x"
        hint = f" Try '{command} --help'." if isinstance(error, click.UsageError) else ""
        report(f"{error.format_message()}{hint}", debug=debug)
        return _MISTAKE
    except (click.Abort, KeyboardInterrupt):  # in a command, before or after it
        say("rl8x: interrupted", err=True)
        return 130
    except OSError as error:  # a full disk, as in `rl8x envs > FILE`; click handles closed pipes
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        report(f"the output could not be written: {error.strerror}", debug=debug)
        Unfailing(sys.stdout).forsake()
        return _MISTAKE
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
