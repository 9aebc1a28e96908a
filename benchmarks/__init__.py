"""What this package costs, measured: `python -m benchmarks.sft`, `.sweep`, `.loss_memory`, `.evaluation_memory`, `.lengths`."""
