"""Model ids of the Hugging Face hub: ``owner/name`` to a directory, through the hub's own client and cache.

Only what the engine reads is fetched: configuration, tokenizer, safetensors. Never a pickle, never code.
"""

from __future__ import annotations

import re
from pathlib import Path

from pico_vllm.errors import ConfigError

_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PATTERNS = ("*.json", "*.jinja", "*.safetensors")


def is_hub_id(model: str) -> bool:
    """Whether a name has the form ``owner/name``."""
    return _REPO_ID.fullmatch(model) is not None and not model.startswith((".", "/"))


def fetch_from_hub(repo_id: str, revision: str | None = None) -> Path:
    """Download a model, or find it in the hub client's cache.

    Args:
        repo_id: ``owner/name``.
        revision: branch, tag or commit; None = the default branch.

    Returns:
        The snapshot directory.

    Raises:
        ConfigError: the model is missing, gated or has no such revision, or there is no network and no cached copy;
            says what to do.
    """
    import huggingface_hub
    from huggingface_hub import errors

    what = f"model {repo_id!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=list(_PATTERNS)))
    except errors.GatedRepoError:
        raise ConfigError(
            f"{what} is gated: accept its terms on the hub, then log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{what} does not exist: the hub has the model but not this revision") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{what} does not exist on the hub, or is private: check the spelling, or log in with `hf auth login`"
        ) from None
    except errors.HFValidationError as error:
        raise ConfigError(f"{what} is not a valid hub id: {error}") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise ConfigError(
            f"{what} is not in the local hub cache and the hub cannot be reached: connect once, or give a directory "
            "with config.json and *.safetensors"
        ) from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise ConfigError(f"{what} could not be fetched: {str(error).splitlines()[0]}") from None
