"""A training as a user's script would have it, in which rank 1 comes to grief each time; started by `test_failures`."""

import os
import signal

from tests.ranks import problems

from rl8x import keys
from rl8x.checkpoint import Checkpoints
from rl8x.distributed import ranks
from rl8x.tracking import MLflowTracker
from rl8x.trainers import Trainer

# What happens after which step, each time that torchrun has started it.
GRIEF = {0: ("raise", 1), 1: ("die", 3), 2: ("freeze", 4)}


def main():
    how, step = GRIEF.get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), ("none", 0))
    algorithm = problems.ppo(seed=None).build(problems.CartPole, time_limit=30)

    def grief(trainer, row):
        if ranks().rank != 1 or row[keys.STEPS] != step:
            return
        print(f"rank 1 comes to grief: {how}", flush=True)
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        advance = algorithm.env.noise
        algorithm.env.noise = lambda horizon: advance(horizon) + 1 / 0

    trainer = Trainer(
        algorithm,
        tracker=MLflowTracker(),
        eval_env=False,
        checkpoints=Checkpoints(every_steps=2),
        callbacks=[grief],
    )
    trainer.run(max_steps=6, progress="none")
    print(f"rank {ranks().rank} ended after {trainer.state[keys.STEPS]} steps: {trainer.stop_reason}", flush=True)


if __name__ == "__main__":
    main()
