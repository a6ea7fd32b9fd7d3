"""The settings of a cluster: one YAML file, fully checked before anything starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from inlay.cluster.affinity import RouterSettings
from inlay.config import EngineConfig, ModelSettings
from inlay.errors import ParameterError
from inlay.models.location import served_names
from inlay.server.settings import ServerSettings
from inlay.settings import parse_bytes, settings_of
from inlay.wording import show

_MOST_BYTES = 1_000_000
_MOST_PROBLEMS = 5
# ServerSettings fields that are set elsewhere or not at all
_OURS = ("host", "port", "served_names", "open_to_network", "uds")
_WAITING = 1024  # waiting requests at a replica, as for inlay serve
ROUTERS = ("module", "prefix", "power-of-two", "round-robin")

_Positive = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _SettingsPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ReplicaSettings(_SettingsPart):
    """Replicas of the engine.

    Args:
        count: A fixed number of replicas. Else give min and max.
        min, max: The range for autoscaling.
        target_ongoing_requests: Running requests for each replica.
        kv_pressure: The share of the pools that running requests may need. More replicas start above it.
        cpus, gpus, memory: Resources of one replica. Its passes use as many threads as it has CPUs.
        drain_s: Seconds that requests may continue when a replica is to stop.
        max_ongoing_requests: Requests that a replica accepts. More wait at the ingress.
    """

    count: _Positive | None = None
    min: _Positive | None = None
    max: _Positive | None = None
    target_ongoing_requests: Annotated[float, Field(gt=0)] = 16.0
    kv_pressure: Annotated[float, Field(gt=0, le=1)] = 0.8
    upscale_delay_s: _Seconds = 10.0
    downscale_delay_s: _Seconds = 300.0
    cpus: Annotated[float, Field(gt=0)] = 1.0
    gpus: Annotated[float, Field(ge=0)] = 0.0
    memory: str | int | None = None
    drain_s: _Seconds = 60.0
    max_ongoing_requests: _Positive = 1024
    env: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_way(self) -> ReplicaSettings:
        if self.count is not None and (self.min is not None or self.max is not None):
            raise ValueError("give count, or min and max")
        if (self.min is None) != (self.max is None) or (self.min or 1) > (self.max or 1 << 30):
            raise ValueError("give min and max together, and min no more than max")
        if self.memory is not None:
            parse_bytes("memory", self.memory)
        return self

    @property
    def fixed(self) -> int | None:
        """The number of replicas, or None with autoscaling."""
        return None if self.max is not None else self.count or 1

    @property
    def most(self) -> int:
        """The largest number of replicas."""
        return self.max or self.count or 1


class IngressSettings(_SettingsPart):
    """Ingresses, which receive requests. count: how many. cpus: of each one."""

    count: _Positive = 1
    cpus: Annotated[float, Field(gt=0)] = 1.0
    drain_s: _Seconds = 60.0
    max_ongoing_requests: _Positive = 10_000


class RouterPart(_SettingsPart):
    """The choice of a replica.

    Args:
        kind: One of ROUTERS.
        memory: For the residency map.
        The others: See RouterSettings.
    """

    kind: str = "module"
    memory: str | int = "1GiB"
    credit_below: float = RouterSettings.credit_below
    bound: float = RouterSettings.bound
    memory_s: float = RouterSettings.memory_s
    home: float = RouterSettings.home
    balance: float = RouterSettings.balance
    stalled_s: float = RouterSettings.stalled_s

    @model_validator(mode="after")
    def _checked(self) -> RouterPart:
        if self.kind not in ROUTERS:
            raise ValueError(f"kind is {self.kind!r:.40}; use one of {', '.join(ROUTERS)}")
        self.settings()
        if self.max_bytes < 2**20:
            raise ValueError("memory is less than 1MiB; give the router more")
        return self

    @property
    def max_bytes(self) -> int:
        return parse_bytes("memory", self.memory)

    def settings(self) -> RouterSettings:
        names = ("credit_below", "bound", "memory_s", "home", "balance", "stalled_s")
        return RouterSettings(**{name: getattr(self, name) for name in names})


class SchemaSettings(_SettingsPart):
    """Schemas of the cluster.

    Args:
        folder: Shared by all ingresses. None keeps schemas in the process.
        files: Schemas to load at the start.
    """

    folder: Path | None = None
    files: tuple[Path, ...] = ()


class HTTPSettings(_SettingsPart):
    """The address of Ray Serve's proxies. open_to_network: allow access from other machines without API keys."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    open_to_network: bool = False


class ClusterSettings(_SettingsPart):
    """The settings of a cluster. ``read`` and ``of`` raise ParameterError.

    Args:
        name: Name of the application on Ray Serve.
        model: A directory or hub name that every node has, random:<shape>, or demo.
        served_names: The model names that requests may use.
        engine: LLM options of every replica.
        server: ServerSettings of every ingress.
    """

    model: Annotated[str, Field(pattern=r"\S")] = "demo"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")] = "inlay"
    route_prefix: Annotated[str, Field(pattern=r"^/$|^(/[\w.~-]+)+$")] = "/"
    served_names: tuple[str, ...] = ()
    engine: dict[str, Any] = Field(default_factory=dict)
    server: dict[str, Any] = Field(default_factory=dict)
    replicas: ReplicaSettings = ReplicaSettings()
    ingress: IngressSettings = IngressSettings()
    router: RouterPart = RouterPart()
    schemas: SchemaSettings = SchemaSettings()
    http: HTTPSettings = HTTPSettings()

    @model_validator(mode="after")
    def _checked(self) -> ClusterSettings:
        engine = EngineConfig.of(_plain(self.engine))
        for name, given in (("shadow", engine.shadow), ("measure", engine.measure == "auto")):
            if given:
                raise ValueError(
                    f"engine: {name} compares answers of one engine, and a cluster has several; leave it out"
                )
        self._check_adapters()
        self.server_settings()
        if self.ingress.count > 1 and self.schemas.folder is None:
            raise ValueError("several ingresses need schemas: folder, which all of them see, to know the same schemas")
        return self

    def _check_adapters(self) -> None:
        given = self.engine.get("adapters", {})
        if not isinstance(given, dict) or not all(isinstance(folder, str) for folder in given.values()):
            raise ValueError(f"engine: adapters is {show(given)}; give names with folders, as in {{sql: adapters/sql}}")
        for name in given:
            if name in served_names(self.model, self.served_names):
                raise ValueError(f"engine: an adapter and the model are called {show(name)}; give each its own name")

    @classmethod
    def read(cls, path: Path) -> ClusterSettings:
        """Read a YAML file. Paths in it are relative to its folder."""
        try:
            with path.open("rb") as file:
                said = yaml.safe_load(file.read(_MOST_BYTES).decode())
        except OSError as error:
            raise ParameterError(
                f"{path}: cannot be read ({error.strerror}); check the path", code="cluster.unreadable_config"
            ) from None
        except UnicodeDecodeError:
            raise ParameterError(
                f"{path}: it is not UTF-8; save it as UTF-8", code="cluster.unreadable_config"
            ) from None
        except (yaml.YAMLError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark is not None else str(path)
            raise ParameterError(
                f"{where}: this is no YAML ({getattr(error, 'problem', error)}); correct it",
                code="cluster.unreadable_config",
            ) from None
        return cls.of(said if said is not None else {}, str(path)).beside(path.parent)

    @classmethod
    def of(cls, said: object, source: str = "the configuration") -> ClusterSettings:
        if not isinstance(said, Mapping):
            raise ParameterError(
                f"{source}: a cluster is a mapping, such as 'model: demo'; see docs/guides/clusters.md",
                code="cluster.invalid_setting",
            )
        try:
            return cls.model_validate_json(_as_json(said))
        except ValidationError as error:
            problems = [_sentence(one) for one in error.errors(include_url=False)[:_MOST_PROBLEMS]]
            raise ParameterError(f"{source}: {'; '.join(problems)}", code="cluster.invalid_setting") from None

    def beside(self, folder: Path) -> ClusterSettings:
        """Return the settings with paths relative to ``folder`` made absolute."""
        given = self.schemas
        where = given.folder and folder.absolute() / given.folder.expanduser()
        files = tuple(folder.absolute() / file.expanduser() for file in given.files)
        server = dict(self.server)
        if server.get("keys_file"):
            server["keys_file"] = str(folder.absolute() / Path(server["keys_file"]).expanduser())
        engine = dict(self.engine)
        if adapters := engine.get("adapters"):
            engine["adapters"] = {name: str(folder.absolute() / Path(at).expanduser()) for name, at in adapters.items()}
        schemas = given.model_copy(update={"folder": where, "files": files})
        return self.model_copy(update={"schemas": schemas, "server": server, "engine": engine})

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that ``of`` reads."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def engine_settings(self) -> dict[str, Any]:
        """The options of every replica's AsyncLLM, except its model."""
        keyed = {"store_private": False} if self.server_settings().has_keys else {}
        return {"max_waiting": _WAITING, **keyed, **self.engine}

    def prompt_settings(self) -> dict[str, Any]:
        """Return the options for preparing prompts. Slots and queue are those of all replicas together."""
        said: dict[str, Any] = {
            name: self.engine[name]
            for name in ("reuse", "tolerance", "positions", "placeholders", "template_date", "store_codec")
            if name in self.engine
        }
        config = EngineConfig.of({**_plain(self.engine), "max_waiting": self.engine_settings()["max_waiting"]})
        waiting = None if config.max_waiting is None else config.max_waiting * self.replicas.most
        return {**said, "max_num_seqs": config.max_num_seqs * self.replicas.most, "max_waiting": waiting}

    def server_settings(self) -> ServerSettings:
        """Return the server settings of every ingress."""
        known = [name for name in settings_of(ServerSettings) if name not in _OURS]
        for name in self.server:
            if name not in known:
                raise ParameterError(
                    f"server: there is no setting {name!r:.60}; there are {', '.join(known)}",
                    code="cluster.unknown_setting",
                )
        said = dict(self.server)
        for name in ("api_keys", "cors_origins"):
            if name in said:
                said[name] = tuple(said[name])
        if said.get("keys_file"):
            said["keys_file"] = Path(said["keys_file"])
        root = "" if self.route_prefix == "/" else self.route_prefix
        local = self.http.host in ("127.0.0.1", "localhost", "::1")
        settings = ServerSettings(
            served_names=served_names(self.model, self.served_names),
            open_to_network=self.http.open_to_network or not local,
            **{"root_path": root, **said},
        )
        if not (local or settings.has_keys or self.http.open_to_network):
            raise ParameterError(
                f"http: {self.http.host} can be reached from other machines, and without keys everybody there may use "
                "the model; give server: keys_file, or http: open_to_network: true if that is meant",
                code="cluster.open_without_keys",
            )
        return settings


def _plain(engine: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in engine.items() if name not in settings_of(ModelSettings)}


def _as_json(said: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(said).encode()
    except (TypeError, ValueError) as error:
        raise ParameterError(
            f"the configuration has a value that is no plain data ({error}); write texts in quotes",
            code="cluster.invalid_setting",
        ) from None


def _sentence(error: Any) -> str:
    place = ".".join(map(str, error["loc"]))
    said = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"there is no setting {place}; see docs/guides/clusters.md"
    return f"{place}: {said}" if place else said
