"""Checkpoints on the Hugging Face hub, through its own client and its own cache (`HF_HOME`), so that what other tools
downloaded is not downloaded again. Runs in the launching process."""

import io
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] - base of whichever HTTP client the library uses
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm as hub_tqdm

from mstar.model.loader.checkpoint_spec import HubId
from mstar.model.loader.errors import CheckpointError
from mstar.model.loader.progress import ByteProgress

# Weights, configuration and tokenizer of a model directory; the original/ and onnx/ folders repeat the weights.
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_UNWANTED = ["original/*", "onnx/*", "consolidated*", "openvino/*"]
_BYTES_BAR = "huggingface_hub.snapshot_download"


def fetch_snapshot(hub: HubId, *, progress: ByteProgress | None, is_local: bool = False) -> Path:
    """The local directory with the repository's files; with `is_local`, or without a network, one downloaded before.

    Raises:
        CheckpointError: there is no such repository or revision, it needs a login, or the hub cannot be reached and
            the repository was never downloaded here.
    """
    asked = f"hub checkpoint {hub.repo}" + (f" at revision {hub.revision}" if hub.revision else "")
    try:
        directory = huggingface_hub.snapshot_download(
            hub.repo,
            revision=hub.revision,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            local_files_only=is_local,
            tqdm_class=_silent_bar(f"downloading {hub.repo}", progress),
        )
    except GatedRepoError as error:
        raise CheckpointError(
            f"{asked}: access is restricted. Accept its terms at https://huggingface.co/{hub.repo}, then run "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{asked}: the repository has no such revision") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{asked}: the hub has no such public repository. Check the spelling; a private one needs `hf auth login`. "
            "For a local directory give a path that exists"
        ) from error
    except HfHubHTTPError as error:
        raise CheckpointError(f"{asked}: the hub answered with an error: {error}") from error
    except (OSError, ValueError, HTTPError) as error:
        raise CheckpointError(
            f"{asked}: not downloaded on this machine, and the hub cannot be reached ({type(error).__name__}: "
            f"{_first_line(error)}). Connect to the network (and unset HF_HUB_OFFLINE if it is set), or download the "
            "repository elsewhere and give its directory as checkpoint"
        ) from error
    return Path(directory)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


class _Nowhere(io.TextIOBase):
    def write(self, text: str, /) -> int:
        return len(text)


def _silent_bar(label: str, progress: ByteProgress | None) -> type[hub_tqdm]:
    """The client reports through a tqdm class. This one draws nothing and passes on the bar that counts bytes."""

    class SilentBar(hub_tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("name") == _BYTES_BAR and kwargs.get("unit") == "B"
            # A disabled bar does not count, so it draws into nothing instead.
            kwargs.update(file=_Nowhere(), disable=False)
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self._counts_bytes and progress is not None:
                progress(label, int(self.n), int(self.total) if self.total else None)
            return shown

    return SilentBar
