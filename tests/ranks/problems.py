"""Small problems for two ranks, and the same with twice the copies on the same noise for one process."""

import functools
import hashlib

import torch
from gymnasium.spaces import Box

from rl8x import BCConfig, DQNConfig, IQLConfig, MemoryTracker, PPOConfig, PQNConfig, SACConfig, TD3Config, Trainer
from rl8x.algorithms.hyperparameters import part_seed
from rl8x.distributed import ranks
from rl8x.envs import CartPole, Pendulum, Spread
from rl8x.execution import execution
from rl8x.execution.compiler import CompiledProgram
from rl8x.execution.programs import Loop
from rl8x.randomization import Adaptive, Learnable, Uniform
from rl8x.replay.dataset import Dataset

SEED = 5
COPIES = 8


def generators_of(part):
    return [torch.Generator().manual_seed(part_seed(SEED, part, rank)) for rank in range(2)]


def drawn_by_both(generators, draw, num_envs, agents):
    """What two ranks' generators draw, side by side: of each agent the copies of both."""
    parts = [draw(num_envs // 2, each).unflatten(1, (agents, -1)) for each in generators]
    return torch.cat(parts, 2).flatten(1, 2)


class Both:
    """In one process, all copies of two ranks on the noise of both."""

    def __init__(self, num_envs, **options):
        super().__init__(num_envs, **options)
        self.generators = generators_of("env")

    def noise(self, horizon):
        draw = lambda rows, generator: torch.rand((horizon, rows, self.noise_width), generator=generator)  # noqa: E731
        return drawn_by_both(self.generators, draw, self.num_envs, self.num_agents)


class BothCartPoles(Both, CartPole): ...


class BothSpreads(Both, Spread): ...


# The environment of a rank, that of both, and how they are made.
ALONE = {CartPole: (BothCartPoles, {"time_limit": 30}), Spread: (BothSpreads, {"time_limit": 7})}


def ppo(**options):
    given = {"horizon": 16, "seed": SEED, "device": "cpu", "execution": "eager", "num_sgd_iters": 2}
    given |= {"model_config": {"hidden_sizes": [16, 16]}, "normalize_observations": True, "normalize_rewards": True}
    given |= {"normalize_values": True, "lr": 1e-3, "sgd_minibatch_size": None, "num_envs": COPIES}
    return PPOConfig.rl8(**given | options)


def rank_algorithm(config, env=CartPole, **options):
    """One rank's algorithm; in one process, what both ranks do together."""
    both, own = ALONE[env]
    if ranks().size > 1:
        return config.build(env, **own | options)
    algorithm = config.build(both, **own | options)
    generators, agents, draw = generators_of("sampling"), algorithm.env.num_agents, algorithm.acting.noise
    algorithm.acting.noise = lambda horizon, num_envs, _: drawn_by_both(
        generators, functools.partial(draw, horizon), num_envs, agents
    )
    return algorithm


class Traced(CompiledProgram):
    """What was traced, as it is; nothing is asked of the compiler ahead."""

    def __init__(self, function, check=None):
        super().__init__(function, compiles=False)

    def prepare(self, *tensors):
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)


def compile_updates_alone():
    """Have loops, which rollouts are, run as traced: no rank needs another there, and compiling costs seconds."""
    make = execution.CompiledProgram
    execution.CompiledProgram = lambda function, check=None: (Traced if isinstance(function, Loop) else make)(
        function, check
    )


def run_traced(algorithm, mode):
    """Have updates run in a mode, where compiled programs are what was traced, without a compiler."""
    execution.CompiledProgram = Traced
    algorithm.execution.mode = algorithm.execution.target = mode


def trainer(algorithm, **options):
    return Trainer(algorithm, tracker=MemoryTracker(), **{"eval_env": False} | options)


def weights(algorithm):
    return {name: tensor.double().reshape(-1).tolist() for name, tensor in algorithm.policy.state_dict().items()}


def digest(algorithm):
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in algorithm.policy.state_dict().values()]
    return hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()


def furthest(one, other):
    assert one.keys() == other.keys()
    return max(abs(a - b) for name in one for a, b in zip(one[name], other[name], strict=True))


def rows():
    """A small data set of one-step episodes with two actions."""
    generator = torch.Generator().manual_seed(3)
    draw = functools.partial(torch.rand, generator=generator)
    ends = draw(60) < 0.5
    tensors = {"obs": draw(60, 3), "actions": 2 * draw(60, 2) - 1, "rewards": draw(60), "next_obs": draw(60, 3)}
    return Dataset.from_tensors(
        tensors | {"terminated": ends, "truncated": ~ends},
        observation_space=Box(0.0, 1.0, (3,)),
        action_space=Box(-1.0, 1.0, (2,)),
    )


OFFLINE = {
    "bc": (BCConfig, {}),
    "td3": (TD3Config, {"actor_bc_coeff": 0.5, "critic_hidden_sizes": [16], "target_noise": 0.0, "policy_delay": 2}),
    "iql": (IQLConfig, {"critic_hidden_sizes": [16]}),
    "sac": (SACConfig, {"cql_coeff": 1.0, "critic_hidden_sizes": [16]}),
}
# Of these traced too, which takes seconds: one whose updates come in cycles, and one of another form.
TRACED = ("td3", "iql")
# PPO's problems: the environment, how it is made, the options.
_TEAM = {"state": "shared", "agent_id": True, "team_return": "sum"}
PPO = {
    "alone": (CartPole, {}, {}),
    # a rate that goes by the divergence over all copies, and advantages of the present critic
    "adapts": (CartPole, {}, {"lr_schedule": {"kind": "adaptive"}, "recompute_advantages": True}),
    "team": (Spread, _TEAM, {}),  # whose critic sees them all
    "separate": (Spread, _TEAM, {"model_config": {"hidden_sizes": [8], "separate": True}}),
}
MOVING = {
    "adaptive": Adaptive((0.4, 0.6), thresholds=(8.0, 12.0), step=0.05, limits=(0.1, 2.0), episodes=5),
    "learnable": Learnable(Uniform(0.2, 1.0), threshold=12.0, levels=3, candidates=3, episodes=2),
}
ONLINE = {
    "pqn": (PQNConfig, CartPole, {"sgd_minibatch_size": 32}),
    "dqn": (DQNConfig, CartPole, {"warmup_steps": 16, "batch_size": 8, "prioritized": True, "n_step": 3}),
    "sac": (SACConfig, Pendulum, {"warmup_steps": 16, "batch_size": 8, "return_bound": 5.0}),
    "td3": (TD3Config, Pendulum, {"warmup_steps": 16, "batch_size": 8, "normalize_observations": True}),
}


def offline(name, **options):
    """An algorithm that learns from `rows`; in one process it draws what two ranks draw."""
    config, own = OFFLINE[name]
    given = {"seed": SEED, "device": "cpu", "execution": "eager", "batch_size": 16, "updates_per_step": 4}
    given |= {"model_config": {"hidden_sizes": [16]}, "normalize_observations": True, "lr": 1e-3}
    algorithm = config(**given | own | options).build(dataset=rows())
    if ranks().size == 1:
        share_batches(algorithm, given["batch_size"] // 2)
    return algorithm


def share_batches(algorithm, half):
    """Have one process draw the rows and the noise of two ranks."""
    generators, sample, draw = generators_of("minibatches"), algorithm.replay.sample, algorithm.draw
    algorithm.replay.sample = lambda count, size, _: torch.cat([sample(count, half, each) for each in generators], 1)

    def draw_both(first, count):
        algorithm.batch_size, parts = half, []
        for algorithm.generator in generators:
            parts.append(draw(first, count))
        algorithm.batch_size = 2 * half
        shapes = {name: [*part.shape] for name, part in parts[0].items()}
        halves = {name: shape.index(half) for name, shape in shapes.items() if half in shape}
        return parts[0] | {name: torch.cat([part[name] for part in parts], at) for name, at in halves.items()}

    algorithm.draw = draw_both


def online(name, **options):
    config, env, own = ONLINE[name]
    given = {"num_envs": COPIES, "horizon": 8, "seed": SEED, "device": "cpu", "execution": "eager"}
    given |= {} if config is PQNConfig else {"updates_per_sample": 0.25}
    return config(**given | {"model_config": {"hidden_sizes": [16]}} | own | options).build(env, time_limit=20)
