"""A fuzzer of all documents: a result or a sentence, within 10 seconds and 2 GB.

python tests/documents/fuzzing.py [SECONDS]      random seeds until Ctrl-C, or for some seconds
python tests/documents/fuzzing.py --seed SEED    one input again, with its traceback
"""

import contextlib
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

SECONDS, MEMORY = 10, 2 << 30
PAUSE = 120
"""Seconds until a worker has imported everything."""
ACCEPTED, REFUSED, FAILED = "accepted", "refused", "failed"


@dataclass
class Report:
    """How many inputs of each kind were accepted, refused and failed, and the failures by seed."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        names = sorted({name for name, _ in self.counts})
        rows = [f"{'kind of document':42} {'inputs':>7} {ACCEPTED:>9} {REFUSED:>8} {FAILED:>7}"]
        for name in [*names, "all"]:
            each = [self._count(name, what) for what in (ACCEPTED, REFUSED, FAILED)]
            rows.append(f"{name:42} {sum(each):7,} {each[0]:9,} {each[1]:8,} {each[2]:7,}")
        return "\n".join(rows)

    def _count(self, name: str, what: str) -> int:
        return sum(
            n for (kind, outcome), n in self.counts.items() if outcome == what and name in (kind, "all")
        )


def one(seed: int, kinds: list) -> tuple[str, str, str]:  # type: ignore[type-arg]
    """The kind, the outcome and the failure of the input of a seed."""
    import hostile

    from mecha_exp.errors import MechaError

    draw = random.Random(seed)
    [kind] = draw.choices(kinds, [kind.weight for kind in kinds])
    raw = hostile.variant(kind.content, draw, kind.is_yaml)
    try:
        kind.put(raw)
    except OverflowError:  # a header that the library cannot write
        return kind.name, REFUSED, ""
    try:
        kind.read()
        return kind.name, ACCEPTED, ""
    except MechaError as error:
        return kind.name, REFUSED, "" if str(error).strip() else "an error without a word"
    except OSError as error:
        from mecha_exp.system.write_errors import write_sentence

        said = write_sentence(error) or (isinstance(error, FileNotFoundError) and error.filename)
        return kind.name, REFUSED if said else FAILED, "" if said else traceback.format_exc()
    except BaseException as error:
        return (
            kind.name,
            FAILED,
            f"{type(error).__name__}: {error}"[:300] + "\n" + traceback.format_exc()[-2500:],
        )
    finally:
        valid = raw if isinstance(kind.content, bytes) else hostile.text_of(kind.content).encode()
        kind.put(kind.content if isinstance(kind.content, bytes) else valid)


def _prepare(folder: str) -> list:  # type: ignore[type-arg]
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    os.chdir(folder)
    import logging
    import warnings

    import kinds

    import mecha_exp.cli.merge  # noqa: F401, so that the limit of memory is one of the input

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    made = kinds.make_kinds()
    for kind in made:
        kind.put(kind.content if isinstance(kind.content, bytes) else kinds_text(kind.content))
    for kind in made:
        try:
            kind.read()
        except Exception as error:
            raise AssertionError(f"{kind.name}: the valid document is refused: {error}") from error
    return made


def kinds_text(content: object) -> bytes:
    import hostile

    return hostile.text_of(content).encode()


def _work(pipe: Connection, folder: str) -> None:
    """Carry out the seeds that come, until None."""
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        kinds = _prepare(folder)
    except BaseException:
        pipe.send(("", FAILED, traceback.format_exc()))
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    pipe.send(("", ACCEPTED, ""))
    while (seed := pipe.recv()) is not None:
        pipe.send(one(seed, kinds))


class _Worker:
    """A process that carries out seeds, in a folder of its own."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="fuzz ")
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, self.folder), daemon=True)
        self.process.start()
        theirs.close()
        _, outcome, fault = self._answer(PAUSE) or ("", FAILED, "it did not start")
        if outcome != ACCEPTED:
            raise RuntimeError(fault)

    def run(self, seed: int) -> tuple[str, str, str] | None:
        """The outcome of a seed; None where the process came to an end, or to none in time."""
        self.pipe.send(seed)
        return self._answer(SECONDS)

    def _answer(self, seconds: float) -> tuple[str, str, str] | None:
        try:
            return self.pipe.recv() if self.pipe.poll(seconds) else None
        except EOFError:
            return None

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def fuzz(seeds: Iterable[int], report: Report | None = None) -> Report:
    """Try the input of each seed."""
    report = report or Report()
    worker = _Worker()
    try:
        for seed in seeds:
            answer = worker.run(seed)
            if answer is None:
                how = "killed it" if not worker.process.is_alive() else f"had no end in {SECONDS} s"
                answer = "(unknown kind)", FAILED, f"seed {seed} {how}"
                worker.end()
                worker = _Worker()
            kind, outcome, fault = answer
            report.counts[kind, outcome] += 1
            if fault:
                report.failures[seed] = f"{kind}: {fault}"
    finally:
        worker.end()
    return report


def _at_random(seconds: float, report: Report) -> Iterator[int]:
    end = time.monotonic() + seconds
    draw = random.SystemRandom()
    while time.monotonic() < end:
        for seed in list(report.failures):
            if seed not in _SHOWN:
                _SHOWN.add(seed)
                sys.stdout.write(f"seed {seed}: {report.failures[seed]}\n\n")
        yield draw.randrange(1 << 48)


_SHOWN: set[int] = set()


def main() -> int:
    if "--seed" in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.write("\n".join(one(int(sys.argv[-1]), _prepare(folder))) + "\n")
        return 0
    report = Report()
    with contextlib.suppress(KeyboardInterrupt):
        fuzz(_at_random(float(sys.argv[1]) if sys.argv[1:] else float("inf"), report), report)
    sys.stdout.write(f"{report}\n")
    return int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(main())
