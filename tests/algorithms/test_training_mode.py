"""Models with layers that differ in training: dropout, and batch normalisation."""

import copy
import functools

import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from tests.algorithms.test_conformance import build, train, weights
from torch import nn

from rl8x import Model, NullTracker, Policy, PPOConfig, Trainer, keys
from rl8x.distributed import Ranks
from rl8x.envs import CartPole, GymnasiumEnv
from rl8x.export import export_policy

# What PPO says of such models.
pytestmark = pytest.mark.filterwarnings("ignore:.* gives other outputs in training mode")


class Dropping(Model):
    """Notes the modes that it was called in, by whether gradients are wanted."""

    def __init__(self, observation_space, num_features):
        super().__init__(observation_space, num_features)
        self.hidden, self.policy, self.value = nn.Linear(4, 8), nn.Linear(8, num_features), nn.Linear(8, 1)
        self.layer = nn.Dropout(0.3)
        self.modes = set()

    def forward(self, obs, state, starts):
        self.modes.add((torch.is_grad_enabled(), self.training))
        hidden = self.hidden(obs)
        hidden = self.layer(hidden.flatten(0, 1)).view_as(hidden)
        return self.policy(hidden), self.value(hidden).squeeze(-1), state


class Norming(Dropping):
    def __init__(self, observation_space, num_features):
        super().__init__(observation_space, num_features)
        self.layer = nn.BatchNorm1d(8)


class AlwaysDropping(Dropping):
    def forward(self, obs, state, starts):
        return super().forward(nn.functional.dropout(obs, 0.1), state, starts)


class AlwaysCounting(Norming):
    def forward(self, obs, state, starts):
        self.layer.num_batches_tracked += 1
        return super().forward(obs, state, starts)


class Counting(Dropping):
    calls = 0

    def forward(self, obs, state, starts):
        self.calls += 1
        return super().forward(obs * self.calls, state, starts)


def make(case, model=Dropping, **options):
    return build(case, model=model, model_config={}, **options)


MODES = ["ppo", "dqn", "bc from data", "iql from data", "distillation"]


def learn(algorithm, steps=3):
    train(algorithm, steps)
    return algorithm


@pytest.mark.parametrize("case", MODES)
def test_it_acts_in_evaluation_mode_and_the_seed_decides_what_training_drops(case):
    algorithm, acted = make(case), case != "bc from data"  # IQL's targets are the policy's values
    algorithm.policy.model.modes.clear()
    learn(algorithm)
    assert algorithm.policy.model.modes == {(True, True)} | ({(False, False)} if acted else set())
    assert not algorithm.policy.model.training
    # Torch's own generator decides nothing, and is left alone; a resume goes on with the run's numbers.
    torch.manual_seed(2)
    before = torch.get_rng_state()
    resumed = make(case)
    resumed.load_state_dict(copy.deepcopy(learn(make(case), 2).state_dict()))
    assert torch.equal(weights(learn(resumed, 1)), weights(algorithm))
    assert torch.equal(torch.get_rng_state(), before)
    resumed.seed += 1
    assert not torch.equal(weights(learn(resumed, 1)), weights(learn(algorithm, 1)))


@pytest.mark.parametrize("case", MODES)
def test_a_training_mode_that_others_leave_on_reaches_nothing_that_acts(case):
    usual, left = make(case), make(case)
    for _ in range(2):
        learn(usual, 1)
        left.policy.train()
        learn(left, 1)
    assert torch.equal(weights(usual), weights(left))
    assert left.policy.model.modes == usual.policy.model.modes
    trainer = Trainer(make("ppo", Norming), tracker=NullTracker(), num_eval_envs=2)
    norming = trainer.algorithm.policy.model
    norming.train()
    trainer.eval()
    assert not norming.layer.running_mean.any()


def test_threads_do_not_change_what_is_dropped(monkeypatch):
    monkeypatch.setattr("rl8x.execution.execution._SHARED_WORK_EAGER", 0)
    torch.set_num_threads(4)  # `apart` in tests/conftest.py sets it back
    one, other = (weights(learn(make("ppo", sgd_minibatch_size=64), 2)) for _ in range(2))
    assert torch.equal(one, other)
    with make("ppo").updater._workers() as workers:
        assert workers.count == 1
    assert torch.get_num_threads() == 4


def test_evaluations_change_neither_buffers_nor_what_training_draws():
    trainers = [Trainer(make("ppo", Norming), tracker=NullTracker(), num_eval_envs=4) for _ in range(2)]
    for _ in range(3):
        for trainer in trainers:
            trainer.step()
        trainers[0].eval()
        one, other = (trainer.algorithm.policy.model.layer.running_mean for trainer in trainers)
        assert torch.equal(one, other)
        assert one.any()
    assert torch.equal(*(weights(trainer.algorithm) for trainer in trainers))


def test_a_file_and_a_student_act_in_evaluation_mode(tmp_path):
    algorithm = learn(make("distillation"))
    policy = algorithm.policy
    file = Policy.load(policy.save(tmp_path / "policy"), trust=True)
    made = Policy(policy.observation_space, policy.action_space, model=Dropping)
    for each in (file, algorithm.student_policy(), algorithm.teacher, made):
        assert not any(module.training for module in each.modules())


class Doubting(Policy):
    """A policy of one's own with a layer that has modes."""

    def __init__(self, *spaces, **options):
        super().__init__(*spaces, **options)
        self.doubt = nn.Dropout(0.5)

    @property
    def form(self):
        return Doubting, super().form[1]

    def model_inputs(self, obs):
        obs, mask = super().model_inputs(obs)
        return self.doubt(obs), mask


def test_what_leaves_a_training_loop_of_ones_own_acts_in_evaluation_mode(tmp_path):
    env = CartPole(1)
    policy = Doubting(env.single_observation_space, env.single_action_space).train()
    found = export_policy(policy, tmp_path / "policy.pt2")
    assert found.difference < 1e-5
    assert policy.training
    assert not Policy.load(policy.save(tmp_path / "policy.safetensors"), trust=True).doubt.training


DRAWS, CHANGES = "draws random numbers", "changes its buffers"


@pytest.mark.parametrize("case", ["ppo", "dqn"])
@pytest.mark.parametrize(("model", "does"), [(AlwaysDropping, DRAWS), (AlwaysCounting, CHANGES)])
def test_a_model_that_cannot_act_without_either_is_refused(model, does, case):
    with pytest.raises(ValueError, match=rf"{model.__name__}.forward {does} in evaluation mode too.*`self.training`"):
        make(case, model)


def test_a_model_that_remembers_outside_of_its_state_is_refused():
    with pytest.raises(ValueError, match=r"^Counting.forward gives two results for the same arguments: .*`recurrent"):
        make("ppo", Counting)


@pytest.mark.parametrize(("model", "does"), [(Dropping, DRAWS), (Norming, CHANGES)])
def test_it_is_not_compiled(model, does):
    says = rf"{model.__name__} {does} \(.*compiled programs do not support: use execution='eager'"
    with pytest.raises(ValueError, match=says):
        make("ppo", model, execution="compile")
    auto = make("ppo", model, execution="auto")
    auto.execution.plan(1.0, 1e9)
    assert [auto.execution.target, auto.params["execution"]] == ["eager", "eager"]


def test_batch_normalisation_is_refused_where_ranks_would_each_have_their_own(monkeypatch):
    norming, dropping = make("ppo", Norming), make("ppo")
    monkeypatch.setattr("rl8x.algorithms.base.ranks", lambda: Ranks(0, 2))
    with pytest.raises(ValueError, match=r"Norming changes its buffers.* between the 2 ranks.* nn.LayerNorm, or one"):
        norming.check_model()
    dropping.check_model()


@pytest.mark.filterwarnings("default")
def test_ppo_says_that_its_ratios_see_the_difference(recwarn):
    make("bc from data")
    assert not recwarn
    with pytest.warns(RuntimeWarning, match="Dropping gives other outputs in training mode.*ratios"):
        make("ppo")


# -- what others set for the whole process


class Learns(CartPoleEnv):
    """Leaves gradients on, as an environment with a network of its own might."""

    def step(self, action):
        torch.set_grad_enabled(True)
        return super().step(action)

    def reset(self, **options):
        torch.set_grad_enabled(True)
        return super().reset(**options)


def test_a_simulator_that_leaves_gradients_on_is_stepped_as_others_are():
    trained = []
    for env in (CartPoleEnv, Learns):
        options = {"num_envs": 2, "horizon": 4, "num_sgd_iters": 1, "seed": 0, "device": "cpu"}
        config = PPOConfig.rl8(**options, model_config={"hidden_sizes": [8]})
        algorithm = config.build(functools.partial(GymnasiumEnv, env, vectorization="sync"))
        trained.append(weights(learn(algorithm, 2)))
        assert not algorithm.rollout[keys.ACTIONS].requires_grad
    assert torch.equal(*trained)


@pytest.mark.parametrize("case", ["ppo", "sac", "bc from data"])
def test_threads_and_precision_are_set_in_each_step_however_others_set_them(case):
    algorithm = build(case, num_threads=1)
    calls = [*([] if algorithm.env is None else [algorithm.collect]), algorithm.step]
    for call in calls:
        torch.set_num_threads(2)  # `apart` in tests/conftest.py sets it back
        torch.set_float32_matmul_precision("medium")
        call()
        assert [torch.get_num_threads(), torch.get_float32_matmul_precision()] == [1, "highest"]


# -- whether gradients are on around it


@pytest.mark.parametrize("case", ["ppo", "dqn", "sac", "distillation", "bc from data"])
def test_without_gradients_around_it_a_training_is_the_same(case):
    trained = []
    for around in (torch.enable_grad, torch.no_grad):
        with around():
            trainer = Trainer(build(case), tracker=NullTracker())
            trainer.run(max_steps=2, progress="none")
            trained.append(weights(learn(trainer.algorithm, 1)))
    assert torch.equal(*trained)
    assert not torch.equal(trained[0], weights(build(case)))


@pytest.mark.parametrize(
    ("case", "around"),
    [
        ("ppo", torch.inference_mode),
        ("sac", torch.inference_mode),
        ("bc from data", torch.inference_mode),
        ("ppo", functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)),
        ("bc from data", functools.partial(torch.autocast, "cpu", dtype=torch.float16)),
    ],
)
def test_inference_mode_and_autocast_are_refused_wherever_something_is_made_or_learned(case, around, tmp_path):
    trainer = Trainer(build(case), tracker=NullTracker(), checkpoints=tmp_path)
    algorithm = trainer.algorithm
    calls = [functools.partial(build, case), functools.partial(Trainer, algorithm, tracker=NullTracker())]
    calls += [functools.partial(trainer.run, max_steps=1), trainer.step, functools.partial(next, iter(trainer))]
    calls += [trainer.eval, algorithm.step, *([] if algorithm.env is None else [algorithm.collect])]
    for call in calls:
        refused = r"an algorithm, which torch\.(inference_mode\(\) does not allow|autocast\(\) would change)"
        with around(), pytest.raises(RuntimeError, match=refused):
            call()
    assert not list(tmp_path.iterdir())
    trainer.run(max_steps=1, progress="none")  # nothing was spoilt
