"""A training as a user's script would have it, in which rank 1 comes to grief; started by `test_failures`.

job.py raise@1 die@3    # how and after which step, each time that torchrun has started it
"""

import os
import signal
import subprocess
import sys

from tests.forks import ForkedPython
from tests.ranks import problems
from tests.ranks.launch import as_a_script

from rl8x import Checkpoints, MLflowTracker, Trainer, keys
from rl8x.distributed import ranks

PATIENT = {"finish_timeout_s": 150.0, "outage_timeout_s": 150.0}  # its process comes last where it is busy
SEED, STEPS = (int(text) if (text := os.environ.get(name)) else None for name in ("JOB_SEED", "JOB_STEPS"))


def main():
    griefs = dict(enumerate(sys.argv[1:]))
    how, step = griefs.get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), "none@0").split("@")
    algorithm = problems.ppo(seed=SEED).build(problems.CartPole, time_limit=30)

    def grief(trainer, row):
        if ranks().rank != 1 or row[keys.STEPS] != int(step):
            return
        print(f"rank 1 comes to grief: {how}", flush=True)
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        advance = algorithm.env.noise
        algorithm.env.noise = lambda horizon: advance(horizon) + 1 / 0

    saves = {"eval_env": False, "checkpoints": Checkpoints(every_steps=2), "callbacks": [grief]}
    trainer = Trainer(algorithm, tracker=MLflowTracker(**PATIENT), **saves)
    trainer.run(max_steps=STEPS or 6, progress="none")
    print(f"rank {ranks().rank} ended after {trainer.state[keys.STEPS]} steps: {trainer.stop_reason}", flush=True)


if __name__ == "__main__":
    if "mlflow" in sys.modules:  # a fork, whose process for MLflow is one too
        subprocess.Popen = ForkedPython
    as_a_script(main)
