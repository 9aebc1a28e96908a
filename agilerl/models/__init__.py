"""A causal language model and its adapters: build, wrap, share, and run without padding."""
