"""rsl_rl: its on-policy runner and PPO, logging to TensorBoard as it does by itself.

rsl_rl has distributions for continuous actions alone, so CartPole brings a categorical one in its interface.
"""

from __future__ import annotations

from typing import Any

import torch
from rsl_rl.env import VecEnv
from rsl_rl.modules.distribution import Distribution
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict
from torch import Tensor

from benchmarks.peers.envs import Array, TorchEnv
from benchmarks.recorder import Recorder, recorded
from benchmarks.works import MAX_ITERATIONS, Job


class Adapter(VecEnv):
    """A batched torch environment in rsl_rl's interface."""

    num_actions = 1

    def __init__(self, name: str, num_envs: int, device: str, reward_scale: float) -> None:
        self.env = TorchEnv(name, num_envs, device)
        self.reward_scale = reward_scale
        self.num_envs = num_envs
        self.device = device
        self.cfg: dict[str, Any] = {}
        self.max_episode_length = self.env.time_limit
        self.obs = self.env.reset()

    @property
    def episode_length_buf(self) -> Tensor:
        """Steps of the running episodes."""
        return self.env.lengths

    def get_observations(self) -> TensorDict:
        """Return the present observations."""
        return TensorDict({"policy": self.obs}, batch_size=self.num_envs)

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Move every copy."""
        step = self.env.step(actions)
        self.obs = step.obs
        ended = step.terminated | step.truncated
        return self.get_observations(), self.reward_scale * step.rewards, ended, {"time_outs": step.truncated}


class Categorical(Distribution):
    """Two actions, stored as the number 0 or 1 in one column."""

    @property
    def input_dim(self) -> int:
        """A logit for each action."""
        return 2

    def update(self, mlp_output: Tensor) -> None:
        """Take logits."""
        self.logp = mlp_output.log_softmax(-1)

    def sample(self) -> Tensor:
        """Draw actions."""
        return torch.multinomial(self.logp.exp(), 1).to(torch.float32)

    def deterministic_output(self, mlp_output: Tensor) -> Tensor:
        """Return the likelier actions."""
        return mlp_output.argmax(-1, keepdim=True).to(torch.float32)

    @property
    def mean(self) -> Tensor:
        """The probability of action 1."""
        return self.logp[..., 1:].exp()

    @property
    def std(self) -> Tensor:
        """The standard deviation of the number of the action."""
        return (self.mean * (1 - self.mean)).sqrt()

    @property
    def entropy(self) -> Tensor:
        """The entropy of the actions."""
        return -(self.logp.exp() * self.logp).sum(-1)

    @property
    def params(self) -> tuple[Tensor, ...]:
        """The log-probabilities."""
        return (self.logp,)

    def log_prob(self, outputs: Tensor) -> Tensor:
        """Return the log-probabilities of actions."""
        return self.logp.gather(-1, outputs.to(torch.int64)).squeeze(-1)

    def kl_divergence(self, old_params: tuple[Tensor, ...], new_params: tuple[Tensor, ...]) -> Tensor:
        """Return how far new log-probabilities are from old ones."""
        return (old_params[0].exp() * (old_params[0] - new_params[0])).sum(-1)


def config(job: Job) -> dict[str, Any]:
    """Return the runner's config."""
    work = job.work
    distribution: dict[str, Any] = {"class_name": Categorical}
    if work.env == "pendulum":
        distribution = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "log"}
    network = {"class_name": "MLPModel", "hidden_dims": work.widths, "activation": "relu"}
    return {
        "num_steps_per_env": work.horizon,
        "save_interval": 1_000_000_000,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**network, "distribution_cfg": distribution},
        "critic": network,
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": work.passes,
            "num_mini_batches": work.minibatches,
            "clip_param": work.clip,
            "lam": work.gae_lambda,
            "entropy_coef": work.entropy_coeff,
            "learning_rate": work.lr,
            **work.fields("gamma", "max_grad_norm"),
            "schedule": "fixed",
            "use_clipped_value_loss": False,  # as in rl8x
        },
    }


def train(job: Job, recorder: Recorder) -> None:
    """Train with rsl_rl's runner; an iteration ends when it has been logged."""
    work = job.work
    # rsl_rl leaves the scale of rewards to the environment, whose config has a factor for it.
    env = Adapter(work.env, work.num_envs, job.device, reward_scale=0.1 if work.normalize_rewards else 1.0)
    runner = OnPolicyRunner(env, config(job), log_dir=".", device=job.device)
    log = runner.logger.log

    def act(obs: Array) -> Array:
        with torch.inference_mode():
            batch = TensorDict({"policy": torch.from_numpy(obs).to(job.device)}, batch_size=len(obs))
            return runner.alg.get_policy()(batch).cpu().numpy()

    def log_and_tick(**kwargs: Any) -> None:
        log(**kwargs)
        recorder.tick(act)

    runner.logger.log = log_and_tick  # type: ignore[method-assign]
    recorder.start()
    runner.learn(MAX_ITERATIONS)


answer = recorded(train, "rsl-rl-lib", "torch", "tensordict", "tensorboard", "numpy")
