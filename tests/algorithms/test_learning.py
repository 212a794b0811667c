import rl8x
from rl8x import NullTracker, Trainer


def test_cartpole_is_learned_with_products_in_bfloat16():
    run = rl8x.tuned("CartPole")
    run = run.replace(algorithm_config={**run.algorithm.algorithm_config, "precision": "bf16", "seed": 0})
    options = {"tracker": NullTracker(), "checkpoints": False, "eval_env": True, "num_eval_envs": 256}
    with Trainer(run.make_algorithm(), **options) as trainer:
        trainer.run(stop_conditions=run.run.conditions(), progress="none")
        assert trainer.eval(deterministic=True)["eval/returns/mean"] >= 475
