"""Tasks for the tests of workers: functions of a module, which workers import."""

import os
import signal
import sys
import time
from pathlib import Path


def describe(number: int) -> tuple[int, int, str, str | None]:
    """The square of a number, and the process, folder and threads of the worker; 3 is an error."""
    if number == 3:
        raise ValueError("three")
    return number**2, os.getpid(), str(Path.cwd()), os.environ.get("OMP_NUM_THREADS")


def die_at_first(times: int, notes: str) -> int:
    """Kill the worker so many times, then return how often that was."""
    deaths = Path(notes)
    before = len(deaths.read_text()) if deaths.exists() else 0
    if before < times:
        deaths.write_text("x" * (before + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return before


def sleep_and_note(notes: str) -> None:
    """Write the worker's process to a file, and wait for a minute."""
    Path(notes).write_text(str(os.getpid()))
    time.sleep(60)


def raise_what_cannot_be_pickled() -> None:
    """Raise an error that holds a lock."""
    import threading

    error = RuntimeError("with a lock")
    error.lock = threading.Lock()
    raise error


def use_gpu(number: int, notes: str, together: int) -> tuple[str, float, float]:
    """The GPU that the worker sees, and from when to when: until so many tasks have begun."""
    began = time.time()
    Path(notes, str(number)).touch()
    while len([*Path(notes).iterdir()]) < together:
        if time.time() > began + 120:
            raise TimeoutError(f"there are not {together} tasks at once")
        time.sleep(0.05)
    return os.environ["CUDA_VISIBLE_DEVICES"], began, time.time()


def mapping_of(arrays: dict) -> tuple[str, int, str]:
    """The GPU that the worker sees, the sum of an array, and the file in which its memory lies."""
    array = arrays["x"]
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if start <= array.ctypes.data < stop:
            return os.environ["CUDA_VISIBLE_DEVICES"], int(array.sum(dtype="int64")), line
    raise LookupError(array.ctypes.data)


def double(number: int, seconds: float, arrays: dict) -> int:
    """Twice a number, after some time; a negative one ends the process."""
    if number < 0:
        os._exit(7)
    if number > 100:
        raise ValueError("too large")
    time.sleep(seconds)
    return 2 * number


def say_and_die(words: str) -> None:
    """Write words to the error stream and end this process."""
    sys.stderr.write(words)
    sys.stderr.flush()
    os._exit(3)
