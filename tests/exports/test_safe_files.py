"""Damaged and hostile files: FileError, and nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from attnc.errors import FileError
from attnc.exports import safe_files
from attnc.exports.safe_files import pack_tensors, parse_json, read_json, read_tensors
from attnc.proofs.kinds.point import MAX_STORED
from attnc_checker.files import BadFile
from attnc_checker.files import parse_json as parse_json_again

TENSORS: dict[str, np.ndarray] = {
    "a.values": np.array([-0.0, 5e-324, 1e308]),
    "a.index": np.array([[0, 1], [2, 3], [4, 5]], np.int32),
    "b": np.array([[1, 2]], np.float32),
    "empty": np.zeros((0, 4), np.int64),
    "β": np.arange(3),
}
EXPECTED = {name: (tensor.dtype, tensor.shape) for name, tensor in TENSORS.items()}


def written(folder: Path, content: bytes, name: str = "file") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def read(path: Path, expected: Any = EXPECTED, max_bytes: int = 10_000) -> dict[str, np.ndarray]:
    return read_tensors(path, expected, max_bytes)[0]


def safetensors(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def test_tensors_survive_bit_for_bit_and_the_library_agrees(tmp_path: Path) -> None:
    path = written(tmp_path, pack_tensors(TENSORS))
    (found, digest), library = read_tensors(path, EXPECTED, 10_000), load_file(path)
    assert found.keys() == library.keys() == TENSORS.keys()
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].tobytes() == tensor.tobytes() == library[name].tobytes()
        assert found[name].flags.writeable
        assert found[name].flags.aligned


def test_packing_does_not_depend_on_order_or_on_strides(tmp_path: Path) -> None:
    turned = dict(reversed(TENSORS.items()))
    assert pack_tensors(turned) == pack_tensors(TENSORS)
    matrix = np.arange(6.0).reshape(2, 3)
    assert pack_tensors({"m": matrix.T}) == pack_tensors({"m": matrix.T.copy()})
    assert read(written(tmp_path, pack_tensors({})), {}, 0) == {}


def test_a_header_too_long_to_be_read_back_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_files, "MAX_HEADER_BYTES", 100)
    with pytest.raises(FileError, match="header"):
        pack_tensors(TENSORS)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = pack_tensors(TENSORS)
    for length in range(len(whole)):
        with pytest.raises(FileError):
            read(written(tmp_path, whole[:length]))
    with pytest.raises(FileError, match="the tensors need"):
        read(written(tmp_path, whole + b"\0"))


@pytest.mark.parametrize("length", [0, 1, 2**24, 2**24 + 1, 2**63, 2**64 - 1])
def test_lying_header_lengths_are_refused(tmp_path: Path, length: int) -> None:
    whole = length.to_bytes(8, "little") + pack_tensors(TENSORS)[8:]
    with pytest.raises(FileError):
        read(written(tmp_path, whole))


def entry(dtype: Any = "F64", shape: Any = (1,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "header",
    [
        *(b"", b"[]", b"{", b'{"a": NaN}', b'{"\xff": 1}', b'{"a":' * 100_000, b"[" * 100_000),
        *({"a": described} for described in (1, {}, {**entry(), "more": 1})),
        *({"a": entry(dtype=dtype)} for dtype in ("F16", "BOOL", ["F64"], None)),
        *({"a": entry(shape=shape)} for shape in ([-1], [1.0], [True], "1", [2], [2**62], [2**80], [1] * 65)),
        *({"a": entry(offsets=ends)} for ends in ([0], [8, 0], [-8, 0], [8, 16], [0, 8.0], [2**64, 2**64 + 8])),
        {"a": entry(shape=[0, 2**62, 2**62], offsets=[0, 0])},
        {"a": entry(), "b": entry()},
        {"a": entry(dtype="F32", offsets=[0, 4]), "b": entry(dtype="F32", offsets=[2, 6])},
        {"a": entry(dtype="F32", offsets=[0, 4])},
        b'{"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]},"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}',
    ],
)
def test_lying_headers_are_refused(tmp_path: Path, header: Any) -> None:
    kind = np.dtype(np.float32) if b"F32" in safetensors(header) else np.dtype(np.float64)
    names = header if isinstance(header, dict) else "a"
    with pytest.raises(FileError):
        read(written(tmp_path, safetensors(header, bytes(8))), dict.fromkeys(names, (kind, (1,))))


def test_tensors_other_than_expected_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, pack_tensors(TENSORS))
    for name in TENSORS:
        with pytest.raises(FileError, match="is not expected"):
            read(path, {k: v for k, v in EXPECTED.items() if k != name})
        for wrong in ((np.dtype(np.float32), (9,)), (np.dtype(np.int32), EXPECTED[name][1] + (1,))):
            with pytest.raises(FileError, match="expected"):
                read(path, {**EXPECTED, name: wrong})
    with pytest.raises(FileError, match="'more' is missing"):
        read(path, {**EXPECTED, "more": EXPECTED["b"]})


def test_sizes_are_checked_before_anything_is_allocated(tmp_path: Path) -> None:
    size = 2**32
    path = written(tmp_path, safetensors({"a": entry("F64", [size // 8], [0, size])}))
    os.truncate(path, path.stat().st_size + size)  # a sparse file: large, and free
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match="max_bytes"):
            read(path, {"a": (np.dtype(np.float64), (size // 8,))}, size - 1)
        with pytest.raises(FileError, match="expected"):
            read(path, {"a": (np.dtype(np.float64), (1,))}, 2 * size)
        with pytest.raises(FileError, match="bytes"):
            read_json(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_file_that_shrinks_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, pack_tensors({"a": np.zeros(100_000)}))  # more than a buffer holds
    check = safe_files._check_header

    def shrink(*arguments: Any) -> Any:
        os.truncate(path, 200)
        return check(*arguments)

    monkeypatch.setattr(safe_files, "_check_header", shrink)
    with pytest.raises(FileError, match="shorter"):
        read(path, {"a": (np.dtype(np.float64), (100_000,))}, 10**6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_flipped_bytes_are_a_file_error_or_other_values(tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(pack_tensors(TENSORS))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read(written(tmp_path, bytes(whole)))
    except FileError:
        return
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == EXPECTED


def test_json_objects_are_read(tmp_path: Path) -> None:
    value = {"β": [1, -0.5, None, True, {"deep": "\U0001d53d"}], "big": 2**100, "small": 1e-320}
    for ascii_only in (True, False):
        assert read_json(written(tmp_path, json.dumps(value, ensure_ascii=ascii_only).encode())) == value


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"null", b"[1]", b'"text"', b"{", b"{} {}", b"{'a': 1}", b'{"a": 1,}', b"\xef\xbb\xbf{}"),
        *(b'{"a": ' + value + b"}" for value in (b"NaN", b"-Infinity", b"1e999", b"9" * 5000)),
        *(b'{"a": 1, "a": 1}', b'{"a": {"b": [{"c": 1, "c": 2}]}}'),
        *(b'{"a": "' + letter + b'"}' for letter in (b"\xff", b"\xed\xa0\x80", b"\\ud800")),
        '{"a": 1}'.encode("utf-16"),
        *(b'{"a": ' + b"[" * depth + b"]" * depth + b"}" for depth in (64, 100_000)),
        b'{"a": ' * 100_000 + b"1" + b"}" * 100_000,
    ],
)
def test_bad_json_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(FileError):
        read_json(written(tmp_path, content))


def test_json_has_a_size_limit(tmp_path: Path) -> None:
    path = written(tmp_path, b'{"a": 12345}')
    assert read_json(path, max_bytes=12) == {"a": 12345}
    with pytest.raises(FileError, match="12 bytes, more than the 11"):
        read_json(path, max_bytes=11)


@pytest.mark.parametrize(("reader", "refusal"), [(parse_json, FileError), (parse_json_again, BadFile)])
@pytest.mark.parametrize(
    "content",
    [
        *(b'{"a": [' + unit * 2**21 + b"0]}" for unit in (b"[],", b"{},", b"0,", b'{"a":0},')),
        b'{"a": ' + b"[" * 2**22,
        b'{"a": "' + b"x" * 2**24 + "😀".encode() + b'"}',
        b'{"a": "' + b"x" * 2**25 + "β".encode() + b'"}',
    ],
)
def test_json_that_would_take_much_memory_is_not_parsed(reader: Any, refusal: type[Exception], content: bytes) -> None:
    """Lists take 20 times the memory of their text, and one wide letter makes all letters of a text wide."""
    tracemalloc.start()
    try:
        with pytest.raises(refusal, match=r"values|bytes"):
            reader(content, "a file")
        assert tracemalloc.get_traced_memory()[1] < 2**16
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("reader", [parse_json, parse_json_again])
def test_the_longest_certificate_of_a_table_is_read(reader: Any) -> None:
    """It has as many rows and digits as attnc stores, and its text has letters of 2 bytes."""
    rows = MAX_STORED // 2
    row = "[-1.2345678901234567e-100, -1.2345678901234567e-200], "
    content = f'{{"note": "≤ β", "table": [{row * (rows - 1)}{row[:-2]}]}}'.encode()
    assert len(reader(content, "a file")["table"]) == rows


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=50))
def test_random_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    path = written(tmp_path, content)
    for reader in (read_json, lambda path: read(path, {})):
        try:
            assert isinstance(reader(path), dict)
        except FileError:
            continue


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    written(tmp_path, b"{}", "real")
    (tmp_path / "link").symlink_to("real")
    for name in ("pipe", "folder", "device", "loop", "dangling", "absent", "real/inside", "n" * 300, "nul\0", "\ud800"):
        for reader in (read_json, read):
            with pytest.raises(FileError):
                reader(tmp_path / name)
    assert read_json(tmp_path / "link") == {}
