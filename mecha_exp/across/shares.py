"""Shares of a merge: which files of the output each task makes, so that all move about as many bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mecha_exp.checkpoint import Destination
from mecha_exp.checkpoint.transaction.journal import Note, finished_keys
from mecha_exp.checkpoint.transaction.lock import free_lock
from mecha_exp.checkpoint.transaction.staging import staged_folder
from mecha_exp.engine import Plan
from mecha_exp.engine.planner.keys.key_plan import KeyPlan
from mecha_exp.engine.runtime.resumption import resume_token
from mecha_exp.errors import MergeError


@dataclass(frozen=True)
class ShardFile:
    """A file of the output.

    Attributes:
        name: its path in the folder.
        prefix: of its keys in the whole model, which the file leaves out.
        keys: the plans of the keys in it that are computed or copied.
        read, written: bytes.
    """

    name: str
    prefix: str
    keys: tuple[KeyPlan, ...] = field(repr=False)
    read: int
    written: int

    def finished(self, folder: Path, token: str) -> Mapping[str, Note]:
        """The finished keys of a file that lies unfinished in a folder, by their names in the whole model."""
        notes = finished_keys(folder / self.name, token)
        return {self.prefix + key: note for key, note in notes.items()}


@dataclass(frozen=True)
class Share:
    """The files that one task makes.

    Attributes:
        number: of the task, from 1.
        files: in the order of the model.
    """

    number: int
    files: tuple[ShardFile, ...]

    @property
    def keys(self) -> tuple[KeyPlan, ...]:
        """The plans of the keys that are computed or copied."""
        return tuple(key for file in self.files for key in file.keys)

    @property
    def read(self) -> int:
        """The bytes of the inputs that it reads, without trips over the whole model."""
        return sum(file.read for file in self.files)

    @property
    def written(self) -> int:
        """The bytes that it writes."""
        return sum(file.written for file in self.files)

    def is_made(self, folder: Path, token: str) -> bool:
        """Whether nothing is left to do."""
        return all(
            key.key in finished
            for file in self.files
            for finished in [file.finished(folder, token)]
            for key in file.keys
        )

    def paths(self, folder: Path) -> list[Path]:
        """The files while they lie unfinished in a folder."""
        return [folder / file.name for file in self.files]

    def free_locks(self, folder: Path) -> None:
        """Delete the locks of a worker that is known to be gone."""
        for path in self.paths(folder):
            free_lock(path)


@dataclass(frozen=True)
class SharedMerge:
    """A merge of one model by several tasks.

    Attributes:
        plan: of the whole model.
        destination: the folder.
        token: what all tasks must agree in, since it decides the bytes; see `resume_token`.
        shares: one for each task; a task has none where there are fewer files than tasks.
    """

    plan: Plan
    destination: Destination
    token: str
    shares: tuple[Share, ...]

    @property
    def staged(self) -> Path:
        """The hidden folder in which the files are made."""
        return staged_folder(self.destination.path)

    @classmethod
    def of(cls, plan: Plan, count: int) -> SharedMerge:
        """The merge of a plan by so many tasks.

        Raises:
            MergeError: several models, an output that is not a folder of several files, or models in memory.
        """
        if len(plan.jobs) != 1:
            raise MergeError(f"engine.across makes one model at a time, and there are {len(plan.jobs)}.")
        destination = plan.destination(0)
        if destination is None:
            raise MergeError("engine.across needs an output on a disk that all tasks see: name a folder.")
        if destination.address is not None:
            raise MergeError(
                f"engine.across: tasks make their files on a disk, and {destination.address} is not one. "
                "Write to a disk that all machines share, and upload the result with the store's own tool."
            )
        token = resume_token(plan, 0)
        if token is None:
            raise MergeError(
                "engine.across: models in memory are known to one process only. Save them first."
            )
        files = files_of(plan, destination) if destination.is_folder else []
        if len(files) < 2:
            raise MergeError(
                f"engine.across={count}: {destination.path} is written as one file, which one process makes. "
                "Let the output be a folder of several, as output.shard_size=5GB does."
            )
        return cls(plan, destination, token, distribute(files, count))


def distribute(files: list[ShardFile], count: int) -> tuple[Share, ...]:
    """Distribute files to tasks: the largest first, each to the task that has the fewest bytes to move.

    The most that a task moves is at most 4/3 of what is possible. Source: Graham, "Bounds on Multiprocessing
    Timing Anomalies", SIAM Journal on Applied Mathematics 17(2), 1969.
    """
    indices_by_task: list[list[int]] = [[] for _ in range(count)]
    moved = [0] * count
    costs = [file.read + file.written for file in files]
    for index in sorted(range(len(files)), key=lambda index: (-costs[index], index)):
        task = moved.index(min(moved))
        indices_by_task[task].append(index)
        moved[task] += costs[index]
    return tuple(
        Share(number, tuple(files[index] for index in sorted(indices)))
        for number, indices in enumerate(indices_by_task, 1)
    )


def files_of(plan: Plan, destination: Destination) -> list[ShardFile]:
    """The files of the plan's first job, in the order of the model."""
    planned = {key.key: key for key in plan.keys if key.structure.is_used}
    files = []
    for package in destination.packages:
        for shard in package.shards:
            names = [package.prefix + key for key in shard.tensors]
            keys = tuple(planned[name] for name in names if name in planned)
            read = sum(map(plan.bytes_of, keys))
            files.append(ShardFile(package.path_of(shard.name), package.prefix, keys, read, shard.nbytes))
    return files
