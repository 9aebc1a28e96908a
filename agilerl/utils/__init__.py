"""Documented names under the paths where scripts look for them; the code lives elsewhere."""
