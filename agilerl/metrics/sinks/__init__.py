"""Where records go. To add a place: one file here with a class that has ``write`` and ``close``."""

from agilerl.metrics.sinks.console import ConsoleSink
from agilerl.metrics.sinks.files import CSVSink, JSONLSink
from agilerl.metrics.sinks.trackers import TensorBoardSink, WandbSink

__all__ = ["CSVSink", "ConsoleSink", "JSONLSink", "TensorBoardSink", "WandbSink"]
