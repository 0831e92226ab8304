"""The examination of a cluster whose only host is this machine; test_cluster_doctor.py has others."""

from __future__ import annotations

from pathlib import Path

import psutil

from hvd_train.doctor import cluster
from hvd_train.launch.hosts import Host
from tests.support.launching import wait_for


def test_a_cluster_of_one_host_is_examined() -> None:
    """There is a finding for each thing that the host has, and what is being done is shown."""
    Path("data").mkdir()
    doing: list[str] = []
    findings = cluster.examine([Host("localhost", 1)], Path("data"), quick=True, say=doing.append)
    found = {finding.name: finding for finding in findings}
    assert found["localhost"].what == "answers over ssh"
    assert found["data"].what == "0 files of 0 bytes in data on each host"
    assert found["clocks"].verdict == "ok"
    assert found["python"].verdict == "ok"
    assert "connections" not in found, "there is nobody to connect to"
    assert doing == ["asking 1 hosts"]


def test_an_agent_ends_with_its_block_and_one_that_has_ended_says_why() -> None:
    """No process is left behind on any host."""
    before = set(psutil.Process().children())  # those that other tests share live on
    with cluster.agents([Host("localhost", 1)]) as (one,):
        assert "time" in one.ask(20.0, do="clock")
        (process,) = set(psutil.Process().children()) - before
        process.kill()
        wait_for("its end", lambda: process.status() == psutil.STATUS_ZOMBIE)
        assert one.ask(20.0, do="clock") == {"error": "exit code -9"}
    assert set(psutil.Process().children()) <= before
