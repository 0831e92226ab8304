"""The program that examines a host, as the doctor runs it: from its text, with a line of JSON for each request."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hvd_train.doctor import agent


def asked(*requests: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the agent's answers to these requests, after which its input ends."""
    program = [sys.executable, "-c", Path(agent.__file__).read_text()]
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run(program, input=lines, capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_request_has_an_answer_and_the_end_of_the_input_ends_the_agent() -> None:
    """A request that cannot be answered is an answer, too."""
    before = time.time()
    clock, unknown = asked({"do": "clock"}, {"do": "sing"})
    assert before <= clock["time"] <= time.time()
    assert unknown["error"].startswith("KeyError")


def test_the_facts_of_this_host(tmp_path: Path) -> None:
    """Loopback has its address, names are looked up, and the data folder is measured."""
    (tmp_path / "data" / "class").mkdir(parents=True)
    (tmp_path / "data" / "class" / "image.jpg").write_bytes(bytes(10))
    found = agent.facts({"names": ["localhost", "no-such-host.invalid"], "data": str(tmp_path / "data")})
    assert found["interfaces"]["127.0.0.1"] == "lo"
    assert found["names"] == {"localhost": ["127.0.0.1"], "no-such-host.invalid": []}
    assert found["data"] == {"files": 1, "bytes": 10}
    assert json.dumps(found)
    assert agent.facts({"names": [], "data": str(tmp_path / "gone")})["data"] is None


def test_hosts_send_each_other_bytes_on_a_port_that_the_system_chose() -> None:
    """All bytes arrive; where nobody listens the reason comes back."""
    port = agent.listen({})["port"]
    request = {"host": "127.0.0.1", "limit_s": 5.0}
    assert agent.reach({**request, "port": port, "bytes": 3 << 20})["seconds"] > 0
    assert agent.reach({**request, "port": port, "bytes": 0})["seconds"] > 0
    assert agent.reach({**request, "port": 1, "bytes": 0}) == {"error": "Connection refused"}
