"""A sweep in shares leaves what one process leaves: numbers, tables, outcomes, verdict and tracked runs."""

import pytest
from sweep_folders import LIBRARIES
from whole_sweeps import everything_of

pytestmark = pytest.mark.libraries


@pytest.mark.parametrize("launcher", LIBRARIES)
@pytest.mark.usefixtures("figures")
def test_a_sweep_in_shares_leaves_what_one_process_leaves_field_by_field(launcher, app, folder, request):
    pytest.importorskip(LIBRARIES[launcher])
    if launcher != "processes":
        request.getfixturevalue("slurm" if launcher == "slurm" else "fresh_ray")
    tables, contents = [], []

    for name in ("onepass", launcher):
        words = (f"hydra/launcher={name}", f"hydra.sweep.dir={name}", "store=null")
        assert app("alpha=0.3,0.5,0.7", "output=none", *words, "-m", tracked=True).status == 0
        tables.append(app("table", name).out.replace(name, "FOLDER"))
        contents.append(everything_of(folder / name, f"sqlite:///{folder}/outputs/mlflow.db"))

    assert tables[0] == tables[1]
    assert "it is better than 'base'" in " ".join(tables[0].split())
    ours, theirs = contents
    for field in ours:
        assert theirs[field] == ours[field], field
    assert [len(ours[field]) for field in ("records", "sweep.csv", "sweep.parquet")] == [3, 3, 3 + 4]
    assert len(ours["outcomes"]) == 4 and all(ours["outcomes"].values())
    assert set(ours["tracked"]) > {"", "alpha=0.3", "alpha=0.5", "alpha=0.7", "base"}
