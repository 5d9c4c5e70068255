"""`python -m mecha_exp demo`: the first sweep of a newcomer, on bundled models."""

from __future__ import annotations

from mecha_exp.cli import application
from mecha_exp.cli.arguments import make_parser
from mecha_exp.terminal.console import print_line, program_name

SWEEP = ("recipe=ties", "alpha=0.3,0.5,0.7")


def main(arguments: list[str]) -> int:
    """Run the demo's sweep, and say what to type next."""
    parser = make_parser(
        "demo",
        f"Merge and measure three bundled experts at three strengths: {' '.join(SWEEP)} -m. What it makes "
        "is in the folder outputs.",
        "example: python -m mecha_exp demo tracking=none",
    )
    parser.add_argument("setting", nargs="*", metavar="NAME=VALUE", help="more settings of the sweep")
    command = [*SWEEP, *parser.parse_args(arguments).setting, "-m"]
    program = program_name()
    print_line(f"$ {program} {' '.join(command)}")
    status = application(command)
    if status == 0:
        print_line(
            f"next, with another method beside it: {program} recipe=ties,task_arithmetic {SWEEP[1]} -m\n"
            f"or models of your own: {program} recipe=ties models.base=BASE 'models.experts=[A,B]' "
            "output.path=merged"
        )
    return status
