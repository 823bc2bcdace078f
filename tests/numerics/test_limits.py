"""Time limits: they nest, counted seconds are counted, and every thread has its own."""

from __future__ import annotations

import itertools
import math
import threading
import time

import pytest

from attnc.errors import AttncError
from attnc.numerics.limits import OutOfTime, check_time, counted_seconds, is_time_over, spend, time_limit, time_share


@pytest.fixture
def clock(monkeypatch):
    """A clock on the wall that a test moves by hand."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_without_a_limit_time_is_never_over():
    spend(1e9)
    check_time("working")
    assert not is_time_over()
    assert counted_seconds() == 0.0


def test_the_time_on_the_wall_ends_a_block(clock):
    with time_limit(2.0):
        clock[0] = 1.9
        check_time("working")
        clock[0] = 2.1
        assert is_time_over()
        with pytest.raises(OutOfTime, match="the time ran out while working") as found:
            check_time("working")
        assert isinstance(found.value, AttncError)
    assert not is_time_over()


def test_counted_seconds_end_a_block_but_raise_nothing():
    with time_limit(counted=1.0):
        spend(0.5)
        assert not is_time_over()
        spend(0.6)
        check_time("working")
        assert is_time_over()
        assert counted_seconds() == 1.1
    assert not is_time_over()


@pytest.mark.parametrize(("inner", "end"), [(5.0, 2.0), (1.0, 1.0), (math.inf, 2.0)])
def test_an_inner_limit_is_never_longer(clock, inner, end):
    with time_limit(2.0), time_limit(inner):
        clock[0] = 0.9 * end
        assert not is_time_over()
        clock[0] = end
        assert is_time_over()
    clock[0] = 0.0


def test_shares_are_parts_of_the_time_that_is_left_on_both_clocks(clock):
    with time_limit(8.0, counted=4.0):
        clock[0] = 4.0
        spend(1.0)
        with time_share(1 / 2):
            spend(1.4)
            assert not is_time_over()
            spend(0.1)
            assert is_time_over()
        assert not is_time_over()
        with time_share(1 / 2):
            clock[0] = 6.0
            assert is_time_over()
        clock[0] = 9.0
        with time_share(1 / 2):
            assert is_time_over()


def test_shares_of_no_limit_are_no_limit():
    with time_share(1 / 2):
        spend(1e9)
        assert not is_time_over()


def test_threads_count_by_themselves():
    counts = list[float]()

    def work(seconds: float) -> None:
        with time_limit(counted=10.0):
            for _ in range(1000):
                spend(seconds)
            counts.append(round(counted_seconds(), 6))

    threads = [threading.Thread(target=work, args=(each,)) for each in (1e-3, 2e-3)]
    for step, thread in itertools.product(("start", "join"), threads):
        getattr(thread, step)()
    assert sorted(counts) == [1.0, 2.0]
