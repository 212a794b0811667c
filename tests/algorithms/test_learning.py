import rl8x
from rl8x import NullTracker, Trainer


def test_cartpole_is_learned_with_products_in_bfloat16():
    run = rl8x.tuned("CartPole")
    config = {**run.algorithm.algorithm_config, "precision": "bf16", "seed": 0}
    algorithm = run.replace(algorithm_config=config).make_algorithm()
    trainer = Trainer(algorithm, tracker=NullTracker(), checkpoints=False, eval_env=True, num_eval_envs=256)
    trainer.run(stop_conditions=run.run.conditions(), progress="none")
    assert trainer.eval(deterministic=True)["eval/returns/mean"] >= 475
    assert algorithm.config.precision == "bf16"
