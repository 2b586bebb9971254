"""A worker that does nothing but keep its line: it says hello, ends when it is told to or when it is left alone."""

from __future__ import annotations

import os
import socket
import sys
import time

from executor.launch import end_with_parent
from executor.messages import CONTROL, ORDERS, End, Hello, Lines, Pause


def main() -> None:
    end_with_parent()
    host, port, token = os.environ[CONTROL].rsplit(":", 2)
    lines = Lines(socket.create_connection((host, int(port))))
    lines.send(Hello(rank=int(os.environ["RANK"]), token=token))
    while (received := lines.receive()) is not None:
        for line in received:
            order = ORDERS.validate_json(line)
            if isinstance(order, End):
                return
            if isinstance(order, Pause):  # stands for an exception of its own
                sys.exit(7)
    time.sleep(0.3)  # its step, and the checkpoint


if __name__ == "__main__":
    main()
