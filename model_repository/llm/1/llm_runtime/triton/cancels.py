"""How a model that forwards requests to this one (llm_vllm) cancels one of them.

Business logic scripting cannot cancel what it forwarded, and one more request would stand in the very queue that waits for the
cancelled one to end. So an id goes straight from process to process, over a datagram socket in Linux's abstract namespace whose
name starts with the server's process id, which both have as their parent.
"""

from __future__ import annotations

import os
import socket

MAX_BYTES = 256  # of a request id


def socket_prefix() -> str:
    """All instances of all models of this server that take cancels have sockets with this prefix; see /proc/net/unix."""
    return f"\0llm-cancels-{os.getppid()}-"


class CancelInbox:
    """Ids of requests to cancel, as they come; `instance` is the name of the model's instance."""

    def __init__(self, instance: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        # A reload has the old and the new instance of one name side by side for a while.
        self._socket.bind(f"{socket_prefix()}{instance}-{os.getpid()}")

    def read(self) -> list[str]:
        """What came since the last call; never waits."""
        ids = []
        while True:
            try:
                ids.append(self._socket.recv(MAX_BYTES).decode(errors="replace"))
            except BlockingIOError:
                return ids

    def close(self) -> None:
        self._socket.close()
