"""One handler process and the socket to it: start, exchange frames, find out how it ended."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from handler import wire
from runtime import frames, limits
from runtime.admission import Held
from runtime.limits import OutOfMemoryKills

_Received = tuple[wire.Header, bytes]
Exchanged = tuple[frames.Result | frames.Refusal, bytes]

EXIT_GRACE_S: Final = 0.5
"""So that a request learns within a second that its handler has gone."""
REAP_S: Final = 5.0
STREAM_BUFFER: Final = 4 << 20
_SOCKET_BUFFER: Final = 1 << 20
"""So that a tensor goes through at once; the kernel may grant less (net.core.wmem_max)."""
NOT_FOR_HANDLERS: Final = frozenset({"CICADA_API_KEYS"})


@dataclass(frozen=True, slots=True)
class End:
    """Why a handler process ended: `cause` from a small known set (it labels a metric), and a sentence."""

    cause: str
    sentence: str
    pid: int | None = field(default=None, compare=False)

    @classmethod
    def of_exit(cls, code: int, pid: int, kills: OutOfMemoryKills) -> Self:
        if code >= 0:
            return cls("exit", f"exited with code {code}", pid)
        if code == -signal.SIGKILL and kills.explain_one():
            return cls("oom", "was killed by the kernel, which was out of memory", pid)
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return cls(name if name.startswith("SIG") else "signal", f"was killed by {name}", pid)


class HandlerEndedError(Exception):
    """The handler process is gone, or can no longer be trusted."""

    def __init__(self, end: End) -> None:
        super().__init__(end.sentence)
        self.end = end


class HandlerProcess:
    """Owns the process and the socket. At most one exchange at a time; `close` reaps, always."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        kills: OutOfMemoryKills,
    ) -> None:
        self._process = process
        self._kills = kills
        self._at_rest = 0
        self._reader = reader
        self._writer = writer
        self.incoming: asyncio.Task[_Received | None] = asyncio.create_task(wire.read(reader))
        """Done when the handler said something, or ended: to be waited for, not to be awaited."""

    @classmethod
    async def start(cls, command: Sequence[str], kills: OutOfMemoryKills) -> Self:
        """Starts `command --socket-fd N`; raises HandlerEndedError if it cannot be executed.

        Cancelled, it still leaves no process behind.
        """
        starting = asyncio.create_task(cls._start(command, kills))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(HandlerEndedError):
                await (await starting).close(EXIT_GRACE_S)
            raise

    @classmethod
    async def _start(cls, command: Sequence[str], kills: OutOfMemoryKills) -> Self:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    "--socket-fd",
                    str(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    env={k: v for k, v in os.environ.items() if k not in NOT_FOR_HANDLERS},
                )
            except OSError as error:
                ours.close()
                raise HandlerEndedError(
                    End("start", f"cannot be started: {error.strerror}")
                ) from error
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=STREAM_BUFFER)
        return cls(process, reader, writer, kills)

    @property
    def pid(self) -> int:
        return self._process.pid

    def held(self) -> Held:
        """Its private memory, at rest and now."""
        return Held(self._at_rest, limits.private_memory(self.pid))

    async def ready(self, timeout_s: float) -> frames.Ready:
        """Waits until the handler says that it can take a request."""
        try:
            async with asyncio.timeout(timeout_s):
                frame, _ = await self._receive()
        except TimeoutError:
            raise self.kill("start", f"was not ready within {timeout_s:g} s") from None
        if not isinstance(frame, frames.Ready):
            raise self._garbage(f"a frame of type {frame.type!r} before it was ready")
        self._at_rest = limits.private_memory(self.pid)
        return frame

    async def exchange(self, header: wire.Header, body: wire.Body) -> Exchanged:
        """Sends one request and receives its answer; raises HandlerEndedError."""
        try:
            await wire.write(self._writer, header, body)
        except OSError:
            raise await self._end() from None
        frame, received = await self._receive()
        if isinstance(frame, frames.Ready) or frame.id != header["id"]:
            raise self._garbage("a frame that answers no request")
        if isinstance(frame, frames.Result) and len(received) != frame.body_bytes:
            raise self._garbage("a body of another size than its outputs")
        return frame, received

    async def cancel(self, request_id: str) -> None:
        """Asks the handler to stop; the exchange under way then ends with a refusal, or an answer."""
        try:
            await wire.write(self._writer, {"type": "cancel", "id": request_id})
        except OSError:
            return  # it has ended, and the exchange under way says how

    async def unexpected(self) -> HandlerEndedError:
        """What it means that `incoming` is done while no request is under way."""
        try:
            frame, _ = await self._receive()
        except HandlerEndedError as ended:
            return ended
        return self._garbage(f"a frame of type {frame.type!r} without a request")

    def kill(self, cause: str, sentence: str) -> HandlerEndedError:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        return HandlerEndedError(End(cause, sentence, self.pid))

    async def close(self, grace_s: float) -> None:
        """Closes the socket, which tells the handler to exit; kills it after `grace_s`, and reaps it.

        Cancelled, it does all that nevertheless.
        """
        closing = asyncio.create_task(self._close(grace_s))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait([closing])
            raise

    async def _close(self, grace_s: float) -> None:
        self.incoming.cancel()
        await asyncio.wait([self.incoming])
        if not self.incoming.cancelled():
            self.incoming.exception()  # seen: what was wrong has been told, or no longer matters
        self._writer.transport.abort()  # `close` would first send what a hung handler does not read
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        if not await self._exited(grace_s):
            self.kill("close", "did not exit")
            # A process in an uninterruptible sleep cannot be waited for: the event loop reaps it later.
            await self._exited(REAP_S)

    async def _receive(self) -> tuple[frames.Frame, bytes]:
        try:
            received = await asyncio.shield(self.incoming)
            if received is None:
                raise await self._end()
            self.incoming = asyncio.create_task(wire.read(self._reader))
            return frames.parse(received[0]), received[1]
        except wire.ProtocolError as error:
            raise self._garbage(str(error)) from error
        except OSError:
            raise await self._end() from None

    async def _end(self) -> HandlerEndedError:
        """How the process ended whose socket is closed."""
        if await self._exited(EXIT_GRACE_S) and self._process.returncode is not None:
            return HandlerEndedError(End.of_exit(self._process.returncode, self.pid, self._kills))
        return self.kill("closed", "closed its socket without exiting")

    async def _exited(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    def _garbage(self, what: str) -> HandlerEndedError:
        return self.kill("garbage", f"sent what is no answer: {what}")
