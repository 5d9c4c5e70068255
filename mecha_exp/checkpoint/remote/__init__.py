"""Models that lie elsewhere: looked up once, then read in ranges as if they were files."""

from mecha_exp.checkpoint.remote.address import is_address, with_slashes
from mecha_exp.checkpoint.remote.content_cache import keep_in
from mecha_exp.checkpoint.remote.file import RemoteFile
from mecha_exp.checkpoint.remote.lookup import fetch_small_files, look_up
from mecha_exp.checkpoint.remote.pin import BY_VERSION
from mecha_exp.checkpoint.remote.stand_in import address_of, is_stand_in, place_of

__all__ = [
    "BY_VERSION",
    "RemoteFile",
    "address_of",
    "fetch_small_files",
    "is_address",
    "is_stand_in",
    "keep_in",
    "look_up",
    "place_of",
    "with_slashes",
]
