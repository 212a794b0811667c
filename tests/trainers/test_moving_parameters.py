import re

import pytest
from tests.trainers.helpers import Killed, killed_at, rows, weights

from rl8x import MemoryTracker, NullTracker, PPOConfig, Trainer, keys
from rl8x.checkpoint import CheckpointError, Checkpoints, read
from rl8x.envs import CartPole, CartPoleInfinite
from rl8x.randomization import Adaptive, Learnable, Scheduled, Uniform


def curriculum(state):
    reach = min(0.3, state[keys.ENV_STEPS] / 1e4)
    return {"length": Uniform(0.5 - reach, 0.5 + reach), "gravity": 9.0 + state.get("eval/returns/mean", 0.0) / 1e3}


CONFIGS = {
    "scheduled": {"length": Scheduled([(0, 0.5), (100, 1.0)], by="eval/returns/mean"), "masspole": Uniform(0.1, 0.2)},
    "adaptive": {
        "length": Adaptive((0.4, 0.6), thresholds=(8, 12), step=0.05, episodes=2),
        "masspole": Adaptive(0.1, thresholds=(8, 12), step=0.01, episodes=2),
    },
    "learnable": {
        name: Learnable(Uniform(0.05, 1.0), threshold=14, levels=3, candidates=4, episodes=2)
        for name in ("length", "masspole")
    },
    "function": curriculum,
}


def make(tracker=None, algorithm=PPOConfig, env=CartPole, trainer=None, **options):
    small = {"num_envs": 4, "horizon": 24, "seed": 5, "device": "cpu", "model_config": {"hidden_sizes": [8]}}
    small |= {"num_sgd_iters": 1} if algorithm is PPOConfig else {}
    built = algorithm(**(small | options)).build(env, time_limit=20)
    return Trainer(
        built, tracker=tracker or NullTracker(), num_eval_envs=3, **{"checkpoints": False, **(trainer or {})}
    )


def run(trainer, config, **options):
    return trainer.run(env_config=config, progress="none", **{"steps_per_eval": 2, "max_steps": 7, **options})


@pytest.mark.parametrize("name", CONFIGS)
def test_a_killed_run_goes_on_to_the_same_bits(name, tmp_path):
    config, straight, tracker = CONFIGS[name], MemoryTracker(), MemoryTracker()
    whole = make(straight)
    run(whole, config)
    saves = Checkpoints(tmp_path, every_steps=2)  # the last is that of step 4, which was evaluated
    first = make(tracker, trainer={"checkpoints": saves, "callbacks": [killed_at(5)]})
    with pytest.raises(Killed):
        run(first, config)
    again = {} if name != "function" else {"env_config": config}
    second = Trainer.resume(tmp_path, tracker=tracker)
    second.run(progress="none", **again)
    assert rows(tracker) == rows(straight)
    assert weights(second).equal(weights(whole))
    assert second.algorithm.env.present_config() == whole.algorithm.env.present_config()
    # What the rows say
    shown = {n for _, n in rows(tracker) if n.startswith("env_config/")}
    assert shown <= whole.metric_names
    for parameter in {"length", "masspole"} & {n.split("/")[1] for n in shown}:
        moves = name != "scheduled" or parameter == "length"
        expected = set(keys.parameter_metrics([parameter])[: 5 if moves else 3])
        assert {n for n in shown if f"/{parameter}/" in n} == expected
    ends = [{value for _, value in tracker.history(f"env_config/length/{end}")} for end in ("low", "high")]
    assert any(len(values) > 1 for values in ends), "it never moved"
    # ... the params and the tags
    if name == "function":
        assert tracker.params["env_config"] == f"function {__name__}.curriculum"
        assert not [n for n in tracker.params if n.startswith("env_config.")]
    else:
        assert tracker.params["env_config.length"] == repr(config["length"])
        assert "eval_env_config.length" not in tracker.params
    assert re.fullmatch(r"(Uniform|[\d.]).*", tracker.tags["rl8x.env_config.length"])
    saved = read(sorted(tmp_path.glob("0*"))[-1]).state["trainer"]["algorithm"]["collector"]["env"]
    assert saved["present"] == whole.algorithm.env.present_config()


def states(trainer):
    groups = trainer.algorithm.env.parameter_state.curricula
    return {key: {part: tensor.tolist() for part, tensor in group.state.items()} for key, group in groups.items()}


@pytest.mark.parametrize("name", ["adaptive", "learnable"])
def test_what_has_moved_is_there_again_where_a_config_comes_back_after_a_resume(name, tmp_path):
    def begun(**options):
        trainer = make(horizons_per_env_reset=1, trainer=options)
        for config, steps in ((CONFIGS[name], 5), ({"length": 0.5}, 2)):
            run(trainer, config, max_steps=steps, steps_per_eval=None)
        return trainer

    whole = begun()
    left = states(whole)
    run(whole, CONFIGS[name], max_steps=3, steps_per_eval=None)
    begun(checkpoints=tmp_path)
    for resumes in range(2):  # a second one, of a process that never had the config
        again = Trainer.resume(tmp_path, tracker=NullTracker())
        if not resumes:
            again.save()
    again.run(env_config=CONFIGS[name], max_steps=3, progress="none")
    assert states(again) == states(whole) != left
    assert weights(again).equal(weights(whole))


@pytest.mark.parametrize("name", ["adaptive", "learnable"])
def test_evaluations_change_nothing_in_training(name):
    with_them, without = MemoryTracker(), MemoryTracker()
    run(make(with_them), CONFIGS[name], steps_per_eval=1)
    trainer = make(without)
    run(trainer, CONFIGS[name], steps_per_eval=None)
    assert {place: v for place, v in rows(with_them).items() if not place[1].startswith("eval/")} == rows(without)
    before = states(trainer)
    trainer.eval(env_config={"length": 0.3})
    trainer.eval(env_config=trainer.algorithm.env.config)
    assert states(trainer) == before
    with pytest.raises(ValueError, match=r"`env_config\['gravity'\]` moves with training, and an evaluation moves"):
        trainer.eval(env_config={"gravity": Scheduled([(0, 9.0)])})


def test_a_function_that_is_not_given_again_is_one_line(tmp_path):
    first = make(MemoryTracker(), trainer={"checkpoints": tmp_path})
    run(first, curriculum, max_steps=1, steps_per_eval=None)
    assert "env_config=..." in "".join(first.ending)
    trainer = Trainer.resume(tmp_path, tracker=first.tracker)
    message = r"the run's `env_config` is the function .*curriculum, which cannot be saved: pass it again"
    with pytest.raises(CheckpointError, match=message):
        trainer.run(max_steps=2, progress="none")
    assert trainer.run(env_config=curriculum, max_steps=2, progress="none")[keys.STEPS] == 2


def test_values_that_follow_a_function_are_what_the_params_say():
    tracker = MemoryTracker()
    trainer = make(tracker, horizons_per_env_reset=1)
    trainer.step(env_config={"length": 0.7})
    trainer.step(env_config=curriculum)
    trainer.step()  # goes on under what the function gave last
    assert tracker.params["env_config"] == trainer.params["env_config"] == f"function {__name__}.curriculum"
    assert tracker.params["env_config.length"] is None
    trainer.step(env_config={"length": 0.7, "gravity": 5.0})
    assert trainer.algorithm.env.carry["parameters"]["gravity"].unique().tolist() == [5.0]
    assert (tracker.params["env_config.length"], tracker.params["env_config.gravity"]) == (0.7, 5.0)
    assert tracker.params["env_config"] is None


def test_tasks_that_never_end_need_resets():
    options = {"num_envs": 4, "horizon": 8, "model_config": {"hidden_sizes": [8]}, "num_sgd_iters": 1, "seed": 0}
    config = {"length": Adaptive((0.4, 0.6), thresholds=(-900, -800), step=0.1, episodes=2)}
    trainer = Trainer(PPOConfig(**options).build(CartPoleInfinite), tracker=NullTracker(), checkpoints=False)
    run(trainer, config, max_steps=4)
    low, high = trainer.algorithm.env.parameter_support()["length"]
    assert low < 0.4 or high > 0.6


def test_a_schedule_follows_what_is_measured_by_hand_or_by_a_callback():
    config = {"length": Scheduled([(0, 0.5), (100, 1.0)], by="eval/returns/mean")}
    trainer = make()
    trainer.eval()
    run(trainer, config, steps_per_eval=None, max_steps=1)
    assert trainer.algorithm.env.present_config()["length"] > 0.5
    run(make(trainer={"callbacks": [lambda trainer, _: None]}), config, steps_per_eval=None, max_steps=1)


def test_the_state_at_the_end_is_a_tag_also_after_an_evaluation_in_the_training_environment():
    tracker = MemoryTracker()
    trainer = make(tracker, env=CartPoleInfinite, horizons_per_env_reset=1, trainer={"eval_env": False})
    config = {"length": Scheduled([(0, 0.5), (192, 1.0)]), "gravity": Uniform(9.0, 10.0)}
    run(trainer, config, steps_per_eval=1, max_steps=3, eval_env_config={"length": 2.0})
    of_configs = {name: value for name, value in tracker.tags.items() if name.startswith("rl8x.env_config")}
    assert of_configs == {"rl8x.env_config.length": "1.0"}


@pytest.mark.parametrize("name", ["scheduled", "adaptive", "learnable"])
def test_a_new_rank_goes_on_under_the_configuration_that_is_never_applied_again(name):
    config = CONFIGS[name]
    first, second = (make().algorithm for _ in range(2))
    first.follow({"eval/returns/mean": 50.0})
    for _ in range(4):
        first.collect(env_config=config)
        first.step()
    second.join(first.state_dict())
    assert second.env.config == first.env.config
    assert second.env.present_config() == first.env.present_config()
    second.follow({"eval/returns/mean": 50.0})
    second.collect(env_config=config)  # which would be refused if it were another
    low, high = first.env.parameter_support()["length"]
    assert second.env.carry["parameters"]["length"].min() >= low - 0.11
    assert second.env.carry["parameters"]["length"].max() <= high + 0.11
