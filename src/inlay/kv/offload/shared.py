"""The shared tier: segments on a Valkey or Redis server that many servers of one model fill and read.

A value has the bytes of a disk tier's file. It is not trusted: any failed check is a miss. Segments of other servers
are unknown until ``find`` asks for them. Absence is remembered for a few seconds. The server's own settings decide how
much it keeps and how long (``maxmemory``, ``maxmemory-policy``).

``Link`` is a connection to an untrusted server, which may be slow, stall, send wrong data, and disappear for a while.
Every call has a deadline. At the deadline the connection is cut, even if bytes still trickle in. The size of an answer
is bounded, independent of its claimed length. After a failure a circuit breaker opens: calls fail at once, while a
thread tries to reach the server at growing intervals.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from inlay.errors import ParameterError
from inlay.kv.choices import SCHEMES, check_address, without_password
from inlay.kv.identity import LOSSLESS
from inlay.kv.offload.codecs import Slab
from inlay.kv.offload.form import FORM, Encoded, UnknownFormError, read_segment, size_of
from inlay.kv.offload.record import SegmentRecord, is_finite, is_finite_state
from inlay.kv.offload.tier import Miss, Tier, TierCounts, TierEntry, TierMissError
from inlay.types import TierStats

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


FIND_S = 1.0  # for all keys of a request together
BLOCK_S = 2.0  # for each part of a value
WRITE_S = 30.0
BLOCK = 4 << 20  # bytes of a part
_MOST_VALUE = 512 << 20  # the server's limit for a value
_MOST_KEYS = 512  # in one pipeline
ABSENT_S = 5.0  # how long a known absence is trusted
_RETRY_S = 30.0  # after a write that the server refused
_MOST_KNOWN = 65_536
MOST_TO_DELETE = 16_384  # while the server is away; beyond that, the oldest keys stay on the server
_LONGEST_S = 1e9  # cap on a lifetime; longer ones count as unlimited


class SharedTier(Tier):
    """Segments on a server at ``address``, like "redis://host:6379/0".

    An unreachable server is not an error: the tier is empty until the server answers.

    Args:
        codec: the codec for segments from the pool. Values of any codec can be read.
        timeout_s: for one segment.

    Raises:
        ParameterError: the address is invalid, or redis-py is not installed.
    """

    name = "shared"

    def __init__(self, address: str, codec: str = LOSSLESS, *, timeout_s: float = 10.0) -> None:
        self.codec = codec
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._there: OrderedDict[bytes, TierEntry | None] = OrderedDict()  # None: only the key is known
        self._absent: OrderedDict[bytes, float] = OrderedDict()  # key → end of trust in its absence
        self._ends: OrderedDict[bytes, float] = OrderedDict()  # key → end of the lifetime, as set by this process
        self._to_delete: OrderedDict[bytes, None] = OrderedDict()  # keys whose removal has not reached the server
        self._some_stay = False  # True if there were too many of them
        self._changing = threading.Lock()  # held while removals are sent or a segment is written
        self._counts = TierCounts()
        self._no_writes_until = 0.0
        self._link = Link(address, self._forget_all, self._delete_again)

    def holds(self, key: bytes) -> bool:
        return self._link.up and key in self._there

    def unsure(self, key: bytes) -> bool:
        known = key in self._there or time.monotonic() < self._absent.get(key, 0.0)
        return self._link.up and not known

    def find(self, keys: Sequence[bytes]) -> None:
        for first in range(0, len(keys), _MOST_KEYS):
            some = keys[first : first + _MOST_KEYS]
            for key, is_there in zip(some, self._link.call(FIND_S, partial(_exist, some)), strict=True):
                self._note(key, is_there)

    def get(self, asked: SegmentRecord, take: Callable[[int, Slab], None], late: Callable[[], bool]) -> None:
        until = time.monotonic() + self._timeout_s

        def over() -> bool:
            return late() or time.monotonic() > until

        def take_finite(layer: int, slab: Slab) -> None:
            # Other writers may not have checked this, and many requests read the pool.
            state = layer == len(asked.layers)
            if not (is_finite_state(slab, asked.state) if state else is_finite(slab, asked.kv_dtype)):
                raise TierMissError(Miss.CORRUPT, f"slab {layer} holds what is no number")
            take(layer, slab)

        try:
            value = _Value(self._link, _name(asked.key), over)
            read_segment(value, asked, take_finite, over)
        except TierMissError as miss:
            self._missed(asked.key, miss)
            raise
        self._counts.add(hits=1, hit_tokens=asked.tokens)
        self._note(asked.key, True, TierEntry.of(asked, value.size, time.time()))

    def put(self, record: SegmentRecord, slabs: Iterable[Slab]) -> bool:
        if self.holds(record.key):
            return True
        if not self._link.up or time.monotonic() < self._no_writes_until or size_of(record) > _MOST_VALUE:
            self._counts.add(refused=1)
            return False
        encoded = Encoded.of(record, slabs)
        try:
            new = self._write(record.key, encoded)
        except TierMissError as miss:
            self._counts.add(refused=1)
            self._no_writes_until = time.monotonic() + (_RETRY_S if self._link.up else 0.0)
            if self._link.up:
                logger.warning("segments are not written to the shared store for a while: %s", miss)
            return False
        if new:
            self._counts.add(writes=1, written_bytes=encoded.size)
        self._note(record.key, True, TierEntry.of(record, encoded.size, time.time()))
        return True

    def _write(self, key: bytes, encoded: Encoded) -> bool:
        """Write a segment; returns True if it is new. A pending removal of the same key is carried out first."""
        left_s = self._left_s(key)
        with self._changing:
            stale = key in self._to_delete
            new = self._link.call(WRITE_S, lambda client: _write(client, _name(key), encoded, left_s, stale))
            if stale:
                with self._lock:
                    self._to_delete.pop(key, None)
        return new

    def delete(self, key: bytes) -> bool:
        with self._lock:
            self._ends.pop(key, None)
        return self._remove(key)

    def _remove(self, key: bytes) -> bool:
        """Remove a value. A later write of the same key keeps its lifetime."""
        with self._lock:
            known = self._there.pop(key, None) is not None
            self._to_delete[key] = None
            self._to_delete.move_to_end(key)
            too_many = len(self._to_delete) > MOST_TO_DELETE
            if too_many:
                self._to_delete.popitem(last=False)
            first, self._some_stay = too_many and not self._some_stay, too_many or self._some_stay
        if first:
            logger.warning(
                "more than %d segments are to be removed from the shared store %s, which cannot be told; "
                "the first of them stay there until it has no room for them",
                MOST_TO_DELETE,
                self._link.name,
            )
        with suppress(TierMissError):
            known = self._link.call(FIND_S, lambda client: bool(client.unlink(_name(key)))) or known
            with self._lock:
                self._to_delete.pop(key, None)
        return known

    def expire(self, key: bytes, ttl_s: float) -> None:
        """See Tier. While the server is unreachable, only later writes get the lifetime."""
        ttl_s = min(ttl_s, _LONGEST_S)
        with self._lock:
            self._ends[key] = max(time.monotonic() + ttl_s, self._ends.get(key, 0.0))
            self._ends.move_to_end(key)
            if len(self._ends) > _MOST_KNOWN:
                self._ends.popitem(last=False)
        with suppress(TierMissError):
            self._link.call(FIND_S, lambda client: _expire(client, _name(key), ttl_s))

    def left_s(self, key: bytes) -> float | None:
        try:
            left_ms = self._link.call(FIND_S, lambda client: int(client.pttl(_name(key))))
        except TierMissError:
            return self._left_s(key)
        return left_ms / 1000 if left_ms >= 0 else None

    def _left_s(self, key: bytes) -> float | None:
        """Seconds until a segment expires, as set by this process; None without a lifetime."""
        with self._lock:
            left_s = self._ends.get(key, 0.0) - time.monotonic()
        return left_s if left_s > 0 else None

    def iterate(self) -> Iterator[TierEntry]:
        """Segments that this process has read or written; the server may have more."""
        with self._lock:
            return iter([entry for entry in self._there.values() if entry is not None])

    def labelled(self, labels: Iterable[bytes]) -> list[TierEntry]:
        """Of segments that this process has read or written."""
        wanted = frozenset(labels)
        return [entry for entry in self.iterate() if not wanted.isdisjoint(entry.labels)]

    @property
    def has_room(self) -> bool:
        """False: the server's free memory is unknown here."""
        return False

    def stats(self) -> TierStats:
        """``segments``, ``tokens`` and ``bytes`` count only what this process has read or written."""
        return self._counts.stats(self.iterate(), up=self._link.up, failures=self._link.failures)

    def close(self) -> None:
        self._link.close()

    def _note(self, key: bytes, is_there: bool, entry: TierEntry | None = None) -> None:
        with self._lock:
            if is_there and key not in self._to_delete:
                known = self._there.get(key)
                if entry is not None and known is not None:
                    entry = replace(entry, created=known.created, uses=known.uses + 1)
                self._there[key] = entry or known
                self._there.move_to_end(key)
                self._absent.pop(key, None)
            else:
                self._there.pop(key, None)
                self._absent[key] = time.monotonic() + ABSENT_S
                self._absent.move_to_end(key)
            for known_keys in (self._there, self._absent):
                if len(known_keys) > _MOST_KNOWN:
                    known_keys.popitem(last=False)

    def _missed(self, key: bytes, miss: TierMissError) -> None:
        self._counts.missed(miss.reason)
        if miss.reason is Miss.ABSENT:
            self._note(key, False)
        if miss.reason is Miss.CORRUPT or isinstance(miss, UnknownFormError):
            logger.warning("%s in the shared store is not used: %s", _name(key), miss)
        if miss.reason is Miss.CORRUPT:
            self._remove(key)

    def _forget_all(self) -> None:
        """Forget which segments are there, because the server may return empty."""
        with self._lock:
            self._there.clear()
            self._absent.clear()

    def _delete_again(self) -> None:
        """Send the pending removals to the server after it has returned."""
        with suppress(TierMissError):
            while True:
                with self._changing:
                    with self._lock:
                        keys = list(islice(self._to_delete, _MOST_KEYS))
                        self._some_stay = self._some_stay and bool(keys)
                    if not keys:
                        return
                    self._link.call(FIND_S, partial(_unlink, keys))
                    with self._lock:
                        for key in keys:
                            self._to_delete.pop(key, None)


class _Value:
    """A value on the server as the bytes of a segment, read in blocks with a deadline each.

    Raises TierMissError. ``over`` returns True once the time for the whole value is over.
    """

    def __init__(self, link: Link, name: str, over: Callable[[], bool]) -> None:
        self._link = link
        self._name = name
        self._over = over
        self._at = 0

        def first(client: Any) -> Any:
            pipeline = client.pipeline(transaction=False)
            pipeline.strlen(name)
            pipeline.getrange(name, 0, BLOCK - 1)
            return pipeline.execute()

        size, self._block = link.call(BLOCK_S, first)
        if not isinstance(size, int) or size < 0:
            raise TierMissError(Miss.CORRUPT, "its length is no number")
        if size == 0:
            raise TierMissError(Miss.ABSENT)
        self.size = size
        self._check(min(size, BLOCK))

    def fill(self, buffer: memoryview, at: int) -> None:
        """See Source."""
        while buffer:
            if not self._at <= at < self._at + len(self._block):
                self._fetch(at)
            begin = at - self._at
            part = self._block[begin : begin + len(buffer)]
            buffer[: len(part)] = part
            buffer, at = buffer[len(part) :], at + len(part)

    def _fetch(self, at: int) -> None:
        length = min(BLOCK, self.size - at)
        if length <= 0:
            raise TierMissError(Miss.CORRUPT, "it ends too early")
        if self._over():
            raise TierMissError(Miss.LATE)
        self._block = self._link.call(BLOCK_S, lambda client: client.getrange(self._name, at, at + length - 1))
        self._at = at
        self._check(length)

    def _check(self, length: int) -> None:
        if self._block == b"":
            raise TierMissError(Miss.ABSENT, "it was removed while it was read")
        if not isinstance(self._block, bytes) or len(self._block) != length:
            raise TierMissError(Miss.CORRUPT, f"{length} bytes of it were asked for, and others came")


def _name(key: bytes) -> str:
    return f"inlay:v{FORM}:{key.hex()}"


def _exist(keys: Sequence[bytes], client: Any) -> list[bool]:
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.exists(_name(key))
    there = pipeline.execute()
    if len(there) != len(keys) or not all(number in (0, 1) for number in there):
        raise ValueError("no answer to EXISTS")
    return [number == 1 for number in there]


def _unlink(keys: Sequence[bytes], client: Any) -> None:
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.unlink(_name(key))
    pipeline.execute()


def _write(client: Any, name: str, encoded: Encoded, left_s: float | None, stale: bool) -> bool:
    """Write a value; returns True if it is new. An existing value stays, because other servers may be reading it.

    ``stale`` is True if the existing value was to be removed.
    """
    if stale:
        client.unlink(name)
    if client.exists(name):
        return False
    data = b"".join((encoded.header, *(slab.data for slab in encoded.slabs)))
    return bool(client.set(name, data, nx=True, px=None if left_s is None else _milliseconds(left_s)))


def _expire(client: Any, name: str, ttl_s: float) -> None:
    """Extend the lifetime of an existing value to ``ttl_s``, unless it already lives longer."""
    left, wanted = client.pttl(name), _milliseconds(ttl_s)
    if left == -1 or 0 <= left < wanted:  # -1: no lifetime set; -2: no such value
        client.pexpire(name, wanted)


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))
