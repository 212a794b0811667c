"""Small problems for two ranks, and the same with twice the copies on the same noise for one process."""

import hashlib

import torch

from rl8x import PPOConfig
from rl8x.algorithms.seeds import part_seed
from rl8x.distributed import ranks
from rl8x.envs import CartPole
from rl8x.execution import execution
from rl8x.execution.compiled import CompiledProgram
from rl8x.tracking import MemoryTracker
from rl8x.trainers import Trainer

SEED = 5
COPIES = 8


class Halves:
    """What two ranks' generators draw, side by side."""

    def __init__(self, part):
        self.generators = [torch.Generator().manual_seed(part_seed(SEED, part, rank)) for rank in range(2)]

    def rand(self, horizon, num_envs, width):
        return torch.cat([torch.rand((horizon, num_envs // 2, width), generator=each) for each in self.generators], 1)


class BothCartPoles(CartPole):
    """In one process, all copies of two ranks on the noise of both."""

    def __init__(self, num_envs, **options):
        super().__init__(num_envs, **options)
        self.halves = Halves("env")

    def noise(self, horizon):
        return self.halves.rand(horizon, self.num_envs, self.noise_width)


def ppo(**options):
    given = {"horizon": 16, "seed": SEED, "device": "cpu", "execution": "eager", "num_sgd_iters": 2}
    given |= {"model_config": {"hidden_sizes": [16, 16]}, "normalize_observations": True, "normalize_rewards": True}
    given |= {"normalize_values": True, "lr": 1e-3, "sgd_minibatch_size": None, "num_envs": COPIES}
    return PPOConfig(**given | options)


def rank_algorithm(config):
    """One rank's algorithm; in one process, what both ranks do together."""
    if ranks().size > 1:
        return config.build(CartPole, time_limit=30)
    algorithm = config.build(BothCartPoles, time_limit=30)
    share_noise(algorithm)
    return algorithm


def share_noise(algorithm):
    """Have one process's policy draw what those of two ranks draw."""
    generators = Halves("sampling").generators
    policy = algorithm.policy
    draw = policy.noise
    policy.noise = lambda horizon, num_envs, _: torch.cat(
        [draw(horizon, num_envs // 2, each) for each in generators], 1
    )


def run_traced(algorithm, mode):
    """Have updates run in a mode, where compiled programs are what was traced, without a compiler."""
    execution._compiled = lambda function, num_fixed: CompiledProgram(function, compiles=False)
    algorithm.execution.mode = algorithm.execution.target = mode


def trainer(algorithm, **options):
    return Trainer(algorithm, tracker=MemoryTracker(), **{"eval_env": False} | options)


def weights(algorithm):
    """All weights and running moments, as numbers."""
    return {name: tensor.double().reshape(-1).tolist() for name, tensor in algorithm.policy.state_dict().items()}


def digest(algorithm):
    """A digest of the bits of what was learned."""
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in algorithm.policy.state_dict().values()]
    return hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()


def furthest(one, other):
    """The largest difference of numbers by name."""
    assert one.keys() == other.keys()
    return max(abs(a - b) for name in one for a, b in zip(one[name], other[name], strict=True))
