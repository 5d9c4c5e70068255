"""The ablation lab: what a point is called, where its result is kept, and how many points become one pass.

signature.py   the hash of all that decides a point's bytes
contents.py    the SHA-256 of files, remembered
store.py       results by signature
"""

from mecha_exp.lab.contents import content_of
from mecha_exp.lab.signature import Signature, signature_of
from mecha_exp.lab.store import Kept, ModelFile, ResultStore

__all__ = ["Kept", "ModelFile", "ResultStore", "Signature", "content_of", "signature_of"]
