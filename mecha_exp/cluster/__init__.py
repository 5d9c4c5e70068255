"""Running independent tasks on workers: of Ray, of Slurm, or processes of this machine.

    with RayWorkers(2) as workers:
        for number, result in workers.run(make, [("a", 1), ("b", 2)]):
            ...

The libraries are extras, and a class imports its own when it is made.
"""

from mecha_exp.cluster.processes import ProcessWorkers
from mecha_exp.cluster.ray import RayWorkers
from mecha_exp.cluster.slurm import SlurmWorkers
from mecha_exp.cluster.workers import LostWorker, Workers

__all__ = ["LostWorker", "ProcessWorkers", "RayWorkers", "SlurmWorkers", "Workers"]
