"""Slurm on the loopback: daemons of the system's packages, in a folder of their own."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "srun", "scancel")
CORES = 2
_PATH = f"{os.environ['PATH']}:/usr/sbin"
_SECONDS = 60


def why_not() -> str | None:
    """Why Slurm cannot be started here; None if it can."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if lacking:
        return f"Slurm is not installed here: {', '.join(lacking)} (apt-get install slurmctld slurmd munge)"
    return None if os.getuid() == 0 else "only root can start Slurm's daemons"


@contextmanager
def slurm_here() -> Iterator[Path]:
    """Start munged, slurmctld and slurmd; yields the configuration, for `SLURM_CONF`."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, ExitStack() as daemons:
        folder = Path(name)
        folder.chmod(0o755)
        configuration = folder / "slurm.conf"
        configuration.write_text(_configuration(folder))
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(configuration)}
        names = {
            "key-file": "munge.key",
            "socket": "munge",
            "pid-file": "pid",
            "seed-file": "seed",
            "log-file": "log",
        }
        munged = [f"--{option}={folder / file}" for option, file in names.items()]
        for command in (
            ["munged", "--foreground", "--force", *munged],
            ["slurmctld", "-D"],
            ["slurmd", "-D"],
        ):
            _start(command, environment, folder, daemons)
        _await_node(environment, folder)
        daemons.callback(_cancel_all, environment)
        yield configuration


def _start(command: list[str], environment: dict[str, str], folder: Path, daemons: ExitStack) -> None:
    with (folder / f"{command[0]}.output").open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    daemons.callback(process.wait)
    daemons.callback(process.terminate)
    if command[0] == "munged":
        _await((folder / "munge").exists, folder)


def _cancel_all(environment: dict[str, str]) -> None:
    """End the jobs that still run: their processes outlive the daemons."""
    deadline = time.monotonic() + _SECONDS
    subprocess.run(["scancel", "--user=root"], env=environment, check=False, capture_output=True)
    while subprocess.run(["squeue", "--noheader"], env=environment, capture_output=True, text=True).stdout:
        if time.monotonic() > deadline:
            raise TimeoutError("jobs of Slurm do not end")
        time.sleep(0.1)


def _await_node(environment: dict[str, str], folder: Path) -> None:
    def is_idle() -> bool:
        command = ["sinfo", "--noheader", "--format=%T"]
        answer = subprocess.run(command, env=environment, capture_output=True, text=True)
        return answer.stdout.strip() == "idle"

    _await(is_idle, folder)


def _await(is_there: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + _SECONDS
    while not is_there():
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text() for path in folder.glob("*.output"))
            raise TimeoutError(f"Slurm does not start:\n{logs}")
        time.sleep(0.1)


def _configuration(folder: Path) -> str:
    ports = [_free_port() for _ in range(2)]
    return f"""
ClusterName=here
SlurmctldHost={platform.node()}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
NodeName={platform.node()} NodeAddr=127.0.0.1 CPUs={CORES} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
