"""``agilerl launch``: the same command on several processes."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from agilerl.errors import ConfigError

__all__ = ["CONTEXT_SETTINGS", "command", "torchrun_arguments"]

CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def command(
    context: typer.Context,
    procs: Annotated[int | None, typer.Option(help="Processes on this machine; nothing: one per GPU.")] = None,
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    node_rank: Annotated[int, typer.Option(help="Number of this machine, from 0.")] = 0,
    master: Annotated[str | None, typer.Option(help="host:port of machine 0; needed with several machines.")] = None,
) -> int:
    """Run a command on several processes, such as agilerl launch --procs 2 sft CONFIG.yaml.

    A thin call of torchrun, which works as well: torchrun --nproc-per-node 2 -m agilerl sft CONFIG.yaml
    """
    arguments = torchrun_arguments(context.args, procs, nodes, node_rank, master)
    return _run(arguments)


def torchrun_arguments(
    words: list[str], procs: int | None, nodes: int = 1, node_rank: int = 0, master: str | None = None
) -> list[str]:
    """The command line of torchrun for an ``agilerl`` command.

    Raises:
        ConfigError: The processes or machines do not make sense.
    """
    if not words:
        raise ConfigError("agilerl launch needs a command to run, such as: agilerl launch --procs 2 sft CONFIG.yaml")
    if words[0] == "launch":
        raise ConfigError("agilerl launch cannot launch itself; give the command to run, such as sft.")
    if procs is None:
        procs = _num_gpus()
        if procs == 0:
            raise ConfigError("This machine has no GPU to count processes by: give --procs, such as --procs 2.")
    if procs < 1 or nodes < 1 or not 0 <= node_rank < nodes:
        raise ConfigError(
            f"--procs and --nodes must be at least 1 and --node-rank below --nodes; found {procs}, {nodes}, {node_rank}."
        )
    if nodes > 1 and (master is None or ":" not in master):
        raise ConfigError(f"With {nodes} machines, --master host:port of machine 0 is needed; found {master!r}.")
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # a free port of this machine
    if nodes > 1:
        host, _, port = str(master).rpartition(":")
        where = ["--nnodes", str(nodes), "--node-rank", str(node_rank), "--master-addr", host, "--master-port", port]
    return [*where, "--nproc-per-node", str(procs), "-m", "agilerl", *words]


def _run(arguments: list[str]) -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.multiprocessing.errors.handlers import get_error_handler
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    procs = int(arguments[arguments.index("--nproc-per-node") + 1])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // procs)))
    os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "OFF")
    get_error_handler().initialize()
    _quieten()
    config, entry, entry_arguments = config_from_args(parse_args(arguments))
    try:
        elastic_launch(config=config, entrypoint=entry)(*entry_arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        sys.stderr.write(f"agilerl launch: rank {rank} {how} first; its message is above.\n")
        return code if code > 0 else 1
    return 0


def _quieten() -> None:
    """The ranks say what is wrong; the launcher's own tracebacks would bury it."""
    import logging

    for name in ("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()
