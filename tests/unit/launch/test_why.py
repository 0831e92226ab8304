"""`hvd-train why`: the answer follows from what the hosts found."""

from pathlib import Path
from typing import Any

import pytest

import hvd_train
from hvd_train import cli
from hvd_train.launch.why import explain, explain_start
from tests.support.launching import write_program

PACKAGE = Path(hvd_train.__file__).parent
TORCH = "/env/lib/python3/site-packages/torch/utils/data"
REDUCES = [
    ("/env/lib/python3/site-packages/horovod/torch/mpi_ops.py", 1285, "synchronize"),
    (f"{PACKAGE}/world/horovod_world.py", 304, "_wait"),
    (f"{PACKAGE}/loops.py", 442, "update"),
    ("/home/me/mine.py", 36, "main"),
]
EVALUATES = [
    *REDUCES[:2],
    (f"{PACKAGE}/loops.py", 282, "evaluate"),
    ("/home/me/mine.py", 39, "main"),
]
COMPUTES = [("/env/lib/python3/site-packages/torch/nn/module.py", 1787, "_call_impl")]
COMPUTES += [("/home/me/mine.py", 24, "forward"), ("/home/me/mine.py", 37, "main")]
LOADS = [
    (f"{TORCH}/dataloader.py", 1293, "_try_get_data"),
    (f"{PACKAGE}/data/loader.py", 487, "_read"),
]
READS = [("/home/me/mine.py", 31, "__getitem__"), (f"{PACKAGE}/data/loader.py", 259, "item")]
INSTALLED = [("/usr/lib/python3.11/threading.py", 5, "wait")]
INSTALLED += [("/env/lib/python3.11/site-packages/theirs/net.py", 7, "forward")]
TYPED = [("<stdin>", 4, "forward"), ("<string>", 1, "<module>")]
SPAWNED = [(f"{TORCH}/_utils/worker.py", 335, "_worker_loop"), ("<string>", 1, "<module>")]
STARTS = [(f"{PACKAGE}/launch/roll_call.py", 63, "call"), ("/home/me/mine.py", 30, "main")]
IDLE = [(f"{TORCH}/_utils/worker.py", 335, "_worker_loop")]

Frames = list[tuple[str, int, str]]


def process(frames: Frames, state: str = "sleeping", what: str = "step", **more: Any) -> Any:
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
    text = "\n".join(["Stack (most recent call first):", *lines, ""]) if frames else ""
    place = {"process": 7, "what": what, "step": 812, "before": 812}
    return {**place, "state": state, "seconds": 41.2, "stack": text, "threads": [], **more}


def program(name: str, state: str) -> Any:
    """Return a process that is not ours."""
    return {"process": 9, "name": name, "state": state, "stack": "", "threads": []}


def answer(*ranks: Any) -> list[str]:
    """Return the answer about ranks, each on a host of its own: its processes, or what the
    host says.
    """
    found = {}
    for number, processes in enumerate(ranks):
        of_host = {"ranks": {"7": processes}, "host": "load 3.0 on 2 cores"}
        found[f"h{number}"] = processes if isinstance(processes, str) else of_host
    return explain([(host, 7) for host in found], found)


WAITING = [process(REDUCES)]
COMPUTING = process(COMPUTES)
LOADING = process(LOADS)
READING = process(READS)
IDLING = process(IDLE)
STOPPED = process([], "stopped")
BEGAN = "; step 812 began 41 s ago; "


@pytest.mark.parametrize(
    ("odd", "is_what"),
    [
        ([COMPUTING], "in /home/me/mine.py:24 (forward)"),
        (
            [LOADING, IDLING, READING],
            "waiting for its loader process, which is in /home/me/mine.py:31 (__getitem__)",
        ),
        (
            [LOADING, STOPPED],
            "waiting for its loader process, which is stopped; type there: kill -CONT 7",
        ),
        (
            [LOADING, IDLING],
            "waiting for its loader processes, which are idle",
        ),
        ([STOPPED], "stopped; type there: kill -CONT 7"),
        ([process([], "disk-sleep")], "waiting for a disk or a network file system"),
        ([process(COMPUTES, "disk-sleep")], "in /home/me/mine.py:24 (forward)"),
        ([process([], "running")], "running at an unknown place"),
        ([program("python", "zombie")], "dead, which its parent process has not noticed"),
        (
            [COMPUTING, program("ffmpeg", "stopped"), program("sh", "sleeping")],
            "in /home/me/mine.py:24 (forward); its process 9 (ffmpeg) is stopped; type there: "
            "kill -CONT 9",
        ),
        ([process(INSTALLED)], f"in {INSTALLED[1][0]}:7 (forward)"),
        ([process(TYPED)], "in <stdin>:4 (forward)"),
        (
            [LOADING, process(SPAWNED)],
            "waiting for its loader processes, which are idle",
        ),
        ([], "gone: its process has ended"),
        ("no answer within 10 s", "out of reach: h2 gives no answer (no answer within 10 s)"),
    ],
)
def test_the_rank_that_others_wait_for_is_named_first(odd: Any, is_what: str) -> None:
    lines = answer(WAITING, WAITING, odd, WAITING)
    assert lines[0].startswith(f"rank 2 on h2 is {is_what}; ")
    assert lines[0].endswith("; ranks 0, 1, 3 wait for it")
    group = "ranks 0, 1, 3: waiting for other ranks in /home/me/mine.py:36 (main)"
    assert lines[2] == f"{group}; step 812 began 41 s ago"


def test_stacks_of_the_odd_rank_and_its_host_follow() -> None:
    """Lines of the user's code are marked; threads without any are left out."""
    side = '  File "/home/me/side.py", line 2 in poll\n'
    ours = f'  File "{PACKAGE}/launch/heartbeat.py", line 9 in _read\n'
    family = [process(COMPUTES, threads=[ours, side]), IDLING]
    text = "\n".join(answer(WAITING, family))
    stack = f"""
rank 1 on h1, process 7 (sleeping):
    {COMPUTES[0][0]}:1787 (_call_impl)
  > /home/me/mine.py:24 (forward)
  > /home/me/mine.py:37 (main)
  another thread:
  > /home/me/side.py:2 (poll)

h1: load 3.0 on 2 cores"""
    assert text.endswith(stack)


def test_all_ranks_that_hang_are_named() -> None:
    first = answer([STOPPED], WAITING, [COMPUTING], WAITING)[0]
    stopped = f"rank 0 on h0 is stopped; type there: kill -CONT 7{BEGAN}"
    computes = f"rank 2 on h2 is in /home/me/mine.py:24 (forward){BEGAN}"
    assert first == f"{stopped}{computes}ranks 1, 3 wait for them"


def test_ranks_that_handle_the_signal_are_judged_by_what_else_is_known() -> None:
    silent = process([], answers=False, waited=0.0)
    waits = process([], answers=False, waited=40.0)
    unknown = "is sleeping at an unknown place, since its program handles SIGUSR2"
    first = answer([waits, READING], [silent])[0]
    assert first == f"rank 1 on h1 {unknown}{BEGAN}rank 0 on h0 waits for it"
    first = answer([silent, IDLING], [silent, READING])[0]
    reads = "its loader process is in /home/me/mine.py:31 (__getitem__)"
    assert first == f"rank 1 on h1 {unknown}; {reads}{BEGAN}no rank waits for another"


def test_programs_for_which_a_rank_waits_are_listed() -> None:
    runs = [("/usr/lib/python3.11/subprocess.py", 9, "wait"), *COMPUTES]
    lines = answer([process(runs), program("ffmpeg", "sleeping")], WAITING)
    assert "rank 0 on h0, ffmpeg 9 (sleeping)" in lines


def test_ranks_that_start_are_explained_by_what_their_host_knows() -> None:
    starting = process(STARTS)
    started = process(COMPUTES, what="the start before step")
    found = {"ranks": {"7": [starting], "8": [started]}, "host": ""}
    first = explain_start({8: 5, 7: 4}, "h2", found)[0]
    began = "; it started 41 s ago and has not begun to train; rank 4 on h2 waits for it"
    assert first == f"rank 5 on h2 is in /home/me/mine.py:24 (forward){began}"
    del found["ranks"]["8"]
    assert "`hvd-train why` on the hosts of the others" in explain_start({7: 4}, "h2", found)[0]


def test_another_operation_on_one_rank_is_named_with_both_places() -> None:
    evaluating = process(EVALUATES, what="the evaluation after step")
    first = answer([evaluating], WAITING, WAITING)[0]
    assert first.startswith("all ranks must do the same, but these differ: ")
    assert "rank 0 on h0 waiting for other ranks in /home/me/mine.py:39 (main) (the eval" in first
    assert "ranks 1, 2 waiting for other ranks in /home/me/mine.py:36 (main) (step 812)" in first


def test_a_job_in_which_all_wait_at_one_place_may_lack_its_network() -> None:
    lines = answer(WAITING, WAITING)
    assert lines[0].startswith(
        "all ranks are waiting for other ranks in /home/me/mine.py:36 (main)"
    )
    assert "network" in lines[0]


def test_ranks_that_get_no_answer_over_the_network_are_named() -> None:
    lines = answer(WAITING, [process(EVALUATES, unconfirmed=["10.0.0.3"])], WAITING)
    assert lines[0].endswith(f"{BEGAN}rank 1 on h1 gets no answer from 10.0.0.3")


def test_a_rank_that_waits_for_what_others_have_done_is_named() -> None:
    behind = {**process(REDUCES), "step": 811, "before": 811}
    first = answer(WAITING, [behind], WAITING)[0]
    assert first.startswith("rank 1 on h1 is waiting for other ranks in /home/me/mine.py:36 (main)")
    assert "Python's lock" in first


def test_a_job_that_goes_on_is_said_to_train() -> None:
    earlier = [[{**own, "before": 790}] for own in (process(REDUCES), COMPUTING)]
    assert answer(*earlier) == ["the job trains: step 790 -> 812"]
    assert "no rank waits for another" in answer([COMPUTING])[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[{"host": "localhost", "process": 1}]', "none of its ranks is alive"),
        ('{"host": 1}', "is not a file of hvd_train"),
        ("[]", "is not a file of hvd_train"),
        (None, "No such file"),
    ],
)
def test_a_run_without_living_ranks_is_one_line(
    text: str | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run").mkdir()
    if text is not None:
        Path("run/ranks.json").write_text(text)
    assert cli.run(["why", "run"]) == 2
    errors = capsys.readouterr().err
    assert says in errors
    assert errors.count("\n") == 1


def test_a_damaged_file_hides_no_other_run(capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("old", "[]"), ("new", "{")):
        Path(f"runs/{name}").mkdir(parents=True)
        Path(f"runs/{name}/ranks.json").write_text(text)
    assert cli.run(["why"]) == 2
    assert "which run? none in runs/ trains on this host" in capsys.readouterr().err


@pytest.mark.parametrize(("run", "inside"), [(["mine/run"], ["runs/run"]), ([], [])])
def test_a_container_of_a_job_is_asked(
    run: list[str],
    inside: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The host does not know its processes by their numbers."""
    body = 'if [ $1 = ps ]; then echo other; echo job; else [ $2 = job ] && echo "$@"; fi'
    monkeypatch.setenv("CONTAINER_ENGINE", f"{write_program(tmp_path / 'bin', 'engine', body)}")
    Path("mine/run").mkdir(parents=True)
    Path("mine/run/ranks.json").write_text('[{"host": "localhost", "process": 1}]')
    assert cli.run(["why", *run]) == 0
    assert capsys.readouterr().out.split() == ["exec", "job", "hvd-train", "why", *inside]
