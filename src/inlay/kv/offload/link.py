"""A connection to an untrusted server, which may be slow, stall, send wrong data, and disappear for a while.

Every call has a deadline. At the deadline the connection is cut, even if bytes still trickle in. The size of an answer
is bounded, independent of its claimed length. After a failure a circuit breaker opens: calls fail at once, while a
thread tries to reach the server at growing intervals.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from inlay.errors import ParameterError
from inlay.kv.choices import SCHEMES, check_address, without_password
from inlay.kv.offload.tier import Miss, TierMissError

T = TypeVar("T")

logger = logging.getLogger(__name__)

CONNECT_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
# after this long without a failure, the pause starts small again; needed where some calls work while others stall
_CALM_S = 60.0
AGAIN_S = 0.05  # between repeated cuts of a late call
MOST_ANSWERED = 8 << 20  # bound for the answer to one request: part of a value, or many small answers
_NEVER_S = 120.0  # for redis-py's own timeouts, which should never trigger


class Link:
    """A server that speaks the Redis protocol. Thread-safe.

    Args:
        lost, found: called on any thread when the server fails, and when it is usable again.

    Attributes:
        up: True if calls are possible.
        failures: the number of failures so far.

    Raises:
        ParameterError: redis-py is not installed, or the address is invalid.
    """

    def __init__(self, address: str, lost: Callable[[], None], found: Callable[[], None]) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise ParameterError(
                "a shared store needs redis-py, which is not installed; run: pip install 'inlay-llm[shared]'",
                code="cache.missing_package",
            ) from None
        check_address("store_shared", address)
        scheme, _, rest = address.partition("://")
        kinds = {
            "redis": redis.Connection,
            "rediss": redis.SSLConnection,
            "unix": redis.UnixDomainSocketConnection,
        }
        self._refused: type[Exception] = redis.ResponseError
        self._new: Callable[[], Any] = lambda: redis.Redis.from_url(
            f"{SCHEMES[scheme]}://{rest}",
            connection_class=_bounded(kinds[SCHEMES[scheme]]),
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=CONNECT_S,
            socket_timeout=_NEVER_S,
            decode_responses=False,
        )
        try:
            self._new()
        except (ValueError, redis.RedisError) as error:
            raise ParameterError(
                f"store_shared cannot be used ({error}); check the address", code="cache.unreachable_store"
            ) from None
        self.name = without_password(address)
        self.failures = 0
        self._lost, self._found = lost, found
        self._lock = threading.Lock()
        self._client: Any = None
        self._pause_s = 0.0  # before the next attempt; grows with each failure
        self._failed_at = 0.0
        self._closed = threading.Event()
        tried = threading.Event()
        self._reach(tried)
        # waits briefly for the first attempt, so that a reachable server is up after the start
        tried.wait(CONNECT_S + 0.5)

    @property
    def up(self) -> bool:
        return self._client is not None

    def call(self, seconds: float, work: Callable[[Any], T]) -> T:
        """Call ``work`` with a client and return its result.

        Raises:
            TierMissError: FAILED if the server refuses, is gone or answers nonsense; LATE after ``seconds``.
        """
        client = self._client
        if client is None:
            raise TierMissError(Miss.FAILED, f"{self.name} cannot be reached")
        with _deadline(client, seconds) as late:
            try:
                return work(client)
            except TierMissError:
                raise
            except self._refused as error:
                raise TierMissError(Miss.FAILED, f"{self.name} refuses: {error}") from None
            except Exception as error:  # redis-py raises many types for bad answers
                reason = f"no answer in {seconds:g} s" if late.is_set() else f"{type(error).__name__}: {error}"
                self._fail(client, reason)
                raise TierMissError(Miss.LATE if late.is_set() else Miss.FAILED, f"{self.name}: {reason}") from None

    def close(self) -> None:
        """Close the connection for good."""
        self._closed.set()
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            _disconnect(client)

    def _fail(self, client: Any, reason: str) -> None:
        with self._lock:
            if self._client is not client:
                return  # another thread has noticed it already
            self._client = None
            self.failures += 1
            now = time.monotonic()
            if now - self._failed_at > _CALM_S:
                self._pause_s = 0.0
            self._failed_at = now
            self._pause_more()
        _disconnect(client)
        logger.warning("the shared store %s is not used for a while: %s", self.name, reason)
        self._lost()
        self._reach()

    def _pause_more(self) -> None:
        self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))

    def _reach(self, tried: threading.Event | None = None) -> None:
        """Start a thread that tries to reach the server until it answers."""

        def reach() -> None:
            told = tried is None
            while not self._closed.wait(self._pause_s):
                reason = self._try()
                if reason is None:
                    break
                self._pause_more()
                if not told:
                    told = True
                    self.failures += 1
                    logger.warning("the shared store %s cannot be reached (%s); it is tried again", self.name, reason)
                if tried is not None:
                    tried.set()
            if tried is not None:
                tried.set()

        threading.Thread(target=reach, name="inlay-shared-reach", daemon=True).start()

    def _try(self) -> str | None:
        """Connect; returns the reason of a failure, or None."""
        client = self._new()
        with _deadline(client, CONNECT_S) as late:
            try:
                answered = client.ping()
            except Exception as error:
                _disconnect(client)
                return "no answer" if late.is_set() else f"{type(error).__name__}: {error}"
        if answered is not True:
            _disconnect(client)
            return f"it answers {answered!r:.50} to a PING"
        with self._lock:
            if self._closed.is_set():
                _disconnect(client)
            else:
                self._client = client
        self._found()
        return None


class _Metered:
    """A socket that reads at most MOST_ANSWERED bytes per request.

    redis-py alone would buffer any claimed length until memory runs out.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._read = 0

    def sendall(self, data: Any) -> None:
        self._read = 0
        self._inner.sendall(data)

    def recv(self, size: int) -> bytes:
        data: bytes = self._inner.recv(size)
        self._count(len(data))
        return data

    def recv_into(self, buffer: Any, *arguments: int) -> int:
        count: int = self._inner.recv_into(buffer, *arguments)
        self._count(count)
        return count

    def _count(self, more: int) -> None:
        self._read += more
        if self._read > MOST_ANSWERED:
            raise ValueError(f"it answers with more than {MOST_ANSWERED >> 20} MiB")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _bounded(kind: Any) -> Any:
    """A redis-py connection class with metered sockets."""

    class Bounded(kind):  # type: ignore[misc]
        def _connect(self) -> _Metered:
            return _Metered(super()._connect())

    return Bounded


@contextmanager
def _deadline(client: Any, seconds: float) -> Iterator[threading.Event]:
    """Cut a client's connections if the block exceeds ``seconds``. Yields an event that is set then."""
    over, late = threading.Event(), threading.Event()

    def watch() -> None:
        if over.wait(seconds):
            return
        late.set()
        _disconnect(client)
        while not over.wait(AGAIN_S):  # the call may open a new connection
            _disconnect(client)

    threading.Thread(target=watch, name="inlay-shared-deadline", daemon=True).start()
    try:
        yield late
    finally:
        over.set()


def _disconnect(client: Any) -> None:
    """Close all connections. A blocked reader sees the end of its stream."""
    with suppress(Exception):
        client.connection_pool.disconnect()
