"""Hands out items in shares: slow shares are split, and those of lost workers are given to others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mecha_exp.cluster.claims import Claims
from mecha_exp.cluster.workers import POLL_SECONDS, LostWorker, Workers
from mecha_exp.errors import ClusterError, counted

WORTH_SPLITTING = 10.0
"""The seconds that the untouched items of a share must take for a free worker to take half of them."""
RETRIES = 2
"""How often an item whose worker was lost is tried again."""
_GRACE_SECONDS = 10.0
"""How long a shared folder may take to show what workers have done."""

Work = Callable[..., None]
"""Called in a worker as `work(claims, *arguments)`: takes items, does those that it got, finishes each."""


@dataclass
class _Share:
    """Items that a task works at."""

    name: str
    items: list[int]
    began: float = field(default_factory=time.monotonic)


class Handout:
    """A work of numbered items on its way through workers.

    Args:
        workers: which do the work.
        claims: the claims of its items.
        work: a function of a module.
        arguments_of: the arguments with which it works at some items.
    """

    def __init__(
        self,
        workers: Workers,
        claims: Claims,
        work: Work,
        arguments_of: Callable[[Sequence[int]], tuple[Any, ...]],
    ) -> None:
        self._workers, self._claims, self._work, self._arguments_of = workers, claims, work, arguments_of
        self._running: dict[int, _Share] = {}
        self._remaining: set[int] = set()
        self._losses: Counter[int] = Counter()
        self._names = 0

    def give(self, shares: Sequence[Sequence[int]]) -> None:
        """Start a task for each share; its items are new ones, or those of a lost worker."""
        new_shares = []
        for items in shares:
            new_shares.append(_Share(f"share-{self._names}", list(items)))
            self._names += 1
            self._remaining.update(items)
        arguments = [
            (self._claims.folder, share.name, *self._arguments_of(share.items)) for share in new_shares
        ]
        tasks = self._workers.start(_work_at, [(self._work, *of_share) for of_share in arguments])
        self._running |= dict(zip(tasks, new_shares, strict=True))

    def ended(self, *, so_far: bool = False) -> Iterator[tuple[int, LostWorker | None]]:
        """Yield each item once, as soon as it is done; with an error if its workers were lost too often.

        Args:
            so_far: whether to stop at those that are not done yet, rather than wait for them.

        Raises:
            Exception: what the work raised.
            ClusterError: workers ended and left items.
        """
        while self._remaining:
            ended = list(self._workers.ended(0 if so_far else POLL_SECONDS))
            yield from self._newly_done()
            for task, result in ended:
                share = self._running.pop(task)
                if isinstance(result, LostWorker):
                    yield from self._replace(share, result)
                elif isinstance(result, Exception):
                    raise result
            if self._remaining and not self._running:
                yield from self._await_the_last()
            self._split_slow_shares()
            if so_far:
                return

    def _newly_done(self) -> Iterator[tuple[int, None]]:
        """The items that were done since the last call, in their order."""
        _, done = self._claims.states()
        for item in sorted(done & self._remaining):
            self._remaining.discard(item)
            yield item, None

    def _replace(self, share: _Share, lost: LostWorker) -> Iterator[tuple[int, LostWorker]]:
        """Give the items of a lost worker to another, without those that have cost too many workers."""
        at_work = self._claims.release(share.name)
        undone = (at_work | set(share.items)) & self._remaining
        self._losses.update(at_work or undone)
        hopeless = {item for item in undone if self._losses[item] > RETRIES}
        self._remaining -= hopeless
        if again := sorted(undone - hopeless):
            self.give([again])
        for item in sorted(hopeless):
            workers = counted(self._losses[item], "worker was", "workers were")
            yield item, LostWorker(f"{workers} lost at it, the last one so: {lost}")

    def _await_the_last(self) -> Iterator[tuple[int, None]]:
        """Wait for what a shared folder does not show yet."""
        until = time.monotonic() + _GRACE_SECONDS
        while self._remaining and time.monotonic() < until:
            yield from self._newly_done()
            time.sleep(POLL_SECONDS / 10)
        if self._remaining:
            left = ", ".join(map(str, sorted(self._remaining)[:5]))
            raise ClusterError(
                f"workers ended and left {counted(len(self._remaining), 'point')} undone ({left}, ...). "
                "Another process may have begun the same sweep; the same command goes on."
            )

    def _split_slow_shares(self) -> None:
        """Give half of what a slow share has not begun to each free worker.

        The share's own task keeps these items in its list, and passes over those that it finds taken.
        """
        taken, _ = self._claims.states()
        while 0 < len(self._running) < self._workers.count:
            untouched = {
                t: [i for i in s.items if i in self._remaining - taken] for t, s in self._running.items()
            }
            task = max(untouched, key=lambda t: len(untouched[t]))
            share, items = self._running[task], untouched[task]
            done = len(share.items) - len(items)
            seconds_each = (time.monotonic() - share.began) / max(1, done)
            if len(items) < 2 or seconds_each * len(items) < WORTH_SPLITTING:
                return
            half = items[len(items) // 2 :]
            share.items = [item for item in share.items if item not in half]
            self.give([half])


def _work_at(work: Work, folder: Any, name: str, *arguments: Any) -> None:
    """Work under a name, in a worker."""
    work(Claims(folder, name), *arguments)
