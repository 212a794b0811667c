"""The command line as `python -m rl8x`, which is how torchrun starts it."""

import sys

from rl8x.processes import leave_working_directory

if __name__ == "__main__":
    leave_working_directory(runs_module=True)  # modules there could shadow our dependencies
    from rl8x.cli.main import main

    sys.exit(main())
