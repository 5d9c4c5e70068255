"""A merge that dies, or meets a full disk, at any of its calls leaves the old model or the new one, whole."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from programs import printed

SCENARIOS = ("file", "new folder", "replaced folder", "replaced in place")
FEW = 6

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def starts_of(scenario: str, fault: str, count: int, folder: Path) -> dict[str, Any]:
    """Run the work once for each chosen call; 0 means all calls."""
    words = (scenario, folder / "work", fault, count)
    report: dict[str, Any] = json.loads(printed("crash_points", *words, timeout=580))
    return report


def check(report: dict[str, Any], *, in_place: bool) -> None:
    """Every start left the old model or the new one, and the next one ended with the new one alone.

    Where a folder is changed in place, the index and the shards that it names are one model; new shards get
    other names, and may lie beside it until the next start.
    """
    assert report["old"] != report["new"]
    assert len(report["starts"]) >= FEW
    for start in report["starts"]:
        visible = {name: content for name, content in start["left"].items() if "/." not in f"/{name}"}
        assert start["trouble"] == "", start
        assert start["weights"] in (report["old weights"], report["new weights"]), start
        assert start["last"] == report["new weights"], start
        assert len(start["then"]) == len(report["new"]), start
        assert in_place or visible in (report["old"], report["new"]), start
        assert in_place or start["then"] == report["new"], start


def test_some_kills_leave_the_old_model_or_the_new_one(tmp_path: Path) -> None:
    check(starts_of("replaced folder", "kill", FEW, tmp_path), in_place=False)


@pytest.mark.heavy
@pytest.mark.parametrize("fault", ["kill", "full"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_fault_leaves_the_old_model_or_the_new_one(scenario: str, fault: str, tmp_path: Path) -> None:
    report = starts_of(scenario, fault, 0, tmp_path)
    if fault == "full":
        errors = {start["error"] for start in report["starts"]}
        assert all(not e or (e.startswith("CheckpointError: ") and "the disk is full" in e) for e in errors)
    check(report, in_place=scenario == "replaced in place")
