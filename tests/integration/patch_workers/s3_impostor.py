"""S3: rank 0 meets another process at the port of rank 1, which is gone; prints what came of it.

SAYS is what the impostor answers: "nothing", "wrong", a part ("half") of the right answer and then the end, or, to show
that this is what decides, the "right" answer, which only rank 1 and those who read the store know.
"""

import os
import socket
import struct
import threading
import time
import urllib.request
from contextlib import suppress

import horovod.torch as hvd
from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer

CELL, ADDRESS, TICKET = 192, 168, 32  # bytes: of a row for each rank, of an address in it, and at the end of that
QUESTION, ANSWER = os.urandom(16), os.urandom(16)
SAYS = {"nothing": b"", "wrong": os.urandom(16) + b"\0" * 1000, "half": ANSWER[:8], "right": ANSWER}[os.environ["SAYS"]]


def in_gloos_order(port: int) -> int:
    """Of two ranks on one host the one whose port comes later connects to the other."""
    return int(struct.unpack("=H", struct.pack("!H", port))[0])


def listens_below(port: int) -> socket.socket:
    """Return a socket that listens where rank 0, which has this port, connects to."""
    others = []
    while in_gloos_order((found := socket.create_server(("127.0.0.1", 0))).getsockname()[1]) >= in_gloos_order(port):
        others.append(found)
    return found


def impostor() -> None:
    store = server._httpd.cache
    while "row.0.of.2" not in store.get("global", {}):
        time.sleep(0.01)
    address = bytearray(store["global"]["row.0.of.2"][CELL : CELL + ADDRESS])  # rank 1's would be of the same kind
    own = listens_below(struct.unpack_from("!H", address, 2)[0])
    struct.pack_into("!H", address, 2, own.getsockname()[1])
    address[-TICKET:] = QUESTION + ANSWER
    row = bytes(address).ljust(CELL, b"\0") + bytes(CELL)
    request = urllib.request.Request(f"http://127.0.0.1:{port}/global/row.1.of.2", row, method="PUT")
    urllib.request.urlopen(request).close()
    connection, _ = own.accept()
    told = connection.recv(16, socket.MSG_WAITALL)
    assert told == QUESTION, "rank 0 has not asked who is there"
    connection.sendall(SAYS)
    if os.environ["SAYS"] == "half":
        connection.shutdown(socket.SHUT_WR)
    told = b""
    with suppress(ConnectionResetError):  # what the impostor has said was not read to its end
        while part := connection.recv(1000):
            told += part
    print("TOLD", len(told), flush=True)


server = RendezvousServer(0)
port = server.start()
slots = get_host_assignments([HostInfo("localhost", 2)], 2)
server.init(slots)
os.environ.update({name: str(value) for name, value in create_run_env_vars("127.0.0.1", ["lo"], port).items()})
os.environ.update(create_slot_env_vars(slots[0]))
thread = threading.Thread(target=impostor)
thread.start()
try:
    hvd.init()
except ValueError as error:
    print("RAISED", error, flush=True)
thread.join(30)
