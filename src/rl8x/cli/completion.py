"""`rl8x completion`, and the words that it offers, found without importing torch or MLflow, which takes seconds."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem, get_completion_class

import rl8x

VARIABLE: Final = "_RL8X_COMPLETE"  # by which the script asks; click's name for it
_EXAMPLES: Final = """\b
bash   rl8x completion bash > ~/.local/share/bash-completion/completions/rl8x
zsh    rl8x completion zsh > ~/.zfunc/_rl8x    with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc
fish   rl8x completion fish > ~/.config/fish/completions/rl8x.fish
"""
_PACKAGE: Final = Path(rl8x.__file__).parent


@click.command("completion", epilog=_EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, environments, algorithms and names of runs in SHELL."""
    cls = get_completion_class(shell)
    assert cls is not None
    template = cls(ctx.find_root().command, {}, "rl8x", VARIABLE)
    # The template itself: its `source()` asks which bash is there, and may be printed on another machine.
    click.echo(template.source_template % template.source_vars())


def environments() -> list[str]:
    """List the built-in environments, read off the file that registers them."""
    return _listed(_PACKAGE / "envs" / "builtin.py")


def algorithm_names() -> list[str]:
    """List the built-in algorithms, by the configs that the package exports, without the base classes."""
    names = _listed(_PACKAGE / "algorithms" / "__init__.py")
    bases = ("AlgorithmConfig", "OnlineConfig", "OffPolicyConfig")
    return [name.removesuffix("Config") for name in names if name.endswith("Config") and name not in bases]


def tuned_tasks() -> list[str]:
    """List the tasks that have tuned settings, by the names of their files."""
    return sorted({path.stem.rpartition("-")[0] for path in (_PACKAGE / "config" / "settings").glob("*.yaml")})


def _listed(path: Path) -> list[str]:
    """Read what a module names in `__all__`."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def run_names() -> list[str]:
    """List the runs in the local database; none if there is no such database."""
    from rl8x.tracking.database_runs import DatabaseRuns
    from rl8x.tracking.location import locate

    database = locate().database
    return [] if database is None or not database.exists() else sorted(DatabaseRuns(database).names())


# The words to offer: as a command's first word, as each of its words, and as an option's value.
_FIRST: Final[dict[str, Callable[[], Iterable[str]]]] = {
    **dict.fromkeys(("train", "bench", "envs"), environments),
    "tuned": tuned_tasks,
    **dict.fromkeys(("resume", "collect", "export", "play", "report"), run_names),
    "completion": lambda: ("bash", "zsh", "fish"),
}
_EACH: Final[dict[str, Callable[[], Iterable[str]]]] = {"compare": run_names, "tuned": algorithm_names}
_VALUES: Final[dict[str, Callable[[], Iterable[str]]]] = {
    "--algorithm": algorithm_names,
    "--env": environments,
    "--resume": lambda: ["auto", *run_names()],
}


class Completed(click.Command):
    """Stands for a command while the shell asks: only where an option's name is asked for, is it imported."""

    def __init__(self, name: str, load: Callable[[], click.Command]) -> None:
        words = click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, shell_complete=self._offer)
        settings = {"ignore_unknown_options": True, "allow_interspersed_args": True, "help_option_names": []}
        super().__init__(name, params=[words], context_settings=settings)
        self._load = load

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the options of the command itself."""
        command = self._load()
        with command.make_context(ctx.info_name, [], parent=ctx.parent, resilient_parsing=True) as own:
            return command.shell_complete(own, incomplete)

    def _offer(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Offer words for a place; where rl8x knows none, files."""
        words: tuple[Any, ...] = ctx.params.get("words") or ()
        last = str(words[-1]) if words else ""
        offered = _VALUES.get(last) if last.startswith("-") else _EACH.get(str(self.name))
        if not words:
            offered = _FIRST.get(str(self.name)) or offered
        items: list[CompletionItem] = []
        with contextlib.suppress(Exception):  # a shell has no use for an error, whatever a database has in it
            for name in offered() if offered is not None else ():
                shown = name.lower() if incomplete.islower() and offered is algorithm_names else name
                if shown.startswith(incomplete):
                    items.append(CompletionItem(shown))
        return items or [CompletionItem(incomplete, type="file")]
