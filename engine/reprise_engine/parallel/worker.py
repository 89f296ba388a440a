"""The process of a rank from 1 on.

Started by `launch.Ranks` as `python -m reprise_engine.parallel.worker SOCKET LIFELINE`. SOCKET carries pickled messages
(`talk.py`). LIFELINE is the read end of a pipe that nobody writes to: it ends when rank 0's process ends, however that
happens, and so ends this process, also in the middle of a load or of a sum that waits for others.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

from reprise_engine.errors import RepriseError
from reprise_engine.npu_environment import is_torch_npu_installed
from reprise_engine.parallel.talk import Failed, Join


def _end_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(0)


def main() -> int:
    # Ctrl-C and a TERM to the group are for rank 0 and the API process in front of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    socket, lifeline = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(socket, False)
    os.set_inheritable(lifeline, False)
    threading.Thread(target=_end_with_parent, args=(lifeline,), name="lifeline", daemon=True).start()
    with Connection(socket) as connection:
        try:
            join: Join = connection.recv()
            if is_torch_npu_installed():
                from reprise_engine.device import settle_torch_npu  # here and below: it takes seconds

                settle_torch_npu(join.config.device, rank=join.place.rank, size=join.place.size)
        except (EOFError, ConnectionResetError):
            return 0  # rank 0 is gone
        except RepriseError as error:
            connection.send(Failed(error=error, lost_others=False))
            return 1
        # Whoever ends meanwhile is found out by the thread.
        from reprise_engine.parallel.follower import follow

        return follow(join, connection)


if __name__ == "__main__":
    sys.exit(main())
