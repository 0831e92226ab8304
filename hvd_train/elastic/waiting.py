"""When a job that waits for workers says so, and in which words. Pure."""

from __future__ import annotations

from dataclasses import dataclass

SOON_S = 5.0  # where more hosts are needed, or workers keep dying
EVERY_S = 60.0  # again; and first, where all that is missing is that workers build


@dataclass(frozen=True)
class Wait:
    """What a job that cannot form a world has, and what it needs."""

    ready: int
    """Workers that wait for the world, survivors of the last one among them."""
    starting: int
    """Workers that import and build."""
    slots: int
    """Slots of all hosts that are listed."""
    wanted: int
    """Workers that the next world waits for: those of `-np` for the first one, of `--min-np` later."""
    least: int
    """Workers without which there is no world (`--min-np`)."""
    is_first: bool
    """Whether the job has had no world yet."""
    starts_in_s: float
    """Seconds until the first world no longer waits for more than `least` workers; below 0 where it does not now."""
    ends_in_s: float
    """Seconds until the job ends where `least` workers are not in sight."""

    def is_due(self, waited_s: float, told_s: float | None) -> bool:
        """Return whether to speak of it after `waited_s` seconds, `told_s` after the last time (None: not yet)."""
        if told_s is not None:
            return told_s >= EVERY_S
        return waited_s >= (SOON_S if self.ready + self.starting < self.wanted else EVERY_S)

    def describe(self) -> str:
        """Return the line for the user: what there is, until when the job waits, and what to type."""
        line = f"waiting for workers: {self.ready} of {self.wanted} are ready"
        line += f", {self.starting} {'is' if self.starting == 1 else 'are'} starting" if self.starting else ""
        line += f"; the hosts have {self.slots} slot{'' if self.slots == 1 else 's'}"
        if self.ready + self.starting < self.least:
            line += f"; if there are fewer than {self.least} in {self.ends_in_s:.0f} s, the job ends"
        elif self.is_first and self.starts_in_s > 0:
            line += f"; in {self.starts_in_s:.0f} s the training starts with those that are ready"
        if self.slots >= self.wanted:
            return line
        flags = [f"-np {self.slots}"] if self.is_first else []
        flags += [f"--min-np {self.slots}"] if self.slots < self.least else []
        return f"{line}. Add hosts to the list" + (f", or give {' '.join(flags)}" if self.slots else "")
