"""Whether a trace's arrays have the content hash that its attributes state: what results are kept under."""

from __future__ import annotations

import shlex

from traces.errors import TraceError
from traces.file_group import FileGroup
from traces.reader import open_trace


def require_content(location: str) -> None:
    """Read every array of the trace at `location` (folder, zip or URL) and compare the content hashes of its requests.

    A request that states no hash has the one of its arrays. Raises TraceError in one line, also for arrays that cannot
    be read; ranges and sums are `check_trace`'s.
    """
    trace = open_trace(location)
    hint = f"; oasis-sim trace check {shlex.quote(trace.file)} reads all of it"
    for name in trace.group_names:
        group = trace.group(name)
        if not isinstance(group, FileGroup) or group.attributes.content_hash is None:
            continue
        try:
            computed = group.computed_hash()
        except TraceError as error:
            raise TraceError(error.file, error.array, error.problem + hint, error.index) from error
        if computed != group.attributes.content_hash:
            problem = "the arrays do not have the content hash that it states: they were changed or damaged"
            raise TraceError(trace.file, f"{name}/zarr.json", problem + hint)
