"""The check: files → verdict. Every leaf is proved again, in 128-bit Arb arithmetic, on all cores."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

from flint import arb, ctx

from attnc_checker import fits
from attnc_checker.claims import AtPoints, ByLeaves, Claim, ReadShards, ReadTable, read_claim
from attnc_checker.deep.chains import Chain, Links
from attnc_checker.deep.claims import Stages
from attnc_checker.deep.composition import staged_walk
from attnc_checker.deep.slopes import with_slopes
from attnc_checker.expressions import parse
from attnc_checker.files import (
    MAX_WEIGHTS,
    BadFile,
    Object,
    Refused,
    Tensor,
    Undecided,
    metadata,
    parse_safetensors,
    read_bytes,
    read_json,
    require,
    typed,
)
from attnc_checker.gradients import with_gradient
from attnc_checker.leaves import Prover
from attnc_checker.limits import ALLOW_MORE, ROUNDS, Limit, end_with
from attnc_checker.network import Reduction
from attnc_checker.norms import by_leaves
from attnc_checker.overflow import require_finite
from attnc_checker.partitions import Keys, Partition
from attnc_checker.program import FLOATS, Program
from attnc_checker.proving import AT_ONCE, Job, Proof
from attnc_checker.rounding import Arithmetic
from attnc_checker.row_file import TABLE, RowFile
from attnc_checker.shards import read_shards
from attnc_checker.stock import StockProgram, is_stock, require_kind
from attnc_checker.tables import by_rows, constants
from attnc_checker.verdicts import blocks, found_in, hashes, range_of, read_all, sampled, statement, write

MAIN, CERTIFICATE = "certificate.json", re.compile(r"certificate\.[A-Za-z0-9_-]+\.json")
PRECISION = 128
"""Bits of Arb's numbers: 75 more than float64 has. The longest sums here lose fewer than that."""
MAX_SERIES = 64
"""Largest number of terms of Arb's power series. The highest order, 24, needs 34."""
ENGINE = "{dtype} evaluation in IEEE 754 arithmetic rounded to nearest: layer by layer or folded, sums in any order"
BLOCKS = "sums over up to 4096 keys not in any order but in blocks: of 8 terms each, then of 8 of these sums, and so on"
TRUNCATION = "if the engine leaves out keys that are far behind, that moves no output by more than {truncation:.3g}"
EXPONENTIAL = "weights within {ulps} ulp in the engine, for exact scores"
RE_PROVED, OF_SHARD = "every leaf is re-proved", "the leaves of shard"
"""The reason of a full check, and the first words of that of a shard."""
BESIDE = {MAIN, "config.json", "model.safetensors", "README.md", "LICENSE", ".gitattributes", "verdicts"}
"""The names that may be in the folder of a stock checkpoint. Others, such as adapters, may change the network."""
STOCK = (
    "float32 evaluation by transformers in IEEE 754 arithmetic rounded to nearest, with gradual underflow: sums in any "
    "order, eager attention or a kernel that keeps the same",
    "weights within 4 ulp in the engine, for exact scores; the inverse square root of an even power of two is exact",
    "a sequence has the prefix before all query tokens, query tokens in the box, padding anywhere, within the context",
)
TAILS = "exact arithmetic beyond the core, where rounding grows with |x|"

Progress = Callable[[Proof, Sequence[Job], Mapping[Job, float]], None]
"""Takes the proof, all of its jobs in the order in which they are proved, and the bounds that were found so far. It is
called before the first job, and after every job."""
Stored = tuple[Claim, object, dict[str, Tensor]]
"""The claim, the structure of the network as in config.json, and its weights."""


@dataclass(frozen=True)
class Verdict:
    """The result of a check.

    Attributes
    ----------
    name : str
        The folder, or the file of the certificate.
    proved : bool
        Whether the bound is re-proved.
    reason : str
        The reason of the verdict, in one sentence.
    exit_code : int
        0 if the bound is re-proved, 1 if not, 2 if files cannot be read.
    seconds : float
        The duration of the check.
    bound, reproved : float or None
        The claimed bound, and the bound that was found here.
    dtype, scope : str or None
        The arithmetic of the claim, and the points that it is about.
    gradient_bound : float or None
        The bound of the errors of all partial derivatives outside of `excluded`, if it is claimed.
    excluded : tuple of (str, float, float)
        The neighbourhoods of kinks in which no derivative is claimed: an expression of the variables, and the interval
        of its values.
    leaves : int
        The number of leaves.
    assumptions : tuple of str
        The assumptions of the second proof.
    decided : bool
        False if the check came to a limit of time or memory, or broke off: the claim may be true or false.

    Examples
    --------
    >>> import attnc_checker
    >>> verdict = attnc_checker.check("no-such-folder")
    >>> verdict.proved, verdict.exit_code
    (False, 2)
    """

    name: str
    proved: bool
    reason: str
    exit_code: int
    seconds: float
    bound: float | None = None
    reproved: float | None = None
    dtype: str | None = None
    scope: str | None = None
    leaves: int = 0
    assumptions: tuple[str, ...] = ()
    decided: bool = True
    gradient_bound: float | None = None
    excluded: tuple[tuple[str, float, float], ...] = ()


def certificates(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of all certificates in a folder.

    Parameters
    ----------
    path : path
        The folder of a saved network.

    Returns
    -------
    list of str
        certificate.json is first, even if it is missing.

    Examples
    --------
    >>> import attnc_checker
    >>> attnc_checker.certificates("no-such-folder")
    ['certificate.json']
    """
    names = (found.name for found in Path(path).glob("certificate.*.json"))
    return [MAIN, *sorted(name for name in names if CERTIFICATE.fullmatch(name))]


def check(
    path: str | os.PathLike[str],
    processes: int | None = None,
    progress: Progress | None = None,
    name: str = MAIN,
    seconds: float = math.inf,
    table: str | os.PathLike[str] | None = None,
) -> Verdict:
    """Check whether the certificate of a saved network can be re-proved. No content of a file makes it raise.

    Parameters
    ----------
    path : path
        The folder of a saved network.
    processes : int, optional
        The number of processes. By default one for each core, and one in WebAssembly, where there are no others.
    progress : callable, optional
        Called before the first job and after every job, with the proof, all of its jobs in the order in which they are
        proved, and the bounds that were found so far.
    name : str
        The file of the certificate. If it is not certificate.json, it is for the weights rounded to a second dtype.
    seconds : float
        After this time the check ends with the leaf that it is at. The command `python -m attnc_checker` ends then.
    table : path, optional
        The rows of a large table, if they are not in table.f64 beside the certificate.

    Returns
    -------
    Verdict
        Whether the bound is re-proved, and the reason.

    Examples
    --------
    >>> import attnc, attnc_checker, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     attnc.compile("sin(x)", {"x": (-1, 1)}, eps=1e-3).save(f"{folder}/net")
    ...     verdict = attnc_checker.check(f"{folder}/net", processes=1)
    >>> verdict.proved, verdict.reproved <= verdict.bound <= 1e-3
    (True, True)
    """
    cores, limit = processes or _cores(), Limit(seconds)
    if fits.is_in_context(Path(path)):
        return _decided_fit(path, name, limit)

    def conclude(proof: Proof, stored: Stored) -> float:
        return _prove(proof, stored, cores, progress, limit)

    return _decided(path, name, limit, RE_PROVED, conclude, table)


def check_shard(
    path: str | os.PathLike[str],
    k: int,
    n: int,
    processes: int | None = None,
    progress: Progress | None = None,
    seconds: float = math.inf,
    table: str | os.PathLike[str] | None = None,
) -> list[Verdict]:
    """Prove shard k of n of the leaves of all certificates. If all are proved, write verdicts/k-of-n.json.

    Parameters
    ----------
    path : path
        The folder of a saved network.
    k, n : int
        The number of the shard, from 1 to n, and the number of shards.
    processes, progress, seconds, table
        As for `check`.

    Returns
    -------
    list of Verdict
        A verdict on the leaves of the shard for each certificate. Only `merge` decides about the claim.

    Examples
    --------
    >>> import attnc, attnc_checker, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     attnc.compile("sin(x)", {"x": (-1, 1)}, eps=1e-3).save(f"{folder}/net")
    ...     shards = [attnc_checker.check_shard(f"{folder}/net", k, 2, processes=1) for k in (1, 2)]
    ...     attnc_checker.merge(f"{folder}/net")[0].proved
    True
    """
    cores, limit, claims = processes or _cores(), Limit(seconds), dict[str, Any]()

    def decide(name: str) -> Verdict:
        files = dict[str, str]()

        def conclude(proof: Proof, stored: Stored) -> float:
            files.update(hashes(Path(path), name))
            every = blocks(proof.jobs)
            first, after = range_of(len(every), k, n)
            own = [job for block in every[first:after] for job in block]
            found = _proved_bounds(proof, own, stored, min(cores, 1 + (after - first)), progress, limit)
            claims[name] = {**files, "leaves": len(proof.jobs), "blocks": [first, after], "found": found}
            return max(found, default=0.0)

        reason = f"{OF_SHARD} {k} of {n} are re-proved; --merge decides about all"
        verdict = _decided(path, name, limit, reason, conclude, table)
        if verdict.proved and files != hashes(Path(path), name):
            return replace(verdict, proved=False, exit_code=1, reason="a file changed while it was checked")
        return verdict

    verdicts = [decide(name) for name in certificates(path)]
    if all(verdict.proved for verdict in verdicts):
        try:
            write(Path(path), statement(k, n, claims))
        except BadFile as error:
            verdicts = [
                replace(verdict, proved=False, exit_code=error.exit_code, reason=str(error)) for verdict in verdicts
            ]
    return verdicts


def merge(
    path: str | os.PathLike[str], seconds: float = math.inf, table: str | os.PathLike[str] | None = None
) -> list[Verdict]:
    """Decide about all certificates by the verdict files of their shards, and re-prove a random sample of leaves.

    Parameters
    ----------
    path : path
        The folder of a saved network, with a file in verdicts/ for each shard.
    seconds, table
        As for `check`.

    Returns
    -------
    list of Verdict
        A verdict for each certificate. Its `reason` tells that most leaves stand on the word of the files' makers.

    Examples
    --------
    >>> import attnc_checker
    >>> attnc_checker.merge("no-such-folder")[0].exit_code
    2
    """
    limit, folder, told = Limit(seconds), Path(path), dict[str, str]()

    def decide(name: str) -> Verdict:
        def conclude(proof: Proof, stored: Stored) -> float:
            files, found = hashes(folder, name), list[float]()
            stated = read_all(folder)
            for data in stated:
                found += found_in(data, name, folder, proof, files)
            require(len(found) == len(proof.jobs), f"only {len(found)} of {len(proof.jobs)} leaves have bounds")
            again, count = sampled(proof, found), len(proof.jobs)
            told[name] = (
                f"by {len(stated):,} verdict files, the claims of their makers; {again:,} of {count:,} leaves or "
                "blocks, chosen at random, were proved again here"
            )
            return proof.conclude(found)

        verdict = _decided(path, name, limit, "", conclude, table)
        return replace(verdict, reason=told[name]) if verdict.proved else verdict

    return [decide(name) for name in certificates(path)]


def _proved_bounds(
    proof: Proof, jobs: list[Job], stored: Stored, processes: int, progress: Progress | None, limit: Limit
) -> list[float]:
    """Prove the jobs of a shard block by block, and return the bounds in their order."""
    found, begun, results = dict[Job, float](), time.monotonic(), list[float]()
    if progress:
        progress(proof, jobs, found)
    try:
        for error in _results(proof, jobs, stored, processes, limit, are_blocks=True):
            found[jobs[len(results)]] = error
            results.append(error)
            limit.look(begun, len(results), len(jobs), ROUNDS * AT_ONCE * processes)
            if progress:
                progress(proof, jobs, found)
    except TimeoutError:
        limit.look(begun, len(results), len(jobs), ROUNDS * AT_ONCE * processes, is_over=True)
    require(len(results) == len(jobs), f"only {len(results)} of {len(jobs)} leaves were checked")
    return results


def _decided(
    path: str | os.PathLike[str],
    name: str,
    limit: Limit,
    reason: str,
    conclude: Callable[[Proof, Stored], float],
    table: str | os.PathLike[str] | None = None,
) -> Verdict:
    """Read a certificate, and return the verdict on the bound that `conclude` finds, or on its refusal."""

    def decide(verdict: Verdict) -> Iterator[Verdict]:
        stored = read(Path(path), name, None if table is None else Path(table))
        claim = stored[0]
        assumed = STOCK if is_stock(stored[1]) else _assumed(claim)
        yield (verdict := replace(verdict, bound=claim.bound, dtype=claim.dtype, assumptions=assumed))
        if claim.gradient is not None:
            stated = claim.gradient
            yield (verdict := replace(verdict, gradient_bound=stated.bound, excluded=stated.excluded))
        proof = proof_of(*stored)
        yield (verdict := replace(verdict, scope=proof.scope, leaves=proof.num_leaves or len(proof.jobs)))
        found = conclude(proof, stored)
        yield replace(verdict, proved=True, reason=reason, exit_code=0, reproved=found)

    return _guarded(path, name, limit, decide)


def _decided_fit(path: str | os.PathLike[str], name: str, limit: Limit) -> Verdict:
    """Read the claim of an in-context program about the prompt of its fit, and return the verdict."""

    def look() -> None:
        if limit.left() == 0:
            raise Undecided(f"the limit is {limit.seconds:.3g} s: allow more with --seconds")

    def decide(verdict: Verdict) -> Iterator[Verdict]:
        require(name == MAIN, f"an in-context program has no certificate {name}", BadFile)
        fit = fits.read_fit(Path(path))
        told = replace(verdict, bound=fit.bound, dtype=fits.DTYPE, scope=fits.SCOPE, assumptions=fits.ASSUMED)
        yield told
        yield replace(told, proved=True, reason=fits.RE_PROVED, exit_code=0, reproved=fits.prove(fit, look))

    return _guarded(path, name, limit, decide)


def _guarded(
    path: str | os.PathLike[str], name: str, limit: Limit, decide: Callable[[Verdict], Iterator[Verdict]]
) -> Verdict:
    """Return the last verdict of `decide`, which tells more and more. Whatever it raises is a reason of its own."""
    where = os.path.join(path, name) if name != MAIN else os.fspath(path)
    verdict = Verdict(where, proved=False, reason="", exit_code=1, seconds=0.0)
    try:
        with precision():
            for verdict in decide(verdict):  # noqa: B007, B020
                pass
    except (BadFile, Refused) as error:
        verdict = replace(verdict, reason=str(error), exit_code=error.exit_code)
    except Undecided as error:
        verdict = replace(verdict, reason=str(error), decided=False)
    except MemoryError:
        verdict = replace(verdict, reason=f"the check needs more memory than it may have. {ALLOW_MORE}", decided=False)
    except BrokenProcessPool:
        reason = f"a process of the check was ended, most likely for want of memory. {ALLOW_MORE}"
        verdict = replace(verdict, reason=reason, decided=False)
    except Exception as error:  # whatever else happens, nothing was proved
        verdict = replace(verdict, reason=f"the check broke off: {type(error).__name__}: {error}", decided=False)
    reason = "".join(x if x.isprintable() else "?" for x in verdict.reason)  # no control characters of files
    return replace(verdict, reason=reason, seconds=time.monotonic() - limit.started)


def _cores() -> int:
    return 1 if sys.platform == "emscripten" else os.cpu_count() or 1


def _assumed(claim: Claim) -> tuple[str, ...]:
    blocks = [BLOCKS] if claim.dtype == "float32" else []
    engine = [
        ENGINE.format(dtype=claim.dtype),
        EXPONENTIAL.format(ulps=Arithmetic(claim.dtype).ulps),
        *blocks,
        TRUNCATION.format(truncation=claim.truncation),
    ]
    tails = [TAILS] if claim.sides and claim.beyond is None else []
    return (*(engine if claim.dtype != "real" else []), *tails)


def read(folder: Path, name: str = MAIN, table: Path | None = None) -> Stored:
    require(folder.is_dir(), f"{folder} is not a folder", BadFile)
    named = next((dtype for dtype in FLOATS if name == f"certificate.{dtype}.json"), None)
    require(name == MAIN or named is not None, f"{name} is named for none of the dtypes {', '.join(FLOATS)}")
    certificate, config = read_json(folder / name), read_json(folder / "config.json")
    weights = read_bytes(folder / "model.safetensors", MAX_WEIGHTS)
    if is_stock(config):
        others = sorted({found.name for found in folder.iterdir()} - BESIDE)
        require(not others, f"beside a stock checkpoint there is {others[:1]}, which transformers may read")
        return _stock(name, certificate, config, weights)
    if config.get("format") != "attnc.network/1":
        raise BadFile(
            f"config.json has the format {config.get('format')!r:.40}, not 'attnc.network/1': check it with the "
            "version of attnc that wrote it"
        )
    listed = typed(config.get("certificates"), tuple[str, ...], "certificates in config.json")
    known = all(each == MAIN or CERTIFICATE.fullmatch(each) for each in listed)
    require(known, f"config.json lists certificates that are not named {MAIN} or certificate.DTYPE.json", BadFile)
    claim = _claim_about(
        certificate,
        weights,
        lambda data, d, bound: read_shards(folder, name, data, d, bound),
        lambda data, ends: RowFile(table or folder / TABLE, data, ends),
    )
    if config.get("variables") != list(claim.variables) or config.get("expression") != claim.expression:
        raise Refused(f"config.json and {name} differ in the variables or the expression")
    require(config.get("box") == certificate["box"], f"config.json and {name} differ in the box")
    structure, tensors = config.get("program"), parse_safetensors(weights)
    if name == MAIN:
        return claim, structure, tensors
    if not isinstance(structure, dict) or claim.dtype != named:
        raise Refused(f"{name} is for the dtype {claim.dtype!r:.40}: its name should contain the dtype")
    rounded = {place: tensor.rounded_to(FLOATS[claim.dtype]) for place, tensor in tensors.items()}
    return claim, {**structure, "dtype": claim.dtype}, rounded


def _claim_about(
    certificate: Object, weights: bytes, shards: ReadShards | None = None, table: ReadTable | None = None
) -> Claim:
    claim, digest = read_claim(certificate, shards, table), hashlib.sha256(weights).hexdigest()
    if certificate["weights_sha256"] != digest:
        raise Refused(f"the certificate belongs to other weights: model.safetensors has SHA-256 {digest}")
    return claim


def _stock(name: str, certificate: Object, config: Object, weights: bytes) -> Stored:
    """Read the claim about a stock checkpoint. It has one certificate."""
    require(name == MAIN, f"a stock checkpoint has no certificate {name}")
    claim, names = _claim_about(certificate, weights), config["attnc"]
    require_kind(claim, config)
    is_same = isinstance(names, dict) and names.get("expression") == claim.expression
    is_same &= isinstance(names, dict) and names.get("box") == certificate["box"]
    require(is_same, f"config.json and {name} differ in the box or the expression")
    assert isinstance(names, dict)
    require([*names["box"]] == [*claim.variables], f"config.json and {name} differ in the order of the variables")
    require(metadata(weights) in (None, {"format": "pt"}), "the metadata of model.safetensors are not those of torch")
    return claim, config, parse_safetensors(weights)


def proof_of(claim: Claim, structure: object, tensors: dict[str, Tensor]) -> Proof:
    """Return the proof that belongs to the kind of evidence in the claim."""
    evidence, arithmetic = claim.evidence, Arithmetic(claim.dtype)
    if isinstance(evidence, AtPoints):
        function = constants(evidence.rows[0][len(claim.ends) :])
    else:
        function = parse(claim.expression, claim.variables)
    program = (StockProgram if is_stock(structure) else Program)(structure, tensors, len(claim.ends))
    if claim.dtype not in (program.dtype, "real"):
        raise Refused(f"the bound is claimed for {claim.dtype}, but the weights are {program.dtype}")
    if len(function.outputs) != program.num_outputs:
        raise Refused(f"the network has {program.num_outputs} output(s), the expression {len(function.outputs)}")
    reach = [*map(arb, claim.reach)]
    is_plain = claim.gradient is None or not (program.flush != 0 or program.has_silent_keys)
    require(is_plain, "the gradient of this kind of network is not claimed")
    if isinstance(evidence, Stages):
        reduction = Reduction(program, reach, is_deep=True)
        proof, walk = staged_walk(claim, evidence, reduction, arithmetic)
        if claim.gradient is not None and claim.gradient.heads:
            proof = with_slopes(proof, claim, claim.gradient, walk)
    elif isinstance(evidence, ByLeaves) and evidence.encloses and program.is_one_attention:
        reduction = keys = Keys(program, reach)
        partition = Partition.over(keys, function, arithmetic, claim, evidence.gap)
        proof = replace(by_leaves(claim, evidence, partition), at_once=1)
    elif isinstance(evidence, ByLeaves) and evidence.encloses:
        reduction = links = Links(program, reach)
        proof = by_leaves(claim, evidence, Chain.through(links, function, arithmetic, claim, evidence))
    else:
        reduction = Reduction(program, reach)
        prover = Prover.of(reduction.stage(), function, arithmetic)
        proof = (
            by_rows(claim, evidence, prover) if isinstance(evidence, AtPoints) else by_leaves(claim, evidence, prover)
        )
    if claim.gradient is not None and not claim.gradient.heads:
        proof = with_gradient(proof, claim, claim.gradient, Reduction(program, reach), function, arithmetic)
    require_finite(program, reduction.reach)
    if isinstance(program, StockProgram):
        program.require_pinned(claim, reduction)
    return proof


def _prove(proof: Proof, stored: Stored, processes: int, progress: Progress | None, limit: Limit) -> float:
    jobs, found, begun = _spread(proof.jobs), dict[Job, float](), time.monotonic()
    processes = min(processes, 1 + len(jobs) // proof.at_once)
    pilot = ROUNDS * AT_ONCE * processes
    if progress:
        progress(proof, jobs, found)
    try:
        for number, error in enumerate(_results(proof, jobs, stored, processes, limit)):
            found[jobs[number]] = error
            limit.look(begun, len(found), len(jobs), pilot)
            if progress:
                progress(proof, jobs, found)
    except TimeoutError:
        limit.look(begun, len(found), len(jobs), pilot, is_over=True)
    require(len(found) == len(jobs), f"only {len(found)} of {len(jobs)} leaves were checked")
    return proof.conclude([found[job] for job in proof.jobs])


def _spread(jobs: list[Job]) -> list[Job]:
    """Return the jobs shuffled in groups of neighbours, so that the first ones take about as long as the others."""
    groups = [jobs[i : i + AT_ONCE] for i in range(0, len(jobs), AT_ONCE)]
    random.Random(0).shuffle(groups)
    return [*itertools.chain(*groups)]


def _results(
    proof: Proof, jobs: list[Job], stored: Stored, processes: int, limit: Limit, *, are_blocks: bool = False
) -> Iterator[float]:
    count = AT_ONCE if are_blocks else min(AT_ONCE, proof.at_once)
    work = _work_block if are_blocks else _work
    if processes == 1 and are_blocks:
        for i in range(0, len(jobs), count):
            yield from proof.prove_block(jobs[i : i + count])
    elif processes == 1:
        yield from map(proof.prove, jobs)
    else:
        _own[:] = [proof]  # forked processes inherit it
        try:
            with _pool(processes, stored) as pool:
                turns = [pool.submit(work, jobs[i : i + count]) for i in range(0, len(jobs), count)]
                for turn in turns:
                    yield from turn.result(limit.left())
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise
            raise Undecided(f"a thread of the check could not be started: {error}. {ALLOW_MORE}") from error
        finally:
            _own.clear()


@contextmanager
def _pool(processes: int, stored: Stored) -> Iterator[ProcessPoolExecutor]:
    """Start processes that prove leaves. If the check is interrupted, they end at once."""
    given = (os.getpid(), *stored)
    others, pool = set(active_children()), ProcessPoolExecutor(processes, initializer=_start, initargs=given)
    try:
        yield pool
    except BaseException:
        for worker in set(active_children()) - others:
            worker.terminate()
        pool.shutdown()  # takes no time now
        raise
    pool.shutdown()


_own: list[Proof] = []
"""The proof of this process."""


def _start(parent: int, claim: Claim, structure: object, tensors: dict[str, Tensor]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C, and ends its workers
    end_with(parent)
    ctx.prec, ctx.cap = PRECISION, MAX_SERIES
    if not _own:
        _own[:] = [proof_of(claim, structure, tensors)]


def _work(jobs: list[Job]) -> list[float]:
    return [*map(_own[0].prove, jobs)]


def _work_block(jobs: list[Job]) -> list[float]:
    return _own[0].prove_block(jobs)


@contextmanager
def precision() -> Iterator[None]:
    before = ctx.prec, ctx.cap
    ctx.prec, ctx.cap = PRECISION, MAX_SERIES
    try:
        yield
    finally:
        ctx.prec, ctx.cap = before
