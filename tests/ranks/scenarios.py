"""What two ranks do, and what must come of it; see `launch`. What returns numbers one process does too, to compare."""

import contextlib
import dataclasses
import os
import signal
import warnings
from unittest import mock

import pytest
import torch
from tests.probes import everything
from tests.ranks import problems
from tests.ranks.problems import COPIES, SEED

from rl8x import Confirmed, DistillationConfig, HitsUpperBound, MemoryTracker, NullTracker, Policy, WallTime, keys
from rl8x.checkpoint import Checkpoints, listed, read
from rl8x.distributed import RankError, ranks
from rl8x.execution import execution
from rl8x.execution.compiler import Compiler
from rl8x.execution.programs import ProgramError
from rl8x.randomization import Grid
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


def total():
    return COPIES if ranks().size > 1 else 2 * COPIES


@contextlib.contextmanager
def warned():
    texts = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in told]


def small_trainer(*, ppo=(), **options):
    return problems.trainer(problems.rank_algorithm(problems.ppo(**dict(ppo))), **options)


def saved_steps(folder):
    both("written")
    return [int(path.name.rpartition("-")[2]) for path in listed(folder)]


def ppo(folder=None, names=tuple(problems.PPO)):
    """Ten full-batch updates of each: five steps of two epochs."""
    found = {}
    for name in names:
        env, env_options, options = problems.PPO[name]
        algorithm = problems.rank_algorithm(problems.ppo(num_envs=total(), **options), env, **env_options)
        trainer = problems.trainer(algorithm)
        rows = [dict(trainer.step()) for _ in range(5)]
        found[name] = {"weights": problems.weights(algorithm), "rows": rows, "state": dict(trainer.state)}
    return found


AUTO = {"sgd_minibatch_size": 32, "execution": "auto", "num_threads": 1}


def ppo_compiled(folder):
    """The same with minibatches, as traced programs between sums over ranks, beside eager execution."""
    found = {}
    for mode in ("eager", "compile"):
        options = {"lr": 1e-5, "target_kl_div": 0.5, "lr_schedule": {"kind": "adaptive"}, "recompute_advantages": True}
        trainer = small_trainer(ppo={"sgd_minibatch_size": 32, **options})
        problems.run_traced(trainer.algorithm, mode)
        rows = [trainer.step() for _ in range(3)]
        found[mode] = {name: [row[name] for row in rows] for name in ("monitors/kl_div", "coefficients/lr")}
        found[mode]["weights"] = problems.weights(trainer.algorithm)
    return found


def hundred_updates(folder):
    """104 updates, eagerly; by `auto`, which compiles for real and changes to that; by `compile`, which finds it."""
    execution._CHANGE_SECONDS, execution._WORTH_SECONDS = 0.05, 0.0
    problems.compile_updates_alone()
    found = {}
    for mode in ("eager", "auto", "compile"):
        trainer = small_trainer(ppo=AUTO | {"target_kl_div": 0.5, "execution": mode})
        trainer.run(max_steps=13, progress="none")
        algorithm = trainer.algorithm
        found[mode] = {"digest": problems.digest(algorithm), "weights": problems.weights(algorithm)}
        found[mode] |= {"ran": [algorithm.execution.mode, algorithm.execution.starts_at, trainer.state[keys.UPDATES]]}
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
        trainer = small_trainer(ppo=AUTO)
        execution.CompiledProgram = SlightlyOff
        problems.compile_updates_alone()
        with warned() as texts:
            trainer.run(max_steps=12, progress="none")
    alike(problems.digest(trainer.algorithm))
    assert (trainer.algorithm.execution.mode, trainer.algorithm.execution.fell_back) == ("eager", True)
    (text,) = [text for text in texts if "eagerly" in text]
    if ranks().is_first:
        assert text == "rank 1 cannot run programs, as it says itself: all ranks run eagerly."
    else:
        assert "no compiler found" in text


def programs_come_late(folder):
    """Of `auto`, on rank 1: with a seed both wait at the step that is planned, without one both change three later."""
    late = {"_CHANGE_SECONDS": 0.001, "_WORTH_SECONDS": 0.0, "CompiledProgram": problems.Traced}
    for seed, step in ((SEED, 1), (None, 4)):
        looks = iter([3, 2, 1] if ranks().rank else [])
        missing = lambda _, seconds=0.0, looks=looks: next(looks, 0)  # noqa: E731
        limits = mock.patch.multiple(execution, **late)
        with limits, mock.patch.object(Compiler, "num_missing", missing):
            trainer = small_trainer(ppo=AUTO | {"seed": seed}, checkpoints=folder / f"late-{seed}")
            trainer.run(max_steps=6, progress="none")
        assert (trainer.algorithm.execution.mode, trainer.algorithm.execution.starts_at) == ("compile", step)
        assert list(looks) == []
        alike(problems.digest(trainer.algorithm))
        assert saved_steps(folder / f"late-{seed}") == [0, step, 6]


def moving(folder=None):
    """Parameters that move with returns: by the episodes of both ranks, of which one has the shorter ones."""
    found = {}
    for name, drawn in problems.MOVING.items():
        trainer = small_trainer(ppo={"num_envs": total()})
        trainer.run(env_config={"length": drawn}, max_steps=5, progress="none")
        (state,) = trainer.algorithm.env.parameter_state.state_dict()["moving"].values()
        state = {key: tensor.double().reshape(-1).tolist() for key, tensor in state.items() if key != "begun"}
        found[name] = {"state": state, "weights": problems.weights(trainer.algorithm)}
    return found


def distilled(folder=None):
    """Full batches of labels, each of a rank's copies."""
    given = {"horizon": 16, "seed": SEED, "device": "cpu", "execution": "eager", "num_envs": total(), "loss": "kl"}
    given |= {"sample_actions": False}  # teacher and student draw from one generator
    config = DistillationConfig(**given, sgd_minibatch_size=None, model_config={"hidden_sizes": [8]})
    torch.manual_seed(1)
    spaces = problems.CartPole.single_observation_space, problems.CartPole.single_action_space
    teacher = Policy(*spaces, model_config={"hidden_sizes": [8]})
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
    """A condition that is met on rank 1 alone; `trainer.stop` there alone, in a run and in a loop."""
    trainer = small_trainer()
    condition = lambda row: ranks().rank == 1 and row[keys.STEPS] >= 3  # noqa: E731
    row = trainer.run(stop_conditions=[condition], max_steps=9, progress="none")
    assert row[keys.STEPS] == 3
    assert alike(row.stop_reason).endswith("(rank 1)")
    assert small_trainer().run(max_steps=1, progress="none").stop_reason == "max_steps=1"  # of both
    assert type(trainer.tracker) is (MemoryTracker if ranks().is_first else NullTracker)
    for kind, reason in (("run", "enough (rank 1)"), ("loop", "enough")):
        callback = lambda trainer, row: trainer.stop("enough") if ranks().rank == 1 and row[keys.STEPS] == 2 else None  # noqa: E731
        trainer = small_trainer(callbacks=[callback])
        *_, row = trainer if kind == "loop" else [trainer.run(max_steps=9, progress="none")]
        assert (row[keys.STEPS], row.stop_reason) == (2, reason)


def one_rank_has_a_callback(folder):
    """A callback that rank 0 alone has."""
    callbacks = [lambda trainer, row: None] if ranks().is_first else []
    differs = r"callbacks is \(\), and \('<lambda>',\) on rank 0"
    with pytest.raises(RankError, match=f"^rank 1 is not like rank 0: {differs}") as error:
        small_trainer(callbacks=callbacks).run(max_steps=3, progress="none")
    alike(str(error.value))


def one_rank_saves(folder):
    """A callback that asks for a checkpoint on rank 1 alone."""
    place = folder / "asked"
    saves = lambda trainer, row: trainer.save() if ranks().rank == 1 and row[keys.STEPS] == 2 else None  # noqa: E731
    small_trainer(checkpoints=Checkpoints(place), callbacks=[saves]).run(max_steps=4, progress="none")
    assert saved_steps(place) == [0, 2, 4]


def one_rank_asks_to_be_confirmed(folder):
    """What is to be confirmed is met on rank 1 alone, and what confirms it there at once, on rank 0 later."""
    asked = lambda row: ranks().rank == 1 and row[keys.STEPS] >= 2  # noqa: E731
    confirms = lambda row: ranks().rank == 1 or row[keys.STEPS] >= 3  # noqa: E731
    trainer = small_trainer(eval_env="auto", num_eval_envs=2)
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
    trainer = small_trainer(checkpoints=place, callbacks=[callback])
    with pytest.raises(SystemExit) as ended:
        trainer.run(max_steps=9, progress="none")
    assert (ended.value.code, trainer.state[keys.STEPS]) == (143, 2)
    assert saved_steps(place) == [0, 2]
    assert read(listed(place)[-1]).metadata["status"] == "KILLED"


def bad_numbers(folder):
    """A weight of rank 1 that is not a number: skipped by both at first, then the end of both."""
    for mode in ("skip", "stop"):
        trainer = small_trainer(on_non_finite=mode)
        trainer.step()
        before = problems.digest(trainer.algorithm)
        if ranks().rank == 1:
            for tensor in trainer.algorithm.env.carry["state"].values():
                tensor[3] = torch.nan
        if mode == "stop":
            with pytest.raises(NonFiniteError, match="of rank 1") as error:
                trainer.step()
            assert error.value.diagnosis["rank"] == 1
            alike(str(error.value))
        else:
            with warned() as texts:
                trainer.step()
            assert problems.digest(trainer.algorithm) == before
            assert "in environments 3, slot 0 of the horizon of rank 1" in alike(texts)[0]


def rolled_back(folder):
    """Rank 1 has a bad horizon after a checkpoint: both go back to its weights, and keep what they remember."""

    def spoil(trainer, row):
        if ranks().rank == 1 and row[keys.STEPS] == 3:
            for tensor in trainer.algorithm.env.carry["state"].values():
                tensor.fill_(torch.nan)

    algorithm = problems.online("dqn")
    options = {"on_non_finite": "rollback", "checkpoints": Checkpoints(folder / "rolled", every_steps=2)}
    trainer = problems.trainer(algorithm, callbacks=[spoil], **options)
    with warned() as texts:
        row = trainer.run(max_steps=6, progress="none")
    assert row[keys.STEPS] == 6
    alike(problems.digest(algorithm))
    assert any("the weights are as they were in 000002-step-2" in text for text in both(texts)[0])


def evaluations(folder):
    """An evaluation of five episodes, three of rank 0 and two of rank 1, and what each has of it; also of a team."""
    found = {}
    for name, env, options in (("alone", problems.CartPole, {}), ("team", problems.Spread, {"team_return": "sum"})):
        algorithm = problems.rank_algorithm(problems.ppo(), env, **options)
        trainer = problems.trainer(algorithm, eval_env="auto", num_eval_envs=5)
        trainer.step()
        own, evaluate = [], trainer.evaluations.play
        trainer.evaluations.play = lambda *given, evaluate=evaluate, own=own, **more: (
            own.append(evaluate(*given, **more)) or own[-1]
        )
        row = trainer.eval(deterministic=False)
        copies = [trainer.evaluations.env.num_envs, trainer.params["num_eval_envs"]]
        found[name] = {"row": dict(row), "own": dict(own[0].counted()[0]), "copies": copies}
    return found


class Unsavable(problems.CartPole):
    """Its snapshot on rank 1 has what no checkpoint can hold."""

    def state_dict(self):
        return super().state_dict() | ({"odd": {1}} if ranks().rank else {})


def unsavable(folder):
    """A run of which nothing can be saved goes on, as that of one process does, and says so."""
    trainer = problems.trainer(problems.ppo().build(Unsavable, time_limit=30), checkpoints=folder / "unsavable")
    with warned():
        assert trainer.run(max_steps=2, progress="none")[keys.STEPS] == 2
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
        trainer = small_trainer(eval_env="auto", num_eval_envs=5)
        trained = {"length": [0.1 * (i + 1) for i in range(COPIES)]}
        trainer.run(env_config=trained, eval_env_config=config, steps_per_eval=1, max_steps=1, progress="none")
        found = trainer.evaluations.env.carry["parameters"]["length"]
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
        small_trainer(ppo={"lr": 1e-3 if ranks().rank else 1e-4})
    alike(str(error.value))
    trainer = small_trainer()
    with pytest.raises(RankError, match=r"^rank 1 is not like rank 0: max_steps is 4, and 3 on rank 0\.") as error:
        trainer.run(max_steps=3 + ranks().rank, progress="none")
    alike(str(error.value))


def going_on_from_different_places(folder):
    """Only rank 0 sees the checkpoint; then each sees another one: both are refused."""
    place = folder / "places"
    trainer = small_trainer(checkpoints=Checkpoints(place, every_steps=1))
    trainer.run(max_steps=3, progress="none")
    path = ranks().first("the newest", str(listed(place)[-1]) if ranks().is_first else "")
    options = {"tracker": MemoryTracker(), "checkpoints": False}

    with pytest.raises(RankError) as error:  # noqa: PT012
        if ranks().is_first:
            Trainer.resume(path, **options)
        small_trainer().run(max_steps=6, progress="none")
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
        algorithm = problems.online(name) if name in problems.ONLINE else problems.rank_algorithm(problems.ppo())
        options = {"eval_env": "auto", "num_eval_envs": 4, "checkpoints": Checkpoints(place, every_steps=3, keep=9)}
        trainer = problems.trainer(algorithm, **options)
        row = trainer.run(steps_per_eval=2, max_steps=6, progress="none")
        assert saved_steps(place)[1] == 3
        again = Trainer.resume(listed(place)[1], tracker=MemoryTracker(), checkpoints=False)
        other = again.run(progress="none")
        timeless = {key for key in row if not key.startswith(("profiling/", "memory/"))}
        assert {key: row[key] for key in timeless} == {key: other[key] for key in timeless}
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
        with warned() as texts:
            trainer = Trainer.resume(folder / f"one-{name}", tracker=MemoryTracker(), checkpoints=False)
        assert "was saved by 1 rank and goes on with 2" in both(texts)[0][0]
        before = dict(trainer.state)
        trainer.run(max_steps=6, progress="none", stop_conditions=[HitsUpperBound(keys.STEPS, 99)])
        alike(problems.digest(trainer.algorithm))
        first, second = both(_own(trainer))
        assert first != second
        assert trainer.algorithm.env.config == {"length": 0.75}
        after = alike(dict(trainer.state))
        assert after[keys.ENV_STEPS] - before[keys.ENV_STEPS] == 2 * before[keys.ENV_STEPS]
