"""What a hub says of a repository: the commit that a revision is now, and its files with sizes and digests. Blocking."""

from __future__ import annotations

import re
from dataclasses import dataclass

from runner.errors import DownloadFailed
from runner.library.choice import RemoteFile
from runner.library.ids import COMMIT
from runner.limits import limits

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of a repository."""

    sha: str
    files: tuple[RemoteFile, ...]


def ask_commit(repo_id: str, revision: str | None, *, endpoint: str, token: str | None, timeout_s: float) -> Commit:
    """Return the commit and its files. Raises DownloadFailed with what would help."""
    # Imported when it is needed: it takes half a second and 30 MB that a box with its own files never has to spend.
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # False keeps the library from sending a token that it finds somewhere on the disk.
    api = HfApi(endpoint=endpoint, token=token or False, library_name="muster")
    try:
        info = api.model_info(repo_id, revision=revision, files_metadata=True, timeout=timeout_s)
    except GatedRepoError:
        raise DownloadFailed(
            f"{repo_id} asks for its terms to be accepted: do so at {endpoint}/{repo_id}, then set HF_TOKEN to a token of the "
            "account that did."
        ) from None
    except RevisionNotFoundError:
        raise DownloadFailed(f"{repo_id} has no revision {revision}.") from None
    except RepositoryNotFoundError:
        raise DownloadFailed(
            f"The hub has no repository {repo_id}, or it is private: then set HF_TOKEN to a token that may read it."
        ) from None
    except HfHubHTTPError as error:
        raise DownloadFailed(
            f"The hub answers {error.response.status_code} when asked for {repo_id}; try again later."
        ) from None
    except (OfflineModeIsEnabled, httpx2.HTTPError, HFValidationError, OSError, ValueError) as error:
        raise DownloadFailed(
            f"The hub at {endpoint} cannot be asked for {repo_id} ({type(error).__name__}). Check the network, HF_ENDPOINT and "
            "HF_HUB_OFFLINE."
        ) from None
    siblings = info.siblings or []
    if not isinstance(info.sha, str) or not COMMIT.fullmatch(info.sha) or len(siblings) > limits().models.listed_files:
        raise DownloadFailed(f"The answer of the hub at {endpoint} about {repo_id} cannot be understood.")
    files = [_read_file(entry.rfilename, entry.size, entry.blob_id, entry.lfs) for entry in siblings]
    return Commit(info.sha, tuple(file for file in files if file is not None))


def file_url(endpoint: str, repo_id: str, commit: str, name: str) -> str:
    """Return where a file of a commit is fetched from."""
    from huggingface_hub import hf_hub_url

    return hf_hub_url(repo_id, name, revision=commit, endpoint=endpoint)


def _read_file(name: object, size: object, blob_id: object, lfs: object) -> RemoteFile | None:
    """Return one file as the hub describes it; one without a size and a digest cannot be checked, so it is none."""
    if isinstance(lfs, dict):
        size, digest, is_lfs, pattern = lfs.get("size"), lfs.get("sha256"), True, _SHA256
    else:
        digest, is_lfs, pattern = blob_id, False, COMMIT
    if not isinstance(name, str) or not isinstance(size, int) or size < 0:
        return None
    if not isinstance(digest, str) or not pattern.fullmatch(digest):
        return None
    return RemoteFile(name, size, digest, is_lfs)
