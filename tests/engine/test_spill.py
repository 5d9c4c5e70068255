"""Values that a merge needs again are kept on disk, and are found as they were."""

import io
import tempfile
import threading

import pytest
import torch

from mecha_exp.engine.spill import Spill


def test_what_is_kept_is_found_as_it_was():
    values = {
        "nothing": (),
        "one": torch.randn(3, 4),
        "several": (torch.arange(5), [torch.tensor(2.5, dtype=torch.float64), "word"], torch.empty(0, 2)),
        "turned": torch.randn(6, 5).T,
    }

    with Spill() as spill:
        for name, value in values.items():
            spill.keep(name, value)
        found = {name: spill.find(name) for name in values}
        missing = spill.find("other")

    assert missing is None and found["nothing"] == ()
    assert torch.equal(found["one"], values["one"]) and torch.equal(found["turned"], values["turned"])
    numbers, (number, word), empty = found["several"]
    assert torch.equal(numbers, torch.arange(5)) and word == "word" and empty.shape == (0, 2)
    assert number.dtype is torch.float64 and number.item() == 2.5


def test_threads_keep_and_find_at_once():
    with Spill() as spill:

        def work(number: int) -> None:
            for part in range(20):
                spill.keep((number, part), torch.full((1000,), 20 * number + part))
                assert spill.find((number, part))[0] == 20 * number + part

        threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert all(spill.find((n, part))[-1] == 20 * n + part for n in range(4) for part in range(20))


def test_nothing_lies_in_the_folder_of_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with Spill() as spill:
        spill.keep("value", torch.ones(1000))
        assert torch.equal(spill.find("value"), torch.ones(1000))
        left = list(tmp_path.iterdir())

    assert not left


def test_a_full_disk_keeps_nothing_more(monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: io.FileIO("/dev/full", "r+"))

    with Spill() as spill:
        spill.keep("value", torch.ones(1000))
        spill.keep("other", torch.ones(1000))

        assert spill.find("value") is None and spill.find("other") is None


@pytest.mark.parametrize("name", ["an open file", "an unused one"])
def test_it_closes_its_file(name):
    spill = Spill()
    with spill:
        if name == "an open file":
            spill.keep("value", torch.ones(2))

    assert spill._file is None or spill._file.closed
