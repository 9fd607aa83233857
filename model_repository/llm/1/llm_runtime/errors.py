"""The errors that reach a user, by what the user can do about them."""


class RequestError(ValueError):
    """A request asks for something that cannot be served; one line naming field, value and what is allowed."""


class EngineError(RuntimeError):
    """An engine directory, or the device that runs it, is unusable; the message says where and what to do."""


class ConfigError(ValueError):
    """A parameter in config.pbtxt is unknown or out of range; the message names it and the nearest known one."""
