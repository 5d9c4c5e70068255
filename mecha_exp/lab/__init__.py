"""The ablation lab: which points there are, what a point is called, and where its result is kept.

points.py      from axes to points
signature.py   the hash of all that decides a point's bytes
contents.py    the SHA-256 of files, remembered
store.py       results by signature
"""
