"""The serving knobs of a model's configuration: their names, and how to read and set each in the message that Triton gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import model_config_pb2

from client.errors import ClientError

ModelConfig = Any  # model_config_pb2.ModelConfig: generated code, of which type checkers see nothing
Value = int | tuple[int, ...]
Setting = Mapping[str, Value]  # a value for each knob by name


class KnobError(ClientError):
    """No such knob, or a value that it cannot have."""

    exit_code = 2


@dataclass(frozen=True)
class Knob:
    """`path` leads to a field of the message; without one the knob is an entry of `parameters`, a number as text."""

    name: str
    path: tuple[str, ...] = ()
    is_list: bool = False

    def read(self, config: ModelConfig) -> Value | None:
        """The value; None where the configuration does not have the knob, and the model's own default counts."""
        if not self.path:
            return self._read_parameter(config)
        message = config
        for name in self.path[:-1]:
            if not message.HasField(name):
                return None
            message = getattr(message, name)
        value = getattr(message, self.path[-1])
        return tuple(value) if self.is_list else int(value)

    def _read_parameter(self, config: ModelConfig) -> int | None:
        if self.name not in config.parameters:
            return None
        text = config.parameters[self.name].string_value
        try:
            return int(text)
        except ValueError:
            raise KnobError(f"parameter {self.name!r} of the configuration: got {text!r}; allowed: a whole number") from None

    def write(self, config: ModelConfig, value: Value) -> None:
        """Set it in place."""
        if not self.path:
            config.parameters[self.name].string_value = str(value)
            return
        message = config
        for name in self.path[:-1]:
            message = getattr(message, name)
        if isinstance(value, tuple):
            getattr(message, self.path[-1])[:] = value
        else:
            setattr(message, self.path[-1], value)


def _queue(name: str, is_list: bool = False) -> Knob:
    return Knob(name, ("dynamic_batching", name), is_list)


def _policy(name: str) -> Knob:
    return Knob(name, ("dynamic_batching", "default_queue_policy", name))


KNOBS = {
    knob.name: knob
    for knob in (
        Knob("max_sequences"),
        Knob("prefill_chunk_tokens"),
        Knob("max_step_tokens"),
        Knob("max_batch_size", ("max_batch_size",)),
        _queue("max_queue_delay_microseconds"),
        _queue("preferred_batch_size", is_list=True),
        _queue("priority_levels"),
        _policy("max_queue_size"),
        _policy("default_timeout_microseconds"),
        Knob("kv_cache_memory_mb"),
    )
}


def read_setting(config: ModelConfig, names: Iterable[str]) -> dict[str, Value]:
    """Values of the knobs that the configuration has. Raises KnobError for an unknown name."""
    setting = {}
    for name in names:
        if name not in KNOBS:
            raise KnobError(f"unknown knob {name!r}; allowed: {', '.join(KNOBS)}")
        value = KNOBS[name].read(config)
        if value is not None:
            setting[name] = value
    return setting


def with_setting(config: ModelConfig, setting: Setting) -> ModelConfig:
    """A copy of the configuration with these values."""
    changed = model_config_pb2.ModelConfig()
    changed.CopyFrom(config)
    for name, value in setting.items():
        KNOBS[name].write(changed, value)
    return changed


def shown(value: Value | float | None) -> str:
    """As it stands in a config.pbtxt."""
    if value is None:
        return "not set"
    if isinstance(value, tuple):
        return f"[ {', '.join(map(str, value))} ]" if value else "[ ]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def count_instances(config: ModelConfig) -> int:
    """Instances of the model; 1 where the configuration leaves it to Triton."""
    return sum(max(1, group.count) * max(1, len(group.gpus)) for group in config.instance_group) or 1
