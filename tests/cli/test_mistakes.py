"""What commands refuse: each a line on standard error and exit code 2, with nothing printed and nothing written."""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.studies.synthetic import SUPPORTS, evaluations, write_study

from rl8x.cli.main import main

SMALL = "--num-envs 4 --horizon 4 --no-tracking --device cpu --progress none"
# Put behind the command's name
ALWAYS = {
    "train": SMALL,
    "bench": "num_envs=4 horizon=4 model_config.hidden_sizes=[8] device=cpu tracking=false --seconds 0",
    "report": "--no-log",
}
STUDY = """\
{env: CartPole, max_steps: 1, algorithm_config: {num_envs: 8, horizon: 8, device: cpu}, tracking: false,
train: {fixed: {length: 0.5}, wide: {length: {uniform: [0.25, 1.0]}}}, test: {length: [0.25, 0.5, 2.0]}}
"""
# A call, as it is typed, and a part of the line that it gets; `runs` has checkpoints, `poles` is a study.
MISTAKES = r"""
trian  ->  No such command 'trian'; there are train, resume, study, play, collect, export, envs, tuned, bench, ui, cache, report, compare, sync, doctor. Did you mean 'train'? Try 'rl8x --help'.
--verion  ->  No such option '--verion'
ui --port 0  ->  0 is not in the range
ui --tracking-uri sqlit:///x.db  ->  unknown scheme 'sqlit'; legal:
ui --tracking-uri sqlite:///none/x.db  ->  there are no runs:
sync --to ''  ->  Invalid value for '--to': it is empty. Leave the option out for its default.
sync none  ->  there is no folder
cache list  ->  Got unexpected extra argument (list)
tuned CartPole sac  ->  no tuned setting of CartPole by sac; there are those by ppo, dqn, pqn.
compare  ->  there are no runs:

train  ->  no environment is named
train CartPole Pendulum  ->  one environment at most; got CartPole and Pendulum
train CartPole env=Pendulum  ->  one environment at most; got CartPole and env=Pendulum.
train run.yaml  ->  To read a run file: rl8x train -f run.yaml
train -f nowhere.yaml  ->  nowhere.yaml: cannot be read
train -f a.yaml --file b.yaml  ->  one file at most; got -f a.yaml and -f b.yaml. Write them as one
train --num-env 3  ->  '--num-envs'
train CartPole --device cpu --execution graph  ->  execution='graph' needs a CUDA device; got cpu.
train CartPole hidden_sizes=[8]  ->  Here that is `model_config={"hidden_sizes": [64, 64]}`.
train CartPole 'env_config.length=[1, 2, 3]' --dry-run  ->  has 3 values for
train CartPole env_kwargs.time_limt=9  ->  env_kwargs: CartPole takes num_envs, device, seed, time_limit
train CartPole env_kwargs.seed=9  ->  env_kwargs: `seed` is a hyperparameter. Put it under `algorithm_config`
train CartPole --lr=  ->  Invalid value for '--lr': it is empty. Leave the option out for its default.
train CartPole --lr null  ->  `lr` must have a value; got none.
train CartPole --stop 'plateau: {name: ['  ->  unknown stop condition
train CartPole --stop 'eval/returns/mean >= 475' --dry-run  ->  this run makes no evaluations: give `steps_per_eval`
train CartPole checkpoints.evry_steps=3  ->  every_steps
train CartPole --resume nothing  ->  there is no run 'nothing'
train CartPole --tracking --tracking-uri sqlite:///there.txt/x/mlflow.db --dry-run  ->  runs cannot be kept in
train CartPole checkpoints.directory=there.txt/a  ->  there.txt/a cannot hold checkpoints
train CartPole checkpoints.directory=/proc/a --dry-run  ->  /proc/a cannot hold checkpoints (No such file or directory): give another folder by checkpoints.directory=FOLDER,
train CartPole --max-steps 1 checkpoints.directory=runs  ->  runs has checkpoints of another run: give this run a directory of its own, or resume that by `rl8x resume
train CartPole --horizons-per-env-reset 3 --steps-per-eval 4 --eval-env false  ->  got 4 and 3. Try 6
train HalfCheetah --tuned  ->  no tuned setting of HalfCheetah. Did you mean 'HalfCheetah-v5'? There
train --tuned  ->  --tuned needs the environment's name, as in `rl8x train CartPole --tuned`. There are Acrobot (ppo, dqn
train CartPole --tuned -f run.yaml  ->  --tuned is a run file itself, so that -f run.yaml has no place beside it: give one of the two.
train CartPole --learning-rate 1e-3  ->  No such option '--learning-rate'. It is '--lr' here. Try
train --env CartPole  ->  No such option '--env'. Here that is what `build` takes; the first word of `rl8x train CartPole-v1`.
train CartPole --total-timesteps 9  ->  `--stop "env/steps >= N"`. Try
train CartPole learning_rate=1e-3  ->  unknown key 'learning_rate': it is 'lr' here. Put it under `algorithm_
train CartPole --algorithm a2c  ->  Here that is `PPOConfig(num_sgd_iters=1)`
train ALE/Pong-v5  ->  `pip install ale-py`, and name it 'ale_py:ALE/Pong-v5'.
train -f foreign.yaml  ->  PPOConfig has no option 'clip_range'. It is 'clip_param' here.
resume nothing  ->  there is no run 'nothing'

bench CartPole --modes eager fast  ->  --modes: on cpu there are eager, compile; got 'fast'
bench CartPole --precisions tf32  ->  --precisions: on cpu there are fp32, bf16; got 'tf32'
bench CartPole --json there.txt/folder.json  ->  there.txt is no folder. Give another --json.
bench CartPole --json .  ->  --json names a file to write; . is a folder.
play runs --output there.gif  ->  --output names a file to write; there.gif is a folder.

study  ->  name the study's file
study tiny.yaml  ->  rl8x study -f tiny.yaml
study -f tiny.yaml epsodes=1  ->  Did you mean 'episodes'
study -f tiny.yaml test.lenght=[1]  ->  no parameter 'lenght'
study -f tiny.yaml 'vary.lr={uniform: [0, 1]}'  ->  say by `trials`
study -f tiny.yaml --cluster tcp://nowhere --dry-run  ->  give backend='dask' too
study -f tiny.yaml --backend ray  ->  pip install 'rl8x[ray]'
report poles --baseline wide  ->  'wide' is no group of this study; there are fixed; uniform.
report poles --parameters length,mass  ->  'mass' is no test parameter with several values; there are length.
report poles --level 95  ->  95.0 is not in the range
report poles --output there.txt  ->  there.txt is no folder. Give another --output.
compare x --output there.txt/below  ->  there.txt is no folder. Give another --output.
compare x --level inf  ->  inf

play nothing  ->  there is no run 'nothing'
play runs --output a.avi  ->  a film is one of .gif, .mp4; got '.avi'
play runs --output runs/lock/a.gif  ->  lock is no folder. Give another --output.
play runs env_config.lenght=1  ->  no parameter 'lenght'
play runs env_config=abc  ->  env_config must be values by name
play runs lr=1  ->  only env_config.NAME=VALUE may follow RUN; got lr=1
play runs --grid length  ->  --grid is NAME=V1,V2,..., such as length=0.25,0.5,1; got 'length'
play runs --grid length=1 --grid length=2  ->  --grid may be given once or twice, for different
play runs --grid length=1,2 'env_config.gravity=[1, 2, 3]'  ->  got length for 2, gravity for 3
play runs --env Pendulum  ->  the policy is for observations of Box(
collect runs --transitions 9 --seed 18446744073709551616  ->  18446744073709551616 is not in the range 0<=x<=9223372036854775807
collect runs  ->  Missing option '--transitions'
collect Cartpole --random --transitions 5  ->  Did you mean CartPole
collect runs --transitions 5 --output runs  ->  runs is there already: give another --output
collect runs --transitions 5 --output /proc/x  ->  nothing can be written to /proc:
collect runs --transitions 5 --random --deterministic  ->  --random leaves nothing for
collect runs --transitions 5 --format minari  ->  needs Minari: pip install 'minari[hdf5]'
export runs --alias champion  ->  give --register too
export runs --register policies --output there.pt2  ->  there are no runs:
export runs --register x/y  ->  --register: MLflow's models have names without '/' and ':'; got 'x/y'.
export runs --register x --alias 'a b'  ->  --alias: letters, digits, '_' and '-', and not 'latest' or 'v1'; got 'a b'.
export runs --output policy.tflite  ->  no format 'tflite'
export runs --sampled  ->  is the policy itself
export runs --output there.txt/policy.safetensors  ->  there.txt is no folder. Give another --output.
export runs --checkpoint best  ->  is the best of a metric
resume runs max_steps=3  ->  `max_steps` is none. Its options are --max-steps,
resume runs algorithm_config.lr=abc  ->  `lr` must be a number; got 'abc'.
resume runs CartPole  ->  is KEY=VALUE, as in lr=3e-4 or env_config.length=0.4; got 'CartPole'.
train CartPole --lr 0.5 --resume runs  ->  `lr` was
"""  # noqa: E501


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        more = "--max-steps 1 checkpoints.directory=runs model_config.hidden_sizes=[8] --eval-env false"
        assert main(["train", "CartPole", *SMALL.split(), *more.split()]) == 0
        table = evaluations(grid={"length": np.linspace(0.1, 2.0, 4)})
        write_study(Path("poles"), table, SUPPORTS, name="poles", env="CartPole")

        Path("tiny.yaml").write_text(STUDY)
        Path("foreign.yaml").write_text("{env: CartPole, algorithm_config: {clip_range: 0.2}}")
        Path("there.txt").write_text("mine")
        Path("there.gif").mkdir()
        yield folder


@pytest.mark.parametrize("line", MISTAKES.strip().replace("\n\n", "\n").split("\n"))
def test_a_mistake_is_one_line(line, folder, monkeypatch, capsys):
    bench, find = importlib.import_module("rl8x.cli.bench"), importlib.util.find_spec
    monkeypatch.setattr(bench, "_in_fresh_process", lambda job, timeout_s: bench.measure(job))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "ray" else find(name, *of))
    for name in ("minari", *(name for name in sys.modules if name.startswith("minari."))):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    before = sorted(folder.rglob("*"))
    call, message = line.split("  ->  ")
    command, *words = shlex.split(call)
    assert main([command, *ALWAYS.get(command, "").split(), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]  # before it `rl8x bench` may say what it has measured
    assert last.startswith("rl8x: error: ")
    assert message in last
    assert command == "bench" or captured.err.count("\n") == 1
    assert sorted(folder.rglob("*")) == before
