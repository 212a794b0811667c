"""What is said when a run ends, compared with what MLflow's own client finds and with what the named commands do."""

import contextlib
import re
import shlex
import shutil
import signal
import sqlite3
import sys

import numpy as np
import pytest
from tests.conftest import intercepted
from tests.trainers.helpers import LinesTracker, config, make, run, sends

from rl8x import MemoryTracker, MLflowTracker, NullTracker, Trainer, keys
from rl8x.checkpoint import Checkpoints, files
from rl8x.cli.main import main
from rl8x.envs import CartPole
from rl8x.tracking.protocol import StoreDownError, StoreRefusedError
from rl8x.tracking.runs import shown_path
from rl8x.tracking.store import MLflowStore


def tracker(**options):
    return MLflowTracker(interval_s=0.01, finish_timeout_s=20.0, outage_timeout_s=0.1, **options)


def told(capfd):
    """What was printed since the last look, without the prefix."""
    return [line.removeprefix("rl8x: ") for line in capfd.readouterr().err.splitlines() if line.startswith("rl8x: ")]


def command(line, steps=4):
    """The words of the command that a line names, with a number for N."""
    text = line.partition("rl8x ")[2].partition(", N above")[0]
    return shlex.split(text.replace("--max-steps N", f"--max-steps {steps}"))


def steps_in(client, run_id):
    return [point.step // 32 for point in client.get_metric_history(run_id, "losses/total")]


def with_a_rate(trainer):
    trainer.algorithm.set_lr(1e-4)
    return trainer


def with_a_rate_in_the_end(trainer):
    trainer.callbacks = (lambda trainer, stats: trainer.algorithm.set_lr(1e-4),)
    return trainer


def without_options(trainer):
    folder = trainer.checkpoints.directory
    return Trainer.resume(folder, tracker=trainer.tracker, overrides={"optimizer_config": {}, "lr_schedule": None})


@pytest.mark.parametrize(
    ("changed", "rate", "eps"),
    [(with_a_rate, 1e-4, 1e-5), (with_a_rate_in_the_end, 1e-4, 1e-5), (without_options, 1e-3, None)],
)
def test_params_say_what_a_run_no_longer_has(changed, rate, eps, tmp_path):
    schedule = {"kind": "adaptive", "high": 1e-2}
    trainer = make(trainer={"checkpoints": tmp_path}, lr=1e-3, lr_schedule=schedule, optimizer_config={"eps": 1e-5})
    run(trainer, max_steps=1)
    found = trainer.tracker.params
    assert (found["lr_schedule"]["high"], found["optimizer_config.eps"]) == (1e-2, 1e-5)
    trainer = changed(trainer)
    run(trainer, max_steps=2)
    assert found["lr_schedule"] == {"kind": "step", "points": [[0, rate]]}
    assert found["optimizer_config.eps"] == eps
    assert next(iter(trainer.params)) == "algorithm"  # what is gone comes last
    assert [param for param in found if param.startswith("lr_schedule")] == ["lr_schedule"]


class Sized(CartPole):
    """One whose params are its constructor's arguments."""

    def __init__(self, num_envs, *, sizes=(), share=0.0, **options):
        super().__init__(num_envs, **options)


def test_params_read_the_same_once_a_file_has_had_what_was_given(tmp_path):
    """Files have lists and Python's numbers: else a resume would record changes of what nobody has changed."""
    given = config(model_config={"hidden_sizes": (8, 4)}, optimizer_config={"betas": (np.float32(0.1), 0.9)})
    algorithm = given.build(Sized, sizes=((3, 4), ()), share=np.float32(0.1))
    trainer = Trainer(algorithm, tracker=MemoryTracker(), checkpoints=tmp_path)
    run(trainer, max_steps=1)
    before = dict(trainer.tracker.params)
    assert before["model_config.hidden_sizes"] == before["model.hidden_sizes"] == [8, 4]
    assert (before["env.kwargs.sizes"], before["env.kwargs.share"]) == ([[3, 4], []], float(np.float32(0.1)))
    assert before["optimizer_config.betas"] == [float(np.float32(0.1)), 0.9]
    run(Trainer.resume(tmp_path, tracker=trainer.tracker), max_steps=2)
    assert repr(trainer.tracker.params) == repr(before | {"run.max_steps": 2})


@pytest.mark.parametrize("name", [None, "my run"])
def test_the_end_of_a_run_names_it_as_mlflow_does_and_what_to_resume(name, mlruns, mlflow_client, capfd):
    trainer = make(trainer={"tracker": tracker(run_name=name)})
    trainer.run(max_steps=2, progress="lines")
    lines = told(capfd)
    made = mlflow_client.get_run(trainer.tracker.run_id)
    word = shlex.quote(made.info.run_name)
    assert lines == [
        "stopped after 2 steps: max_steps=2",
        f"run {made.info.run_name} is in sqlite:///{mlruns}/mlflow.db; to look at it: rl8x ui",
        f"to continue training: rl8x resume {word} --max-steps N, N above 2",
    ]
    assert trainer.ending == lines[1:]
    assert made.info.run_name == (name or made.info.run_name) != ""
    assert main([*command(lines[2]), "--progress", "none"]) == 0
    assert steps_in(mlflow_client, made.info.run_id) == [1, 2, 3, 4]
    assert f"rl8x resume {word} --max-steps N, N above 4" in capfd.readouterr().out


def test_a_name_that_would_find_another_run_or_a_folder_is_not_said(mlruns, mlflow_client, tmp_path, capfd):
    (tmp_path / "folder").mkdir()
    for name in ("twice", "twice", "folder", "-x"):
        trainer = make(trainer={"tracker": tracker(run_name=name)})
        run(trainer, max_steps=1)
        word = "twice" if trainer.tracker.whereabouts().ack.name_is_free and name == "twice" else trainer.tracker.run_id
        assert f"rl8x resume {word} " in trainer.ending[-1], name
    expected = ["twice", "twice"]
    assert [run.info.run_name for run in mlflow_client.search_runs(["1"], "attributes.run_name = 'twice'")] == expected
    assert main([*command(trainer.ending[-1]), "--progress", "none"]) == 0
    assert steps_in(mlflow_client, trainer.tracker.run_id) == [1, 2, 3, 4]


@pytest.mark.parametrize(("name", "shown"), [("two\nlines", r"two\nlines"), ("\033[31mred\t", r"\x1b[31mred\t")])
def test_what_does_not_print_in_a_name_is_escaped_in_lines(name, shown, mlruns, capfd):
    trainer = make(trainer={"tracker": tracker(run_name=name)})
    trainer.run(max_steps=2, progress="lines")
    assert f"run {shown} is in " in trainer.ending[0]
    assert all(line.isprintable() for line in trainer.ending)
    assert main(["compare", name, "--output", "figures"]) == 0
    assert f"\n{shown} " in capfd.readouterr().out


def fails_at_2(trainer, stats):
    if stats[keys.STEPS] == 2:
        raise RuntimeError("out of\nluck")


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(
    ("callback", "error", "says", "saved"),
    [
        (sends(signal.SIGTERM, 2), SystemExit, "stopped after 2 steps: interrupted by SIGTERM", 2),
        (fails_at_2, RuntimeError, "failed after 2 steps: RuntimeError: out of luck", 0),
    ],
)
def test_interrupted_and_failed_runs_say_how_to_go_on(callback, error, says, saved, mlruns, mlflow_client, capfd):
    trainer = make(trainer={"tracker": tracker(run_name="mine"), "callbacks": [callback]})
    with pytest.raises(error):
        trainer.run(max_steps=4, progress="lines")
    lines = [line for line in told(capfd) if "ending after this step" not in line]
    folder = shown_path(trainer.checkpoints.directory)
    assert lines[0] == says
    assert lines[2] == f"to continue from step {saved}: Trainer.resume({folder!r}, callbacks=[...]).run()"
    with pytest.warns(RuntimeWarning, match="the run had callbacks"):
        assert main(["resume", "mine", "--progress", "none"]) == 0
    assert steps_in(mlflow_client, trainer.tracker.run_id) == [1, 2, 3, 4]


@pytest.mark.parametrize("spool_dir", [None, "elsewhere"])
def test_rows_that_an_outage_kept_back_are_counted_and_the_command_sends_them(
    spool_dir, mlruns, mlflow_client, monkeypatch, capfd
):
    away = []  # after two rows

    def before(name, *args):
        away.extend(point for point in (args[1] if name == "log_points" else ()) if point.step > 64)
        if away:
            raise StoreDownError("no answer")

    intercepted(monkeypatch, before)
    trainer = make(trainer={"tracker": tracker(spool_dir=spool_dir), "num_eval_envs": 2})
    collect = trainer.algorithm.collect

    def waits(**options):
        assert trainer.state[keys.STEPS] != 2 or trainer.tracker.flush(20)
        return collect(**options)

    monkeypatch.setattr(trainer.algorithm, "collect", waits)
    trainer.run(max_steps=4, steps_per_eval=4, progress="lines")
    lines = told(capfd)
    run_id = trainer.tracker.run_id
    assert steps_in(mlflow_client, run_id) == [1, 2]
    name = mlflow_client.get_run(run_id).info.run_name
    store = f"sqlite:///{mlruns}/mlflow.db"
    # Steps 3 and 4, one evaluation, and what the run came to.
    assert lines[1] == f"4 rows of run {name} did not reach {store} (no answer)"
    folder = f"{spool_dir or 'mlruns/spool'}/{trainer.tracker.journal_folder.name}"
    assert lines[2] == f"to send what waits in {folder}: rl8x sync" + (f" {folder}" if spool_dir else "")
    assert lines[3].startswith("to continue training: rl8x resume ")
    assert not any("rl8x ui" in line for line in lines)
    assert main(command(lines[2])) == 0
    assert "1 sent" in capfd.readouterr().out
    assert steps_in(mlflow_client, run_id) == [1, 2, 3, 4]
    assert mlflow_client.get_run(run_id).info.status == "FINISHED"
    if spool_dir is None:
        monkeypatch.setattr("rl8x.tracking.shipper.MLflowStore", MLflowStore)
        assert main(command(lines[3], 5)) == 0
        assert steps_in(mlflow_client, run_id) == [1, 2, 3, 4, 5]


def damage(database):
    database.write_bytes(b"not a database" * 500)


def of_another_version(database):
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'bf29a5ff90ea'")
        connection.commit()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (damage, r"/mlflow.db is damaged or no database: move it away, and `rl8x ui` makes a new one\)"),
        (
            of_another_version,
            r"another version of MLflow \(schema bf29a5ff90ea, here \w+\): .*`mlflow db upgrade sqlite:",
        ),
    ],
)
def test_a_database_that_takes_nothing_is_not_said_to_have_the_run(spoil, reason, mlruns, mlflow_template, capfd):
    database = mlruns / "mlflow.db"
    spoil(database)
    trainer = make(trainer={"tracker": tracker(run_name="mine")})
    run(trainer, max_steps=3)
    assert re.fullmatch(rf"4 rows of run mine did not reach sqlite:.*{reason}.*", trainer.ending[0])
    assert trainer.ending[1].endswith(": rl8x sync")
    assert command(trainer.ending[2])[1] == f"mlruns/checkpoints/{trainer.tracker.journal_folder.name}"
    assert main(["sync"]) == 1  # which makes no database
    assert re.search(reason.removesuffix(r"\)"), capfd.readouterr().out)
    from mlflow import MlflowClient
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    if (engine := SqlAlchemyStore._engine_map.pop(f"sqlite:///{database}", None)) is not None:  # as in a new process
        engine.dispose()
    shutil.copyfile(mlflow_template, database)
    assert main(command(trainer.ending[1])) == 0
    client = MlflowClient(f"sqlite:///{database}")
    [stored] = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert [point.step for point in client.get_metric_history(stored.info.run_id, "returns/mean")] == [32, 64, 96]


def test_what_a_checkpoint_cannot_say_is_asked_for_in_a_script(mlruns):
    given = {"tracker": LinesTracker(), "eval_env": CartPole(2), "callbacks": [fails_at_2]}
    trainer = make(CartPole(4), trainer={**given, "checkpoints": "saved"})
    run(trainer, stop_conditions=[lambda stats: stats[keys.STEPS] == 1])
    assert trainer.ending == [
        f"run {trainer.tracker.run_id} is in lines.txt",
        "to continue training: Trainer.resume('saved', algorithm=..., tracker=..., eval_env=..., callbacks=[...])"
        ".run(stop_conditions=[...])",
    ]


def test_a_run_whose_end_the_disk_refused_goes_on_from_what_was_saved(tmp_path, monkeypatch, caplog):
    write = files.write

    def refuses(directory, steps, *arguments):
        if steps == 3:
            raise OSError(28, "No space left on device")
        return write(directory, steps, *arguments)

    monkeypatch.setattr(files, "write", refuses)
    options = Checkpoints(tmp_path, every_steps=2)
    trainer = make(trainer={"tracker": NullTracker(), "checkpoints": options})
    run(trainer, max_steps=3)
    assert "no checkpoint at step 3" in caplog.text
    assert trainer.ending == [f"to continue from step 2: rl8x resume {tmp_path}"]
    monkeypatch.undo()
    again = Trainer.resume(tmp_path)
    assert run(again)[keys.STEPS] == 3
    assert again.ending == [f"to continue training: rl8x resume {tmp_path} --max-steps N, N above 3"]


def test_what_was_set_aside_is_counted_at_the_end(mlruns, mlflow_client, monkeypatch, capsys):
    def before(name, *args):
        if name == "log_points" and any(point.name == "losses/total" for point in args[1]):
            raise StoreRefusedError("no losses")

    intercepted(monkeypatch, before)
    trainer = make(trainer={"tracker": tracker(), "checkpoints": False})
    run(trainer, max_steps=3)
    told = trainer.ending
    name = mlflow_client.get_run(trainer.tracker.run_id).info.run_name
    folder = f"mlruns/spool/{trainer.tracker.journal_folder.name}"
    again = f"to try again what is in {folder}/rejected.jsonl: rl8x sync"
    assert told[0] == f"3 entries of run {name} could not be logged; {again}"
    assert told[1].startswith(f"run {name} is in sqlite:")
    assert steps_in(mlflow_client, trainer.tracker.run_id) == []
    assert main(["sync"]) == 0
    assert steps_in(mlflow_client, trainer.tracker.run_id) == [1, 2, 3]
    assert not trainer.tracker.journal_folder.exists()


def test_what_only_the_script_defines_is_resumed_in_the_script(tmp_path, monkeypatch):
    mine = type("Mine", (CartPole,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Mine", mine, raising=False)
    trainer = make(mine, trainer={"tracker": NullTracker(), "checkpoints": tmp_path})
    run(trainer, max_steps=1)
    assert trainer.ending == [f"to continue training: Trainer.resume({str(tmp_path)!r}).run(max_steps=N), N above 1"]
    assert Trainer.resume(tmp_path).run(max_steps=2, progress="none")[keys.STEPS] == 2
    late = Trainer.resume(tmp_path)
    run(late, max_steps=1)  # it is beyond that already
    assert late.ending[-1].endswith(", N above 2")
