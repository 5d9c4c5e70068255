"""The commands take addresses where they take paths."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mecha_exp import merge, weighted_sum
from mecha_exp.checkpoint.remote import lookup
from mecha_exp.cli import main


@pytest.fixture
def command(tmp_path: Path, monkeypatch, capsys):
    """Runs a command in a folder of its own, in this process."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["mecha_exp", *words])
        try:
            status = main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        shown = capsys.readouterr()
        return status, shown.out + shown.err

    return run


@pytest.fixture
def models(served: Path) -> dict[str, dict[str, torch.Tensor]]:
    """A base and two experts on the server."""
    tensors = {}
    for seed, name in enumerate(("base", "a", "b")):
        torch.manual_seed(seed)
        tensors[name] = {f"layers.{n}.weight": torch.randn(50, 40) for n in range(3)}
        save_file(tensors[name], served / f"{name}.safetensors")
    return tensors


def words(server, *more: str) -> list[str]:
    experts = ",".join(f"{server.url}/{name}.safetensors" for name in "ab")
    places = [f"models.base={server.url}/base.safetensors", f"models.experts=[{experts}]"]
    return ["recipe=task_arithmetic", *places, "evaluator=none", "tracking=none", *more]


def test_a_point_and_a_sweep_are_merged(command, models, server, tmp_path):
    status, shown = command(*words(server, "alpha=0.5", "output.path=merged.safetensors"))
    assert status == 0, shown

    merged = load_file(tmp_path / "merged.safetensors")
    base, a, b = models["base"], models["a"], models["b"]
    expected = {key: base[key] + 0.5 * (a[key] - base[key] + b[key] - base[key]) for key in base}
    assert all(torch.allclose(merged[key], expected[key], atol=1e-6) for key in base)

    status, shown = command(*words(server, "alpha=0.1,0.2", "-m"))
    assert status == 0, shown


def test_a_record_names_addresses_and_a_result_is_recalled_while_no_version_changes(
    command, models, server, served, tmp_path
):
    def run(name: str) -> dict:
        lookup.forget_lookups()
        status, shown = command(*words(server, "alpha=0.5", "output=none", f"hydra.run.dir={name}"))
        assert status == 0, shown
        return json.loads((tmp_path / name / "run.json").read_text())

    first, sent = run("first"), server.sent
    again = run("again")
    assert server.sent - sent < 100  # which asks for the versions
    save_file({key: -tensor for key, tensor in models["a"].items()}, served / "a.safetensors")
    changed = run("changed")

    assert first["parameters"]["input/base"] == f"{server.url}/base.safetensors"
    assert first["tags"]["fingerprint/base"].startswith("version-")
    assert first["signature"] == again["signature"] != changed["signature"]
    distances = [record["metrics"]["weights/distance/base"] for record in (first, again, changed)]
    assert distances[0] == distances[1] != distances[2]


def test_a_run_that_takes_a_part_of_a_model_moves_that_part(command, server, served, tmp_path):
    def made(**sizes: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": torch.randn(size, 500) for name, size in sizes.items()}

    base, vae = made(unet=300, vae=2000), made(vae=2000)
    save_file(base, served / "base.safetensors")
    save_file(vae, served / "vae.safetensors")
    places = [f"models.base={server.url}/base.safetensors", f"models.experts=[{server.url}/vae.safetensors]"]
    more = ["evaluator=none", "tracking=none", "output.path=baked.safetensors"]

    status, shown = command("recipe=bake_vae", *places, *more)

    assert status == 0, shown
    baked = load_file(tmp_path / "baked.safetensors")
    assert torch.equal(baked["unet.weight"], base["unet.weight"])
    assert torch.equal(baked["vae.weight"], vae["vae.weight"])
    moved = base["unet.weight"].nbytes + vae["vae.weight"].nbytes
    assert server.sent <= moved + 2 * lookup.FIRST_BYTES + 100


def test_a_run_is_reproduced(command, models, server):
    status, shown = command(*words(server, "alpha=0.5", "hydra.run.dir=run"))
    assert status == 0, shown

    status, shown = command("reproduce", "run")

    assert status == 0, shown
    assert f"{server.url}/base.safetensors, the same content" in shown
    assert "identical: " in shown


def test_an_input_in_another_version_is_told_when_a_run_is_reproduced(command, models, server, served):
    status, shown = command(*words(server, "alpha=0.5", "hydra.run.dir=run"))
    assert status == 0, shown
    save_file({key: -tensor for key, tensor in models["a"].items()}, served / "a.safetensors")
    lookup.forget_lookups()

    status, shown = command("reproduce", "run")

    assert status == 1
    told = " ".join(shown.split())
    assert "has changed: it was version-" in told
    assert "Its store gives no hash, so only one version at one address is the same" in told


def test_a_description_names_the_address(command, models, server):
    _, shown = command("info", f"{server.url}/a.safetensors")

    assert shown.startswith(f"{server.url}/a.safetensors: of no known model config")


@pytest.mark.libraries
def test_shares_on_one_machine_have_models_downloaded_once(command, served, server, tmp_path, fresh_ray):
    for name in ("base", "a", "b"):
        save_file(
            {f"layers.{n}.weight": torch.randn(500, 500) for n in range(4)}, served / f"{name}.safetensors"
        )
    shares = ("hydra/launcher=ray", "hydra.launcher.workers=2", "hydra.launcher.shares=1")

    status, shown = command(
        *words(server, "alpha=0.1,0.2,0.3,0.4", "models.cache=kept", "output=none", *shares, "-m")
    )

    assert status == 0, shown
    size = sum(path.stat().st_size for path in served.iterdir())
    assert size <= server.sent < 1.1 * size


def test_the_models_cache_is_a_setting(command, models, server, tmp_path):
    settings = ["models.cache=kept models", "models.cache_size=1MB"]
    status, shown = command(*words(server, "alpha=0.5", "output=none", *settings))

    assert status == 0, shown
    assert [*(tmp_path / "kept models").iterdir()]


def test_a_cache_size_that_is_none_is_an_error(command, models, server):
    status, shown = command(*words(server, "alpha=0.5", "models.cache=kept", "models.cache_size=much"))

    assert status == 1
    assert "models.cache_size: expected a size such as 5GB or 500MB, got 'much'" in shown


@pytest.mark.parametrize(
    "verb",
    [
        ["info", "{url}/a.safetensors"],
        [
            "plan",
            "recipe=weighted_sum",
            "models.base={url}/a.safetensors",
            "models.experts=[{url}/b.safetensors]",
        ],
        ["show", "{url}/merged.safetensors"],
        ["diff", "{url}/a.safetensors", "{url}/b.safetensors"],
        ["merge", "{url}/merged.safetensors", "-o", "again.safetensors"],
    ],
    ids=lambda words: words[0],
)
def test_verbs_take_addresses(verb, command, models, server, served):
    merge(weighted_sum(*[f"{server.url}/{name}.safetensors" for name in "ab"]), served / "merged.safetensors")

    status, shown = command(*[word.format(url=server.url) for word in verb])

    assert status == 0, shown


def test_an_output_elsewhere_is_refused(command, models, server, tmp_path):
    status, shown = command(*words(server, "alpha=0.5", "output.path=s3://bucket/merged.safetensors"))

    assert status == 1
    assert (
        "s3://bucket/merged.safetensors lies elsewhere, and outputs are written to this machine"
        in " ".join(shown.split())
    )
    assert not (tmp_path / "s3:").exists()


def test_configurations_of_mergekit_name_addresses(command, models, server, tmp_path):
    linear = f"merge_method: linear\nmodels: [{{model: '{server.url}/a.safetensors'}}]\n"
    (tmp_path / "linear.yml").write_text(f"{linear}parameters: {{weight: 1}}\n")
    status, shown = command("merge", "linear.yml", "merged.safetensors")
    assert status == 1
    assert "lies elsewhere. Nothing is read from elsewhere without hub.offline=false" in shown

    for verb in (["show"], ["compose"], ["plan"], ["merge", "-o", "merged.safetensors"]):
        status, shown = command(*verb, "linear.yml", "hub.offline=false")
        assert status == 0, shown

    merged = load_file(tmp_path / "merged.safetensors")
    assert all(torch.equal(merged[key], tensor) for key, tensor in models["a"].items())
    status, shown = command("show", "merged.safetensors", "--text")
    assert f'model "{server.url}/a.safetensors"' in shown
    status, shown = command("show", "linear.yml", "hub.offline=no")
    assert (status, "hub.offline=false" in shown) == (2, True)
