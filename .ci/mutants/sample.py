"""Keep some changes of a session of cosmic-ray: `sample.py SESSION [COUNT]`; all of them without a count.

The draw has a fixed seed, so that two runs of one commit try the same changes.
"""

import random
import sqlite3
import sys
from contextlib import closing

SEED = 0
ORDER = "module_path, operator_name, operator_args, occurrence"


def main(session: str, count: int | None = None) -> None:
    """Remove all changes but `count` from a session."""
    with closing(sqlite3.connect(session)) as database:
        query = f"SELECT job_id FROM mutation_specs ORDER BY {ORDER}"  # ids are new in each session
        jobs = [row[0] for row in database.execute(query)]
        kept = set(jobs if count is None else random.Random(SEED).sample(jobs, min(count, len(jobs))))
        dropped = [(job,) for job in jobs if job not in kept]
        database.executemany("DELETE FROM mutation_specs WHERE job_id = ?", dropped)
        database.executemany("DELETE FROM work_items WHERE job_id = ?", dropped)
        database.commit()
    sys.stdout.write(f"{len(kept):,} of {len(jobs):,} changes\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
