"""Sweeps and long texts on a real cluster of two worker processes: the same results as in one process, whatever is lost in between."""

import argparse
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import sweep_plans
from command_line import ROOT
from judging.workers import add_cluster_arguments, over_workers
from sweep_plans import PLAN, written

from bitnet_np import Error
from bitnet_np.base.errors import ServerError
from bitnet_np.cli.main import main
from bitnet_np.sweep.cluster import connected
from bitnet_np.sweep.plan import read_plan
from bitnet_np.sweep.run import sweep
from bitnet_np.testing import selftest

dask = pytest.importorskip("dask")
pytest.importorskip("distributed")
PRELOAD = str(Path(sweep_plans.__file__))
posix = pytest.mark.skipif(os.name != "posix", reason="signals")


@contextmanager
def cluster(workers):
    path = os.pathsep.join([str(Path(PRELOAD).parent), str(ROOT), *sys.path])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("NUMBA_NUM_THREADS", "1")
        with dask.config.set({"distributed.worker.preload": [PRELOAD]}), connected(None, workers) as client:
            yield client


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """A plan, and the table that a sweep in one process makes of it."""
    folder = tmp_path_factory.mktemp("serial")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest, "run", lambda: iter(()))
        plan = read_plan(written(folder, PLAN))
        sweep(plan, folder / "out")
    return plan, (folder / "out" / "results.csv").read_bytes()


@pytest.fixture(scope="module")
def client(serial):
    """After `serial`, whose kernels are compiled with this process's own number of threads."""
    with cluster(2) as client:
        yield client


def test_a_sweep_goes_on_after_its_scheduler_was_lost(serial, tmp_path):
    """On one worker."""
    plan, table = serial
    seen = []
    with cluster(1) as client:

        def lose(row):
            seen.append(row["key"])
            if len(seen) == 3:
                client.cluster.close()

        with pytest.raises(Error, match="the scheduler was lost"):
            sweep(plan, tmp_path, client, on_row=lose)
    assert 3 <= len(seen) < len(plan)
    with cluster(1) as client:
        sweep(plan, tmp_path, client, on_row=lambda row: seen.append(row["key"]))
    assert sorted(seen) == sorted(task.key for task in plan)
    assert (tmp_path / "results.csv").read_bytes() == table


def test_tls_without_certificates_is_refused_before_anything_is_sent():
    with (
        pytest.raises(ServerError, match=r"scheduler tls://127.0.0.1:1: TLS expects"),
        connected("tls://127.0.0.1:1", None),
    ):
        pass


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, struct.pack("<4Q", 1 << 40, 2, 1 << 39, 1 << 39), b""])
def test_a_server_that_is_no_scheduler_is_refused(monkeypatch, says):
    """Bytes that Dask takes for the sizes of what follows are not believed, and silence is not waited for."""
    monkeypatch.setattr("bitnet_np.sweep.cluster.ANSWER", 3)
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=lambda: connections.append(server.accept()[0]) or connections[0].sendall(says), daemon=True)
        answering.start()
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ServerError, match=f"scheduler {address}: "), connected(address, None):
            pass


def test_the_cases_of_scripts_come_in_their_order(client):
    """The last ones are done first. The same function runs in this process without an option."""

    def slow(case):
        time.sleep((9 - case) / 50)
        return case, os.getpid()

    parser = argparse.ArgumentParser()
    add_cluster_arguments(parser)
    outcomes = {}
    for options in ([], ["--scheduler", client.scheduler.address]):
        with over_workers(parser.parse_args(options)) as over:
            outcomes[len(options)] = list(over(slow, range(10)))
    assert [case for case, _ in outcomes[0]] == [case for case, _ in outcomes[2]] == list(range(10))
    assert {process for _, process in outcomes[0]} == {os.getpid()}
    assert len({process for _, process in outcomes[2]} - {os.getpid()}) == 2


@posix
def test_two_workers_of_which_one_is_killed_give_the_bytes_of_one_process(client, serial, tmp_path):
    plan, table = serial
    seen = []

    def kill(row):
        seen.append(row["key"])
        if len(seen) == 2:
            os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)

    sweep(plan, tmp_path, client, on_row=kill)
    assert sorted(seen) == sorted(task.key for task in plan)
    assert (tmp_path / "results.csv").read_bytes() == table


@posix
def test_a_task_that_kills_its_worker_is_a_row_that_says_so(client, tmp_path):
    plan = written(tmp_path, PLAN.replace("count = 6 }", "count = 1 }\ndeadly = { ids = [9] }"))
    assert main(["sweep", str(plan), "--out", str(tmp_path / "out"), "--scheduler", client.scheduler.address]) == 2
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text("utf-8").splitlines()]
    assert sorted(row["outcome"] for row in rows) == ["KILLED", "OK", "OK", "OK"]
    assert [row["outcome"] for row in sweep(read_plan(plan), tmp_path / "out")] == ["OK"] * 4  # here nothing kills it
