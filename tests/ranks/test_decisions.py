"""What one rank decides or breaks, all take part in; checkpoints have all ranks."""

import warnings

import pytest
import torch
from tests.ranks import problems
from tests.ranks.launch import launch

from rl8x import keys
from rl8x.checkpoint import listed, read
from rl8x.tracking import MemoryTracker
from rl8x.trainers import Trainer

NAMES = [
    "one_rank_stops_all",
    "one_ranks_callback_stops_all",
    "one_rank_asks_to_be_confirmed",
    "one_ranks_signal_stops_all",
    "bad_numbers",
    "unsavable",
    "rolled_back",
    "unlike",
    "going_on_from_different_places",
    "evaluated_under_values_of_copies",
    "other_weights",
    "resumed",
    "one_process_goes_on_with_two",
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


def test_a_condition_of_one_rank_stops_all(found):
    first, second = found["one_rank_stops_all"]
    assert first["steps"] == second["steps"] == 3
    assert first["reason"] == second["reason"]
    assert first["reason"].endswith("(rank 1)")
    assert (first["tracker"], second["tracker"]) == ("MemoryTracker", "NullTracker")


def test_a_callback_of_one_rank_stops_all(found):
    first, second = found["one_ranks_callback_stops_all"]
    assert first == second == {"run": [2, "enough (rank 1)"], "loop": [2, "enough"]}


def test_all_evaluate_what_one_rank_wants_to_be_confirmed(found):
    first, second = found["one_rank_asks_to_be_confirmed"]
    assert first == second
    assert first["steps"] == 3
    assert first["evaluated"]


def test_values_for_each_copy_of_an_evaluation_are_shared_out(found):
    first, second = found["evaluated_under_values_of_copies"]
    for name in ("list", "tensor"):
        assert (first[name][0], second[name][0]) == ([0.3, 0.4, 0.5], [0.6, 0.7])
        assert first[name][1] == second[name][1] == "[0.3, 0.4, 0.5, 0.6, 0.7]"
    assert (first["grid"][0], second["grid"][0]) == ([0.3, 0.4, 0.5], [0.6, 0.3])
    assert first["grid"][1] == second["grid"][1] == "Grid([0.3, 0.4, 0.5, 0.6])"
    assert (first["small grid"][0], second["small grid"][0]) == ([0.3, 0.4, 0.3], [0.3, 0.4])
    assert first["None"][0] + second["None"][0] == [0.1, 0.3, 0.5, 0.6, 0.8]  # evenly spaced, of eight
    assert first["refused"] == second["refused"]
    assert "env_config['length'] has 2 values for 5 copies (`num_eval_envs`)" in first["refused"]


def test_a_signal_for_one_rank_ends_all_after_the_step(found, folder):
    first, second = found["one_ranks_signal_stops_all"]
    assert first == second == {"code": 143, "steps": 2}
    saved = read(listed(folder / "signal")[-1])
    assert saved.metadata["status"] == "KILLED"
    assert saved.metadata["counters"][keys.STEPS] == 2


def test_bad_numbers_of_one_rank_are_those_of_all(found):
    first, second = found["bad_numbers"]
    assert first == second
    unchanged, told = first["skip"]
    assert unchanged
    assert "in environments 3, slot 0 of the horizon of rank 1" in told[0]
    assert "of rank 1" in first["stop"][0]
    assert first["stop"][1] == 1


def test_ranks_with_replays_go_back_to_a_checkpoint_together(found):
    first, second = found["rolled_back"]
    assert first["steps"] == second["steps"] == 6
    assert first["digest"] == second["digest"]
    assert any("the weights are as they were in 000002-step-2" in told for told in first["told"])


def test_what_one_rank_cannot_save_ends_none(found):
    assert found["unsavable"] == [{"steps": 2, "saved": 0}] * 2


def test_ranks_that_are_not_alike_are_refused_by_name(found):
    first, second = found["unlike"]
    assert first == second
    assert first[0].startswith("rank 1 is not like rank 0: lr is 0.001, and 0.0001 on rank 0.")
    assert first[1].startswith("rank 1 is not like rank 0: max_steps is 4, and 3 on rank 0.")


def test_ranks_that_do_not_go_on_from_one_checkpoint_are_refused(found):
    first, second = found["going_on_from_different_places"]
    at = ["the checkpoint to go on from", "the start of the run"]
    assert first[0] == f"rank 1 is at {at[1]}, rank 0 at {at[0]}: all ranks must do the same."
    assert second[0] == f"rank 0 is at {at[0]}, rank 1 at {at[1]}: all ranks must do the same."
    assert first[1] == second[1]
    assert first[1].startswith("rank 1 is not like rank 0: the checkpoint is 0000")


def test_all_begin_with_the_weights_of_rank_0(found):
    (first, first_after), (second, second_after) = found["other_weights"]
    assert first != second
    assert first_after == second_after == first


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_a_resumed_run_of_two_ranks_has_the_same_bits(found, name):
    ranks = [each[name] for each in found["resumed"]]
    for rank in ranks:
        for what in ("digests", "own", "rows", "states"):
            straight, resumed = rank[what]
            assert straight == resumed, what
        assert rank["differ"] == []
        assert rank["places"] > 40
    assert ranks[0]["digests"] == ranks[1]["digests"]
    assert ranks[0]["own"] != ranks[1]["own"]
    assert [rank["null"] for rank in ranks] == [False, True]


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
    assert all(torch.isfinite(tensor).all() for tensor in trainer.algorithm.policy.parameters())


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_two_ranks_go_on_with_a_run_of_one_and_say_so(found, name):
    first, second = (each[name] for each in found["one_process_goes_on_with_two"])
    assert "was saved by 1 rank and goes on with 2" in first["told"][0]
    assert first["digest"] == second["digest"]
    assert first["own"] != second["own"]
    assert first["config"] == second["config"] == {"length": 0.75}
    assert first["after"] == second["after"]
    gained = first["after"][keys.ENV_STEPS] - first["before"][keys.ENV_STEPS]
    assert gained == 2 * first["before"][keys.ENV_STEPS]


def test_all_ranks_fall_back_where_one_does(found):
    first, second = found["one_falls_back"]
    assert first["digest"] == second["digest"]
    assert first["ran"] == second["ran"] == ["eager", True]
    assert first["told"] == ["rank 1 cannot run programs, as it says itself: all ranks run eagerly."]
    assert "no compiler found" in second["told"][0]


@pytest.mark.parametrize(("seed", "step"), [("seed", 1), ("none", 4)])
def test_all_ranks_change_to_programs_at_one_step_where_one_has_them_later(found, folder, seed, step):
    first, second = (each[seed] for each in found["programs_come_late"])
    assert first["ran"] == second["ran"] == ["compile", step]
    assert first["digest"] == second["digest"]
    assert (first["left"], second["left"]) == (0, 0)
    assert [int(path.name.rpartition("-")[2]) for path in listed(folder / f"late-{seed}")] == [0, step, 6]


def test_as_many_ranks_as_before_say_nothing(folder, found):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer.resume(folder / "one-ppo", tracker=MemoryTracker(), checkpoints=False)
