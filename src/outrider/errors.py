"""The exception tree. Every message names the thing that is wrong and says what to do.

The command line turns any `OutriderError` into one line on stderr and its `exit_code`.
"""


class OutriderError(Exception):
    """Base of every error that a user can cause and correct."""

    exit_code = 2


class ConfigError(OutriderError):
    """A setting, flag or combination of settings cannot work."""


class RequestError(OutriderError):
    """One request is wrong: its prompt, its limits or its sampling parameters."""


class LocateError(OutriderError):
    """Weights that were asked for are not on this machine."""


class WeightsError(OutriderError):
    """A weight file is truncated, corrupt, incomplete or does not match its configuration."""


class UnsupportedModelError(OutriderError):
    """The file is sound, but its architecture or one of its formats is not one we run."""


class DrafterMismatchError(OutriderError):
    """The drafter was made for another target."""


class EngineFault(OutriderError):
    """The engine failed in a way the request did not cause (for example logits that are not finite)."""

    exit_code = 1


class DrafterFault(EngineFault):
    """The drafter failed. The target can go on alone, since drafts decide nothing but speed."""


class OverloadedError(OutriderError):
    """There is no room for another request now; trying again later may work."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
