"""Other simulators, each tested against the real package where it is installed."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rl8x import PPOConfig
from rl8x.envs import Function, GymnasiumEnv, ModelField, PettingZooEnv, Scale
from rl8x.envs.brax_env import BraxEnv, SystemField
from rl8x.envs.vmas_env import VmasEnv
from rl8x.randomization import Choice, Grid, Uniform
from rl8x.trees import first_tensor


def needs(package):
    return pytest.importorskip(package, reason=f"{package} is not installed: pip install 'rl8x[{package}]'")


def train(env, **options):
    """Train two steps on an environment, and return the last statistics."""
    small = {"horizon": 8, "seed": 0, "device": "cpu", "model_config": {"hidden_sizes": [8]}}
    algorithm = PPOConfig(num_envs=env.num_copies, **(small | options)).build(env)
    for _ in range(2):
        stats = dict(algorithm.collect()) | dict(algorithm.step())
    assert all(np.isfinite(value) for value in stats.values())
    return stats


def changed_hopper(tmp_path, density, friction):
    """Make Gymnasium's Hopper of an XML file whose torso and friction are others: MuJoCo compiles it by itself."""
    import mujoco

    path = f"{gymnasium.__path__[0]}/envs/mujoco/assets/hopper.xml"
    spec = mujoco.MjSpec.from_file(path)
    for geom in spec.geoms:
        geom.friction[0] *= friction
        geom.density *= density if geom.parent.name == "torso" else 1.0
    file = tmp_path / "hopper.xml"
    spec.compile()
    file.write_text(spec.to_xml())
    return gymnasium.make("Hopper-v5", xml_file=str(file))


def mjlab_env(seed, num_envs=2, **options):
    needs("mjlab")
    from rl8x.envs.mjlab_env import MjlabEnv

    return MjlabEnv("Mjlab-Cartpole-Balance", num_envs, seed=seed, **options)


def pettingzoo_env(seed):
    needs("pettingzoo")
    from tests.envs.team_stubs import Shift

    return PettingZooEnv(Shift, 2, seed=seed)


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: GymnasiumEnv("CartPole-v1", 2, seed=seed),
        pettingzoo_env,
        lambda seed: needs("vmas") and VmasEnv("balance", 2, seed=seed),
        lambda seed: BraxEnv(walk(), 2, seed=seed),
        mjlab_env,
    ],
    ids=["gymnasium", "pettingzoo", "vmas", "brax", "mjlab"],
)
def test_a_restored_simulator_begins_anew_from_a_seed_of_the_snapshot(make):
    env = make(5)
    first = first_tensor(env.reset()[0])
    actions = torch.as_tensor(env.action_space.sample())
    env.step(actions)
    state, begun = env.state_dict(), []
    for seed in (0, 1):
        other = make(seed)
        other.reset()
        with pytest.warns(RuntimeWarning, match=f"^{type(env).__name__}: a simulator's state cannot be saved") as told:
            other.load_state_dict(state)
        assert len(told) == 1
        with pytest.raises(RuntimeError, match=r"call reset\(\) before step"):
            other.step(actions)
        begun.append(first_tensor(other.reset()[0]))
    with pytest.warns(RuntimeWarning, match="a simulator's state cannot be saved"):
        other.load_state_dict(state | {"generator": torch.Generator().manual_seed(7).get_state()})
    assert not torch.equal(first_tensor(other.reset()[0]), begun[0])
    assert not env.resumable
    assert torch.equal(*begun)
    assert not torch.equal(begun[0], first)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_masses_and_friction_of_mujoco_move_as_a_model_that_is_compiled_with_them(tmp_path, vectorization):
    needs("mujoco")
    torso = [ModelField(field, "torso") for field in ("body_mass", "body_inertia")]
    parameters = {
        "density": Scale(torso, high=10.0),
        "friction": {"scale": {"model_field": "geom_friction", "index": 0}},
        "foot": ModelField("geom_friction", "foot_geom", 0, low=0.1),
        "gravity": "model.opt.gravity[2]",
    }
    env = GymnasiumEnv("Hopper-v5", 3, seed=4, vectorization=vectorization, parameters=parameters, time_limit=30)
    assert (env.parameters["foot"].default, env.parameters["gravity"].default) == (2.0, -9.81)
    assert (env.parameters["gravity"].low, env.parameters["gravity"].high) == (-np.inf, 0.0)
    density, friction = [1.0, 2.0, 0.5], [1.0, 0.25, 1.5]
    obs, _ = env.reset(config={"density": density, "friction": friction})
    singles = [changed_hopper(tmp_path, *each) for each in zip(density, friction, strict=True)]
    expected = [single.reset(seed=4 + i)[0] for i, single in enumerate(singles)]
    np.testing.assert_allclose(obs, np.stack(expected), rtol=1e-6)
    rng, moved = np.random.default_rng(0), []
    for _ in range(25):
        actions = rng.uniform(-1, 1, 3).astype(np.float32)
        obs, rewards, terminated, _, info = env.step(torch.as_tensor(actions).repeat(3, 1))
        for i, single in enumerate(singles):
            expected, reward, ended, _, _ = single.step(actions)
            np.testing.assert_allclose(info["final_obs"][i], expected, rtol=1e-4, atol=1e-5)
            assert float(rewards[i]) == pytest.approx(reward, rel=1e-4, abs=1e-5)
            assert bool(terminated[i]) == ended
            if ended:
                single.reset()
        moved.append(info["final_obs"])
    assert (torch.stack(moved)[-1].diff(dim=0).abs().amax(1) > 1e-2).all()  # the three are of different physics
    # The defaults come back, bit for bit.
    plain, actions = GymnasiumEnv("Hopper-v5", 3, seed=9), torch.linspace(-1.0, 1.0, 9).view(3, 3)
    assert torch.equal(env.reset(seed=9, config={})[0], plain.reset()[0])
    for _ in range(5):
        assert torch.equal(env.step(actions)[0], plain.step(actions)[0])
    env.close()


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (ModelField("body_mass", "tors"), r"no body 'tors'\. Did you mean 'torso'\? There are world, torso"),
        (ModelField("body_mas", "torso"), "no field 'body_mas'. Did you mean 'body_mass'"),
        (ModelField("geom_friction", "floor", 3), "`index` of 'geom_friction' must lie in a row of 3; got 3"),
        (ModelField("body_mass"), "sets 5 numbers that differ, from 0 to "),
    ],
)
def test_names_of_mujoco_models_that_do_not_exist_are_told(field, message):
    needs("mujoco")
    with pytest.raises(ValueError, match=message):
        GymnasiumEnv("Hopper-v5", 1, parameters={"x": field})


def test_degrees_of_freedom_have_the_names_of_joints():
    needs("mujoco")
    damped = ModelField("dof_damping", ["thigh_joint", "leg_joint"])
    env = GymnasiumEnv("Hopper-v5", 1, parameters={"damping": damped, "condim": ModelField("geom_condim", "floor")})
    with pytest.raises(ValueError, match=r"'geom_condim' is a whole number; got 1\.5"):
        env.reset(config={"condim": 1.5})
    env.reset(config={"damping": 3.0})
    assert env.vector_env.envs[0].unwrapped.model.dof_damping.tolist() == [0.0, 0.0, 0.0, 3.0, 3.0, 1.0]


def test_envpool_through_gymnasiums_api():
    envpool = needs("envpool")
    env = GymnasiumEnv(envpool.make("CartPole-v1", env_type="gymnasium", num_envs=4, seed=3))
    assert env.autoreset_mode is AutoresetMode.NEXT_STEP
    env.reset()
    returns, rows = torch.zeros(4), 0
    for _ in range(60):
        carry, step = env.advance(env.carry, torch.zeros(4, dtype=torch.int64), torch.empty(4, 0))
        env.carry = carry
        returns = returns + torch.where(step.valid, step.rewards, 0.0)
        ended = step.terminated & step.valid
        # The row after an end is a reset: no experience, and the episode's return is what was counted by hand.
        assert torch.equal(step.episode_returns[ended], returns[ended])
        returns = torch.where(ended, 0.0, returns)
        rows += int((~step.valid).sum())
    assert rows > 10
    assert train(env, horizon=32)["episodes/ended"] > 0
    env.close()


def test_vmas_agents_share_a_policy():
    needs("vmas")
    env = VmasEnv("balance", 2, seed=0, time_limit=5, metrics={"pos_rew": "sum"}, team_return="sum", n_agents=3)
    assert (env.num_agents, env.num_copies, env.num_envs) == (3, 2, 6)
    from vmas import make_env

    reference = make_env("balance", num_envs=2, device="cpu", terminated_truncated=True, seed=0, n_agents=3)
    expected = torch.cat(reference.reset(seed=0))
    obs, _ = env.reset(seed=0)
    torch.testing.assert_close(obs, expected)
    actions = torch.linspace(-1, 1, 12).view(6, 2)
    for t in range(5):
        obs, rewards, _, truncated, info = env.step(actions)
        parts = reference.step(list(actions.clone().view(3, 2, 2)))
        torch.testing.assert_close(info["final_obs"], torch.cat(parts[0]))
        torch.testing.assert_close(rewards, torch.cat(parts[1]))
        assert truncated.all() == (t == 4)
    assert not torch.allclose(obs, info["final_obs"])  # reset
    stats = train(env)
    assert stats["episodes/info/pos_rew/mean"] != 0.0
    own = [stats[f"episodes/agents/agent_{i}/returns/mean"] for i in range(3)]
    assert stats["episodes/returns/mean"] == pytest.approx(sum(own))


def test_vmas_cuts_episodes_by_its_own_limit_too_and_agents_see_what_they_are_asked_to():
    needs("vmas")
    env = VmasEnv("balance", 2, seed=0, n_agents=2, max_steps=3, agent_id=True, state="shared", metrics=["speed"])
    env.worlds.scenario.info = lambda agent: {"speed": torch.tensor([1.0, 2.0])} if agent.name == "agent_1" else {}
    env.reset()
    for step in range(6):
        obs, _, _, cut, info = env.step(torch.zeros(4, 2))
        assert info["speed"].nan_to_num(-1.0).tolist() == [-1.0, -1.0, 1.0, 2.0]
        assert cut.tolist() == [step in (2, 5)] * 4
        assert obs["agent_id"].tolist() == [0, 0, 1, 1]
        assert torch.equal(obs["state"]["agent_1"], obs["obs"][2:].repeat(2, 1))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("gymnasium", lambda num_envs: GymnasiumEnv("Pendulum-v1", num_envs, time_limit=2)),
        ("mpe2", lambda num_envs: PettingZooEnv("mpe2.simple_v3:parallel_env", num_envs, continuous_actions=True)),
        ("vmas", lambda num_envs: VmasEnv("balance", num_envs, time_limit=2)),
        ("brax", lambda num_envs: BraxEnv("fast", num_envs, time_limit=2)),
        ("mjlab", lambda num_envs: mjlab_env(None, num_envs, time_limit=2)),
    ],
)
def test_what_a_simulator_draws_is_its_own(name, make):
    """Others beside it, such as that of evaluations, change nothing, and it changes nothing for the process."""
    needs(name)

    def seen(others):
        env = make(4)
        rows = [first_tensor(env.reset(seed=3)[0])]
        actions = torch.zeros(env.num_envs, *env.single_action_space.shape)
        for step in range(6):
            rows.append(first_tensor(env.step(actions)[0]))
            for other in others:
                other.reset(seed=step)
        return torch.stack(rows)

    other, before = make(2), torch.get_rng_state()
    assert torch.equal(seen([other]), seen([]))
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_of_vmas_are_those_of_worlds():
    needs("vmas")
    from vmas import make_env

    def set_gravity(environment, values):
        environment.world._gravity = torch.stack((torch.zeros_like(values), -values), -1)

    parameters = {"mass": Scale("agents[0].mass"), "gravity": Function(set_gravity, default=0.05, high=1.0)}
    options = {"n_agents": 3, "parameters": parameters, "time_limit": 4}
    env = VmasEnv("balance", 3, seed=0, **options)
    env.reset(seed=0, config={"gravity": [0.05, 0.3, 0.9], "mass": 2.0})
    assert torch.equal(env.carry["parameters"]["gravity"], torch.tensor([0.05, 0.3, 0.9]).repeat(3))
    references = []
    for gravity in (0.05, 0.3, 0.9):
        reference = make_env("balance", num_envs=3, device="cpu", terminated_truncated=True, seed=0, n_agents=3)
        reference.world._gravity = torch.tensor([0.0, -gravity])
        reference.agents[0].mass *= 2.0
        reference.reset(seed=0)
        references.append(reference)
    actions = torch.linspace(-1, 1, 18).view(9, 2)
    for _ in range(4):
        info = env.step(actions)[4]
        for world, reference in enumerate(references):
            obs = reference.step([part.clone() for part in actions.view(3, 3, 2)])[0]
            torch.testing.assert_close(info["final_obs"].view(3, 3, -1)[:, world], torch.stack(obs)[:, world])
    with pytest.raises(ValueError, match="is a Grid of 4 values, but there are 3 copies"):
        env.reset(config={"gravity": Grid([0.1, 0.2, 0.3, 0.4])})
    with pytest.raises(ValueError, match=r"must be a number for all copies: Scale\(Attribute\('agents\[0\].mass'\)\)"):
        env.reset(config={"mass": Uniform(1.0, 2.0)})
    env.reset(config={"gravity": Choice([0.1, 0.2, 0.3])})
    for _ in range(9):
        env.step(actions)
        drawn = env.carry["parameters"]["gravity"].view(3, 3)
        assert torch.equal(drawn, drawn[:1].expand(3, 3))
        assert torch.equal(env.worlds.world._gravity[:, 1], -drawn[0])


@pytest.mark.parametrize(
    ("package", "extra", "make"),
    [
        ("vmas", "vmas", lambda: VmasEnv("balance", 3)),
        ("jax", "brax", lambda: BraxEnv(None, 3)),
        ("pettingzoo", "pettingzoo", lambda: PettingZooEnv(dict, 3)),
    ],
)
def test_a_missing_package_is_told(package, extra, make, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RuntimeError, match=rf"pip install 'rl8x\[{extra}\]'"):
        make()


def walk():
    """Return an environment of Brax that walks from a random place by the action; beyond 1 it ends."""
    needs("brax")
    import jax
    from brax import envs

    class Walk(envs.Env):
        observation_size, action_size, backend = 2, 1, "none"

        def reset(self, rng):
            x = jax.random.uniform(rng, (2,))
            return envs.State(None, x, jax.numpy.zeros(()), jax.numpy.zeros(()))

        def step(self, state, action):
            x = state.obs + action[0]
            return state.replace(obs=x, reward=x.sum(), done=(x[0] > 1.0).astype("float32"))

    return Walk()


def test_brax_through_dlpack():
    env = BraxEnv(walk(), 64, seed=0, time_limit=5)
    obs, _ = env.reset(seed=1)
    assert torch.equal(obs, env.reset(seed=1)[0])
    assert obs.shape == (64, 2)
    lengths, ends = torch.zeros(64), 0
    for _ in range(12):
        before = obs
        obs, rewards, terminated, truncated, info = env.step(torch.full((64, 1), 0.1))
        lengths += 1
        torch.testing.assert_close(info["final_obs"], before + 0.1)
        torch.testing.assert_close(rewards, (before + 0.1).sum(1))
        assert torch.equal(terminated, before[:, 0] + 0.1 > 1.0)
        assert torch.equal(truncated, lengths == 5)
        done = terminated | truncated
        assert torch.equal(obs[~done], info["final_obs"][~done])
        assert (obs[done] != info["final_obs"][done]).all()
        assert bool(((obs[done] >= 0) & (obs[done] <= 1)).all())
        lengths[done] = 0
        ends += int(terminated.sum())
    assert ends > 64
    assert train(env)["episodes/lengths/mean"] <= 5.0
    algorithm = PPOConfig(num_envs=8, horizon=4, seed=0, device="cpu").build(functools.partial(BraxEnv, walk()))
    algorithm.collect()


@pytest.mark.parametrize("own", [{}, {"auto_reset": False}, {"batch_size": 2}, {"episode_length": None}])
def test_wrappers_for_braxs_own_training_are_refused(own):
    """Their time limit is no other than the task's own end: nothing would be bootstrapped there."""
    needs("brax")
    import brax.envs

    class Wrapped(brax.envs.Wrapper):
        """One of a user's own around them."""

    made = brax.envs.create("fast", **own)
    assert BraxEnv(Wrapped(brax.envs.get_environment("fast")), 2).num_envs == 2
    for env in (made, Wrapped(made)):
        names = "AutoResetWrapper" if own.get("auto_reset", True) else "EpisodeWrapper"
        with pytest.raises(TypeError, match=f"BraxEnv: env has the wrapper {names}, and copies, time limits"):
            BraxEnv(env, 2)


def test_fields_of_a_brax_system_move_as_an_environment_made_with_them():
    needs("brax")
    import jax
    from brax import envs

    def lighter(system, value):
        return system.replace(dof=system.dof.replace(damping=system.dof.damping + value))

    parameters = {
        "mass": SystemField("link.inertia.mass", "pole", unit="kg"),
        "gravity": {"scale": {"system_field": "gravity", "index": 2}},
        "damping": Function(lighter, default=0.0, low=0.0, high=1.0),
    }
    simulated = envs.get_environment("inverted_pendulum", backend="spring")
    env = BraxEnv(simulated, 3, seed=0, time_limit=4, parameters=parameters)
    mass = float(simulated.sys.link.inertia.mass[1])
    assert (env.parameters["mass"].default, env.parameters["gravity"].default) == (pytest.approx(mass), 1.0)
    config = {"mass": [1.0, mass, 9.0], "gravity": Grid([1.0, 0.5, 2.0]), "damping": 0.25}
    env.reset(config=config)
    states, singles = env._simulated, []
    for i, (m, g) in enumerate([(1.0, 1.0), (mass, 0.5), (9.0, 2.0)]):
        single = envs.get_environment("inverted_pendulum", backend="spring")
        inertia = single.sys.link.inertia.replace(mass=single.sys.link.inertia.mass.at[1].set(m))
        system = single.sys.replace(link=single.sys.link.replace(inertia=inertia), gravity=single.sys.gravity * g)
        single.sys = lighter(system, 0.25)
        singles.append((single, jax.tree.map(lambda part, row=i: part[row], states)))
    step = jax.jit(lambda system, state, action: stepped(singles[0][0], system, state, action))
    seen = []
    for t in range(3):
        actions = torch.tensor([[0.3], [-0.2], [0.1]]) * (t + 1)
        _, rewards, _, _, info = env.step(actions)
        for i, (single, state) in enumerate(singles):
            state = step(single.sys, state, jax.numpy.asarray(actions[i].numpy()))
            singles[i] = single, state
            np.testing.assert_allclose(info["final_obs"][i], state.obs, rtol=1e-4, atol=1e-5)
            assert float(rewards[i]) == pytest.approx(float(state.reward), rel=1e-4)
        seen.append(info["final_obs"])
    assert (seen[-1].diff(dim=0).abs().amax(1) > 1e-3).all()
    # Values are arguments of the program: none is compiled for them, and episodes that begin have their own.
    env.reset(config={"mass": Uniform(1.0, 2.0), "gravity": 0.7})
    before = env.carry["parameters"]["mass"]
    for t in range(5):
        env.step(torch.zeros(3, 1))
        assert torch.equal(env.carry["parameters"]["mass"] == before, torch.full((3,), t < 3))
    assert (env._advance._cache_size(), env._reset._cache_size()) == (1, 1)
    assert simulated.sys.link.inertia.mass[1] == mass
    assert torch.equal(env.another(3, seed=0).starting_parameters(torch.empty(3, 0))["mass"], torch.full((3,), mass))
    with pytest.raises(ValueError, match=r"no link 'pol' of the system\. Did you mean 'pole'"):
        BraxEnv(simulated, 2, parameters={"mass": SystemField("link.inertia.mass", "pol")})
    with pytest.raises(ValueError, match=r"no field 'inertias' of Link\. Did you mean 'inertia'"):
        BraxEnv(simulated, 2, parameters={"mass": "link.inertias.mass"})


def stepped(env, system, state, action):
    """Step an environment whose system is an argument, for one compilation of several."""
    kept, env.sys = env.sys, system
    try:
        return env.step(state, action)
    finally:
        env.sys = kept


def test_mujoco_playground_through_dlpack():
    pytest.importorskip("mujoco_playground", reason="mujoco_playground is not installed: pip install playground")
    import jax
    from mujoco_playground import registry

    simulated = registry.load("CartpoleBalance", config_overrides={"impl": "jax"})
    env = BraxEnv(simulated, 8, seed=0, time_limit=4)
    env.reset(seed=1)
    # The same states, stepped without the adapter.
    state, step = env._simulated, jax.jit(jax.vmap(simulated.step))
    for t in range(4):
        actions = torch.linspace(-1.0, 1.0, 8).unsqueeze(1)
        state = step(state, jax.numpy.asarray(actions.numpy()))
        obs, rewards, terminated, truncated, info = env.step(actions)
        np.testing.assert_allclose(info["final_obs"], state.obs, atol=1e-5)
        np.testing.assert_allclose(rewards, state.reward, atol=1e-5)
        assert not terminated.any()
        assert truncated.all() == (t == 3)
        assert torch.equal(obs, info["final_obs"]) == (t < 3)


class IsaacLike(gymnasium.Env):
    """Isaac Lab's documented contract: no `VectorEnv`, groups of observations, same-step resets, means in `log`."""

    num_envs, device, final_key = 4, "cpu", "final_obs"
    single_observation_space = spaces.Dict(
        {name: spaces.Box(-np.inf, np.inf, (width,), np.float32) for name, width in (("policy", 2), ("critic", 3))}
    )
    single_action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def __init__(self, **options):
        # An older Isaac Lab has no `compute_final_obs`; later ones look at it in each step, and it is off by default.
        self.cfg = SimpleNamespace(decimation=2, **options)
        self.extras = {}

    def observation(self):
        return {"policy": self.time.unsqueeze(1).expand(4, 2), "critic": self.time.unsqueeze(1) * torch.ones(3)}

    def reset(self, seed=None, options=None):
        self.time = torch.zeros(4)
        return self.observation(), {}

    def step(self, actions):
        assert isinstance(actions, torch.Tensor)
        self.time = self.time + 1
        terminated, truncated = self.time == torch.tensor([2, 9, 9, 9]), self.time == torch.tensor([9, 3, 4, 5])
        done = terminated | truncated
        self.extras["log"] = {"Episode_Reward/track": float(self.time[done].mean())} if done.any() else {}
        if getattr(self.cfg, "compute_final_obs", False) and done.any():
            # Of every copy, without a mask; it stays there until the next step that resets one.
            self.extras[self.final_key] = self.observation()
        self.time = torch.where(done, 0.0, self.time)
        return self.observation(), torch.ones(4), terminated, truncated, self.extras


def test_the_contract_of_isaac_lab():
    env = GymnasiumEnv(IsaacLike(), metrics=["log/Episode_Reward/track"])
    assert (env.num_envs, env.autoreset_mode, env.gives_final_obs) == (4, AutoresetMode.SAME_STEP, True)
    config = {"hidden_sizes": [8], "critic_obs": ["critic"]}
    with pytest.warns(RuntimeWarning, match="does not give the observation before it") as told:
        stats = train(env, horizon=16, model_config=config)
    assert 2.0 <= stats["episodes/info/log/Episode_Reward/track/mean"] <= 5.0
    assert 2.0 <= stats["episodes/lengths/mean"] <= 5.0
    assert (len(told), env.gives_final_obs) == (1, False)


@pytest.mark.parametrize("final_key", ["final_obs", "final_observation"])
def test_isaac_lab_is_asked_for_final_observations_and_they_are_taken_as_are_those_of_maniskills_name(final_key):
    simulated = IsaacLike(compute_final_obs=False)
    simulated.final_key = final_key
    env = GymnasiumEnv(simulated)
    assert simulated.cfg.compute_final_obs
    env.reset()
    ages, ends = torch.zeros(4), 0
    for _ in range(30):
        obs, _, terminated, truncated, info = env.step(torch.zeros(4, 1))
        ages += 1
        for name, width in (("policy", 2), ("critic", 3)):
            assert torch.equal(info["final_obs"][name], ages.unsqueeze(1).expand(4, width))
        done = terminated | truncated
        ages[done] = 0.0
        ends += int(done.sum())
        assert torch.equal(obs["policy"][:, 0], ages)
    assert (ends, env.gives_final_obs) == (15 + 10 + 7 + 6, True)


def test_isaac_lab_must_reset_its_copies_itself():
    with pytest.raises(ValueError, match=r"Isaac Lab must reset its copies itself; set `autoreset_mode` to SAME_STEP"):
        GymnasiumEnv(IsaacLike(compute_final_obs=True, autoreset_mode=AutoresetMode.DISABLED))
