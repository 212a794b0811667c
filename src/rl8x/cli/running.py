"""Running a trainer from the command line to its end, and what is said then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rl8x import keys
from rl8x.cli.errors import LOST_ROWS, UserError, is_users_mistake
from rl8x.output import say

if TYPE_CHECKING:
    from rl8x.trainers import Trainer, TrainStats


def run_to_the_end(trainer: Trainer, run: Callable[[], TrainStats], progress: str) -> int:
    """Run a trainer; say why it stopped, with what, where the run is and how to go on with it, however it ends.

    Args:
        trainer: What runs.
        run: Runs it and returns the last row. What it refuses before its first step is a mistake of the user's; what
            breaks later is a bug.
        progress: What is shown while it runs; unless that is `"none"` the trainer has said how it ended itself.

    Returns:
        The exit code.
    """
    before, failed = dict(trainer.state), True
    try:
        _summarize(run(), say_reason=progress == "none")
        failed = False
    except Exception as error:
        if trainer.state == before and is_users_mistake(error):
            raise UserError(str(error)) from error
        raise
    finally:
        for line in trainer.ending if progress == "none" else ():
            say(line, err=failed)
    return LOST_ROWS if _has_lost_rows(trainer) else 0


def _summarize(stats: TrainStats, *, say_reason: bool) -> None:
    if say_reason:
        say(f"stopped by {stats.stop_reason}")
    steps, env_steps, episodes = (stats[name] for name in (keys.STEPS, keys.ENV_STEPS, keys.ENV_EPISODES))
    say(f"trained     {steps:,.0f} steps, {env_steps:,.0f} env steps, {episodes:,.0f} episodes")
    for group in ("returns", "horizon_returns"):
        if f"{keys.EVAL_PREFIX}{group}/mean" in stats:
            say(_describe_evaluation(stats, group))


def _describe_evaluation(stats: TrainStats, group: str) -> str:
    low, high, mean, std = (stats[keys.EVAL_PREFIX + name] for name in keys.summary(group))
    when = "final" if f"{keys.EVAL_PREFIX}{group}/mean" in stats.fresh else "last"
    what = "return" if group == "returns" else "return of a horizon"
    episodes = stats.get(keys.EVAL_PREFIX + keys.EPISODES_ENDED, 0)
    played = f"{episodes:,.0f} whole episodes, " if episodes and group == "returns" else ""
    measured = f"{what} {mean:.4g} +- {std:.3g} (from {low:.4g} to {high:.4g})"
    return f"evaluated   {measured}, {played}deterministic, the {when} policy"


def _has_lost_rows(trainer: Trainer) -> bool:
    """Whether something that the run logged is neither in the store nor on the disk."""
    from rl8x.tracking import MLflowTracker

    found = trainer.tracker.whereabouts() if isinstance(trainer.tracker, MLflowTracker) else None
    return found is not None and bool(found.unsent.num_lost or found.unsent.num_others_lost)
