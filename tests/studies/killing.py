"""Kill a forked process at a chosen call, as -9 would at that instant."""

from __future__ import annotations

import os
import signal


def killed_at(run, owner, name, when="before", number=1):
    """Call `run` in a fork that is killed before or after its n-th call of an attribute, which it must reach."""
    pid = os.fork()
    if pid == 0:
        try:
            whole, calls = getattr(owner, name), []

            def call(*args, **kwargs):
                calls.append(name)
                is_now = len(calls) == number
                if is_now and when == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                returned = whole(*args, **kwargs)
                if is_now:
                    os.kill(os.getpid(), signal.SIGKILL)
                return returned

            setattr(owner, name, call)
            run()
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), f"{name} was not called {number} times"
