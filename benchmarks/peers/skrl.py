"""skrl: its PPO agent and sequential trainer, writing to TensorBoard once an iteration."""

from __future__ import annotations

from typing import Any

import torch
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import Wrapper
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed
from torch import Tensor, nn

from benchmarks.peers.envs import Array, TorchEnv, spaces_of
from benchmarks.recorder import Recorder, recorded
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
        obs, *columns = self._env.step(actions)[:4]
        rewards, terminated, truncated = (column.unsqueeze(-1) for column in columns)
        return obs, rewards, terminated, truncated, {}

    def state(self) -> None:
        """Return None: there is no state beside the observations."""

    def render(self, *args: Any, **kwargs: Any) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Do nothing."""


def perceptron(mixin: type[Any], hidden: int, outputs: int, **spaces: Any) -> Model:
    """Make a model with two hidden layers, whose outputs a mixin of skrl's says the meaning of."""

    class Perceptron(mixin, Model):
        """Means, beside a standard deviation that is free, or logits, or values."""

        def __init__(self) -> None:
            Model.__init__(self, **spaces)
            mixin.__init__(self)
            first, second = nn.Linear(self.num_observations, hidden), nn.Linear(hidden, hidden)
            self.net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(hidden, outputs))
            is_gaussian = mixin is GaussianMixin
            self.log_std = nn.Parameter(torch.zeros(outputs)) if is_gaussian else None

        def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[Tensor, dict[str, Any]]:
            """Return the outputs."""
            more = {} if self.log_std is None else {"log_std": self.log_std}
            return self.net(inputs["observations"]), more

    return Perceptron()


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
    mixin = CategoricalMixin if work.env == "cartpole" else GaussianMixin
    policy = perceptron(mixin, work.hidden, OUTPUTS[work.env], **spaces)
    values = perceptron(DeterministicMixin, work.hidden, 1, **spaces)
    agent = TickingPPO(
        models={"policy": policy, "value": values},
        memory=RandomMemory(memory_size=work.horizon, num_envs=work.num_envs, device=job.device),
        cfg=config(job),
        **spaces,
    )

    def act(obs: Array) -> Array:
        with torch.no_grad():
            outputs, _ = policy.compute({"observations": torch.from_numpy(obs).to(job.device)})
            actions = outputs.argmax(-1) if work.env == "cartpole" else outputs
            return actions.cpu().numpy()

    agent.tick = lambda: recorder.tick(act)
    options = {"headless": True, "disable_progressbar": True, "close_environment_at_exit": False}
    options["timesteps"] = MAX_ITERATIONS * work.horizon
    trainer = SequentialTrainer(cfg=options, env=env, agents=agent)
    recorder.start()
    trainer.train()


answer = recorded(train, "skrl", "torch", "tensorboard", "numpy")
