"""Serving: caches of latents, attention over their rows, rows shared by ranks, FP8 prefill."""
