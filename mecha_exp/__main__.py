"""`python -m mecha_exp`: a verb such as `ui`, or else the Hydra application."""

import sys

from mecha_exp.cli import main

if __name__ == "__main__":
    sys.exit(main())
