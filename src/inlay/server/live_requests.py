"""The running requests for answers of each tenant, and its latest ended requests, for ``/v1/requests``.

A row has counts and times. It never has a prompt or an answer.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from inlay.api.call import Call
from inlay.api.failures import Failure
from inlay.api.pieces import inlay_of

if TYPE_CHECKING:
    from inlay.server.limits import Tenant
    from inlay.server.metrics import RequestUsage

#: Ended requests that are kept for one tenant, and the tenants with kept requests.
ENDED, TENANTS = 30, 500

Row = dict[str, Any]

_COUNTS = ("exact_tokens", "module_tokens", "shifted_tokens", "recomputed_tokens", "computed_tokens")
_CLIENT_LEFT = 499


class CheckedRequest(Protocol):
    """A checked request; see ``completions.ServerRequest``."""

    @property
    def call(self) -> Call: ...

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def reuse(self) -> str: ...

    @property
    def arrival(self) -> float: ...


@dataclass(eq=False, slots=True)
class LiveRequest:
    """A request for answers that is running.

    Args:
        endpoint: the path of its route.
        tenant: the caller.
        usage: its outputs so far.
        request: the checked request; None until its body is translated.
        created: the arrival, in seconds since 1970.
        began: the arrival, on the clock of ``time.perf_counter``.
    """

    endpoint: str
    tenant: Tenant
    usage: RequestUsage
    request: CheckedRequest | None = None
    created: float = field(default_factory=time.time)
    began: float = field(default_factory=time.perf_counter)

    @property
    def arrival(self) -> float:
        """When the whole body had arrived, on the clock of ``time.perf_counter``."""
        return self.began if self.request is None else self.request.arrival

    def row(self, failure: Failure | None = None, *, ended: bool = False) -> Row:
        """Return the request as an entry of a list. ``failure`` is the error that ended it."""
        outputs, request = self.usage.outputs, self.request
        told = inlay_of(outputs)
        state, status = "waiting" if not self.usage.said else "generating", None
        if ended:
            whole = bool(outputs) and all(output.finished for output in outputs)
            state = "ended"
            status = failure.status if failure is not None else 200 if whole else _CLIENT_LEFT
        return {
            "id": None if request is None else request.name,
            "endpoint": self.endpoint,
            "tenant": self.tenant.name,
            "model": None if request is None else request.model,
            "reuse": told["reuse"] or (None if request is None else request.reuse),
            "stream": None if request is None else request.call.stream,
            "state": state,
            "status": status,
            "error": None if failure is None else failure.name,
            "created": int(self.created),
            "seconds": round(time.perf_counter() - self.arrival, 3),
            "prompts": None if request is None else len(request.call.prompts),
            "prompt_tokens": sum(output.usage.prompt_tokens for output in outputs) if outputs else None,
            **{name: told[name] if outputs else None for name in _COUNTS},
            "generated_tokens": self.usage.said,
            "timing": told["timing"],
        }


class LiveRequests:
    """The running requests of one server, and the latest ended ones of each tenant. Use it from one event loop.

    ``ENDED`` rows are kept for each tenant, and ``TENANTS`` tenants have kept rows.
    """

    def __init__(self) -> None:
        self._running: dict[LiveRequest, None] = {}  # in the order of arrival
        self._ended: OrderedDict[str, deque[Row]] = OrderedDict()  # by owner, the latest one last

    def begin(self, endpoint: str, tenant: Tenant, usage: RequestUsage) -> LiveRequest:
        """Add a request that has arrived. Call ``end`` once."""
        live = LiveRequest(endpoint, tenant, usage)
        self._running[live] = None
        return live

    def end(self, live: LiveRequest, failure: Failure | None) -> Row:
        """Move a request to the ended ones; returns its row.

        ``failure`` is the error that replaced or ended its answer.
        """
        del self._running[live]
        owner = live.tenant.owner
        rows = self._ended.setdefault(owner, deque(maxlen=ENDED))
        row = live.row(failure, ended=True)
        rows.append(row)
        self._ended.move_to_end(owner)
        if len(self._ended) > TENANTS:
            self._ended.popitem(last=False)
        return row

    def rows(self, tenant: Tenant) -> Iterator[Row]:
        """Yield the tenant's running requests, oldest first, then its ended ones, latest first.

        An admin gets those of all tenants.
        """
        for live in self._running:
            if tenant.admin or live.tenant.owner == tenant.owner:
                yield live.row()
        if tenant.admin:
            kept = chain.from_iterable(self._ended.values())
            yield from sorted(kept, key=lambda row: row["created"] + row["seconds"], reverse=True)
        else:
            yield from reversed(self._ended.get(tenant.owner, ()))
