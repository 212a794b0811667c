"""MAPPO and IPPO beside BenchMARL's MAPPO, on one thread: returns, and speed.

    python -m benchmarks.agents --benchmarl PYTHON      # hours, a run for each seed of each work; goes on after a cut
    python -m benchmarks.agents --benchmarl PYTHON --speed

BenchMARL (1.5) lies in an environment of its own, whose Python is given. It trains as it is shipped: its task files, 10
copies x 600 steps, 45 epochs of minibatches of 400 steps of copies, two layers of 256 under tanh; rl8x by `OWN` and a
work's `own`, chosen on seeds 10 and 11, and its other defaults. An agent step is a step of one agent in one copy.
Afterwards each plays `EPISODES` new episodes with its final policy, deterministic; the return of an episode is the mean
over its agents of their sums of rewards. Seconds are of the processor, of the training alone and of what was compiled
for it, from an empty cache.

The speed is that of iterations of training, after the first: of BenchMARL in VMAS's simple_spread, and of rl8x in
`Spread`, compiled, by BenchMARL's sizes and by its own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import ask, carried, environment
from benchmarks.results import RESULTS, Row, about, held, save, short, table, version

OUT = RESULTS / "agents.json"
EPISODES = 64
OWN: dict[str, Any] = {"num_envs": 32, "horizon": 32, "sgd_minibatch_size": 512, "lr": 5e-4}
OWN |= {"model_config": {"hidden_sizes": [256, 256]}}
_BALANCE = {"random_package_pos_on_line": True, "package_mass": 5}
_NAVIGATION = {"collisions": True, "agents_with_same_goal": 1, "observe_all_goals": False, "shared_rew": False}
_NAVIGATION |= {"split_goals": False, "lidar_range": 0.35, "agent_radius": 0.1}
# Steps are those of agents; the options are those of BenchMARL's task files but for the steps of an episode of the
# first, and are given to both.
WORKS: dict[str, dict[str, Any]] = {
    "simple_spread": {"agents": 3, "steps": 1_000_000, "seeds": 5, "limit": 25, "options": {"local_ratio": 0.5}},
    "balance": {"agents": 4, "steps": 300_000, "seeds": 3, "limit": 100, "options": _BALANCE, "own": {"gamma": 0.95}},
    "navigation": {"agents": 3, "steps": 300_000, "seeds": 3, "limit": 100, "options": _NAVIGATION},
}
RUNS = (("rl8x", "mappo"), ("rl8x", "ippo"), ("benchmarl", "mappo"))
# rl8x's names of what BenchMARL's files say; a minibatch of 400 steps of copies has 1,200 of three agents.
SIZES: dict[str, Any] = {"num_envs": 10, "horizon": 600, "num_sgd_iters": 45, "sgd_minibatch_size": 1200}
SIZES |= {"model_config": {"hidden_sizes": [256, 256], "activation": "tanh"}, "lr": 5e-5, "lr_schedule": None}
SIZES |= {"gae_lambda": 0.9, "max_grad_norm": 5.0, "vf_clip_param": None, "normalize_advantages": False}
SIZES |= {"normalize_observations": False, "normalize_rewards": False}
SPEEDS = (("benchmarl", "its own"), ("rl8x", "BenchMARL's"), ("rl8x", "its own"))
ITERATIONS = 3


def timed(train: Callable[[], Any]) -> Row:
    """Train, and return the seconds: of this process, and of all that it starts, which are looked at once a second."""
    used: dict[str, float] = {}
    done, first, wall = threading.Event(), time.process_time(), time.perf_counter()

    def look() -> None:
        while not done.wait(1.0):
            used.update(of_session())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        train()
    finally:
        wall = time.perf_counter() - wall
        done.set()
        looking.join()
    used[str(os.getpid())] = time.process_time() - first
    return {"cpu_s": round(sum(used.values()), 1), "wall_s": round(wall, 1)}


def of_session() -> dict[str, float]:
    """Return the processor's seconds of the processes of this session, by their numbers."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == os.getsid(0):
                found[path.parent.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def of_rl8x(name: str, algorithm: str, seed: int, steps: int) -> Row:
    """Train and test rl8x's PPO."""
    from rl8x import HitsUpperBound, NullTracker, PPOConfig, Trainer

    work = WORKS[name]
    if name == "simple_spread":
        env, make = "rl8x.envs.PettingZooEnv", f"mpe2.{name}_v3:parallel_env"
        kwargs = {"make": make, "N": work["agents"], "max_cycles": work["limit"]}
    else:
        env, kwargs = "rl8x.envs.VmasEnv", {"scenario": name, "n_agents": work["agents"], "time_limit": work["limit"]}
    config = PPOConfig(**OWN, **work.get("own", {}), seed=seed, device="cpu", num_threads=1)
    state = "shared" if algorithm == "mappo" else None
    made = config.build(env, **kwargs, **work["options"], state=state, team_return="mean")
    trainer = Trainer(made, tracker=NullTracker(), checkpoints=False, num_eval_envs=EPISODES)
    row = timed(lambda: trainer.run(stop_conditions=[HitsUpperBound("env/steps", steps)], progress="none"))
    tested = trainer.eval()
    assert tested["eval/episodes/ended"] == EPISODES
    return row | {"agent_steps": trainer.state["env/steps"], "mean_return": round(tested["eval/returns/mean"], 4)}


def experiment(name: str, seed: int, agent_steps: int, *, pettingzoo: bool) -> Any:
    """Make a training of BenchMARL's MAPPO, whose frames are steps of copies; spread has discrete actions."""
    import torch
    from benchmarl.algorithms import MappoConfig
    from benchmarl.environments import PettingZooTask, VmasTask
    from benchmarl.experiment import Experiment, ExperimentConfig
    from benchmarl.models.mlp import MlpConfig

    if pettingzoo:  # TorchRL looks for it where PettingZoo had it before
        import mpe2.all_modules

        sys.modules |= {"pettingzoo.mpe": mpe2, "pettingzoo.mpe.all_modules": mpe2.all_modules}
    torch.set_num_threads(1)
    work = WORKS[name]
    config = ExperimentConfig.get_from_yaml()
    config.max_n_frames = -(-agent_steps // work["agents"])
    config.loggers, config.create_json, config.render, config.evaluation = [], False, False, False
    config.evaluation_episodes, config.prefer_continuous_actions = EPISODES, name != "simple_spread"
    task = (PettingZooTask if pettingzoo else VmasTask)[name.upper()].get_from_yaml()
    task.config["max_cycles" if pettingzoo else "max_steps"] = work["limit"]
    assert work["agents"] == task.config["N" if pettingzoo else "n_agents"]
    assert task.config.items() >= work["options"].items() or pettingzoo != (name == "simple_spread")
    return Experiment(
        task=task,
        algorithm_config=MappoConfig.get_from_yaml(),
        model_config=MlpConfig.get_from_yaml(),
        critic_model_config=MlpConfig.get_from_yaml(),
        seed=seed,
        config=config,
    )


def of_benchmarl(name: str, algorithm: str, seed: int, steps: int) -> Row:
    """Train and test BenchMARL's MAPPO."""
    made = experiment(name, seed, steps, pettingzoo=name == "simple_spread")
    close, played = made.close, []
    made.close = lambda: None  # a run closes the environment of evaluations
    row, logger, (group,) = timed(made.run), made.logger, made.group_map
    made._on_evaluation_end = played.extend
    made.evaluate()
    assert len(played) == EPISODES
    lengths = [int(logger._get_global_done(each).flatten().nonzero()[0]) + 1 for each in played]
    returns = [
        float(logger._get_reward(group, each)[:length].sum(0).mean())
        for each, length in zip(played, lengths, strict=True)
    ]
    close()
    steps = made.total_frames * WORKS[name]["agents"]
    return row | {"agent_steps": steps, "mean_return": round(sum(returns) / EPISODES, 4)}


def speed_of(library: str, settings: str) -> Row:
    """Return the agent steps a second of the processor, of MAPPO's iterations after the first."""
    marks: list[float] = []
    if library == "rl8x":
        from rl8x import NullTracker, PPOConfig, Trainer

        given = SIZES if settings == "BenchMARL's" else OWN
        config = PPOConfig(**given, seed=0, device="cpu", num_threads=1, execution="compile")
        made = config.build("Spread", num_agents=3, state="shared")
        trainer = Trainer(made, tracker=NullTracker(), checkpoints=False, eval_env=False)
        for _ in range(ITERATIONS + 1):
            trainer.step()
            marks.append(time.process_time())
        steps = made.env.num_envs * config.horizon
    else:
        steps = 3 * 6000  # of three agents
        theirs = experiment("simple_spread", 0, (ITERATIONS + 1) * steps, pettingzoo=False)
        theirs.logger.commit = lambda: marks.append(time.process_time())  # the last of each iteration
        theirs.run()
    return {"steps_per_s": round(steps * ITERATIONS / (marks[-1] - marks[0]), 1)}


def answer(asked: dict[str, Any]) -> Row:
    """Tell a speed, or of a training."""
    library = asked["library"]
    if "settings" in asked:
        row = speed_of(library, asked["settings"])
    else:
        train = {"rl8x": of_rl8x, "benchmarl": of_benchmarl}[library]
        row = train(*(asked[key] for key in ("work", "algorithm", "seed", "steps")))
    return row | {"version": version(library)}


def report(result: Row) -> str:
    """Return tables of what was measured: returns and seconds of each work, and speeds."""
    lines: list[list[str]] = []
    for name, (library, algorithm) in itertools.product(WORKS, RUNS):
        tags = {"work": name, "library": library, "algorithm": algorithm}
        if rows := [row for row in result.get("rows", []) if row.items() >= tags.items()]:
            returns, seconds = ([row[key] for row in rows] for key in ("mean_return", "cpu_s"))
            cells = [str(len(rows)), _spread(returns), f"{statistics.median(seconds):.0f}"]
            lines.append([f"`{name}`", f"{named(library)}, {algorithm.upper()}", *cells])
    header = ["work", "library, algorithm", "seeds", "mean return", "seconds"]
    speeds = [[named(row["library"]), row["settings"], short(row["steps_per_s"])] for row in result.get("speed", [])]
    shown = ((header, lines), (["MAPPO in spread", "settings", "agent steps/s"], speeds))
    return "\n\n".join(table(head, rows) for head, rows in shown if rows)


def named(library: str) -> str:
    """Return how a library writes its name."""
    return {"benchmarl": "BenchMARL"}.get(library, library)


def _spread(values: Sequence[float]) -> str:
    """Write a mean and, of several values, its standard error."""
    error = f" +- {statistics.stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{error}"


def main() -> None:
    """Measure what has no result yet; a result is written as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmarl", metavar="PYTHON", help="the Python that has BenchMARL, which else is left out")
    parser.add_argument("--works", nargs="*", default=[*WORKS], choices=[*WORKS])
    parser.add_argument("--share", type=float, default=1.0, help="of the steps: to try, with --out")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--speed", action="store_true", help="measure the speed alone, anew")
    options = parser.parse_args()
    pythons = {"rl8x": sys.executable, "benchmarl": options.benchmarl}
    group, works = (
        "rows",
        [
            {"work": name, "algorithm": algorithm, "library": library, "seed": seed}
            for seed in range(max(work["seeds"] for work in WORKS.values()))
            for name in options.works
            for library, algorithm in RUNS
            if seed < WORKS[name]["seeds"]
        ],
    )
    if options.speed:
        group, works = "speed", [{"library": library, "settings": settings} for library, settings in SPEEDS]
    for tags in works:
        result = {"rows": [], **about(), **held(options.out)}
        others = [row for row in result.get(group, []) if not row.items() >= tags.items()]
        if not (python := pythons[tags["library"]]) or (group == "rows" and len(others) < len(result["rows"])):
            continue
        steps = {} if options.speed else {"steps": round(WORKS[tags["work"]]["steps"] * options.share)}
        env = environment(1, carried() | {"PYTHONWARNINGS": "ignore"})
        row = tags | ask(python, "agents", json.dumps({"threads": 1, **tags, **steps}), env)
        print(row, file=sys.stderr, flush=True)
        if "error" not in row:
            save(options.out, {**result, group: [*others, row]})


if __name__ == "__main__":
    main()
