"""Starts ranks by torchrun, several scenarios in one launch; tests read what they wrote.

    found = launch(folder, "scenarios", ["ppo", "stop"])
    found["ppo"][1]    # what rank 1 returned

A scenario is a function of a folder, the same for all ranks, that returns what JSON can hold. Ranks are forked of
torchrun (`--start-method=fork --run-path`), which has imported what they need: each would take seconds for it.
"""

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

from tests.forks import ForkedPython

ROOT = Path(__file__).parent.parent.parent
# torchrun, after imports.
_FORKING = """
import gc; gc.disable()
import tests.ranks.scenarios
{also}
gc.freeze(); gc.enable()
from torch.distributed.run import main
main()
"""
# What loads MLflow with what it needs for a database.
TRACKS = "import mlflow; import mlflow.store.tracking.sqlalchemy_store"


def environment(**variables):
    """Return the environment of a launch: one thread, the loopback alone, and no user's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "RL8X_RANK"))}
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MLFLOW_DISABLE_TELEMETRY": "true"}
    own |= {"RL8X_RANK_TIMEOUT_S": "150"}  # for machines that are busy
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
    return kept | own | {"PYTHONPATH": path} | variables


def torchrun(arguments, *, options=(), folder, forks=None, **variables):
    """Return the process of torchrun that starts two ranks with these arguments, in a folder.

    With `forks`, which says what else is imported before, ranks are forks: the script calls `as_a_script`.
    """
    begins = ["-m", "torch.distributed.run"]
    if forks is not None:
        begins = ["-c", _FORKING.format(also=forks), "--start-method=fork", "--run-path"]
    command = [sys.executable, *begins, "--standalone", "--nproc-per-node=2"]
    start = subprocess.Popen if forks is None else ForkedPython
    return start(
        [*command, *options, *map(str, arguments)],
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process):
    if process.poll() is None:
        process.terminate()
        process.wait(60)


def launch(folder, module, names):
    """Run scenarios of a module one after the other, and return by name what each rank returned."""
    process = torchrun([__file__, module, folder, *names], folder=folder, forks="")
    try:
        output, _ = process.communicate(timeout=480)
    except subprocess.TimeoutExpired:
        end(process)
        raise AssertionError(process.communicate()[0][-20000:]) from None
    assert process.returncode == 0, output[-20000:]
    return {name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)] for name in names}


def as_a_script(main):
    """Do in a rank that may be forked what one does that is started: it knows who it is, and ends as a script ends."""
    from rl8x import distributed

    if not distributed.ranks().size > 1:
        distributed._PRESENT = distributed._of_torchrun()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):  # torchrun's own are inherited
            signal.signal(number, signal.SIG_DFL)
        atexit._clear()
    try:
        main()
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()


def main():
    module, folder, *names = sys.argv[1:]
    scenarios = importlib.import_module(f"tests.ranks.{module}")
    rank = os.environ["RANK"]
    for name in names:
        print(f"{name}, rank {rank}", flush=True)
        result = getattr(scenarios, name)(Path(folder))
        (Path(folder) / f"{name}-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    as_a_script(main)
