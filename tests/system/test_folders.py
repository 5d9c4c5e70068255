"""Folders that two processes want in the same second get two names."""

from concurrent.futures import ThreadPoolExecutor

from mecha_exp.system.folders import make_new_folder


def test_a_name_that_is_taken_gets_a_number(tmp_path):
    wanted = tmp_path / "runs" / "2026-11-23_04-15-07"

    made = [make_new_folder(wanted).name for _ in range(3)]

    assert made == ["2026-11-23_04-15-07", "2026-11-23_04-15-07_2", "2026-11-23_04-15-07_3"]


def test_each_of_many_at_once_gets_its_own(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = [*pool.map(make_new_folder, [tmp_path / "run"] * 64)]

    assert len({*made}) == 64
    assert all(path.is_dir() for path in made)
