"""Where numbers can go: what is imported for it, and what is checked before anything starts."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hvd_train
from hvd_train.errors import UsageError
from hvd_train.run_files import destinations
from hvd_train.run_files.journal import RunJournal
from tests.unit.run_files.test_journal import step_record


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_library_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to type."""
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError) as caught:
        destinations.check(["tensorboard", name, "csv"])
    assert str(caught.value).startswith(f"--log-to {name}: {name} cannot be imported (")
    assert f"type pip install 'hvd_train[{name}]', or leave {name} out" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ranks", [[], ["--np", "2"]])
def test_a_missing_library_ends_the_command_before_a_rank_starts(ranks: list[str], tmp_path: Path) -> None:
    """With exit code 2 and no run folder."""
    root = Path(hvd_train.__file__).parents[1]
    code = f"import sys; sys.path[:0] = ['hidden', {str(root)!r}]; from hvd_train.cli import main; sys.exit(main())"
    Path("hidden").mkdir()
    Path("hidden/mlflow.py").write_text("raise ImportError('broken here')\n")
    line = [sys.executable, "-c", code, "train", "digits", "--log-to", "csv,mlflow", *ranks]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "--log-to mlflow: mlflow cannot be imported (broken here)" in done.stderr
    assert not Path("runs").exists()


def test_nothing_is_imported_that_is_not_chosen() -> None:
    """A run with TensorBoard alone pays for no other library, and one without pays for none."""
    root = Path(hvd_train.__file__).parents[1]
    code = f"""
import sys; sys.path.insert(0, {str(root)!r})
from pathlib import Path
from hvd_train.run_files import destinations
from hvd_train.run_files.journal import RunJournal
destinations.check(["csv"])
RunJournal(Path(), 0, 0, live=False, log_to=["csv"]).close()
print(sorted({{"wandb", "mlflow", "tensorboard", "torch"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("log_to", "files"), [([], []), (["csv"], ["metrics.csv"]), (["tensorboard"], ["tensorboard"])]
)
def test_numbers_go_where_they_are_to(log_to: list[str], files: list[str]) -> None:
    """And to metrics.jsonl in any case."""
    journal = RunJournal(Path(), 0, 0, live=False, log_to=log_to)
    journal.step(step_record(1))
    journal.close()
    assert sorted(path.name for path in Path().iterdir()) == sorted(["metrics.jsonl", *files])


HUNG = """
import sys, time; sys.path.insert(0, {root!r})
from pathlib import Path
from hvd_train.run_files import in_background
from hvd_train.run_files.journal import RunJournal
from hvd_train.run_files.records import Ending
from tests.unit.run_files.test_journal import step_record

in_background._AT_END_S = in_background._SOON_S = 8.0
begin = time.monotonic()
journal = RunJournal(Path(), 0, 0, live=False, log_to=[sys.argv[1]])
for step in range(1, 101):
    journal.step(step_record(step))
print("trained", time.monotonic() - begin)
journal.end(Ending("finished", {{"best/top1": 0.5}}))
journal.close()
print("closed", time.monotonic() - begin)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_server_that_never_answers_costs_the_limit_at_the_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real libraries: training does not wait, and the process ends soon after, without a word too many."""
    root = str(Path(hvd_train.__file__).parents[1])
    with socket.create_server(("127.0.0.1", 0)) as server:  # it takes connections, and says nothing
        host = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret-word@{host}")
        monkeypatch.setenv("WANDB_BASE_URL", f"http://{host}")
        monkeypatch.setenv("WANDB_API_KEY", "secret-word" * 4)
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
        line = [sys.executable, "-c", HUNG.format(root=root), name]
        begin = time.monotonic()
        done = subprocess.run(line, capture_output=True, text=True, timeout=120)
        seconds = time.monotonic() - begin
    times = dict(line.split() for line in done.stdout.splitlines() if line.startswith(("trained", "closed")))
    assert float(times["trained"]) < 5
    assert float(times["closed"]) < 15
    assert seconds < float(times["closed"]) + 20
    assert f"{name} lacks 101 records, which metrics.jsonl has" in done.stdout
    assert done.stderr == ""
    assert "secret-word" not in done.stdout
    assert done.returncode == 0
