"""rl8's algotrading: masked actions, dict observations, and one task for an MLP, an LSTM and a transformer.

A price follows a cycle whose period and size a policy has to tell from the changes it remembers: the MLP sees the last.
"""

from __future__ import annotations

import sys

from rl8x import HitsUpperBound, NullTracker, Plateau, PPOConfig, Trainer
from rl8x.envs import AlgoTrading

MODELS = {
    "mlp": {"hidden_sizes": [64, 64]},
    "lstm": {"hidden_size": 64},
    "attention": {"window": 8, "width": 32, "num_heads": 2},
}


def main(models: tuple[str, ...] = tuple(MODELS), max_steps: int = 30, num_envs: int = 256) -> dict[str, float]:
    returns = {}
    for model in models:
        config = PPOConfig.rl8(
            num_envs=num_envs,
            gamma=0.9,
            lr=3e-3,
            sgd_minibatch_size=num_envs * 8,
            model=model,
            model_config=MODELS[model],
            seq_len=1 if model == "mlp" else 8,
            seed=0,
            num_threads=1,
            device="cpu",
        )
        trainer = Trainer(config.build(AlgoTrading), tracker=NullTracker())
        # A memory is worth more than 21 percent; what has none comes to rest below, or the steps run out.
        stops = [HitsUpperBound("eval/returns/mean", 21.0), Plateau("eval/returns/mean", patience=2, rtol=0.005)]
        stats = trainer.run(steps_per_eval=5, stop_conditions=stops, max_steps=max_steps)
        returns[model] = stats["eval/returns/mean"]
        print(f"{model}: {returns[model]:.1f} percent in 32 steps, stopped by {stats.stop_reason}")
    print("expected: mlp about 16, lstm and attention above 21")
    return returns


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or tuple(MODELS))
