"""Where the tasks of a merge run: processes of this machine, Ray or Slurm."""

from __future__ import annotations

from pathlib import Path

from mecha_exp.cluster import ProcessWorkers, RayWorkers, SlurmWorkers, Workers
from mecha_exp.cluster.slurm import LOCAL, SLURM
from mecha_exp.engine import EngineOptions
from mecha_exp.engine.options import PROCESSES, RAY, REHEARSAL
from mecha_exp.system.cores import available_cores


def workers_for(options: EngineOptions, count: int, folder: Path) -> Workers:
    """The workers that `engine.cluster` names, for so many tasks.

    On this machine the tasks share its cores, and no more processes run at a time than it has. On a cluster
    each has `engine.workers` of them, or as many as this machine has, so that it has a machine for itself
    where all are alike.

    Args:
        folder: for the scripts and logs of jobs, which all machines share.

    Raises:
        MechaError: a library is missing, or the cluster does not answer.
    """
    at_once = min(count, available_cores())
    cores = options.workers or max(1, available_cores() // at_once)
    if options.cluster == PROCESSES:
        return ProcessWorkers(at_once, cores)
    if options.cluster == RAY:
        return RayWorkers(count, cores)
    if options.cluster == REHEARSAL:
        return SlurmWorkers(count, folder, cores, cluster=LOCAL)
    cores = options.workers or available_cores()
    if options.cluster == SLURM:
        return SlurmWorkers(count, folder, cores)
    return RayWorkers(count, cores, address=options.cluster)
