"""Pass horovodrun's environment to ranks without putting it on a command line.

A rank on horovodrun's own host inherits everything, as a child process does. Other hosts get the variables that
training needs and the ones that HVD_TRAIN_ENV names, through ssh's standard input. Every user of a host can read
command lines, and an environment may hold the keys of a cloud account.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from shlex import quote

from horovod.runner.common.util import env as env_util
from horovod.runner.common.util.outcome import JobFailedError

MORE = "HVD_TRAIN_ENV"

_NAMES = (
    *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR", "XDG_CACHE_HOME", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("OPAL_PREFIX", "CC", "CXX", "GLIBC_TUNABLES", "LANG", "LANGUAGE", "TZ"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY"),
)
_PREFIXES = (
    *("HOROVOD_", "HVD_TRAIN_", "NCCL_", "GLOO_", "CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_"),
    *("PYTHON", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "LC_"),
    *("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "UCX_", "FI_", "I_MPI_", "MPICH_"),
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_COMMAND_ON_OTHER_HOST = 'cd {folder} > /dev/null 2>&1 ; eval "$(cat)"'


def for_this_host(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank on this host: horovodrun's own with these variables."""
    return {**os.environ, **variables}


def for_other_hosts(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a rank on another host gets.

    Raises JobFailedError if HVD_TRAIN_ENV does not hold names.
    """
    more = _named_in(variables.get(MORE, ""))
    return {
        name: value
        for name, value in variables.items()
        if (name in _NAMES or name.startswith(_PREFIXES) or name in more)
        and _NAME.fullmatch(name)
        and env_util.is_exportable(name)
    }


def _named_in(text: str) -> frozenset[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if not _NAME.fullmatch(name):  # it may hold a value, which must not be printed
            shown = name.partition("=")[0]
            raise JobFailedError(f"{MORE} takes names of variables with commas between them, not values: {shown!r}", 2)
    return frozenset(names)


def on_other_host(command: str, variables: Mapping[str, str], folder: str) -> tuple[str, bytes]:
    """Return the command line for a shell on another host, and its standard input.

    `command`, a line for a shell, runs there in this folder with these variables and an empty standard input. If the
    input is cut off, the closing brace is missing and nothing runs.
    """
    exports = [f"export {name}={quote(value)}" for name, value in variables.items()]
    text = "\n".join(["{", *exports, f"{command} < /dev/null", "}", ""])
    script = _COMMAND_ON_OTHER_HOST.format(folder=quote(folder))
    return f"exec sh -c {quote(script)}", os.fsencode(text)
