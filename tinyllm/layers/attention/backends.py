"""The attention bodies by name."""

from functools import partial

from tinyllm.errors import ConfigError
from tinyllm.layers.attention import AttendBatch, per_request, reference, sdpa

BACKENDS: dict[str, AttendBatch] = {
    "reference": partial(per_request.attend_batch, attend=reference.attend),
    "sdpa": partial(per_request.attend_batch, attend=sdpa.attend),
}
FAST_BACKENDS = frozenset({"sdpa"})  # the engine switches shape checks off around their steps


def find_backend(name: str) -> AttendBatch:
    """The attend_batch body called `name`; ConfigError lists the known ones."""
    if name not in BACKENDS:
        raise ConfigError(f"attention backend {name!r} is unknown; expected one of {', '.join(BACKENDS)}")
    return BACKENDS[name]
