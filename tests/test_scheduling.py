"""The one scheduler: the same results here, in processes and after losses; tasks are read when a worker is free."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attnc import scheduling
from attnc.errors import FileError
from attnc.groundtruth import making
from attnc.scheduling import LOCAL, finished
from strategies.tasks import always_lost, inverse, lost_at_first, square


def test_results_do_not_depend_on_where_tasks_run():
    tasks, wanted = {n: (n,) for n in range(20)}, {n: n * n for n in range(20)}
    assert dict(finished(square, tasks, None)) == wanted
    assert dict(finished(square, tasks, LOCAL, 2)) == wanted
    assert dict(finished(square, iter(tasks.items()), LOCAL, 1)) == wanted
    assert dict(finished(square, {}, LOCAL, 1)) == {}


def test_tasks_are_read_when_a_worker_is_free():
    read, done = list[int](), 0

    def tasks() -> Iterator[tuple[int, tuple[int]]]:
        for n in range(50):
            assert n <= done + scheduling.AHEAD
            read.append(n)
            yield n, (n,)

    for _ in finished(square, tasks(), LOCAL, 1):
        done += 1
    assert read == list(range(50))


def test_tasks_of_lost_workers_are_given_to_others(tmp_path):
    tasks = {n: (str(tmp_path), n) for n in range(8)}
    assert dict(finished(lost_at_first, tasks, LOCAL, 2)) == {n: n * n for n in range(8)}


def test_workers_that_are_lost_again_and_again(monkeypatch):
    monkeypatch.setattr(scheduling, "MOST_LOSSES", 1)
    with pytest.raises(FileError, match="worker processes ended 2 times without a result"):
        list(finished(always_lost, {1: (1,)}, LOCAL, 1))


@pytest.mark.parametrize("cluster", [None, LOCAL])
def test_tasks_that_fail(cluster):
    tasks = {n: (n,) for n in (0, 1, 2)}
    assert dict(finished(inverse, tasks, cluster, 1, failed=lambda error: type(error).__name__)) == {
        0: "ZeroDivisionError",
        1: 1.0,
        2: 0.5,
    }
    with pytest.raises(ZeroDivisionError):
        list(finished(inverse, tasks, cluster, 1))


def test_models_of_a_benchmark_are_the_same_from_other_processes(tmp_path):
    making.make(1, 5, tmp_path / "here", disguises=["plain", "rotated"])
    making.make(1, 5, tmp_path / "there", disguises=["plain", "rotated"], cluster=LOCAL, processes=1)
    here, there = (
        {path.relative_to(place): path.read_bytes() for path in place.rglob("*") if path.is_file()}
        for place in (tmp_path / "here", tmp_path / "there")
    )
    assert here == there
    assert len(here) > 8
