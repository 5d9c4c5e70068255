"""What lies in files: float8, packed and whole numbers, values that are not finite, tensors over 2 GiB."""

import json
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from state_dicts import contents

import mecha_exp as mx
from mecha_exp.checkpoint import dtype_name, open_stored
from mecha_exp.engine.runtime.overflow import saturates
from mecha_exp.errors import CheckpointError, MergeError
from mecha_exp.sources.copier import COPY_BYTES
from mecha_exp.system.memory import PeakMemory

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]


def write(path, dtype, shape, nbytes, values=()):
    """A file of one tensor `w`, all zero but for some bytes at their places; it takes no room on the disk."""
    head = json.dumps({"w": {"dtype": dtype, "shape": list(shape), "data_offsets": [0, nbytes]}}).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        begin = file.tell()
        file.truncate(begin + nbytes)
        for place, data in values:
            file.seek(begin + place)
            file.write(data)
    return str(path)


def data_of(path):
    model = open_stored(Path(path))
    data = bytearray(model.info("w").nbytes)
    model.read_bytes_into("w", 0, memoryview(data))
    model.close()
    return bytes(data)


def unchanged(tensors):
    """A recipe that reads, computes and writes."""
    return mx.scale(mx.model(tensors, merge_space="delta"), alpha=1.0)


# float8


def every_rounding(dtype):
    """The finite values of a float8, those halfway between two, and what is next to these on both sides."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()].sort().values
    halves = (values[1:] + values[:-1]) / 2
    far = torch.tensor([-1e30, 0.0, -0.0, 1e-30, 464.0, 480.0, 61440.0, 65536.0, 1e30])
    return torch.cat([values, halves, *(halves.nextafter(torch.tensor(to)) for to in (1e9, -1e9)), far])


@pytest.mark.parametrize("fuse", ["always", "never"])
class TestWhatIsTooLargeForE4m3:
    VALUES = torch.tensor([1.0, 448.0, 460.0, 464.0, 464.1, -500.0, 1e9, 0.0])  # 480 would follow 448

    def merged(self, fuse, values, **options):
        target = {}
        job = mx.Job(unchanged({"w": values}), target, torch.float8_e4m3fn)
        report = mx.merge_many([job], mx.EngineOptions(fuse=fuse, **options))
        return report, target["w"]

    def test_is_counted_one_by_one(self, fuse):
        report, made = self.merged(fuse, self.VALUES.repeat(100), tile_size=64)

        assert torch.equal(made.view(torch.uint8), self.VALUES.repeat(100).to(made.dtype).view(torch.uint8))
        assert report.nonfinite_values == (300,)
        said = "300 values of the output are not finite"
        assert report.warnings[0].startswith(said)
        if saturates(torch.float8_e4m3fn):
            assert report.warnings == (f"{said}, or too large for float8_e4m3fn",)

    def test_is_an_error_where_that_is_wanted(self, fuse):
        with pytest.raises(MergeError, match="the key 'w' of the output has 3 values that are"):
            self.merged(fuse, self.VALUES, strict=True)
        assert self.merged(fuse, self.VALUES[:4], strict=True)[0].nonfinite_values == (0,)

    def test_is_counted_where_nothing_is_written(self, fuse):
        recipe = mx.weighted_sum({"w": self.VALUES}, {"w": self.VALUES}, alpha=0.5)
        job = mx.Job(recipe, None, torch.float8_e4m3fn, statistics=True)

        assert mx.merge_many([job], mx.EngineOptions(fuse=fuse)).nonfinite_values == (3,)
        with pytest.raises(MergeError, match="the key 'w' of the output has 3 values that are"):
            mx.merge_many([job], mx.EngineOptions(fuse=fuse, strict=True))


@pytest.mark.parametrize("fuse", ["always", "never"])
@pytest.mark.parametrize("dtype", FLOAT8, ids=dtype_name)
class TestFloat8:
    def test_every_byte_is_read_as_torch_reads_it(self, dtype, fuse):
        stored = torch.arange(256, dtype=torch.uint8).view(dtype)
        options = mx.EngineOptions(fuse=fuse, on_nonfinite="keep")

        read = mx.merge(unchanged({"w": stored}), {}, options, torch.float32)["w"]

        assert torch.equal(read.nan_to_num(nan=1e9), stored.float().nan_to_num(nan=1e9))
        assert torch.equal(read.signbit() & ~read.isnan(), stored.float().signbit() & ~read.isnan())

    def test_every_rounding_is_that_of_torch(self, dtype, fuse):
        values = every_rounding(dtype)
        target, options = {}, mx.EngineOptions(fuse=fuse)

        mx.merge(unchanged({"w": values}), target, options, dtype)

        assert contents(target) == contents({"w": values.to(dtype)})

    def test_float8_in_gives_float8_out_and_statistics_of_what_is_stored(self, dtype, fuse):
        a, b = (torch.linspace(-2, stop, 5001).to(dtype) for stop in (3, 8))
        job = mx.Job(mx.n_average({"w": a}, {"w": b}), {}, statistics=True)
        expected = ((a.float() + b.float()) / 2).to(dtype)

        report = mx.merge_many([job], mx.EngineOptions(fuse=fuse))

        assert contents(job.output) == contents({"w": expected})
        (sums, _) = (by_key["w"] for by_key in report.moments[0].values())
        assert sums[0].item() == pytest.approx(expected.double().square().sum().item())

    def test_a_loop_does_it_with_statistics_too(self, dtype, fuse):
        recipe = mx.n_average(*({"w": torch.ones(9).to(dtype)} for _ in range(2)))

        with mx.plan([mx.Job(recipe, {}, statistics=True)], mx.EngineOptions(fuse=fuse)) as planned:
            assert planned.fused == {"fused" if fuse == "always" else "eager: fuse=never": 9}

    def test_nan_is_an_error_that_names_the_key_or_is_kept(self, dtype, fuse):
        recipe = mx.n_average({"w": torch.tensor([1.0, torch.nan]).to(dtype)}, {"w": torch.ones(2).to(dtype)})

        with pytest.raises(MergeError, match="the key 'w' has values that are not finite \\(1 NaN or inf"):
            mx.merge(recipe, {}, mx.EngineOptions(fuse=fuse))
        target = mx.merge(recipe, {}, mx.EngineOptions(fuse=fuse, on_nonfinite="keep"))

        assert target["w"].float().isnan().tolist() == [False, True]


# what is copied


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "C64", "U16", "BOOL"])
def test_other_numbers_are_copied_bit_for_bit_in_parts(dtype, tmp_path):
    bits = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64, "U16": 16}.get(dtype, 8)
    count = 2 * COPY_BYTES * 8 // bits // 8 * 8 + 24
    nbytes = count * bits // 8
    places = [(0, b"\1\1"), (COPY_BYTES - 1, b"\1\1"), (nbytes - 1, b"\1")]
    first = write(tmp_path / "a.safetensors", dtype, [count], nbytes, places)
    other = write(tmp_path / "b.safetensors", dtype, [count], nbytes, places[:-1])
    again = write(tmp_path / "c.safetensors", dtype, [count], nbytes, places)
    target = tmp_path / "out.safetensors"

    differing = mx.merge_many(
        [mx.Job(mx.n_average(first, again, other), target, durable=False)],
        mx.EngineOptions(on_integers="base"),
    )
    equal = mx.merge_many([mx.Job(mx.n_average(first, again), None)])

    assert data_of(target) == data_of(first)
    assert "1 key is not floating point and differs between the inputs" in differing.warnings[0]
    assert equal.warnings == ()


# values that are not finite


class TestNotFinite:
    @pytest.fixture
    def inputs(self, tmp_path):
        good = {"v": torch.tensor([1.0]), "w": torch.tensor([2.0, 4.0])}
        save_file({**good, "w": torch.tensor([torch.inf, 8.0])}, tmp_path / "spoilt.safetensors")
        save_file(good, tmp_path / "good.safetensors")
        return [str(tmp_path / f"{name}.safetensors") for name in ("spoilt", "good")]

    def merged(self, inputs, **options):
        return mx.merge(mx.n_average(*inputs), {}, mx.EngineOptions(**options))

    def test_they_are_an_error_that_says_what_else_there_is(self, inputs):
        with pytest.raises(MergeError) as error:
            self.merged(inputs)

        assert str(error.value) == (
            f"{inputs[0]}: the key 'w' has values that are not finite (1 NaN or infinite among its elements "
            "0 to 2). on_nonfinite=keep merges them as they are, on_nonfinite=skip leaves that input out."
        )

    def test_kept_they_are_merged_as_they_are(self, inputs):
        assert self.merged(inputs, on_nonfinite="keep")["w"].tolist() == [torch.inf, 6.0]

    def test_skipped_the_key_is_missing_from_that_input(self, inputs):
        with pytest.raises(CheckpointError, match="w") as error:
            self.merged(inputs, on_nonfinite="skip")

        assert (
            f"{inputs[0]} lacks 1 of the 2 keys that the other inputs have: w. Their values are not "
            in str(error.value)
        )

    def test_what_is_skipped_is_warned_of(self, inputs):
        options = mx.EngineOptions(on_nonfinite="skip", on_missing="base")

        report = mx.merge_many([mx.Job(mx.n_average(*inputs), None)], options)

        said = f"{inputs[0]}: 1 key counts as missing, with values that are not finite: w"
        assert report.warnings[0] == said

    @pytest.mark.parametrize(
        ("on_missing", "expected"), [("skip", {"v": [1.0]}), ("base", {"v": [1.0], "w": [2.0, 4.0]})]
    )
    def test_and_is_treated_like_any_missing_key(self, inputs, on_missing, expected):
        found = self.merged(inputs, on_nonfinite="skip", on_missing=on_missing)

        assert {key: tensor.tolist() for key, tensor in found.items()} == expected


# over 2 GiB

OVER = 2**31 + 4096


@pytest.mark.skipif(sys.platform == "win32", reason="files with holes are asked for in another way")
class TestLargeTensors:
    def test_a_copy_takes_little_memory_and_compares_to_the_last_byte(self, tmp_path):
        size = 500_000_000
        paths = [
            write(tmp_path / f"{last}.safetensors", "U8", [size], size, [(size - 1, bytes([last]))])
            for last in (1, 2)
        ]
        with PeakMemory() as before:
            pass

        with PeakMemory() as memory:
            report = mx.merge_many([mx.Job(mx.n_average(*paths), None)], mx.EngineOptions(on_integers="base"))

        assert "between the inputs; the first one's values are kept: w" in report.warnings[0]
        assert memory.peak < before.peak + 200_000_000

    @pytest.mark.heavy
    def test_over_2_gib_a_merge_is_right_to_the_last_element(self, tmp_path):
        if shutil.disk_usage(tmp_path).free < 2 * OVER:
            pytest.skip("the disk lacks room")
        count = OVER // 2
        spots = [0, 2**30 - 1, 2**30, count - 1]  # the 2 GiB end between the second and the third
        values = [(2 * spot, struct.pack("<e", place + 1)) for place, spot in enumerate(spots)]
        path = write(tmp_path / "a.safetensors", "F16", [count], OVER, values)
        target = tmp_path / "out.safetensors"

        mx.merge_many(
            [mx.Job(mx.scale(mx.model(path, merge_space="delta"), alpha=3.0), target, durable=False)]
        )

        merged = open_stored(target)
        around = torch.empty(8, dtype=torch.float16)
        for place, spot in enumerate(spots):
            merged.read_into("w", spot - 7 if place % 2 else spot, around)
            expected = [3.0 * (place + 1), *[0.0] * 7]
            assert around.tolist() == (expected[::-1] if place % 2 else expected)
        assert merged.info("w").nbytes == OVER
        merged.close()
        target.unlink()
