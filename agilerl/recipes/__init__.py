"""Whole runs, from a checked description to a saved model: what the command line does, for use from Python too.

``setup`` builds tokenizer, data and agents from a description, ``run`` strings a run together, ``evaluation`` and ``generation``
measure it, ``open`` opens any checkpoint or model, ``report`` tells a person about it.
"""
