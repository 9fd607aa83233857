"""The live server of a calibration: loads its model with other settings, and puts the old configuration back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from client.calibrate_record import SettingRefusedError
from client.errors import ClientError, RefusedError, ServerError, UnreachableError
from client.knobs import Setting, count_instances, read_setting, with_setting
from client.metrics import MetricsReader
from client.repository import ControlModeError, ModelRepository

LEAVE_SECONDS = 30.0  # how long the instance before may take to end its streams, before a measurement starts beside it
RESTORE_SECONDS = 120.0
POLL_SECONDS = 0.25


class LiveServer:
    """Open, apply settings, restore. `metrics` None: what they would tell is not checked.

    `unload_first` makes room by taking the model down before each load, for engines of which two do not fit; others then find
    no model for as long as a load takes. `say` is told, in a line each, what a user may wonder about.
    """

    def __init__(
        self,
        repository: ModelRepository,
        metrics: MetricsReader | None,
        unload_first: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._repository = repository
        self._metrics = metrics
        self._unload_first = unload_first
        self._say = say
        self._may_differ = False  # whether another configuration than the original one may be loaded

    async def open(self) -> None:
        """Read the configuration that is served. Raises ControlModeError where the server lets nobody load models."""
        self.original = await self._repository.config()
        await self._repository.load(self.original)  # no reload, since it is loaded

    async def apply(self, setting: Setting) -> None:
        """Serve with this setting; ready when it returns. Raises SettingRefusedError; the model then serves as before."""
        wanted = with_setting(self.original, setting)
        if await self._current() == wanted:
            return
        before = await self._current()
        self._may_differ = True
        try:
            if self._unload_first:
                await self._unload()
            await self._repository.load(wanted)
        except (ControlModeError, UnreachableError):
            raise
        except (RefusedError, ServerError) as error:
            if self._unload_first:
                await self._repository.load(self.original if before is None else before)
            raise SettingRefusedError(str(error)) from error
        await self._repository.wait_until_ready()
        await self._wait_for_others(count_instances(wanted) * _number(read_setting(wanted, ["max_sequences"])))

    async def restore(self) -> None:
        """Serve the original configuration again, and check that it is. Raises ClientError when that fails to the end."""
        if not self._may_differ:
            return
        deadline = time.monotonic() + RESTORE_SECONDS
        while True:
            try:
                await self._repository.load(self.original)
                await self._repository.wait_until_ready()
                break
            except ClientError as error:  # a load that was cut short may still be going on
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"the old configuration of model {self._repository.model!r} could not be put back ({error}); touch its "
                        "config.pbtxt and load the model again, or restart the server"
                    ) from error
                await asyncio.sleep(POLL_SECONDS)
        if await self._repository.config() != self.original:
            raise ServerError(
                "the server was given the old configuration and serves another one: did someone else load the model?"
            )
        self._may_differ = False

    def keep(self) -> None:
        """What is served now is to stay: nothing is left to restore."""
        self._may_differ = False

    async def _current(self) -> object | None:
        try:
            return await self._repository.config()
        except RefusedError:  # none is loaded
            return None

    async def _unload(self) -> None:
        await self._repository.unload()
        await self._wait_for_others(0)

    async def _wait_for_others(self, max_sequences: int) -> None:
        """Until the instance before has ended its last stream and is gone: it would take time and memory from the new one."""
        if self._metrics is None:
            return
        deadline = time.monotonic() + LEAVE_SECONDS
        while (await self._metrics.read()).gauge("llm_max_sequences") > max_sequences:
            if time.monotonic() > deadline:
                self._say(f"streams of the setting before still run after {LEAVE_SECONDS:.0f} s; measuring beside them")
                return
            await asyncio.sleep(POLL_SECONDS)


def _number(setting: Setting) -> int:
    """Sequences of an instance; without the knob the wait cannot be told, and any number will do."""
    value = setting.get("max_sequences")
    return value if isinstance(value, int) else 10**9
