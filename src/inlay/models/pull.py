"""Downloads models from the hub: only the files that a model needs, and no model that would be refused."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import AutoConfig

from inlay.errors import ModelError
from inlay.models.families import check_config
from inlay.models.location import hub_file, part_names
from inlay.models.multimodal import text_config
from inlay.wording import first_line

#: Weights without pickles, configurations, tokenizers and chat templates.
_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "vocab.txt", "merges.txt")
_APART = ("*/*",)  # folders hold other forms of the same weights
PATIENCE_S = 10.0  # seconds between two log lines while the hub does not answer; its client tries for minutes

logger = logging.getLogger(__name__)


def pull(name: str, revision: str | None = None) -> Path:
    """Download a model from the hub, or its missing files, into the hub's local cache.

    An interrupted download is resumed. Progress is written to standard error.

    Args:
        name: Name on the hub, such as ``Qwen/Qwen2.5-0.5B``, or a GGUF file there, such as ``owner/name/file.gguf``.
        revision: A branch, tag or commit. None: the main branch.

    Returns:
        The folder of the model, or the file.

    Raises:
        ModelError: If the model would be refused, or the hub does not provide it.
    """
    if (named := hub_file(name)) is not None:
        return _pull_file(name, *named, revision)
    try:
        with waiting(name):
            folder = Path(hf_hub_download(name, "config.json", revision=revision)).parent
        check_config(text_config(AutoConfig.from_pretrained(folder, trust_remote_code=False)))
        wanted, apart = list(_PATTERNS), list(_APART)
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=apart))
    except ModelError as error:
        raise ModelError(f"{name}: {error}", code=error.code) from error
    except Exception as error:  # errors of the network, the hub or the disk
        raise ModelError(
            f"{name} {hub_reason(error, revision) or _other_reason(error)}", code="model.not_pulled"
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{name} has no weights in safetensors, and pickled ones are not loaded, as they can run any code; "
            "give a revision that has them, or convert them with transformers' save_pretrained",
            code="model.pickled_weights",
        )
    return folder


def _pull_file(name: str, repository: str, file: str, revision: str | None) -> Path:
    """Download a GGUF file, and the other parts of a split one. Returns the first."""
    try:
        paths = [Path(hf_hub_download(repository, part, revision=revision)) for part in part_names(file)]
    except Exception as error:
        raise ModelError(
            f"{name} {hub_reason(error, revision) or _other_reason(error)}", code="model.not_pulled"
        ) from error
    return paths[0]


@contextmanager
def waiting(name: str) -> Iterator[None]:
    """Log a warning every 10 seconds while the hub does not answer, unless the name is that of a folder."""
    if Path(name).is_dir():
        yield
        return
    began, answered = time.monotonic(), threading.Event()

    def tell() -> None:
        while not answered.wait(PATIENCE_S):
            logger.warning(
                "still waiting for the Hugging Face hub to answer for %s (%.0f s so far); with HF_HUB_OFFLINE=1 only "
                "what is on this machine counts",
                name,
                time.monotonic() - began,
            )

    threading.Thread(target=tell, name="hub", daemon=True).start()
    try:
        yield
    finally:
        answered.set()


def hub_reason(error: BaseException | None, revision: str | None = None) -> str | None:
    """Return why the hub's client found nothing under a name, with the remedy. None for other errors.

    The text continues a sentence that begins with the name ("is …", "has …").

    Args:
        error: An error of the client, or an error with such an error among its causes.
        revision: The requested branch, tag or commit, for the text. None: the main branch.
    """
    while error is not None and (said := _said(error, revision)) is None:
        error = error.__cause__ or error.__context__
    return None if error is None else said


def _said(error: BaseException, revision: str | None) -> str | None:
    match error:
        case GatedRepoError():
            return "asks for its terms to be accepted on its page first; then log in with `hf auth login`"
        case RepositoryNotFoundError():
            return "is not on the hub, or is private; write OWNER/NAME as on its page, or log in with `hf auth login`"
        case EntryNotFoundError() if not isinstance(error, LocalEntryNotFoundError):
            return (
                "has no such file; give the name of a repository with a config.json and weights in safetensors, or of "
                "a GGUF file in one: OWNER/NAME/FILE.gguf"
            )
        case RevisionNotFoundError():
            return f"has no revision {revision!r}; use a branch, a tag or a commit of its page"
        case HFValidationError():
            return "is no name of a model on the hub; write OWNER/NAME as on its page"
        case OfflineModeIsEnabled() | LocalEntryNotFoundError() | ConnectionError():
            return (
                "is not on this machine and the hub cannot be reached; run `inlay pull` where it can, and copy the "
                "folder that it prints, or use 'demo'"
            )
    return None


def _other_reason(error: Exception) -> str:
    return f"could not be downloaded: {first_line(error)}; what is here already is kept, so try again"
