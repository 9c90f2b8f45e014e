"""Order, epochs, processes and exact resume of the training stream."""

import json
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest

from switchjax.data.examples import Example
from switchjax.data.stream import TrainStream
from switchjax.errors import UserError


class Ids:
    """Example i holds i, and a random number where the text would be corrupted."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def example(self, index, rng):
        one = np.ones(1, np.int32)
        drawn = rng.integers(2**31, size=1).astype(np.int32)
        return Example(one * index, one, drawn, one > 0)


def _stream(count=100, *, seed=0, process=0, processes=1, batch_size=4):
    share = batch_size // processes
    return TrainStream(
        Ids(count),
        np.arange(count),
        batch_size=batch_size,
        seed=seed,
        identity={"text": "ids"},
        rows=range(batch_size)[process * share : (process + 1) * share],
    )


def _take(stream, count):
    """(row, id, random number) of each row of the next `count` batches."""
    batches = islice(stream, count)
    return [
        np.stack([b.row_B, b.tokens_BL[:, 0], b.targets_BL[:, 0]], -1).tolist() for b in batches
    ]


def _ids(batches):
    return [row[1] for batch in batches for row in batch]


@pytest.mark.parametrize("count", [100, 102])  # 102: batches straddle the epochs
def test_each_epoch_has_every_id_in_another_order_with_other_noise(count):
    rows = [row for batch in _take(_stream(count), count) for row in batch]
    epochs = [rows[i : i + count] for i in range(0, 4 * count, count)]
    orders = [[row[1] for row in epoch] for epoch in epochs]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    noise = [{row[1]: row[2] for row in epoch} for epoch in epochs]
    assert all(len({epoch[i] for epoch in noise}) == 4 for i in range(count))


def test_seed_decides_everything():
    first = _take(_stream(seed=3), 50)
    assert _take(_stream(seed=3), 50) == first
    # Neighbouring seeds: neither the same order nor the same order an epoch later.
    other = _ids(_take(_stream(seed=4), 50))
    assert _ids(first)[:100] not in (other[:100], other[100:])
    assert other[:100] not in (_ids(first)[:100], _ids(first)[100:])


def test_rows_are_numbered():
    assert [[row[0] for row in batch] for batch in _take(_stream(), 3)] == [[0, 1, 2, 3]] * 3


_RESTORE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from test_stream import _stream, _take
for job in json.load(sys.stdin):
    stream = _stream(process=job["process"], processes=job["processes"])
    stream.set_state(job["state"])
    print(json.dumps([_take(stream, 5), _take(stream, 35), stream.get_state()]))
"""


def _restore_elsewhere(jobs):
    """Streams restored in a new process: each job's next 40 batches and the state after them."""
    run = subprocess.run(
        [sys.executable, "-c", _RESTORE, __file__.rpartition("/")[0]],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=True,
    )
    results = [json.loads(line) for line in run.stdout.splitlines()]
    return [(first + rest, state) for first, rest, state in results]


def test_resume_in_a_new_process_and_with_other_process_counts():
    # case 10: ids 0..99, batches of 4, stopped after k with prefetch on; 24 and 25 lie at the
    # border of the first epoch, and all runs cross it.
    # case 56: saved with 2 processes, resumed with 1 and with 4.
    whole = _take(_stream(), 65)
    stops, jobs = (1, 5, 13, 24, 25), []
    for k in stops:
        stream = _stream(process=1, processes=2)
        assert _take(stream, k) == [batch[2:] for batch in whole[:k]]
        state = stream.get_state()
        assert state["step"] == k
        jobs.append({"state": state, "process": 0, "processes": 1})
    jobs += [{"state": jobs[2]["state"], "process": p, "processes": 4} for p in range(4)]
    resumed = _restore_elsewhere(jobs)
    for k, (batches, state) in zip(stops, resumed, strict=False):
        assert batches == whole[k : k + 40]
        assert state["step"] == k + 40
    parts = [batches for batches, _ in resumed[len(stops) :]]
    joined = [sum(part, []) for part in zip(*parts, strict=True)]
    assert joined == whole[13 : 13 + 40]
    assert sorted(_ids(whole[:13] + joined)[:100]) == list(range(100))


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_together_are_one(processes):
    # case 55
    parts = [_take(_stream(102, process=p, processes=processes), 60) for p in range(processes)]
    joined = [sum(part, []) for part in zip(*parts, strict=True)]
    assert joined == _take(_stream(102), 60)
    assert sorted(_ids(joined)[:102]) == list(range(102))


def test_any_rows_of_a_batch():
    """Devices that are not in a row may hold rows that are not, and two processes the same."""
    stream = TrainStream(
        Ids(10), np.arange(10), batch_size=4, seed=0, identity={"text": "ids"}, rows=[0, 3]
    )
    assert _take(stream, 20) == [[batch[0], batch[3]] for batch in _take(_stream(10), 20)]


def test_going_back_in_one_stream():
    stream = _stream()
    first = _take(stream, 30)
    stream.set_state(json.loads(json.dumps(stream.get_state() | {"step": 3})))
    assert _take(stream, 27) == first[3:]
    stream.close()


def test_another_stream_is_refused():
    state = _stream(seed=1).get_state()
    with pytest.raises(UserError, match="batch_size 4 is now 2, seed 1 is now 0"):
        _stream(batch_size=2).set_state(state)
    state["stream"]["text"] = "other"
    with pytest.raises(UserError, match="text other is now ids"):
        _stream(seed=1).set_state(state)


def test_numbers_that_do_not_fit():
    with pytest.raises(
        UserError, match="too short for one batch: 3 training examples, data.batch_size 4"
    ):
        _stream(3)
    with pytest.raises(UserError, match="run.seed must be 0 or more, got -1"):
        _stream(seed=-1)


def test_as_many_examples_as_rows():
    assert all(sorted(_ids([b])) == [0, 1, 2, 3] for b in _take(_stream(4), 10))
    assert _ids(_take(_stream(1, batch_size=1), 3)) == [0, 0, 0]
