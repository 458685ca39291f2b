"""Where a Hugging Face configuration is: in a folder, on the Hub, or in the local cache of the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from normlab.errors import UserError, in_one_line

CONFIGURATION: Final = "config.json"
EXAMPLES: Final = "hf:configs/my-llama for a folder, hf:Qwen/Qwen3-0.6B for a model on the Hub"


def folder_of(source: str) -> Path:
    """Return the folder that holds the ``config.json`` of a folder or of a model on the Hub, ``ORG/NAME``.

    The configuration alone is downloaded, and only if it is newer than the one in the cache. Without network,
    or without access, the cached one is used. Raises UserError if there is neither.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder
    import huggingface_hub as hub
    from huggingface_hub import errors
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(source)
    except errors.HFValidationError as error:
        raise UserError(f"there is no folder {source}; type {EXAMPLES}") from error
    try:
        # This asks once. Without a network, a download would go on asking for half a minute.
        hub.get_hf_file_metadata(hub.hf_hub_url(source, CONFIGURATION))
        return Path(hub.hf_hub_download(source, CONFIGURATION)).parent
    except Exception as error:  # of the network, the Hub, or the disk
        cached = hub.try_to_load_from_cache(source, CONFIGURATION)
        if isinstance(cached, str):
            return Path(cached).parent
        raise UserError(_reason(source, error)) from error


def _reason(name: str, error: Exception) -> str:
    """Say why the Hub gives no configuration, and what to do."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        page = f"https://huggingface.co/{name}"
        return f"{name} is gated: accept its conditions at {page}, and type: hf auth login"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"the Hub has no model {name} that you may read, and there is no such folder; look for a typo, "
            "or type hf auth login if it is private"
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return f"{name} has no {CONFIGURATION} on the Hub; save its configuration in a folder, and name that"
    return (
        f"there is no folder {name}, the local cache has no model of that name, and the Hub cannot be asked "
        f"({in_one_line(error)}); connect to the network, or name a folder that holds a {CONFIGURATION}"
    )
