"""A training as a user's script would have it, in which rank 1 comes to grief; started by `test_failures`.

job.py die|raise|freeze STEP TRACKER
"""

import os
import signal
import sys

from tests.ranks import problems

from rl8x import keys
from rl8x.checkpoint import Checkpoints
from rl8x.distributed import ranks
from rl8x.tracking import MLflowTracker, NullTracker
from rl8x.trainers import Trainer


def main():
    how, step, tracked = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "mlflow"
    algorithm = problems.ppo(seed=None).build(problems.CartPole, time_limit=30)

    def grief(trainer, row):
        if ranks().rank != 1 or row[keys.STEPS] != step or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            return
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        advance = algorithm.env.noise
        algorithm.env.noise = lambda horizon: advance(horizon) + 1 / 0

    trainer = Trainer(
        algorithm,
        tracker=MLflowTracker() if tracked else NullTracker(),
        eval_env=False,
        checkpoints=Checkpoints(None if tracked else "saved", every_steps=2),
        callbacks=[grief],
    )
    trainer.run(max_steps=6, progress="none")
    print(f"rank {ranks().rank} ended after {trainer.state[keys.STEPS]} steps: {trainer.stop_reason}", flush=True)


if __name__ == "__main__":
    main()
