"""What two ranks do; see `launch`."""

from tests.ranks import problems
from tests.ranks.problems import COPIES

from rl8x.distributed import ranks


def ppo_equals_one_process(folder=None):
    """Ten full-batch updates: five steps of two epochs."""
    size = COPIES if ranks().size > 1 else 2 * COPIES
    algorithm = problems.rank_algorithm(problems.ppo(num_envs=size))
    trainer = problems.trainer(algorithm)
    rows = [dict(trainer.step()) for _ in range(5)]
    return {"weights": problems.weights(algorithm), "rows": rows, "state": dict(trainer.state)}


def ppo_compiled(folder):
    """The same with minibatches, as traced programs between sums over ranks, beside eager execution."""
    found = {}
    for mode in ("eager", "compile"):
        algorithm = problems.rank_algorithm(problems.ppo(sgd_minibatch_size=32, target_kl_div=0.5))
        problems.run_traced(algorithm, mode)
        trainer = problems.trainer(algorithm)
        rows = [dict(trainer.step()) for _ in range(3)]
        found[mode] = {"weights": problems.weights(algorithm), "kl": [row["monitors/kl_div"] for row in rows]}
    return found
