"""What two ranks do, and what must come of it; see `launch`. What returns numbers one process does too, to compare."""

import dataclasses
import os
import signal
import warnings
from unittest import mock

import pytest
import torch
from tests.combinations.everything import everything
from tests.ranks import problems
from tests.ranks.problems import COPIES, SEED

from rl8x import keys
from rl8x.algorithms import DistillationConfig
from rl8x.checkpoint import Checkpoints, listed, read
from rl8x.conditions import Confirmed, HitsUpperBound, WallTime
from rl8x.distributed import RankError, ranks
from rl8x.execution import execution
from rl8x.execution.compiler import Compiler
from rl8x.execution.programs import ProgramError
from rl8x.policy import Policy
from rl8x.randomization import Grid
from rl8x.tracking import MemoryTracker, NullTracker
from rl8x.trainers import NonFiniteError, Trainer

OFFLINE_STEPS = 2


def both(value):
    """Return what each of two ranks has, in their order."""
    return ranks().share("what each has", value)


def alike(value):
    """Return what both ranks have, which must be the same."""
    first, second = both(value)
    assert first == second
    return first


def saved_steps(folder):
    """Return the steps of the checkpoints that rank 0 has written."""
    both("written")
    return [int(path.name.rpartition("-")[2]) for path in listed(folder)]


def ppo_equals_one_process(folder=None, env=problems.CartPole, env_options=None, **options):
    """Ten full-batch updates: five steps of two epochs."""
    size = COPIES if ranks().size > 1 else 2 * COPIES
    algorithm = problems.rank_algorithm(problems.ppo(num_envs=size, **options), env, **env_options or {})
    trainer = problems.trainer(algorithm)
    rows = [dict(trainer.step()) for _ in range(5)]
    return {"weights": problems.weights(algorithm), "rows": rows, "state": dict(trainer.state)}


def ppo_adapts(folder=None):
    """The same with a rate that goes by the divergence over all copies, and advantages of the present critic."""
    return ppo_equals_one_process(lr_schedule={"kind": "adaptive"}, recompute_advantages=True)


def ppo_teams(folder=None, **options):
    """The same with a team of agents, whose critic sees them all."""
    seen = {"state": "shared", "agent_id": True, "team_return": "sum"}
    return ppo_equals_one_process(env=problems.Spread, env_options=seen, **options)


def ppo_separate(folder=None):
    """The same with weights of their own."""
    return ppo_teams(model_config={"hidden_sizes": [8], "separate": True})


def ppo_compiled(folder):
    """The same with minibatches, as traced programs between sums over ranks, beside eager execution."""
    found = {}
    for mode in ("eager", "compile"):
        options = {"lr": 1e-5, "target_kl_div": 0.5, "lr_schedule": {"kind": "adaptive"}, "recompute_advantages": True}
        algorithm = problems.rank_algorithm(problems.ppo(sgd_minibatch_size=32, **options))
        problems.run_traced(algorithm, mode)
        trainer = problems.trainer(algorithm)
        rows = [dict(trainer.step()) for _ in range(3)]
        found[mode] = {"weights": problems.weights(algorithm), "kl": [row["monitors/kl_div"] for row in rows]}
        found[mode]["lr"] = [row["coefficients/lr"] for row in rows]
    return found


def hundred_updates(folder):
    """104 updates, eagerly; by `auto`, which compiles for real and changes to that; by `compile`, which finds it."""
    execution._CHANGE_SECONDS, execution._WORTH_SECONDS = 0.05, 0.0
    problems.compile_updates_alone()
    found = {}
    for mode in ("eager", "auto", "compile"):
        config = problems.ppo(sgd_minibatch_size=32, target_kl_div=0.5, execution=mode, num_threads=1)
        algorithm = problems.rank_algorithm(config)
        trainer = problems.trainer(algorithm)
        trainer.run(max_steps=13, progress="none")
        found[mode] = {
            "digest": problems.digest(algorithm),
            "weights": problems.weights(algorithm),
            "updates": trainer.state[keys.UPDATES],
            "ran": [algorithm.execution.mode, algorithm.execution.starts_at],
        }
    return found


class SlightlyOff(problems.Traced):
    """A program that differs from eager execution in its bits, and on rank 1 cannot be had."""

    def __call__(self, *tensors):
        if ranks().rank:
            raise ProgramError("compile", OSError("no compiler found"))
        results = super().__call__(*tensors)
        tensors[0].mul_(1.0 + 1e-6)
        return results


def one_falls_back(folder):
    """Rank 1 has no compiler when `auto` changes: all fall back."""
    no_process = mock.patch.object(Compiler, "start")  # nothing is compiled
    with no_process, mock.patch.multiple(execution, _CHANGE_SECONDS=0.05, _WORTH_SECONDS=0.0):
        algorithm = problems.rank_algorithm(problems.ppo(sgd_minibatch_size=32, execution="auto", num_threads=1))
        execution.CompiledProgram = lambda function, check=None: SlightlyOff(function, compiles=False)
        problems.compile_updates_alone()
        trainer = problems.trainer(algorithm)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer.run(max_steps=12, progress="none")
    alike(problems.digest(algorithm))
    assert (algorithm.execution.mode, algorithm.execution.fell_back) == ("eager", True)
    (text,) = [str(each.message) for each in told if "eagerly" in str(each.message)]
    if ranks().is_first:
        assert text == "rank 1 cannot run programs, as it says itself: all ranks run eagerly."
    else:
        assert "no compiler found" in text


def programs_come_late(folder):
    """Of `auto`, on rank 1: with a seed both wait at the step that is planned, without one both change three later."""
    late = {"_CHANGE_SECONDS": 0.001, "_WORTH_SECONDS": 0.0}
    late["CompiledProgram"] = lambda function, check=None: problems.Traced(function, compiles=False)
    for seed, step in ((SEED, 1), (None, 4)):
        looks = iter([3, 2, 1] if ranks().rank else [])
        missing = lambda _, seconds=0.0, looks=looks: next(looks, 0)  # noqa: E731
        limits = mock.patch.multiple(execution, **late)
        with limits, mock.patch.object(Compiler, "missing", missing):
            config = problems.ppo(sgd_minibatch_size=32, execution="auto", num_threads=1, seed=seed)
            algorithm = problems.rank_algorithm(config)
            trainer = problems.trainer(algorithm, checkpoints=folder / f"late-{seed}")
            trainer.run(max_steps=6, progress="none")
        assert (algorithm.execution.mode, algorithm.execution.starts_at) == ("compile", step)
        assert list(looks) == []
        alike(problems.digest(algorithm))
        assert saved_steps(folder / f"late-{seed}") == [0, step, 6]


def moving(folder=None):
    """Parameters that move with returns: by the episodes of both ranks, of which one has the shorter ones."""
    size = COPIES if ranks().size > 1 else 2 * COPIES
    found = {}
    for name, drawn in problems.MOVING.items():
        algorithm = problems.rank_algorithm(problems.ppo(num_envs=size))
        trainer = problems.trainer(algorithm)
        trainer.run(env_config={"length": drawn}, max_steps=5, progress="none")
        (state,) = algorithm.env.parameter_state.state_dict()["moving"].values()
        state = {key: tensor.double().reshape(-1).tolist() for key, tensor in state.items() if key != "begun"}
        found[name] = {"state": state, "weights": problems.weights(algorithm)}
    return found


def distilled(folder=None):
    """Full batches of labels, each of a rank's copies."""
    size = COPIES if ranks().size > 1 else 2 * COPIES
    given = {"horizon": 16, "seed": SEED, "device": "cpu", "execution": "eager", "num_envs": size, "loss": "kl"}
    given |= {"sample_actions": False}  # teacher and student draw from one generator
    config = DistillationConfig(**given, sgd_minibatch_size=None, model_config={"hidden_sizes": [8]})
    torch.manual_seed(1)
    env = problems.CartPole(1)
    teacher = Policy(env.single_observation_space, env.single_action_space, model_config={"hidden_sizes": [8]})
    with torch.no_grad():
        teacher.model.policy_head.weight.mul_(100.0)  # it has something to teach
    algorithm = problems.rank_algorithm(dataclasses.replace(config, teacher=teacher))
    trainer = problems.trainer(algorithm)
    rows = [trainer.step() for _ in range(3)]
    losses = {key: value for key, value in rows[-1].items() if key.startswith("losses/")}
    return {"weights": problems.weights(algorithm), "losses": losses}


def offline(folder=None, names=tuple(problems.OFFLINE)):
    """Each algorithm with a data set, of whose batches ranks have halves; in ranks eagerly and traced."""
    found = {}
    for name in names:
        for mode in ("eager", "compile") if ranks().size > 1 and name in problems.TRACED else ("eager",):
            algorithm = problems.offline(name)
            problems.run_traced(algorithm, mode)
            trainer = problems.trainer(algorithm)
            for _ in range(OFFLINE_STEPS):
                row = trainer.step()
            losses = {key: value for key, value in row.items() if key.startswith(("losses/", "monitors/"))}
            found[f"{name} {mode}"] = {"weights": problems.weights(algorithm), "row": losses}
    return found


def online(folder):
    """Every algorithm with an environment: a few steps, then what ranks have alike and what not."""
    found = {}
    for name in problems.ONLINE:
        algorithm = problems.online(name)
        trainer = problems.trainer(algorithm)
        for _ in range(4):
            row = trainer.step()
        own = algorithm.rollout[keys.OBS].double().sum().item()
        found[name] = {"digest": problems.digest(algorithm), "row": dict(row), "own": own, "state": dict(trainer.state)}
    return found


def one_rank_stops_all(folder):
    """A condition that is met on rank 1 alone."""
    trainer = problems.trainer(problems.rank_algorithm(problems.ppo()))
    condition = lambda row: ranks().rank == 1 and row[keys.STEPS] >= 3  # noqa: E731
    row = trainer.run(stop_conditions=[condition], max_steps=9, progress="none")
    assert row[keys.STEPS] == 3
    assert alike(row.stop_reason).endswith("(rank 1)")
    assert type(trainer.tracker) is (MemoryTracker if ranks().is_first else NullTracker)


def one_ranks_callback_stops_all(folder):
    """`trainer.stop` on rank 1 alone ends both, in a run and in a loop."""
    for kind, reason in (("run", "enough (rank 1)"), ("loop", "enough")):
        callback = lambda trainer, row: trainer.stop("enough") if ranks().rank == 1 and row[keys.STEPS] == 2 else None  # noqa: E731
        trainer = problems.trainer(problems.rank_algorithm(problems.ppo()), callbacks=[callback])
        *_, row = trainer if kind == "loop" else [trainer.run(max_steps=9, progress="none")]
        assert (row[keys.STEPS], row.stop_reason) == (2, reason)


def one_rank_asks_to_be_confirmed(folder):
    """What is to be confirmed is met on rank 1 alone, and what confirms it there at once, on rank 0 later."""
    asked = lambda row: ranks().rank == 1 and row[keys.STEPS] >= 2  # noqa: E731
    confirms = lambda row: ranks().rank == 1 or row[keys.STEPS] >= 3  # noqa: E731
    trainer = problems.trainer(problems.rank_algorithm(problems.ppo()), eval_env="auto", num_eval_envs=2)
    conditions = [Confirmed(asked, by=confirms), WallTime("1h")]
    row = trainer.run(stop_conditions=conditions, max_steps=9, progress="none")
    assert row[keys.STEPS] == 3
    assert "eval/returns/mean" in row
    alike(row.stop_reason)


def one_ranks_signal_stops_all(folder):
    """SIGTERM for rank 1 alone ends both after the step, and is saved."""

    def callback(trainer, row):
        if ranks().rank == 1 and row[keys.STEPS] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    place = folder / "signal"
    trainer = problems.trainer(problems.rank_algorithm(problems.ppo()), checkpoints=place, callbacks=[callback])
    with pytest.raises(SystemExit) as ended:
        trainer.run(max_steps=9, progress="none")
    assert (ended.value.code, trainer.state[keys.STEPS]) == (143, 2)
    assert saved_steps(place) == [0, 2]
    assert read(listed(place)[-1]).metadata["status"] == "KILLED"


def bad_numbers(folder):
    """A weight of rank 1 that is not a number: skipped by both at first, then the end of both."""
    for mode in ("skip", "stop"):
        algorithm = problems.rank_algorithm(problems.ppo())
        trainer = problems.trainer(algorithm, on_non_finite=mode)
        trainer.step()
        before = problems.digest(algorithm)
        if ranks().rank == 1:
            for tensor in algorithm.env.carry["state"].values():
                tensor[3] = torch.nan
        if mode == "stop":
            with pytest.raises(NonFiniteError, match="of rank 1") as error:
                trainer.step()
            assert error.value.diagnosis["rank"] == 1
            alike(str(error.value))
        else:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                trainer.step()
            assert problems.digest(algorithm) == before
            texts = alike([str(each.message) for each in told])
            assert "in environments 3, slot 0 of the horizon of rank 1" in texts[0]


def rolled_back(folder):
    """Rank 1 has a bad horizon after a checkpoint: both go back to its weights, and keep what they remember."""

    def spoil(trainer, row):
        if ranks().rank == 1 and row[keys.STEPS] == 3:
            for tensor in trainer.algorithm.env.carry["state"].values():
                tensor.fill_(torch.nan)

    algorithm = problems.online("dqn")
    options = {"on_non_finite": "rollback", "checkpoints": Checkpoints(folder / "rolled", every_steps=2)}
    trainer = problems.trainer(algorithm, callbacks=[spoil], **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        row = trainer.run(max_steps=6, progress="none")
    assert row[keys.STEPS] == 6
    alike(problems.digest(algorithm))
    texts, _ = both([str(each.message) for each in told])
    assert any("the weights are as they were in 000002-step-2" in text for text in texts)


def evaluations(folder):
    """An evaluation of five episodes: three of rank 0, two of rank 1."""
    return evaluated(problems.rank_algorithm(problems.ppo()))


def evaluations_of_a_team(folder):
    """The same of a team."""
    return evaluated(problems.rank_algorithm(problems.ppo(), problems.Spread, team_return="sum"))


def evaluated(algorithm):
    """An evaluation of five episodes, and what each rank has of it."""
    trainer = problems.trainer(algorithm, eval_env="auto", num_eval_envs=5)
    trainer.step()
    own = []
    evaluate = trainer.evaluator.evaluate
    trainer.evaluator.evaluate = lambda *given, **options: own.append(evaluate(*given, **options)) or own[-1]
    row = trainer.eval(deterministic=False)
    counted, _ = own[0].counted()
    copies = [trainer.evaluator.env.num_envs, trainer.params["num_eval_envs"]]
    return {"row": dict(row), "own": dict(counted), "copies": copies}


class Unsavable(problems.CartPole):
    """Its snapshot on rank 1 has what no checkpoint can hold."""

    def state_dict(self):
        return super().state_dict() | ({"odd": {1}} if ranks().rank else {})


def unsavable(folder):
    """A run of which nothing can be saved goes on, as that of one process does, and says so."""
    trainer = problems.trainer(problems.ppo().build(Unsavable, time_limit=30), checkpoints=folder / "unsavable")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = trainer.run(max_steps=2, progress="none")
    assert row[keys.STEPS] == 2
    assert saved_steps(folder / "unsavable") == []


def evaluated_under_values_of_copies(folder):
    """Five values for five episodes, of which rank 0 has three and rank 1 two; a grid; and what training has."""
    five = [0.3, 0.4, 0.5, 0.6, 0.7]
    for config, lengths, shown in (
        ({"length": five}, [[0.3, 0.4, 0.5], [0.6, 0.7]], "[0.3, 0.4, 0.5, 0.6, 0.7]"),
        ({"length": torch.tensor(five, dtype=torch.float64)}, [[0.3, 0.4, 0.5], [0.6, 0.7]], str(five)),
        ({"length": Grid(five[:4])}, [[0.3, 0.4, 0.5], [0.6, 0.3]], "Grid([0.3, 0.4, 0.5, 0.6])"),
        ({"length": Grid(five[:2])}, [[0.3, 0.4, 0.3], [0.3, 0.4]], "Grid([0.3, 0.4])"),
        (None, [[0.1, 0.3, 0.5], [0.6, 0.8]], "[0.1, 0.3, 0.5, 0.6, 0.8]"),  # evenly spaced, of eight
    ):
        trainer = problems.trainer(problems.rank_algorithm(problems.ppo()), eval_env="auto", num_eval_envs=5)
        trained = {"length": [0.1 * (i + 1) for i in range(COPIES)]}
        trainer.run(env_config=trained, eval_env_config=config, steps_per_eval=1, max_steps=1, progress="none")
        found = trainer.evaluator.env.carry["parameters"]["length"]
        assert both([round(value, 4) for value in found.tolist()]) == lengths
        assert config is None or trainer.params["eval_env_config.length"] == shown
    with pytest.raises(
        ValueError, match=r"env_config\['length'\] has 2 values for 5 copies \(`num_eval_envs`\)"
    ) as error:
        trainer.eval(env_config={"length": [0.3, 0.4]})
    alike(str(error.value))


def unlike(folder):
    """Rank 1 has another learning rate, then other run options: ranks that are not alike are refused by name."""
    with pytest.raises(RankError, match=r"^rank 1 is not like rank 0: lr is 0\.001, and 0\.0001 on rank 0\.") as error:
        problems.trainer(problems.rank_algorithm(problems.ppo(lr=1e-3 if ranks().rank else 1e-4)))
    alike(str(error.value))
    trainer = problems.trainer(problems.rank_algorithm(problems.ppo()))
    with pytest.raises(RankError, match=r"^rank 1 is not like rank 0: max_steps is 4, and 3 on rank 0\.") as error:
        trainer.run(max_steps=3 + ranks().rank, progress="none")
    alike(str(error.value))


def going_on_from_different_places(folder):
    """Only rank 0 sees the checkpoint; then each sees another one: both are refused."""
    place = folder / "places"
    trainer = problems.trainer(problems.rank_algorithm(problems.ppo()), checkpoints=Checkpoints(place, every_steps=1))
    trainer.run(max_steps=3, progress="none")
    path = ranks().first("the newest", str(listed(place)[-1]) if ranks().is_first else "")
    options = {"tracker": MemoryTracker(), "checkpoints": False}

    def go_on():
        if ranks().is_first:
            Trainer.resume(path, **options)
        problems.trainer(problems.rank_algorithm(problems.ppo())).run(max_steps=6, progress="none")

    with pytest.raises(RankError) as error:
        go_on()
    at = ["the checkpoint to go on from", "the start of the run"]
    own, other = ranks().rank, 1 - ranks().rank
    text = f"rank {other} is at {at[other]}, rank {own} at {at[own]}: all ranks must do the same."
    assert str(error.value) == text
    with pytest.raises(RankError, match=r"^rank 1 is not like rank 0: the checkpoint is 0000") as error:
        Trainer.resume(listed(place)[-1 - ranks().rank], **options)
    alike(str(error.value))


def other_weights(folder):
    """Ranks whose first weights differ get those of rank 0."""
    algorithm = problems.rank_algorithm(problems.ppo())
    with torch.no_grad():
        algorithm.optimizer.weights.add_(ranks().rank)
    first, second = both(problems.digest(algorithm))
    assert first != second
    problems.trainer(algorithm)
    assert alike(problems.digest(algorithm)) == first


def _make(name, tracker, checkpoints, **options):
    algorithm = problems.online(name) if name in problems.ONLINE else problems.rank_algorithm(problems.ppo())
    return Trainer(algorithm, tracker=tracker, checkpoints=checkpoints, num_eval_envs=4, **options)


def _own(trainer):
    """What a rank has for itself: what it collected last, and what its environments drew."""
    return [
        trainer.algorithm.rollout[keys.OBS].double().sum().item(),
        trainer.algorithm.env.generator.get_state().sum().item(),
    ]


def resumed(folder):
    """Runs that are resumed at their third step have the bits of what went through."""
    for name in ("ppo", "dqn"):
        place = folder / f"resumed-{name}"
        trainer = _make(name, MemoryTracker(), Checkpoints(place, every_steps=3, keep=9))
        row = trainer.run(steps_per_eval=2, max_steps=6, progress="none")
        assert saved_steps(place)[1] == 3
        again = Trainer.resume(listed(place)[1], tracker=MemoryTracker(), checkpoints=False)
        rows = [
            {key: value for key, value in each.items() if not key.startswith(("profiling/", "memory/"))}
            for each in (row, again.run(progress="none"))
        ]
        assert rows[0] == rows[1]
        assert len(everything(trainer)) > 40
        assert everything(again) == everything(trainer)
        assert (again.state, _own(again)) == (trainer.state, _own(trainer))
        assert problems.digest(again.algorithm) == alike(problems.digest(trainer.algorithm))
        first, second = both(_own(trainer))
        assert first != second
        assert isinstance(trainer.tracker, NullTracker) == (not ranks().is_first)


def one_process_goes_on_with_two(folder):
    """A run of one process that two ranks go on with, which they say; see `test_decisions`."""
    for name in ("ppo", "dqn"):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer = Trainer.resume(folder / f"one-{name}", tracker=MemoryTracker(), checkpoints=False)
        texts, _ = both([str(each.message) for each in told])
        assert "was saved by 1 rank and goes on with 2" in texts[0]
        before = dict(trainer.state)
        trainer.run(max_steps=6, progress="none", stop_conditions=[HitsUpperBound(keys.STEPS, 99)])
        alike(problems.digest(trainer.algorithm))
        first, second = both(_own(trainer))
        assert first != second
        assert trainer.algorithm.env.config == {"length": 0.75}
        after = alike(dict(trainer.state))
        assert after[keys.ENV_STEPS] - before[keys.ENV_STEPS] == 2 * before[keys.ENV_STEPS]
