"""The command line: the chosen command, its arguments, output and exit code;
`train` has its own file.
"""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest
from PIL import Image

from hvd_train import train
from hvd_train.commands import sweep, tree
from hvd_train.config import Config, DataConfig
from hvd_train.data.sources import open_data
from hvd_train.doctor.machine import Finding
from hvd_train.errors import RankLost, UsageError
from hvd_train.validate import Scores
from tests.support.launching import HVD_TRAIN
from tests.support.run_folders import event, start, step, whole_run, write
from tests.support.runs import small_config
from tests.unit.commands.conftest import Command

HOSTILE = "h1\x1b]0;title\x07\x9b2J\u202e[/b] is"
OBEYED = {"\x1b", "\x07", "\x9b", "\u202e"}
COMMANDS = [parser.prog.partition(" ")[2] for parser in tree.parsers(tree.tree())]


def test_usage_and_version_are_printed(command: Command) -> None:
    """Without a command there is the usage, and an exit code for a mistake."""
    for line, code in {"": 2, "bench": 2, "help": 0, "bench -h": 0}.items():
        assert command(line, code).out.startswith("usage: hvd-train ")
    assert re.fullmatch(r"hvd-train \d+\.\d+\.\d+\n", command("--version").out)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_is_its_own(
    name: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what this command does and has all flags that it reads; lines fit a terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    printed = command(f"{name} --help").out
    assert printed.startswith(f"usage: hvd-train {name}".rstrip())
    assert max(map(len, printed.splitlines())) <= 80
    own = {"config": "--trust", "sweep": "--hosts FILE", "train": "--np N"}
    assert own.get(name, "--help") in printed
    assert ("Train a recipe, changed by flags" in printed) == (name in ("", "train"))
    assert ("--image-size INT|none" in printed) == ("[RECIPE]" in printed)


def test_a_help_has_the_settings_of_the_recipe(command: Command) -> None:
    assert "(default: 90)" in command("train imagenet-resnet50 --help").out


def test_an_error_is_a_line_and_a_code(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = Mock(side_effect=[RankLost("no rank 7"), KeyboardInterrupt])
    monkeypatch.setattr("hvd_train.commands.runs.audit", audit)
    assert command("audit 7", 3).err == "hvd-train: no rank 7\n"
    command("audit", 128 + signal.SIGINT)


def test_replay_and_diff_print_what_differs(command: Command) -> None:
    """Exit code 1 if a step differs from the ledger."""
    changes = {"ledger": True, "commit_steps": 5, "learning_rate": 1e-3, "epochs": 1}
    train(small_config(output_dir=Path("out"), **changes))
    shutil.copytree("out", "other")
    step, *samples = command("replay out --steps 71:72 --top 2").out.splitlines()[:3]
    assert re.fullmatch(r"step 71  loss [\d.]+  gradient norm [\d.]+  same bits", step)
    for sample in samples:
        assert re.fullmatch(r" +\d\.\d%  sample \d+  gradient norm [\d.]+", sample)
    command("diff out other")
    ledger = Path("other/ledger.jsonl")
    *lines, last = ledger.read_text().splitlines()
    lines.append(json.dumps({**json.loads(last), "answers": "40" * 12}))
    ledger.write_text("\n".join([*lines, ""]))
    printed = command("replay other --steps 72 --top 0", 1).out
    assert "1 of 1 steps differ by more than 0.0001" in printed
    assert "the runs part at step 72: " in command("diff out other", 1).out


def test_evaluate_and_audit_agree_with_the_training(command: Command) -> None:
    """The audit of a ledger that lacks a step has exit code 1."""
    line = "train digits --epochs 1 --device cpu --output-dir out --lr 0.01 --ledger"
    assert "next:  hvd-train report out" in command(line).out
    summary = json.loads(Path("out/summary.json").read_text())
    scores = json.loads(command("evaluate out --json").out)
    assert scores.items() >= {name: summary[name] for name in ("loss", "top1", "top5")}.items()
    assert (scores["count"], len(scores["per_class"])) == (360, 10)
    assert scores["weights"] == "best weights"
    for path in (max(Path("out/checkpoints").glob("*.ckpt")), Path("out/model-best.pt")):
        found = json.loads(command(f"evaluate {path} --json").out)
        assert found == {**scores, "weights": f"weights of {path.name}"}
    assert json.loads(command("evaluate out --json --split train").out)["count"] == 1437
    assert "all ranks had compared: 23; other commits: none" in command("audit out").out
    ledger = Path("out/ledger.jsonl")
    steps = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(steps[:7] + steps[8:]))
    command("audit out", 1)


def test_classes_of_images_are_predicted(command: Command) -> None:
    """Of files and folders; a line has tabs between its values."""
    command("train digits --epochs 2 --device cpu --output-dir runs/a")
    data = open_data(DataConfig(), 0).val
    Path("photos/more").mkdir(parents=True)
    for number, image in enumerate(data.images[:20]):
        Image.fromarray(image[0].numpy()).save(f"photos/more/{number:02}.png")
    shutil.copy("photos/more/00.png", "one.png")
    printed = command("predict runs/a/model-best.pt one.png photos --top 2").out
    (name, *first), *rows = [line.split("\t") for line in printed.splitlines()]
    assert (name, first) == ("one.png", rows[0][1:])
    assert [row[0] for row in rows] == [f"photos/more/{number:02}.png" for number in range(20)]
    right = sum(int(row[1]) == label for row, label in zip(rows, data.labels, strict=False))
    assert right >= 10
    assert all(0.5 < float(row[2]) + float(row[4]) <= 1.0001 for row in rows)
    assert command("predict one.png --top 1").out == "\t".join(["one.png", *first[:2]]) + "\n"


def test_a_full_disk_of_the_output_is_an_error() -> None:
    """Unless the command trains, whose result is in files."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [HVD_TRAIN, "config", "digits"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (
        os.EX_IOERR,
        b"hvd-train: the disk of the output is full\n",
    )


def test_values_of_a_sweep_are_combined() -> None:
    """By the names of settings; a value may have commas of its own."""
    expected = {
        "digits": {"only": {}},
        "digits -b=16,32 --nesterov --seed 1,2": {
            f"batch_size={size} seed={seed}": {"batch_size": size, "seed": seed}
            for size in ("16", "32")
            for seed in ("1", "2")
        },
        "--log_to=mlflow,wandb --lr 1,2 --optimizer-args a=1 betas=0.9,0.95 --freeze conv[1,2].*": {
            f"learning_rate={rate}": {"learning_rate": rate} for rate in ("1", "2")
        },
    }
    for line, runs in expected.items():
        options = tree.read(["sweep", *line.split()])
        found = dict(sweep.combinations(options))
        assert {name: {**vars(options), **changed} for name, changed in runs.items()} == {
            name: vars(chosen) for name, chosen in found.items()
        }


@pytest.mark.parametrize(
    ("higher", "order", "ranks"), [(True, "0.1 0.2 9", ""), (False, "0.2 0.1 9", "--np 2")]
)
def test_sweep_lists_the_best_first(
    higher: bool, order: str, ranks: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed training is the last; an error is better if it is smaller."""

    def train(launcher: list[str], config: Config, folder: Path) -> str | None:
        assert launcher[1:3] == ranks.replace("--", "-").split()
        write(folder, [start(best="score", higher=higher)])
        rate = config.optimizer.learning_rate
        (folder / "summary.json").write_text(json.dumps({"best_score": 1 / rate}))
        return "diverged" if rate > 1 else None

    monkeypatch.setattr("hvd_train.bench.scaling.train", train)
    command(f"sweep digits --lr 9,0.2,0.1 --output-dir out {ranks}", 1)
    rows = json.loads(Path("out/sweep.json").read_text())
    assert [row["name"] for row in rows] == [f"learning_rate={rate}" for rate in order.split()]
    assert (rows[0]["figure"], rows[2]["failed"]) == ("score", "diverged")


@pytest.mark.parametrize(
    ("statement", "frames", "end"),
    [
        ("raise ValueError('no table')", 2, "ValueError: no table\n"),
        ("return json.loads('no table')", 5, "mine_5.py, line 5, in rows\n"),
    ],
)
def test_an_error_in_the_users_code_shows_their_code(
    statement: str, frames: int, end: str, command: Command
) -> None:
    """Raised there, or in a library that it calls."""
    code = f"def data(config):\n    return rows()\nimport json\ndef rows():\n    {statement}\n"
    Path(f"mine_{frames}.py").write_text(code)
    printed = command(f"train digits --data mine_{frames}:data --device cpu", 1).err
    assert printed.startswith("Traceback (most recent call last, from your code on):\n")
    assert printed.count("  File ") == frames
    assert printed.endswith(end)


@pytest.mark.usefixtures("_no_charts")
def test_a_report_takes_a_sweep_and_leaves_out_what_is_no_run(command: Command) -> None:
    for name in ("a", "sweep/000-lr=0.1", "sweep/001-lr=0.2"):
        write(Path("runs") / name, whole_run())
    Path("runs/notes").mkdir()
    printed = command("report runs/a --output page.html runs/notes runs/sweep").err
    assert "hvd-train: left out, since they are no run folders: runs/notes\n" in printed
    assert "Training report: 3 runs" in Path("page.html").read_text()
    command("report runs/notes", 2)


@pytest.mark.usefixtures("_no_charts")
def test_the_newest_run_is_the_default(command: Command) -> None:
    for number, name in enumerate(("b", "a", "c")):
        write(Path("runs") / name, whole_run())
        os.utime(Path("runs") / name / "metrics.jsonl", (number % 2, number % 2))
    for line, code in {"watch": 0, "report": 0, "audit": 2}.items():
        assert "hvd-train: the newest run: runs/a\n" in command(line, code).err


def test_ranks_without_a_number_are_refused_by_a_program_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", ["mine.py"])
    with pytest.raises(UsageError, match=r"type `hvd-train launch --np 2 -- python mine\.py`"):
        train(small_config())


def test_export_refuses_a_symlink_in_a_run(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = Mock(side_effect=lambda target, folder, **_: [folder / "weights.pt"])
    monkeypatch.setattr("hvd_train.export.export", export)
    Path("run").mkdir()
    assert command("export run").out == "run/export/weights.pt\n"
    assert command("export step-7.ckpt").out == "step-7.ckpt.export/weights.pt\n"
    Path("outside").mkdir()
    Path("run/export").symlink_to("../outside")
    line = "hvd-train: run/export is a link, which is not followed: name a folder with --output\n"
    assert command("export run", 2) == ("", line)
    command("export run --output run/export")


def test_watch_and_report_accept_values_of_any_type(command: Command) -> None:
    lines = whole_run(1)
    names = sorted({name for line in lines for name in line} - {"kind", "time"})
    changes = [{name: value} for value in (None, {}, "x", -1, 10**400) for name in names]
    wrong = [
        {**line, **change} for change in changes for line in lines if change.keys() <= line.keys()
    ]
    run = write(Path("run"), [*lines, *wrong])
    (run / "summary.json").write_text(
        '{"why": ["x"], "samples_per_second": "fast", "test_top1": {}}'
    )
    (run / "environment.json").write_text(
        '{"host": [1], "versions": 3, "ranks_of_hosts": [], "command": {}}'
    )
    command("watch run --once")
    command("report run")


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("warning", 0), ("broken", 1)])
def test_only_broken_findings_make_the_doctor_fail(
    verdict: str, code: int, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Finding("x", verdict, "y", "z")
    monkeypatch.setattr("hvd_train.doctor.machine.examine", lambda: [found])
    printed = json.loads(command("doctor --json", code).out)
    assert printed["findings"] == [{"name": "x", "verdict": verdict, "what": "y", "todo": "z"}]
    assert "-> z" in command("doctor", code).out


def test_control_characters_are_not_printed(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may come from host files, hosts, errors, class folders and runs."""
    Path("\x1b[2Jhosts").write_text(f"{HOSTILE} slots=2\n")
    write(Path("r\x1bun"), [start(), step(1), event("note", 2, HOSTILE)])
    finding = Finding(HOSTILE, "broken", HOSTILE, HOSTILE)
    monkeypatch.setattr("hvd_train.doctor.machine.examine", lambda: [finding])
    monkeypatch.setattr("hvd_train.bench.scaling.train", Mock(return_value=HOSTILE))
    scores = Scores({"loss": 1.0, "top1": 0.5}, 2, per_class={f"{HOSTILE}\nb": 0.5})
    monkeypatch.setattr("hvd_train.run.evaluate", lambda *_, **__: scores)
    for line, code in {
        "doctor --hosts '\x1b[2Jhosts'": 2,
        "doctor": 1,
        "sweep digits --output-dir out": 1,
        "evaluate run": 0,
        "watch r\x1bun --once": 0,
    }.items():
        printed = "".join(command(line, code))
        assert "title" in printed
        assert not OBEYED & set(printed), printed
        assert line != "evaluate run" or printed.count("\n") == 2
