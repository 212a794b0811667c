"""rl8 1.0: its own config, algorithm and trainer, logging to MLflow as it does by itself.

rl8's environments never end as far as it knows: it has no notion of a termination, so returns run across restarts. The
work of an iteration is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from rl8 import AlgorithmConfig, Trainer
from rl8.env import Env
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import Categorical, Unbounded

from benchmarks.peers.envs import Array, TorchEnv
from benchmarks.recorder import Recorder, recorded
from benchmarks.works import OBSERVATIONS, Job


class Adapter(Env):
    """A batched torch environment in rl8's interface."""

    name: str

    def __init__(self, num_envs: int, /, horizon: int | None = None, *, device: Any = "cpu") -> None:
        super().__init__(num_envs, horizon, device=device)
        self.env = TorchEnv(self.name, num_envs, device)
        self.observation_spec = Unbounded(OBSERVATIONS[self.name], device=device)
        about: dict[str, Any] = {"shape": torch.Size([1]), "device": device}
        self.action_spec = Categorical(2, **about) if self.name == "cartpole" else Unbounded(**about)

    def reset(self, *, config: dict[str, Any] | None = None) -> Tensor:
        """Start an episode in every copy."""
        return self.env.reset()

    def step(self, action: Tensor) -> TensorDict:
        """Move every copy."""
        step = self.env.step(action)
        return TensorDict({"obs": step.obs, "rewards": step.rewards.unsqueeze(-1)}, batch_size=self.num_envs)


def train(job: Job, recorder: Recorder) -> None:
    """Train with rl8's trainer."""
    work = job.work
    config = AlgorithmConfig(
        **work.fields("num_envs", "horizon", "gamma", "gae_lambda"),
        **work.fields("entropy_coeff", "max_grad_norm", "normalize_rewards"),
        model_config={"hiddens": work.widths},
        horizons_per_env_reset=-1,
        optimizer_config={"lr": work.lr},
        sgd_minibatch_size=None if work.minibatches == 1 else work.minibatch_size,
        num_sgd_iters=work.passes,
        clip_param=work.clip,
        vf_clip_param=1e9,  # no limit, as in rl8x
        device=job.device,
    )
    algorithm = config.build(type("Env", (Adapter,), {"name": work.env}))
    trainer = Trainer(algorithm)

    def act(obs: Array) -> Array:
        batch = TensorDict({"obs": torch.from_numpy(obs).to(job.device).unsqueeze(1)}, batch_size=[len(obs), 1])
        return algorithm.policy.sample(batch, kind="last", deterministic=True)["actions"].cpu().numpy()

    recorder.start()
    while True:
        trainer.step()
        recorder.tick(act)


answer = recorded(train, "rl8", "torch", "tensordict", "torchrl", "mlflow-skinny", "numpy")
