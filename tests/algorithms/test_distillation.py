"""Distillation: what the teacher labels, who plays, what the student learns, and how all of it is saved."""

from __future__ import annotations

import copy
import dataclasses
import functools
import shutil

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.probes import Probe, traced_only

from rl8x import MemoryTracker, NullTracker, Policy, Trainer, distill
from rl8x.algorithms import Distillation, DistillationConfig, DQNConfig, PPOConfig, SACConfig
from rl8x.algorithms.on_policy.update import sums_of
from rl8x.algorithms.teacher import describe_teacher, find_teacher, make_teacher, read_weights, view_of
from rl8x.checkpoint import CheckpointError
from rl8x.distributions import make_distribution
from rl8x.envs import AlgoTrading, CartPole, ObservedParameters, Parameter, Pendulum
from rl8x.models import BUILTIN
from rl8x.randomization import Choice, Uniform
from rl8x.trees import unflatten_tree

MLP = {"hidden_sizes": [8]}
GRU = {"model": "gru", "model_config": {"hidden_size": 8}}
SIDES = {"side": Choice([-1.0, 1.0])}
DRAWN = {"length": Uniform(0.2, 1.0)}


class HiddenSide(Probe):
    """Shows its parameter in the first of four steps alone; each action that agrees with its sign is worth 1."""

    parameters = {"side": Parameter(default=0.0, low=-1.0, high=1.0, unit="", description="which action is right")}  # noqa: RUF012
    default_time_limit = 4

    def initial_state(self, parameters, noise):
        return {"x": parameters["side"].unsqueeze(1)}

    def transition(self, state, actions, parameters, noise):
        rewards = ((actions == 1) == (parameters["side"] > 0)).float()
        return {"x": torch.zeros_like(state["x"])}, rewards, torch.zeros_like(rewards, dtype=torch.bool)


def knowing_teacher() -> Policy:
    """A linear policy whose logits are -3 and 3 times the side, whatever it observes."""
    env = ObservedParameters(HiddenSide(1), "all")
    policy = Policy(env.single_observation_space, env.single_action_space, model_config={"hidden_sizes": []})
    with torch.no_grad():
        policy.model.policy_head.weight.copy_(torch.tensor([[0.0, -3.0], [0.0, 3.0]]))
        policy.model.policy_head.bias.zero_()
    return policy


def config(**options) -> DistillationConfig:
    defaults = {"num_envs": 16, "horizon": 8, "device": "cpu", "seed": 0, "model_config": MLP}
    return DistillationConfig(**defaults | options)


def of_sides(**options):
    return config(teacher=knowing_teacher(), **options).build(HiddenSide, observe_parameters="all")


def random_policy(env, kind=Policy, **options) -> Policy:
    """A policy that differs between observations enough for labels to differ."""
    given = {"model_config": {}} | options
    if given["model_config"] is not None:
        given["model_config"] = given["model_config"] | {"policy_gain": 3.0}
    return kind(env.single_observation_space, env.single_action_space, **given)


def train(algorithm, steps, **collect):
    for _ in range(steps):
        algorithm.collect(**collect)
        row = algorithm.step()
    return dict(row)


# -- labels


def test_labels_are_what_the_teacher_computes_by_hand():
    algorithm = of_sides()
    assert (algorithm.loss, algorithm.guided.samples) == ("kl", True)
    algorithm.collect(env_config=SIDES)
    rollout, horizon = algorithm.rollout, algorithm.config.horizon
    side = rollout["obs/parameters"][:horizon, :, 0]
    assert set(side.unique().tolist()) == {-1.0, 1.0}
    # log softmax of (-3 s, 3 s): the right action has 1 / (1 + e^-6).
    right = -np.log1p(np.exp(-6.0))
    expected = torch.where(side.unsqueeze(-1) * torch.tensor([-1.0, 1.0]) > 0, right, right - 6.0)
    torch.testing.assert_close(rollout["labels/0"][:horizon], expected)
    assert not rollout["teacher_plays"].any()


def compare_labels(algorithm, teacher, every=0, env_config=None):
    """Collect three times: the teacher alone, whose state begins anew every so many steps, does what labels say."""
    num_envs = algorithm.env.num_envs
    state, since, shares = teacher.initial_state(num_envs), 0, []
    for _ in range(3):
        algorithm.collect(env_config=None if shares else env_config)
        tensors = algorithm.rollout.tensors
        obs = unflatten_tree("obs", tensors)
        for t in range(8):
            since = 0 if tensors["starts"][t].all() else since
            if every and since % every == 0:
                state = teacher.initial_state(num_envs)
            act = teacher.act({name: part[t] for name, part in obs.items()}, state, tensors["starts"][t])
            state, since = act.state, since + 1
            torch.testing.assert_close(tensors["labels"][t], teacher.env_actions(act.actions))
        shares.append(tensors["labels"][:8].float().mean())
        algorithm.step()
    return shares


@pytest.mark.parametrize("execution", ["eager", "compile"])
def test_a_recurrent_normalising_teacher_labels_as_it_would_alone(execution, monkeypatch):
    """Its state goes on over collects, is reset where episodes begin, and its moments are its own."""
    traced_only(monkeypatch)
    env = ObservedParameters(CartPole(5, time_limit=6), "all")
    torch.manual_seed(0)
    teacher = random_policy(env, **GRU, normalize_observations=True)
    teacher.observe({name: torch.randn(50, 5, width) * 0.2 + 0.1 for name, width in (("obs", 4), ("parameters", 6))})
    options = {"num_envs": 5, "seq_len": 2, "normalize_observations": True, "loss": "nll", "execution": execution}
    algorithm = config(teacher=teacher, **options, **GRU).build(CartPole, time_limit=6, observe_parameters="all")
    shares = compare_labels(algorithm, teacher, env_config=DRAWN)
    assert 0.0 < torch.stack(shares).mean() < 1.0
    assert algorithm.rollout["starts"].sum() > 5


@pytest.mark.parametrize(
    ("student", "limit"), [({"model_config": MLP}, 7), ({**GRU, "seq_len": 2}, None)], ids=["mlp, a limit", "gru"]
)
@pytest.mark.parametrize("given", ["algorithm", "checkpoint", "file", "copy", "described again"])
def test_where_no_episode_ended_a_teacher_forgets_as_often_as_in_its_own_training(given, student, limit, tmp_path):
    """Every 6 steps, and where an episode begins, whatever the student's horizon of 8 and its own interval are."""
    every = {"num_envs": 2, "horizon": 12, "seq_len": 3, "seqs_per_state_reset": 2, "device": "cpu", "seed": 0}
    env = {"observe_parameters": "all", "time_limit": None}
    learner = PPOConfig(**every, **GRU).build(Pendulum, **env)
    teacher = learner.policy
    assert teacher.state_reset_every == learner.state_reset_every == 6
    if given == "checkpoint":
        Trainer(learner, tracker=NullTracker(), checkpoints=tmp_path).run(max_steps=1, progress="none")
    named = {"algorithm": learner, "checkpoint": tmp_path, "file": teacher.save(tmp_path / "teacher")}
    named |= {"copy": copy.deepcopy(teacher), "described again": described(teacher)}
    options = {"num_envs": 3, "loss": "nll", "beta": 0.5, "horizons_per_env_reset": -1} | student
    algorithm = config(teacher=named[given], **options).build(Pendulum, **env | {"time_limit": limit})
    if given == "described again":
        algorithm.load_teacher(teacher.state_dict())
    compare_labels(algorithm, teacher, every=6)
    assert algorithm.state_reset_every == (8 if "model" in student else 0)
    alone = algorithm.student_policy()
    assert alone.state_reset_every == algorithm.state_reset_every
    assert torch.equal(alone.distribution.log_std, algorithm.policy.distribution.log_std)


def test_masked_and_composite_actions_are_labelled_and_learned():
    env = ObservedParameters(AlgoTrading(4), "all")
    teacher = random_policy(env, model_config=MLP)
    algorithm = config(teacher=teacher, num_envs=4, lr=1e-2).build(AlgoTrading, observe_parameters="all", time_limit=5)
    row = train(algorithm, 3)
    legal = algorithm.rollout["obs/action_mask"][:8].bool()
    assert (algorithm.rollout["labels/0"][:8].exp()[~legal] == 0).all()
    assert np.isfinite(row["losses/distillation"])


# -- who plays


def test_the_teacher_plays_its_share():
    algorithm = of_sides(beta_schedule=[[0, 1.0], [16 * 8, 0.25]])
    rows = [train(algorithm, 1, env_config=SIDES)]
    shares, by_teacher = [], []
    for _ in range(8):
        rows.append(train(algorithm, 1))
        plays, sides = algorithm.rollout["teacher_plays"][:8], algorithm.rollout["obs/parameters"][:8, :, 0]
        by_teacher.append(((algorithm.rollout["actions"][:8] == 1) == (sides > 0))[plays])
        shares.append(plays.float().mean().item())
    assert [row["coefficients/beta"] for row in rows] == [1.0] + [0.25] * 8
    assert [row["monitors/teacher_share"] for row in rows] == [1.0, *shares]
    # 1024 draws with probability 1/4: three standard deviations are 0.04.
    assert np.mean(shares) == pytest.approx(0.25, abs=0.041)
    assert torch.cat(by_teacher).all()


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_teacher_plays_in_no_evaluation(deterministic):
    algorithm = of_sides(beta=1.0, horizons_per_env_reset=1)
    algorithm.collect(env_config={"side": 1.0})
    with torch.no_grad():
        algorithm.policy.model.policy_head.bias.copy_(torch.tensor([50.0, 0.0]))  # always 0
    assert algorithm.evaluate(env_config={"side": 1.0}, deterministic=deterministic)["rewards/mean"] == 0.0
    assert algorithm.guided.beta == 1.0


# -- the loss


@pytest.mark.parametrize("loss", ["kl", "nll", "mse"])
def test_losses_equal_a_plain_formulation(loss):
    generator = torch.Generator().manual_seed(0)
    features, of_teacher = torch.randn(2, 3, 4, 4, generator=generator)
    space = spaces.Box(-9.0, 9.0, (2,), np.float32)
    distribution = make_distribution("normal", space, {"std": "state", "log_std_bounds": [-9, 9]})
    params, taught = distribution.from_features(features), distribution.from_features(of_teacher)
    valid = torch.rand(3, 4, generator=generator) < 0.7
    labels = {"0": taught.mean, "1": taught.log_std} if loss == "kl" else taught.mean
    expected = {
        "kl": distribution.kl(taught, params),
        "nll": -distribution.logp(params, taught.mean),
        "mse": (params.mean - taught.mean).pow(2).mean(-1),
    }[loss]
    batch = {"obs": params.mean, "starts": valid, "valid": valid, "labels": labels}
    options = {"distribution": distribution, "loss": loss}
    found = Distillation.losses(lambda *_: params, batch, {}, torch.zeros(()), config(), **options)
    rows = expected, distribution.entropy(params), (params.mean - taught.mean).abs().mean(-1)
    torch.testing.assert_close(sums_of(found, batch), torch.stack([each[valid].sum() for each in rows]))


# -- learning


def test_memory_makes_up_for_what_only_the_teacher_sees():
    disagreement = {}
    for name, options in {"mlp": {}, "gru": {**GRU, "seq_len": 4}}.items():
        algorithm = of_sides(lr=3e-2, num_sgd_iters=8, **options)
        assert algorithm.policy.hidden == ("parameters",)
        train(algorithm, 25, env_config=SIDES)
        algorithm.collect()
        disagreement[name] = dict(algorithm.step())["monitors/disagreement"]
    # Without memory three of four steps are a guess.
    assert disagreement["mlp"] > 0.2
    assert disagreement["gru"] < 0.02


OF_TEACHERS = {"num_envs": 2, "device": "cpu", "seed": 0, "model_config": MLP}


@pytest.mark.parametrize(
    ("taught", "env", "loss", "resolved"),
    [
        (DQNConfig(**OF_TEACHERS, dueling=True), CartPole, None, "nll"),
        (DQNConfig(**OF_TEACHERS, num_quantiles=3), CartPole, None, "nll"),
        (PPOConfig(**OF_TEACHERS), CartPole, "nll", "nll"),
        (SACConfig(**OF_TEACHERS), Pendulum, "mse", "mse"),
    ],
)
def test_teachers_of_every_kind(taught, env, loss, resolved):
    teacher = taught.build(env, observe_parameters="all")
    algorithm = distill(teacher, config(loss=loss, num_envs=4))
    assert (algorithm.loss, algorithm.guided.samples) == (resolved, resolved != "mse")
    assert algorithm.env.observe_parameters == "all"
    compare_labels(algorithm, teacher.policy)


REFUSED = [
    (ValueError, r"needs a `teacher`", lambda: config().build(HiddenSide)),
    (TypeError, r"`teacher` must be a run.*a trainer; got 3", lambda: config(teacher=3).build(HiddenSide)),
    (
        ValueError,
        r"the teacher needs observations of Dict.*observe_parameters='all'",
        lambda: config(teacher=knowing_teacher()).build(HiddenSide),
    ),
    (
        ValueError,
        r"the teacher acts in Discrete\(2\)",
        lambda: config(teacher=knowing_teacher()).build(Pendulum, observe_parameters="all"),
    ),
    (ValueError, r"'prameters'.*Did you mean 'parameters'", lambda: of_sides(teacher_obs=["prameters"])),
    (ValueError, "nothing to observe", lambda: of_sides(teacher_obs=["obs", "parameters"])),
    (ValueError, "continuous actions", lambda: of_sides(loss="mse")),
    (
        ValueError,
        r"one kind of distribution.*EpsilonGreedy",
        lambda: of_sides(loss="kl", distribution="epsilon_greedy"),
    ),
    (ValueError, "at most 1", lambda: config(beta_schedule=[[0, 2.0]])),
    (ValueError, "give `env`", lambda: distill(knowing_teacher(), config())),
]


@pytest.mark.parametrize(("error", "message", "make"), REFUSED)
def test_what_does_not_fit_is_refused(error, message, make):
    with pytest.raises(error, match=message):
        make()


def test_a_teacher_may_see_some_parts_or_what_is_inside():
    part = spaces.Box(-1, 1, (1,), np.float32)
    whole = spaces.Dict({"a": part, "b": part, "obs": part})
    obs = {name: torch.full((2, 1), i) for i, name in enumerate(whole.spaces)}
    assert view_of(whole, whole)(obs) is obs
    assert view_of(whole, spaces.Dict({"a": part}))(obs).keys() == {"a"}
    assert view_of(whole, part)(obs) is obs["obs"]


# -- saved and found again


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A teacher's run; of a student's the whole run, and one that was cut after its second step."""
    folder = tmp_path_factory.mktemp("runs")
    teacher = PPOConfig(num_envs=4, horizon=8, device="cpu", seed=1, **GRU, normalize_observations=True)
    env = {"observe_parameters": "all", "time_limit": 7}
    trainer = Trainer(teacher.build(CartPole, **env), tracker=NullTracker(), checkpoints=folder / "teacher")
    trainer.run(max_steps=2, env_config=DRAWN, progress="none")
    students = {}
    for name, steps in (("whole", 4), ("cut", 2)):
        options = {"teacher": str(folder / "teacher"), "beta": 0.3, "seq_len": 4, "num_envs": 4, "seed": 3, **GRU}
        algorithm = config(**options, normalize_observations=True).build(CartPole, **env)
        students[name] = Trainer(algorithm, tracker=MemoryTracker(), checkpoints=folder / name)
        students[name].run(max_steps=steps, env_config=DRAWN, steps_per_eval=2, progress="none")
    return folder, trainer, students


def described(given):
    return describe_teacher(*find_teacher(given, "cpu"))


def distill_again(trainer, teacher):
    given = dataclasses.replace(trainer.algorithm.config, teacher=teacher)
    return given.build(CartPole, observe_parameters="all", time_limit=7)


def test_a_student_is_resumed_to_the_bit_without_its_teachers_run(runs, tmp_path):
    folder, _, students = runs
    shutil.copytree(folder / "cut", tmp_path / "cut")
    away = folder / "moved"
    (folder / "teacher").rename(away)
    try:
        trainer = Trainer.resume(tmp_path / "cut", tracker=MemoryTracker())
        trainer.run(max_steps=4, steps_per_eval=2, progress="none")
    finally:
        away.rename(folder / "teacher")
    whole, resumed = students["whole"].algorithm, trainer.algorithm
    other = random_policy(whole.env, model_config=MLP)
    with pytest.raises(CheckpointError, match="`teacher` was"):
        Trainer.resume(tmp_path / "cut", tracker=MemoryTracker(), algorithm=distill_again(students["cut"], other))
    changed = Trainer.resume(tmp_path / "cut", tracker=MemoryTracker(), overrides={"teacher": other})
    digests = [each.config.teacher["sha256"] for each in (changed.algorithm, whole)]
    assert digests[0] == described(other)["sha256"] != digests[1]
    assert whole.rollout["teacher_plays"].any()
    for ours, theirs in (
        (whole.rollout.tensors, resumed.rollout),
        (whole.policy.state_dict(), resumed.policy.state_dict()),
    ):
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    params = students["whole"].tracker.params
    assert params["teacher"] == str(folder / "teacher")
    assert f"teacher `{folder / 'teacher'}`, " in students["whole"].tracker.description
    assert params["teacher.sha256"] == whole.config.teacher["sha256"]
    assert params["env.observe_parameters"] == "all"
    assert not any(name.startswith("teacher.observation") for name in params)


def test_a_teacher_is_the_same_however_it_is_given(runs):
    folder, trainer, _ = runs
    given = (folder / "teacher", str(folder / "teacher"), trainer, trainer.algorithm, trainer.algorithm.policy)
    found = [described(each) for each in given]
    assert len({each["sha256"] for each in found}) == 1
    assert [each["source"] for each in found[:3]] == [str(folder / "teacher")] * 2 + [None]
    state = torch.get_rng_state()
    algorithm = distill(folder / "teacher", config(**GRU, num_envs=4))
    assert torch.equal(torch.get_rng_state(), state)
    assert algorithm.env.time_limit == 7
    # A policy that left its run, as `rl8x export` writes it.
    file = trainer.algorithm.policy.save(folder / "exported.safetensors")
    exported = described(file)
    assert (exported["sha256"], exported["source"]) == (found[0]["sha256"], str(file))
    read = read_weights(exported, torch.device("cpu"))["model.policy_head.weight"]
    assert torch.equal(read, trainer.algorithm.policy.model.policy_head.weight)
    with pytest.raises(CheckpointError, match=r"is a policy alone, without the rest of its run: Policy\.load reads it"):
        Trainer.resume(file)


class Doubled(Policy):
    def model_inputs(self, obs):
        obs, mask = super().model_inputs(obs)
        return {name: 2 * part for name, part in obs.items()}, mask


def test_a_teacher_whose_making_nobody_knows_is_copied_as_it_is():
    given = knowing_teacher()
    made = functools.partial(random_policy, ObservedParameters(HiddenSide(1), "all"))
    own = made(Doubled, model_config={"hidden_sizes": []})
    policy = made(model=given.model, model_config=None)
    obs = {name: torch.ones(1, *part.shape) for name, part in given.observation_space.spaces.items()}
    for each in (policy, own):
        description = described(each)
        assert isinstance(description["policy"], Policy)  # which cannot be saved to a file
        teacher = make_teacher(description)
        assert teacher.model is not each.model
        params = [one.respond(obs, {}, torch.ones(1, dtype=torch.bool))[0] for one in (teacher, each)]
        assert torch.equal(*(part[0] for part in params))
    policy.model.kept = (number for number in range(3))
    with pytest.raises(TypeError, match=r"this Policy cannot be copied .*generator.*: give `teacher` a run, or a pol"):
        described(policy)


def test_a_description_alone_asks_for_its_weights(runs):
    folder, trainer, students = runs
    by_run, by_hand = described(folder / "teacher"), described(trainer)
    again = distill_again(students["cut"], by_run)
    assert not again.has_teacher
    again.collect()
    one, other = (each.model.policy_head.weight for each in (again.teacher, trainer.algorithm.policy))
    assert torch.equal(one, other)
    with pytest.raises(ValueError, match="has no weights"):
        distill_again(students["cut"], by_hand).collect()
    with pytest.raises(ValueError, match="has changed"):
        distill_again(students["cut"], {**by_run, "sha256": "0"}).collect()


def test_the_student_alone_acts_where_the_parameters_are_not_shown(runs):
    algorithm = runs[-1]["whole"].algorithm
    policy, student = algorithm.student_policy(), algorithm.policy
    assert policy.observation_space == CartPole.single_observation_space
    env, shown = CartPole(3, seed=5), ObservedParameters(CartPole(3, seed=5), "all")
    (obs, _), (both, _) = env.reset(), shown.reset()
    state, theirs, starts = policy.initial_state(3), student.initial_state(3), torch.ones(3, dtype=torch.bool)
    for _ in range(4):
        mine, other = policy.act(obs, state, starts), student.act(both, theirs, starts)
        assert torch.equal(policy.respond(obs, state, starts)[0][0], student.respond(both, theirs, starts)[0][0])
        state, theirs, starts = mine.state, other.state, torch.zeros(3, dtype=torch.bool)
        obs, both = env.step(mine.actions)[0], shown.step(other.actions)[0]


@pytest.mark.parametrize("sizes", [[5], [256, 256]], ids=["small", "those of the class's default"])
def test_a_student_that_came_as_an_instance_leaves_as_it_is(sizes):
    space = spaces.Dict(obs=HiddenSide.single_observation_space)
    algorithm = of_sides(model=BUILTIN["mlp"](space, 2, hidden_sizes=sizes), model_config={})
    train(algorithm, 1, env_config=SIDES)
    policy, student = algorithm.student_policy(), algorithm.policy
    assert policy.observation_space == space
    obs, starts = {"obs": torch.linspace(-1, 1, 4)[:, None]}, torch.ones(4, dtype=torch.bool)
    seen = obs | {"parameters": torch.zeros(4, 1)}
    assert torch.equal(policy.respond(obs, {}, starts)[0][0], student.respond(seen, {}, starts)[0][0])
    ours, theirs = policy.model.policy_head.weight, student.model.policy_head.weight
    assert ours.data_ptr() != theirs.data_ptr()
    policy.decide({"obs": np.zeros(1, np.float32)})
