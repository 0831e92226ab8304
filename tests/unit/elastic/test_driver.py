"""What the driver relies on in the installed Horovod, and what it puts in its place."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
import threading
from dataclasses import fields, replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from horovod.runner import gloo_run
from horovod.runner.common.util.hosts import INVALID_SLOT_INFO, SlotInfo
from horovod.runner.common.util.outcome import JobFailedError
from horovod.runner.elastic import discovery, rendezvous
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.util import network, worker_environment
from typing_extensions import override

from hvd_train.elastic import driver as driver_module
from hvd_train.elastic.dispatcher import RunWorker
from hvd_train.elastic.driver import REPLACEMENTS, SSH_OPTIONS, Driver, Replacement, slot_info
from hvd_train.elastic.ranks import RankAssignment, assign_ranks
from hvd_train.elastic.roster import Finish
from hvd_train.elastic.worker import Worker
from hvd_train.launch import client, seat
from tests.support.drivers import NoHosts, Rendezvous, driver, replacement_of


@pytest.mark.parametrize("replacement", REPLACEMENTS, ids=lambda replacement: replacement.name)
def test_what_is_replaced_is_there(replacement: Replacement) -> None:
    """Under its name, with the parameters that are relied on; ours takes as many."""
    original = getattr(replacement.module, replacement.name)
    assert list(inspect.signature(original).parameters) == replacement.parameters.split()
    inspect.signature(replacement.make(original)).bind(*replacement.parameters.split())
    assert replacement.why.endswith(".")


def test_what_is_replaced_is_used() -> None:
    """Horovod's launcher looks each name up where it is replaced, at the time of the call."""
    source = inspect.getsource(gloo_run)
    for replacement in REPLACEMENTS:
        if replacement.module is gloo_run:
            assert re.search(rf"(?<!def ){replacement.name}\(", source), replacement.name
        elif replacement.module is not discovery:  # used by another module of Horovod's
            module = replacement.module.__name__.rpartition(".")[2]
            assert f" {module}.{replacement.name}(" in source, replacement.name


def test_the_driver_answers_all_that_horovod_asks() -> None:
    """Each method that the launcher and the rendezvous server call, with Horovod's parameters."""
    source = inspect.getsource(gloo_run) + inspect.getsource(rendezvous)
    asked = set(re.findall(r"\bdriver\.([a-z_]+)\(", source))
    assert "record_ready" in asked
    for name in asked:
        ours, theirs = (inspect.signature(getattr(kind, name)).parameters for kind in (Driver, ElasticDriver))
        assert list(ours) == list(theirs), name


def test_ranks_are_in_the_form_that_workers_read() -> None:
    """An answer is `rank,size,local_rank,local_size,cross_rank,cross_size`."""
    assert {field.name for field in fields(SlotInfo)} <= {field.name for field in fields(RankAssignment)}
    workers = [Worker(1000 + n, host, slot=n, started_at=0, heard_at=0) for n, host in enumerate("abacba")]
    assert slot_info(assign_ranks(workers)[3]).to_response_string() == "3,6,0,1,2,3"
    assert slot_info(assign_ranks(workers)[3]).hostname == "c"
    assert INVALID_SLOT_INFO.to_response_string().startswith("-1,")


def test_a_workers_process_gets_our_variables_beside_horovods() -> None:
    """Those of its ranks and those that stay its own; a rank of a job that is not elastic gets Horovod's alone."""
    variables = replacement_of("create_slot_env_vars")
    ranks = {"rank": 0, "local_rank": 1000, "cross_rank": 0, "size": 1, "local_size": 2, "cross_size": 1}
    ours = variables(RankAssignment("a", **ranks, worker=1000, environment={"HVD_TRAIN_SLOT": "1"}))
    assert ours["HOROVOD_LOCAL_RANK"] == "1000"
    assert ours["HVD_TRAIN_SLOT"] == "1"
    assert "HVD_TRAIN_SLOT" not in variables(SlotInfo("a", **ranks))


def test_each_host_gets_an_address_that_leads_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one the loopback, any other those of the interfaces that the user has named, and none gets Horovod's own."""
    monkeypatch.setattr(Driver, "interfaces", ("eth7", "ib0"))
    monkeypatch.setattr(driver_module.addresses, "for_worker_on", lambda host, names: [f"{host} by {n}" for n in names])
    ranks = {"rank": 0, "local_rank": 0, "cross_rank": 0, "size": 1, "local_size": 1, "cross_size": 1}
    variables = replacement_of("create_slot_env_vars")(SlotInfo("h2", **ranks))
    assert variables[client.ADDRESS] == "h2 by eth7", "the likeliest one"
    assert variables["HVD_TRAIN_DRIVER_ADDRESSES"] == "h2 by eth7,h2 by ib0"
    assert variables["HVD_TRAIN_INTERFACES"] == "eth7,ib0"
    for_all = replacement_of("create_run_env_vars")("127.0.0.1", {"lo"}, 4567, elastic=True)
    assert (for_all[client.PORT], for_all["HOROVOD_ELASTIC"]) == (4567, "1")
    assert not [name for name, value in for_all.items() if value in ("127.0.0.1", "lo")]
    not_elastic = replacement_of("create_run_env_vars")("127.0.0.1", {"lo"}, 4567)
    assert "HOROVOD_ELASTIC" not in not_elastic


def test_no_interfaces_are_searched_for_when_a_job_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that are off at that time do not matter; what the user has named is kept for the workers."""
    monkeypatch.setattr(Driver, "interfaces", ())
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "ib1")
    search = replacement_of("get_common_interfaces")
    assert network.get_driver_ip(search(SimpleNamespace(nics=None), ["a host that is off"])) == "127.0.0.1"
    assert list(Driver.interfaces) == ["ib1"]
    search(SimpleNamespace(nics={"eth1", "eth0"}), ["a host that is off"])
    assert list(Driver.interfaces) == ["eth0", "eth1"]


def test_ssh_gets_our_options() -> None:
    """Before those of Horovod; an ssh in the user's own command keeps its own."""
    line = replacement_of("get_remote_command")(shlex.quote("ssh h3 true"), host="h2")
    assert line.startswith(f"ssh {SSH_OPTIONS} -o ")
    assert line.count(SSH_OPTIONS) == 1


def test_ssh_gets_the_port_and_the_host() -> None:
    """In their places, before the command for that host."""
    words = shlex.split(replacement_of("get_remote_command")(shlex.quote("exec true"), "h2", 2222))
    assert words[words.index("-p") + 1] == "2222"
    assert "h2" in words[:-1]
    assert "exec true" in words[-1]


ENDS = "import os, signal, sys; print('out'); print('err', file=sys.stderr); sys.stdout.flush(); "


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), 9)", 137),
        ("os.kill(os.getppid(), signal.SIGTERM); sys.exit(143)", 143),
        ("os.kill(os.getpid(), signal.SIGHUP); sys.exit(4)", 4),
    ],
)
def test_what_ssh_runs_reports_how_the_worker_has_ended(end: str, code: int, shell: str) -> None:
    """A signal, too, and though its shell got one; a lost ssh, which may send SIGHUP, does not end it."""
    command = f"exec env A=1 {shlex.join([sys.executable, '-c', ENDS + end])}"
    script, told = worker_environment.on_other_host(command, {"HOROVOD_RANK": "1"}, "/")
    line = replacement_of("get_remote_command")(shlex.quote(script), host="h2")
    remote = shlex.split(line)[-1]  # what the login shell on the other host is given
    done = subprocess.run([shell, "-c", remote], input=told.decode(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "out\n", "err\n")


def test_patience_is_what_the_user_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Horovod's flag, else by its variable; ten minutes without either."""
    assert driver(30).dispatcher._roster.patience_s == 30
    assert Driver(Rendezvous(), NoHosts(), 1, None).dispatcher._roster.patience_s == 600
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "45")
    assert Driver(Rendezvous(), NoHosts(), 1, None).dispatcher._roster.patience_s == 45
    assert driver(30).dispatcher._roster.patience_s == 30


@pytest.mark.parametrize("text", ["10m", "0", "-5"])
def test_a_patience_that_is_no_number_of_seconds_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As wrong input, in one line; ten minutes in its place would look as if the variable had no effect."""
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", text)
    with pytest.raises(JobFailedError, match=f"is a number of seconds from 1, not '{text}'") as refused:
        Driver(Rendezvous(), NoHosts(), 1, None)
    assert refused.value.exit_code == 2


def test_a_start_waits_for_no_list_of_hosts() -> None:
    """Horovod's launcher would wait for all slots of -np, without a word; the roster waits, and speaks."""
    assert driver().wait_for_available_slots(4).host_assignment_order == []


@pytest.mark.parametrize("finish", [Finish(0, "done"), Finish(3, "no more workers")])
@pytest.mark.parametrize("interrupted", [False, True])
def test_how_a_job_has_ended(finish: Finish, interrupted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is done has no error, one that failed has its exit code; after a signal the launcher says so itself."""
    event = threading.Event()
    monkeypatch.setattr(Driver, "interrupted", event)
    if interrupted:
        event.set()
    own = driver()
    monkeypatch.setattr(own.dispatcher, "wait_for_end", lambda: finish)
    if finish.exit_code == 0 or interrupted:
        assert vars(own.get_results()) == {"error_message": None, "worker_results": {}}
    else:
        with pytest.raises(JobFailedError, match="no more workers") as failed:
            own.get_results()
        assert failed.value.exit_code == 3


def test_a_job_has_as_many_workers_as_the_user_asks_for() -> None:
    """--min-np and --max-np; without them one is enough and there is no bound."""
    for least, most, expected in ((2, 5, (2, 5)), (0, None, (1, sys.maxsize))):
        roster = Driver(Rendezvous(), NoHosts(), least, most).dispatcher._roster
        assert (roster.min_workers, roster.max_workers) == expected
        assert roster.start_workers == roster.min_workers, "until the launcher says for how many the start waits"


def test_the_launchers_event_for_a_signal_is_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod keeps it to itself, and a job that did not see it would start its workers again."""
    monkeypatch.setattr(Driver, "interrupted", threading.Event())
    event = threading.Event()
    replacement = next(replacement for replacement in REPLACEMENTS if replacement.name == "register_shutdown_event")
    assert replacement.make(lambda: event)() is event
    own, given = driver(), list[object]()
    monkeypatch.setattr(own.dispatcher, "start", lambda *arguments: given.extend(arguments))
    run_worker: RunWorker = lambda ranks, events: (0, 0.0)  # noqa: E731
    own.start(2, run_worker)
    assert given == [2, run_worker, event]


def test_the_launcher_runs_with_all_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with our defaults, where the user has none; an address of another job's driver is not for its workers."""
    original = {replacement: object() for replacement in REPLACEMENTS}
    made: dict[str, object] = {}
    for replacement in REPLACEMENTS:
        monkeypatch.setattr(replacement.module, replacement.name, original[replacement])
    ours = [
        replace(one, make=lambda found, one=one: made.setdefault(one.name, found) and f"our {one.name}")
        for one in REPLACEMENTS
    ]
    monkeypatch.setattr(driver_module, "REPLACEMENTS", ours)
    first, *others = driver_module.DEFAULTS
    monkeypatch.setenv(first, "the user's")
    for name in others:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv(client.ADDRESS, "10.0.0.9")
    monkeypatch.setenv(seat.DRIVER, "that of another job")
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(driver_module, "outlive", lambda: seen.append({}))
    monkeypatch.setattr(driver_module.launch, "run_commandline", lambda: seen.append(dict(os.environ)))
    driver_module.main()
    assert made == {one.name: original[one] for one in REPLACEMENTS}
    assert all(getattr(one.module, one.name) == f"our {one.name}" for one in REPLACEMENTS)
    assert len(seen) == 2, "a console that is gone must not end it"
    assert seen[1][first] == "the user's"
    assert {name: seen[1][name] for name in others} == {name: driver_module.DEFAULTS[name] for name in others}
    assert client.ADDRESS not in seen[1]
    driver_module.main()  # where there is no such address, nothing is to be forgotten
    assert len(seen) == 4


class OneHost(NoHosts):
    """A discovery that finds a host with one slot."""

    @override
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The host."""
        return {"a": 1}


def test_a_job_runs_on_the_hosts_that_are_found_and_meets_at_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the launcher's start to its end, with one worker; at the end nobody looks for hosts or answers any more."""
    monkeypatch.setattr(Driver, "interrupted", threading.Event())
    server = Mock()
    own, ready = Driver(server, OneHost(), 1, 1), threading.Event()
    started: list[RankAssignment] = []

    def run_worker(ranks: RankAssignment, events: list[threading.Event]) -> tuple[int, float]:
        started.append(ranks)
        own.record_ready(ranks.hostname, ranks.worker)
        assert own.get_slot_info(ranks.hostname, ranks.worker).to_response_string() == "0,1,0,1,0,1"
        ready.set()
        return 0, 0.0

    own.start(1, run_worker)
    assert own.get_results().worker_results == {}
    assert ready.is_set()
    server.init.assert_called_once_with(assign_ranks([Worker(1000, "a", slot=0, started_at=0, heard_at=0)]))
    assert not own.dispatcher._stopped.is_set()
    server.stop.assert_not_called()
    own.stop()
    assert own.dispatcher._stopped.is_set()
    server.stop.assert_called_once_with()
