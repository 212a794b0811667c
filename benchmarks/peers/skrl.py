"""skrl: its PPO agent and sequential trainer, writing to TensorBoard once an iteration."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import Wrapper
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed
from torch import Tensor, nn

from benchmarks.peers.envs import TorchEnv, spaces_of
from benchmarks.recorder import Recorder, main
from benchmarks.works import MAX_ITERATIONS, OUTPUTS, Job


class Adapter(Wrapper):
    """A batched torch environment in skrl's interface."""

    def __init__(self, name: str, num_envs: int, device: str) -> None:
        env = TorchEnv(name, num_envs, device)
        env.observation_space, env.action_space = spaces_of(name)
        super().__init__(env)

    def reset(self) -> tuple[Tensor, dict[str, Any]]:
        """Start an episode in every copy."""
        return self._env.reset(), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Move every copy."""
        obs, *columns = self._env.step(actions)
        rewards, terminated, truncated = (column.unsqueeze(-1) for column in columns)
        return obs, rewards, terminated, truncated, {}

    def state(self) -> None:
        """Return None: there is no state beside the observations."""

    def render(self, *args: Any, **kwargs: Any) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Do nothing."""


def network(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Return a perceptron with two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


class GaussianPolicy(GaussianMixin, Model):
    """Continuous actions: a mean from the network, a standard deviation that is free."""

    def __init__(self, hidden: int, **spaces: Any) -> None:
        Model.__init__(self, **spaces)
        GaussianMixin.__init__(self)
        self.net = network(self.num_observations, hidden, self.num_actions)
        self.log_std = nn.Parameter(torch.zeros(self.num_actions))

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[Tensor, dict[str, Any]]:
        """Return means and logarithms of standard deviations."""
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class CategoricalPolicy(CategoricalMixin, Model):
    """Discrete actions: logits from the network."""

    def __init__(self, hidden: int, outputs: int, **spaces: Any) -> None:
        Model.__init__(self, **spaces)
        CategoricalMixin.__init__(self)
        self.net = network(self.num_observations, hidden, outputs)

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[Tensor, dict[str, Any]]:
        """Return logits."""
        return self.net(inputs["observations"]), {}


class Value(DeterministicMixin, Model):
    """The critic."""

    def __init__(self, hidden: int, **spaces: Any) -> None:
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)
        self.net = network(self.num_observations, hidden, 1)

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[Tensor, dict[str, Any]]:
        """Return values."""
        return self.net(inputs["observations"]), {}


class TickingPPO(PPO):
    """PPO that tells when an iteration has ended, its tracking written."""

    tick: Any

    def post_interaction(self, *, timestep: int, timesteps: int) -> None:
        """Do what PPO does, then tell."""
        super().post_interaction(timestep=timestep, timesteps=timesteps)
        if not (timestep + 1) % self.cfg.rollouts:
            self.tick()


def config(job: Job) -> PPO_CFG:
    """Return the agent's config."""
    work = job.work
    cfg = PPO_CFG(
        rollouts=work.horizon,
        learning_epochs=work.passes,
        mini_batches=work.minibatches,
        discount_factor=work.gamma,
        gae_lambda=work.gae_lambda,
        learning_rate=work.lr,
        grad_norm_clip=work.max_grad_norm,
        ratio_clip=work.clip,
        entropy_loss_scale=work.entropy_coeff,
        value_loss_scale=1.0,
        value_clip=0.0,  # no limit, as in rl8x
        time_limit_bootstrap=True,
    )
    if work.normalize_rewards:
        # skrl scales what the critic predicts; it has no running scale for rewards.
        cfg.value_preprocessor = RunningStandardScaler
        cfg.value_preprocessor_kwargs = {"size": 1, "device": job.device}
    cfg.experiment.directory = "."
    cfg.experiment.write_interval = work.horizon
    cfg.experiment.checkpoint_interval = 0
    return cfg


def train(job: Job, recorder: Recorder) -> None:
    """Train with skrl's trainer."""
    work = job.work
    set_seed(job.seed)
    env = Adapter(work.env, work.num_envs, job.device)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space, "device": job.device}
    policy: Model = (
        CategoricalPolicy(work.hidden, OUTPUTS[work.env], **spaces)
        if work.env == "cartpole"
        else GaussianPolicy(work.hidden, **spaces)
    )
    agent = TickingPPO(
        models={"policy": policy, "value": Value(work.hidden, **spaces)},
        memory=RandomMemory(memory_size=work.horizon, num_envs=work.num_envs, device=job.device),
        cfg=config(job),
        **spaces,
    )

    def act(obs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            outputs, _ = policy.compute({"observations": torch.from_numpy(obs).to(job.device)})
            actions = outputs.argmax(-1) if work.env == "cartpole" else outputs
            return actions.cpu().numpy()

    agent.tick = lambda: recorder.tick(act)
    trainer = SequentialTrainer(
        cfg={
            "timesteps": MAX_ITERATIONS * work.horizon,
            "headless": True,
            "disable_progressbar": True,
            "close_environment_at_exit": False,
        },
        env=env,
        agents=agent,
    )
    recorder.start()
    trainer.train()


if __name__ == "__main__":
    main("skrl", train, ("torch", "tensorboard", "numpy"))
