"""Inputs that nobody means well: files that lie about their sizes, texts without end, pipes and devices.

`python -m cli.hostile_inputs` in `tests` runs every case and prints a table: the exit code, the seconds of CPU time
without the start of Python, the largest memory of a process, and the first line of the answer.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import attnc
from checker.networks import save_slow
from checker.tampering import edit, write_weights

MAX_ADDRESSES, MAX_SECONDS = 2**33, 120
"""A case may take 8 GiB and two minutes before it is ended, so that a failing test does not end the machine."""
Words = tuple[str | Path, ...]
READERS: dict[str, Callable[[Path], Words]] = {
    "info": lambda net: ("info", net),
    "eval": lambda net: ("eval", net, "x=1", "y=1"),
    "verify": lambda net: ("verify", net),
    "plot": lambda net: ("plot", net, "--out", net.parent / "out.svg"),
    "export": lambda net: ("export", net, "--to", "onnx", "--out", net.parent / "out.onnx"),
    "diagnose": lambda net: ("diagnose", net),
    "load": lambda net: ("load", net),  # attnc.load, in Python
}
"""The commands that read a saved network."""


class Case(NamedTuple):
    """A hostile input: its name, its files and the arguments that use them, and the exit codes that are right."""

    name: str
    words: Callable[[Path], Words]
    codes: tuple[int, ...] = (2,)


class Answer(NamedTuple):
    code: int
    cpu_seconds: float
    peak_mb: float
    out: str
    err: str

    @property
    def message(self) -> str:
        return next((line for line in (self.err + self.out).splitlines() if any(map(str.islower, line))), "")


def edited(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda net: edit(net, name, change)


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(net: Path) -> None:
        (net / name).unlink()
        make(net / name)

    return change


def written(name: str, content: Callable[[], bytes]) -> Callable[[Path], None]:
    """The content is made when it is needed: some are large."""
    return replaced(name, lambda path: path.write_bytes(content()))


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda net: edit(net, "header", change)


def length(value: int) -> Callable[[Path], None]:
    """The first eight bytes of the weights state this many bytes of header."""
    return lambda net: write_weights(net, value.to_bytes(8, "little") + (net / "model.safetensors").read_bytes()[8:])


def first(value: dict[str, Any]) -> Any:
    """Return the first entry that is not empty."""
    return next(entry for entry in value.values() if math.prod(entry["shape"]))


def every(data: dict[str, Any], value: object) -> dict[str, Any]:
    """Give every field the same value, but those that are looked at first."""
    return {name: value for name in data if name not in ("format", "weights_sha256", "certificates")}


def tokens(config: dict[str, Any]) -> None:
    """Let 1.6 kB of weights make 2^18 tokens."""
    layers = config["program"]["layers"]
    layers[0]["weight"]["shape"][0] = layers[0]["constant"]["shape"][0] = layers[-1]["weight"]["shape"][2] = 2**18


def deep(levels: int, opening: str = "[", closing: str = "]") -> bytes:
    return ('{"format": ' + opening * levels + closing * levels + "}").encode()


NETWORKS: dict[str, Callable[[Path], object]] = {
    "config of 100 MB of []": written("config.json", lambda: b'{"a": [' + b"[]," * 33_333_333 + b"[]]}"),
    "config of 60 MB of []": written("config.json", lambda: b'{"a": [' + b"[]," * 20_000_000 + b"[]]}"),
    "certificate of 60 MB of []": written("certificate.json", lambda: b'{"a": [' + b"[]," * 20_000_000 + b"[]]}"),
    "certificate of 60 MB of text": written("certificate.json", lambda: b'{"a": "' + b"x" * 60_000_000 + b'"}'),
    "certificate of 64 MB of blanks": written("certificate.json", lambda: b"{}" + b" " * (2**26 - 2)),
    "config of a million keys": written(
        "config.json", lambda: b"{" + b",".join(b'"%d":0' % i for i in range(10**6)) + b"}"
    ),
    "config nested 60 levels": written("config.json", lambda: deep(60)),
    "config nested 100,000 levels": written("config.json", lambda: deep(10**5)),
    "certificate nested 100,000 levels": written("certificate.json", lambda: deep(10**5, '{"a":', "}")),
    "number of a million digits": written("certificate.json", lambda: b'{"bound": ' + b"1" * 10**6 + b"}"),
    "config with a key twice": written("config.json", lambda: b'{"a": 1, "a": 2}'),
    "config with NaN": edited("config.json", lambda data: data.update(eps=math.nan)),
    "certificate with Infinity": edited("certificate.json", lambda data: data.update(bound=math.inf)),
    "certificate with 1e999": written("certificate.json", lambda: b'{"bound": 1e999}'),
    "certificate is a list": written("certificate.json", lambda: b"[]"),
    "config is empty": written("config.json", lambda: b""),
    "certificate is empty": written("certificate.json", lambda: b""),
    "weights are empty": written("model.safetensors", lambda: b""),
    "config is missing": lambda net: (net / "config.json").unlink(),
    "weights are missing": lambda net: (net / "model.safetensors").unlink(),
    "config is noise": written("config.json", lambda: bytes(range(256)) * 40),
    "config with NUL bytes": written("config.json", lambda: b'{"format\0": 1}'),
    "config in UTF-16": replaced("config.json", lambda path: path.write_text('{"a": 1}', encoding="utf-16")),
    "weights are noise": written("model.safetensors", lambda: bytes(range(256)) * 40),
    "config is a folder": replaced("config.json", Path.mkdir),
    "weights are a folder": replaced("model.safetensors", Path.mkdir),
    "config is a pipe": replaced("config.json", os.mkfifo),
    "certificate is a pipe": replaced("certificate.json", os.mkfifo),
    "config is /dev/zero": replaced("config.json", lambda path: path.symlink_to("/dev/zero")),
    "weights are /dev/zero": replaced("model.safetensors", lambda path: path.symlink_to("/dev/zero")),
    "config is a link to itself": replaced("config.json", lambda path: path.symlink_to(path)),
    "weights are a link to nothing": replaced("model.safetensors", lambda path: path.symlink_to("nothing")),
    "weights of 300 GB, all holes": lambda net: os.truncate(net / "model.safetensors", 3 * 10**11),
    "weights are cut": lambda net: os.truncate(net / "model.safetensors", 1000),
    "certificate named ../": edited("config.json", lambda data: data.update(certificates=["../certificate.json"])),
    "certificate named /dev/zero": edited("config.json", lambda data: data.update(certificates=["/dev/zero"])),
    "a hundred thousand certificates": edited(
        "config.json", lambda data: data.update(certificates=[f"certificate-{i}.json" for i in range(10**5)])
    ),
    "header of 2^63 bytes": length(2**63),
    "header of 2^64 - 1 bytes": length(2**64 - 1),
    "header of 0 bytes": length(0),
    "header one byte too long": lambda net: length(
        int.from_bytes((net / "model.safetensors").read_bytes()[:8], "little") + 1
    )(net),
    "tensor of 2^62 numbers": header(lambda data: first(data).update(shape=[2**31, 2**31])),
    "tensor of a negative size": header(lambda data: first(data).update(shape=[-1])),
    "tensor of size 0": header(lambda data: first(data).update(shape=[0])),
    "tensor with offsets beyond the file": header(lambda data: first(data).update(data_offsets=[0, 2**50])),
    "tensor with negative offsets": header(lambda data: first(data).update(data_offsets=[-8, 8])),
    "all tensors at one place": header(
        lambda data: [entry.update(data_offsets=first(data)["data_offsets"]) for entry in data.values()]
    ),
    "tensor of unknown dtype": header(lambda data: first(data).update(dtype="F1024")),
    "tensor whose shape is a text": header(lambda data: first(data).update(shape="x" * 10**6)),
    "tensor of ten thousand axes": header(lambda data: first(data).update(shape=[1] * 10**4)),
    "header with NaN": header(lambda data: data.update(a=math.nan)),
    "2^18 tokens": edited("config.json", tokens),
    "10^18 tokens": edited(
        "config.json", lambda data: data["program"]["layers"][0]["weight"]["shape"].__setitem__(0, 10**18)
    ),
    "program is null": edited("config.json", lambda data: data.update(program=None)),
    "layers are a text": edited("config.json", lambda data: data["program"].update(layers="x" * 1000)),
    "ten thousand layers": edited(
        "config.json", lambda data: data["program"].update(layers=data["program"]["layers"][:1] * 10**4)
    ),
    "layer of unknown kind": edited("config.json", lambda data: data["program"]["layers"][0].update(kind=["affine"])),
    "box of texts": edited("both", lambda data: data.update(box={"x": ["a", "b"], "y": [0, 1]})),
    "box of huge integers": edited("both", lambda data: data.update(box={"x": [0, 10**400], "y": [0, 1]})),
    "leaves are a number": edited("certificate.json", lambda data: data.update(leaves=3)),
    "bound is a text": edited("certificate.json", lambda data: data.update(bound="1")),
    "leaf bounds are texts": edited("certificate.json", lambda data: data.update(leaf_bounds=["1"] * 10)),
    "dtype is a list": edited("certificate.json", lambda data: data.update(dtype=["float64"])),
    "variables are numbers": edited("config.json", lambda data: data.update(variables=[1, 2])),
    "heads are a number": edited("config.json", lambda data: data["program"]["layers"][1].update(heads=2)),
    "leaf of cell 10^30": edited("certificate.json", lambda data: data["leaves"][0].__setitem__(3, 10**30)),
    "leaf of level 10^9": edited("certificate.json", lambda data: data["leaves"][0].__setitem__(2, 10**9)),
    "every field is a list": edited("certificate.json", lambda data: data.update(every(data, [[]]))),
    "every field is a number": edited("certificate.json", lambda data: data.update(every(data, 7))),
    "every field is null": edited("certificate.json", lambda data: data.update(every(data, None))),
    "every field of config is null": edited("config.json", lambda data: data.update(every(data, None))),
}
"""Changes to a saved network of x and y that no command may take."""
CLAIMS: dict[str, Callable[[Path], object]] = {
    "expression of a megabyte": edited("both", lambda data: data.update(expression="x+" * 500_000 + "x")),
    "expression nested too deep": edited("both", lambda data: data.update(expression="(" * 10**4 + "x" + ")" * 10**4)),
    "expression with a tower of powers": edited("both", lambda data: data.update(expression="x**10**10**10")),
    "leaf of order 10^9": edited("certificate.json", lambda data: data["leaves"][0].__setitem__(1, 10**9)),
}
"""Changes to the claim alone: commands that neither prove nor evaluate the function may take them."""


def reader(command: str, change: Callable[[Path], object]) -> Callable[[Path], Words]:
    def words(folder: Path) -> Words:
        net = shutil.copytree(folder / "net", folder / "hostile", dirs_exist_ok=False)
        change(net)
        return READERS[command](net)

    return words


def given(*words: str) -> Callable[[Path], Words]:
    return lambda folder: words


def table(content: Callable[[], bytes] | None, *words: str) -> Callable[[Path], Words]:
    def arguments(folder: Path) -> Words:
        if content is not None:
            (folder / "t.csv").write_bytes(content())
        return (*words, "--csv", folder / "t.csv")

    return arguments


CSV = ("compile", "--inputs", "x", "--output", "z", "--eps", "0.1")
ROWS: dict[str, Callable[[], bytes]] = {
    "CSV of 200 MB": lambda: b"x,z\n" + b"1,2\n" * 50_000_000,
    "CSV of 60 MB": lambda: b"x,z\n" + b"1.125,2\n" * 7_500_000,
    "CSV of one line of 60 MB": lambda: b"x,z\n" + b"1" * 60_000_000,
    "CSV of 30 million columns": lambda: b"x,z\n" + b"," * 30_000_000,
    "CSV with ragged rows": lambda: b"x,z\n1,2\n3\n4,5,6\n",
    "CSV with NUL bytes": lambda: b"x,z\n1,2\n3,\0\n",
    "CSV of noise": lambda: bytes(range(256)) * 1000,
    "CSV with an open quotation mark": lambda: b'x,z\n1,2\n3,"' + b"4\n" * 10**6,
    "empty CSV": lambda: b"",
    "CSV of numbers of a million digits": lambda: b"x,z\n" + b"1" * 10**6 + b",2\n3,4\n",
}
BOX = ("--box", "x=-1:1", "--eps", "0.1")
LONG = {
    "expression of a megabyte": "x+" * 500_000 + "x",
    "100,000 parentheses": "(" * 60_000 + "x" + ")" * 60_000,
    "4,000 parentheses": "(" * 4000 + "x" + ")" * 4000,
    "tower of powers": "x**10**10**10",
    "tower of numbers": "9**9**9**9**9",
    "number of 100,000 digits": "1" * 100_000,
    "4,000 signs": "-" * 4000 + "x",
    "4,000 quotients": "x/" * 4000 + "x",
    "1,900 calls": "sin(" * 1900 + "x" + ")" * 1900,
    "Python code": "__import__('os').system('true')",
    "1,600 variables": "+".join(f"x{i}" for i in range(1600)),
}


def folder_of(name: str, make: Callable[[Path], object], *before: str, after: Words = ()) -> Case:
    def words(folder: Path) -> Words:
        (folder / "given").mkdir()
        make(folder / "given")
        return (*before, folder / "given", *(folder / word if word == "OUT" else word for word in after))

    return Case(name, words)


OTHERS = [
    *(Case(f"{name}: compile", table(rows, *CSV)) for name, rows in ROWS.items()),
    Case("CSV of 60 MB: icl", table(ROWS["CSV of 60 MB"], "icl", "ridge", "--output", "z")),
    Case("CSV with ragged rows: icl", table(ROWS["CSV with ragged rows"], "icl", "ridge", "--output", "z")),
    Case("CSV is missing: icl", table(None, "icl", "ridge", "--output", "z")),
    *(Case(f"{name}: compile", given("compile", text, *BOX)) for name, text in LONG.items() if text[0] != "-"),
    *(Case(f"{name}: plan", given("plan", text, *BOX)) for name, text in LONG.items() if text[0] != "-"),
    Case("4,000 signs: compile", given("compile", *BOX, "--", LONG["4,000 signs"])),
    Case("box of 100,000 digits", given("compile", "x", "--box", f"x=0:{'1' * 100_000}")),
    Case("box of NaN", given("compile", "x", "--box", "x=nan:1")),
    Case("eps of 100,000 digits", given("compile", "x", "--box", "x=0:1", "--eps", "1" * 100_000)),
    Case("eps of NaN", given("plan", "x", "--box", "x=0:1", "--eps", "nan")),
    Case("10^18 points per axis", given("compile", "sin(x)", "--box", "x=0:1", "--points-per-axis", str(10**18))),
    Case("out in a missing folder", given("compile", "x", "--box", "x=0:1", "--out", "/nonexistent/a/b")),
    Case("out is /dev/null", given("compile", "x", "--box", "x=0:1", "--out", "/dev/null")),
    Case("net is /dev/zero", given("info", "/dev/zero")),
    Case("net is /dev/zero: verify", given("verify", "/dev/zero")),
    Case("net has a name of 100,000 letters", given("info", "n" * 100_000)),
    Case("net has a NUL in its name: load", given("load", "n\0n")),
    folder_of("model without config: convert", lambda path: None, "convert", after=("--out", "OUT")),
    folder_of(
        "model with config of 100 MB: convert",
        lambda path: (path / "config.json").write_bytes(b'{"a": [' + b"[]," * 33_333_333 + b"[]]}"),
        "convert",
        after=("--out", "OUT"),
    ),
    folder_of(
        "model with weights of noise: convert",
        lambda path: (
            (path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}'),
            (path / "model.safetensors").write_bytes(bytes(range(256)) * 40),
        ),
        "convert",
        after=("--out", "OUT"),
    ),
    folder_of(
        "model with a million layers: convert",
        lambda path: (
            (path / "config.json").write_text(
                '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], '
                '"n_layer": 1000000, "n_embd": 1536, "n_head": 12}'
            ),
            (path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}"),
        ),
        "convert",
        after=("--out", "OUT"),
    ),
    folder_of("run without tables: lab report", lambda path: None, "lab", "report"),
    folder_of(
        "run with settings of 100 MB: lab report",
        lambda path: (path / "settings.json").write_bytes(b"[" * 10**8),
        "lab",
        "report",
    ),
    Case(
        "65,536 leaves of order 24: verify",
        lambda folder: ("verify", save_slow(folder / "slow"), "--seconds", "1"),
        (1,),
    ),
]


def cases(commands: Callable[[int], tuple[str, ...]]) -> list[Case]:
    """Return all cases. `commands(i)` are those that read the i-th network."""

    def codes(name: str, command: str) -> tuple[int, ...]:
        """Return the right exit codes: verify may report that a claim is not re-proved."""
        return (1, 2) if command == "verify" else (0, 2) if name in CLAIMS else (2,)

    return [
        *(
            Case(f"{name}: {command}", reader(command, change), codes(name, command))
            for i, (name, change) in enumerate({**NETWORKS, **CLAIMS}.items())
            for command in commands(i)
        ),
        *OTHERS,
    ]


class Server:
    """A process that has attnc imported, and runs each command in a copy of itself, whose memory is measured."""

    def __enter__(self) -> Server:
        command = [sys.executable, "-m", "cli.hostile_inputs", "serve"]
        folder, self.folder = Path(__file__).parent.parent, Path(tempfile.mkdtemp())
        path = os.pathsep.join([str(folder), *filter(None, sys.path)])
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, words: Words) -> Answer:
        self.process.stdin.write(json.dumps([str(word) for word in words]) + "\n")
        self.process.stdin.flush()
        return Answer(*json.loads(self.process.stdout.readline()))


def serve() -> None:
    import attnc.cli

    for line in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if not pid:
                for number, file in enumerate((out, err), start=1):
                    os.dup2(file.fileno(), number)
                resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESSES, MAX_ADDRESSES))
                signal.alarm(MAX_SECONDS)
                answer(json.loads(line), attnc.cli.main)
            _, status, used = os.wait4(pid, 0)
            texts = [(file.seek(0), file.read().decode(errors="replace"))[1] for file in (out, err)]
        code, seconds = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        print(json.dumps([code, seconds, used.ru_maxrss / 1024, *texts]), flush=True)


def answer(words: list[str], main: Callable[[list[str]], object]) -> NoReturn:
    """Run a command, and end the process."""
    code = 1
    try:
        if words[0] == "load":
            attnc.load(words[1])
            code = 0
        else:
            main(words)
    except attnc.AttncError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except SystemExit as ending:
        code = ending.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def table_of_all(pattern: str) -> None:
    with Server() as server:
        print("| input: command | exit code | CPU s | MB | answer |\n| :-- | --: | --: | --: | :-- |")
        save_net(server.folder / "net")
        for case in cases(lambda _: tuple(READERS)):
            if pattern not in case.name:
                continue
            with tempfile.TemporaryDirectory() as folder:
                shutil.copytree(server.folder / "net", Path(folder) / "net")
                found = server.run(case.words(Path(folder)))
            message = found.message.replace(folder, "").replace("|", "\\|")[:110]
            print(
                f"| {case.name} | {found.code} | {found.cpu_seconds:.2f} | {found.peak_mb:.0f} | {message} |",
                flush=True,
            )


def save_net(path: Path) -> None:
    """Save the network that the cases change: two heads of four and more keys."""
    attnc.compile("sin(x)+cos(y)", box={"x": (-3, 3), "y": (-3, 3)}, eps=0.3).save(path)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        table_of_all("".join(sys.argv[1:]))
