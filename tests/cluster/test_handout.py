"""Items are handed out in shares: each is done once, whatever becomes of the workers."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mecha_exp.cluster import LostWorker, Workers
from mecha_exp.cluster import shares as shares_module
from mecha_exp.cluster.claims import Claims
from mecha_exp.cluster.shares import Handout
from mecha_exp.errors import ClusterError

NOTES = "notes"


class InTurn(Workers):
    """Runs a task in this process, one at each call; a worker is lost where the work says so."""

    def __init__(self, count: int = 2) -> None:
        super().__init__(count)
        self.tasks = {}

    def _fill(self):
        self.tasks |= self._take(len(self._waiting))

    def _ended(self, seconds: float) -> Iterator:
        if self.tasks:
            number = min(self.tasks)
            try:
                yield number, self.tasks.pop(number)()
            except KeyboardInterrupt:  # which is no error of the work
                yield number, LostWorker("lost")

    def close(self) -> None:
        self.tasks = {}


def work(claims: Claims, items: Sequence[int], lost_at: dict[int, int]) -> None:
    """Note each item that could be taken; lose the worker at some, so many times."""
    for item in items:
        if not claims.take(item):
            continue
        notes = claims.folder.parent / NOTES
        tries = notes.read_text().split().count(f"try-{item}") if notes.exists() else 0
        with notes.open("a") as file:
            file.write(f"try-{item} ")
            if tries < lost_at.get(item, 0):
                file.flush()
                raise KeyboardInterrupt
            file.write(f"done-{item} ")
        claims.finish(item)


def hand_out(folder: Path, shares: Sequence[Sequence[int]], lost_at: dict[int, int], task=work):
    """The items as they end, and those that were done, in order."""
    handout = Handout(InTurn(), Claims.begin(folder), task, lambda items: (list(items), lost_at))
    handout.give(shares)
    results = list(handout.ended())
    notes = (folder / NOTES).read_text().split()
    return results, [int(note.removeprefix("done-")) for note in notes if note.startswith("done-")]


def test_each_item_is_done_once_and_those_of_a_lost_worker_by_another(tmp_path):
    results, done = hand_out(tmp_path, [[0, 1, 2], [3, 4, 5]], lost_at={1: 1})

    assert results == [(n, None) for n in (0, 3, 4, 5, 1, 2)]
    assert sorted(done) == list(range(6))


def test_an_item_that_loses_each_of_its_workers_fails_alone(tmp_path):
    results, done = hand_out(tmp_path, [[0, 1, 2, 3]], lost_at={1: 99})

    failed = [(item, str(error)) for item, error in results if error]
    assert failed == [(1, "3 workers were lost at it, the last one so: lost")]
    assert sorted(done) == [0, 2, 3]


def test_a_free_worker_takes_the_untouched_half_of_a_slow_share(tmp_path, monkeypatch):
    monkeypatch.setattr(shares_module, "WORTH_SPLITTING", 0.0)
    workers, claims = InTurn(), Claims.begin(tmp_path)
    handout = Handout(workers, claims, work, lambda items: (list(items), {}))
    given = []
    start = workers.start
    monkeypatch.setattr(workers, "start", lambda f, a: given.extend(x[3] for x in a) or start(f, a))

    handout.give([[0], [1, 2, 3, 4]])
    results = list(handout.ended())

    assert given == [[0], [1, 2, 3, 4], [3, 4]]
    assert [item for item, _ in results] == [0, 1, 2, 3, 4]
    assert (tmp_path / NOTES).read_text().split().count("done-3") == 1


def idle(claims: Claims, items: Sequence[int], lost_at: dict[int, int]) -> None:
    """Take nothing."""
    (claims.folder.parent / NOTES).touch()


def test_workers_that_leave_items_undone_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(shares_module, "_GRACE_SECONDS", 0.1)

    with pytest.raises(ClusterError, match=r"workers ended and left 2 points undone \(0, 1, \.\.\.\)"):
        hand_out(tmp_path, [[0, 1]], {}, task=idle)


def test_what_the_work_raises_is_raised(tmp_path):
    with pytest.raises(FileNotFoundError):
        hand_out(tmp_path, [[0]], {}, task=lose_the_folder)


def lose_the_folder(claims: Claims, *about: object) -> None:
    """Raise what an unknown path raises."""
    (claims.folder / "gone").read_text()


def test_an_item_is_taken_by_one_holder_and_by_nobody_when_a_new_process_has_begun(tmp_path):
    head = Claims.begin(tmp_path)
    one, other = Claims(head.folder, "one"), Claims(head.folder, "other")

    assert [one.take(1), other.take(1), other.take(2), one.take(3)] == [True, False, True, True]
    one.finish(3)
    assert head.states() == ({1, 2}, {3})
    assert head.release("one") == {1}
    assert [other.take(1), other.take(3)] == [True, False]

    Claims.begin(tmp_path)
    assert not one.take(4)
    with pytest.raises(ClusterError, match=r"does not see .* Choose a hydra\.sweep\.dir=\.\.\. in a folder"):
        Claims(head.folder, "late")


def test_a_holder_that_is_only_taken_for_lost_does_no_harm(tmp_path):
    head = Claims.begin(tmp_path)
    living, other = Claims(head.folder, "living"), Claims(head.folder, "other")
    assert [living.take(item) for item in (1, 2)] == [True, True]
    assert head.release("living") == {1, 2}
    assert other.take(1)

    for item in (1, 2):
        living.finish(item)
    other.finish(1)

    assert head.states() == (set(), {1, 2})
    assert not other.take(2)


def test_an_item_that_is_done_just_before_it_is_taken_stays_done(tmp_path, monkeypatch):
    head = Claims.begin(tmp_path)
    slow, quick = Claims(head.folder, "slow"), Claims(head.folder, "quick")
    assert quick.take(1)
    link = os.link

    def finish_and_link(*paths: Path) -> None:
        quick.finish(1)
        link(*paths)

    monkeypatch.setattr("os.link", finish_and_link)

    assert not slow.take(1)
    assert head.states() == (set(), {1})
    assert not (head.folder / "1").exists()


def test_a_file_system_without_hard_links_is_an_error(tmp_path, monkeypatch):
    def refuse(*about: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)

    with pytest.raises(
        ClusterError, match=r"a file system without hard links \(Operation not permitted\), by"
    ):
        Claims.begin(tmp_path)
