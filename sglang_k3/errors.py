"""What can go wrong before a request is served; every message names the value, the limit and the remedy.

All of them are ``ValueError`` so that a caller who knows nothing of this package can still catch them.
"""


class K3Error(ValueError):
    """A mistake that the person who started the server can put right."""


class ConfigError(K3Error):
    """``config.json`` does not describe a model that this package can run."""


class CheckpointError(K3Error):
    """The tensors on disk are not the ones that ``config.json`` describes."""


class HostError(K3Error):
    """The installed SGLang is not the one that this package extends, or a seam no longer fits it."""
