"""Saved networks: loading gives back what was saved, or a FileError tells the reason.

Directories are written whole or not at all, and only saved networks are replaced.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import attnc
from attnc.errors import FileError, ProgramError
from attnc.exports import safe_files
from attnc.exports.directory import FORMAT, NETWORK, load_network, save_network
from attnc.exports.safe_files import pack_tensors, write_whole
from attnc.exports.tensors import encode
from attnc.ir.layers import Affine, Softmax
from attnc.ir.program import Program
from attnc.ir.sparse import Sparse
from attnc.proofs.cells.branching import MOST_PROOF_CELLS
from ir.random_programs import programs

CONFIG: dict[str, Any] = {"variables": ["x", "β"], "expression": "sin(x)", "eps": 1e-6, "none": None}
CERTIFICATES: dict[str, dict[str, Any]] = {
    "certificate.json": {"format": "attnc.certificate/1", "weights_sha256": None, "bound": 1e-7, "leaves": [[0, 1]]},
    "certificate.float32.json": {"bound": 1e-3},
}


ABSENT = object()
DEEP: dict[str, Any] = {}
for _ in range(5000):
    DEEP = {"a": DEEP}


def line(slope: float) -> Program:
    weight = Sparse((1, 1, 1, 1), np.zeros((1, 4), np.int32), np.array([slope]))
    return Program((Affine("line", weight, Sparse.zeros((1, 1), np.float64), ("y",)),), ((1,),), (1,))


def refused(path: Path, complaint: str | None = None) -> None:
    """The folder is not loaded, and the message gives the reason."""
    with pytest.raises(FileError, match=complaint):
        load_network(path)


def save(path: Path, slope: float = 2.0) -> str:
    return save_network(path, line(slope), CONFIG, CERTIFICATES, "# A line\n")


@pytest.fixture
def net(tmp_path: Path) -> Path:
    save(tmp_path / "net")
    return tmp_path / "net"


def rewrite(path: Path, **changes: Any) -> None:
    """Change the fields, and leave out those that are `ABSENT`."""
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ABSENT}))


def assert_same_bits(first: Program, second: Program) -> None:
    assert encode(first)[0] == encode(second)[0]
    assert pack_tensors(encode(first)[1]) == pack_tensors(encode(second)[1])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(programs(wild=True))
def test_what_was_saved_is_loaded(tmp_path: Path, program: Program) -> None:
    digest = save_network(tmp_path / "net", program, CONFIG, CERTIFICATES, "card")
    loaded, config, certificates, digests = load_network(tmp_path / "net")
    assert_same_bits(loaded, program)
    assert config == CONFIG
    assert certificates == {name: {**value, "weights_sha256": digest} for name, value in CERTIFICATES.items()}
    before = {path.name: path.read_bytes() for path in (tmp_path / "net").iterdir()}
    read = {name: raw for name, raw in before.items() if name != "README.md"}
    assert digests == {name: hashlib.sha256(raw).hexdigest() for name, raw in read.items()}
    save_network(tmp_path / "net", loaded, config, certificates, "card")
    assert {path.name: path.read_bytes() for path in (tmp_path / "net").iterdir()} == before


def test_the_files(tmp_path: Path) -> None:
    digest = save(tmp_path / "net")
    names = ["README.md", "certificate.float32.json", "certificate.json", "config.json", "model.safetensors"]
    assert sorted(os.listdir(tmp_path / "net")) == names
    assert hashlib.sha256((tmp_path / "net" / "model.safetensors").read_bytes()).hexdigest() == digest
    config = json.loads((tmp_path / "net" / "config.json").read_text())
    assert config["format"] == FORMAT == "attnc.network/1"
    assert config["program"]["layers"][0]["name"] == "line"
    assert (tmp_path / "net" / "config.json").read_text().startswith('{\n  "format"')
    certificate = json.loads((tmp_path / "net" / "certificate.json").read_text())
    assert list(certificate) == ["format", "weights_sha256", "bound", "leaves"]
    assert certificate["weights_sha256"] == digest
    assert (tmp_path / "net" / "README.md").read_text() == "# A line\n"


@pytest.mark.parametrize(
    ("config", "certificates", "card"),
    [
        *(({"eps": eps}, {}, "") for eps in (float("nan"), float("inf"), np.float32(1))),
        *(
            (config, {}, "")
            for config in ({"format": "mine"}, {"program": {}}, {1: "a", "1": "b"}, {"n": "\ud800"}, DEEP)
        ),
        *(({}, {"certificate.json": {"bound": bound}}, "") for bound in (float("nan"), {1, 2})),
        *(({}, {name: {}}, "") for name in ("config.json", "../certificate.json", "proof.json")),
        ({}, {}, "\ud800"),
    ],
)
def test_what_cannot_be_read_back_is_not_written(tmp_path: Path, config: Any, certificates: Any, card: str) -> None:
    with pytest.raises(FileError):
        save_network(tmp_path / "net", line(1.0), config, certificates, card)
    assert not os.listdir(tmp_path)


def test_illegal_programs_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ProgramError):
        save_network(tmp_path / "net", Program((Softmax("s", ("a", "b")),), ((1,),), (1,)), {}, {}, "")
    assert not os.listdir(tmp_path)


def test_a_second_save_removes_what_belongs_to_the_first(tmp_path: Path, net: Path) -> None:
    save_network(net, line(3.0), {}, {"certificate.json": {}}, "")
    assert "certificate.float32.json" not in os.listdir(net)
    assert list(load_network(f"{tmp_path}/net/")[2]) == ["certificate.json"]


def test_paths_that_are_no_network(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    complaints = {"absent": "does not exist", "file": "is not a folder", "dangling": "is not a folder", "nul\0": "not"}
    for name, complaint in {**complaints, "empty": "config.json' is missing"}.items():
        refused(tmp_path / name, complaint)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "certificate.json", "certificate.float32.json"])
def test_missing_and_damaged_files_are_named(net: Path, name: str) -> None:
    path = net / name
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"\xff" + whole[1:], b"[]", b"[" * 100_000, whole + b"\0"):
        path.write_bytes(damaged)
        refused(net, name)
    path.unlink()
    refused(net, f"{name}' is missing")
    path.symlink_to("/dev/zero")
    refused(net, "not a regular file")
    path.unlink()
    path.mkdir()
    refused(net, "not a regular file")


def test_the_card_is_for_people_only(net: Path) -> None:
    (net / "README.md").unlink()
    load_network(net)


def test_links_to_the_files_are_followed(tmp_path: Path) -> None:
    """As in the cache of the Hugging Face hub."""
    save(tmp_path / "blobs")
    (tmp_path / "net").mkdir()
    for name in os.listdir(tmp_path / "blobs"):
        (tmp_path / "net" / name).symlink_to(f"../blobs/{name}")
    assert_same_bits(load_network(tmp_path / "net")[0], line(2.0))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"format": "attnc.network/2"},
            "has the format 'attnc.network/2', and this version of attnc reads 'attnc.network/1'",
        ),
        ({"format": "attnc.network/1.0"}, "this version of attnc reads"),
        *(({"format": other}, "does not state its format, which should be") for other in ("bert", None, 1, ABSENT)),
        *(({key: ABSENT}, f"lacks the key '{key}'") for key in ("program", "certificates")),
        ({"program": None}, "does not describe a program"),
        *(({"certificates": x}, "list its certificates") for x in (None, ["../../secret"], [["certificate.json"]])),
        ({"certificates": ["certificate.json", "certificate.float16.json"]}, "certificate.float16.json' is missing"),
    ],
)
def test_configurations_that_are_not_read(net: Path, changes: dict[str, Any], complaint: str) -> None:
    rewrite(net / "config.json", **changes)
    refused(net, complaint)


@pytest.mark.parametrize("name", ["certificate.json", "certificate.float32.json", "model.safetensors"])
def test_files_of_another_network_are_refused(tmp_path: Path, name: str) -> None:
    save(tmp_path / "net", 2.0)
    save(tmp_path / "other", 3.0)
    shutil.copy(tmp_path / "other" / name, tmp_path / "net" / name)
    refused(tmp_path / "net", "the certificate belongs to other weights")


def test_a_certificate_that_was_added_must_fit_too(net: Path) -> None:
    shutil.copy(net / "certificate.json", net / "certificate.float16.json")
    assert len(load_network(net)[2]) == 3
    for digest in ("0" * 64, None, 3, ["x" * 10_000]):
        rewrite(net / "certificate.float16.json", weights_sha256=digest)
        refused(net, "belongs to other weights")


FILES = ("config.json", "model.safetensors", "certificate.json")


@pytest.mark.parametrize("names", [*itertools.combinations(FILES, 2)])
def test_swapped_files_are_refused(net: Path, names: tuple[str, str]) -> None:
    contents = [(net / name).read_bytes() for name in names]
    for name, content in zip(names, reversed(contents), strict=True):
        (net / name).write_bytes(content)
    refused(net)


def damaged_tensors(path: Path, **changes: np.ndarray | None) -> None:
    """Rewrites the weights, and the certificates to fit: whoever can do the one can do the other."""
    tensors: dict[str, Any] = {**load_file(path / "model.safetensors"), **changes}
    packed = pack_tensors({name: tensor for name, tensor in tensors.items() if tensor is not None})
    (path / "model.safetensors").write_bytes(packed)
    for name in CERTIFICATES:
        rewrite(path / name, weights_sha256=hashlib.sha256(packed).hexdigest())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"layers.0.line.weight.index": np.array([[0, 0, 0, 1]], np.int32)}, "index outside its shape"),
        ({"layers.0.line.weight.index": np.array([[0, 0, -1, 0]], np.int32)}, "index outside its shape"),
        ({"layers.0.line.weight.index": np.array([[0, 0, 0, 0]], np.int64)}, "expected int32"),
        ({"layers.0.line.weight.values": np.array([np.nan])}, "not finite"),
        ({"layers.0.line.weight.values": np.array([1], np.float32)}, "expected float64"),
        ({"layers.0.line.weight.values": np.array([1.0, 2.0])}, "expected float64 of shape"),
        ({"layers.0.line.weight.values": None}, "is missing"),
        ({"layers.0.line.bias": np.zeros(1)}, "not expected"),
    ],
)
def test_damaged_weights_are_refused(net: Path, changes: dict[str, Any], complaint: str) -> None:
    damaged_tensors(net, **changes)
    refused(net, complaint)


def test_sizes_that_are_promised_are_not_allocated(net: Path) -> None:
    program = json.loads((net / "config.json").read_text())["program"]
    program["layers"][0]["weight"].update(shape=[2**15, 2**15, 2**15, 1], num_entries=2**45)
    rewrite(net / "config.json", program=program)
    refused(net, "expected int32 of shape")


def test_max_bytes(net: Path) -> None:
    load_network(net, max_bytes=24)
    with pytest.raises(FileError, match="24 bytes of tensors, more than max_bytes = 23"):
        load_network(net, max_bytes=23)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["config.json", "model.safetensors", "certificate.json"]), st.data())
def test_any_flipped_byte_is_a_file_error_or_harmless(tmp_path: Path, name: str, data: st.DataObject) -> None:
    save(tmp_path / "net")
    path = tmp_path / "net" / name
    whole = bytearray(path.read_bytes())
    where = data.draw(st.integers(0, len(whole) - 1))
    whole[where] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(whole))
    try:
        program = load_network(tmp_path / "net").program
        assert name != "model.safetensors"  # their SHA-256 is in the certificates
        np.testing.assert_array_equal(program(np.ones((1, 1))), [[2.0]])
    except FileError:
        pass
    finally:
        shutil.rmtree(tmp_path / "net")


OLD = {"config.json": json.dumps({"format": FORMAT}).encode(), "model.safetensors": b"old", "README.md": b"old"}
NEW = {"config.json": json.dumps({"format": FORMAT}).encode(), "model.safetensors": b"new", "certificate.json": b"{}"}


PIPE = object()


def make(folder: Path, scene: dict[str, Any]) -> None:
    """Make files of bytes, links of texts, a folder of None, and a pipe; the opposite of `contents`."""
    for name, content in scene.items():
        path = folder / name
        if content is None or content is PIPE:
            (os.mkfifo if content is PIPE else os.mkdir)(path)
        elif isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)


def network(extra: str, content: Any) -> dict[str, Any]:
    return {"net": None, **{f"net/{name}": old for name, old in OLD.items()}, f"net/{extra}": content}


def contents(folder: Path) -> dict[str, Any]:
    """Everything below, links as links."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        found[str(path.relative_to(folder))] = (
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        )
    return found


def test_a_new_directory_whose_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_whole(tmp_path / "net", NEW, NETWORK)
    finally:
        os.umask(before)
    assert contents(tmp_path) == {"net": None, **{f"net/{name}": content for name, content in NEW.items()}}
    assert stat.S_IMODE((tmp_path / "net").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "net" / "config.json").stat().st_mode) == 0o644


@pytest.mark.parametrize("name", ["net/", "net//", "./net", "sub/../net", "sub/./../net/"])
def test_ways_to_spell_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    write_whole(name, OLD, NETWORK)
    assert contents(tmp_path / "net") == OLD
    write_whole(name, NEW, NETWORK)
    assert contents(tmp_path / "net") == NEW
    assert sorted(os.listdir(tmp_path)) == ["net", "sub"]


def test_a_link_to_a_saved_network_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write_whole(tmp_path / "deep" / "real", OLD, NETWORK)
    (tmp_path / "net").symlink_to("deep/real")
    write_whole(f"{tmp_path}/net/", NEW, NETWORK)
    assert contents(tmp_path) == {
        "deep": None,
        "deep/real": None,
        "net": "deep/real",
        **{f"deep/real/{name}": content for name, content in NEW.items()},
    }


@pytest.mark.parametrize(
    ("scene", "found"),
    [
        ({"net": b"precious"}, "a file, not a folder"),
        ({"other": b"precious", "net": "other"}, "a file, not a folder"),
        ({"net": "nowhere"}, "leads nowhere"),
        ({"net": "net"}, "leads nowhere"),
        ({"net": None}, "an empty folder"),
        ({"net": None, "net/thesis.tex": b"precious"}, "not a saved network"),
        ({"other": None, "other/thesis.tex": b"precious", "net": "other"}, "not a saved network"),
        ({"net": None, "net/config.json": b'{"format": "pt", "model_type": "bert"}'}, "not a saved network"),
        ({"net": None, "net/config.json": b'{"format": "attnc.network/1"'}, "not a saved network"),
        ({"net": None, "net/config.json": b'{"format": ["attnc.network/1"]}'}, "not a saved network"),
        (network("notes.txt", b"precious"), "'notes.txt'"),
        (network("certificate.more.json", None), "'certificate.more.json'"),
        ({"net": PIPE}, "neither a file nor a folder"),
    ],
)
@pytest.mark.parametrize("ending", ["", "/"])
def test_anything_else_is_refused_and_untouched(tmp_path: Path, scene: dict[str, Any], found: str, ending: str) -> None:
    make(tmp_path, scene)
    before = contents(tmp_path)
    with pytest.raises(FileError, match=found) as caught:
        write_whole(f"{tmp_path}/net{ending}", NEW, NETWORK)
    assert "Choose another name" in str(caught.value)
    assert contents(tmp_path) == before


def test_only_the_last_folder_is_created(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"the folder .*/missing' does not exist"):
        write_whole(tmp_path / "missing" / "net", NEW, NETWORK)
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(FileError, match="is not a folder"):
        write_whole(tmp_path / "file" / "net", NEW, NETWORK)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("path", ["", "/", ".", "..", "n" * 300, "nul\0", "\ud800", "/proc/net-of-attnc"])
def test_impossible_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(FileError):
        write_whole(path, NEW, NETWORK)
    assert contents(tmp_path) == {"here": None}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "/a", "a\\b", "a\0"])
def test_files_have_plain_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileError, match="plain name"):
        write_whole(tmp_path / "net", {**NEW, name: b""}, NETWORK)
    assert not os.listdir(tmp_path)


class Calls:
    """Stands in for a function: the call of this number fails, before it does anything."""

    def __init__(self, function: Callable[..., Any], fails_at: int, error: BaseException) -> None:
        self.function, self.fails_at, self.error, self.count = function, fails_at, error, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.count += 1
        if self.count == self.fails_at:
            raise self.error
        return self.function(*arguments, **options)


ERRORS = [OSError(28, "No space left on device"), PermissionError(13, "Permission denied"), KeyboardInterrupt()]
STEPS = [(os, "mkdir", 1), (os, "rename", 2), (os, "fsync", 4), (safe_files, "_write_file", 3)]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize(("owner", "name", "num_calls"), STEPS)
def test_a_crash_midway_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    num_calls: int,
    is_new: bool,
    error: BaseException,
) -> None:
    if not is_new:
        write_whole(tmp_path / "net", OLD, NETWORK)
    before = contents(tmp_path)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else FileError
    for fails_at in range(1, num_calls + 1):
        never_happens = is_new and name == "rename" and fails_at == 2
        is_folder = name == "fsync" and fails_at == 4  # folders are flushed only where the file system can
        if never_happens or (is_folder and expected is FileError):
            continue
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Calls(getattr(owner, name), fails_at, error))
            with pytest.raises(expected, match=getattr(error, "strerror", None)):
                write_whole(tmp_path / "net", NEW, NETWORK)
        assert contents(tmp_path) == before
    write_whole(tmp_path / "net", NEW, NETWORK)
    assert contents(tmp_path / "net") == NEW


@pytest.mark.parametrize(("owner", "name", "num_calls"), [*STEPS, (shutil, "rmtree", 2), (os, "unlink", 2)])
def test_ctrl_c_at_any_step_leaves_the_old_network_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, num_calls: int
) -> None:
    """The signal itself: it arrives in the middle of the step, which goes on."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    try:
        for number in range(1, num_calls + 1):
            write_whole(tmp_path / "net", OLD, NETWORK)
            real, calls = getattr(owner, name), itertools.count(1)

            def interrupted(*arguments: Any, real=real, calls=calls, number=number, **options: Any) -> Any:
                if next(calls) == number:
                    signal.raise_signal(signal.SIGINT)
                return real(*arguments, **options)

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    write_whole(tmp_path / "net", NEW, NETWORK)
            assert os.listdir(tmp_path) == ["net"], f"{name}, call {number}"
            assert contents(tmp_path / "net") in (OLD, NEW)
    finally:
        signal.signal(signal.SIGINT, before)


def test_folders_that_cannot_be_flushed_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", Calls(os.open, 1, OSError(22, "Invalid argument")))
    write_whole(tmp_path / "net", NEW, NETWORK)
    assert contents(tmp_path / "net") == NEW


def test_an_old_network_that_cannot_be_put_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "net", OLD, NETWORK)
    monkeypatch.setattr(os, "rename", Calls(os.rename, 2, OSError(5, "Input/output error")))
    monkeypatch.setattr(os, "replace", Calls(os.replace, 1, OSError(5, "Input/output error")))
    with pytest.raises(FileError, match="The former content is now in") as caught:
        write_whole(tmp_path / "net", NEW, NETWORK)
    (left,) = os.listdir(tmp_path)
    assert left in str(caught.value)
    assert contents(tmp_path / left) == OLD


def test_an_old_network_that_cannot_be_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "net", OLD, NETWORK)
    monkeypatch.setattr(shutil, "rmtree", Calls(shutil.rmtree, 1, OSError(5, "Input/output error")))
    with pytest.raises(FileError, match="was saved, but"):
        write_whole(tmp_path / "net", NEW, NETWORK)
    assert contents(tmp_path / "net") == NEW


def test_what_is_a_saved_network(tmp_path: Path) -> None:
    write_whole(tmp_path / "net", OLD, NETWORK)
    assert NETWORK.includes(tmp_path / "net")
    assert NETWORK.includes(f"{tmp_path}/net/")
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "config.json").write_text('{"format": "attnc.network/99"}')
    assert NETWORK.includes(tmp_path / "later")
    assert not NETWORK.includes(tmp_path)
    assert not NETWORK.includes(tmp_path / "absent")
    assert not NETWORK.includes(tmp_path / "net" / "config.json")
    assert not NETWORK.includes("nul\0")


def test_the_longest_proof_by_leaves_can_be_saved(tmp_path: Path) -> None:
    """The kink cancels on a line, and no leaf across it is small: the proof takes as many cells as it may."""
    network = attnc.compile("max(x,y)+min(x,y)-x-y", [(-1, 2)] * 2, 1e-3, construction="spectral_grid")
    assert network.certificate.num_leaves > MOST_PROOF_CELLS / 2
    network.save(tmp_path / "net")
    assert attnc.load(tmp_path / "net").certificate.bound == network.certificate.bound <= 1e-3
