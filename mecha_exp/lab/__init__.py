"""The ablation lab: which points there are, what a point is called, and where its result is kept.

points.py          from axes to points
signature.py       the hash of all that decides a point's bytes
content_hash.py    the SHA-256 of files, remembered
stored_results.py  what a store keeps
store.py           results by signature, in a folder
bucket.py          the same at an address
"""
