"""Train under one distribution of physics and evaluate under others: how far does a policy generalise?

`env_config` sets an environment's parameters (`rl8x envs CartPole` lists them) to numbers or to distributions, from
which each copy draws anew at each reset.
"""

from __future__ import annotations

from rl8x import NullTracker, PPOConfig, Trainer
from rl8x.envs import CartPole
from rl8x.randomization import LogUniform, Uniform

FIXED = {}
RANDOM = {"length": Uniform(0.25, 2.0), "masspole": LogUniform(0.05, 0.5)}
TESTS = {"default physics": {}, "long pole": {"length": 2.0}, "heavy pole": {"masspole": 0.5}, "drawn": RANDOM}


def train(env_config: dict, max_steps: int) -> dict[str, float]:
    config = PPOConfig(
        num_envs=64,
        horizon=32,
        gamma=0.99,
        lr_schedule={"kind": "interp", "points": [[0, 1e-2], [64 * 32 * max_steps, 0.0]]},
        sgd_minibatch_size=512,
        max_grad_norm=0.5,
        model_config={"hidden_sizes": [64, 64]},
        seed=0,
        num_threads=1,
        device="cpu",
    )
    trainer = Trainer(config.build(CartPole), tracker=NullTracker())
    trainer.run(env_config=env_config, max_steps=max_steps)
    return {name: trainer.eval(env_config=test)["eval/returns/mean"] for name, test in TESTS.items()}


def main(max_steps: int = 60) -> dict[str, dict[str, float]]:
    results = {"fixed physics": train(FIXED, max_steps), "random physics": train(RANDOM, max_steps)}
    print(f"{'trained under':<16}" + "".join(f"{name:>16}" for name in TESTS))
    for name, returns in results.items():
        print(f"{name:<16}" + "".join(f"{value:>16.0f}" for value in returns.values()))
    print("expected: random physics far ahead where the pole is long, and where physics are drawn")
    return results


if __name__ == "__main__":
    main()
