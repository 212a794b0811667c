"""What one rank decides or breaks, all take part in; checkpoints have all ranks."""

import warnings

import pytest
import torch
from tests.ranks import problems
from tests.ranks.launch import launch

from rl8x import MemoryTracker, Trainer, keys
from rl8x.checkpoint import listed

NAMES = ["one_rank_stops_all", "bad_numbers", "unlike", "resumed", "one_process_goes_on_with_two"]  # of scenarios
OTHERS = [
    "one_rank_has_a_callback",
    "one_rank_saves",
    "one_rank_asks_to_be_confirmed",
    "one_ranks_signal_stops_all",
    "unsavable",
    "rolled_back",
    "going_on_from_different_places",
    "evaluated_under_values_of_copies",
    "other_weights",
    "programs_come_late",
    "one_falls_back",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("decisions")


@pytest.fixture(scope="module")
def found(folder):
    for name in ("ppo", "dqn"):  # runs of one process, which ranks go on with
        algorithm = problems.online("dqn") if name == "dqn" else problems.ppo().build(problems.CartPole, time_limit=30)
        trainer = Trainer(algorithm, tracker=MemoryTracker(), checkpoints=folder / f"one-{name}", num_eval_envs=4)
        trainer.run(max_steps=3, env_config={"length": 0.75}, progress="none")
    return launch(folder, "scenarios", NAMES)


def test_what_one_rank_decides_or_breaks_all_take_part_in(found):
    """Each scenario has checked on both ranks what came of it."""
    assert found == {name: [None, None] for name in NAMES}


@pytest.mark.long
@pytest.mark.usefixtures("found")  # whose checkpoints some go on from
def test_so_it_is_with_all_other_decisions(folder):
    assert launch(folder, "scenarios", OTHERS) == {name: [None, None] for name in OTHERS}


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_one_process_goes_on_with_a_run_of_two_ranks_and_says_so(found, folder, name):
    path = next(path for path in listed(folder / f"resumed-{name}") if path.name.endswith("-step-3"))
    with pytest.warns(RuntimeWarning, match="was saved by 2 ranks and goes on with 1"):
        trainer = Trainer.resume(path, tracker=MemoryTracker(), checkpoints=False)
    before = dict(trainer.state)
    row = trainer.run(progress="none")
    assert row[keys.STEPS] == 6
    gained = row[keys.ENV_STEPS] - before[keys.ENV_STEPS]
    assert gained * 2 == before[keys.ENV_STEPS]  # of as many steps, half the copies
    gone = {"ranks", "num_envs.total"}
    assert [value for param, value in trainer.tracker.params.items() if param in gone] == [None, None]
    assert all(torch.isfinite(tensor).all() for tensor in trainer.algorithm.policy.parameters())


@pytest.mark.usefixtures("found")
def test_as_many_ranks_as_before_say_nothing(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer.resume(folder / "one-ppo", tracker=MemoryTracker(), checkpoints=False)
