"""What it costs to tell another rank what to do, a step.

    python benchmarks/plan_hop.py

A plan of so many decodes is encoded and sent to a process that decodes it: microseconds until the sender is done, and
until the other process has the plan. Both on one host, over the socket that ranks use.
"""

from __future__ import annotations

import argparse
import os
import socket
import struct
import time

from pico_vllm.scheduler_output import ScheduledRequest, SchedulerOutput
from pico_vllm.worker.rank_messages import RankChannel, StartStep, decode_to_rank, encode

NUM_DECODES = (1, 8, 64, 256)
BLOCK_SIZE = 16
_TIME = struct.Struct("d")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500, help="plans of each size")
    rounds = parser.parse_args().rounds
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        receive_all(RankChannel(theirs))
        os._exit(0)
    theirs.close()
    channel = RankChannel(ours)
    for num_decodes in NUM_DECODES:
        sent, received = measure(channel, make_plan(num_decodes), rounds)
        print(f"{num_decodes:4d} decodes: sent {percentiles(sent)}, received {percentiles(received)}")
    channel.close()
    os.wait()


def make_plan(num_decodes: int) -> SchedulerOutput:
    """A step of decodes, one in sixteen of which begins a block."""
    requests = [
        ScheduledRequest(f"{i}-0", (), 500 + i, 1, (i,) if i % BLOCK_SIZE == 0 else (), True)
        for i in range(num_decodes)
    ]
    return SchedulerOutput(tuple(requests), num_decodes, num_decodes)


def receive_all(channel: RankChannel) -> None:
    """In the other process: answer each plan with the time at which it was there."""
    while (message := channel.receive()) is not None:
        decode_to_rank(message)
        channel.socket.sendall(_TIME.pack(time.monotonic()))


def measure(channel: RankChannel, plan: SchedulerOutput, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds until it is sent and until it is received, of each round."""
    sent, received = [], []
    for _ in range(rounds):
        start = time.monotonic()
        channel.send(encode(StartStep(plan)))
        sent.append(time.monotonic() - start)
        (there,) = _TIME.unpack(channel.socket.recv(_TIME.size))
        received.append(there - start)
        time.sleep(0.001)  # the other process sleeps, too, as it does between two steps
    return sent, received


def percentiles(seconds: list[float]) -> str:
    """Median and 90th percentile."""
    ordered = sorted(seconds)
    p50, p90 = (ordered[int(share * (len(ordered) - 1))] * 1e6 for share in (0.5, 0.9))
    return f"{p50:.0f} us (p90 {p90:.0f})"


if __name__ == "__main__":
    main()
