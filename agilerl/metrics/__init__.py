"""What a run measures, and where it is written.

``record`` is an agent's own history, ``phases`` the timing of one update, ``throughput`` speed and memory, ``log`` the
stream of records and ``sinks`` the places it goes to, ``report`` the summary at the end.
"""

from agilerl.metrics.log import RECORD_KEYS, MetricsLog, Record, Sink
from agilerl.metrics.phases import LEARN_PHASES, PhaseTimer
from agilerl.metrics.record import AgentRecord
from agilerl.metrics.throughput import Throughput, peak_memory_gib

__all__ = [
    "LEARN_PHASES",
    "RECORD_KEYS",
    "AgentRecord",
    "MetricsLog",
    "PhaseTimer",
    "Record",
    "Sink",
    "Throughput",
    "peak_memory_gib",
]
