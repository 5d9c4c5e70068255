"""Large packages are imported, and left at the end, without looking through all their objects for garbage."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from mecha_exp.system.imports import import_without_gc


def test_the_collector_rests_while_a_large_module_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = "import gc\nwas_enabled, objects = gc.isenabled(), [[] for _ in range(99)]\n"
    (tmp_path / "large_one.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    module = import_without_gc("large_one")

    assert not module.was_enabled and gc.isenabled()
    assert gc.get_freeze_count() >= 99
    assert not any(item is module.objects for item in gc.get_objects())
    assert import_without_gc("large_one") is module
    gc.unfreeze()


def test_the_collector_works_again_after_a_module_that_cannot_be_imported():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_without_gc("no_such_module")

    assert gc.isenabled()
    gc.unfreeze()


def test_a_collector_that_rests_is_not_woken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "large_two.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    gc.disable()
    try:
        import_without_gc("large_two")
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


def test_nothing_is_left_to_the_collector_when_python_ends():
    program = (
        "import atexit, gc; from mecha_exp.system.imports import skip_gc_at_exit\n"
        "atexit.register(lambda: print('at last', gc.get_freeze_count() > 99))\n"
        "skip_gc_at_exit(); skip_gc_at_exit()\n"
        "atexit.register(lambda: print('before', gc.get_freeze_count()))\n"
    )

    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert said == "before 0\nat last True\n"
