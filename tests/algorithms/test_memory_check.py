import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.algorithms.by_hand import of_steps
from tests.probes import Probe

from rl8x import BCConfig, DQNConfig, NullTracker, PPOConfig, SACConfig, Trainer, load_algorithm
from rl8x.algorithms import memory_check as memory
from rl8x.cli.main import main
from rl8x.distributed import Ranks
from rl8x.envs import CartPole, GymnasiumEnv
from rl8x.replay.dataset import Dataset


class Images(Probe):
    """Looks at pictures beside numbers, which it only knows when it is made."""

    single_action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    default_time_limit = 9

    def __init__(self, num_envs, *, size=20, **options):
        parts = {"picture": spaces.Box(0, 255, (size, size, 3), np.uint8), "speed": spaces.Box(-1, 1, (3,), np.float32)}
        self.single_observation_space = spaces.Dict(parts)
        super().__init__(num_envs, **options)

    def transition(self, state, actions, parameters, noise):
        return dict(state), actions[:, 0], torch.zeros(self.num_envs, dtype=torch.bool)

    def observe(self, state, parameters):
        picture = torch.zeros(self.num_envs, *self.single_observation_space["picture"].shape, dtype=torch.uint8)
        return {"picture": picture, "speed": state["x"].expand(-1, 3)}


SMALL = {"num_envs": 8, "horizon": 8, "device": "cpu", "num_sgd_iters": 1, "model_config": {"hidden_sizes": [8]}}


def config(**options):
    return PPOConfig.rl8(**(SMALL | options))


@pytest.fixture
def there_are(monkeypatch):
    """Say how many bytes are available."""
    return lambda size: monkeypatch.setattr(memory, "available_bytes", lambda device: size)


@pytest.mark.parametrize(
    ("env", "options"),
    [
        ("CartPole", {}),
        ("Pendulum", {"normalize_observations": True, "sgd_minibatch_size": 16}),
        ("AlgoTrading", {}),
        ("CartPole", {"model": "lstm", "model_config": {"hidden_size": 8}}),
        (Images, {}),
        (functools.partial(GymnasiumEnv, "CartPole-v1"), {}),
    ],
)
def test_what_is_counted_is_there_and_is_most_of_the_buffers(env, options, there_are):
    algorithm = config(**options).build(env)
    algorithm.collect()
    algorithm.step()
    pack = algorithm.pack
    buffers = [*algorithm.rollout.tensors.values(), *algorithm.rollout.states.values(), *pack.sources[:1]]
    held = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    spaces_ = {"observation": algorithm.env.single_observation_space, "action": algorithm.env.single_action_space}
    only_for_advantages = 8 * 8 * 4 * 3
    counted = algorithm.config.rollout_bytes(**spaces_) - only_for_advantages
    states = sum(state.numel() * state.element_size() for state in algorithm.rollout.states.values())
    assert 0.98 * held <= counted + states <= held
    # What is asked for in build() is that and little more.
    there_are(int(1.5 * held) + 100_000)
    config(**options).build(env)
    there_are(int(0.9 * held))
    with pytest.raises(ValueError, match=r"num_envs=8 and horizon=8 need at least .* on cpu, but .* Lower"):
        config(**options).build(env)


def test_what_may_not_fit_is_warned_of_once(there_are, recwarn):
    spaces_ = {"observation": CartPole.single_observation_space, "action": CartPole.single_action_space}
    there_are(int(1.2 * config().rollout_bytes(**spaces_)))
    config().build(CartPole)
    [warning] = recwarn
    assert "That may not be enough. If it is not, lower `num_envs`" in str(warning.message)


class Never(CartPole):
    def __init__(self, *args, **kwargs):
        raise AssertionError("made")


KNOWN = r"num_envs=40,000,000 and horizon=32 need at least 134.0 GB .* 10.0 GB are"  # as a class has its spaces


@pytest.mark.parametrize(
    ("maker", "num_envs", "message"),
    [
        (Never, 40_000_000, KNOWN),
        (functools.partial(Never, time_limit=3), 10**12, "Lower `num_envs` or `horizon`"),
        (lambda *args, **kwargs: Never(), 10**12, "Lower `num_envs` or `horizon`"),
    ],
)
def test_what_cannot_fit_is_not_made(maker, num_envs, message, there_are):
    there_are(10_000_000_000)
    with pytest.raises(ValueError, match=message):
        config(num_envs=num_envs, horizon=32).build(maker)
    with pytest.raises(AssertionError, match="made"):
        config(num_envs=1000).build(maker)


def test_large_observations_are_counted_before_they_are_made(there_are, monkeypatch):
    there_are(3 * 10**6)
    config(num_envs=16).build(Images)
    monkeypatch.setattr(Images, "observe", None)
    with pytest.raises(ValueError, match=r"at least 4\.\d MB .* 3\.0 MB are available"):
        config(num_envs=16).build(functools.partial(Images, size=100))


def test_states_of_the_model_are_counted(there_are):
    there_are(2_500_000)
    config(num_envs=1024).build(CartPole)
    with pytest.raises(ValueError, match="Lower `num_envs`, `horizon` or the size of the model, or raise `seq_len`"):
        config(num_envs=1024, model="lstm", model_config={"hidden_size": 128}).build(CartPole)


def test_an_evaluation_is_counted(there_are, monkeypatch):
    there_are(100_000_000)
    algorithm = config().build(CartPole)
    Trainer(algorithm, tracker=NullTracker(), num_eval_envs=10_000)
    monkeypatch.setattr(CartPole, "__init__", None)
    with pytest.raises(ValueError, match=r"num_eval_envs=10,000,000 needs at least .* Lower `num_eval_envs`"):
        Trainer(algorithm, tracker=NullTracker(), num_eval_envs=10_000_000)


def test_the_episodes_of_cells_are_counted_before_any_is_played(there_are, monkeypatch):
    there_are(100_000_000)
    trainer = Trainer(config().build(CartPole), tracker=NullTracker())
    assert len(trainer.evaluate_grid({"length": [0.5]}, episodes=3)) == 1
    for cells, episodes in ((1, 1_000_000), (1000, 10_000)):  # of one cell, at once; the results of all
        message = rf"episodes={episodes:,} in each of {cells:,} cells needs at least .* Lower `episodes`"
        with pytest.raises(ValueError, match=message):
            trainer.evaluate_grid({"length": np.linspace(0.4, 0.6, cells)}, episodes=episodes)


def test_freed_memory_is_given_back_before_anything_is_refused(monkeypatch):
    answers = [1, 10**9]  # bytes
    monkeypatch.setattr(memory, "available_bytes", lambda device: answers.pop(0))
    memory.check_memory(1000, torch.device("cpu"), "a thousand bytes need", "them")
    assert answers == []


def test_ranks_of_a_machine_have_a_share_of_it_each(monkeypatch):
    whole = memory.available_bytes(torch.device("cpu"))
    monkeypatch.setattr(memory, "ranks", lambda: Ranks(1, 8, 1, local_size=4))
    share = memory.available_bytes(torch.device("cpu"))
    assert share == pytest.approx(whole / 4, rel=0.2)  # others take some meanwhile


def test_the_limits_of_control_groups(tmp_path):
    def group(path, **files):
        (tmp_path / "fs" / path).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / "fs" / path / name.replace("__", ".")).write_text(str(text))

    proc = tmp_path / "cgroup"
    left = lambda: memory._left_in_groups(proc, tmp_path / "fs")  # noqa: E731
    assert left() == []
    proc.write_text("0::/jobs/mine\n")
    group("jobs/mine", memory__max="max", memory__current=5, memory__stat="anon 1\ninactive_file 2\n")
    group("jobs", memory__max=1000, memory__current=300, memory__stat="anon 1\ninactive_file 200\n")
    assert left() == [900]
    proc.write_text("3:cpu,memory:/job\n2:cpu:/x\n")
    stat = {"memory__usage_in_bytes": 70, "memory__stat": "total_inactive_file 20\n"}
    group("memory/job", memory__limit_in_bytes=100, **stat)
    group("memory", memory__limit_in_bytes=2**63 - 4096, **stat)  # none
    assert left() == [50]


@pytest.mark.parametrize(
    ("made", "size"),
    [
        (lambda: config(model_config={"hidden_sizes": [10**14]}).build("CartPole"), r"[\d,.]+ GB"),
        (lambda: config(model_config={"hidden_sizes": [10**20]}).build("CartPole"), "as a tensor needs"),
        (lambda: SACConfig(critic_hidden_sizes=[10**14]).build("Pendulum"), "GB.* `critic_hidden_sizes`"),
    ],
)
def test_networks_that_do_not_fit_are_refused_in_one_line(made, size):
    with pytest.raises(ValueError, match=rf"^\w+ does not fit .*{size}.*") as error:
        made()
    assert "Lower the sizes given, in `model_conf" in str(error.value)


def test_other_errors_of_a_build_stay_as_they_are():
    with pytest.raises(RuntimeError, match=r"^shapes$"), memory.allocations_refused("PPO", ["num_envs"]):
        raise RuntimeError("shapes")
    with pytest.raises(ValueError, match=r"as a tensor needs\. Lower the sizes given, in `num_envs`"):  # noqa: SIM117
        with memory.allocations_refused("PPO", ["num_envs"]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_data_set_that_does_not_fit_is_refused_before_its_rows_are_made(there_are, monkeypatch):
    env, observation = CartPole(1), spaces.Box(-1.0, 1.0, (100,))
    actions = torch.zeros(1000, dtype=torch.int64)
    dataset = of_steps(env, torch.zeros(1000, 100), actions, torch.zeros(1000), observation_space=observation)
    config = BCConfig(device="cpu", model_config={"hidden_sizes": [4]})
    need = 1000 * (2 * 400 + 8 + 2 * 4)
    monkeypatch.setattr(Dataset, "prepared", lambda *arguments, **named: pytest.fail("rows were made"))
    there_are(need - 1)
    message = r"a data set of 1,000 transitions needs at least 0\.8 MB of memory on cpu, but 0\.8 MB are available"
    with pytest.raises(ValueError, match=message):
        config.build(dataset=dataset)
    there_are(need + 1)
    with pytest.warns(RuntimeWarning, match="may not be enough"), pytest.raises(pytest.fail.Exception):
        config.build(dataset=dataset)


def test_what_only_acts_needs_no_room_for_experience(there_are, tmp_path, monkeypatch):
    """A policy that a large machine trained is exported, recorded and loaded on a small one."""
    monkeypatch.chdir(tmp_path)
    small = {"num_envs": 4, "batch_size": 4, "device": "cpu", "model_config": {"hidden_sizes": [8]}}
    for name, folder in (("memory", None), ("disk", str(tmp_path / "replay"))):
        algorithm = DQNConfig(**small, buffer_path=folder).build(CartPole)
        Trainer(algorithm, tracker=NullTracker(), checkpoints=tmp_path / name).save()
    (tmp_path / "replay").rmdir()
    (tmp_path / "replay").write_text("no folder")
    there_are(100_000)
    for name, what in (("memory", "of memory on cpu"), ("disk", "`buffer_path` must be a folder")):
        with pytest.raises(ValueError, match=what):
            Trainer.resume(tmp_path / name, tracker=NullTracker())
        assert load_algorithm(tmp_path / name).policy.action_space == spaces.Discrete(2)
        assert main(["export", name, "--output", f"{name}.safetensors"]) == 0
        assert main(["collect", name, "--transitions", "10", "--output", f"{name}-data"]) == 0
