"""`python -m mecha_exp`: a verb such as `ui`, or else the Hydra application."""

import sys

from mecha_exp.system.imports import leave_on_interrupt


def main() -> int:
    """Run the command line; returns the exit status. Ctrl-C ends it with one line from here on."""
    leave_on_interrupt()
    from mecha_exp.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
