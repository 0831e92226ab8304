"""What C++ signs, Python's own HMAC and SHA-256 sign alike."""

from __future__ import annotations

import hashlib
import hmac
import shlex
import subprocess
from pathlib import Path

import pytest
from horovod_build.machine import find_compiler
from horovod_build.patches import SOURCE_DIR

PROGRAM = """
#include "signature.h"
#include <iostream>
#include <iterator>
using namespace horovod::common;
int main() {
  std::string in((std::istreambuf_iterator<char>(std::cin)), {});
  std::cout << Sha256(in.substr(64)) << HmacSha256(in.substr(0, 64), in.substr(64));
  SignedRequest request("PUT", "/a/b", in);
  for (const auto& line : request.Headers()) std::cout << "\\n" << line;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that prints digest and signature of its input, and the header lines of a request with it."""
    folder = tmp_path_factory.mktemp("signature")
    (folder / "main.cc").write_text(PROGRAM)
    source = SOURCE_DIR / "horovod" / "common" / "gloo"
    command = [*shlex.split(find_compiler().command), "-std=c++17", "-I", str(source), str(source / "signature.cc")]
    subprocess.run([*command, str(folder / "main.cc"), "-o", str(folder / "program")], check=True, timeout=120)
    return folder / "program"


def printed(program: Path, sent: bytes, key: str = "") -> list[str]:
    """Return what the program prints of its input, with this key in its environment."""
    done = subprocess.run(
        [program], input=sent, capture_output=True, check=True, env={"HOROVOD_RENDEZVOUS_KEY": key}, timeout=60
    )
    return done.stdout.decode().split("\n")


@pytest.mark.parametrize("length", [0, 1, 54, 55, 56, 63, 64, 65, 119, 120, 1000])
def test_digests_and_signatures_are_those_of_python(program: Path, length: int) -> None:
    """For messages of any length, those that just fill a block among them."""
    key, message = bytes(range(100, 164)), bytes(number % 256 for number in range(length))
    expected = hashlib.sha256(message).hexdigest() + hmac.new(key, message, hashlib.sha256).hexdigest()
    assert printed(program, key + message)[0] == expected


def test_a_request_is_signed_as_the_store_expects_it(program: Path) -> None:
    """With method, path, number and digest of the body; without a key there is nothing to sign with."""
    body = b"x" * 100
    lines = dict(line.split(": ") for line in printed(program, body, "secret")[1:])
    assert lines["Horovod-Digest"] == hashlib.sha256(body).hexdigest()
    message = f"request\nPUT\n/a/b\n{lines['Horovod-Nonce']}\n{lines['Horovod-Digest']}"
    assert lines["Horovod-Signature"] == hmac.new(b"secret", message.encode(), hashlib.sha256).hexdigest()
    again = dict(line.split(": ") for line in printed(program, body, "secret")[1:])
    assert again["Horovod-Nonce"] != lines["Horovod-Nonce"]
    assert printed(program, body)[1:] == []
