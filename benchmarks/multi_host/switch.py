"""A switch in user space: forwards frames between network interfaces, late, or not at all.

Run inside of the namespace that holds one end of every host's link. The kernel here has no netem.
Arguments: milliseconds of delay, share of frames lost, file that exists while the links are cut,
interfaces.
"""

from __future__ import annotations

import heapq
import os
import random
import select
import socket
import sys
import time

ALL_PROTOCOLS = 0x0003


def main(delay_s: float, loss: float, cut_file: str, names: list[str]) -> None:
    """Forward until the process is ended."""
    links = [
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)) for _ in names
    ]
    for link, name in zip(links, names, strict=True):
        link.bind((name, 0))
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    draw = random.Random(0)
    waiting: list[tuple[float, int, int, bytes]] = []
    number, is_cut, looked = 0, False, 0.0
    while True:
        now = time.monotonic()
        if now - looked > 0.05:
            is_cut, looked = os.path.exists(cut_file), now
        while waiting and waiting[0][0] <= now:
            _, _, source, frame = heapq.heappop(waiting)
            for at, link in enumerate(links):
                if at != source and not is_cut:
                    try:
                        link.send(frame)
                    except OSError:
                        continue  # an interface that is down, or a frame that is too long
        pause = min(0.05, waiting[0][0] - now) if waiting else 0.05
        for ready in select.select(links, [], [], max(0.0, pause))[0]:
            frame, address = ready.recvfrom(65536)
            if address[2] == socket.PACKET_OUTGOING or draw.random() < loss:
                continue
            number += 1
            heapq.heappush(waiting, (time.monotonic() + delay_s, number, links.index(ready), frame))


if __name__ == "__main__":
    main(float(sys.argv[1]) / 1000, float(sys.argv[2]), sys.argv[3], sys.argv[4:])
