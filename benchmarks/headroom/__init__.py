"""Headroom against torch's default, replayed over recorded gradients."""
