"""A tracker of your own: runs as TensorBoard's event files, beside or in place of MLflow.

Needs `pip install tensorboard`. What a tracker has to have is the protocol `rl8x.Tracker`; a `NullTracker` has all of
it and keeps nothing, so that a subclass defines what it keeps. For Weights & Biases, `wandb.init(mode="offline")` goes
into `start`, `run.log(metrics, step=step)` into `log_metrics`, and `run.finish()` into `finish`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from rl8x import HitsUpperBound, NullTracker, PPOConfig, Trainer
from rl8x.envs import CartPole


class TensorBoardTracker(NullTracker):
    """Writes each run into a folder of event files; rows that come again after a resume replace those before."""

    def __init__(self, folder: str | Path) -> None:
        self.folder, self.location = Path(folder), f"TensorBoard's files in {folder}"

    def start(self, *, params: Mapping[str, object], tags: Mapping[str, str], resume: str | None = None, **how) -> None:
        self.run_id = self.resume_handle = resume or uuid.uuid4().hex[:8]
        self.resumed, self.writer = resume is not None, None
        self.params = params

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if self.writer is None:  # the first row
            purge = step if self.resumed else None
            self.writer = SummaryWriter(str(self.folder / self.run_id), purge_step=purge)
            self.writer.add_text(
                "params", "\n".join(f"    {name}: {value}" for name, value in self.params.items()), step
            )
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def finish(self, status: str) -> None:
        if self.writer is not None:
            self.writer.add_text("status", status)
            self.writer.close()


def main(folder: str = "mlruns/tensorboard", max_steps: int | None = 30) -> Path:
    config = PPOConfig(num_envs=64, horizon=32, gamma=0.99, lr=5e-3, sgd_minibatch_size=512, seed=0, device="cpu")
    trainer = Trainer(config.build(CartPole), tracker=TensorBoardTracker(folder))
    solved = HitsUpperBound("eval/returns/mean", 475)
    trainer.run(steps_per_eval=5, stop_conditions=[solved], max_steps=max_steps)
    print(f"look at it: tensorboard --logdir {folder} (expected: eval/returns/mean rises to 475 or more)")
    return trainer.tracker.folder / trainer.tracker.run_id


if __name__ == "__main__":
    main()
