"""`hvd-train doctor --hosts` with each fault that it must name.

test_documented.py runs it on a good cluster.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.hosts import ON_HOSTS, OWN, ROOT, Hosts, hosts_fixture
from tests.support.launching import wait_for

pytestmark = ON_HOSTS

hosts = hosts_fixture(3)


def examined(hosts: Hosts, folder: Path, *options: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the doctor on h1; return its exit code and findings by name."""
    command = hosts.inside("h1", folder, *OWN, "hvd-train", "doctor", "--json", *options)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.stdout, done.stderr

    def strays() -> bool:
        return any(
            words and "python" in words[0]
            for name in hosts.inits
            for _, words in hosts.processes(name)
        )

    wait_for("the doctor's programs to be gone", lambda: not strays())
    return done.returncode, {
        finding["name"]: finding for finding in json.loads(done.stdout)["findings"]
    }


def on(hosts: Hosts, name: str, *command: str) -> None:
    subprocess.run(hosts.inside(name, Path("/"), *command), check=True, capture_output=True)


def off_and_other_versions(hosts: Hosts, folder: Path) -> None:
    """Kill h3; give h2 another version of torch, and a changed file of this package."""
    hosts.kill("h3")
    version = Path(torch.version.__file__)
    changed = folder / "version.py"
    code = folder / "loop.py"
    changed.write_text(f"{version.read_text()}\n__version__ = '9.9'\n")
    on(hosts, "h2", "mount", "--bind", str(changed), str(version))
    code.write_text((ROOT / "hvd_train/loop.py").read_text() + "\n")
    on(hosts, "h2", "mount", "--bind", str(code), str(ROOT / "hvd_train/loop.py"))


def computes_wrongly(hosts: Hosts, folder: Path) -> None:
    """Let convolutions on h2 be wrong by a part in a thousand."""
    functions = Path(torch.nn.functional.__file__)
    changed = folder / "functional.py"
    wrong = "_right = conv2d\n\ndef conv2d(*given, **options):\n"
    wrong += "    return 1.001 * _right(*given, **options)\n"
    changed.write_text(f"{functions.read_text()}\n{wrong}")
    on(hosts, "h2", "mount", "--bind", str(changed), str(functions))


def firewall(hosts: Hosts, folder: Path) -> None:
    hosts.part("h2", "h3")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (
            off_and_other_versions,
            [
                ("h3", "No route to host", "`ssh h3 true`"),
                ("torch", "9.9", "`make env` in the same checkout on h2"),
                ("hvd_train", " on h2", "one environment that all hosts share"),
            ],
        ),
        (firewall, [("allreduce", "h3, rank 2: ", "all TCP ports between hosts must be open")]),
        (
            computes_wrongly,
            [("h2: horovodrun --gloo", "its machine computes wrongly", "do not train")],
        ),
    ],
)
def test_faults_are_named(
    fault: Callable[[Hosts, Path], None],
    expected: list[tuple[str, str, str]],
    hosts: Hosts,
    tmp_path: Path,
) -> None:
    """A finding names the host and what to type; findings about sound hosts stay ok."""
    fault(hosts, tmp_path)
    code, found = examined(hosts, tmp_path, "-H", "h1,h2,h3")
    assert code == 1
    for line, what, todo in expected:
        assert (found[line]["verdict"], what in found[line]["what"]) == ("broken", True), found
        assert todo in found[line]["todo"]
    assert found["h1"]["verdict"] == "ok"
