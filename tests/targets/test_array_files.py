"""Parquet files and Zarr folders: the same tables as from arrays, and a sentence for everything else."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import attnc
from attnc.targets import array_files

pyarrow = pytest.importorskip("pyarrow")
zarr = pytest.importorskip("zarr")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def scattered() -> np.ndarray:
    points = np.random.default_rng(0).uniform(-1, 1, (300, 2))
    return np.column_stack([points, np.sin(points.sum(axis=1)), points[:, 0] * points[:, 1]])


def parquet(path, columns, **options):
    pq.write_table(pyarrow.table(columns), path, **options)
    return path


def folder(path, arrays, zarr_format=3, **options):
    group = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    for name, array in arrays.items():
        group.create_array(name, data=np.asarray(array), **options)
    return path


def same(found: attnc.TableTarget, wanted: attnc.TableTarget) -> bool:
    return bool((found.points == wanted.points).all() and (found.values == wanted.values).all())


def test_parquet_is_read_batch_by_batch(tmp_path, monkeypatch, scattered):
    monkeypatch.setattr(array_files, "BATCH_ROWS", 64)
    x, y, z, w = scattered.T
    path = parquet(tmp_path / "t.parquet", {"w": w, "x": x, "note": ["?"] * len(x), "y": y, "z": z}, row_group_size=50)
    wanted = attnc.TableTarget(scattered[:, :2], scattered[:, 2:])
    assert same(attnc.TableTarget.from_parquet(path, ["x", "y"], ["z", "w"]), wanted)
    one = attnc.TableTarget.from_parquet(path, ["x", "y"], "z")
    assert one.output_shape == ()
    assert one.box.names == ("x", "y")


def test_missing_numbers_in_parquet(tmp_path):
    path = parquet(tmp_path / "t.parquet", {"x": [0.0, 1.0, 2.0, 3.0], "z": [1, None, 3, 4]})
    with pytest.raises(attnc.InputError, match=re.escape("row 1 has a missing number")):
        attnc.TableTarget.from_parquet(path, "x", "z")
    found = attnc.TableTarget.from_parquet(path, "x", "z", skip_missing=True)
    assert found.points[:, 0].tolist() == [0, 2, 3]
    assert found.remarks == ("1 row with a missing cell was left out.",)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_grid_of_zarr_is_read_slab_by_slab(tmp_path, monkeypatch, zarr_format):
    monkeypatch.setattr(array_files, "SLAB_NUMBERS", 40)
    lat, lon = np.linspace(60, -60, 13), np.linspace(0, 350, 15)
    values = np.add.outer(np.cos(lat / 60), np.sin(lon / 100)).astype("f4")
    path = folder(tmp_path / "t.zarr", {"lat": lat, "lon": lon, "z": values}, zarr_format, chunks="auto")
    found = attnc.TableTarget.from_zarr(path, ["lat", "lon"], ["z"])
    assert found.grid is not None
    assert (found.grid[0] == lat[::-1]).all()
    assert (found.values.reshape(13, 15) == values[::-1]).all()


def test_columns_of_zarr_are_scattered_points(tmp_path, scattered):
    x, y, z, w = scattered.T
    path = folder(tmp_path / "t.zarr", {"x": x, "y": y, "z": z, "w": w})
    assert same(
        attnc.TableTarget.from_zarr(path, ["x", "y"], ["z", "w"]),
        attnc.TableTarget(scattered[:, :2], scattered[:, 2:]),
    )
    line = attnc.TableTarget.from_zarr(path, "x", "z")
    assert line.num_points == 300
    assert (np.diff(line.points[:, 0]) > 0).all()


def test_what_cannot_be_read_is_one_sentence(tmp_path):
    x = np.linspace(0, 1, 5)
    table = parquet(tmp_path / "t.parquet", {"x": x, "z": ["a"] * 5})
    (tmp_path / "cut.parquet").write_bytes(table.read_bytes()[:-20])
    place = folder(tmp_path / "t.zarr", {"x": x, "y": x[:3], "z": np.zeros((5, 4)), "flags": np.array([True, False])})
    for read, path, inputs, outputs, kind, message in (
        ("from_parquet", table, "x", "z", attnc.InputError, "column 'z' holds string, not numbers"),
        ("from_parquet", table, "x", "w", attnc.InputError, "there is no single column 'w'; the file has 'x', 'z'"),
        ("from_parquet", tmp_path / "cut.parquet", "x", "z", attnc.FileError, "cannot be read as Parquet"),
        ("from_zarr", place, ["x", "y"], "z", attnc.InputError, "has 5 × 4 numbers; on the grid of the inputs it has"),
        ("from_zarr", place, ["x", "none"], "z", attnc.InputError, "there is no array 'none'; the folder has"),
        ("from_zarr", place, ["z"], "x", attnc.InputError, "the input 'z' has 2 dimensions; a coordinate has one"),
        ("from_zarr", place, ["../t.zarr/x"], "x", attnc.InputError, "is no name of an array"),
        ("from_zarr", place, "x", "flags", attnc.InputError, "holds bool, not numbers"),
        ("from_zarr", tmp_path, "x", "z", attnc.InputError, "there is no array 'x'"),
    ):
        with pytest.raises(kind, match=re.escape(message)):
            getattr(attnc.TableTarget, read)(path, inputs, outputs)


def test_a_damaged_chunk_and_a_foreign_codec_are_refused(tmp_path):
    x = np.random.default_rng(0).random(1000)
    place = folder(tmp_path / "t.zarr", {"x": np.arange(1000.0), "z": x}, zarr_format=2)
    chunk = place / "z" / "0"
    chunk.write_bytes(chunk.read_bytes()[:100])
    with pytest.raises(attnc.FileError, match="a chunk cannot be read"):
        attnc.TableTarget.from_zarr(place, "x", "z")
    described = place / "z" / ".zarray"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"filters": [{"id": "pickle"}]}))
    with pytest.raises(attnc.FileError, match="have the codec 'pickle', which is not read here"):
        attnc.TableTarget.from_zarr(place, "x", "z")


def test_a_chunk_that_changes_between_two_reads_is_refused(tmp_path, monkeypatch):
    path = folder(tmp_path / "t.zarr", {"x": np.arange(40.0), "z": np.sin(np.arange(40.0))}, chunks=(10,))
    fill = array_files._fill_from

    def changing(array, out, shown):
        fill(array, out, shown)
        if "z" in str(array.store_path):
            zarr.open_array(path / "z", mode="r+")[5] = 7.0

    monkeypatch.setattr(array_files, "_fill_from", changing)
    with pytest.raises(attnc.FileError, match="changed while it was read; copy it first"):
        attnc.TableTarget.from_zarr(path, "x", "z")
