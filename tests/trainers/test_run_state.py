from pathlib import Path

import pytest
from tests.trainers.test_evaluation import build, run

from rl8x import keys
from rl8x.conditions import Confirmed, HitsUpperBound, Plateau, from_spec
from rl8x.tracking import MemoryTracker, MLflowTracker
from rl8x.trainers import Trainer


def make():
    return Trainer(build(), tracker=MemoryTracker(), num_eval_envs=2)


class Silent(RuntimeError):
    def __str__(self):
        raise KeyError("no words")


def fails(trainer, row):
    raise Silent("lost")


def test_an_exception_that_cannot_say_what_it_is_ends_the_run_as_failed(mlruns, mlflow_client, capsys):
    trainer = Trainer(build(), tracker=MLflowTracker(), num_eval_envs=2, callbacks=[fails])
    with pytest.raises(Silent):
        trainer.run(max_steps=3, progress="lines")
    found = mlflow_client.get_run(trainer.tracker.run_id)
    assert found.info.status == "FAILED"
    assert (trainer.stop_reason, found.data.tags["rl8x.stop_reason"]) == ("Silent", "Silent")
    assert "failed after 1 step: Silent" in capsys.readouterr().err
    assert trainer.ending[-1].startswith("to continue from step ")
    logged = Path(mlflow_client.download_artifacts(found.info.run_id, "traceback.txt")).read_text()
    assert "in fails" in logged
    assert "Silent" in logged


SOLVED = HitsUpperBound("eval/returns/mean", 475)


@pytest.mark.parametrize(
    "condition",
    [
        SOLVED,
        HitsUpperBound("env/steps", 64) & ~Plateau("eval/returns/mean"),
        Confirmed(SOLVED, by=HitsUpperBound("eval/returns/min", 1)),
    ],
    ids=["bound", "composed", "confirmed only after an evaluation"],
)
def test_waiting_for_evaluations_that_nobody_makes_is_refused_before_the_first_step(condition):
    trainer = make()
    with pytest.raises(ValueError, match=r"reads 'eval/returns/mean', but .* give `steps_per_eval`") as caught:
        run(trainer, stop_conditions=[condition], max_steps=2)
    assert "\n" not in str(caught.value)
    assert trainer.state[keys.COLLECTS] == 0
    assert run(trainer, stop_conditions=[condition], max_steps=1, steps_per_eval=1)[keys.STEPS] == 1


def test_a_plain_callable_that_waits_for_them_is_refused_at_the_first_row():
    trainer = make()
    with pytest.raises(ValueError, match=r"reads 'eval/returns/mean', but .* give `steps_per_eval`"):
        run(trainer, stop_conditions=[lambda row: row["eval/returns/mean"] > 475])
    assert trainer.state[keys.STEPS] == 1
    waits = lambda row: row["eval/returns/mean"] > 0 or row[keys.STEPS] > 9  # noqa: E731
    assert run(trainer, stop_conditions=[waits], steps_per_eval=2)[keys.STEPS] == 3


def test_a_confirmation_evaluates_by_itself():
    confirmed = Confirmed(HitsUpperBound("episodes/returns/mean", 1), by=HitsUpperBound("eval/returns/mean", 1))
    assert run(make(), stop_conditions=[confirmed])
    # What it measures others read in the same row.
    stats = run(make(), stop_conditions=[Confirmed(HitsUpperBound(keys.STEPS, 2), by=SOLVED), ~SOLVED])
    assert stats[keys.STEPS] == 2


@pytest.mark.parametrize(("text", "steps"), [("env/steps >= 96", 3), ("env/steps > 96", 4), ("not env/steps <= 96", 4)])
def test_a_run_until_more_than_a_bound_is_as_long_as_one_that_reaches_the_next(text, steps):
    trainer = make()
    stats = run(trainer, stop_conditions=[from_spec(text)])
    assert stats["algorithm/steps"] == steps
    assert trainer.record.run.most_steps == pytest.approx(3)
