"""What a request can fail with, as the caller is told.

RequestFailed
├── InvalidInput   400
├── UnknownTarget  404
└── ModelFault     500
"""


class RequestFailed(Exception):
    """A request cannot be answered; the message is one sentence for the caller."""

    status: int = 500


class InvalidInput(RequestFailed):
    """The input is not what the model takes."""

    status = 400


class UnknownTarget(RequestFailed):
    """There is no such model, version or strategy."""

    status = 404


class ModelFault(RequestFailed):
    """The prepared model cannot be served."""

    status = 500
