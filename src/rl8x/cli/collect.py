"""`rl8x collect`: a data set from what a checkpoint's policy does, or from random actions, to learn from offline."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

from rl8x import keys
from rl8x.cli.acting import acting_at_random, acting_options, asked_config, check_spaces, in_words, load_acting
from rl8x.cli.errors import FiniteRange, UserError, users_mistakes
from rl8x.envs import Env, validate
from rl8x.envs.base import advanced
from rl8x.output import say
from rl8x.policy import Policy
from rl8x.replay.dataset import Dataset
from rl8x.replay.minari_format import check_new_id, write_minari
from rl8x.spaces import only_legal, tree_of, where_rows
from rl8x.trees import first_tensor, flatten_tree

_EXAMPLES = """\b
rl8x collect my-run --transitions 100000
rl8x collect runs/000040-step-400 --transitions 1e5 --epsilon 0.3 --output medium
rl8x collect CartPole --random --transitions 20000 --output random
rl8x collect my-run env_config.length=0.4 --transitions 20000 --output short-pole
rl8x collect my-run --transitions 20000 --format minari --output cartpole/medium-v0
rl8x train --algorithm bc --dataset medium --eval-env CartPole --steps-per-eval 10 --max-steps 100
"""


_OUTPUT = "A new folder for the data set, or a new id of Minari's. [default: datasets/RUN-N, or rl8x/RUN-N-v0]"
_FORMAT = "A memory-mapped TensorDict, or Minari's HDF5 in its own folder of data sets. [default: rl8x]"
_RANDOM = "Act at random: a run only says in which environment, and RUN may be the name of one."
# Where an episode ended by itself, beside `truncated`, which the end of the recording sets too.
_ENDED = "ended"


class Recording(NamedTuple):
    """Transitions, one copy's after the other's, and the returns of episodes that ended in them, of a team together."""

    dataset: Dataset
    returns: Tensor


@click.command("collect", epilog=_EXAMPLES, context_settings={"max_content_width": 120})
@click.option("--transitions", required=True, metavar="N", help="How many transitions.")
@click.option("--output", metavar="NAME", help=_OUTPUT)
@click.option("--format", "file_format", type=click.Choice(["rl8x", "minari"]), default="rl8x", help=_FORMAT)
@click.option("--random", "is_random", is_flag=True, help=_RANDOM)
@click.option(
    "--epsilon", type=FiniteRange(0.0, 1.0), default=0.0, help="Share of random actions. [default: 0; 0 to 1]"
)
@click.option("--deterministic", is_flag=True, help="Take the most likely actions rather than samples.")
@click.option(
    "--env", "env", metavar="ENV", help="Act in this environment. [default: where the run trained, or evaluated]"
)
@click.option(
    "--num-envs", type=click.IntRange(min=1), default=8, help="Copies of the environment. Each ends in a cut episode."
)
@acting_options
def collect(run: str, overrides: Sequence[str], is_random: bool, env: str | None, **how: Any) -> int:
    """Record what the policy of RUN does: its name or ID in MLflow, the path of its checkpoints, or of one of them.

    With --random RUN may also be an environment, named as for `rl8x train`; it then has its defaults.

    It acts under the env_config of the training, of which env_config.NAME=VALUE changes one parameter, and
    env_config={} goes back to the environment's defaults; in another --env it acts under that one's defaults.

    The data set has true final observations, and says where episodes terminated and where they were truncated. It is
    in rl8x's own format, a memory-mapped TensorDict, or in Minari's; `--dataset` and `Dataset.load` read both.
    """
    if is_random and (how["epsilon"] or how["deterministic"]):
        raise UserError("--random leaves nothing for --epsilon or --deterministic to change: give one of them.")
    auto, trust = how.pop("auto"), how.pop("trust")
    with users_mistakes():
        count = _whole(how.pop("transitions"))
        target = _new_target(f"{Path(run).name}-{count}", how.pop("output"), how.pop("file_format"))
        maker = acting_at_random(run) if is_random and env is None else None
        acting, trained = None, dict[str, Any]()
        if maker is None:
            acting = load_acting(run, env, auto=auto, trust=trust)
            maker, trained = acting.maker, dict(acting.trained_config)
        device = "cpu" if acting is None else acting.policy.device
        made = maker(min(how.pop("num_envs"), count), device=device, seed=how["seed"])
        with contextlib.closing(made) as environment:
            validate(environment)
            if acting is not None:
                check_spaces(environment, acting.policy)
                how["state_reset_every"] = acting.state_reset_every
            asked = asked_config(trained, overrides, environment.num_copies)
            config = environment.plain_config(asked, copies="--num-envs")
            if isinstance(target, Path):
                _make_parent(target)
            policy = None if acting is None or is_random else acting.policy
            recorded = record(policy, environment, count, env_config=config, **how)
        if isinstance(target, Path):
            recorded.dataset.save(target)
        else:
            name = "random" if is_random or acting is None else acting.algorithm
            write_minari(target, recorded.dataset, algorithm_name=name)
    source = "" if acting is None or overrides or env is not None else f", {acting.source}"
    say(f"env_config  {in_words(config)}{source}")
    mean = f", mean return {recorded.returns.mean():.4g}" if len(recorded.returns) else ""
    say(f"wrote       {target}: {recorded.dataset.size:,} transitions, {len(recorded.returns):,} whole episodes{mean}")
    return 0


@torch.no_grad()
def record(
    policy: Policy | None,
    env: Env,
    transitions: int,
    *,
    epsilon: float = 0.0,
    deterministic: bool = False,
    seed: int = 0,
    state_reset_every: int = 0,
    env_config: Mapping[str, Any] | None = None,
) -> Recording:
    """Step a policy in an environment, which is reset, and keep so many transitions.

    Actions are those that the environment gets; without a policy all are drawn from the action space, else a share
    `epsilon`, and the others are samples or the most likely ones. Where the recording of a copy ends in the middle of
    an episode, that is marked as truncated. The policy's state is reset every `state_reset_every` steps; 0 is never.
    """
    generator = torch.Generator(env.device if policy is None else policy.device).manual_seed(seed)
    env.action_space.seed(seed)
    obs, _ = env.reset(seed=seed, config=env_config)
    carry, state = env.carry, {} if policy is None else policy.initial_state(env.num_envs)
    assert carry is not None
    starts = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    slots: list[dict[str, Tensor]] = []
    of_teams: list[Tensor] = []
    kept = 0
    while kept < transitions:
        if policy is None:
            actions = _drawn(obs, env)
        else:
            if state_reset_every and len(slots) % state_reset_every == 0:
                state = policy.initial_state(env.num_envs)
            noise = None if deterministic else policy.noise(1, env.num_envs, generator)[0]
            act = policy.act(obs, state, starts, noise)
            state = act.state
            actions = policy.env_actions(act.actions)
            if epsilon:
                device = first_tensor(actions).device
                random = torch.rand(env.num_envs, generator=generator, device=device) < epsilon
                actions = where_rows(random, _drawn(obs, env), actions)
        carry, step = advanced(env, carry, actions, env.noise(1)[0])
        ends = step.terminated | step.truncated
        valid = torch.ones_like(ends) if step.valid is None else step.valid
        slots.append(
            {
                **flatten_tree(keys.OBS, obs),
                **flatten_tree(keys.ACTIONS, actions),
                keys.REWARDS: step.rewards,
                keys.TERMINATED: step.terminated,
                keys.TRUNCATED: step.truncated,
                **flatten_tree(keys.NEXT_OBS, step.final_obs),
                keys.VALID: valid,
                keys.EPISODE_RETURNS: step.episode_returns,
                _ENDED: ends,
            }
        )
        if env.team is not None:
            of_teams.append(env.team.returns(step.episode_returns)[env.team.of_agents(step.is_over)[0]].cpu())
        obs, starts, kept = step.obs, ends, kept + int(valid.sum())
    rows = _in_order({name: torch.stack([slot[name] for slot in slots]).cpu() for name in slots[0]}, transitions)
    returns = rows.pop(keys.EPISODE_RETURNS)[rows.pop(_ENDED)]
    returns = returns if env.team is None else torch.cat(of_teams)
    spaces: Any = {"observation_space": env.single_observation_space, "action_space": env.single_action_space}
    return Recording(Dataset(rows, **spaces), returns)


def _drawn(obs: Any, env: Env) -> Any:
    """Draw actions `[num_envs, *action]` from the action space, of those that a mask allows."""
    drawn = tree_of(env.action_space.sample(), lambda part: torch.as_tensor(part, device=env.device))
    if isinstance(obs, Mapping) and keys.ACTION_MASK in obs:
        drawn = only_legal(drawn, obs[keys.ACTION_MASK], env.single_action_space)
    return drawn


def _in_order(slots: dict[str, Tensor], transitions: int) -> dict[str, Tensor]:
    """Return slots `[steps, num_envs, ...]` as rows, one copy's after the other's; what is left over is left out.

    Each copy has as many, as far as that goes: a copy that is cut short has its last steps left out.
    """
    valid = slots.pop(keys.VALID)
    order = valid.cumsum(1) + torch.cat([valid.new_zeros(1, dtype=torch.int64), valid.sum(1).cumsum(0)[:-1]])[:, None]
    kept = (valid & (order <= transitions)).T  # the first ones by time, [num_envs, steps]
    rows = {name: tensor.transpose(0, 1)[kept] for name, tensor in slots.items()}
    lengths = kept.sum(1)
    last = (lengths.cumsum(0) - 1)[lengths > 0]
    rows[keys.TRUNCATED][last] |= ~rows[keys.TERMINATED][last]
    return rows


def _new_target(default: str, output: str | None, file_format: str) -> Path | str:
    """Return the folder, or the id of Minari's, that the data set is to have, and refuse one that is there."""
    if file_format == "minari":
        name = f"rl8x/{re.sub(r'[^-_0-9A-Za-z]', '-', default)}-v0" if output is None else output
        check_new_id(name)
        return name
    folder = Path("datasets") / default if output is None else Path(output)
    if folder.exists():
        raise UserError(f"{folder} is there already: give another --output.")
    return folder


def _make_parent(folder: Path) -> None:
    """Make the folder that a new folder is to lie in, before anything is recorded for it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder.parent).close()
    except OSError as error:
        why = f"nothing can be written to {folder.parent}: {error.strerror}"
        raise UserError(f"{why}. Give another --output.") from None


def _whole(text: str) -> int:
    """Read a whole number of at least 1, which may be written as 1e5."""
    try:
        number = float(text)
        if number < 1 or not number.is_integer():
            raise ValueError
    except (ValueError, OverflowError):
        raise UserError(f"--transitions must be a whole number of at least 1; got {text!r}.") from None
    return int(number)
