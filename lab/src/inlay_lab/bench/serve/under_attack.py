"""Run one attack beside a victim tenant; measure the victim's waits and the server's memory."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path

from inlay_lab.bench.serve.attacks import Attack, Send, rounds_of
from inlay_lab.bench.serve.clients import Wire

LONGEST_WAIT_S = 1.0
MEMORY_SHARE = 1.05

_PATIENCE_S = 60.0  # longest wait of the victim and of probes; longer ones count as this
_GRACE_S = 5.0  # for the attackers' last answers before they hang up
_SETTLE_S = 15.0  # for the server to free memory
_QUIET_S = 1.0  # of the victim's requests before an attack
_PAUSE_S = 0.02  # between two of the victim's requests, or two probes


@dataclass(frozen=True)
class Keys:
    """A key of each tenant; None if the server asks for no keys. ``limited`` has a low limit of tokens a minute."""

    victim: str | None = None
    attacker: str | None = None
    limited: str | None = None

    def of(self, attack: Attack) -> str | None:
        return self.limited if attack.limited else self.attacker


@dataclass
class Seen:
    """Results of one attack. Times are in seconds, sizes in bytes.

    Attributes:
        alone: The victim's median wait before the attack, from sending to the first token.
        waits: The victim's waits during the attack.
        probes: Times of ``/health``.
        said: Statuses of the attackers' requests.
        failures: Failures of the victim's requests and of probes.
        before, peak, after: The server's resident memory.
    """

    alone: float = 0.0
    waits: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    said: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    before: int = 0
    peak: int = 0
    after: int = 0

    @property
    def worst(self) -> float:
        return max(self.waits, default=0.0)

    @property
    def median(self) -> float:
        return statistics.median(self.waits) if self.waits else 0.0

    @property
    def health(self) -> float:
        return max(self.probes, default=0.0)

    def problems(self) -> list[str]:
        """Violations of the limits."""
        found = list(dict.fromkeys(self.failures))
        if not self.waits:
            found.append("the victim got no answer")
        if self.worst > LONGEST_WAIT_S:
            found.append(f"the victim waited {self.worst:.2f} s")
        if self.health > LONGEST_WAIT_S:
            found.append(f"/health took {self.health:.2f} s")
        if self.after > self.before * MEMORY_SHARE:
            found.append(f"memory stays {self.after / self.before - 1:.0%} above what it was")
        found += [f"the attacker got {status}" for status in self.said if status.startswith("5")]
        return found


async def run_attack(url: str, pid: int, keys: Keys, attack: Attack, seconds: float) -> Seen:
    """Run an attack for some seconds; returns its effect on others.

    Args:
        url: Of the server, without a path.
        pid: Of the server's process, on this machine.
    """
    seen, rounds = Seen(), attack.rounds()
    await _send_all(url, keys.of(attack), attack.before())
    alone: list[float] = []
    async with _until_done(_ask_on(url, keys.victim, alone, seen.failures)):
        await asyncio.sleep(_QUIET_S)
    seen.alone = statistics.median(alone) if alone else 0.0
    seen.before = seen.peak = memory(pid)
    watching = (
        _ask_on(url, keys.victim, seen.waits, seen.failures),
        _probe_on(url, seen),
        _watch(pid, seen),
    )
    async with _until_done(*watching):
        await send_on(url, keys.of(attack), rounds, attack.clients, seconds, seen.said)
    await _send_all(url, keys.of(attack), attack.after())
    seen.after = await _settled(pid, seen.before)
    return seen


async def send_on(
    url: str, key: str | None, rounds: list[list[Send]], clients: int, seconds: float, said: Counter[str]
) -> None:
    """Send an attack's requests in a loop, by several clients at once, for some seconds."""
    until = time.perf_counter() + seconds
    attackers = [asyncio.create_task(_attacker(url, key, own, until, said)) for own in rounds_of(rounds, clients)]
    _, late = await asyncio.wait(attackers, timeout=seconds + _GRACE_S)
    for attacker in late:
        attacker.cancel()
        said["left"] += 1
    await asyncio.gather(*attackers, return_exceptions=True)


async def _attacker(url: str, key: str | None, rounds: list[list[Send]], until: float, said: Counter[str]) -> None:
    wire = Wire(url, key)
    try:
        for send in cycle(send for each in rounds for send in each):
            if time.perf_counter() > until:
                return
            try:
                said[await _sent(wire, send, until)] += 1
            except (OSError, EOFError, ValueError, IndexError):
                said["cut off"] += 1
                wire.leave()
                await asyncio.sleep(_PAUSE_S)
    finally:
        wire.leave()


async def _sent(wire: Wire, send: Send, until: float) -> str:
    """Send one request as its client does; returns the status, or "left" or "slow"."""
    patience = send.leaves_s if send.reads else until - time.perf_counter()
    try:
        async with asyncio.timeout(patience):
            if send.trickles:
                await _trickle(wire, send, until)
                return "slow"
            status = await wire.send(send.method, send.path, send.body)
            if not send.reads:
                await asyncio.sleep(_PATIENCE_S)
            async for _ in wire.parts():
                pass
            if status >= 400:  # a server that refuses an unread body closes the connection
                wire.leave()
            return str(status)
    except TimeoutError:
        wire.leave()
        return "left"


async def _trickle(wire: Wire, send: Send, until: float) -> None:
    _, writer = await wire.begin(send.method, send.path, len(send.body))
    for at in range(len(send.body)):
        if time.perf_counter() > until:
            break
        writer.write(send.body[at : at + 1])
        await writer.drain()
        await asyncio.sleep(0.1)
    wire.leave()


async def _send_all(url: str, key: str | None, sends: Iterable[Send]) -> None:
    wire = Wire(url, key)
    for send in sends:
        status, answer = await wire.ask(send.method, send.path, send.body)
        if status >= 400:
            raise ValueError(f"{send.method} {send.path} was refused: {answer[:300].decode()}")
    wire.leave()


async def _ask_on(url: str, key: str | None, waits: list[float], failures: list[str]) -> None:
    """Ask for 4 tokens repeatedly and record the time to the first one."""
    wire = Wire(url, key)
    for number in count():
        began = time.perf_counter()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                first = await _first_token(wire, f"The ferry {number}")
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            failures.append(f"the victim got {error!r:.200}")
            first = time.perf_counter()
            wire.leave()
        waits.append(first - began)
        await asyncio.sleep(_PAUSE_S)


async def _first_token(wire: Wire, prompt: str) -> float:
    """The time of an answer's first token. Reads to the end. Raises ValueError if there is no answer."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    status = await wire.send("POST", "/v1/completions", body)
    first, text = 0.0, b""
    async for part in wire.parts():
        text += part
        if not first and b'"text":' in text:
            first = time.perf_counter()
    if status != 200 or not first or b'"error":' in text:
        raise ValueError(f"{status}: {text.decode()}")
    return first


async def _probe_on(url: str, seen: Seen) -> None:
    wire = Wire(url)
    while True:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                status, _ = await wire.ask("GET", "/health")
            if status != 200:
                seen.failures.append(f"/health answered {status}")
        except (OSError, EOFError, TimeoutError) as error:
            seen.failures.append(f"/health: {error!r:.200}")
            wire.leave()
        seen.probes.append(time.perf_counter() - began)
        await asyncio.sleep(_PAUSE_S)


async def _watch(pid: int, seen: Seen) -> None:
    while True:
        seen.peak = max(seen.peak, memory(pid))
        await asyncio.sleep(_PAUSE_S)


async def _settled(pid: int, before: int) -> int:
    """The server's memory once it is back at its old size, or after the time to settle."""
    until = time.perf_counter() + _SETTLE_S
    while (now := memory(pid)) > before * MEMORY_SHARE and time.perf_counter() < until:
        await asyncio.sleep(0.1)
    return now


def memory(pid: int) -> int:
    """The resident memory of a process, in bytes."""
    return memory_of(pid)[0]


def memory_of(pid: int) -> tuple[int, int]:
    """The resident memory of a process and its part without file pages, in bytes. The system moves file pages at
    will.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    said = dict(line.split(":", 1) for line in lines)
    rss, of_files = (int(said[name].split()[0]) * 1024 for name in ("VmRSS", "RssFile"))
    return rss, rss - of_files


@asynccontextmanager
async def _until_done(*loops: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run coroutines until the end of the block."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
