"""The stores that addresses lead to."""

from __future__ import annotations

import functools
import os

from mecha_exp.checkpoint.remote.address import GOOGLE, HTTP, S3, scheme_of
from mecha_exp.checkpoint.remote.file_systems import AnyStore, GoogleStore, S3Store
from mecha_exp.checkpoint.remote.pin import Store
from mecha_exp.checkpoint.remote.web import HttpStore, HubStore


@functools.cache
def store_of(scheme: str, process: int) -> Store:
    """The store of a scheme; one for each process, since a fork takes no connections along."""
    if scheme == "hf":
        return HubStore()
    if scheme in HTTP:
        return HttpStore(scheme)
    if scheme in GOOGLE:
        return GoogleStore()
    return S3Store() if scheme in S3 else AnyStore()


def store_at(address: str) -> Store:
    """The store that an address leads to."""
    return store_of(scheme_of(address), os.getpid())
