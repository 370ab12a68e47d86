"""Kimi K3 on stock SGLang, as a plugin."""

__version__ = "0.1.0"
