"""A cluster of Ray on the loopback, which runs before and after the command that uses it."""

from __future__ import annotations

import gc
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

_NO_FORKS = {"GRPC_ENABLE_FORK_SUPPORT": "0"}
"""Ray's proxy of clients forks their servers. gRPC then starts threads in the fork, and some crash there."""


@contextmanager
def ray_here(client_port: int) -> Iterator[dict[str, str]]:
    """Start a cluster of two cores; yields its addresses by their kinds.

    There is one at a time on this machine: servers of clients of two clusters take the same ports.
    """
    from filelock import FileLock
    from ray.cluster_utils import Cluster

    settings = {"num_cpus": 2, "include_dashboard": False, "ray_client_server_port": client_port}
    with (
        FileLock(Path(tempfile.gettempdir()) / "mecha_exp-tests-ray.lock"),
        mock.patch.dict(os.environ, _NO_FORKS),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # Ray leaves two logs of its proxy open
            cluster = Cluster(initialize_head=True, head_node_args=settings)
            gc.collect()
        try:
            yield {
                "auto": "auto",
                "host:port": cluster.address,
                "ray://": f"ray://127.0.0.1:{client_port}",
            }
        finally:
            cluster.shutdown()
