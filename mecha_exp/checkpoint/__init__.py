"""Reads and writes state dicts: files, shards and folders, in parts, checked and atomic."""

from mecha_exp.checkpoint.destination import Destination, Template, template_of_file
from mecha_exp.checkpoint.dtypes import (
    dtype_name,
    dtype_word,
    is_arithmetic,
    parse_dtype,
    round_to,
    stored_bytes,
    torch_dtype,
)
from mecha_exp.checkpoint.folder import Component, components_of, load, open_stored
from mecha_exp.checkpoint.model import Checkpoint, StateDictSource
from mecha_exp.checkpoint.safetensors.header import INDEX, Header, TensorInfo, encode_header, read_header
from mecha_exp.checkpoint.safetensors.writer import CheckpointWriter
from mecha_exp.checkpoint.shards import is_file_name, parse_size
from mecha_exp.checkpoint.transaction.journal import Note
from mecha_exp.checkpoint.transaction.recovery import PartialOutput, can_resume, find_partial_outputs
from mecha_exp.checkpoint.transaction.space import check_writable

__all__ = [
    "INDEX",
    "Checkpoint",
    "CheckpointWriter",
    "Component",
    "Destination",
    "Header",
    "Note",
    "PartialOutput",
    "StateDictSource",
    "Template",
    "TensorInfo",
    "can_resume",
    "check_writable",
    "components_of",
    "dtype_name",
    "dtype_word",
    "encode_header",
    "find_partial_outputs",
    "is_arithmetic",
    "is_file_name",
    "load",
    "open_stored",
    "parse_dtype",
    "parse_size",
    "read_header",
    "round_to",
    "stored_bytes",
    "template_of_file",
    "torch_dtype",
]
