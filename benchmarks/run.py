"""Running measurements: one fresh process each, its last line of output is its result."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import make_rows
from benchmarks.subjects.job import Job

__all__ = [
    "ROOT",
    "SUBJECTS",
    "available",
    "machine",
    "measure",
    "median",
    "model_folder",
    "table",
    "write_jsonl",
    "write_results",
    "write_rows",
]

ROOT = Path(__file__).resolve().parents[1]
_PEERS = Path(os.environ.get("BENCHMARK_PEERS", ROOT / "benchmarks/peers/.venvs"))
SUBJECTS = {
    "ours": ("ours.py", None),
    "plain": ("plain.py", None),
    "trl": ("trl_peer.py", "trl"),
    "agilerl": ("agilerl_peer.py", "agilerl"),
    "dpo-shared": ("ours_dpo.py", None),
    "dpo-separate": ("ours_dpo.py", None),
    "dpo-trl": ("trl_dpo.py", "trl"),
}
"""Name -> its file, and the environment that it needs (None: this one)."""


def _python(subject: str) -> Path:
    environment = SUBJECTS[subject][1]
    return Path(sys.executable) if environment is None else _PEERS / environment / "bin/python"


def available(subject: str) -> bool:
    """Whether the environment of a subject exists."""
    return _python(subject).exists()


def measure(subject: str, job: Job, *, timeout_s: float = 3600.0) -> dict[str, Any]:
    """Run one measurement; a failure is a result too: {"error": last line of what it said}."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        job.write(path)
        threads = str(job.threads)
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONWARNINGS": "ignore",
            "BENCHMARK_SUBJECT": subject,
        }
        environment.pop("PYTHONPATH", None)
        command = [str(_python(subject)), str(ROOT / "benchmarks/subjects" / SUBJECTS[subject][0]), str(path)]
        try:
            done = subprocess.run(
                command, env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done within {timeout_s:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    said = done.stderr.strip().splitlines() or ["no output"]
    return {"error": f"exit code {done.returncode}: {said[-1][:300]}"}


def model_folder(name: str) -> str:
    """Folder of a model: one given as such, or a preset of this package."""
    if Path(name).is_dir():
        return name
    from agilerl.models.presets import load_preset_folder

    return str(load_preset_folder(name))


def write_rows(folder: Path, count: int, **options: Any) -> Path:
    """Write generated rows to a file."""
    path = folder / f"rows-{count}.jsonl"
    write_jsonl(path, make_rows(count, **options))
    return path


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_results(path: Path, **values: Any) -> None:
    """Write what was measured as JSON, with the machine that it was measured on; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **values}, indent=1) + "\n", encoding="utf-8")


def median(results: Sequence[dict[str, Any]], key: str) -> float | None:
    """Median over the measurements that succeeded."""
    values = [result[key] for result in results if key in result]
    return statistics.median(values) if values else None


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    import torch
    import transformers

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        name = models[0].split(":", 1)[1].strip() if models else name
    return {
        "processor": name,
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_products": bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
