"""Every error treedraft raises on purpose.

TreedraftError
├── RequestError     one request is at fault; the others go on (HTTP 400)
├── ConfigError      the configuration cannot work; raised at start
├── CheckpointError  files on disk are missing, truncated or of another shape; raised at start
└── InvariantError   a guarantee of our own code is broken: a bug in treedraft
"""


class TreedraftError(Exception):
    """Base of every error raised on purpose; the message says what was expected, what was given and the remedy."""


class RequestError(TreedraftError, ValueError):
    """One request cannot be served; the engine and the other requests go on."""


class ConfigError(TreedraftError, ValueError):
    """The configuration cannot work; raised before anything runs."""


class CheckpointError(TreedraftError, ValueError):
    """A checkpoint's files do not hold what its configuration promises."""


class InvariantError(TreedraftError, RuntimeError):
    """A guarantee that treedraft's own code gives is broken."""
