"""Starts ranks by torchrun, several scenarios in one launch, since each imports torch anew; tests read what they wrote.

    found = launch(folder, "scenarios", ["ppo", "stop"])
    found["ppo"][1]    # what rank 1 returned

A scenario is a function of a folder, the same for all ranks, that returns what JSON can hold.
"""

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def environment(**variables):
    """Return the environment of a launch: one thread, the loopback alone, and no user's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "RL8X_RANK"))}
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MLFLOW_DISABLE_TELEMETRY": "true"}
    own |= {"RL8X_RANK_TIMEOUT_S": "150"}  # for machines that are busy
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
    return kept | own | {"PYTHONPATH": path} | variables


def torchrun(arguments, *, num_ranks=2, options=(), folder, **variables):
    """Return the process of torchrun that starts ranks with these arguments, in a folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return subprocess.Popen(
        [*command, *options, *map(str, arguments)],
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process):
    """End torchrun, and with it what it has started."""
    if process.poll() is None:
        process.terminate()
        process.wait(60)


def launch(folder, module, names, *, num_ranks=2, timeout=480, **variables):
    """Run scenarios of a module one after the other, and return by name what each rank returned."""
    arguments = [__file__, module, folder, *names]
    process = torchrun(arguments, num_ranks=num_ranks, folder=folder, **variables)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(process)
        raise AssertionError(process.communicate()[0][-20000:]) from None
    assert process.returncode == 0, output[-20000:]
    return {name: results(folder, name, num_ranks) for name in names}


def results(folder, name, num_ranks=2):
    """Return what each rank returned from a scenario."""
    return [json.loads((Path(folder) / f"{name}-{rank}.json").read_text()) for rank in range(num_ranks)]


def main():
    """Run scenarios as one rank."""
    module, folder, *names = sys.argv[1:]
    scenarios = importlib.import_module(f"tests.ranks.{module}")
    rank = os.environ["RANK"]
    for name in names:
        print(f"{name}, rank {rank}", flush=True)
        try:
            result = getattr(scenarios, name)(Path(folder))
        except Exception:
            traceback.print_exc()
            print(f"scenario {name}, rank {rank}", flush=True)
            raise
        (Path(folder) / f"{name}-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
