"""The command line as `python -m rl8x`, which is how torchrun starts it."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path.pop(0)  # the working directory, whose modules would be taken for our dependencies
    from rl8x.cli.main import main

    sys.exit(main())
