"""Run the tests (`make test`): `python -m tests.run [arguments of pytest]`. Standard library only.

If one to three tests fail, run them again, alone. A test that then passes is flaky: the run is
green, and its last lines are `FLAKY: TEST ...`. A second failure, more than three failures and
errors of pytest are red (`FAILED: TEST`).
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

MOST = 3
ROOT = Path(__file__).parents[1]
_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
_KNOWN = ROOT / "tests" / "flaky.txt"
_VERDICT = ROOT / "build" / "test-verdict.txt"
_TESTS_FAILED = 1  # pytest's exit code; higher codes are errors and interruptions


def main(arguments: list[str]) -> int:
    """Return the exit code of pytest, or 0 if the failed tests pass alone."""
    _FAILED.unlink(missing_ok=True)
    _VERDICT.unlink(missing_ok=True)
    signal.signal(signal.SIGINT, lambda *_: None)  # pytest gets it as well
    code = _pytest("-n", "2", "--max-worker-restart", "0", *arguments)
    failed = sorted(json.loads(_FAILED.read_text())) if _FAILED.exists() else []
    verdict = [f"FAILED: {test}" for test in failed]
    if code == _TESTS_FAILED and 0 < len(failed) <= MOST and all("::" in test for test in failed):
        print(f"{len(failed)} failed; running them once more, alone", flush=True)
        if _pytest("-n", "0", "-p", "no:cacheprovider", *failed) == 0:
            code = 0
            verdict = [
                f"FLAKY: {test} failed among the others and passed alone ({_cause(test)})"
                for test in failed
            ]
    for line in verdict:
        print(line, flush=True)
    if verdict:
        _VERDICT.parent.mkdir(exist_ok=True)
        _VERDICT.write_text("".join(f"{line}\n" for line in verdict))
    return code


def _pytest(*arguments: str) -> int:
    """Run pytest with its own temporary folder, so that earlier folders stay."""
    with tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as folder:
        return subprocess.call(
            [sys.executable, "-m", "pytest", *arguments],
            env={**os.environ, "PYTEST_DEBUG_TEMPROOT": folder},
            cwd=ROOT,
        )


def _cause(test: str) -> str:
    for line in _KNOWN.read_text().splitlines():
        if line.startswith(f"{test}  "):
            return f"known: {line.removeprefix(test).strip()}"
    return f"fix or delete it, or list it in {_KNOWN.relative_to(ROOT)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
