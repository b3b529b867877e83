"""A profiler described before it exists."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity

from ..errors import SettingError
from ..names import PROFILE_PATTERN_NAME
from ..settings.ddp import ProfileOptions
from .base import KwargsHandler


@dataclass
class ProfileKwargs(ProfileOptions, KwargsHandler):
    """Arguments of ``torch.profiler.profile``, with activities by name and the schedule as a dictionary.

    ``schedule_option`` takes ``wait``, ``warmup``, ``active``, ``repeat`` and ``skip_first``. With
    ``output_trace_dir`` each process writes its Chrome trace there when the profile ends.
    """

    def _get_profiler_activity(self, activity: str) -> ProfilerActivity:
        """The activity of this name in the installed torch."""
        # What this torch build can record, whatever it calls it: a new device needs no line here.
        known = {name.lower(): member for name, member in ProfilerActivity.__members__.items()}
        if activity not in known:
            raise SettingError(
                f"ProfileKwargs(activities=[{activity!r}]): this torch records none of that name. "
                f"It knows: {', '.join(sorted(known))}."
            )
        return known[activity]

    def build(self) -> torch.profiler.profile:
        """A new profiler, not started yet."""
        activities = None if self.activities is None else [self._get_profiler_activity(one) for one in self.activities]
        schedule = None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option)
        return torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    @contextmanager
    def record(self, rank: int) -> Iterator[torch.profiler.profile]:
        """Profile the block, and write the trace of this ``rank`` into ``output_trace_dir`` if there is one."""
        with self.build() as profiler:
            yield profiler
        if self.output_trace_dir is not None:
            os.makedirs(self.output_trace_dir, exist_ok=True)
            name = PROFILE_PATTERN_NAME.format(suffix=rank)
            profiler.export_chrome_trace(os.path.join(self.output_trace_dir, name))
