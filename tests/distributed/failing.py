"""A rank that fails, run by the tests: ``python -m tests.distributed.failing HOW``."""

from __future__ import annotations

import os
import signal
import sys
import time

from agilerl.distributed import make_runtime, report_failure
from tests.distributed.scenarios import batch_of, global_batches, make_agent


def main(how: str) -> None:
    """Rank 1 fails in the middle of training; rank 0 wants to go on."""
    agent = make_agent(dtype="float32", micro_batch_size_per_gpu=8)
    runtime = agent.runtime
    batch = batch_of(global_batches()[0], runtime.rank, runtime.world_size)
    agent.learn(batch)
    if runtime.rank == 1:
        if how == "raise":
            raise ValueError("row 7 is bad")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            sys.exit(3)
        if how == "stuck":  # the error was caught, and the process does not end
            report_failure(ValueError("row 7 is bad"))
            time.sleep(40)
            os._exit(0)
    agent.learn(batch)
    make_runtime("cpu").barrier()


if __name__ == "__main__":
    main(sys.argv[1])
